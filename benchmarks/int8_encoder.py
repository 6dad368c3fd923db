"""minilm in float32, int8 and, where it is fast, bfloat16, compared with ONNX Runtime: speed and vectors.

python -m benchmarks.int8_encoder [--seconds 20] [--threads 1] [--cpu-time]
python -m benchmarks.wic --dtype int8

The input is 256 sentences of mixed length in batches of 32, in random order. ONNX Runtime (`pip install onnx
onnxruntime`) runs the model exported by torch, optimized for BERT, with dynamically quantized linear layers;
its batches are padded. Times are from token ids to sentence vectors, without the tokenizer.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.encoders import BATCH, _hugging_face, sentences
from benchmarks.harness import time_calls
from benchmarks.peers import skip
from regard.models.configs import Precision
from regard.models.encoders.pretrained import PretrainedEncoder, load_encoder
from regard.models.inference.quantization import multiplies_bfloat16
from regard.models.packed import Packed

Encode = Callable[[], Tensor]  # the vectors of all sentences
_INPUTS = ("input_ids", "attention_mask")


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.int8_encoder", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20.0, help="time for all measurements")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cpu-time", action="store_true", help="compare CPU times")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    dtypes: tuple[Precision, ...] = ("float32", "int8", *(("bfloat16",) if multiplies_bfloat16() else ()))
    encoders = {dtype: load_encoder("minilm", dtype=dtype) for dtype in dtypes}
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        calls: dict[str, Encode] = {
            f"regard, {dtype}": partial(_encode, encoder, batches(encoder))
            for dtype, encoder in encoders.items()
        }
        calls |= onnx_runtime(Path(folder), args.threads)
        report(calls, args.seconds, time.process_time if args.cpu_time else time.perf_counter)


def report(calls: dict[str, Encode], seconds: float, clock: Callable[[], float]) -> None:
    """Print sentences per second, and the similarity to the vectors of regard in float32."""
    expected = next(iter(calls.values()))()
    measured = time_calls(calls, seconds, clock=clock)
    times = {name: statistics.median(values) for name, values in measured.items()}
    n, peers = len(sentences()), [name for name in times if "int8" in name and "regard" not in name]
    for name, call in calls.items():
        cosines = (call() * expected).sum(-1)
        print(
            f"{name:32} {n / times[name]:7.0f} sentences/s   cosine: mean {cosines.mean():.5f}, lowest "
            f"{cosines.min():.5f}"
        )
    for peer in peers:
        print(f"regard, int8: {times[peer] / times['regard, int8']:.2f} × {peer}")


def batches(encoder: PretrainedEncoder) -> list[Packed]:
    """Return the sentences in packed batches of 32."""
    ids = encoder.tokenizer.ids(sentences())
    return [Packed.of(ids[i : i + BATCH]) for i in range(0, len(ids), BATCH)]


def _encode(encoder: PretrainedEncoder, parts: list[Packed]) -> Tensor:
    means = [x.float().mean(0) for packed in parts for x in packed.split(encoder(packed))]
    return F.normalize(torch.stack(means), dim=-1)


def onnx_runtime(folder: Path, threads: int) -> dict[str, Encode]:
    """Export minilm to ONNX; return calls in float32 and int8. Empty without onnx and onnxruntime."""
    try:
        import onnx
        import onnxruntime
        from onnxruntime.quantization import QuantType, quantize_dynamic
        from onnxruntime.transformers import optimizer
    except ImportError as error:
        skip("ONNX Runtime", f"is not available: {error}")
        return {}
    model, tokenize = _hugging_face()
    padded = [tokenize(sentences()[i : i + BATCH]) for i in range(0, len(sentences()), BATCH)]
    exported, fused, int8 = (folder / f"{name}.onnx" for name in ("exported", "fused", "int8"))
    model.set_attn_implementation("eager")  # ONNX Runtime fuses the operations of eager attention
    _export(model, padded[0], exported)
    optimizer.optimize_model(
        str(exported), model_type="bert", num_heads=12, hidden_size=384, opt_level=1
    ).save_model_to_file(str(fused))
    quantize_dynamic(
        fused,
        int8,
        weight_type=QuantType.QInt8,
        per_channel=True,
        reduce_range=_saturates(),
        extra_options={"DefaultTensorType": onnx.TensorProto.FLOAT},
    )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    calls = {}
    for name, path in (("float32", fused), ("int8", int8)):
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        calls[f"ONNX Runtime, {name}"] = partial(_run, session, padded)
        order = sorted(sentences(), key=len)
        by_length = [tokenize(order[i : i + BATCH]) for i in range(0, len(order), BATCH)]
        calls[f"ONNX Runtime, {name}, sorted"] = partial(_run, session, by_length, _positions(order))
    return calls


def _saturates() -> bool:
    """Return whether 8-bit products saturate, which ONNX Runtime avoids with 7-bit weights."""
    return not any("vnni" in flag for flag in Path("/proc/cpuinfo").read_text().split())


def _positions(order: list[str]) -> Tensor:
    """Return the position of each sentence in another order."""
    places: dict[str, list[int]] = {}
    for i, text in enumerate(order):
        places.setdefault(text, []).append(i)
    return torch.tensor([places[text].pop(0) for text in sentences()])


def _export(model: nn.Module, batch: dict[str, Tensor], path: Path) -> None:
    class Inputs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
            return self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state

    axes = {name: {0: "batch", 1: "length"} for name in (*_INPUTS, "vectors")}
    torch.onnx.export(
        Inputs().eval(),
        tuple(batch[name] for name in _INPUTS),
        str(path),
        input_names=list(_INPUTS),
        output_names=["vectors"],
        dynamic_axes=axes,
        dynamo=False,
    )


def _run(session: Any, parts: list[dict[str, Tensor]], order: Tensor | None = None) -> Tensor:
    means = []
    for batch in parts:
        (states,) = session.run(None, {name: batch[name].numpy() for name in _INPUTS})
        mask = batch["attention_mask"][..., None]
        means.append((torch.from_numpy(states) * mask).sum(1) / mask.sum(1))
    vectors = F.normalize(torch.cat(means), dim=-1)
    return vectors if order is None else vectors[order]


if __name__ == "__main__":
    main()

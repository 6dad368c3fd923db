"""Compare regard with eager on a small random model of every model type in Hugging Face transformers.

    python -m benchmarks.sweep [--seconds 60] [--jobs 2] [name …]

Each type runs in a forked process with a time and a memory limit. Prints one line per model class: the
difference between the outputs of attn_implementation="regard" and of eager without padding, with right
padding and with left padding; and how much earlier outputs change if the last token changes, on regard and
on eager. Exits with status 1 if regard differs from eager.
"""

import argparse
import inspect
import json
import logging
import multiprocessing
import os
import resource
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import regard
from benchmarks.architectures import CASES, SMALL, _settable

TOLERANCE = 1e-4
MORE_SIZES = {
    "num_mel_bins": 8, "max_source_positions": 12, "max_target_positions": 32, "num_register_tokens": 1,
    "text_config_num_hidden_layers": 2, "depth": 2, "num_encoder_layers": 2, "encoder_num_layers": 2,
    "decoder_num_layers": 2, "d_inner": 48, "embed_dim": 32, "encoder_hidden_size": 32,
    "decoder_hidden_size": 32,
    "out_hidden_size": 32, "projector_hidden_size": 32, "type_vocab_size": 2, "max_seq_len": 64, "n_mels": 8,
    "max_seq_length": 64, "n_ctx": 64, "ffn_hidden_size": 48, "kv_lora_rank": 16, "q_lora_rank": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "max_2d_position_embeddings": 64,
    "qformer_hidden_size": 32, "prediction_length": 3, "context_length": 6, "attention_window": 4,
    "intermediate_dim": 48, "max_length": 20, "index_head_dim": 8, "index_n_heads": 4, "index_topk": 4,
    "image_token_id": 61, "image_token_index": 61, "video_token_id": 62, "audio_token_id": 63,
    "audio_token_index": 63, "vision_start_token_id": 60, "vision_end_token_id": 59, "video_token_index": 62,
}  # fmt: skip
SERIES = {"prediction_length": 3, "context_length": 6, "lags_sequence": [1, 2], "num_time_features": 2}
OPTIONS: dict[str, dict[str, Any]] = {
    **{case.name: case.options for case in CASES},
    **dict.fromkeys(("informer", "time_series_transformer", "autoformer"), SERIES),
    "bigbird_pegasus": {"attention_type": "original_full"},
    "big_bird": {"attention_type": "original_full"},
    "longformer": {"attention_window": 4},
    "led": {"attention_window": 4},
}


# Small configurations


def overrides(config: Any, names: dict[str, Any]) -> dict[str, Any]:
    """Return the values that make a config small, including its sub-configs."""
    values = {name: value for name, value in names.items() if _settable(config, name)}
    for name in getattr(config, "sub_configs", {}):
        part = getattr(config, name, None)
        if part is not None and hasattr(part, "to_dict"):
            values[name] = {"model_type": part.model_type, **overrides(part, names)}
    return values


def configurations(name: str) -> Iterator[Any]:
    """Yield small configs of a model type to try in turn."""
    from transformers import AutoConfig

    default = AutoConfig.for_model(name)
    options = OPTIONS.get(name, {})
    square = {**SMALL, "num_key_value_heads": 4}
    layers = {n: v for n, v in SMALL.items() if "layer" in n or "vocab" in n or "token_id" in n}
    for names in (SMALL | MORE_SIZES, square | MORE_SIZES, SMALL, {**SMALL, "patch_size": 16}, layers):
        try:
            yield AutoConfig.for_model(name, **overrides(default, names) | options)
        except Exception:
            continue


def classes(config: Any) -> dict[str, Any]:
    """Return the model classes of a config: language model, sequence-to-sequence model, base model."""
    from transformers.models.auto import modeling_auto as auto

    result = {}
    for mapping in ("MODEL_FOR_CAUSAL_LM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM", ""):
        table = getattr(auto, f"{mapping}_MAPPING" if mapping else "MODEL_MAPPING")
        if type(config) in table:
            kinds = table[type(config)]
            for kind in kinds if isinstance(kinds, tuple | list) else (kinds,):
                result[kind.__name__] = kind
    return result


def build(kind: Any, config: Any) -> Any:
    """Build a model on eager attention, with clearly non-uniform weights."""
    with torch.device("meta"):
        size = sum(p.numel() for p in kind._from_config(config).parameters())
    if size > 60e6:
        raise ValueError(f"{size / 1e6:.0f} million parameters")
    torch.manual_seed(0)
    model = kind._from_config(config, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 and "norm" not in name:
            torch.nn.init.normal_(parameter, std=0.25)
    return model


# Inputs


def _image_size(config: Any) -> int:
    for part in (config, *(getattr(config, n, None) for n in ("vision_config", "encoder", "image_encoder"))):
        size = getattr(part, "image_size", None)
        if size is not None:
            return size if isinstance(size, int) else size[0]
    return 32


def candidates(model: Any) -> Iterator[dict[str, Tensor]]:
    """Yield inputs that a model might accept, the simplest first."""
    names = set(inspect.signature(model.forward).parameters)
    torch.manual_seed(1)
    ids, target = torch.randint(3, 50, (2, 8)), torch.randint(3, 50, (2, 6))
    both = {"decoder_input_ids": target} if "decoder_input_ids" in names else {}
    text: dict[str, Tensor] = {"input_ids": ids} if "input_ids" in names else {}
    if "past_values" in names:
        history = 6 + 2
        series = {
            "past_values": torch.randn(2, history), "past_time_features": torch.randn(2, history, 2),
            "past_observed_mask": torch.ones(2, history), "future_values": torch.randn(2, 3),
            "future_time_features": torch.randn(2, 3, 2),
        }  # fmt: skip
        yield series
    if text:
        yield {**text, **both}
    size = _image_size(model.config)
    for edge in dict.fromkeys((size, 32, 64, 224)):
        image = {"pixel_values": torch.randn(2, 3, edge, edge)} if "pixel_values" in names else {}
        if image:
            yield {**text, **image, **both}
            yield {**image, **both}
    if "input_values" in names:
        yield {"input_values": torch.randn(2, 800), **both}
        yield {"input_values": torch.randn(2, 1, 4000), **both}
        yield {**text, "input_values": torch.randn(2, 800), **both}
    if "input_features" in names:
        for shape in ((2, 8, 24), (2, 24, 8), (2, 40, 80), (2, 40, 160), (2, 80, 3000), (2, 128, 3000)):
            yield {"input_features": torch.randn(shape), **both}
            yield {**text, "input_features": torch.randn(shape), **both}
    if "inputs_embeds" in names and not text:
        yield {"inputs_embeds": torch.randn(2, 8, model.config.hidden_size)}


def outputs(model: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Run a model and return its floating-point outputs."""
    torch.manual_seed(2)  # some models mask randomly
    with torch.no_grad():
        output = model(**batch)
    pairs = output.items() if hasattr(output, "items") else {"0": output[0]}.items()
    return {name: x for name, x in pairs if isinstance(x, Tensor) and x.is_floating_point()}


def relative_error(
    actual: dict[str, Tensor], expected: dict[str, Tensor], mask: Tensor | None = None
) -> float:
    """Compute the largest difference relative to the largest magnitude. mask: False for padding."""
    worst = 0.0
    for name, y in expected.items():
        if mask is not None and y.dim() < 3:
            continue  # a pooled vector may belong to a padding token
        x = actual[name]
        if mask is not None and y.shape[:2] == mask.shape:
            x, y = x[mask], y[mask]
        finite = torch.isfinite(y)
        if x.shape != y.shape or not bool(torch.isfinite(x[finite]).all()):
            return float("inf")
        if bool(finite.any()):
            scale = max(float(y[finite].abs().max()), 1e-3)
            worst = max(worst, float((x[finite] - y[finite]).abs().max()) / scale)
    return worst


# One model


def decoder_input(batch: dict[str, Tensor]) -> str | None:
    """Return the name of the decoder's input, or None."""
    names = [n for n in ("decoder_input_ids", "future_values", "input_ids") if n in batch]
    return names[0] if names else None


def future_leak(model: Any, batch: dict[str, Tensor]) -> float | None:
    """Measure how much earlier outputs change if the last input changes; None if not applicable."""
    name = decoder_input(batch)
    if name is None:
        return None
    changed = batch[name].clone()
    changed[:, -1] = (changed[:, -1] + 7) % 50 if not changed.is_floating_point() else changed[:, -1] + 3
    before, after = outputs(model, batch), outputs(model, {**batch, name: changed})
    length, worst, tried = changed.shape[1], 0.0, False
    for key, x in before.items():
        if (
            x.dim() == 3
            and x.shape[1] == length
            and not key.startswith("encoder")
            and after[key].shape == x.shape
        ):
            scale = max(float(x.abs().max()), 1e-3)
            worst = max(worst, float((after[key] - x)[:, :-1].abs().max()) / scale)
            tried = True
    return worst if tried else None


def pad(batch: dict[str, Tensor], side: str) -> tuple[dict[str, Tensor], Tensor] | None:
    """Mask three tokens of the first text; also return the mask."""
    if "input_ids" not in batch:
        return None
    mask = torch.ones_like(batch["input_ids"])
    if side == "right":
        mask[0, 5:] = 0
    else:
        mask[0, :3] = 0
    return {**batch, "attention_mask": mask}, mask.bool()


def compare(model: Any, batch: dict[str, Tensor]) -> dict[str, Any]:
    """Compare regard and eager on the same inputs."""
    from regard.inspection import huggingface

    trials: dict[str, tuple[dict[str, Tensor], Tensor | None]] = {"plain": (batch, None)}
    if "attention_mask" in inspect.signature(model.forward).parameters:
        for side in ("right", "left"):
            trial = pad(batch, side)
            if trial is not None:
                trials[side] = trial
    expected, row = {}, {}
    for name, (inputs, _) in trials.items():
        try:
            expected[name] = outputs(model, inputs)
        except Exception as error:
            row[name] = f"eager: {type(error).__name__}"
    eager_leak = future_leak(model, batch)
    calls = 0
    attention = huggingface.hosted_attention

    def counting_attention(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return attention(*args, **kwargs)

    regard.huggingface.enable()
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register("regard", counting_attention)
    model.set_attn_implementation("regard")
    for name, eager_outputs in expected.items():
        inputs, mask = trials[name]
        try:
            row[name] = relative_error(outputs(model, inputs), eager_outputs, mask)
        except Exception as error:
            row[name] = f"{type(error).__name__}: {str(error)[:200]}"
    try:
        regard.huggingface.check(model)
        refused = ""
    except regard.ArgumentError as error:
        refused = str(error)[:160]
    row |= {"calls": calls, "refused": refused, "inputs": sorted(batch)}
    if eager_leak is not None:
        try:
            row |= {"leak": future_leak(model, batch), "eager_leak": eager_leak}
        except Exception as error:
            row |= {"leak": f"{type(error).__name__}: {str(error)[:200]}", "eager_leak": eager_leak}
    return row


def variants(name: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name, model and inputs of each class; encoders that can be decoders are tried as both."""
    seen: set[str] = set()
    errors: list[str] = []
    for config in configurations(name):
        for label, kind in classes(config).items():
            for decoder in (False, True):
                title = f"{label} as a decoder" if decoder else label
                if title in seen:
                    continue
                if decoder and not (
                    getattr(config, "is_decoder", None) is False and not config.is_encoder_decoder
                ):
                    continue
                variant = type(config).from_dict(config.to_dict() | ({"is_decoder": True} if decoder else {}))
                try:
                    model = build(kind, variant)
                    batch = next(g for g in candidates(model) if _runs(model, g, errors))
                except StopIteration:
                    continue
                except Exception as error:
                    errors.append(f"{type(error).__name__}: {str(error)[:150]}")
                    continue
                seen.add(title)
                yield title, model, batch
    if not seen:
        yield name, None, errors[-1:] or ["no configuration or class"]


def _runs(model: Any, batch: dict[str, Tensor], errors: list[str]) -> bool:
    try:
        return bool(outputs(model, batch))
    except Exception as error:
        errors.append(f"{type(error).__name__}: {str(error)[:150]}")
        return False


def differs(row: dict[str, Any]) -> bool:
    """Return whether regard differs from eager, or fails where eager does not."""
    if "error" in row or not row.get("calls"):
        return False
    trials = [row[name] for name in ("plain", "right", "left") if name in row]
    failed = [trial for trial in trials if isinstance(trial, str) and not trial.startswith("eager")]
    inexact = [trial for trial in trials if isinstance(trial, float) and trial > TOLERANCE]
    leaks = "leak" in row and (isinstance(row["leak"], str) or row["leak"] > row["eager_leak"] + 1e-5)
    return bool(failed or inexact or leaks)


def _child(name: str, queue: Any, memory: int) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    with open(os.devnull, "w") as devnull:
        os.dup2(devnull.fileno(), 2)
        for title, model, batch in variants(name):
            row = {"type": name, "class": title}
            if model is None:
                row["error"] = batch[0]
            else:
                try:
                    row |= compare(model, batch)
                except Exception as error:
                    row["error"] = f"{type(error).__name__}: {str(error)[:200]}"
            queue.put(row)
    queue.put(None)


def sweep(names: list[str], seconds: float, jobs: int, memory: int = 3 * 2**30) -> Iterator[dict[str, Any]]:
    """Yield one row per model class, in any order; an error row if a type exceeds its time or memory."""
    context = multiprocessing.get_context("fork")  # fork: transformers is imported only once
    pending, running = list(names), {}
    while pending or running:
        while pending and len(running) < jobs:
            name, queue = pending.pop(0), context.SimpleQueue()
            process = context.Process(target=_child, args=(name, queue, memory), daemon=True)
            process.start()
            running[name] = (process, queue, time.monotonic())
        time.sleep(0.05)
        for name, (process, queue, start) in list(running.items()):
            ended = not process.is_alive()
            while not queue.empty():
                row = queue.get()
                if row is None:
                    process.join()
                    del running[name]
                    break
                yield row
            if name not in running:
                continue
            if ended and queue.empty():
                del running[name]
                yield {"type": name, "class": name, "error": f"exit code {process.exitcode}"}
            elif time.monotonic() - start > seconds:
                process.kill()
                process.join()
                del running[name]
                yield {"type": name, "class": name, "error": f"timeout after {seconds:.0f} s"}


def main() -> None:
    from transformers import CONFIG_MAPPING

    parser = argparse.ArgumentParser(prog="sweep", description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="name", help="model types [default: all]")
    parser.add_argument("--seconds", type=float, default=60, help="time limit per type [default: 60]")
    parser.add_argument("--jobs", type=int, default=1, help="parallel processes [default: 1]")
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    rows = []
    for row in sweep(args.names or sorted(CONFIG_MAPPING), args.seconds, args.jobs):
        rows.append(row)
        print(json.dumps(row), flush=True)
    ran = [row for row in rows if row.get("calls")]
    bad = [f"{row['type']} ({row['class']})" for row in rows if differs(row)]
    print(f"{len(ran)} of {len(rows)} classes ran on regard", file=sys.stderr)
    if bad:
        sys.exit(f"regard differs from eager: {', '.join(bad)}")


if __name__ == "__main__":
    main()

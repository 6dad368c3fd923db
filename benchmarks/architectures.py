"""Check `regard.watch` and the regard backend on small random models of every Hugging Face architecture.

    python -m benchmarks.architectures [name …]

Builds each model type of transformers with small sizes and random parameters, and compares the watched
weights with eager's `output_attentions`, or with the outputs of its softmax functions if it returns none.
Also compares watched with unwatched outputs, and outputs on regard with eager's. Without names, checks all
types in subprocesses and writes docs/reference/architectures.md.
"""

import argparse
import json
import logging
import re
import signal
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import regard
from regard._util.files import write_atomic
from regard.errors import ArgumentError

SECONDS = 30  # CPU time limit per model
BATCH = 100  # models per subprocess
MAX_PARAMETERS = 100_000_000


def _sizes(names: str, value: int) -> dict[str, int]:
    return dict.fromkeys(names.split(), value)


# Sizes of the small models; each config uses those that it defines.
SMALL = {
    **_sizes("hidden_size d_model n_embd dim embedding_size word_embed_proj_dim projection_dim emb_dim", 32),
    **_sizes("encoder_hidden_size decoder_hidden_size text_hidden_size hidden_dim", 32),
    **_sizes("intermediate_size d_ff ffn_dim encoder_ffn_dim decoder_ffn_dim mlp_dim", 48),
    **_sizes("n_inner moe_intermediate_size shared_expert_intermediate_size", 24),
    **_sizes("num_hidden_layers n_layer n_layers num_layers num_decoder_layers num_encoder_layers", 2),
    **_sizes("encoder_layers decoder_layers num_key_value_heads num_experts_per_tok depth", 2),
    **_sizes("num_attention_heads n_head n_heads num_heads", 4),
    **_sizes("encoder_attention_heads decoder_attention_heads num_attention_heads_decoder", 4),
    **_sizes("num_local_experts num_experts n_routed_experts", 4),
    **_sizes("head_dim d_kv patch_size", 8),
    **_sizes("vocab_size max_position_embeddings n_positions", 64),
    "image_size": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
_SPEECH = {
    "conv_dim": (16, 16), "conv_kernel": (10, 3), "conv_stride": (5, 2), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2,
}  # fmt: skip
_DEEPSEEK = {
    "topk_method": "greedy", "topk_group": 1,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12,
    "num_key_value_heads": 4, "n_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
}  # fmt: skip
_WINDOW = {"sliding_window": 4}


def _each(names: str, options: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return dict.fromkeys(names.split(), options)


# Lists with one value per layer, which the config derives from the number of layers
_PER_LAYER = ("layer_types", "mlp_layer_types", "no_rope_layers", "layers_block_type", "intermediate_size")

# Options of individual types, in addition to the sizes above
OPTIONS: dict[str, dict[str, Any]] = {
    **_each("mistral mixtral gemma3_text gpt_oss", _WINDOW),
    **_each("deepseek_v2 deepseek_v3", _DEEPSEEK),
    **_each("t5 mt5 umt5 longt5 switch_transformers", {"is_encoder_decoder": True}),
    **_each("wav2vec2 hubert wavlm unispeech unispeech-sat data2vec-audio sew", _SPEECH),
    **_each("gptj codegen", {"rotary_dim": 8}),
    "modernbert": {"local_attention": 4},
    "ministral": {**_WINDOW, "head_dim": 8},
    "gemma2": {**_WINDOW, "attn_logit_softcapping": 5.0},
    "nemotron": {"num_key_value_heads": 2},
    "whisper": {"num_mel_bins": 8, "max_source_positions": 12, "max_target_positions": 32},
    "gpt_neo": {"attention_types": [[["global"], 2]]},
    "longformer": {"attention_window": [4, 4], "max_position_embeddings": 70},
    "led": {
        "attention_window": [4, 4],
        "max_encoder_position_embeddings": 64,
        "max_decoder_position_embeddings": 64,
    },
    "big_bird": {"attention_type": "original_full"},
    "bigbird_pegasus": {"attention_type": "original_full"},
    "deberta": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    "deberta-v2": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
}


# Models


def build(name: str, implementation: str | None = None) -> Any:
    """Build a model with fixed random parameters, large enough for clearly non-uniform weights."""
    import transformers

    config = small_config(name)
    auto: Any = transformers.AutoModel
    torch.manual_seed(0)
    if type(config) in auto._model_mapping:
        create = auto.from_config
    else:  # the text part of a text-image model
        class_name = type(config).__name__.removesuffix("Config")
        create = getattr(transformers, f"{class_name}Model", None) or getattr(transformers, class_name)
        create = create._from_config
    options = {} if implementation is None else {"attn_implementation": implementation}
    with torch.device("meta"):
        size = sum(p.numel() for p in create(config, **options).parameters())
    if size > MAX_PARAMETERS:
        raise ValueError(f"{size:,} parameters with the small sizes")
    torch.manual_seed(0)
    model = create(small_config(name), **options).eval()
    for parameter_name, parameter in model.named_parameters():
        if parameter.dim() == 2 and "norm" not in parameter_name:
            torch.nn.init.normal_(parameter, std=0.25 * min(1.0, (32 / parameter.shape[-1]) ** 0.5))
    return model


def small_config(name: str) -> Any:
    """Create the config of a model type with small sizes, including its sub-configs."""
    from transformers import AutoConfig

    options = _small_options(AutoConfig.for_model(name)) | OPTIONS.get(name, {})
    return AutoConfig.for_model(name, **options)


def _small_options(config: Any) -> dict[str, Any]:
    options: dict[str, Any] = {key: value for key, value in SMALL.items() if _settable(config, key)}
    if isinstance(depths := getattr(config, "depths", None), list | tuple):  # stages whose sizes must match
        return {"depths": [1] * len(depths)}
    for key in getattr(config, "sub_configs", {}):
        part = getattr(config, key, None)
        if hasattr(part, "model_type"):
            known = {k: v for k, v in OPTIONS.get(part.model_type, {}).items() if hasattr(part, k)}
            defaults = {k: v for k, v in part.to_diff_dict().items() if k not in _PER_LAYER}
            options[key] = {
                **defaults,
                **_small_options(part),
                **known,
                "model_type": part.model_type,
            }
    return options


def _settable(config: Any, name: str) -> bool:
    """Return whether a config stores this attribute, rather than deriving it from others."""
    try:
        value = getattr(config, name, None)
    except (ValueError, AttributeError):  # a value per layer
        return False
    return isinstance(value, int) and not isinstance(getattr(type(config), name, None), property)


# Inputs


def candidate_inputs(model: Any) -> Iterator[dict[str, Tensor]]:
    """Yield batches of two inputs that the model may accept; the first text is padded."""
    import inspect

    torch.manual_seed(1)
    accepted = inspect.signature(model.forward).parameters
    config = model.config
    ids, target = torch.randint(3, 60, (2, 12)), torch.randint(3, 60, (2, 8))
    mask = torch.ones_like(ids)
    mask[0, 8:] = 0
    text = {"input_ids": ids, "attention_mask": mask}
    size = getattr(config, "image_size", None) or getattr(
        getattr(config, "vision_config", None), "image_size", 32
    )
    size = size if isinstance(size, int) else 32
    channels = getattr(config, "num_channels", 3)
    mels = next(
        (
            getattr(config, n)
            for n in ("num_mel_bins", "feature_size", "input_feat_per_channel")
            if hasattr(config, n)
        ),
        8,
    )
    decoder = {"decoder_input_ids": target} if "decoder_input_ids" in accepted else {}
    batches = [
        {**text, **decoder},
        {"pixel_values": torch.randn(2, channels if isinstance(channels, int) else 3, size, size)},
        {"pixel_values": torch.randn(2, 3, 64, 64)},
        {"pixel_values": torch.randn(2, 3, 224, 224)},
        {"input_values": torch.randn(2, 400), **decoder},
        {"input_values": torch.randn(2, 1600), **decoder},
        {"input_features": torch.randn(2, mels, 24), **decoder},
        {"input_features": torch.randn(2, 24, mels), **decoder},
        {**text, "pixel_values": torch.randn(2, 3, size, size)},
        {"input_ids": ids},
        {"pixel_values": torch.randn(2, 4, 3, size, size)},
        {"pixel_values_videos": torch.randn(2, 4, 3, size, size)},
        {"inputs_embeds": torch.randn(2, 12, 32)},
        {"input_ids": ids, "bbox": torch.zeros(2, 12, 4, dtype=torch.long)},
    ]
    for batch in batches:
        batch = {key: value for key, value in batch.items() if key in accepted or key == "attention_mask"}
        if "attention_mask" not in accepted:
            batch.pop("attention_mask", None)
        if batch and set(batch) != {"attention_mask"}:
            yield batch


def run(model: Any, batch: dict[str, Tensor], **options: Any) -> Any:
    """Run a model with a fixed seed, because some models mask at random."""
    torch.manual_seed(2)
    return model(**batch, **options)


def find_inputs(model: Any) -> dict[str, Tensor]:
    """Return the first batch that the model accepts."""
    errors = []
    for batch in candidate_inputs(model):
        try:
            first_tensor(run(model, batch))
            return batch
        except TimeoutError:
            raise
        except Exception as error:  # a model raises whatever its first operation on a wrong input raises
            errors.append(f"{', '.join(batch)}: {type(error).__name__}: {error}".replace("\n", " ")[:150])
    raise ValueError(f"no known input: {errors[0] if errors else 'none fits its signature'}")


def first_tensor(output: Any) -> Tensor:
    """Return the first floating-point tensor of an output."""
    values = output.values() if hasattr(output, "values") else output
    for value in [output] if isinstance(output, Tensor) else values:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value
        if isinstance(value, tuple | list) or hasattr(value, "values"):
            try:
                return first_tensor(value)
            except ValueError:
                continue
    raise ValueError("the model returns no floating-point tensor")


# References


def eager_attentions(output: Any) -> list[Tensor]:
    """Return all attentions in an eager output."""
    attentions: list[Tensor] = []
    items = output.items() if hasattr(output, "items") else []
    for name, value in items:
        if hasattr(value, "items"):
            attentions += eager_attentions(value)
        elif "attentions" in name and isinstance(value, tuple | list):
            attentions += _flat(value)
    return attentions


def _flat(x: Any) -> list[Tensor]:
    if isinstance(x, Tensor):
        return [x] if x.dim() >= 3 else []
    return [tensor for item in x or () for tensor in _flat(item)] if isinstance(x, tuple | list) else []


class SoftmaxRecorder(TorchFunctionMode):
    """Records softmax outputs (…, q, k) that are a factor of a later product."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Tensor] = []
        self.used: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name == "softmax" and output.dim() >= 3:
            self.outputs.append(output)
        elif name in ("matmul", "bmm", "einsum", "baddbmm"):
            factors = _flat(args)
            self.used += [
                w for w in self.outputs
                if any(x.data_ptr() == w.data_ptr() and x.numel() == w.numel() for x in factors)
                and all(w is not other for other in self.used)
            ]  # fmt: skip
        return output


def distance(expected: Tensor, seen: list[Tensor], batch: dict[str, Tensor]) -> tuple[float, int]:
    """Return the smallest difference between a reference and any watched weights, and their index."""
    best = (float("inf"), -1)
    for number, weights in enumerate(seen):
        candidates = [weights]
        if weights.dim() > 2:  # longformer: heads after queries; wavlm: mean over heads
            candidates += [weights.transpose(-3, -2), weights.mean(-3, keepdim=True).expand_as(weights)]
        candidates.append(weights / weights.sum(-1, keepdim=True))  # granite_swa: without the sink
        for candidate in candidates:
            if candidate.shape[-1] > expected.shape[-1] and candidate.shape[:-2] == expected.shape[:-2]:
                queries, keys = expected.shape[-2:]  # cpmant cuts off its prompt
                candidate = candidate[..., -queries:, -keys:]
            if candidate.shape[-1] != expected.shape[-1] or candidate.numel() != expected.numel():
                continue
            if candidate.shape != expected.shape:
                candidate = candidate.reshape(expected.shape)
            difference = (candidate - expected).abs().amax(-1)  # … q
            if difference.dim() == 3:
                difference = without_padding(difference.amax(1), batch)
            best = min(best, (float(difference.max()), number))
    return best


def without_padding(x: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Remove padding from (b, n): implementations differ there, without effect on the result."""
    mask = batch.get("attention_mask")
    return x[mask.bool()] if mask is not None and mask.shape == x.shape else x


# Checks


@dataclass
class Result:
    """A row of the table."""

    name: str
    kernel: str = ""
    lazy: int = 0  # attentions stored as query and key
    dense: int = 0  # attentions stored as weights
    reference: str = ""  # "attentions" or "softmax"
    expected: int = 0  # attentions of the reference
    matched: int = 0  # of these, recorded within 1e-5
    weights: float | None = None  # largest difference from the reference
    same: bool | None = None  # whether watching leaves the output bit-identical
    on_regard: float | None = None  # largest difference from eager's output
    leak: bool | None = None  # whether a model on regard attends to future tokens
    unseen: str = ""  # what watch reports as not recorded
    note: str = ""
    failed: str = ""

    @property
    def complete(self) -> bool:
        return self.expected > 0 and self.matched == self.expected


@torch.no_grad()
def check(name: str) -> Result:
    """Check one architecture."""
    model = build(name)
    result = Result(name, getattr(model.config, "_attn_implementation", None) or "")
    batch = find_inputs(model)
    before = first_tensor(run(model, batch))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with regard.watch(model) as seen:
            during = first_tensor(run(model, batch))
    result.same = bool(torch.equal(before.nan_to_num(), during.nan_to_num()))
    result.unseen = seen.unseen
    storage = Counter(seen.storage(entry) for entry in seen)
    result.lazy, result.dense = storage["lazy"], storage["dense"]
    eager = build(name, "eager") if result.kernel not in ("", "eager") else model
    expected, output = references(eager, batch, result)
    compare(seen, expected, batch, result)
    gap = float((first_tensor(output) - before).abs().max())
    if eager is not model and not result.complete and not gap < 1e-3:
        # transformers' own kernels disagree: compare the eager model with its own attentions
        with regard.watch(eager) as seen:
            run(eager, batch)
        compare(seen, expected, batch, result)
        result.note = f"Watched on eager, from which {result.kernel} differs by {gap:.0e} in transformers."
        result.kernel = "eager"
    host(model, batch, first_tensor(output), result)
    return result


def compare(seen: regard.Seen, expected: list[Tensor], batch: dict[str, Tensor], result: Result) -> None:
    """Compare the watched weights with the reference."""
    watched = [seen[entry].dense() for entry in seen]
    distances = [distance(weights, watched, batch)[0] for weights in expected]
    result.expected, result.matched = len(expected), sum(d <= 1e-5 for d in distances)
    finite = [d for d in distances if d < float("inf")]
    result.weights = max(finite) if finite else None


def references(eager: Any, batch: dict[str, Tensor], result: Result) -> tuple[list[Tensor], Any]:
    """Return the eager attentions or, if there are none, the softmax outputs that are factors of products."""
    recorder = SoftmaxRecorder()
    with recorder:
        output = run(eager, batch)
    try:
        attentions = eager_attentions(run(eager, batch, output_attentions=True, return_dict=True))
    except (TypeError, ValueError):
        attentions = []
    if any(not 0 <= float(weights.min()) <= float(weights.max()) <= 1.001 for weights in attentions):
        attentions = []  # squeezebert and prophetnet return scores
    result.reference = "attentions" if attentions else "softmax"
    return attentions or recorder.used, output


def host(model: Any, batch: dict[str, Tensor], expected: Tensor, result: Result) -> None:
    """Run the model on regard, and compare its output with eager's."""
    regard.huggingface.enable()
    try:
        regard.huggingface.check(model)
        result.leak = False
        model.set_attn_implementation("regard")
        if model.config._attn_implementation == "regard":
            difference = (first_tensor(run(model, batch)) - expected).abs()
            difference = difference.flatten(2).amax(-1) if difference.dim() > 2 else difference
            result.on_regard = float(without_padding(difference, batch).max())
    except ArgumentError as error:
        result.leak = "future" in str(error)
        if "computes its own attention" not in str(error):
            result.note = f"{result.note} Not on regard: {error}".strip()
    except (AttributeError, ValueError) as error:
        print(f"{result.name} on regard: {str(error)[:150]}", file=sys.stderr)


def try_check(name: str) -> Result:
    """Return the result, or why there is none."""

    def expire(*_: Any) -> None:
        raise TimeoutError(f"more than {SECONDS} s")

    signal.signal(signal.SIGPROF, expire)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        return check(name)
    except Exception as error:
        text = str(error).strip().replace("\n", " ")[:200]
        return Result(name, failed=f"{type(error).__name__}: {text}")
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def check_in_subprocesses(names: list[str]) -> list[Result]:
    """Check batches of models in subprocesses, so a crash affects only one model."""
    results: dict[str, Result] = {}
    while pending := [name for name in names if name not in results][:BATCH]:
        with tempfile.NamedTemporaryFile("r", suffix=".jsonl") as file:
            command = [sys.executable, "-m", "benchmarks.architectures", "--to", file.name, *pending]
            process = subprocess.run(command, check=False)
            for line in Path(file.name).read_text().splitlines():
                result = Result(**json.loads(line))
                results[result.name] = result
        rest = [name for name in pending if name not in results]
        if rest:
            results[rest[0]] = Result(rest[0], failed=f"the process ended with status {process.returncode}")
        print(f"{len(results)} of {len(names)}", file=sys.stderr, flush=True)
    return [results[name] for name in names]


# The page


def _number(x: float | None) -> str:
    return "" if x is None else f"{x:.0e}"


def render_page(results: list[Result]) -> str:
    """Render docs/reference/architectures.md."""
    import transformers

    built = [r for r in results if not r.failed]
    attending = [r for r in built if r.lazy + r.dense + r.expected]
    whole = [r for r in attending if r.complete]
    partly = [r for r in attending if not r.complete]
    without = [r for r in built if r not in attending]
    hosted = [r for r in attending if r.on_regard is not None]
    close = sum(r.on_regard <= 1e-4 for r in hosted if r.on_regard is not None)
    lines = [
        "# Hugging Face architectures",
        "",
        f"Generated by `python -m benchmarks.architectures` with transformers {transformers.__version__} and "
        f"torch {torch.__version__}, from every model type of transformers that can be built with small "
        "sizes. Each model has random float32 parameters and reads a padded batch of two inputs; padding is "
        "not compared.",
        "",
        "| | model types |",
        "|---|---:|",
        f"| in transformers | {len(results)} |",
        f"| built and run | {len(built)} |",
        f"| of these, output bit-identical while watched | {sum(bool(r.same) for r in built)} |",
        f"| with softmax attention | {len(attending)} |",
        f"| of these, every attention recorded within 1e-5 of eager | {len(whole)} |",
        f"| run on regard | {len(hosted)} |",
        f"| of these, output within 1e-4 of eager | {close} |",
        f"| causal leaks on regard | {sum(bool(r.leak) for r in built)} |",
        "",
        "*weights*: largest difference between the weights that `regard.watch` recorded while the model ran "
        "its own kernel and the reference: eager's `output_attentions` or, if it returns none, the "
        "outputs of its softmax functions (*softmax*). *stored*: how many attentions are stored as query and "
        "key (lazy) and as weights (dense). *on regard*: largest difference between the outputs of "
        '`attn_implementation="regard"` and eager; empty for models that do not use the attention '
        "interface of transformers.",
        "",
        "| model type | kernel | stored | reference | weights | on regard |",
        "|---|---|---|---|---:|---:|",
    ]
    for r in whole:
        stored = ", ".join(f"{n} {kind}" for n, kind in ((r.lazy, "lazy"), (r.dense, "dense")) if n)
        lines.append(
            f"| {r.name} | {r.kernel} | {stored} | {r.reference} | {_number(r.weights)} | "
            f"{_number(r.on_regard)} |"
        )
    lines += ["", "## Not recorded, or only in part", ""]
    lines += [f"- {r.name}: {_account(r)}" for r in partly]
    lines += ["", "## Without softmax attention", "", ", ".join(r.name for r in without) or "none"]
    lines += ["", "## Not built", "", "These could not be built or run with the small sizes and inputs:", ""]
    lines += [f"- {r.name}: {_plain(r.failed)}" for r in results if r.failed]
    return "\n".join(lines) + "\n"


def _account(result: Result) -> str:
    counts = f"{result.matched} of {result.expected} attentions of the reference"
    if result.weights is not None and result.weights > 1e-5:
        counts += f", largest difference {result.weights:.0e}"
    return f"{counts}. {result.note or result.unseen or 'The reference has other shapes.'}"


def _plain(text: str) -> str:
    """Remove paths, and replace characters that Markdown would interpret."""
    text = re.sub(r"/\S*/site-packages/", "", text)  # paths of this machine
    return text.replace("`", "'").replace("|", "/").replace("<", "&lt;").strip()


def main() -> None:
    parser = argparse.ArgumentParser(prog="architectures", description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="name", help="model types [default: all]")
    parser.add_argument("--to", metavar="FILE", help="write the results to a JSON Lines file")
    parser.add_argument("--page", nargs="+", metavar="FILE", help="write the page from such files")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    if arguments.page:
        rows = [json.loads(line) for path in arguments.page for line in Path(path).read_text().splitlines()]
        results = list({row["name"]: Result(**row) for row in rows}.values())
    elif arguments.names:
        for name in arguments.names:
            result = try_check(name)
            if arguments.to:
                with open(arguments.to, "a") as file:
                    file.write(json.dumps(asdict(result)) + "\n")
            else:
                print(result, flush=True)
        return
    else:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

        results = check_in_subprocesses(sorted(CONFIG_MAPPING_NAMES))
    results.sort(key=lambda result: result.name)
    print(write_atomic("docs/reference/architectures.md", render_page(results).encode()))
    wrong = [r.name for r in results if not r.failed and (not r.same or r.leak)]
    if wrong:
        sys.exit(f"wrong: {', '.join(wrong)}")


if __name__ == "__main__":
    main()

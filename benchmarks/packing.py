"""Hugging Face models with and without padding: 256 sentences of mixed length, random weights.

python -m benchmarks.packing [--quick]
python -m benchmarks.packing --cpu-time [NAME …]

regard: `regard.huggingface.pack`, one batch. transformers: padded, with SDPA, one batch; also in batches of
32, as given and sorted by length. All models have 6 layers of width 384. --cpu-time prints
medians of three rounds of CPU time on one thread, which other processes influence less.
"""

import copy
import random
import statistics
import sys
import time
from collections.abc import Iterable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

import regard
from benchmarks.harness import Call, Candidates, Comparison, time_calls

SENTENCES, BATCH, VOCABULARY = 256, 32, 1000
_SIZES = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "vocab_size": VOCABULARY}
_WIDE = {**_SIZES, "intermediate_size": 1536, "max_position_embeddings": 256, "pad_token_id": 0}
_ENDS = {"bos_token_id": 1, "eos_token_id": 2}


def _configurations() -> dict[str, Any]:
    import transformers as t

    bert_like = (t.BertConfig, t.RobertaConfig, t.XLMRobertaConfig, t.ElectraConfig, t.CamembertConfig)
    decoders = (t.LlamaConfig, t.PhiConfig, t.GPTNeoXConfig)
    grouped = (t.MistralConfig, t.Qwen2Config, t.Qwen3Config)  # with 8 or 32 key heads by default
    configs = {
        "distilbert": t.DistilBertConfig(
            dim=384, n_layers=6, n_heads=12, hidden_dim=1536, vocab_size=VOCABULARY
        ),
        "modernbert": t.ModernBertConfig(**_WIDE, **_ENDS, cls_token_id=1, sep_token_id=2),
        "gpt2": t.GPT2Config(n_embd=384, n_layer=6, n_head=12, vocab_size=VOCABULARY, **_ENDS),
    }
    configs |= {config.model_type: config(**_WIDE) for config in bert_like}
    configs |= {config.model_type: config(**_WIDE, **_ENDS) for config in decoders}
    configs |= {config.model_type: config(**_WIDE, **_ENDS, num_key_value_heads=12) for config in grouped}
    return configs


def packing() -> Iterable[Comparison]:
    """Compare the models; the target is relative to one padded batch."""
    for name, config in _configurations().items():
        yield Comparison("padding", name, partial(_setup, config), target=2.0)
    bert = _configurations()["bert"]
    yield Comparison("padding", "bert", partial(_setup, bert, backward=True), backward=True, target=2.0)


@cache
def _ids() -> list[list[int]]:
    """Return token ids with the lengths of everyday sentences: 5 to 60 tokens, with a median of 17."""
    draw = random.Random(0)
    lengths = [min(max(round(draw.lognormvariate(2.85, 0.5)), 5), 60) for _ in range(SENTENCES)]
    return [[draw.randrange(5, VOCABULARY) for _ in range(n)] for n in lengths]


def _pad(ids: list[list[int]]) -> dict[str, Tensor]:
    longest = max(map(len, ids))
    return {
        "input_ids": torch.tensor([row + [0] * (longest - len(row)) for row in ids]),
        "attention_mask": torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in ids]),
    }


def _setup(config: Any, backward: bool = False) -> Candidates:
    import transformers

    torch.manual_seed(0)
    config.use_cache = False
    model = transformers.AutoModel.from_config(config, attn_implementation="sdpa").eval()
    packed = regard.huggingface.pack(copy.deepcopy(model))
    ids = _ids()
    whole = [_pad(ids)]
    parts, by_length = (
        [_pad(rows[i : i + BATCH]) for i in range(0, SENTENCES, BATCH)]
        for rows in (ids, sorted(ids, key=len))
    )
    calls: dict[str, Call] = {
        "regard": lambda: _run(packed, whole, backward),
        "transformers": lambda: _run(model, whole, backward),
        f"by {BATCH}": lambda: _run(model, parts, backward),
        f"by {BATCH}, sorted": lambda: _run(model, by_length, backward),
    }
    mask = whole[0]["attention_mask"].bool()
    actual, expected = (_run(m, whole, False)[0][mask] for m in (packed, model))
    error = (actual - expected).abs().max().item()
    assert error < 1e-4, f"the vectors differ by {error:.1e}"
    return Candidates(calls, "fused")


def _batches(ids: list[list[int]]) -> list[dict[str, Tensor]]:
    return [_pad(ids[i : i + BATCH]) for i in range(0, len(ids), BATCH)]


def _run(model: torch.nn.Module, batches: list[dict[str, Tensor]], backward: bool) -> list[Tensor]:
    with torch.set_grad_enabled(backward):
        outputs: list[Tensor] = [model(**batch)[0] for batch in batches]
        if backward:
            model.zero_grad()
            torch.stack([output.square().mean() for output in outputs]).sum().backward()
        return outputs


def compare_cpu_times(names: list[str]) -> None:
    """Print the CPU time of each packed model, and how many times as long transformers takes."""
    torch.set_num_threads(1)
    for name, config in _configurations().items():
        if names and name not in names:
            continue
        measured = time_calls(_setup(config).calls, 1.0, clock=time.process_time, timeout_factor=1e3)
        packed, *others = (statistics.median(times) for times in measured.values())
        ratios = (
            f"{label} {seconds / packed:.2f}" for label, seconds in zip([*measured][1:], others, strict=True)
        )
        print(f"{name:12} {packed:.2f} s; times as fast as transformers: {', '.join(ratios)}", flush=True)


def main() -> None:
    if "--cpu-time" in sys.argv:
        compare_cpu_times([name for name in sys.argv[1:] if name != "--cpu-time"])
        return
    from benchmarks import speed  # imports this module

    speed.run_group(packing(), seconds=6.0, min_rounds=3)


if __name__ == "__main__":
    main()

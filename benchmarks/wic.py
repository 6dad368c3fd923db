"""Word in Context (Pilehvar and Camacho-Collados 2019): does a word mean the same in two sentences?

The cosine of the word's two vectors says so when it is above a threshold. A few features of these vectors are
so much larger than the others that they decide most of it, so there is also the cosine of vectors whose
features all have mean 0 and variance 1 over train (Timkey and van Schijndel 2021). Thresholds, means,
variances and the choice of the layer come from train alone; dev is scored, and test where there is one.

    python -m benchmarks.wic [--data FOLDER] [--model minilm]
"""

import argparse
import re
import sys
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.data import DATA
from regard.models.encoders.base import WordVectors
from regard.models.encoders.pretrained import PretrainedEncoder, load_encoder

PAIRS_AT_ONCE = 256  # every layer's vector of every word is held for these


class Pair(NamedTuple):
    """Two sentences, the characters of the word in each, and whether it means the same."""

    sentences: tuple[str, str]
    spans: tuple[tuple[int, int], tuple[int, int]]
    same: bool


class Score(NamedTuple):
    """One line of the table: how the vectors of a layer do, in percent, on each part of the data."""

    layer: str
    how: str
    threshold: float
    right: dict[str, float]


def read(folder: Path) -> list[Pair]:
    """The pairs of one part of the data: word⇥kind⇥i-j⇥sentence⇥sentence, and T or F."""
    data = (folder / f"{folder.name}.data.txt").read_text("utf-8").splitlines()
    gold = (folder / f"{folder.name}.gold.txt").read_text("utf-8").split()
    found = []
    for line, answer in zip(data, gold, strict=True):
        _, _, places, first, second = line.split("\t")
        i, j = map(int, places.split("-"))
        found.append(Pair((first, second), (_span(first, i), _span(second, j)), answer == "T"))
    return found


def _span(sentence: str, place: int) -> tuple[int, int]:
    """The characters of the word at a place, counted in words between spaces."""
    return list(re.finditer(r"\S+", sentence))[place].span()


def vectors(encoder: PretrainedEncoder, pairs: list[Pair]) -> Tensor:
    """The word's static vectors, and those of each layer, in both sentences: (1 + layers, pairs, 2, m)."""
    found = []
    for start in range(0, len(pairs), PAIRS_AT_ONCE):
        part = pairs[start : start + PAIRS_AT_ONCE]
        embedded = encoder.embed([sentence for pair in part for sentence in pair.sentences])
        spans = [span for pair in part for span in pair.spans]
        found += [_word(encoder, each, span) for each, span in zip(embedded, spans, strict=True)]
    return torch.stack(found, 1).unflatten(1, (-1, 2))


def _word(encoder: PretrainedEncoder, embedded: WordVectors, span: tuple[int, int]) -> Tensor:
    """The mean of the words within a span of characters; first the static one: (1 + layers, m)."""
    inside = [i for i, (start, stop) in enumerate(embedded.spans) if start < span[1] and stop > span[0]]
    (encoding,) = encoder.tokenizer([embedded.sentence[slice(*span)]])
    static = [token for token, place in zip(encoding.ids, encoding.spans, strict=True) if place is not None]
    static_vector = encoder.words.weight[torch.tensor(static)].mean(0, keepdim=True).detach()
    return torch.cat([static_vector, embedded.vectors[:, inside].mean(1)])


def threshold(similarities: Tensor, same: Tensor) -> float:
    """The threshold that is right most often; the lowest one of several."""
    values, order = similarities.sort()
    right = same[order].flip(0).cumsum(0).flip(0)  # all from here on are said to be the same
    wrong = torch.cat([same.new_zeros(1), (~same[order]).cumsum(0)[:-1]])
    distinct = torch.cat([same.new_ones(1, dtype=torch.bool), values[1:] > values[:-1]])
    score = torch.where(distinct, right + wrong, -1)
    best = int(score.argmax())
    return float(values[0] - 1 if best == 0 else (values[best] + values[best - 1]) / 2)


def accuracy(similarities: Tensor, same: Tensor, bound: float) -> float:
    """The share of pairs on the right side of a threshold, in percent."""
    return 100 * float(((similarities > bound) == same).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.wic", description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=DATA / "wic", help="a folder with train and dev")
    parser.add_argument("--model", default="minilm", help="minilm, or a folder")
    asked = parser.parse_args()
    if not (asked.data / "train").is_dir():
        sys.exit(
            f"there is no Word-in-Context data in {asked.data}; get WiC 1.0 and give --data FOLDER with "
            "train and dev."
        )
    report(load_encoder(asked.model), asked.data)


def report(encoder: PretrainedEncoder, data: Path) -> list[Score]:
    """Print the table, and give its lines."""
    parts = {name: read(data / name) for name in ("train", "dev", "test") if (data / name).is_dir()}
    same = {name: torch.tensor([pair.same for pair in pairs]) for name, pairs in parts.items()}
    found = {name: vectors(encoder, pairs) for name, pairs in parts.items()}
    layers = ["static", *(f"layer {i}" for i in range(encoder.layers))]
    scores = []
    for standard in (False, True):
        how = "standardised" if standard else "plain"
        print(f"{how:14}{'threshold':>10}" + "".join(f"{name:>8}" for name in parts))
        for i, layer in enumerate(layers):
            cosines = _cosines({name: x[i] for name, x in found.items()}, standard)
            bound = threshold(cosines["train"], same["train"])
            right = {name: accuracy(cosines[name], same[name], bound) for name in parts}
            scores.append(Score(layer, how, bound, right))
            print(f"  {layer:12}{bound:10.3f}" + "".join(f"{share:8.1f}" for share in right.values()))
    for how in ("plain", "standardised"):
        best = max((score for score in scores if score.how == how), key=lambda score: score.right["train"])
        shown = ", ".join(f"{share:.1f} % on {name}" for name, share in best.right.items())
        print(f"best on train, {how}: {best.layer}: {shown}")
    return scores


def _cosines(both: dict[str, Tensor], standard: bool) -> dict[str, Tensor]:
    """The cosine of each pair of vectors (pairs, 2, m); standardised as train says."""
    if standard:
        known = both["train"].flatten(0, 1)
        mean, deviation = known.mean(0), known.std(0)
        both = {name: (x - mean) / deviation for name, x in both.items()}
    # in float64 and back, so that equal vectors have equal cosines
    return {name: F.cosine_similarity(*x.double().unbind(1), dim=-1).float() for name, x in both.items()}


if __name__ == "__main__":
    main()

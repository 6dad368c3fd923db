"""Word in Context (Pilehvar and Camacho-Collados 2019): does a word have the same sense in two sentences?

The prediction is "same" if the cosine of the word's two vectors exceeds a threshold. A few large features
dominate the cosine, so it is also computed with features standardized to mean 0 and variance 1 (Timkey and
van Schijndel 2021). Thresholds, means, variances and the layer are chosen on train; accuracy is reported for
train, dev and, if present, test.

    python -m benchmarks.wic [--data FOLDER] [--model minilm] [--dtype int8]
"""

import argparse
import re
import sys
from pathlib import Path
from typing import NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.data import DATA
from regard.models.configs import Precision
from regard.models.encoders.base import WordVectors
from regard.models.encoders.pretrained import PretrainedEncoder, load_encoder

BATCH_SIZE = 256  # pairs per batch; bounds the memory for the vectors of all layers and words


class Pair(NamedTuple):
    """Two sentences, the character span of the word in each, and whether its sense is the same."""

    sentences: tuple[str, str]
    spans: tuple[tuple[int, int], tuple[int, int]]
    same: bool


class Score(NamedTuple):
    """One row of the table: accuracy of one layer, in percent, by data set."""

    layer: str
    method: str
    threshold: float
    accuracy: dict[str, float]


def read_pairs(folder: Path) -> list[Pair]:
    """Read one data set: lines of word⇥part of speech⇥i-j⇥sentence⇥sentence, and a file of T or F."""
    data = (folder / f"{folder.name}.data.txt").read_text("utf-8").splitlines()
    gold = (folder / f"{folder.name}.gold.txt").read_text("utf-8").split()
    pairs = []
    for line, answer in zip(data, gold, strict=True):
        _, _, indices, first, second = line.split("\t")
        i, j = map(int, indices.split("-"))
        pairs.append(Pair((first, second), (_span(first, i), _span(second, j)), answer == "T"))
    return pairs


def _span(sentence: str, index: int) -> tuple[int, int]:
    """Return the character span of the word at an index; words are separated by spaces."""
    return list(re.finditer(r"\S+", sentence))[index].span()


def encode(encoder: PretrainedEncoder, pairs: list[Pair]) -> Tensor:
    """Return the static vectors and the vectors of each layer: (1 + layers, pairs, 2, m)."""
    rows = []
    for start in range(0, len(pairs), BATCH_SIZE):
        part = pairs[start : start + BATCH_SIZE]
        embedded = encoder.embed([sentence for pair in part for sentence in pair.sentences])
        spans = [span for pair in part for span in pair.spans]
        rows += [
            _word_vectors(encoder, sentence, span) for sentence, span in zip(embedded, spans, strict=True)
        ]
    return torch.stack(rows, 1).unflatten(1, (-1, 2))


def _word_vectors(encoder: PretrainedEncoder, embedded: WordVectors, span: tuple[int, int]) -> Tensor:
    """Average the vectors within a character span, the static vector first: (1 + layers, m)."""
    inside = [i for i, (start, stop) in enumerate(embedded.spans) if start < span[1] and stop > span[0]]
    (encoding,) = encoder.tokenizer([embedded.sentence[slice(*span)]])
    static = [token for token, part in zip(encoding.ids, encoding.spans, strict=True) if part is not None]
    static_vector = encoder.words.weight[torch.tensor(static)].mean(0, keepdim=True).detach()
    return torch.cat([static_vector, embedded.vectors[:, inside].mean(1)])


def best_threshold(similarities: Tensor, same: Tensor) -> float:
    """Find the most accurate threshold; the lowest in case of a tie."""
    values, order = similarities.sort()
    true_positives = same[order].flip(0).cumsum(0).flip(0)  # at a threshold just below each value
    true_negatives = torch.cat([same.new_zeros(1), (~same[order]).cumsum(0)[:-1]])
    distinct = torch.cat([same.new_ones(1, dtype=torch.bool), values[1:] > values[:-1]])
    score = torch.where(distinct, true_positives + true_negatives, -1)
    best = int(score.argmax())
    return float(values[0] - 1 if best == 0 else (values[best] + values[best - 1]) / 2)


def accuracy(similarities: Tensor, same: Tensor, threshold: float) -> float:
    """Compute the percentage of pairs that a threshold classifies correctly."""
    return 100 * float(((similarities > threshold) == same).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.wic", description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=DATA / "wic", help="folder with train and dev")
    parser.add_argument("--model", default="minilm", help="minilm or a model folder [default: minilm]")
    parser.add_argument("--dtype", choices=get_args(Precision), default="float32")
    args = parser.parse_args()
    if not (args.data / "train").is_dir():
        sys.exit(
            f"No Word-in-Context data in {args.data}. Download WiC 1.0 and pass --data FOLDER, with "
            "subfolders train and dev."
        )
    report(load_encoder(args.model, dtype=args.dtype), args.data)


def report(encoder: PretrainedEncoder, data: Path) -> list[Score]:
    """Print the table and return its rows."""
    parts = {name: read_pairs(data / name) for name in ("train", "dev", "test") if (data / name).is_dir()}
    same = {name: torch.tensor([pair.same for pair in pairs]) for name, pairs in parts.items()}
    vectors = {name: encode(encoder, pairs) for name, pairs in parts.items()}
    layers = ["static", *(f"layer {i}" for i in range(encoder.layers))]
    scores = []
    for standardized in (False, True):
        method = "standardized" if standardized else "plain"
        print(f"{method:14}{'threshold':>10}" + "".join(f"{name:>8}" for name in parts))
        for i, layer in enumerate(layers):
            cosines = _cosines({name: x[i] for name, x in vectors.items()}, standardized)
            threshold = best_threshold(cosines["train"], same["train"])
            accuracies = {name: accuracy(cosines[name], same[name], threshold) for name in parts}
            scores.append(Score(layer, method, threshold, accuracies))
            print(
                f"  {layer:12}{threshold:10.3f}" + "".join(f"{value:8.1f}" for value in accuracies.values())
            )
    for method in ("plain", "standardized"):
        candidates = [score for score in scores if score.method == method]
        best = max(candidates, key=lambda score: score.accuracy["train"])
        values = ", ".join(f"{value:.1f} % on {name}" for name, value in best.accuracy.items())
        print(f"best on train, {method}: {best.layer}: {values}")
    return scores


def _cosines(vectors: dict[str, Tensor], standardized: bool) -> dict[str, Tensor]:
    """Compute the cosine of each pair of vectors (pairs, 2, m), standardized with the statistics of train."""
    if standardized:
        train = vectors["train"].flatten(0, 1)
        mean, deviation = train.mean(0), train.std(0)
        vectors = {name: (x - mean) / deviation for name, x in vectors.items()}
    # via float64, so equal vectors have equal cosines
    return {name: F.cosine_similarity(*x.double().unbind(1), dim=-1).float() for name, x in vectors.items()}


if __name__ == "__main__":
    main()

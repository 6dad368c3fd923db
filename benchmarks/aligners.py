"""Word aligners compared on gold links: AER, precision and recall of intersection and grow-diag-final-and.

Each aligner is trained only on the sentences of the gold set, without the links. eflomal (`eflomal-align`,
`pip install eflomal`) and fast_align (`fast_align`) are run if they are on the PATH.

A gold set is two files: NAME.src-tgt (source ||| target) and NAME.gold (1-2 sure, 1p2 possible, counted from
1), such as those of https://github.com/neulab/awesome-align, folder examples. Greek-English needs
`pip install --no-deps bible-alignments`; punctuation is excluded there. With --threshold, the
lexical aligner is also evaluated as in `regard align --threshold`, which does not combine two directions:
both columns show the same links.

Guided attention, its combinations with the lexical aligner, and cosines of the models' states are included if
`benchmarks.greek` has trained two models for the set, in a folder with its name:

    python -m benchmarks.greek --folder greek
    python -m benchmarks.greek --folder greek-letters --books 45-66

    python -m benchmarks.aligners --gold FOLDER [--sets roen,enfr,greek] [--peers eflomal,fast_align]
        [--threshold 0.6,0.8] [--models FOLDER] [--minilm]
"""

import argparse
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from regard.models import Packed, Transformer
from regard.models.encoders.base import WordVectors
from regard.models.encoders.pretrained import load_encoder
from regard.models.layers.dropout import eval_mode
from regard.translation import (
    GoldAlignment,
    LexicalAligner,
    error_rate,
    load_translator,
    read_gold,
    read_pairs,
)
from regard.translation.alignment.alignment import Alignment
from regard.translation.alignment.attention_aligner import segment_pairs
from regard.translation.alignment.lexical_alignment import LexicalAlignment
from regard.translation.alignment.links import (
    Links,
    SymmetrizationMethod,
    read_links,
    reverse_links,
    symmetrize,
)
from regard.translation.data.bible import bible
from regard.translation.tokens import Segmentation

Array = NDArray[np.floating]
Pairs = Sequence[tuple[str, str]]
# for each pair: links source → target and target → source, or an alignment that combines them itself
Directions = Sequence[tuple[Links, Links] | LexicalAlignment]

METHODS: tuple[SymmetrizationMethod, ...] = ("intersection", "grow-diag-final-and")
BOOKS = {"greek": range(40, 45), "greek-letters": range(45, 67)}
CONFIDENT = 0.8  # minimum mean probability of the links for the canonical correlation analysis
MINILM_LAYER = 2  # counted from 0; best of 0, 2 and 5 on roen and zhen


class GoldSet(NamedTuple):
    """Sentence pairs and their gold links. counted: selects the links of a pair to evaluate, by its index."""

    name: str
    pairs: Pairs
    gold: list[GoldAlignment]
    counted: Callable[[int, Links], Links]


def main() -> None:
    """Print one table row per gold set and aligner."""
    parser = argparse.ArgumentParser(prog="benchmarks.aligners", description=__doc__.split("\n")[0])
    parser.add_argument("--gold", type=Path, help="folder with NAME.src-tgt and NAME.gold")
    parser.add_argument("--sets", help="names of gold sets, separated by commas [default: all]")
    parser.add_argument("--peers", default="eflomal,fast_align", help="[default: eflomal,fast_align]")
    parser.add_argument(
        "--models", type=Path, default=Path(), help="folder with the folders of benchmarks.greek [default: .]"
    )
    parser.add_argument("--minilm", action="store_true", help="include cosines of minilm's word vectors")
    parser.add_argument("--threshold", help="minimum scores of links, separated by commas [default: off]")
    args = parser.parse_args()
    aligners: dict[str, Callable[[Pairs], Directions]] = {"lexical aligner": align_lexically}
    for threshold in args.threshold.split(",") if args.threshold else []:
        aligners[f"lexical aligner, threshold {threshold}"] = partial(
            align_lexically, threshold=float(threshold)
        )
    for name, peer, program in (
        ("eflomal", run_eflomal, "eflomal-align"),
        ("fast_align", run_fast_align, "fast_align"),
    ):
        if name in args.peers.split(","):
            if shutil.which(program):
                aligners[name] = peer
            else:
                print(f"{name} is skipped: {program} is not on the PATH.")
    print(
        "| gold set | pairs | aligner | CPU s | intersection: AER (P, R) | grow-diag-final-and: AER (P, R) |"
    )
    print("|---|---|---|---|---|---|")
    for gold_set in read_sets(args.gold, args.sets.split(",") if args.sets else None):
        chosen = dict(aligners)
        if (folder := args.models / gold_set.name / "en-grc").is_dir():
            chosen |= model_aligners(folder.parent)
        if args.minilm:
            chosen["minilm, cosine"] = align_with_minilm
        for name, run in chosen.items():
            before = cpu_seconds()
            links = run(gold_set.pairs)
            seconds = cpu_seconds() - before
            cells = " | ".join(rate(gold_set, links, method) for method in METHODS)
            print(
                f"| {gold_set.name} | {len(gold_set.pairs):,} | {name} | {seconds:.1f} | {cells} |",
                flush=True,
            )


def read_sets(folder: Path | None, names: Sequence[str] | None) -> Iterator[GoldSet]:
    """Yield the gold sets of a folder, then Greek-English if its package is installed."""
    for path in sorted(folder.glob("*.src-tgt")) if folder else []:
        gold = path.with_suffix(".gold")
        if gold.exists() and (names is None or path.stem in names):
            yield GoldSet(path.stem, list(read_pairs(path)), read_gold(gold, 1), lambda _, links: links)
    if find_spec("bible_alignments") is None:
        print("Greek-English is skipped: pip install --no-deps bible-alignments")
        return
    for name, books in BOOKS.items():
        if names is None or name in names:
            verses = bible(books)
            gold_links = [GoldAlignment(verse.without_punctuation(verse.links)) for verse in verses]
            yield GoldSet(
                name,
                [verse.pair for verse in verses],
                gold_links,
                lambda i, links, verses=verses: verses[i].without_punctuation(links),  # type: ignore[misc]
            )


def rate(gold_set: GoldSet, links: Directions, method: SymmetrizationMethod) -> str:
    """Format the error rates of the links in both directions."""
    predicted = [gold_set.counted(i, combine(both, method)) for i, both in enumerate(links)]
    rates = error_rate(predicted, gold_set.gold)
    return f"{100 * rates.aer:.1f} ({100 * rates.precision:.1f}, {100 * rates.recall:.1f})"


def combine(both: tuple[Links, Links] | LexicalAlignment, method: SymmetrizationMethod) -> Links:
    """Combine the links of both directions."""
    return both.links(method) if isinstance(both, LexicalAlignment) else symmetrize(*both, method)


def align_lexically(pairs: Pairs, threshold: float | None = None) -> Directions:
    """Align with regard's lexical aligner; with a threshold, both directions have the same links."""
    alignments = LexicalAligner.learn(pairs).align(pairs)
    if threshold is None:
        return alignments
    return [(links, links) for links in (alignment.links(threshold=threshold) for alignment in alignments)]


def model_aligners(folder: Path) -> dict[str, Callable[[Pairs], Directions]]:
    """Return the aligners that use the two models in a folder."""
    weights = (0.5, 0.75)  # 0.75 was chosen on Greek books 40 to 44
    return {
        "guided attention": partial(align_with_attention, folder=folder),
        **{
            f"lexical aligner + guided attention, weight {weight}": partial(
                combine_with_attention, folder=folder, weight=weight
            )
            for weight in weights
        },
        "encoder and decoder states, cosine": partial(align_states, folder=folder),
        "encoder states of both models, CCA": partial(align_encoders, folder=folder),
    }


def read_attention(pairs: Pairs, folder: Path) -> Iterator[tuple[Alignment, Alignment]]:
    """Return the alignments of each pair by the models for both directions."""
    forward = load_translator(folder / "grc-en").align(pairs)
    return zip(forward, load_translator(folder / "en-grc").align(swap(pairs)), strict=True)


def align_with_attention(pairs: Pairs, folder: Path) -> Directions:
    """Align with the guided attention of two translation models."""
    return [
        (direct.links(), reverse_links(inverse.links())) for direct, inverse in read_attention(pairs, folder)
    ]


def combine_with_attention(pairs: Pairs, folder: Path, weight: float) -> Directions:
    """Align with the geometric mean of the lexical aligner and the guided attention of two models."""
    lexical = LexicalAligner.learn(pairs).align(pairs)
    return [
        alignment.combine(*attention, weight)
        for alignment, attention in zip(lexical, read_attention(pairs, folder), strict=True)
    ]


def align_states(pairs: Pairs, folder: Path) -> Directions:
    """Align by the cosine of one model's encoder states and decoder states, as in SimAlign."""
    source, target = read_states(pairs, folder / "grc-en")
    return [most_similar(*vectors) for vectors in zip(center(source), center(target), strict=True)]


def align_encoders(pairs: Pairs, folder: Path) -> Directions:
    """Align by the cosine of both models' encoder states, after a canonical correlation analysis.

    It is computed on the confident links of the lexical aligner.
    """
    source, target = (
        center(read_states(text, folder / name)[0])
        for text, name in ((pairs, "grc-en"), (swap(pairs), "en-grc"))
    )
    linked: tuple[list[Array], list[Array]] = [], []
    for alignment, first, second in zip(
        LexicalAligner.learn(pairs).align(pairs), source, target, strict=True
    ):
        rows, columns = np.nonzero((alignment.forward + alignment.backward) / 2 >= CONFIDENT)
        linked[0].append(first[columns])
        linked[1].append(second[rows])
    x, y = (np.concatenate(side) for side in linked)
    x, y = x - x.mean(0), y - y.mean(0)
    whiten_x, whiten_y = whitening(x), whitening(y)
    u, correlations, v = np.linalg.svd(whiten_x @ (x.T @ y / len(x)) @ whiten_y)
    scale = np.sqrt(correlations)
    project_x, project_y = whiten_x @ u * scale, whiten_y @ v.T * scale
    return [
        most_similar(first @ project_x, second @ project_y)
        for first, second in zip(source, target, strict=True)
    ]


def whitening(x: Array) -> Array:
    """Return a symmetric matrix that gives centered vectors unit covariance, nearly."""
    values, vectors = np.linalg.eigh(x.T @ x / len(x))
    return (vectors / np.sqrt(values + 0.01 * values.mean())) @ vectors.T


def read_states(pairs: Pairs, folder: Path) -> tuple[list[Array], list[Array]]:
    """Return the encoder states and decoder states of each pair's words.

    The state of a target word is read in the decoding steps after its tokens.
    """
    translator = load_translator(folder)
    model, source_states, target_states = translator.model, list[Array](), list[Array]()
    assert isinstance(model, Transformer)
    segmented, special = segment_pairs(translator.tokens, pairs), model.special_tokens
    for start in range(0, len(segmented), 64):
        batch = segmented[start : start + 64]
        source = Packed.of([special.source(side.ids) for side, _ in batch])
        target = Packed.of([special.target_inputs(side.ids) for _, side in batch])
        with torch.no_grad(), eval_mode(model):
            encoded = model.encode(source).split(source.lengths.tolist())
            decoded = model.hidden(source, target).split(target.lengths.tolist())
        for (first, second), x, y in zip(batch, encoded, decoded, strict=True):
            source_states.append(word_means(first, x[len(special.source_prefix) :]))
            target_states.append(word_means(second, y[len(special.target_prefix) + 1 :]))
    return source_states, target_states


def word_means(side: Segmentation, states: torch.Tensor) -> Array:
    """Average the states of each word's tokens: (tokens, m) → (words, m)."""
    sums, counts = np.zeros((len(side.words), states.shape[1])), np.zeros(len(side.words))
    np.add.at(sums, list(side.word_of), states[: len(side.word_of)].numpy())
    np.add.at(counts, list(side.word_of), 1)
    return sums / np.maximum(counts, 1)[:, None]


def align_with_minilm(pairs: Pairs) -> Directions:
    """Align by the cosine of word vectors from layer 3 of minilm, an English encoder."""
    encoder = load_encoder("minilm")
    return [
        most_similar(*(_minilm_words(embedded) for embedded in encoder.embed(list(pair)))) for pair in pairs
    ]


def _minilm_words(embedded: WordVectors) -> Array:
    vectors, words = embedded.vectors[MINILM_LAYER].numpy(), list[Array]()
    for word in re.finditer(r"\S+", embedded.sentence):
        inside = [i for i, (a, b) in enumerate(embedded.spans) if a < word.end() and b > word.start()]
        words.append(vectors[inside].mean(0) if inside else np.zeros(vectors.shape[-1]))
    return np.array(words).reshape(-1, vectors.shape[-1])


def most_similar(source: Array, target: Array) -> tuple[Links, Links]:
    """Link each target word to the source word with the highest cosine, and each source word likewise."""
    if not len(source) or not len(target):
        return frozenset(), frozenset()
    source, target = (
        x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-9) for x in (source, target)
    )
    cosine = target @ source.T
    return (
        frozenset((int(i), j) for j, i in enumerate(cosine.argmax(1))),
        frozenset((i, int(j)) for i, j in enumerate(cosine.argmax(0))),
    )


def center(vectors: Sequence[Array]) -> list[Array]:
    """Subtract the mean of all vectors."""
    mean = np.concatenate(vectors).mean(0)
    return [x - mean for x in vectors]


def swap(pairs: Pairs) -> Pairs:
    """Swap source and target of every pair."""
    return [(target, source) for source, target in pairs]


def run_eflomal(pairs: Pairs) -> Directions:
    """Align with eflomal's default settings."""
    with tempfile.TemporaryDirectory() as folder:
        paths = {name: Path(folder, name) for name in ("source", "target", "forward", "backward")}
        paths["source"].write_text("".join(f"{source}\n" for source, _ in pairs), encoding="utf-8")
        paths["target"].write_text("".join(f"{target}\n" for _, target in pairs), encoding="utf-8")
        options = (
            "-s",
            paths["source"],
            "-t",
            paths["target"],
            "-f",
            paths["forward"],
            "-r",
            paths["backward"],
        )
        subprocess.run(["eflomal-align", *options], check=True, capture_output=True)
        return _directions(*(paths[name].read_text() for name in ("forward", "backward")))


def run_fast_align(pairs: Pairs) -> Directions:
    """Align with fast_align and the options that its documentation recommends."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "pairs")
        path.write_text("".join(f"{source} ||| {target}\n" for source, target in pairs), encoding="utf-8")
        command = ["fast_align", "-i", str(path), "-d", "-o", "-v"]
        runs = [
            subprocess.run([*command, *reverse], check=True, capture_output=True, text=True)
            for reverse in ([], ["-r"])
        ]
    return _directions(*(run.stdout for run in runs))


def _directions(forward: str, backward: str) -> Directions:
    lines = zip(forward.split("\n")[:-1], backward.split("\n")[:-1], strict=True)
    return [(read_links(first)[0], read_links(second)[0]) for first, second in lines]


def cpu_seconds() -> float:
    """Return the CPU time of this process and of the programs that it has run."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


if __name__ == "__main__":
    main()

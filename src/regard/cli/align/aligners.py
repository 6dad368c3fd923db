"""The aligners of `regard align`: the lexical aligner, the attention of a translation model, or both."""

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard._util.text import pluralize
from regard.cli.shared import index, load, parse_languages
from regard.errors import ArgumentError
from regard.translation.alignment.links import SymmetrizationMethod
from regard.translation.alignment.output import AlignedPair, batch_pairs
from regard.translation.model_folder import is_pretrained

if TYPE_CHECKING:
    from regard.translation.alignment.alignment_head import AlignmentHead
    from regard.translation.alignment.lexical_aligner import LexicalAligner
    from regard.translation.alignment.links import Links
    from regard.translation.translator import Translator

Pair = tuple[str, str]

_BATCH_PAIRS = 512
_LEXICAL_BATCH_PAIRS = 10_000
_BATCH_CELLS = 4_000_000  # source words × target words per batch
_SCORED_PAIRS = 32  # number of pairs that show which direction a model translates
_MAX_SCORED_CHARACTERS, _MAX_SCORED_TOKENS = 500, 200  # longer pairs are not scored
_MIN_SCORED_TOKENS = 10  # in all pairs, source plus target; the scores of a few words say little
_CLEAR_DIFFERENCE = 1.0  # in log probability per token; about 4 for trained models, 0.1 for untrained ones
_FEW_PAIRS = 500  # with fewer, the lexical aligner prints a warning


def align_lexically(
    pairs: Iterable[Pair],
    path: Path | None,
    save: Path | None,
    threshold: float | None,
    method: SymmetrizationMethod,
) -> "Iterator[AlignedPair]":
    """Align with a saved aligner, or learn one from the pairs and save it if requested."""
    from regard.translation.alignment.lexical_aligner import LexicalAligner

    if path is not None:
        aligner = LexicalAligner.load(path)
    else:
        pairs = list(pairs)
        with _show_progress("Learning") as progress:
            aligner = LexicalAligner.learn(pairs, progress=progress)
        if len(pairs) < _FEW_PAIRS:
            print(
                f"regard: the aligner learned from only {pluralize(len(pairs), 'sentence pair')}; more text "
                "gives better links.",
                file=sys.stderr,
            )
        if save is not None:
            aligner.save(save)
    checked = path is None
    for batch in batch_pairs(pairs, _LEXICAL_BATCH_PAIRS, _BATCH_CELLS):
        if not checked:
            _check_sides(aligner, batch)
            checked = True
        for pair, alignment in zip(batch, aligner.align(batch), strict=True):
            yield AlignedPair(pair, alignment.links(method, threshold), alignment)


def _check_sides(aligner: "LexicalAligner", pairs: Sequence[Pair]) -> None:
    """Raise an error if SOURCE and TARGET seem to be in the wrong order."""
    sides = list(zip(*pairs, strict=True))
    known = [[_fraction(*aligner.count_known(texts, side)) for side in (0, 1)] for texts in sides]
    if known[0][1] > 2 * known[0][0] and known[1][0] > 2 * known[1][1]:
        raise ArgumentError(
            f"The aligner knows {known[0][0]:.0%} of the words in SOURCE as source words, but "
            f"{known[0][1]:.0%} as target words. SOURCE and TARGET seem to be in the wrong order; swap "
            "them."
        )


def _fraction(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


@contextmanager
def _show_progress(label: str) -> "Iterator[Callable[[int, int], None]]":
    """Show a progress bar on the terminal."""
    from rich.console import Console
    from rich.progress import Progress

    screen = Console(stderr=True)
    with Progress(console=screen, transient=True, disable=not screen.is_terminal) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def align_with_attention(
    pairs: Iterable[Pair],
    model: Path,
    reverse_model: Path | None,
    languages: str | None,
    overrides: dict[str, Any],
    threshold: float | None,
    method: SymmetrizationMethod | None,
) -> "Iterator[AlignedPair]":
    """Align with the cross-attention of a translation model, or of one model per direction."""
    forward, backward = _load_models(model, reverse_model, languages, overrides)
    checked = False
    for batch in batch_pairs(pairs, _BATCH_PAIRS, _BATCH_CELLS):
        if not checked and backward is not None:
            _check_directions(forward, backward, batch, languages)
            checked = True
        alignments = forward.align(batch)
        links = [alignment.links(threshold) for alignment in alignments]
        if backward is not None:
            links = _symmetrize(links, backward, batch, threshold, method)
        yield from map(AlignedPair, batch, links, alignments)


def align_with_both(
    pairs: Iterable[Pair],
    path: Path,
    models: tuple[Path, Path],
    languages: str | None,
    overrides: dict[str, Any],
    threshold: float | None,
    method: SymmetrizationMethod,
) -> "Iterator[AlignedPair]":
    """Align with a saved lexical aligner combined with the cross-attention of one model per direction."""
    from regard.translation.alignment.lexical_aligner import LexicalAligner

    aligner = LexicalAligner.load(path)
    forward, backward = _load_models(*models, languages, overrides)
    assert backward is not None
    checked = False
    for batch in batch_pairs(pairs, _BATCH_PAIRS, _BATCH_CELLS):
        if not checked:
            _check_sides(aligner, batch)
            _check_directions(forward, backward, batch, languages)
            checked = True
        alignments = zip(
            aligner.align(batch),
            forward.align(batch),
            backward.align([(target, source) for source, target in batch]),
            strict=True,
        )
        for pair, (lexical, direct, inverse) in zip(batch, alignments, strict=True):
            combined = lexical.combine(direct, inverse)
            yield AlignedPair(pair, combined.links(method, threshold), combined)


def _check_directions(
    forward: "Translator", backward: "Translator", pairs: Sequence[Pair], languages: str | None
) -> None:
    """Raise an error if the two models seem to be exchanged; warn if only one has the wrong direction."""
    swapped = [(target, source) for source, target in pairs]
    wrong = [_prefers_reverse(forward, pairs), _prefers_reverse(backward, swapped)]
    others = "SOURCE and TARGET" if languages is None else "SOURCE and TARGET, or reverse --languages"
    if all(wrong):
        raise ArgumentError(
            "--model seems to translate TARGET to SOURCE, and --reverse-model SOURCE to TARGET: both give "
            f"higher probabilities to the opposite direction. Exchange the two models, or {others}."
        )
    if any(wrong):
        option, direction = (
            ("--model", "TARGET to SOURCE") if wrong[0] else ("--reverse-model", "SOURCE to TARGET")
        )
        print(
            f"regard: {option} seems to translate {direction}, so its links may be poor; check the model.",
            file=sys.stderr,
        )


def _prefers_reverse(translator: "Translator", pairs: Sequence[Pair]) -> bool:
    """Return whether the model gives clearly higher probabilities if source and target are exchanged."""
    limit = min(_MAX_SCORED_TOKENS, translator.max_tokens)
    differences, count = list[float](), 0
    for source, target in pairs:
        if not source.strip() or not target.strip() or max(len(source), len(target)) > _MAX_SCORED_CHARACTERS:
            continue
        tokens = _encode(translator, [(source, target), (target, source)])
        if max(len(side) for pair in tokens for side in pair) > limit:
            continue
        score, reverse_score = _log_probabilities(translator, tokens)
        differences.append(reverse_score - score)
        count += len(tokens[0][1]) + len(tokens[1][1])
        if len(differences) == _SCORED_PAIRS:
            break
    return count >= _MIN_SCORED_TOKENS and sum(differences) / len(differences) > _CLEAR_DIFFERENCE


def _encode(translator: "Translator", pairs: Sequence[Pair]) -> list[tuple[list[int], list[int]]]:
    source_tokens, target_tokens = translator.tokens
    return [(source_tokens.encode(source), target_tokens.encode(target)) for source, target in pairs]


def _log_probabilities(
    translator: "Translator", pairs: Sequence[tuple[list[int], list[int]]]
) -> Iterator[float]:
    """Yield the mean log probability of each pair's target tokens."""
    from regard.translation.decoding.scoring import token_log_probabilities

    tokens = translator.tokens.target
    sources, targets = zip(*pairs, strict=True)
    for target, values in zip(
        targets, token_log_probabilities(translator.model, sources, targets), strict=True
    ):
        # a text in another script has only unknown tokens, which are easy to predict
        known = [
            -math.log(len(tokens)) if token == tokens.special.unknown else value
            for token, value in zip(target, values, strict=True)
        ]
        yield sum(known) / max(len(known), 1)


def _load_models(
    model: Path, reverse_model: Path | None, languages: str | None, overrides: dict[str, Any]
) -> "tuple[Translator, Translator | None]":
    """Load the models for both directions. overrides: options for the first model's alignment head."""
    needs_head = overrides.keys() != {"layer", "heads", "shift"}
    forward = load(model, aligning=needs_head, languages=languages if is_pretrained(model) else None)
    backward = None
    if reverse_model is not None:
        multilingual = languages is not None and is_pretrained(reverse_model)
        reverse = "-".join(reversed(parse_languages(languages or ""))) if multilingual else None
        backward = load(reverse_model, aligning=True, languages=reverse)
    forward.alignment_head = _alignment_head(forward, overrides)
    return forward, backward


def _alignment_head(translator: "Translator", overrides: dict[str, Any]) -> "AlignmentHead":
    """Apply the options to the model's alignment head; negative numbers count from the end."""
    from regard.translation.alignment.cross_attention import cross_attention_layers, layer_name

    heads = overrides.get("heads")
    head = replace(translator.alignment_head, **{**overrides, "heads": None} if heads else overrides)
    if not heads:
        return head
    count = cross_attention_layers(translator.model)[layer_name(translator.model, head)]
    return replace(head, heads=tuple(index("--heads", number, count) for number in heads))


def _symmetrize(
    forward: "list[Links]",
    backward: "Translator",
    pairs: Sequence[Pair],
    threshold: float | None,
    method: SymmetrizationMethod | None,
) -> "list[Links]":
    from regard.translation.alignment.links import reverse_links, symmetrize

    alignments = backward.align([(target, source) for source, target in pairs])
    return [
        symmetrize(links, reverse_links(alignment.links(threshold)), method or "grow-diag-final-and")
        for links, alignment in zip(forward, alignments, strict=True)
    ]

"""Evaluate translations: sacreBLEU's BLEU and chrF with signatures, exact match, and scores by length."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from regard._util.checks import check_int
from regard._util.extras import require
from regard._util.text import pluralize, type_name
from regard.errors import ArgumentError, DTypeError
from regard.models.encoders.words import is_word, split_words

if TYPE_CHECKING:
    from sacrebleu.metrics.bleu import BLEU

# sacreBLEU tokenizers that need no download
TOKENIZERS = ("13a", "intl", "zh", "ja-mecab", "ko-mecab", "char", "none")
MAX_BINS = 8
MIN_SENTENCES = 30  # minimum number per bin, if available; BLEU on fewer sentences is unreliable


class LengthRange(NamedTuple):
    """A range of sentence lengths in words, `first` to `last`; unbounded if `last` is None."""

    first: int
    last: int | None

    def __str__(self) -> str:
        if self.last is None:
            return f"{self.first}+"
        return f"{self.first}–{self.last}" if self.last > self.first else f"{self.first}"


class LengthBucket(NamedTuple):
    """Scores of the sentences in a length range: BLEU, number of sentences, and exact match rate (0 to 1)."""

    lengths: LengthRange
    bleu: float
    sentences: int
    exact: float


@dataclass(frozen=True)
class Scores:
    """Result of `evaluate`; prints one line per score, with its signature.

    sentences: number of sentences.
    bleu, chrf, lowercase_bleu: 0 to 100.
    bleu_signature, chrf_signature, lowercase_signature: sacreBLEU's signatures.
    exact: fraction of translations that equal the reference, 0 to 1.
    by_length: scores by source length, if sources were passed.

    >>> from regard.translation import evaluate
    >>> scores = evaluate(["Dogs bark at the moon.", "a cat"], ["Dogs bark at the moon.", "A cat"])
    >>> scores.sentences, round(scores.bleu, 2), round(scores.lowercase_bleu, 2), scores.exact
    (2, 92.41, 100.0, 0.5)
    """

    sentences: int
    bleu: float
    bleu_signature: str
    chrf: float
    chrf_signature: str
    exact: float
    lowercase_bleu: float
    lowercase_signature: str
    by_length: tuple[LengthBucket, ...] = ()

    def __str__(self) -> str:
        lines = [
            f"BLEU         {self.bleu:6.2f}    {self.bleu_signature}",
            f"lower case   {self.lowercase_bleu:6.2f}    {self.lowercase_signature}",
            f"chrF         {self.chrf:6.2f}    {self.chrf_signature}",
            f"exact match  {100 * self.exact:6.2f} %  of {pluralize(self.sentences, 'sentence')}",
        ]
        if self.bleu_signature == self.lowercase_signature:
            del lines[1]
        if self.by_length:
            lines += ["", f"{'source words':>12}  {'sentences':>9}  {'BLEU':>6}  {'exact':>8}"]
        lines += [
            f"{bucket.lengths!s:>12}  {bucket.sentences:9,}  {bucket.bleu:6.2f}  {100 * bucket.exact:6.2f} %"
            for bucket in self.by_length
        ]
        return "\n".join(lines)


def evaluate(
    translations: Sequence[str],
    references: Sequence[str],
    *,
    sources: Sequence[str] | None = None,
    tokenize: str = "13a",
    lowercase: bool = False,
) -> Scores:
    """Score translations against references, one reference per sentence.

    sources: source sentences, for scores by length; see `by_length`.
    tokenize: sacreBLEU tokenizer: "13a", "intl", "zh", "ja-mecab", "ko-mecab", "char" or "none".
    lowercase: ignore case. Lowercase BLEU, common in older papers, is always computed as well.

    >>> from regard.translation.evaluation import evaluate
    >>> print(evaluate(["Dogs bark at the moon.", "a cat"], ["Dogs bark at the moon.", "A cat"]))
    BLEU          92.41    nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:...
    lower case   100.00    nrefs:1|case:lc|eff:no|tok:13a|smooth:exp|version:...
    chrF          96.44    nrefs:1|case:mixed|eff:yes|nc:6|nw:0|space:no|version:...
    exact match   50.00 %  of 2 sentences
    """
    _check("evaluate", translations=translations, references=references)
    require("sacrebleu", "evaluate")
    from sacrebleu.metrics.chrf import CHRF

    metrics = [_bleu(tokenize, lowercase), _bleu(tokenize, lowercase=True), CHRF(lowercase=lowercase)]
    scores = [metric.corpus_score(translations, [references]).score for metric in metrics]
    signatures = [str(metric.get_signature()) for metric in metrics]
    buckets: list[LengthBucket] = []
    if sources is not None:
        options = {"tokenize": tokenize, "lowercase": lowercase}
        buckets = by_length(translations, references, sources, **options)  # type: ignore[arg-type]
    return Scores(
        sentences=len(references),
        bleu=scores[0],
        bleu_signature=signatures[0],
        chrf=scores[2],
        chrf_signature=signatures[2],
        exact=exact_match(translations, references, lowercase=lowercase),
        lowercase_bleu=scores[1],
        lowercase_signature=signatures[1],
        by_length=tuple(buckets),
    )


def exact_match(translations: Sequence[str], references: Sequence[str], *, lowercase: bool = False) -> float:
    """Return the fraction of translations that equal their references, ignoring differences in whitespace."""
    _check("exact_match", translations=translations, references=references)
    fold = str.lower if lowercase else str
    pairs = zip(map(fold, translations), map(fold, references), strict=True)
    return sum(translation.split() == reference.split() for translation, reference in pairs) / len(references)


def by_length(
    translations: Sequence[str],
    references: Sequence[str],
    sources: Sequence[str],
    *,
    bins: Sequence[int] | None = None,
    tokenize: str = "13a",
    lowercase: bool = False,
) -> list[LengthBucket]:
    """Compute BLEU and exact match by source length in words.

    translations, references, sources: one entry per sentence.
    tokenize, lowercase: see `evaluate`.
    bins: the largest length of each bin; longer sentences form another bin. Default: `length_bins`.

    BLEU uses effective order: n-grams longer than all sentences in a bin are not counted.

    >>> from regard.translation.evaluation import by_length
    >>> sources, references = ["Hund", "Eine Katze schläft"], ["dog", "A cat is sleeping"]
    >>> for bucket in by_length(["dog", "A cat"], references, sources, bins=[2, 4]):
    ...     print(bucket.lengths, bucket.sentences, round(bucket.bleu))
    1–2 1 100
    3–4 1 37
    """
    _check("by_length", translations=translations, references=references, sources=sources)
    lengths = [count_words(source) for source in sources]
    edges = _edges(lengths) if bins is None else _check_bins(bins)
    bleu = _bleu(tokenize, lowercase, effective_order=True)
    buckets = []
    for span in _ranges(edges, lengths):
        inside = [
            i for i, n in enumerate(lengths) if span.first <= n and (span.last is None or n <= span.last)
        ]
        if not inside:
            continue
        candidates, targets = [translations[i] for i in inside], [references[i] for i in inside]
        score = bleu.corpus_score(candidates, [targets]).score
        exact = exact_match(candidates, targets, lowercase=lowercase)
        buckets.append(LengthBucket(span, score, len(inside), exact))
    return buckets


def count_words(sentence: str) -> int:
    """Count the words in a sentence, excluding punctuation; each Han character counts as one word."""
    return sum(is_word(word.text) for word in split_words(sentence))


def length_bins(sources: Sequence[str]) -> list[int]:
    """Return bins for `by_length`: up to 8 bins of equal width, merged until each has 30 sentences."""
    return _edges([count_words(source) for source in sources])


def _edges(lengths: Sequence[int]) -> list[int]:
    """Return the largest length of each bin."""
    if not lengths:
        return []
    shortest, longest = min(lengths), max(lengths)
    width = -(-(longest - shortest + 1) // MAX_BINS)
    edges: list[int] = []
    sentences = 0
    for edge in range(shortest + width - 1, longest + width, width):
        sentences += sum(edge - width < n <= edge for n in lengths)
        if sentences >= MIN_SENTENCES:
            edges.append(min(edge, longest))
            sentences = 0
    # too few sentences remain for another bin: extend the last one
    return [*edges[:-1], longest]


def _check_bins(bins: Sequence[int]) -> list[int]:
    for edge in bins:
        check_int("by_length got a bin edge", edge)
    if not bins or list(bins) != sorted(set(bins)):
        raise ArgumentError(
            f"by_length got bins={list(bins)}; pass strictly increasing lengths, such as [5, 10, 20]."
        )
    return list(bins)


def _ranges(edges: Sequence[int], lengths: Sequence[int]) -> list[LengthRange]:
    firsts = [min(min(lengths), edges[0]), *(edge + 1 for edge in edges)]
    return [LengthRange(first, last) for first, last in zip(firsts, [*edges, None], strict=True)]


def check_tokenizer(tokenize: str) -> None:
    """Raise unless `evaluate` supports the tokenizer. Called before a long translation to fail early."""
    _bleu(tokenize, lowercase=False)


def _bleu(tokenize: str, lowercase: bool, *, effective_order: bool = False) -> "BLEU":
    require("sacrebleu", "BLEU")
    from sacrebleu.metrics.bleu import BLEU

    if tokenize not in TOKENIZERS:
        raise ArgumentError(
            f"tokenize={tokenize!r} is not supported. Choose from {', '.join(map(repr, TOKENIZERS))}."
        )
    try:
        # force=True: do not warn about text that looks tokenized
        return BLEU(tokenize=tokenize, lowercase=lowercase, effective_order=effective_order, force=True)
    except RuntimeError:  # a package is missing
        raise ArgumentError(
            f"tokenize={tokenize!r} needs an additional package: pip install 'sacrebleu[{tokenize[:2]}]'"
        ) from None


def _check(function: str, **arguments: Sequence[str]) -> None:
    """Raise unless all arguments are lists of sentences with the same nonzero length."""
    for name, sentences in arguments.items():
        if isinstance(sentences, str):
            raise DTypeError(f"{function} got one string as {name}; pass a list of sentences.")
        if not isinstance(sentences, Sequence):
            raise DTypeError(f"{function} got {type_name(sentences)} as {name}; pass a list: list({name}).")
        for i, sentence in enumerate(sentences):
            if not isinstance(sentence, str):
                raise DTypeError(f"{function} got {type_name(sentence)} as {name}[{i}]; pass strings.")
    (first_name, first), *others = arguments.items()
    for name, other in others:
        if len(first) != len(other):
            raise ArgumentError(
                f"{function} got {first_name} of length {len(first):,} and {name} of length {len(other):,}; "
                "pass lists of equal length."
            )
    if not first:
        raise ArgumentError(f"{function} got no sentences; pass at least one.")

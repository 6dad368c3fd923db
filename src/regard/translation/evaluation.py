"""How good translations are: BLEU and chrF by sacreBLEU with their signatures, exact match; by length too."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from regard._util.checks import check_int
from regard.errors import ArgumentError, DTypeError
from regard.models.encoders.words import is_word, split_words

if TYPE_CHECKING:
    from sacrebleu.metrics.bleu import BLEU

# those of sacreBLEU that download nothing
TOKENIZERS = ("13a", "intl", "zh", "ja-mecab", "ko-mecab", "char", "none")
BINS = 8  # at most, by length
LEAST = 30  # sentences of a bin, if there are so many: BLEU of fewer says little


class Lengths(NamedTuple):
    """Lengths in words, from the first to the last; without a last, all that are longer.

    >>> from regard.translation.evaluation import Lengths
    >>> print(Lengths(5, 8), Lengths(3, 3), Lengths(21, None))
    5–8 3 21+
    """

    first: int
    last: int | None

    def __str__(self) -> str:
        if self.last is None:
            return f"{self.first}+"
        return f"{self.first}–{self.last}" if self.last > self.first else f"{self.first}"


class LengthBucket(NamedTuple):
    """How well the sentences of some lengths are translated: BLEU, and the share of exact matches, 0 to 1."""

    lengths: Lengths
    bleu: float
    sentences: int
    exact: float


@dataclass(frozen=True)
class Scores:
    """What `evaluate` finds; printed, a line for each score with its signature.

    sentences: how many there were.
    bleu, chrf, lowercase_bleu: 0 to 100.
    bleu_signature, chrf_signature, lowercase_signature: how sacreBLEU computed each.
    exact: the share of sentences translated exactly, 0 to 1.
    by_length: where sources were given, the same for short sentences up to long ones.

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
            f"exact match  {100 * self.exact:6.2f} %  of {self.sentences:,} sentences",
        ]
        if self.bleu_signature == self.lowercase_signature:
            del lines[1]
        if self.by_length:
            lines += ["", f"{'source words':>12}  {'sentences':>9}  {'BLEU':>6}  {'exact':>8}"]
        lines += [
            f"{one.lengths!s:>12}  {one.sentences:9,}  {one.bleu:6.2f}  {100 * one.exact:6.2f} %"
            for one in self.by_length
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
    """Compare translations with references, line by line.

    sources: to tell short sentences from long ones, see `by_length`.
    tokenize: how sacreBLEU cuts words: "13a", "intl", "zh", "ja-mecab", "ko-mecab", "char" or "none".
    lowercase: whether upper and lower case are the same. BLEU in lower case is always found too, as older
        papers print it.

    >>> from regard.translation.evaluation import evaluate
    >>> print(evaluate(["Dogs bark at the moon.", "a cat"], ["Dogs bark at the moon.", "A cat"]))
    BLEU          92.41    nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:...
    lower case   100.00    nrefs:1|case:lc|eff:no|tok:13a|smooth:exp|version:...
    chrF          96.44    nrefs:1|case:mixed|eff:yes|nc:6|nw:0|space:no|version:...
    exact match   50.00 %  of 2 sentences
    """
    _check("evaluate", translations=translations, references=references)
    from sacrebleu.metrics.chrf import CHRF

    metrics = [
        _bleu(tokenize, lowercase),
        _bleu(tokenize, lowercase=True),
        CHRF(lowercase=lowercase),
    ]
    found = [metric.corpus_score(translations, [references]).score for metric in metrics]
    signatures = [str(metric.get_signature()) for metric in metrics]
    lengths: list[LengthBucket] = []
    if sources is not None:
        options = {"tokenize": tokenize, "lowercase": lowercase}
        lengths = by_length(translations, references, sources, **options)  # type: ignore[arg-type]
    return Scores(
        sentences=len(references),
        bleu=found[0],
        bleu_signature=signatures[0],
        chrf=found[2],
        chrf_signature=signatures[2],
        exact=exact_match(translations, references, lowercase=lowercase),
        lowercase_bleu=found[1],
        lowercase_signature=signatures[1],
        by_length=tuple(lengths),
    )


def exact_match(translations: Sequence[str], references: Sequence[str], *, lowercase: bool = False) -> float:
    """The share of translations that equal their references, however their words are spaced.

    >>> from regard.translation.evaluation import exact_match
    >>> exact_match(["Dogs bark", "cats"], ["Dogs  bark ", "Cats"])
    0.5
    """
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
    """BLEU and exact match of short sources up to long ones, by their length in words.

    translations, references, sources: sentence by sentence.
    tokenize, lowercase: as in `evaluate`.
    bins: the longest length of each bin; what is longer than the last is one more. By default `length_bins`.

    BLEU counts words in a row, up to four; where no sentence of a bin has so many, it does with fewer.

    >>> from regard.translation.evaluation import by_length
    >>> sources, references = ["Hund", "Eine Katze schläft"], ["dog", "A cat is sleeping"]
    >>> for one in by_length(["dog", "A cat"], references, sources, bins=[2, 4]):
    ...     print(one.lengths, one.sentences, round(one.bleu))
    1–2 1 100
    3–4 1 37
    """
    _check("by_length", translations=translations, references=references, sources=sources)
    lengths = [count_words(source) for source in sources]
    edges = _edges(lengths) if bins is None else _checked(bins)
    bleu = _bleu(tokenize, lowercase, effective_order=True)
    found = []
    for span in _spans(edges, lengths):
        inside = [
            i for i, n in enumerate(lengths) if span.first <= n and (span.last is None or n <= span.last)
        ]
        if not inside:
            continue
        ours, theirs = [translations[i] for i in inside], [references[i] for i in inside]
        score = bleu.corpus_score(ours, [theirs]).score
        found.append(LengthBucket(span, score, len(inside), exact_match(ours, theirs, lowercase=lowercase)))
    return found


def count_words(sentence: str) -> int:
    """How many words a sentence has, punctuation not counted; each Han character is one.

    >>> from regard.translation.evaluation import count_words
    >>> count_words("Dogs don't bark, they say."), count_words("我愛狗。")
    (5, 3)
    """
    return sum(is_word(word.text) for word in split_words(sentence))


def length_bins(sources: Sequence[str], *, most: int = BINS, least: int = LEAST) -> list[int]:
    """Bins for `by_length`: of one width, at most so many, and none with fewer sentences than `least`.

    >>> from regard.translation.evaluation import length_bins
    >>> length_bins(["a", "a b", "a b c"] * 40 + ["a b c d e f"])
    [1, 2, 6]
    """
    check_int("length_bins got most", most, min=1)
    check_int("length_bins got least", least, min=1)
    return _edges([count_words(source) for source in sources], most, least)


def _edges(lengths: Sequence[int], most: int = BINS, least: int = LEAST) -> list[int]:
    """The longest length of each bin."""
    if not lengths:
        return []
    shortest, longest = min(lengths), max(lengths)
    width = -(-(longest - shortest + 1) // most)
    edges: list[int] = []
    waiting = 0
    for edge in range(shortest + width - 1, longest + width, width):
        waiting += sum(edge - width < n <= edge for n in lengths)
        if waiting >= least:
            edges.append(min(edge, longest))
            waiting = 0
    # what is left over is too little for a bin of its own
    return [*edges[:-1], longest]


def _checked(bins: Sequence[int]) -> list[int]:
    for edge in bins:
        check_int("by_length got a bin up to", edge)
    if not bins or list(bins) != sorted(set(bins)):
        raise ArgumentError(f"by_length got bins={list(bins)}; give growing lengths: [5, 10, 20].")
    return list(bins)


def _spans(edges: Sequence[int], lengths: Sequence[int]) -> list[Lengths]:
    firsts = [min(min(lengths), edges[0]), *(edge + 1 for edge in edges)]
    return [Lengths(first, last) for first, last in zip(firsts, [*edges, None], strict=True)]


def check_tokenizer(tokenize: str) -> None:
    """Whether `evaluate` can cut words so; to ask before minutes of translating.

    >>> from regard.translation.evaluation import check_tokenizer
    >>> check_tokenizer("13b")
    Traceback (most recent call last):
    regard.errors.ArgumentError: tokenize='13b' (--tokenize); it can be '13a', 'intl', ...
    """
    _bleu(tokenize, lowercase=False)


def _bleu(tokenize: str, lowercase: bool, *, effective_order: bool = False) -> "BLEU":
    from sacrebleu.metrics.bleu import BLEU

    if tokenize not in TOKENIZERS:
        raise ArgumentError(
            f"tokenize={tokenize!r} (--tokenize); it can be {', '.join(map(repr, TOKENIZERS))}."
        )
    try:
        # force: no warning about text that looks as if it were cut into words already
        return BLEU(tokenize=tokenize, lowercase=lowercase, effective_order=effective_order, force=True)
    except RuntimeError:  # a package is missing
        raise ArgumentError(
            f"tokenize={tokenize!r} needs one more package: pip install 'sacrebleu[{tokenize[:2]}]'"
        ) from None


def _check(who: str, **given: Sequence[str]) -> None:
    """As many sentences everywhere, and at least one."""
    for name, sentences in given.items():
        if isinstance(sentences, str):
            raise DTypeError(f"{who} got one string as {name}; give a list of sentences.")
        if not isinstance(sentences, Sequence):
            raise DTypeError(
                f"{who} got a {type(sentences).__name__} as {name}; give a list of sentences: list({name})."
            )
        for number, sentence in enumerate(sentences):
            if not isinstance(sentence, str):
                raise DTypeError(
                    f"{who} got a {type(sentence).__name__} as number {number} of {name}; give strings."
                )
    (first, one), *others = given.items()
    for name, other in others:
        if len(one) != len(other):
            raise ArgumentError(
                f"{who} got {len(one):,} {first} and {len(other):,} {name}; each sentence needs its own."
            )
    if not one:
        raise ArgumentError(f"{who} got no sentences; give at least one.")

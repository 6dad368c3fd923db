"""Batches of Multi30k, German to English, in 8,000 pieces; without the data, sentences of such lengths."""

import io
import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

from benchmarks.data import DATA

FOLDER = DATA / "multi30k"
VOCABULARY = 8_000
PADDING, START, END, UNKNOWN = range(4)


class Pair(NamedTuple):
    """Token numbers of a sentence, and of its translation between a start and an end mark."""

    source: list[int]
    target: list[int]

    @property
    def size(self) -> int:
        """How many tokens are read: the target's end mark is only answered."""
        return len(self.source) + len(self.target) - 1


Batch = list[Pair]


def pairs(most: int = 29_000) -> tuple[list[Pair], str]:
    """Sentence pairs in the order of the file, and where they come from."""
    try:
        texts = [
            (FOLDER / f"train.{language}").read_text("utf-8").splitlines()[:most] for language in ("de", "en")
        ]
    except OSError:
        return _invented(most), "invented sentences of Multi30k's lengths"
    encode, how = _tokenizer([*texts[0], *texts[1]])
    encoded = [encode(lines) for lines in texts]
    found = [Pair([*source, END], [START, *target, END]) for source, target in zip(*encoded, strict=True)]
    return found, f"Multi30k, {how}"


def in_random_order(data: Sequence[Pair], tokens: int, seed: int = 0) -> list[Batch]:
    """Batches of about so many source and target tokens, as the sentences come."""
    shuffled = list(data)
    random.Random(seed).shuffle(shuffled)
    return _cut(shuffled, tokens)


def bucketed(data: Sequence[Pair], tokens: int, seed: int = 0) -> list[Batch]:
    """Batches of about so many source and target tokens, each of sentences of like lengths."""
    shuffle = random.Random(seed).shuffle
    ordered = list(data)
    shuffle(ordered)
    ordered.sort(key=lambda pair: (len(pair.target), len(pair.source)))
    batches = _cut(ordered, tokens)
    shuffle(batches)
    return batches


def _cut(data: Sequence[Pair], tokens: int) -> list[Batch]:
    """Full batches only, so that all are of about one size."""
    batches: list[Batch] = []
    batch: Batch = []
    held = 0
    for pair in data:
        batch.append(pair)
        held += pair.size
        if held >= tokens:
            batches.append(batch)
            batch, held = [], 0
    return batches


def _tokenizer(lines: Sequence[str]) -> tuple[Callable[[list[str]], list[list[int]]], str]:
    """From lines to lists of numbers of pieces."""
    try:
        import sentencepiece
    except ImportError:
        return _pieces, "words cut into pieces of up to 5 letters"
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        vocab_size=VOCABULARY,
        hard_vocab_limit=False,
        pad_id=PADDING,
        bos_id=START,
        eos_id=END,
        unk_id=UNKNOWN,
        num_threads=1,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue()).encode, "SentencePiece"


def _pieces(lines: list[str]) -> list[list[int]]:
    """Numbers of word pieces; different ones may share a number."""
    numbers: dict[str, int] = {}
    found = []
    for line in lines:
        parts = [word[i : i + 5] for word in line.split() for i in range(0, len(word), 5)]
        found.append([4 + numbers.setdefault(part, len(numbers)) % (VOCABULARY - 4) for part in parts])
    return found


def _invented(most: int) -> list[Pair]:
    """Lengths from 5 to 60 around 15, the target's near the source's; few words are common, most are rare."""
    draw = random.Random(0)

    def sentence(length: float) -> list[int]:
        size = min(60, max(5, round(length)))
        return [4 + int((VOCABULARY - 4) ** draw.random()) % (VOCABULARY - 4) for _ in range(size)]

    found = []
    for _ in range(most):
        length = draw.lognormvariate(2.6, 0.35)
        source, target = sentence(length), sentence(length * draw.lognormvariate(0, 0.15))
        found.append(Pair([*source, END], [START, *target, END]))
    return found

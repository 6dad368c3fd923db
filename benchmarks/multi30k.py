"""Batches of Multi30k, German to English, vocabulary of 8,000; synthetic sentences if the data is missing."""

import io
import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

from benchmarks.data import DATA

FOLDER = DATA / "multi30k"
VOCABULARY = 8_000
PADDING, START, END, UNKNOWN = range(4)


class Pair(NamedTuple):
    """Token ids of a sentence (with end token) and its translation (with start and end token)."""

    source: list[int]
    target: list[int]

    @property
    def size(self) -> int:
        """Number of input tokens: the end token of the target is only predicted."""
        return len(self.source) + len(self.target) - 1


Batch = list[Pair]


def load_pairs(max_pairs: int = 29_000) -> tuple[list[Pair], str]:
    """Load sentence pairs in the order of the file; also return a description of the data."""
    try:
        texts = [
            (FOLDER / f"train.{language}").read_text("utf-8").splitlines()[:max_pairs]
            for language in ("de", "en")
        ]
    except OSError:
        return _synthetic_pairs(max_pairs), "synthetic sentences with lengths similar to Multi30k"
    encode, tokenization = _tokenizer([*texts[0], *texts[1]])
    encoded = [encode(lines) for lines in texts]
    result = [Pair([*source, END], [START, *target, END]) for source, target in zip(*encoded, strict=True)]
    return result, f"Multi30k, {tokenization}"


def random_batches(data: Sequence[Pair], tokens: int, seed: int = 0) -> list[Batch]:
    """Batch sentences in random order, about `tokens` source and target tokens per batch."""
    shuffled = list(data)
    random.Random(seed).shuffle(shuffled)
    return _split(shuffled, tokens)


def bucketed_batches(data: Sequence[Pair], tokens: int, seed: int = 0) -> list[Batch]:
    """Batch sentences of similar length, about `tokens` source and target tokens per batch."""
    shuffle = random.Random(seed).shuffle
    ordered = list(data)
    shuffle(ordered)
    ordered.sort(key=lambda pair: (len(pair.target), len(pair.source)))
    batches = _split(ordered, tokens)
    shuffle(batches)
    return batches


def _split(data: Sequence[Pair], tokens: int) -> list[Batch]:
    """Split into batches of about equal size; drop the incomplete last one."""
    batches: list[Batch] = []
    batch: Batch = []
    total = 0
    for pair in data:
        batch.append(pair)
        total += pair.size
        if total >= tokens:
            batches.append(batch)
            batch, total = [], 0
    return batches


def _tokenizer(lines: Sequence[str]) -> tuple[Callable[[list[str]], list[list[int]]], str]:
    """Train a tokenizer; return its encode function and a description."""
    try:
        import sentencepiece
    except ImportError:
        return _hash_encode, "words split into pieces of up to 5 letters"
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


def _hash_encode(lines: list[str]) -> list[list[int]]:
    """Encode fixed-length word pieces; different pieces may share an id."""
    ids: dict[str, int] = {}
    result = []
    for line in lines:
        parts = [word[i : i + 5] for word in line.split() for i in range(0, len(word), 5)]
        result.append([4 + ids.setdefault(part, len(ids)) % (VOCABULARY - 4) for part in parts])
    return result


def _synthetic_pairs(count: int) -> list[Pair]:
    """Draw sentences of 5 to 60 tokens, about 15 on average, with Zipf-like token frequencies."""
    rng = random.Random(0)

    def sentence(length: float) -> list[int]:
        size = min(60, max(5, round(length)))
        return [4 + int((VOCABULARY - 4) ** rng.random()) % (VOCABULARY - 4) for _ in range(size)]

    result = []
    for _ in range(count):
        length = rng.lognormvariate(2.6, 0.35)
        source, target = sentence(length), sentence(length * rng.lognormvariate(0, 0.15))
        result.append(Pair([*source, END], [START, *target, END]))
    return result

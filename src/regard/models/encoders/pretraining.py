"""Base class for encoders trained on the user's own text: vocabulary, training, saving and loading."""

import inspect
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from regard._util.checks import check_int, check_number, check_sentences
from regard._util.files import write_atomic
from regard._util.text import pluralize, shorten
from regard.errors import ArgumentError
from regard.models.encoders.base import TokenVectors, WordEncoder
from regard.models.encoders.words import Vocabulary, split_words
from regard.models.packed import Packed
from regard.models.parameters import meta_device, read_parameters

_INVALID = (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError, RuntimeError)
_EMBED_BATCH = 64  # sentences per batch in `embed`


class LearnedEncoder(WordEncoder):
    """Base class for encoders with a word vocabulary that are trained on sentences with `learn`.

    The constructor takes a vocabulary and JSON-serializable `options`. Subclasses implement `options`,
    `states` (the vectors of each layer) and `loss`.

    >>> from regard.models import BertEncoder, ElmoEncoder
    >>> from regard.models.encoders.pretraining import LearnedEncoder
    >>> issubclass(ElmoEncoder, LearnedEncoder) and issubclass(BertEncoder, LearnedEncoder)
    True
    """

    format: ClassVar[str]  # file format and version
    special_tokens: ClassVar[tuple[str, ...]] = ("<unk>", "<s>", "</s>")

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__()
        if (
            not isinstance(vocabulary, Vocabulary)
            or vocabulary.special_tokens != self.special_tokens
            or len(vocabulary) == len(self.special_tokens)
        ):
            name = type(self).__name__
            raise ArgumentError(
                f"{name} got {shorten(repr(vocabulary))}; pass a vocabulary built with its special "
                f"tokens: Vocabulary.of(sentences, special_tokens={name}.special_tokens)."
            )
        self.vocabulary = vocabulary

    @property
    def options(self) -> dict[str, Any]:
        """Constructor arguments other than the vocabulary."""
        raise NotImplementedError(f"{type(self).__name__} must implement options")

    def states(self, tokens: Tensor | Packed, lengths: Tensor | None = None) -> Tensor:
        """Return all vector layers: (layers, …, m) for tokens (b, l) or packed (n)."""
        raise NotImplementedError(f"{type(self).__name__} must implement states(tokens, lengths)")

    def loss(self, tokens: Tensor | Packed | str | Sequence[str], lengths: Tensor | None = None) -> Tensor:
        """Return the training loss, averaged over the tokens."""
        raise NotImplementedError(f"{type(self).__name__} must implement loss(tokens, lengths)")

    def trained_parameters(self) -> Iterator[nn.Parameter]:
        """Return the parameters that `learn` optimizes."""
        return self.parameters()

    def pack(self, sentences: str | Sequence[str]) -> Packed:
        """Convert sentences to packed token ids. Each sentence starts with <s> and ends with </s>."""
        device = next(self.parameters()).device
        return Packed.of([self.encode(sentence) for sentence in check_sentences(sentences)], device)

    def encode(self, sentence: str) -> list[int]:
        """Return the token ids of a sentence, including <s> and </s>."""
        start, end = self.special_tokens.index("<s>"), self.special_tokens.index("</s>")
        return [start, *self.vocabulary.ids(word.text for word in split_words(sentence)), end]

    def token_vectors(self, sentences: Sequence[str]) -> list[TokenVectors]:
        splits = [split_words(sentence) for sentence in sentences]
        order = sorted(range(len(sentences)), key=lambda i: len(splits[i]))  # reduces padding
        vectors: dict[int, TokenVectors] = {}
        for start in range(0, len(order), _EMBED_BATCH):
            batch = order[start : start + _EMBED_BATCH]
            packed = self.pack([sentences[i] for i in batch])
            states = self.states(packed).split(packed.lengths.tolist(), 1)
            for i, state, ids in zip(batch, states, packed.split(packed.tokens), strict=True):
                spans = [None, *((word.start, word.stop) for word in splits[i]), None]
                tokens = ["<s>", *(word.text for word in splits[i]), "</s>"]
                vectors[i] = TokenVectors(state, spans, tokens, (ids > 0).tolist())
        return [vectors[i] for i in range(len(sentences))]

    @classmethod
    def learn(
        cls,
        sentences: Sequence[str],
        *,
        min_count: int = 2,
        max_vocab_size: int | None = 10_000,
        epochs: int = 10,
        max_seconds: float | None = None,
        batch_size: int = 32,
        learning_rate: float = 3e-3,
        seed: int = 0,
        report: Callable[[int, float], None] | None = None,
        **options: Any,
    ) -> Self:
        """Train on sentences with Adam for `epochs` epochs, or until `max_seconds` have passed.

        min_count: minimum number of occurrences of a word. max_vocab_size: maximum number of words. Other
            words become <unk>.
        batch_size: sentences per update. learning_rate: initial learning rate, which decays to a tenth.
        seed: random seed. Training is reproducible unless max_seconds ends it early.
        report: called after each epoch with its index and mean loss.
        options: passed to the constructor, e.g. width and layers.

        >>> from regard.models import ElmoEncoder
        >>> text = ["dogs bark at cats", "the bark of trees is hard"] * 20
        >>> encoder = ElmoEncoder.learn(text, width=16, epochs=5)
        >>> encoder.compare("dogs bark", "bark of trees", word="bark").similarities[0]
        tensor(1.)
        """
        training = _Training(cls.__name__, epochs, max_seconds, batch_size, learning_rate)
        texts = [sentence for sentence in check_sentences(sentences) if split_words(sentence)]
        vocabulary = Vocabulary.of(
            texts, max_size=max_vocab_size, min_count=min_count, special_tokens=cls.special_tokens
        )
        if len(vocabulary) == len(cls.special_tokens):
            raise ArgumentError(
                f"{cls.__name__}.learn got {pluralize(len(texts), 'sentence')} with words, but no word "
                f"occurs at least {pluralize(min_count, 'time')}; pass more text, or lower min_count."
            )
        with torch.random.fork_rng(devices=[]):  # leave the caller's random state unchanged
            torch.manual_seed(seed)
            encoder = cls(vocabulary, **options)
            training.run(encoder, [encoder.encode(text) for text in texts], report)
        return encoder.eval()

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Save parameters, options and vocabulary to one safetensors file."""
        about = {"format": self.format, "best_layer": self.best_layer, "options": self.options}
        words = json.dumps(self.vocabulary[len(self.special_tokens) :], ensure_ascii=False)
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self.state_dict().items()}
        return write_atomic(path, save_tensors(tensors, {"about": json.dumps(about), "words": words}))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Load an encoder from a file written by `save`. No code from the file is executed."""
        if not Path(path).is_file():
            raise ArgumentError(
                f"There is no file {os.fspath(path)!r}; pass a file written by {cls.__name__}.save."
            )
        try:
            return _load(cls, Path(path))
        except _OldFormatError as error:
            raise ArgumentError(
                f"{os.fspath(path)!r} was written by an earlier version of regard (its format is {error}; "
                f"this version reads {cls.format!r}). Train the encoder again."
            ) from None
        except (*_INVALID, SafetensorError, OSError, MemoryError) as error:
            raise ArgumentError(
                f"{os.fspath(path)!r} is not a valid {cls.__name__} file ({str(error)[:300]}); pass a file "
                f"written by {cls.__name__}.save."
            ) from None


class _OldFormatError(Exception):
    """The file has an earlier format version."""


Encoder = TypeVar("Encoder", bound=LearnedEncoder)


def _load(cls: type[Encoder], path: Path) -> Encoder:
    """Load an untrusted file and validate its contents."""
    with safe_open(path, "pt") as file:
        metadata, names = file.metadata() or {}, set(file.keys())
        about, words = (json.loads(metadata.get(part, "null")) for part in ("about", "words"))
        if not isinstance(about, dict) or not isinstance(words, list):
            raise ValueError("its metadata or its word list is missing")
        if about.get("format") in _earlier(cls.format):
            raise _OldFormatError(repr(about["format"]))
        if about.get("format") != cls.format:
            raise ValueError(f"its format is {str(about.get('format'))[:80]!r}, not {cls.format!r}")
        options: Any = about.get("options")
        best: Any = about.get("best_layer")
        expected = set(inspect.signature(cls).parameters) - {"vocabulary"}
        if not isinstance(options, dict) or set(options) != expected:
            raise ValueError(f"its options are {options} instead of {sorted(expected)}")
        layers = options["layers"]
        check_int("its options have layers", layers, min=1)
        if layers > len(names):  # check this before creating a model of this size
            raise ValueError(
                f"its options have layers={layers}, but it has only {pluralize(len(names), 'tensor')}"
            )
        with meta_device():  # shapes only, until the file is validated
            encoder = cls(Vocabulary(words, special_tokens=cls.special_tokens), **options)
        check_int("it has best_layer", best, min=-encoder.layers)
        if best >= encoder.layers:
            raise ValueError(f"its best_layer is {best}, but it has {pluralize(encoder.layers, 'layer')}")
    encoder.load_state_dict(read_parameters(path, encoder), assign=True)
    encoder.best_layer = best
    return encoder.eval()


def _earlier(format: str) -> list[str]:
    """Return all earlier versions of a format, e.g. ["bert 1"] for "bert 2"."""
    name, _, version = format.partition(" ")
    return [f"{name} {n}" for n in range(1, int(version))]


@dataclass(frozen=True)
class _Training:
    """Training settings for `LearnedEncoder.learn`."""

    name: str
    epochs: int
    max_seconds: float | None
    batch_size: int
    learning_rate: float

    def __post_init__(self) -> None:
        check_int(f"{self.name}.learn got epochs", self.epochs, min=1)
        check_int(f"{self.name}.learn got batch_size", self.batch_size, min=1)
        check_number(f"{self.name}.learn got learning_rate", self.learning_rate, above=0)
        if self.max_seconds is not None:
            check_number(f"{self.name}.learn got max_seconds", self.max_seconds, above=0)

    def run(
        self,
        encoder: LearnedEncoder,
        sentences: list[list[int]],
        report: Callable[[int, float], None] | None,
    ) -> None:
        """Train for all epochs, or until the time limit."""
        optimizer = torch.optim.Adam(encoder.trained_parameters(), lr=self.learning_rate)
        start = time.monotonic()
        for epoch in range(self.epochs):
            losses: list[float] = []
            for batch in self.batches(sentences):
                progress = (epoch + len(losses) * self.batch_size / len(sentences)) / self.epochs
                if self.max_seconds is not None:
                    progress = max(progress, (time.monotonic() - start) / self.max_seconds)
                    if progress >= 1:
                        return
                optimizer.param_groups[0]["lr"] = self.learning_rate * (1 - 0.9 * progress)
                loss = encoder.loss(Packed.of(batch))
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(encoder.parameters(), 1.0)
                optimizer.step()
                losses.append(float(loss.detach()))
            if report is not None:
                report(epoch, sum(losses) / len(losses))

    def batches(self, sentences: list[list[int]]) -> Iterator[list[list[int]]]:
        """Yield every sentence once, in batches of sentences of similar length, in random order."""
        order = torch.randperm(len(sentences)).tolist()
        pool = 50 * self.batch_size
        batches: list[list[int]] = []
        for start in range(0, len(order), pool):
            by_length = sorted(order[start : start + pool], key=lambda i: len(sentences[i]))
            batches += [by_length[i : i + self.batch_size] for i in range(0, len(by_length), self.batch_size)]
        for i in torch.randperm(len(batches)).tolist():
            yield [sentences[j] for j in batches[i]]

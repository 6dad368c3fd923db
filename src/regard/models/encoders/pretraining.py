"""Word encoders that learn from a text of one's own: their words, their training, and their files."""

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

from regard._util.checks import check_int, check_number
from regard._util.files import write_atomic
from regard._util.text import shorten
from regard.errors import ArgumentError
from regard.models.encoders.base import TokenVectors, WordEncoder
from regard.models.encoders.words import Vocabulary, check_sentences, split_words, unknown_word_error
from regard.models.packed import Packed
from regard.models.parameters import read_parameters

_WRONG = (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError, RuntimeError)
_BATCH = 64  # sentences embedded at once


class LearnedEncoder(WordEncoder):
    """Base of the encoders with a vocabulary of words, which `learn` from sentences.

    A subclass is made of a vocabulary and a few options that JSON can hold, `options`; it gives `states`, the
    vectors of each layer, and `loss`, what it learns by.

    >>> from regard.models import BertEncoder, ElmoEncoder
    >>> from regard.models.encoders.pretraining import LearnedEncoder
    >>> issubclass(ElmoEncoder, LearnedEncoder) and issubclass(BertEncoder, LearnedEncoder)
    True
    """

    format: ClassVar[str]  # of its files
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
                f"{name} got {shorten(repr(vocabulary))}; it needs a vocabulary of words with its own "
                f"marks: Vocabulary.of(sentences, special_tokens={name}.special_tokens)."
            )
        self.vocabulary = vocabulary

    @property
    def options(self) -> dict[str, Any]:
        """What it was made with, beside the vocabulary, by name."""
        raise NotImplementedError(f"{type(self).__name__} needs a property options")

    def states(self, tokens: Tensor | Packed, lengths: Tensor | None = None) -> Tensor:
        """All layers: tokens (b, l) or packed (n) → (layers, b, l, m) or (layers, n, m)."""
        raise NotImplementedError(f"{type(self).__name__} needs a method states(tokens, lengths)")

    def loss(self, tokens: Tensor | Packed | str | Sequence[str], lengths: Tensor | None = None) -> Tensor:
        """What is made small by learning: a mean over the tokens."""
        raise NotImplementedError(f"{type(self).__name__} needs a method loss(tokens, lengths)")

    def learning(self) -> Iterator[nn.Parameter]:
        """The parameters that the loss reaches."""
        return self.parameters()

    def pack(self, sentences: str | Sequence[str]) -> Packed:
        """Sentences as numbers, each between the marks <s> and </s>."""
        device = next(self.parameters()).device
        return Packed.of([self.encode(sentence) for sentence in check_sentences(sentences)], device)

    def encode(self, sentence: str) -> list[int]:
        """The numbers of a sentence's words, between the marks."""
        start, end = self.special_tokens.index("<s>"), self.special_tokens.index("</s>")
        return [start, *self.vocabulary.ids(word.text for word in split_words(sentence)), end]

    def token_vectors(self, sentences: Sequence[str]) -> list[TokenVectors]:
        splits = [split_words(sentence) for sentence in sentences]
        order = sorted(range(len(sentences)), key=lambda i: len(splits[i]))  # alike lengths: little padding
        found: dict[int, TokenVectors] = {}
        for start in range(0, len(order), _BATCH):
            chosen = order[start : start + _BATCH]
            packed = self.pack([sentences[i] for i in chosen])
            states = self.states(packed).split(packed.lengths.tolist(), 1)
            for i, each, numbers in zip(chosen, states, packed.split(packed.tokens), strict=True):
                spans = [None, *((word.start, word.stop) for word in splits[i]), None]
                names = ["<s>", *(word.text for word in splits[i]), "</s>"]
                found[i] = TokenVectors(each, spans, names, (numbers > 0).tolist())
        return [found[i] for i in range(len(sentences))]

    def _unknown(self, word: str) -> ArgumentError:
        return unknown_word_error(type(self).__name__, word, self.vocabulary[len(self.special_tokens) :])

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
        """Train on a text with Adam, for so many epochs, or less when the seconds are over.

        least: how often a word must occur, most: how many words at most; the others are <unk>.
        batch: sentences in a step. rate: of learning, at first; it falls to a tenth.
        report: called after each epoch with its number and the mean loss.
        options: of the encoder itself, width and layers among them.
        The same seed gives the same encoder, unless the seconds end it.

        >>> from regard.models import ElmoEncoder
        >>> text = ["dogs bark at cats", "the bark of trees is hard"] * 20
        >>> encoder = ElmoEncoder.learn(text, width=16, epochs=5)
        >>> encoder.compare("dogs bark", "bark of trees", word="bark").similarities[0]
        tensor(1.)
        """
        schedule = _Schedule(cls.__name__, epochs, max_seconds, batch_size, learning_rate)
        given = [sentence for sentence in check_sentences(sentences) if split_words(sentence)]
        vocabulary = Vocabulary.of(given, max_size=max_vocab_size, min_count=min_count, special_tokens=cls.special_tokens)
        if len(vocabulary) == len(cls.special_tokens):
            raise ArgumentError(
                f"{cls.__name__}.learn got {len(given)} sentences with words, in which none occurs {min_count} "
                "times; give more text, or lower min_count."
            )
        with torch.random.fork_rng(devices=[]):  # what the caller draws next does not depend on us
            torch.manual_seed(seed)
            encoder = cls(vocabulary, **options)
            schedule.run(encoder, [encoder.encode(sentence) for sentence in given], report)
        return encoder.eval()

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the encoder to one file, encoder.safetensors: its parameters, options and words."""
        about = {"format": self.format, "best_layer": self.best_layer, "options": self.options}
        words = json.dumps(self.vocabulary[len(self.special_tokens) :], ensure_ascii=False)
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self.state_dict().items()}
        return write_atomic(path, save_tensors(tensors, {"about": json.dumps(about), "words": words}))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read what `save` wrote, or say why the file holds no such encoder. No code in it is ever run."""
        if not Path(path).is_file():
            raise ArgumentError(
                f"there is no file {os.fspath(path)!r}; give one that {cls.__name__}.save wrote."
            )
        try:
            return _understand(cls, Path(path))
        except (*_WRONG, SafetensorError, OSError, MemoryError) as error:
            raise ArgumentError(
                f"{os.fspath(path)!r} holds no {cls.__name__} that can be read ({str(error)[:300]}); such a "
                f"file is written by {cls.__name__}.save."
            ) from None


Encoder = TypeVar("Encoder", bound=LearnedEncoder)


def _understand(cls: type[Encoder], path: Path) -> Encoder:
    """A file's content, which anybody may have written: nothing in it is taken for granted."""
    with safe_open(path, "pt") as file:
        metadata, names = file.metadata() or {}, set(file.keys())
        about, words = (json.loads(metadata.get(part, "null")) for part in ("about", "words"))
        if not isinstance(about, dict) or about.get("format") != cls.format or not isinstance(words, list):
            raise ValueError(f"it does not say {cls.format!r}, or its words are no list")
        options: Any = about.get("options")
        best: Any = about.get("best_layer")
        needed = set(inspect.signature(cls).parameters) - {"vocabulary"}
        if not isinstance(options, dict) or set(options) != needed:
            raise ValueError(f"its options are {options} and should be {sorted(needed)}")
        layers = options["layers"]
        check_int("its options got layers", layers, min=1)
        if layers > len(names):  # before a model of that many is made
            raise ValueError(f"its options say {layers} layers and there are {len(names)} tensors")
        with torch.device("meta"):  # sizes alone, until they are known to be right
            encoder = cls(Vocabulary(words, special_tokens=cls.special_tokens), **options)
        check_int("the file got best_layer", best, min=-encoder.layers)
        if best >= encoder.layers:
            raise ValueError(f"it says best_layer {best} of {encoder.layers} layers")
    tensors = read_parameters(path, encoder)
    encoder.load_state_dict(tensors, assign=True)
    encoder.best_layer = best
    return encoder.eval()


@dataclass(frozen=True)
class _Schedule:
    """How long and how fast an encoder learns."""

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
        """All epochs, as long as there is time."""
        optimizer = torch.optim.Adam(encoder.learning(), lr=self.learning_rate)
        began = time.monotonic()
        for epoch in range(self.epochs):
            losses: list[float] = []
            for chosen in self.batches(sentences):
                share = (epoch + len(losses) * self.batch_size / len(sentences)) / self.epochs
                if self.max_seconds is not None:
                    share = max(share, (time.monotonic() - began) / self.max_seconds)
                    if share >= 1:
                        return
                optimizer.param_groups[0]["lr"] = self.learning_rate * (1 - 0.9 * share)
                loss = encoder.loss(Packed.of(chosen))
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(encoder.parameters(), 1.0)
                optimizer.step()
                losses.append(float(loss.detach()))
            if report is not None:
                report(epoch, sum(losses) / len(losses))

    def batches(self, sentences: list[list[int]]) -> Iterator[list[list[int]]]:
        """All sentences once, in random batches of alike lengths."""
        order = torch.randperm(len(sentences)).tolist()
        pool = 50 * self.batch_size
        batches: list[list[int]] = []
        for start in range(0, len(order), pool):
            near = sorted(order[start : start + pool], key=lambda i: len(sentences[i]))
            batches += [near[i : i + self.batch_size] for i in range(0, len(near), self.batch_size)]
        for i in torch.randperm(len(batches)).tolist():
            yield [sentences[j] for j in batches[i]]

"""Words in context from two language models, one reading forward and one backward: Peters et al. 2018 (ELMo).

log p(w_k | w_1 … w_{k−1}) + log p(w_k | w_{k+1} … w_n)      maximized over a text, section 3.1
h_0 = [x; x],  h_j = [forward_j; backward_j]                 the layers of each word
γ Σ_j softmax(s)_j h_j                                       their mix, learned by a task, eq. 1
"""

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from regard.errors import ArgumentError, ShapeError
from regard.mechanism.checks import count, number
from regard.mechanism.files import write_whole
from regard.models.encoders import Tokens, WordEncoder
from regard.models.loss import IGNORE, vocabulary_loss
from regard.models.packed import Packed, as_padded, real, reorder, reversed_places
from regard.models.words import Vocabulary, checked, shorten, split, unknown

FORMAT = "elmo 1"
MARKS = ("<unk>", "<s>", "</s>")
WRONG = (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError, RuntimeError)
_BATCH = 64  # sentences embedded at once


class ScalarMix(nn.Module):
    """γ Σ_j softmax(s)_j h_j: Peters et al. 2018, eq. 1. It starts as the mean of the layers.

    >>> import torch
    >>> from regard.models.elmo import ScalarMix
    >>> ScalarMix(3)(torch.tensor([[1.0], [2.0], [6.0]]))
    tensor([3.], grad_fn=...)
    """

    def __init__(self, layers: int) -> None:
        super().__init__()
        count("ScalarMix got layers", layers, least=1)
        self.scores = nn.Parameter(torch.zeros(layers))
        self.gamma = nn.Parameter(torch.ones(()))

    def forward(self, vectors: Tensor) -> Tensor:
        """(layers, …) → (…)."""
        if len(vectors) != len(self.scores):
            raise ShapeError(
                f"ScalarMix was made for {len(self.scores)} layers and got {len(vectors)}; make a "
                f"ScalarMix({len(vectors)}), or give it all {len(self.scores)}."
            )
        return self.gamma * torch.tensordot(self.scores.softmax(0), vectors, 1)

    def extra_repr(self) -> str:
        return f"{len(self.scores)}"


class Direction(nn.Module):
    """A stack of LSTMs that reads one way; from the second on with a residual.

    >>> import torch
    >>> from regard.models.elmo import Direction
    >>> Direction(8, layers=2)(torch.randn(3, 5, 8)).shape
    torch.Size([2, 3, 5, 8])
    """

    def __init__(self, width: int, layers: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.lstms = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(layers))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(b, l, m) → (layers, b, l, m)."""
        outputs: list[Tensor] = []
        for lstm in self.lstms:
            output = self.dropout(lstm(x)[0])
            x = output + x if outputs else output
            outputs.append(x)
        return torch.stack(outputs)


class ElmoEncoder(WordEncoder):
    """A forward and a backward LSTM language model whose states are vectors of words in context.

    vocabulary: of words, with the marks <unk>, <s> and </s>: `Vocabulary.of(text, marks=MARKS)`.
    width: of each direction; the vectors are twice as wide.
    layers: of LSTMs; the vectors have one more, as the words themselves are layer 0.
    Embedding and output are shared by the directions. `mix` is learned by the task that uses `forward`.

    >>> from regard.models.elmo import MARKS, ElmoEncoder
    >>> from regard.models.words import Vocabulary
    >>> vocabulary = Vocabulary.of(["dogs bark", "the bark of trees"], marks=MARKS)
    >>> encoder = ElmoEncoder(vocabulary, width=8, layers=2)
    >>> encoder.embed("Trees have no bark")[0]
    Embedded('Trees have no bark': 4 words × 3 layers × 16)
    >>> encoder.loss(["dogs bark", "trees"]).shape
    torch.Size([])
    """

    def __init__(
        self, vocabulary: Vocabulary, width: int = 128, layers: int = 2, *, dropout: float = 0.1
    ) -> None:
        super().__init__()
        if (
            not isinstance(vocabulary, Vocabulary)
            or vocabulary.marks != MARKS
            or len(vocabulary) == len(MARKS)
        ):
            raise ArgumentError(
                f"ElmoEncoder got {shorten(repr(vocabulary))}; it needs a vocabulary of words with its own "
                "marks: Vocabulary.of(sentences, marks=MARKS)."
            )
        count("ElmoEncoder got width", width, least=1)
        count("ElmoEncoder got layers", layers, least=1)
        number("ElmoEncoder got dropout", dropout, least=0, below=1)
        self.vocabulary, self.width, self.layers = vocabulary, width, layers + 1
        self.embedding = nn.Embedding(len(vocabulary), width)
        self.dropout = nn.Dropout(dropout)
        self.ahead, self.back = Direction(width, layers, dropout), Direction(width, layers, dropout)
        self.output = nn.Linear(width, len(vocabulary))
        self.mix = ScalarMix(layers + 1)

    def batch(self, sentences: str | Sequence[str]) -> Packed:
        """Sentences as numbers, each between the marks <s> and </s>."""
        numbers = [_numbers(self.vocabulary, sentence) for sentence in checked(sentences)]
        return Packed.of(numbers, self.embedding.weight.device)

    def forward(self, tokens: Tensor | Packed, lengths: Tensor | None = None) -> Tensor:
        """The mix of all layers: tokens (b, l) or packed (n), with marks → (b, l, 2m) or (n, 2m)."""
        return self.mix(self.states(tokens, lengths))

    def states(self, tokens: Tensor | Packed, lengths: Tensor | None = None) -> Tensor:
        """All layers: tokens (b, l) or packed (n) → (layers, b, l, 2m) or (layers, n, 2m)."""
        padded, sizes = _padded(tokens, lengths)
        x, ahead, back = self._read(padded, sizes)
        both = torch.cat([torch.cat([x, x], -1)[None], torch.cat([ahead, back], -1)])
        return both[:, real(padded, sizes)] if isinstance(tokens, Packed) else both

    def _read(self, tokens: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The embedding (b, l, m), and the layers of both directions (layers, b, l, m)."""
        x = self.embedding(tokens)
        read = self.dropout(x)
        order = reversed_places(tokens, lengths)
        back = self.back(reorder(read, order))
        return x, self.ahead(read), reorder(back, order.expand(len(back), -1, -1))

    def loss(self, tokens: Tensor | Packed | str | Sequence[str], lengths: Tensor | None = None) -> Tensor:
        """The mean cross entropy of both directions: each word from those before it, and after it."""
        if not isinstance(tokens, Tensor | Packed):
            tokens = self.batch(tokens)
        padded, sizes = _padded(tokens, lengths)
        _, ahead, back = self._read(padded, sizes)
        # padding is ignored and not cut out, so that the sizes are those of the batch
        labels = padded.masked_fill(~real(padded, sizes), IGNORE)
        previous = labels[:, :-1].masked_fill(labels[:, 1:] == IGNORE, IGNORE)
        states = torch.stack([ahead[-1][:, :-1], back[-1][:, 1:]])
        labels = torch.stack([labels[:, 1:], previous])
        return vocabulary_loss(states, self.output.weight, self.output.bias, labels)

    def token_vectors(self, sentences: Sequence[str]) -> list[Tokens]:
        splits = [split(sentence) for sentence in sentences]
        order = sorted(range(len(sentences)), key=lambda i: len(splits[i]))  # alike lengths: little padding
        found: dict[int, Tokens] = {}
        for start in range(0, len(order), _BATCH):
            chosen = order[start : start + _BATCH]
            packed = self.batch([sentences[i] for i in chosen])
            states = self.states(packed).split(packed.lengths.tolist(), 1)
            for i, each, numbers in zip(chosen, states, packed.split(packed.tokens), strict=True):
                spans = [None, *((word.start, word.stop) for word in splits[i]), None]
                names = ["<s>", *(word.text for word in splits[i]), "</s>"]
                found[i] = Tokens(each, spans, names, (numbers > 0).tolist())
        return [found[i] for i in range(len(sentences))]

    def _unknown(self, word: str) -> ArgumentError:
        return unknown(type(self).__name__, word, self.vocabulary[len(MARKS) :])

    @classmethod
    def learn(
        cls,
        sentences: Sequence[str],
        *,
        width: int = 128,
        layers: int = 2,
        dropout: float = 0.1,
        least: int = 2,
        most: int | None = 10_000,
        epochs: int = 10,
        seconds: float | None = None,
        batch: int = 32,
        rate: float = 3e-3,
        seed: int = 0,
        report: Callable[[int, float], None] | None = None,
    ) -> "ElmoEncoder":
        """Train on a text with Adam, for so many epochs, or less when the seconds are over.

        least: how often a word must occur, most: how many words at most; the others are <unk>.
        batch: sentences in a step. rate: of learning, at first; it falls to a tenth.
        report: called after each epoch with its number and the mean loss.
        The same seed gives the same encoder, unless the seconds end it.

        >>> from regard.models.elmo import ElmoEncoder
        >>> text = ["dogs bark at cats", "the bark of trees is hard"] * 20
        >>> encoder = ElmoEncoder.learn(text, width=16, epochs=5)
        >>> encoder.compare("dogs bark", "bark of trees", word="bark").similarities[0]
        tensor(1.)
        """
        for name, value in (("epochs", epochs), ("batch", batch)):
            count(f"ElmoEncoder.learn got {name}", value, least=1)
        number("ElmoEncoder.learn got rate", rate, above=0)
        if seconds is not None:
            number("ElmoEncoder.learn got seconds", seconds, above=0)
        given = [sentence for sentence in checked(sentences) if split(sentence)]
        vocabulary = Vocabulary.of(given, most=most, least=least, marks=MARKS)
        if len(vocabulary) == len(MARKS):
            raise ArgumentError(
                f"ElmoEncoder.learn got {len(given)} sentences with words, in which none occurs {least} "
                "times; give more text, or lower `least`."
            )
        with torch.random.fork_rng(devices=[]):  # what the caller draws next does not depend on us
            torch.manual_seed(seed)
            encoder = cls(vocabulary, width, layers, dropout=dropout)
            numbers = [_numbers(vocabulary, sentence) for sentence in given]
            _train(encoder, numbers, epochs, seconds, batch, rate, report)
        return encoder.eval()

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write the encoder to a folder: config.json, words.json and model.safetensors."""
        place = Path(folder)
        config = {
            "format": FORMAT,
            "width": self.width,
            "layers": self.layers - 1,
            "dropout": self.dropout.p,
            "best_layer": self.best_layer,
        }
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self.state_dict().items()}
        words = self.vocabulary[len(MARKS) :]
        write_whole(place / "words.json", json.dumps(words, ensure_ascii=False, indent=0).encode())
        write_whole(place / "model.safetensors", save_tensors(tensors))
        write_whole(place / "config.json", json.dumps(config, indent=2).encode())
        return place

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> "ElmoEncoder":
        """Read what `save` wrote, or say why the folder holds no such encoder. No code in it is ever run."""
        place = Path(folder)
        if not (place / "config.json").is_file():
            raise ArgumentError(f"{place} has no config.json; give a folder that ElmoEncoder.save wrote.")
        try:
            return _understand(cls, place)
        except (*WRONG, SafetensorError, OSError) as error:
            raise ArgumentError(
                f"{place} holds no ElmoEncoder that can be read ({str(error)[:300]}); such a folder is "
                "written by ElmoEncoder.save."
            ) from None

    def extra_repr(self) -> str:
        return f"{len(self.vocabulary)} words, width {self.width}, {self.layers - 1} layers"


def _understand(cls: type[ElmoEncoder], place: Path) -> ElmoEncoder:
    """A folder's content, which anybody may have written: nothing in it is taken for granted."""
    config, words = _json(place / "config.json", 2**16), _json(place / "words.json", 2**28)
    if not isinstance(config, dict) or config.get("format") != FORMAT or not isinstance(words, list):
        raise ValueError(f"its config.json does not say {FORMAT!r}, or its words.json is no list")
    if set(config) != {"format", "width", "layers", "dropout", "best_layer"}:
        raise ValueError(f"its config.json says {sorted(config)}")
    layers, best = config["layers"], config["best_layer"]
    with safe_open(place / "model.safetensors", "pt") as file:
        names = set(file.keys())
        count("config.json got layers", layers, least=1)
        if layers > len(names):  # before a model of that many is made
            raise ValueError(f"config.json says {layers} layers and there are {len(names)} tensors")
        with torch.device("meta"):  # sizes alone, until they are known to be right
            vocabulary = Vocabulary(words, marks=MARKS)
            encoder = cls(vocabulary, config["width"], layers, dropout=config["dropout"])
        count("config.json got best_layer", best, least=-encoder.layers)
        if best >= encoder.layers:
            raise ValueError(f"config.json says best_layer {best} of {encoder.layers} layers")
        _check_shapes(encoder, {name: file.get_slice(name).get_shape() for name in names})
        tensors = {name: file.get_tensor(name).clone() for name in names}  # no longer tied to the file
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or tensor.dtype != tensors["mix.gamma"].dtype:
            raise ValueError(f"its {name} is of {tensor.dtype}")
        if not bool(tensor.isfinite().all()):
            raise ValueError(f"its {name} has numbers that are not finite")
    encoder.load_state_dict(tensors, assign=True)
    encoder.best_layer = best
    return encoder.eval()


def _check_shapes(encoder: ElmoEncoder, shapes: dict[str, list[int]]) -> None:
    wanted = {name: list(tensor.shape) for name, tensor in encoder.state_dict().items()}
    if set(shapes) != set(wanted):
        raise ValueError(f"tensors are missing or too many: {sorted(set(shapes) ^ set(wanted))[:3]}")
    for name, shape in wanted.items():
        if shapes[name] != shape:
            raise ValueError(f"its {name} has the shape {shapes[name]} and the config needs {shape}")


def _json(path: Path, most: int) -> Any:
    if path.stat().st_size > most:
        raise ValueError(f"its {path.name} is longer than {most:,} bytes")
    return json.loads(path.read_text("utf-8"))


def _train(
    encoder: ElmoEncoder,
    sentences: list[list[int]],
    epochs: int,
    seconds: float | None,
    batch: int,
    rate: float,
    report: Callable[[int, float], None] | None,
) -> None:
    optimizer = torch.optim.Adam(
        [parameter for name, parameter in encoder.named_parameters() if not name.startswith("mix.")], lr=rate
    )
    began = time.monotonic()
    for epoch in range(epochs):
        losses: list[float] = []
        for chosen in _batches(sentences, batch):
            share = (epoch + len(losses) * batch / len(sentences)) / epochs
            if seconds is not None:
                share = max(share, (time.monotonic() - began) / seconds)
                if share >= 1:
                    return
            optimizer.param_groups[0]["lr"] = rate * (1 - 0.9 * share)
            loss = encoder.loss(Packed.of(chosen))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(encoder.parameters(), 1.0)
            optimizer.step()
            losses.append(float(loss.detach()))
        if report is not None:
            report(epoch, sum(losses) / len(losses))


def _batches(sentences: list[list[int]], batch: int) -> Iterator[list[list[int]]]:
    """All sentences once, in random batches of alike lengths."""
    order = torch.randperm(len(sentences)).tolist()
    pool = 50 * batch
    batches: list[list[int]] = []
    for start in range(0, len(order), pool):
        near = sorted(order[start : start + pool], key=lambda i: len(sentences[i]))
        batches += [near[i : i + batch] for i in range(0, len(near), batch)]
    for i in torch.randperm(len(batches)).tolist():
        yield [sentences[j] for j in batches[i]]


def _numbers(vocabulary: Vocabulary, sentence: str) -> list[int]:
    start, end = MARKS.index("<s>"), MARKS.index("</s>")
    return [start, *vocabulary.numbers(word.text for word in split(sentence)), end]


def _padded(tokens: Tensor | Packed, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
    """Either kind of batch as a padded one (b, l) and its lengths; LSTMs need something to read."""
    padded, sizes = as_padded(tokens, lengths)
    if 0 in padded.shape:
        raise ShapeError(
            f"the batch has {padded.shape[0]} sentences of up to {padded.shape[1]} tokens; ElmoEncoder reads "
            "one sentence and one token at least."
        )
    return padded, sizes

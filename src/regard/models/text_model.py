"""Word-level language models, and the folders in which they are saved.

FOLDER/config.json         format, architecture, vocabulary, and the checksum of the parameters
FOLDER/model.safetensors   parameters, stored as float16 and loaded as float32

Each file is written under a temporary name and then renamed.
"""

import copy
import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as save_tensors

from regard._util.checks import check_int, check_number, check_type
from regard._util.files import MAX_TEXT_BYTES, open_regular, read_regular, write_atomic
from regard._util.text import pluralize, shorten, type_name
from regard.errors import ArgumentError, DTypeError
from regard.mechanism.normalizers import Softmax
from regard.models.configs import TransformerSettings
from regard.models.encoders.words import close_words
from regard.models.language import LanguageModel
from regard.models.layers.blocks import TransformerConfig
from regard.models.packed import Packed
from regard.models.parameters import meta_device, read_parameters

START, END = "<s>", "</s>"  # the first two tokens of every vocabulary
FORMAT = "regard language model 1"
CONFIG, MODEL = "config.json", "model.safetensors"
SHIPPED = {"stories": Path(__file__).parents[1] / "app" / "models" / "stories"}
_KEYS = ("format", "model", "tokens", "capitalized", "sha256")
_READ_ERRORS = (LookupError, TypeError, ValueError, OverflowError, RuntimeError, OSError, SafetensorError)
# words may contain apostrophes; every other non-space character is a token
_TOKEN = re.compile(r"\w+(?:'\w+)*|[^\w\s]")
_PLAIN = str.maketrans("‘’“”", "''\"\"")
_SENTENCE_ENDS = (".", "!", "?")
_NO_SPACE_BEFORE = (*_SENTENCE_ENDS, ",", ";", ":")


def split_tokens(text: str) -> list[str]:
    """Split a text into lowercase words and punctuation marks.

    >>> from regard.models.text_model import split_tokens
    >>> split_tokens("“It didn’t rain,” said Tom.")
    ['"', 'it', "didn't", 'rain', ',', '"', 'said', 'tom', '.']
    """
    return _TOKEN.findall(text.translate(_PLAIN).lower())


def join_tokens(tokens: Iterable[str], capitalized: Collection[str] = ()) -> str:
    """Join tokens into a text, with capital letters at the start of sentences and quotations.

    capitalized: words that are always capitalized.

    >>> from regard.models.text_model import join_tokens
    >>> join_tokens('" hello , tom ! " said the dog .'.split(), capitalized=["tom"])
    '"Hello, Tom!" said the dog.'
    """
    text, quoted, space, sentence_start = "", False, False, True
    for token in tokens:
        closing = quoted and token == '"'
        if space and not closing and token not in _NO_SPACE_BEFORE:
            text += " "
        text += token[:1].upper() + token[1:] if sentence_start or token in capitalized else token
        if token == '"':
            quoted = not quoted
            sentence_start = quoted or text[-2:-1] == "."
        else:
            sentence_start = token in _SENTENCE_ENDS
        space = token != '"' or closing
    return text


class TextModel:
    """A language model and its vocabulary of lowercase words and punctuation marks.

    model: the model that predicts the next token. tokens: the vocabulary, which starts with "<s>" and "</s>".
    capitalized: words that `decode` always capitalizes, such as names.

    >>> import regard
    >>> stories = regard.load_language_model("stories")
    >>> stories.generate("Lily had a red ball.", max_new_tokens=9)
    'Lily had a red ball. ...'
    """

    def __init__(self, model: LanguageModel, tokens: Sequence[str], capitalized: Iterable[str] = ()) -> None:
        check_type("TextModel got a model", model, LanguageModel, "LanguageModel(len(tokens))")
        self.model, self.tokens, self.capitalized = model, tuple(tokens), frozenset(capitalized)
        _check_tokens(self.tokens, self.capitalized)
        if model.embedding.num_embeddings != len(self.tokens):
            raise ArgumentError(
                f"The model has a vocabulary of {model.embedding.num_embeddings}, but `tokens` has "
                f"{len(self.tokens)}; pass one token for each row of the embedding."
            )
        self._ids = {token: i for i, token in enumerate(self.tokens)}

    def encode(self, text: str) -> list[int]:
        """Return the id of the start token, followed by the token ids of a text.

        >>> import regard
        >>> stories = regard.load_language_model("stories")
        >>> [stories.tokens[i] for i in stories.encode("Lily ran!")]
        ['<s>', 'lily', 'ran', '!']
        >>> stories.encode("Lily had a red bal.")
        Traceback (most recent call last):
        regard.errors.ArgumentError: This model does not know the word 'bal'. Did you mean 'ball' or 'bag' ...
        """
        if not isinstance(text, str):
            raise DTypeError(f"encode got {type_name(text)}; pass a str.")
        words = split_tokens(text)
        for word in words:
            if word not in self._ids:
                close = close_words(word, self.tokens[2:], 3)
                hint = f"Did you mean {' or '.join(map(repr, close))}? " if close else ""
                raise ArgumentError(
                    f"This model does not know the word {shorten(word, 40)!r}. {hint}It knows "
                    f"{len(self.tokens) - 2} words and punctuation marks, listed in the attribute `tokens`."
                )
        return [0, *(self._ids[word] for word in words)]

    def decode(self, ids: Iterable[int]) -> str:
        """Convert token ids to text, with capital letters and without start and end tokens.

        >>> import regard
        >>> stories = regard.load_language_model("stories")
        >>> stories.decode(stories.encode('"i like your ball , " said tom .'))
        '"I like your ball," said Tom.'
        """
        return join_tokens([self.tokens[i] for i in ids if i >= 2], self.capitalized)

    def generate(
        self, text: str = "", *, max_new_tokens: int = 80, temperature: float = 0.0, seed: int = 0
    ) -> str:
        """Continue a text until the end token, by at most `max_new_tokens` tokens.

        temperature: sampling temperature; 0 selects the most probable token. seed: random seed.

        >>> import regard
        >>> stories = regard.load_language_model("stories")
        >>> stories.generate("Tom had a red kite.", max_new_tokens=5, temperature=0.7, seed=1)
        'Tom had a red kite. ...'
        """
        generator = torch.Generator().manual_seed(seed)
        ids = self.model.generate(
            self.encode(text),
            max_new_tokens=max_new_tokens,
            end=1,
            temperature=temperature,
            generator=generator,
        )
        return self.decode(ids)

    @classmethod
    def learn(
        cls,
        texts: Sequence[str],
        config: TransformerConfig = TransformerConfig(width=96, heads=4),  # noqa: B008 (a frozen value)
        *,
        capitalized: Iterable[str] = (),
        updates: int = 1000,
        batch_size: int = 64,
        learning_rate: float = 2e-3,
        seed: int = 0,
        initial: "TextModel | None" = None,
        report: Callable[[int, float], None] | None = None,
    ) -> Self:
        """Train a model on texts with AdamW, a linear warmup and a cosine decay of the learning rate.

        config: the architecture. updates: number of optimizer updates. batch_size: texts per update.
        learning_rate: peak learning rate. seed: random seed; the caller's random state is left unchanged.
        initial: model to continue training; default: a randomly initialized model with this config.
        report: called after each update with the update number and the loss.

        >>> from regard.models import TextModel, TransformerConfig
        >>> config = TransformerConfig(width=16, heads=2, layers=1, dropout=0.0)
        >>> model = TextModel.learn(["the dog ran .", "the cat slept ."], config, updates=60, batch_size=4)
        >>> model.generate("the cat")
        'The cat slept.'
        """
        check_int("learn got updates", updates, min=1)
        check_int("learn got batch_size", batch_size, min=1)
        check_number("learn got learning_rate", learning_rate, above=0)
        words = sorted({word for text in texts for word in split_tokens(text)})
        if not words:
            raise ArgumentError(
                f"learn got {pluralize(len(texts), 'text')}, but no words; pass texts to train on."
            )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            if initial is None:
                model = cls(LanguageModel(len(words) + 2, config), [START, END, *words], capitalized)
            else:
                model = cls(copy.deepcopy(initial.model), initial.tokens, initial.capitalized)
            encoded = [[*model.encode(text), 1] for text in texts]
            _train(model.model, encoded, updates, batch_size, learning_rate, report)
        return model

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Save the model to a folder for `load_language_model`. Parameters are stored as float16.

        >>> import tempfile, regard
        >>> stories = regard.load_language_model("stories")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     regard.load_language_model(stories.save(folder)).tokens == stories.tokens
        True
        """
        config = self.model.decoder.config
        if config.normalize != Softmax():
            raise ArgumentError(
                f"Cannot save a model with normalize={config.normalize!r}; only Softmax() is supported."
            )
        tensors = {
            name: tensor.detach().cpu().half().contiguous()
            for name, tensor in self.model.state_dict().items()
        }
        content = save_tensors(tensors)
        settings = {field.name: getattr(config, field.name) for field in fields(TransformerSettings)}
        about = {
            "format": FORMAT,
            "model": settings,
            "tokens": self.tokens,
            "capitalized": sorted(self.capitalized),
            "sha256": hashlib.sha256(content).hexdigest(),
        }
        path = Path(folder)
        write_atomic(path / MODEL, content)
        write_atomic(path / CONFIG, (json.dumps(about, ensure_ascii=False, indent=1) + "\n").encode())
        return path

    def __repr__(self) -> str:
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        return f"TextModel({len(self.tokens)} tokens, {parameters:,} parameters)"


def load_language_model(name: str | os.PathLike[str]) -> TextModel:
    """Load a language model and its vocabulary.

    name: "stories" for the small model that is part of regard, or a folder written by `TextModel.save`.

    >>> import regard
    >>> stories = regard.load_language_model("stories")
    >>> stories.generate("Tom had a red kite and Lily had a blue drum.", max_new_tokens=14)
    'Tom had a red kite and Lily had a blue drum. ...'
    """
    folder = SHIPPED.get(name, Path(name)) if isinstance(name, str) else Path(name)
    about = _read_config(folder)
    try:
        with open_regular(folder / MODEL) as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != about["sha256"]:
            raise ValueError(f"{MODEL} does not match its checksum in {CONFIG}")
        config = TransformerConfig(**about["model"])
        with safe_open(folder / MODEL, "pt") as file:
            tensors = len(list(file.keys()))
        if config.layers > tensors:  # check this before building the layers
            raise ValueError(
                f"{CONFIG} has {pluralize(config.layers, 'layer')}, but {MODEL} has "
                f"{pluralize(tensors, 'tensor')}"
            )
        tokens, capitalized = about["tokens"], about["capitalized"]
        _check_tokens(tokens, capitalized)
        with meta_device():  # allocates no memory until the sizes are checked
            model = LanguageModel(len(tokens), config)
        parameters = read_parameters(folder / MODEL, model)
        model.load_state_dict({name: value.float() for name, value in parameters.items()}, assign=True)
    except _READ_ERRORS as error:
        reason = str(error)[:300].rstrip(".")
        raise ArgumentError(
            f"{os.fspath(folder)!r} is corrupted ({reason}). Copy it again, or train a new model."
        ) from None
    return TextModel(model.eval(), tokens, capitalized)


def _read_config(folder: Path) -> dict[str, Any]:
    """Read config.json and check its keys."""
    cure = f"Pass a folder written by TextModel.save, or one of {sorted(SHIPPED)}."
    if not folder.is_dir():
        problem = "is a file" if folder.exists() else "does not exist"
        raise ArgumentError(f"{os.fspath(folder)!r} {problem}. {cure}")
    try:
        about = json.loads(read_regular(folder / CONFIG, MAX_TEXT_BYTES))
    except FileNotFoundError:
        raise ArgumentError(
            f"{os.fspath(folder)!r} is not a language model folder: it has no {CONFIG}. {cure}"
        ) from None
    except (ValueError, RecursionError, OSError) as error:
        raise ArgumentError(
            f"The {CONFIG} in {os.fspath(folder)!r} cannot be read ({str(error)[:200].rstrip('.')}). {cure}"
        ) from None
    if not isinstance(about, dict) or about.get("format") != FORMAT or set(about) != set(_KEYS):
        actual = about.get("format") if isinstance(about, dict) else type(about).__name__
        raise ArgumentError(
            f"The {CONFIG} in {os.fspath(folder)!r} has format {str(actual)[:80]!r}; this version reads "
            f"{FORMAT!r} with the keys {', '.join(_KEYS)}. {cure}"
        )
    return about


def _check_tokens(tokens: Sequence[str], capitalized: Iterable[str]) -> None:
    """Raise ArgumentError unless the vocabulary is valid."""
    if not isinstance(tokens, list | tuple) or list(tokens[:2]) != [START, END]:
        raise ArgumentError(
            f"The vocabulary is {shorten(repr(tokens), 60)}; it must be a list of tokens that starts with "
            f"{START!r} and {END!r}."
        )
    known: set[str] = set()
    for token in tokens[2:]:
        if not isinstance(token, str) or split_tokens(token) != [token]:
            raise ArgumentError(
                f"{str(token)[:40]!r} is not a valid token; tokens are lowercase words and punctuation marks."
            )
        if token in known:
            raise ArgumentError(f"The token {token[:40]!r} occurs twice in the vocabulary; remove one.")
        known.add(token)
    for word in capitalized:
        if word not in known:
            raise ArgumentError(
                f"capitalized contains {str(word)[:40]!r}, which is not in the vocabulary; remove it."
            )


def _train(
    model: LanguageModel,
    texts: list[list[int]],
    updates: int,
    batch_size: int,
    learning_rate: float,
    report: Callable[[int, float], None] | None,
) -> None:
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True
    )
    warmup = max(1, updates // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / warmup) * 0.5 * (1 + math.cos(math.pi * step / updates))
    )
    model.train()
    order: list[int] = []
    for update in range(1, updates + 1):
        while len(order) < batch_size:
            order += torch.randperm(len(texts)).tolist()
        batch, order = order[:batch_size], order[batch_size:]
        loss = model.loss(Packed.of([texts[i] for i in batch]))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if report is not None:
            report(update, float(loss.detach()))
    model.eval()

"""All settings of a training in one value: presets, a TOML file, and single settings on top of both."""

import dataclasses
import difflib
import math
import os
import tomllib
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_origin, get_type_hints

from regard._util.checks import count, number
from regard._util.files import SMALL, read_regular
from regard._util.text import shorten
from regard.errors import ArgumentError
from regard.mechanism.normalizers import Entmax15, Normalizer, Softmax, Softmax1, Sparsemax
from regard.models.encoders.words import counted
from regard.models.layers.blocks import Activation, Norm, Positions, TransformerConfig
from regard.models.recurrent import Cell, RecurrentConfig, RecurrentSeq2Seq
from regard.models.recurrent import Kind as Attention
from regard.models.seq2seq import Seq2Seq
from regard.models.transformer import Transformer
from regard.translation import tokens as vocabulary
from regard.translation.sentence_splitter import max_translation_tokens

Model = Literal["transformer", "recurrent", "plain"]
Schedule = Literal["cosine", "inverse-sqrt", "constant"]
Precision = Literal["float32", "bfloat16"]
Criterion = Literal["bleu", "loss"]
Preset = Literal["tiny", "small", "base"]
NORMALIZERS: dict[str, type[Normalizer]] = {
    "softmax": Softmax,
    "softmax1": Softmax1,
    "sparsemax": Sparsemax,
    "entmax15": Entmax15,
}
RECURRENT = ("cell", "attention", "bidirectional", "reverse", "input_feeding")
_RECIPE = ("heads", "key_heads", "ffn_dim", "activation", "norm", "norm_first", "positions", "max_positions")
TRANSFORMER = (*_RECIPE, "normalize")
# far more than anybody needs, so that a slip of the finger is refused before it fills the memory
_MOST = {
    "width": 65_536,
    "layers": 1024,
    "heads": 4096,
    "key_heads": 4096,
    "ffn_dim": 1_000_000,
    "max_positions": 10_000_000,
    "size": 10_000_000,
    "longest": 10_000_000,
    "dev": 10_000_000,
    "tokens": 100_000_000,
    "accumulate": 100_000,
    "average": 10_000,
    "threads": 4096,
    **dict.fromkeys(("epochs", "updates", "warmup", "judge", "save", "patience"), 10**12),
}


@dataclass(frozen=True)
class ModelConfig:
    """What is trained: the settings of `TransformerConfig` for a Transformer, of `RecurrentConfig` for the others.

    kind: "transformer"; "recurrent", with attention (Bahdanau et al. 2015); "plain", without (Sutskever et
        al. 2014). normalize: "softmax", "softmax1", "sparsemax" or "entmax15", of a Transformer.
    """

    kind: Model = "transformer"
    width: int = 256
    layers: int = 3
    dropout: float = 0.1
    heads: int = 8
    key_heads: int | None = None
    ffn_dim: int | None = None
    activation: Activation = "relu"
    norm: Norm = "layer"
    norm_first: bool = True
    positions: Positions = "sinusoidal"
    max_positions: int = 1024
    normalize: str = "softmax"
    cell: Cell = "gru"
    attention: Attention = "additive"
    bidirectional: bool = True
    reverse: bool = False
    input_feeding: bool = False

    def __post_init__(self) -> None:
        if self.normalize not in NORMALIZERS:
            raise ArgumentError(f"normalize is {self.normalize!r}; there are {', '.join(NORMALIZERS)}.")
        for name in ("width", "layers", "heads", "max_positions"):
            _count(name, getattr(self, name), least=1)
        for name in ("key_heads", "ffn_dim"):
            if getattr(self, name) is not None:
                _count(name, getattr(self, name), least=1)
        self.recipe()

    def recipe(self) -> TransformerConfig | RecurrentConfig:
        """What the model is made of."""
        shared: dict[str, Any] = {"width": self.width, "layers": self.layers, "dropout": self.dropout}
        if self.kind == "transformer":
            chosen = {name: getattr(self, name) for name in _RECIPE}
            return TransformerConfig(**shared, **chosen, normalize=NORMALIZERS[self.normalize]())
        chosen = {name: getattr(self, name) for name in RECURRENT}
        if self.kind == "plain":
            chosen |= {"attention": "none", "input_feeding": False}
        return RecurrentConfig(**shared, **chosen)

    def make(self, sizes: int | tuple[int, int]) -> Seq2Seq:
        """A new model; one vocabulary for both sides is one matrix."""
        recipe, share = self.recipe(), isinstance(sizes, int)
        if isinstance(recipe, TransformerConfig):
            return Transformer(sizes, recipe, share=share)
        return RecurrentSeq2Seq(sizes, recipe, share=share)


@dataclass(frozen=True)
class TokensConfig:
    """The vocabulary: see `Tokens.learn`; shared: one for both sides."""

    kind: vocabulary.Kind = "unigram"
    size: int = 8000
    shared: bool = True
    coverage: float = 1.0

    def __post_init__(self) -> None:
        _count("size", self.size, least=vocabulary.MARKS + 1)
        number("coverage", self.coverage, least=vocabulary.LEAST_COVERAGE, most=1)


@dataclass(frozen=True)
class CorpusConfig:
    """Which pairs are used.

    longest: sentences of more pieces, on either side, are dropped. ratio: pairs are dropped of which one side
        is longer than so many times the other (and 10 pieces more). dev: how many distinct source sentences
        are held back to judge by, if no dev files are given.
    """

    longest: int = 256
    ratio: float = 4.0
    dev: int = 1000

    def __post_init__(self) -> None:
        _count("longest", self.longest, least=1)
        _count("dev", self.dev, least=1)
        number("ratio", self.ratio, least=1)


@dataclass(frozen=True)
class TrainingConfig:
    """How a model is trained.

    epochs, updates: when it ends; updates, if given, count more. tokens: of a batch, source and target.
    accumulate: batches whose gradients are added up for one update.
    rate, schedule, warmup: the highest learning rate, after so many updates; then "cosine" (to 0 at the end),
        "inverse-sqrt" (Vaswani et al. 2017, section 5.3) or "constant".
    smoothing, decay, clip: of labels; of parameters (AdamW); the largest norm of a gradient, 0 for any.
    unknown: the share of pairs with a hidden piece, see `Batches`.
    guide: how much one head of a Transformer is taught where words come from (Garg et al. 2019), by links
        that are found in the pairs themselves; 0.3 makes alignments much better, 0 leaves it alone.
    precision: "bfloat16" computes in it where that is safe; it pays on processors that multiply in bfloat16.
    judge, save: updates between two looks at the dev data, between two checkpoints; 0 is once an epoch, of at
        least 50 updates (of a tiny corpus, several epochs), and whenever it was judged.
    average: of how many of the last checkpoints the parameters to translate with are the mean.
    patience: after so many looks without improvement the training ends, 0 for never; `criterion` says which
        improvement: of "bleu" or of the "loss".
    threads: 0 is as many as torch takes.
    """

    epochs: int = 20
    updates: int | None = None
    tokens: int = 4096
    accumulate: int = 1
    rate: float = 1e-3
    schedule: Schedule = "cosine"
    warmup: int = 400
    smoothing: float = 0.1
    decay: float = 0.0
    clip: float = 1.0
    unknown: float = 0.02
    guide: float = 0.0
    precision: Precision = "float32"
    judge: int = 0
    save: int = 0
    average: int = 1
    patience: int = 0
    criterion: Criterion = "bleu"
    seed: int = 0
    threads: int = 0

    def __post_init__(self) -> None:
        for name in ("epochs", "tokens", "accumulate", "average"):
            _count(name, getattr(self, name), least=1)
        for name in ("warmup", "judge", "save", "patience", "seed", "threads"):
            _count(name, getattr(self, name))
        if self.seed >= 2**32:
            raise ArgumentError(f"seed={_told(self.seed)}; it must be below 2**32.")
        if self.updates is not None:
            _count("updates", self.updates, least=1)
        number("rate", self.rate, above=0)
        for name in ("smoothing", "unknown"):
            number(name, getattr(self, name), least=0, below=1)
        for name in ("decay", "clip", "guide"):
            number(name, getattr(self, name), least=0)

    def end(self) -> str:
        """When it ends, in words.

        >>> from regard.translation.config import TrainingConfig
        >>> TrainingConfig().end(), TrainingConfig(updates=100).end()
        ('20 epochs', '100 updates')
        """
        return counted(self.epochs, "epoch") if self.updates is None else counted(self.updates, "update")


@dataclass(frozen=True)
class TranslationConfig:
    """All settings of a training, in four parts, which are the sections of a TOML file.

    model, tokens, corpus, training: the parts; `regard train --settings` shows all that is in them.

    >>> from regard.translation import TranslationConfig
    >>> plan = TranslationConfig.preset("tiny").but(["training.epochs=3", "model.kind=recurrent"])
    >>> plan.training.epochs, plan.model.recipe().attention
    (3, 'additive')
    >>> plan.but(["training.epoch=3"])
    Traceback (most recent call last):
    regard.errors.ArgumentError: there is no setting training.epoch; did you mean training.epochs?
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    tokens: TokensConfig = field(default_factory=TokensConfig)
    corpus: CorpusConfig = field(default_factory=CorpusConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)

    def __post_init__(self) -> None:
        model, needed = self.model, max_translation_tokens(self.corpus.max_tokens) + 2  # and marks
        if model.kind == "transformer" and model.positions == "learned" and model.max_positions < needed:
            raise ArgumentError(
                f"model.max_positions is {model.max_positions} and corpus.max_tokens is {self.corpus.max_tokens}; so many "
                f"learned positions are too few for its translations. Raise model.max_positions to {needed}, lower "
                "corpus.max_tokens, or choose other positions."
            )
        if self.training.guided_alignment_weight and model.kind != "transformer":
            raise ArgumentError(
                f"training.guided_alignment_weight is {self.training.guided_alignment_weight:g} and model.kind is {model.kind!r}; only a "
                "transformer can be guided. Set training.guided_alignment_weight=0."
            )

    @classmethod
    def preset(cls, name: Preset = "small", model: Model = "transformer") -> "TranslationConfig":
        """A plan of a size: "tiny" learns in a minute, "small" in twenty, "base" on a large machine.

        model: "transformer", "recurrent" (Bahdanau's) or "plain", without attention.
        """
        if name not in PRESETS:
            raise ArgumentError(f"there is no preset {name!r}; there are {', '.join(PRESETS)}.")
        plan = cls().changed(PRESETS[name]).changed({"model": {"kind": model}})
        return plan if model == "transformer" else plan.changed(_WITHOUT_TRANSFORMER[model])

    @classmethod
    def read(
        cls, path: str | os.PathLike[str], base: "TranslationConfig | None" = None
    ) -> "TranslationConfig":
        """A plan from a TOML file; what it does not say is as in `base`."""
        return (base or cls()).changed(cls.written(path))

    @staticmethod
    def written(path: str | os.PathLike[str]) -> dict[str, Any]:
        """What a TOML file says, by section and name."""
        content = read_regular(path, SMALL)
        try:
            return tomllib.loads(content.decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:  # a number of thousands of digits is a ValueError
            raise ArgumentError(f"{os.fspath(path)!r} is no TOML file: {error}.") from None

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> "TranslationConfig":
        """The plan that `settings` gave."""
        return cls().changed(settings)

    def settings(self) -> dict[str, dict[str, Any]]:
        """All settings, by section and name, as JSON and TOML have them."""
        return dataclasses.asdict(self)

    def changed(self, settings: Mapping[str, Any]) -> "TranslationConfig":
        """With these settings, by section and name."""
        parts = {}
        for section, values in settings.items():
            if section not in _SECTIONS:
                raise ArgumentError(_unknown(f"section [{shorten(section)}]", section, list(_SECTIONS)))
            if not isinstance(values, Mapping):
                raise ArgumentError(
                    f"{section} is {_told(values)}; it is a section: [{section}], then name = value."
                )
            checked = {name: _checked(section, name, value) for name, value in values.items()}
            try:
                parts[section] = dataclasses.replace(getattr(self, section), **checked)
            except (ValueError, TypeError) as error:
                raise ArgumentError(f"[{section}]: {error}") from None
        return dataclasses.replace(self, **parts)

    def is_lengthened_by(self, other: "TranslationConfig") -> bool:
        """Whether another plan is this one but for a later end, counted as here.

        >>> from regard.translation import TranslationConfig
        >>> plan = TranslationConfig.preset("tiny")
        >>> [plan.is_lengthened_by(plan.but([f"training.epochs={n}"])) for n in (5, 10, 20)]
        [False, False, True]
        """
        mine, its = self.training, other.training
        same = dataclasses.replace(its, epochs=mine.epochs, updates=mine.updates)
        if dataclasses.replace(other, training=same) != self:
            return False
        if mine.updates is None or its.updates is None:
            return mine.updates is its.updates and its.epochs > mine.epochs
        return its.updates > mine.updates

    def but(self, settings: Sequence[str]) -> "TranslationConfig":
        """With single settings changed: "training.learning_rate=0.001"."""
        found: dict[str, dict[str, Any]] = {}
        for one in settings:
            path, equals, value = one.partition("=")
            section, dot, name = path.strip().partition(".")
            if not equals or not dot:
                raise ArgumentError(
                    f"the setting {shorten(one)!r} is not understood; write section.name=value."
                )
            if section not in _SECTIONS:
                raise ArgumentError(_unknown(f"section [{shorten(section)}]", section, list(_SECTIONS)))
            found.setdefault(section, {})[name] = _parsed(section, name, value.strip())
        return self.changed(found)


_SECTIONS = {"model": ModelConfig, "tokens": TokensConfig, "corpus": CorpusConfig, "training": TrainingConfig}
_TYPES = {section: get_type_hints(part) for section, part in _SECTIONS.items()}

PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "tiny": {
        "model": {"width": 128, "layers": 2, "heads": 4},
        "tokens": {"size": 1000},
        "corpus": {"dev": 200},
        "training": {"tokens": 2048, "epochs": 10, "warmup": 200, "rate": 2e-3},
    },
    "small": {"model": {"dropout": 0.2}, "training": {"tokens": 2500, "epochs": 10}},
    "base": {
        "model": {"width": 512, "layers": 6},
        "tokens": {"size": 32_000},
        "training": {
            "tokens": 16_384,
            "rate": 7e-4,
            "schedule": "inverse-sqrt",
            "warmup": 4000,
            "updates": 100_000,
            "judge": 2000,
            "average": 5,
        },
    },
}
_WITHOUT_TRANSFORMER: dict[str, dict[str, dict[str, Any]]] = {
    "recurrent": {"model": {"layers": 1}},
    "plain": {"model": {"layers": 2, "cell": "lstm", "reverse": True, "bidirectional": False}},
}


def _count(name: str, value: int, least: int = 0) -> None:
    """A whole number that can be meant."""
    count(name, value, least=least)
    if value > _MOST.get(name, value):
        told = f"{value:,}" if value < 10**30 else _told(value)
        raise ArgumentError(f"{name}={told}; it must be at most {_MOST[name]:,}. Give a smaller one.")


def _told(value: Any) -> str:
    """A value in a message; it may be of any type and size."""
    try:
        return shorten(repr(value))
    except (ValueError, RecursionError):  # of a number with more digits than Python writes
        return "a value that is too long to show"


def _unknown(what: str, name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, 1)
    return f"there is no {what}; " + (
        f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}."
    )


def _type(section: str, name: str) -> Any:
    """What a setting is: a type, a Literal, or one of them or None."""
    types_ = _TYPES[section]
    if name not in types_:
        near = difflib.get_close_matches(name, list(types_), 1)
        cure = f"did you mean {section}.{near[0]}?" if near else f"there are {', '.join(types_)}."
        raise ArgumentError(f"there is no setting {section}.{shorten(name)}; {cure}")
    return types_[name]


def _checked(section: str, name: str, value: Any) -> Any:
    """A setting of the right type, whoever wrote it."""
    kind = _type(section, name)
    if isinstance(kind, types.UnionType):
        if value is None:
            return None
        (kind,) = (one for one in get_args(kind) if one is not type(None))
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise ArgumentError(f"{section}.{name} is {_told(value)}; there are {', '.join(get_args(kind))}.")
        return value
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value) if abs(value) < 2**53 else math.inf * (1 if value > 0 else -1)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        wanted = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}[kind]
        raise ArgumentError(f"{section}.{name} is {_told(value)}; it must be {wanted}.")
    return value


def _parsed(section: str, name: str, text: str) -> Any:
    """A setting from the command line: as in TOML, but for the quotes around texts."""
    kind = _type(section, name)
    if text == "none" and isinstance(kind, types.UnionType):
        return None
    if kind is str or get_origin(kind) is Literal:
        return text.strip("\"'")
    try:
        found = tomllib.loads(f"value = {text}")
        return found["value"] if len(found) == 1 else text  # else it has several lines
    except (ValueError, RecursionError):  # no TOML; too many digits; brackets in brackets in brackets
        return text  # which is refused for its type

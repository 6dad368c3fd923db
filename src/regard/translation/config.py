"""Training configuration: presets, TOML files and single settings.

Every setting is declared once, with its type, default, bounds and description.
"""
# ruff: noqa: RUF009 (setting returns a dataclass field)

import dataclasses
import difflib
import json
import math
import operator
import os
import tomllib
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, get_args, get_origin

from regard._util.files import MAX_TEXT_BYTES, read_regular
from regard._util.text import pluralize, shorten
from regard.errors import ArgumentError, RegardError
from regard.mechanism.normalizers import Entmax15, Normalizer, Softmax, Softmax1, Sparsemax
from regard.models.layers.blocks import Activation, Norm, Positions, TransformerConfig
from regard.models.recurrent import AttentionKind as Attention
from regard.models.recurrent import Cell, RecurrentConfig, RecurrentSeq2Seq
from regard.models.seq2seq import Seq2Seq
from regard.models.transformer import Transformer
from regard.translation import tokens as vocabulary
from regard.translation.sentence_splitter import max_translation_tokens

Model = Literal["transformer", "recurrent", "plain"]
Normalize = Literal["softmax", "softmax1", "sparsemax", "entmax15"]
Schedule = Literal["cosine", "inverse-sqrt", "constant"]
Precision = Literal["float32", "bfloat16"]
Metric = Literal["bleu", "loss"]
Preset = Literal["tiny", "small", "base"]
NORMALIZERS: dict[Normalize, type[Normalizer]] = {
    "softmax": Softmax,
    "softmax1": Softmax1,
    "sparsemax": Sparsemax,
    "entmax15": Entmax15,
}
_TRANSFORMER = (
    "heads",
    "key_heads",
    "ffn_dim",
    "activation",
    "norm",
    "norm_first",
    "positions",
    "max_positions",
)
_RECURRENT = ("cell", "attention", "bidirectional", "reverse", "input_feeding")
_MAX_UPDATES = 10**12
_COMPARE = {"at least": operator.ge, "above": operator.gt, "at most": operator.le, "below": operator.lt}


def setting(
    default: Any,
    description: str,
    *,
    min: float | None = None,
    max: float | None = None,
    above: float | None = None,
    below: float | None = None,
) -> Any:
    """A dataclass field with a description and bounds; the largest values only catch typing errors."""
    bounds = {"at least": min, "above": above, "at most": max, "below": below}
    return field(default=default, metadata={"description": description, "bounds": bounds})


class _Section:
    """A section of the config; checks the type and the bounds of every setting."""

    section: ClassVar[str]

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):  # type: ignore[arg-type]
            name = f"{self.section}.{item.name}"
            value = _check_type(name, getattr(self, item.name), item.type)
            _check_bounds(name, value, item.metadata["bounds"])
            object.__setattr__(self, item.name, value)


@dataclass(frozen=True)
class ModelConfig(_Section):
    """Architecture: the [model] section.

    A Transformer uses the settings of `TransformerConfig`, the other models those of `RecurrentConfig`.
    """

    section: ClassVar[str] = "model"

    kind: Model = setting(
        "transformer", "transformer, recurrent (RNN with Bahdanau attention) or plain (no attention)."
    )
    width: int = setting(256, "Model dimension.", min=1, max=65_536)
    layers: int = setting(3, "Layers of the encoder and of the decoder.", min=1, max=1024)
    dropout: float = setting(0.1, "Dropout probability.", min=0, below=1)
    heads: int = setting(8, "Attention heads. They divide the width.", min=1, max=4096)
    key_heads: int | None = setting(
        None, "Key and value heads (grouped-query attention). Default: heads.", min=1, max=4096
    )
    ffn_dim: int | None = setting(None, "Feed-forward dimension. Default: 4 × width.", min=1, max=1_000_000)
    activation: Activation = setting("relu", "Feed-forward activation: relu, gelu or swiglu.")
    norm: Norm = setting("layer", "Normalization: layer, rms or none.")
    norm_first: bool = setting(True, "Pre-norm if true, post-norm if false.")
    positions: Positions = setting("sinusoidal", "Positions: sinusoidal, learned, rotary, alibi, t5 or none.")
    max_positions: int = setting(1024, "Number of learned positions.", min=1, max=10_000_000)
    normalize: Normalize = setting(
        "softmax", "Attention normalizer: softmax, softmax1, sparsemax or entmax15."
    )
    cell: Cell = setting("gru", "Recurrent cell: gru or lstm.")
    attention: Attention = setting(
        "additive", "Attention score: additive (Bahdanau); dot, general or concat (Luong); or none."
    )
    bidirectional: bool = setting(True, "Bidirectional encoder.")
    reverse: bool = setting(False, "Read the source from right to left.")
    input_feeding: bool = setting(
        False, "Feed the attended vector into the next step. Requires dot, general or concat."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            self.architecture()
        except RegardError as error:
            raise ArgumentError(f"[model]: {error}") from None

    def architecture(self) -> TransformerConfig | RecurrentConfig:
        """The config of the model class."""
        shared: dict[str, Any] = {"width": self.width, "layers": self.layers, "dropout": self.dropout}
        if self.kind == "transformer":
            options = {name: getattr(self, name) for name in _TRANSFORMER}
            return TransformerConfig(**shared, **options, normalize=NORMALIZERS[self.normalize]())
        options = {name: getattr(self, name) for name in _RECURRENT}
        if self.kind == "plain":
            options |= {"attention": "none", "input_feeding": False}
        return RecurrentConfig(**shared, **options)

    def build(self, sizes: int | tuple[int, int]) -> Seq2Seq:
        """Build a new model for these vocabulary sizes; one size ties source and target embeddings."""
        architecture, share = self.architecture(), isinstance(sizes, int)
        if isinstance(architecture, TransformerConfig):
            return Transformer(sizes, architecture, share=share)
        return RecurrentSeq2Seq(sizes, architecture, share=share)

    def ignored(self) -> set[str]:
        """Names of settings that this kind of model does not use."""
        if self.kind == "transformer":
            return {f"model.{name}" for name in _RECURRENT}
        names = {*_TRANSFORMER, "normalize"} | (
            {"attention", "input_feeding"} if self.kind == "plain" else set()
        )
        return {f"model.{name}" for name in names} | {"training.guided_alignment_weight"}


@dataclass(frozen=True)
class TokensConfig(_Section):
    """Vocabulary: the [tokens] section. See `Tokens.learn`."""

    section: ClassVar[str] = "tokens"

    kind: vocabulary.Kind = setting("unigram", "Subwords (unigram or bpe), words or characters.")
    size: int = setting(8000, "Maximum vocabulary size.", min=vocabulary.SPECIAL_TOKENS + 1, max=10_000_000)
    shared: bool = setting(True, "One vocabulary for source and target.")
    character_coverage: float = setting(
        1.0,
        "Fraction of characters in the vocabulary; rarer ones are unknown.",
        min=vocabulary.MIN_COVERAGE,
        max=1,
    )


@dataclass(frozen=True)
class CorpusConfig(_Section):
    """Filtering and validation split: the [corpus] section."""

    section: ClassVar[str] = "corpus"

    max_tokens: int = setting(256, "Drop pairs with a longer side.", min=1, max=10_000_000)
    max_length_ratio: float = setting(
        4.0, "Drop pairs in which one side is this many times longer than the other, plus 10 tokens.", min=1
    )
    dev_size: int = setting(
        1000,
        "Distinct source sentences held out for validation, unless a set is given.",
        min=1,
        max=10_000_000,
    )


@dataclass(frozen=True)
class TrainingConfig(_Section):
    """Optimization and validation: the [training] section."""

    section: ClassVar[str] = "training"

    epochs: int = setting(20, "Passes over the training data.", min=1, max=_MAX_UPDATES)
    updates: int | None = setting(
        None, "Number of optimizer updates; overrides epochs.", min=1, max=_MAX_UPDATES
    )
    batch_tokens: int = setting(4096, "Batch size in tokens, source plus target.", min=1, max=100_000_000)
    accumulate: int = setting(1, "Batches per update (gradient accumulation).", min=1, max=100_000)
    learning_rate: float = setting(1e-3, "Peak learning rate.", above=0)
    schedule: Schedule = setting(
        "cosine", "Learning rate after warmup: cosine (to 0), inverse-sqrt (Vaswani et al. 2017) or constant."
    )
    warmup: int = setting(400, "Updates of linear warmup.", min=0, max=_MAX_UPDATES)
    label_smoothing: float = setting(0.1, "Label smoothing.", min=0, below=1)
    weight_decay: float = setting(0.0, "AdamW weight decay.", min=0)
    max_grad_norm: float = setting(1.0, "Maximum gradient norm. 0: no clipping.", min=0)
    unknown_rate: float = setting(
        0.02, "Fraction of pairs with one token replaced by unknown, to learn copying.", min=0, below=1
    )
    guided_alignment_weight: float = setting(
        0.0,
        "Weight of the alignment loss on one head (Garg et al. 2019); 0.3 improves alignments. 0: off.",
        min=0,
    )
    precision: Precision = setting("float32", "float32, or bfloat16 on processors that support it.")
    validate_every: int = setting(
        0,
        "Updates between validations. 0: once per epoch, at least 50 updates apart.",
        min=0,
        max=_MAX_UPDATES,
    )
    save_every: int = setting(
        0,
        "Updates between checkpoints; each validation saves one, too. 0: once per epoch.",
        min=0,
        max=_MAX_UPDATES,
    )
    average_checkpoints: int = setting(
        1, "Average the parameters of this many last checkpoints.", min=1, max=10_000
    )
    patience: int = setting(
        0, "Stop after this many validations without improvement. 0: never.", min=0, max=_MAX_UPDATES
    )
    metric: Metric = setting("bleu", "Validation metric that selects the best model: bleu or loss.")
    seed: int = setting(0, "Random seed.", min=0, max=2**32 - 1)
    threads: int = setting(0, "CPU threads. 0: torch's default.", min=0, max=4096)

    def duration(self) -> str:
        """The planned length of the training.

        >>> from regard.translation.config import TrainingConfig
        >>> TrainingConfig().duration(), TrainingConfig(updates=100).duration()
        ('20 epochs', '100 updates')
        """
        return pluralize(self.epochs, "epoch") if self.updates is None else pluralize(self.updates, "update")


@dataclass(frozen=True)
class TranslationConfig:
    """All settings of a training, in the four sections of a TOML file.

    model, tokens, corpus, training: the sections; `regard train --print-config` describes all settings.

    >>> from regard.translation import TranslationConfig
    >>> config = TranslationConfig.preset("tiny").override(["training.epochs=3", "model.kind=recurrent"])
    >>> config.training.epochs, config.model.architecture().attention
    (3, 'additive')
    >>> config.override(["training.epoch=3"])
    Traceback (most recent call last):
    regard.errors.ArgumentError: Unknown setting training.epoch. Did you mean training.epochs?
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    tokens: TokensConfig = field(default_factory=TokensConfig)
    corpus: CorpusConfig = field(default_factory=CorpusConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)

    def __post_init__(self) -> None:
        model, weight = self.model, self.training.guided_alignment_weight
        needed = max_translation_tokens(self.corpus.max_tokens) + 2  # with start and end tokens
        if model.kind == "transformer" and model.positions == "learned" and model.max_positions < needed:
            raise ArgumentError(
                f"model.max_positions={model.max_positions} is too small for "
                f"corpus.max_tokens={self.corpus.max_tokens}: translations need {needed} learned positions. "
                f"Raise model.max_positions to {needed}, lower corpus.max_tokens, or choose other positions."
            )
        if weight and model.kind != "transformer":
            raise ArgumentError(
                f"training.guided_alignment_weight={weight:g} requires a transformer, got "
                f"model.kind={model.kind!r}. Set training.guided_alignment_weight=0."
            )

    @classmethod
    def preset(cls, name: Preset = "small", model: Model = "transformer") -> "TranslationConfig":
        """Return a preset: "tiny" trains in 1-2 minutes, "small" in 20, "base" on a large machine.

        model: "transformer", "recurrent" (RNN with Bahdanau attention) or "plain" (no attention).
        """
        if name not in PRESETS:
            raise ArgumentError(f"Unknown preset {name!r}. Choose from {', '.join(PRESETS)}.")
        config = cls().replace(PRESETS[name]).replace({"model": {"kind": model}})
        return config if model == "transformer" else config.replace(_RECURRENT_PRESETS[model])

    @classmethod
    def from_toml(
        cls, path: str | os.PathLike[str], base: "TranslationConfig | None" = None
    ) -> "TranslationConfig":
        """Read a TOML file; settings it does not contain come from `base`."""
        return (base or cls()).replace(cls.read_toml(path))

    @staticmethod
    def read_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
        """Return the settings in a TOML file by section and name, unchecked."""
        content = read_regular(path, MAX_TEXT_BYTES)
        try:
            return tomllib.loads(content.decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:  # ValueError: also a number of thousands of digits
            raise ArgumentError(f"{os.fspath(path)!r} is not a valid TOML file: {error}.") from None

    def to_toml(self) -> str:
        """Return all settings as TOML with descriptions; those that the model ignores are omitted.

        >>> from regard.translation import TranslationConfig
        >>> print(*TranslationConfig().to_toml().splitlines()[2:4], sep="\\n")
        width = 256                    # Model dimension.
        layers = 3                     # Layers of the encoder and of the decoder.
        """
        ignored, lines = self.model.ignored(), []
        for section in _SECTIONS:
            lines.append(f"[{section}]")
            for item in dataclasses.fields(_SECTIONS[section]):
                if f"{section}.{item.name}" in ignored:
                    continue
                value = getattr(getattr(self, section), item.name)
                line = f"# {item.name} =" if value is None else f"{item.name} = {json.dumps(value)}"
                lines.append(f"{line:<30} # {item.metadata['description']}")
            lines.append("")
        return "\n".join(lines).rstrip()

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> "TranslationConfig":
        """Restore a config from `to_dict`."""
        return cls().replace(settings)

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Return JSON-serializable settings by section and name."""
        return dataclasses.asdict(self)

    def replace(self, settings: Mapping[str, Any]) -> "TranslationConfig":
        """Return a copy with these settings, by section and name."""
        sections = {}
        for section, values in settings.items():
            _check_section(section)
            if not isinstance(values, Mapping):
                raise ArgumentError(
                    f"{section} must be a section ([{section}], then name = value), got {_show(values)}."
                )
            for name in values:
                _type_of(section, name)
            sections[section] = dataclasses.replace(getattr(self, section), **values)
        return dataclasses.replace(self, **sections)

    def override(self, settings: Sequence[str]) -> "TranslationConfig":
        """Return a copy with single settings changed: ["training.learning_rate=0.001"]."""
        changes: dict[str, dict[str, Any]] = {}
        for text in settings:
            path, equals, value = text.partition("=")
            section, dot, name = path.strip().partition(".")
            if not equals or not dot:
                raise ArgumentError(f"Invalid setting {shorten(text)!r}. Use section.name=value.")
            _check_section(section)
            changes.setdefault(section, {})[name] = _parse(section, name, value.strip())
        return self.replace(changes)

    def is_extended_by(self, other: "TranslationConfig") -> bool:
        """Whether `other` only trains longer, in the same unit.

        >>> from regard.translation import TranslationConfig
        >>> config = TranslationConfig.preset("tiny")
        >>> [config.is_extended_by(config.override([f"training.epochs={n}"])) for n in (5, 10, 20)]
        [False, False, True]
        """
        old, new = self.training, other.training
        same_end = dataclasses.replace(new, epochs=old.epochs, updates=old.updates)
        if dataclasses.replace(other, training=same_end) != self:
            return False
        if old.updates is None or new.updates is None:
            return old.updates is new.updates and new.epochs > old.epochs
        return new.updates > old.updates


_SECTIONS: dict[str, Any] = {
    part.section: part for part in (ModelConfig, TokensConfig, CorpusConfig, TrainingConfig)
}

PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "tiny": {
        "model": {"width": 128, "layers": 2, "heads": 4},
        "tokens": {"size": 1000},
        "corpus": {"dev_size": 200},
        "training": {"batch_tokens": 2048, "epochs": 10, "warmup": 200, "learning_rate": 2e-3},
    },
    "small": {"model": {"dropout": 0.2}, "training": {"batch_tokens": 2500, "epochs": 10}},
    "base": {
        "model": {"width": 512, "layers": 6},
        "tokens": {"size": 32_000},
        "training": {
            "batch_tokens": 16_384,
            "learning_rate": 7e-4,
            "schedule": "inverse-sqrt",
            "warmup": 4000,
            "updates": 100_000,
            "validate_every": 2000,
            "average_checkpoints": 5,
        },
    },
}
_RECURRENT_PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "recurrent": {"model": {"layers": 1}},
    "plain": {"model": {"layers": 2, "cell": "lstm", "reverse": True, "bidirectional": False}},
}


def _check_section(name: str) -> None:
    if name not in _SECTIONS:
        raise ArgumentError(f"Unknown section [{shorten(name)}]. {_suggest(name, list(_SECTIONS))}")


def _type_of(section: str, name: str) -> Any:
    """The type of a setting."""
    kinds = {item.name: item.type for item in dataclasses.fields(_SECTIONS[section])}
    if name not in kinds:
        cure = _suggest(name, list(kinds), f"{section}.")
        raise ArgumentError(f"Unknown setting {section}.{shorten(name)}. {cure}")
    return kinds[name]


def _suggest(name: str, known: Sequence[str], prefix: str = "") -> str:
    close = difflib.get_close_matches(name, known, 1)
    return f"Did you mean {prefix}{close[0]}?" if close else f"Choose from {', '.join(known)}."


def _check_type(name: str, value: Any, kind: Any) -> Any:
    """Return the value, an int as a float where a float is required."""
    if isinstance(kind, types.UnionType):
        if value is None:
            return None
        (kind,) = (part for part in get_args(kind) if part is not type(None))
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise ArgumentError(f"{name} must be one of {', '.join(get_args(kind))}, got {_show(value)}.")
        return value
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value) if abs(value) < 2**53 else math.inf if value > 0 else -math.inf
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        expected = {int: "an integer", float: "a number", bool: "true or false"}[kind]
        raise ArgumentError(f"{name} must be {expected}, got {_show(value)}.")
    return value


def _check_bounds(name: str, value: Any, bounds: Mapping[str, float | None]) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise ArgumentError(f"{name} must be finite, got {value}.")
    limits = {phrase: limit for phrase, limit in bounds.items() if limit is not None}
    if value is not None and not all(_COMPARE[phrase](value, limit) for phrase, limit in limits.items()):
        expected = " and ".join(f"{phrase} {limit:,}" for phrase, limit in limits.items())
        raise ArgumentError(f"{name} must be {expected}, got {_show(value)}.")


def _parse(section: str, name: str, text: str) -> Any:
    """Parse a setting from the command line: TOML, with optional quotes around strings."""
    kind = _type_of(section, name)
    if text == "none" and isinstance(kind, types.UnionType):
        return None
    if get_origin(kind) is Literal:
        return text.strip("\"'")
    try:
        parsed = tomllib.loads(f"value = {text}")
        return parsed["value"] if len(parsed) == 1 else text  # text of several lines
    except (ValueError, RecursionError):  # not TOML, too many digits, or nested too deeply
        return text  # rejected for its type


def _show(value: Any) -> str:
    try:
        return shorten(repr(value))
    except (ValueError, RecursionError):  # an int with more digits than Python prints
        return "a value that is too long to show"

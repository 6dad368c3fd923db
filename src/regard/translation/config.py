"""Training configuration: presets, TOML files and individual settings.

Importing this module does not import torch, so the command line reports invalid settings immediately.
"""
# ruff: noqa: RUF009 (setting returns a dataclass field)

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from regard._util.files import MAX_TEXT_BYTES, read_regular
from regard._util.settings import Section, setting, show, suggest
from regard._util.text import shorten
from regard.errors import ArgumentError, RegardError
from regard.models.configs import Activation, AttentionKind, Cell, Norm, RecurrentConfig, TransformerSettings
from regard.models.layers.positions import KINDS, Positions
from regard.translation import tokens as vocabulary
from regard.translation.long_lines import max_translation_tokens
from regard.translation.training.training_config import TrainingConfig

if TYPE_CHECKING:
    from regard.models.seq2seq import Seq2Seq

Model = Literal["transformer", "recurrent", "plain"]
Normalize = Literal["softmax", "softmax1", "sparsemax", "entmax15"]
Preset = Literal["tiny", "small", "base"]


@dataclass(frozen=True)
class ModelConfig(Section):
    """Architecture: the [model] section.

    Transformers use the settings in `TransformerConfig`; other models use the settings in `RecurrentConfig`.
    """

    kind: Model = setting(
        "transformer", "transformer, recurrent (RNN with Bahdanau attention) or plain (no attention)."
    )
    width: int = setting(256, "Model dimension.", min=1, max=65_536)
    layers: int = setting(3, "Number of layers in the encoder and in the decoder.", min=1, max=1024)
    dropout: float = setting(0.1, "Dropout probability.", min=0, below=1)
    heads: int = setting(8, "Number of attention heads; must divide the width.", min=1, max=4096)
    key_heads: int | None = setting(
        None, "Key and value heads (grouped-query attention). Default: heads.", min=1, max=4096
    )
    ffn_dim: int | None = setting(None, "Feed-forward dimension. Default: 4 × width.", min=1, max=1_000_000)
    activation: Activation = setting("relu", "Feed-forward activation: relu, gelu or swiglu.")
    norm: Norm = setting("layer", "Normalization: layer, rms or none.")
    norm_first: bool = setting(True, "Pre-norm if true, post-norm if false.")
    positions: Positions = setting("sinusoidal", f"Position encoding: {', '.join(KINDS)} or none.")
    max_positions: int = setting(1024, "Number of learned positions.", min=1, max=10_000_000)
    head_width: int | None = setting(
        None, "Dimension of each attention head. Default: width / heads.", min=1, max=65_536
    )
    normalize: Normalize = setting(
        "softmax", "Attention normalizer: softmax, softmax1, sparsemax or entmax15."
    )
    cell: Cell = setting("gru", "Recurrent cell: gru or lstm.")
    attention: AttentionKind = setting(
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
            raise ArgumentError(f"[model] has {str(error).partition(' got ')[2]}") from None

    def architecture(self) -> TransformerSettings | RecurrentConfig:
        """Return the config of the model class; for a Transformer, excluding the normalizer."""
        options: dict[str, Any] = {name: getattr(self, name) for name in self._used()}
        if self.kind == "transformer":
            return TransformerSettings(**options)
        if self.kind == "plain":
            options |= {"attention": "none", "input_feeding": False}
        return RecurrentConfig(**options)

    def _used(self) -> set[str]:
        """Return the names of the settings that the model class uses."""
        architecture = TransformerSettings if self.kind == "transformer" else RecurrentConfig
        return {item.name for item in dataclasses.fields(architecture)} & vars(self).keys()

    def build(self, sizes: int | tuple[int, int]) -> "Seq2Seq":
        """Build a new model. sizes: vocabulary sizes; a single size ties source and target embeddings."""
        from regard.mechanism import normalizers
        from regard.models.layers.blocks import TransformerConfig
        from regard.models.recurrent import RecurrentSeq2Seq
        from regard.models.transformer import Transformer

        architecture, share = self.architecture(), isinstance(sizes, int)
        if isinstance(architecture, RecurrentConfig):
            return RecurrentSeq2Seq(sizes, architecture, share=share)
        normalize = getattr(normalizers, self.normalize.capitalize())()  # "entmax15" is the class Entmax15
        config = TransformerConfig(**dataclasses.asdict(architecture), normalize=normalize)
        return Transformer(sizes, config, share=share)

    def ignored(self) -> set[str]:
        """Return the names of the settings that this kind of model does not use."""
        names = vars(self).keys() - self._used() - {"kind"}
        if self.kind == "transformer":
            return {f"model.{name}" for name in names - {"normalize"}}
        if self.kind == "plain":
            names |= {"attention", "input_feeding"}
        return {f"model.{name}" for name in names} | {"training.guided_alignment_weight"}


@dataclass(frozen=True)
class TokensConfig(Section):
    """Vocabulary: the [tokens] section. See `Tokenizer.learn`."""

    kind: vocabulary.Kind = setting("unigram", "Tokens: subwords (unigram or bpe), words or characters.")
    size: int = setting(8000, "Maximum vocabulary size.", min=vocabulary.SPECIAL_TOKENS + 1, max=10_000_000)
    shared: bool = setting(True, "Share one vocabulary between source and target.")
    character_coverage: float = setting(
        1.0,
        "Fraction of the text's characters that the vocabulary covers; rarer ones are unknown.",
        min=vocabulary.MIN_COVERAGE,
        max=1,
    )


@dataclass(frozen=True)
class CorpusConfig(Section):
    """Filtering and validation split: the [corpus] section."""

    max_tokens: int = setting(
        256, "Drop pairs with more tokens than this on either side.", min=1, max=10_000_000
    )
    max_length_ratio: float = setting(
        4.0, "Drop pairs in which one side is longer than this ratio times the other, plus 10 tokens.", min=1
    )
    dev_size: int = setting(
        1000,
        "Number of distinct source sentences to hold out if no validation set is given.",
        min=1,
        max=10_000_000,
    )


@dataclass(frozen=True)
class TranslationConfig:
    """All settings of a training run, in the four sections of a TOML file.

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
        needed = max_translation_tokens(self.corpus.max_tokens) + 2  # + 2: start and end tokens
        if model.kind == "transformer" and model.positions == "learned" and model.max_positions < needed:
            raise ArgumentError(
                f"model.max_positions={model.max_positions} is too small for "
                f"corpus.max_tokens={self.corpus.max_tokens}: translations need {needed} learned positions. "
                f"Raise model.max_positions to {needed}, lower corpus.max_tokens, or change model.positions."
            )
        if self.training.subword_sampling and self.tokens.kind != "unigram":
            raise ArgumentError(
                f"training.subword_sampling={self.training.subword_sampling:g} requires unigram tokens, got "
                f"tokens.kind={self.tokens.kind!r}. Set training.subword_sampling=0."
            )
        if weight and model.kind != "transformer":
            raise ArgumentError(
                f"training.guided_alignment_weight={weight:g} requires a transformer, got "
                f"model.kind={model.kind!r}. Set training.guided_alignment_weight=0."
            )

    @classmethod
    def preset(cls, name: Preset = "small", model: Model = "transformer") -> "TranslationConfig":
        """Return a preset: "tiny" trains in 1-2 minutes, "small" in 20; "base" is for large machines.

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
        """Read a TOML file; settings that are not in the file come from `base`."""
        return (base or cls()).replace(cls.read_toml(path))

    @staticmethod
    def read_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
        """Return the settings in a TOML file by section and name, unchecked."""
        content = read_regular(path, MAX_TEXT_BYTES)
        import tomllib  # takes milliseconds to import

        try:
            return tomllib.loads(content.decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:  # ValueError: also raised for huge integers
            raise ArgumentError(f"{os.fspath(path)!r} is not a valid TOML file: {error}.") from None

    def to_toml(self) -> str:
        """Return the settings as TOML with descriptions, excluding settings that the model ignores."""
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
        """Return a copy with the given settings, by section and name."""
        sections = {}
        for section, values in settings.items():
            kind = _section(section)
            if not isinstance(values, Mapping):
                raise ArgumentError(
                    f"{section} must be a section ([{section}], then name = value), got {show(values)}."
                )
            for name in values:
                kind.type_of(name)
            sections[section] = dataclasses.replace(getattr(self, section), **values)
        return dataclasses.replace(self, **sections)

    def override(self, settings: Sequence[str]) -> "TranslationConfig":
        """Return a copy with some settings changed, such as ["training.learning_rate=0.001"]."""
        changes: dict[str, dict[str, Any]] = {}
        for text in settings:
            path, equals, value = text.partition("=")
            section, dot, name = path.strip().partition(".")
            if not equals or not dot:
                raise ArgumentError(f"Invalid setting {shorten(text)!r}. Use section.name=value.")
            changes.setdefault(section, {})[name] = _section(section).parse(name, value.strip())
        return self.replace(changes)

    def is_extended_by(self, other: "TranslationConfig") -> bool:
        """Return whether `other` only trains longer (epochs, updates or minutes) or in another precision.

        >>> from regard.translation import TranslationConfig
        >>> config = TranslationConfig.preset("tiny")
        >>> [config.is_extended_by(config.override([f"training.epochs={n}"])) for n in (5, 10, 20)]
        [False, False, True]
        """
        old, new = self.training, other.training
        changeable = ("epochs", "updates", "minutes", "precision")
        same = dataclasses.replace(new, **{name: getattr(old, name) for name in changeable})
        if dataclasses.replace(other, training=same) != self:
            return False
        if dataclasses.replace(new, precision=old.precision) == old:
            return new.precision != old.precision
        if old.minutes or new.minutes:
            return 0 < old.minutes < new.minutes
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


def _section(name: str) -> type[Section]:
    if name not in _SECTIONS:
        raise ArgumentError(f"Unknown section [{shorten(name)}]. {suggest(name, list(_SECTIONS))}")
    return _SECTIONS[name]

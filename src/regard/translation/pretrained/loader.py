"""Load a translator from a folder in Hugging Face format. Nothing is downloaded, and no pickle is read."""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from regard.errors import ArgumentError
from regard.models.checkpoint_files import short
from regard.models.transformer import Transformer
from regard.translation.model_folder import TRANSLATORS
from regard.translation.pretrained.choice import Choice
from regard.translation.pretrained.families import m2m_100, marian, mbart, t5
from regard.translation.pretrained.layout import Layout
from regard.translation.pretrained.settings import (
    CONFIG,
    GENERATION,
    GENERATION_KEYS,
    Settings,
    read_generation,
)
from regard.translation.tokens import TokenizerPair

FAMILIES: dict[str, ModuleType] = {
    "marian": marian,
    "pegasus": marian,
    "m2m_100": m2m_100,
    "mbart": mbart,
    "t5": t5,
    "mt5": t5,
}
assert set(FAMILIES) == set(TRANSLATORS)


class PretrainedFolder(NamedTuple):
    """A folder in Hugging Face format: architecture, vocabularies and settings, excluding the parameters."""

    path: Path
    layout: Layout
    tokens: TokenizerPair
    choice: Choice

    def build(self, dropout: float | None = None) -> Transformer:
        """Build the model without reading its parameters."""
        return self._equip(self.layout.build(dropout))

    def load(self) -> Transformer:
        """Build the model and read its parameters."""
        return self._equip(self.layout.load(self.path))

    def _equip(self, model: Transformer) -> Transformer:
        model.special_tokens, model.decoding = self.tokens.special, self.choice.decoding()
        return model

    def files(self) -> list[Path]:
        """Return the files in the folder, excluding the parameters."""
        names = (CONFIG, GENERATION, *FAMILIES[self.layout.family].FILES)
        return [path for path in (self.path / name for name in dict.fromkeys(names)) if path.exists()]


def check_no_languages(folder: str | os.PathLike[str], source: str | None, target: str | None) -> None:
    """Raise if languages are chosen for a model trained by regard, which has one language pair."""
    if source is not None or target is not None:
        raise ArgumentError(
            f"{os.fspath(folder)!r} translates only one language pair; got source={source!r} and "
            f"target={target!r}. Omit them: they select the languages of a multilingual model."
        )


def _check_special_tokens(layout: Layout, tokens: TokenizerPair) -> None:
    """Raise if the id of a special token is outside the vocabulary."""
    special = tokens.special
    target = [special.padding, *special.target([]), special.unknown, *special.never_generated]
    for size, ids in zip(layout.vocab_sizes, (special.source([]), target), strict=True):
        if max(ids) >= size:
            raise ArgumentError(
                f"{layout.path} has a vocabulary of {size} tokens, but {max(ids)} is used as the id of a "
                "special or suppressed token; use the settings and weights of the same model."
            )


def read_pretrained(
    folder: str | os.PathLike[str],
    source: str | None = None,
    target: str | None = None,
    *,
    embeddings: Mapping[str, bool] | None = None,
) -> PretrainedFolder:
    """Read and check everything in a folder except the parameters.

    source, target: language codes of a multilingual model.
    embeddings: the fields `share` and `tie_output` of the layout, if the folder has no parameters.
    """
    path = Path(folder)
    config = Settings.load(path / CONFIG)
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ArgumentError(
            f"{path / CONFIG} has model_type={short(kind)}; load_translator supports only "
            f"{', '.join(FAMILIES)} (OPUS-MT is marian, NLLB is m2m_100)."
        )
    for option, code in (("source", source), ("target", target)):
        if code is not None and not isinstance(code, str):
            raise ArgumentError(f"load_translator got {option}={code!r}; pass a language code, such as 'de'.")
    family = FAMILIES[kind]
    layout = family.read_layout(config)
    generation = read_generation(path, config)
    choice = Choice.load(path, config, generation, source, target)
    tokens = family.read_tokens(path, layout, choice)
    _check_special_tokens(layout, tokens)
    config.check_rest(GENERATION_KEYS)
    layout = layout.separate(path) if embeddings is None else replace(layout, **embeddings)
    contents = PretrainedFolder(path, layout, tokens, choice)
    for tokenizer in tokens:
        tokenizer.origin = contents
    return contents

"""The model card of a model folder: README.md with data, scores, settings and the training command."""

import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from regard._util.extras import installed_version
from regard._util.files import write_atomic
from regard._util.text import pluralize, printable
from regard.translation.config import PRESETS, TranslationConfig
from regard.translation.model_folder import ALIGNMENT, CARD, LOG, ORIGIN
from regard.translation.training.logs import best_row, read_log
from regard.translation.training.preparation import TrainingData

_MARK = "<!-- Written by regard train. Remove this line to keep your changes. -->"
_MAX_EXAMPLE = 200  # maximum length of the example sentence in characters

_CARD = """\
---
library_name: regard
pipeline_tag: translation
tags: [attention, {kind}]
---
{mark}
# {name}

A translation model: {about}. Trained with [regard](https://pypi.org/project/regard/) {version}.

```console
regard translate --model {folder} {example}
regard look {folder}
```

## Data

{data}

## Scores

{scores}

## Training

```console
{command}
```

## Settings

```toml
{settings}
```

## Limitations

The model works well only on text like its training data. Check its translations before you rely on them.
"""


def write_model_card(
    folder: str | os.PathLike[str],
    config: TranslationConfig,
    data: TrainingData,
    entries: Mapping[str, Any],
    *,
    finished: bool = True,
) -> bool:
    """Write README.md, unless it was edited; return whether it was written.

    entries: the other entries in config.json, such as the origin of the data and the alignment head. A card
    counts as edited if it lacks the comment below its header.
    """
    path = Path(folder) / CARD
    if path.exists() and _MARK not in path.read_text("utf-8", errors="replace"):
        return False
    card = _CARD.format(
        mark=_MARK,
        name=printable(Path(folder).resolve().name),
        kind=config.model.kind,
        about=_describe_model(config),
        version=installed_version(),
        folder=shlex.quote(printable(Path(folder).name)),
        example=shlex.quote(printable(data.example()[:_MAX_EXAMPLE])),
        data=_describe_data(data, _origin(entries)),
        scores=_describe_scores(Path(folder), entries, finished),
        command=training_command(config, _origin(entries)),
        settings=config.to_toml(),
    )
    write_atomic(path, card.encode())
    return True


def training_command(config: TranslationConfig, origin: Mapping[str, Any]) -> str:
    """Return the command that repeats a training run, from its config and the origin of its data.

    >>> from regard.translation import TranslationConfig
    >>> from regard.translation.training.model_card import training_command
    >>> config = TranslationConfig.preset("tiny").override(["training.seed=3"])
    >>> training_command(config, {"corpus": [{"name": "a.de"}, {"name": "a.en"}], "preset": "tiny"})
    'regard train a.de a.en -o FOLDER --preset tiny --set training.seed=3'
    """
    preset = origin.get("preset", "small")
    words = ["regard", "train", *(_names(origin, "corpus") or ["SOURCE", "TARGET"]), "-o", "FOLDER"]
    words += ["--preset", preset] if preset != "auto" else []
    words += ["--model", config.model.kind] if config.model.kind != "transformer" else []
    words += ["--languages", str(origin["languages"])] if "languages" in origin else []
    words += ["--dev", *_names(origin, "dev")] if "dev" in origin else []
    words += ["--swap"] if origin.get("swap") else []
    for setting in _changed_settings(config, origin, preset):
        words += ["--set", setting]
    return shlex.join(printable(word) for word in words)


def _changed_settings(config: TranslationConfig, origin: Mapping[str, Any], preset: str) -> list[str]:
    """Return the settings that differ from the preset, as section.name=value."""
    if preset == "auto":  # its values depend on the corpus, so list the settings that were passed
        passed = origin.get("settings")
        settings = dict(str(item).partition("=")[::2] for item in passed) if isinstance(passed, list) else {}
        values = {name: _value(config, name) for name in settings}
        return [f"{name}={_to_text(value)}" for name, value in values.items()]
    known: Any = preset if preset in PRESETS else "small"
    base = TranslationConfig.preset(known, config.model.kind).to_dict()
    return [
        f"{section}.{name}={_to_text(value)}"
        for section, settings in config.to_dict().items()
        for name, value in settings.items()
        if value != base[section][name]
    ]


def _value(config: TranslationConfig, setting: str) -> Any:
    section, _, name = setting.strip().partition(".")
    return config.to_dict()[section][name]


def _to_text(value: Any) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _origin(entries: Mapping[str, Any]) -> Mapping[str, Any]:
    origin = entries.get(ORIGIN)
    return origin if isinstance(origin, dict) else {}


def _names(origin: Mapping[str, Any], key: str) -> list[str]:
    files = origin.get(key)
    return [str(file["name"]) for file in files if isinstance(file, dict)] if isinstance(files, list) else []


def _describe_model(config: TranslationConfig) -> str:
    model = config.model
    if model.kind == "transformer":
        return (
            f"a Transformer with width {model.width}, {pluralize(model.layers, 'layer')} and "
            f"{pluralize(model.heads, 'head')}"
        )
    attention = "Bahdanau attention" if model.kind == "recurrent" else "no attention"
    return f"a recurrent encoder and decoder with width {model.width} and {attention}"


def _describe_data(data: TrainingData, origin: Mapping[str, Any]) -> str:
    """Describe the corpus, its size and the vocabulary as a list."""
    files = (
        " and ".join(f"`{printable(name)}`" for name in _names(origin, "corpus")) or "pairs passed to `train`"
    )
    if origin.get("swap"):
        files += ", with source and target swapped"
    sizes = data.tokens.sizes()
    vocabulary = (
        f"{sizes:,} tokens, shared"
        if isinstance(sizes, int)
        else f"{sizes[0]:,} source and {sizes[1]:,} target tokens"
    )
    dev = "given" if "dev" in origin else "held out"
    return (
        f"- Corpus: {files}\n"
        f"- Training pairs: {len(data.pairs):,}; validation pairs: {len(data.dev):,} ({dev})\n"
        f"- Vocabulary: {vocabulary}\n"
        "- License: the license of the corpus; the model may reproduce text from it"
    )


def _describe_scores(folder: Path, entries: Mapping[str, Any], finished: bool) -> str:
    """Return the scores of the saved model on the validation pairs."""
    rows = read_log(folder) if (folder / LOG).exists() else []
    best = best_row(rows)
    if best is None:
        return "No validation yet." if not finished else "No validation with BLEU."
    loss = "" if best.dev_loss is None else f"; loss per token {best.dev_loss:.3f}"
    lines = [f"- BLEU on the validation pairs: {best.dev_bleu:.1f}{loss} (update {best.step:,})"]
    if not finished:
        lines.append(f"- Training was interrupted after update {rows[-1].step:,}.")
    if head := entries.get(ALIGNMENT):
        heads = "all heads" if head.get("heads") is None else f"heads {', '.join(map(str, head['heads']))}"
        lines.append(f"- Word alignments are read from decoder layer {head.get('layer')}, {heads}.")
    return "\n".join(lines)

"""Export a translator to the format of another library."""

import os
import tempfile
from pathlib import Path
from typing import Literal, get_args

from regard._util.checks import check_choice
from regard._util.extras import require
from regard._util.files import write_atomic
from regard.errors import ArgumentError
from regard.translation.export.ctranslate2 import export_ctranslate2
from regard.translation.export.huggingface import export_huggingface
from regard.translation.export.onnx import export_onnx
from regard.translation.export.plan import Plan, check_output
from regard.translation.export.readme import describe
from regard.translation.pretrained.loader import PretrainedFolder
from regard.translation.translator import Translator, load_translator

Format = Literal["ctranslate2", "onnx", "huggingface"]
_PACKAGES: dict[Format, tuple[str, ...]] = {
    "ctranslate2": ("ctranslate2", "ctranslate2.specs"),
    "onnx": ("onnx",),
    "huggingface": (),
}
NAMES: dict[str, str] = {"ctranslate2": "CTranslate2", "onnx": "ONNX", "huggingface": "Hugging Face"}


def export_translator(
    folder: str | os.PathLike[str],
    to: Format,
    output: str | os.PathLike[str],
    *,
    source: str | None = None,
    target: str | None = None,
) -> Path:
    """Write a translator in the format of another library, with its vocabularies; return the new folder.

    folder: a folder written by `regard train`, or in Hugging Face format.
    to: "ctranslate2", "onnx" or "huggingface".
    output: a new or empty folder. A new folder is written atomically; its README.md shows how to use it.
    source, target: languages of a multilingual model.

    For the same tokens, greedy decoding with the exported model gives the same translations. regard's
    text processing, such as sentence splitting and copying of numbers, is not exported. README.md names the
    alignment head. Settings that the format cannot express raise an error.

    >>> from regard.translation.export.export import export_translator
    >>> export_translator("de-en", "tensorflow", "out")
    Traceback (most recent call last):
    regard.errors.ArgumentError: export_translator got to='tensorflow'; choose one of ctranslate2, onnx, ...
    """
    check_choice("export_translator got to", to, get_args(Format))
    destination = Path(output)
    check_output(destination)
    translator = load_translator(folder, source=source, target=target)
    origin = translator.tokens.target.origin
    for package in _PACKAGES[to]:
        require(package, f"export --to {to}")
    parent = destination if destination.exists() else destination.parent
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".regard-", dir=parent) as temporary:
        part = Path(temporary) / "export"
        part.mkdir()
        _write(translator, origin if isinstance(origin, PretrainedFolder) else None, to, part)
        _move(part, destination)
    return destination


def _move(folder: Path, destination: Path) -> None:
    """Rename a folder; into an existing empty folder, move its files.

    An existing folder stays, because it may be the working directory, a mount point or a symbolic link.
    """
    if not destination.exists():
        folder.rename(destination)
        return
    moved: list[Path] = []
    try:
        for file in folder.iterdir():
            path = destination / file.name
            if os.path.lexists(path):
                raise ArgumentError(
                    f"Another program created {os.fspath(path)!r} during the export. Remove it, or export "
                    "to another folder."
                )
            moved.append(path)
            file.rename(path)
    except BaseException:
        for path in moved:
            path.unlink(missing_ok=True)
        raise


def _write(translator: Translator, origin: PretrainedFolder | None, to: Format, folder: Path) -> None:
    plan = Plan.of(translator, NAMES[to])
    if to == "ctranslate2":
        export_ctranslate2(plan, folder)
    elif to == "onnx":
        export_onnx(plan, folder)
    else:
        export_huggingface(plan, folder, origin)
    write_atomic(folder / "README.md", describe(plan, to).encode())

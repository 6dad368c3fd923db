"""Helpers shared by commands: path checks, option names in errors, reading, writing and printing.

This module imports neither typer nor torch.
"""

import errno
import gc
import io
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING

from regard._util.files import open_atomic
from regard._util.text import format_bytes, printable
from regard.errors import ArgumentError, RegardError
from regard.translation.data.formats import compressed
from regard.translation.model_folder import CONFIG, check_folder_name, is_pretrained, read_config

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from regard.models.configs import Precision
    from regard.translation.translator import Translator

SIGNAL_EXIT = 128  # exit status of a process terminated by signal n: 128 + n
_MAX_BYTES = 1 << 28  # maximum size of a text file
_GPU_FILES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")  # drivers of NVIDIA, of AMD, and of both under WSL


def console() -> "Console":
    """Create a console: colors on a terminal, plain text elsewhere; lines are never wrapped."""
    from rich.console import Console

    return Console(soft_wrap=True, highlight=False, markup=False, emoji=False)


def print_table(rows: Sequence[Sequence[str]], header: Sequence[str] = (), justify: str = "") -> None:
    """Print a table that fits the terminal. If stdout is not a terminal, the width is unlimited.

    justify: one letter per column, l (left) or r (right). Default: all columns left-aligned.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    screen = console()
    is_terminal = screen.is_terminal
    table = Table(
        *(header or [""] * len(rows[0])),
        box=SIMPLE_HEAD if is_terminal and header else None,
        show_header=bool(header),
        pad_edge=False,
    )
    for column, letter in zip(table.columns, justify, strict=False):
        column.justify = "right" if letter == "r" else "left"
    for row in rows:
        table.add_row(*(Text(cell, overflow="fold") for cell in row))
    if is_terminal:
        screen.print(table, soft_wrap=False)
        return
    screen.width = 100_000  # a pipe has no width
    with screen.capture() as printed:
        screen.print(table)
    print("\n".join(line.rstrip() for line in printed.get().splitlines()))


@contextmanager
def naming(**options: str) -> Iterator[None]:
    """Replace parameter names in the library's errors with option names: naming(size="--beam").

    "Beam got size=0; it must be at least 1." becomes "--beam is 0; it must be at least 1."
    """
    try:
        yield
    except RegardError as error:
        message = re.sub(r"^\w+ got (\w+)=([^ ;]+);", r"\1 is \2;", str(error))
        message = re.sub(r"^\w+ got ", "", message)
        # the lookbehind skips option names that are already there, such as --port
        names = rf"(?<![\w-])({'|'.join(map(re.escape, options))})"
        message = re.sub(f"{names}=", r"\1 ", message)
        message = re.sub(rf"{names}\b", lambda match: options[match[1]], message)
        raise ArgumentError(message) from None


def read(path: Path, option: str = "--file") -> str:
    """Read a text file, keeping its line endings; - is standard input."""
    if str(path) == "-":
        _check_stdin(option)
        content = sys.stdin.buffer.read(_MAX_BYTES + 1)  # bytes: text would use the terminal's encoding
    else:
        with path.open("rb") as file:  # may be a pipe
            content = file.read(_MAX_BYTES + 1)
    if len(content) > _MAX_BYTES:
        raise ArgumentError(
            f"{option} {str(path)!r} has more than {format_bytes(_MAX_BYTES)} of text; split it into smaller "
            "files."
        )
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ArgumentError(f"{str(path)!r} is not UTF-8. Convert it first: iconv -t utf-8.") from None


def check_output(path: Path | None, option: str = "--output") -> None:
    """Raise an error unless a file can be written to the path; None is stdout."""
    if path is None:
        return
    if path.is_dir():
        raise ArgumentError(f"{option} {str(path)!r} is a folder; pass a file name.")
    if path.exists() and not path.is_file():
        raise ArgumentError(f"{option} {str(path)!r} is not a regular file; pass another file.")
    if not path.parent.is_dir():
        raise ArgumentError(
            f"{option} {str(path)!r}: the folder {str(path.parent)!r} does not exist; create it first."
        )
    _check_access(path.parent, os.W_OK, path)


def check_distinct(inputs: Mapping[str, str | Path | None], outputs: Mapping[str, str | Path | None]) -> None:
    """Raise an error if an output file is also an input file or another output file.

    inputs, outputs: paths by option or argument name; None and - are not files.
    """
    files = {Path(path).resolve(): name for name, path in inputs.items() if path not in (None, "-")}
    for name, path in outputs.items():
        if path is None:
            continue
        file = Path(path).resolve()
        if file in files:
            raise ArgumentError(
                f"{files[file]} and {name} are the same file, {str(path)!r}; choose another file for {name}."
            )
        files[file] = name


def check_picture(path: Path, option: str = "--output") -> None:
    """Raise an error unless a picture can be written to the path."""
    from regard.plot.style import check_suffix

    check_suffix(path)
    check_output(path, option)


def check_folder(path: Path) -> None:
    """Raise an error unless the path is a folder or can become one."""
    existing = next((part for part in (path, *path.parents) if os.path.lexists(part)), path)
    if os.path.lexists(existing) and not existing.is_dir():
        raise ArgumentError(f"--output {str(path)!r}: {str(existing)!r} is not a folder; pass a new folder.")


def check_input(path: Path, option: str = "--file") -> None:
    """Raise an error unless the path is a readable file; - is standard input."""
    if str(path) == "-":
        _check_stdin(option)
        return
    if path.is_dir():
        raise ArgumentError(f"{option} {str(path)!r} is a folder; pass a file name.")
    path.stat()
    _check_access(path, os.R_OK, path)


def _check_stdin(option: str) -> None:
    if sys.stdin is None:
        raise ArgumentError(f"{option} is -, but stdin is closed; pipe text into it, or pass a file.")


def _check_access(path: Path, mode: int, shown: Path) -> None:
    if not os.access(path, mode):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(shown))


def check_model(folder: Path) -> None:
    """Raise an error unless the folder contains a translation model. Does not import torch."""
    check_folder_name(folder)
    if not is_pretrained(folder):
        read_config(folder)


def check_encoder(name: str) -> None:
    """Raise an error unless `name` is "minilm" or a folder with a config. Does not import torch."""
    if name == "minilm":
        return
    if not os.path.isdir(name):
        problem = (
            f"{name!r} is a file"
            if os.path.exists(name)
            else f"The folder {name!r} does not exist, and regard does not download models"
        )
        raise ArgumentError(f'{problem}; pass a folder with a model and its {CONFIG}, or "minilm".')
    if not os.path.exists(os.path.join(name, CONFIG)):
        raise ArgumentError(
            f'{name!r} is not a model folder: it has no {CONFIG}. Pass a folder with a model, or "minilm".'
        )


@contextmanager
def open_output(path: Path, newline: str = "\n") -> Iterator[IO[str]]:
    """Open a text file that replaces `path` only after writing has succeeded; a .gz file is compressed.

    newline: as in `open`.
    """
    with open_atomic(path) as raw, compressed(raw, str(path)) as file:
        text = io.TextIOWrapper(file, encoding="utf-8", newline=newline)
        yield text
        text.detach()  # flush without closing


def load(
    folder: Path,
    *,
    device: "str | torch.device | None" = None,
    dtype: "Precision | None" = None,
    aligning: bool = False,
    quiet: bool = False,
    languages: str | None = None,
) -> "Translator":
    """Load the translator from a model folder, onto the GPU if there is one; int8 runs on the CPU.

    aligning: select the best alignment head if training has not done so yet; print a note unless `quiet`.
    """
    with _paused_collection():
        from regard.translation.translator import load_translator

        device = device or ("cpu" if dtype == "int8" else _default_device())
        source, target = (None, None) if languages is None else parse_languages(languages)
        translator = load_translator(folder, source=source, target=target, device=device, dtype=dtype)
    if dtype == "bfloat16" and str(device) == "cpu" and not quiet:
        from regard.models.inference.quantization import multiplies_bfloat16

        if not multiplies_bfloat16():
            print(
                "regard: this processor has no bfloat16 instructions; float32 and int8 are faster.",
                file=sys.stderr,
            )
    if is_pretrained(folder):
        return translator  # a pretrained model guesses its alignment head on first use
    if aligning and not translator.config.get("alignment"):
        from regard.translation.alignment.cross_attention import has_cross_attention

        if has_cross_attention(translator.model):
            _select_head(translator, folder, quiet)
    return translator


def _default_device() -> str:
    """Return "cuda" if torch can use a GPU, otherwise "cpu". Torch is not imported if no driver is loaded."""
    if sys.platform == "linux" and not any(map(os.path.exists, _GPU_FILES)):
        return "cpu"
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


@contextmanager
def _paused_collection() -> Iterator[None]:
    """Pause garbage collection, which would take about a tenth of the import time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _select_head(translator: "Translator", folder: Path, quiet: bool) -> None:
    """Select the alignment head, as at the end of training."""
    from regard.translation.training.train import load_alignment_head

    try:
        head = load_alignment_head(folder)
    except (RegardError, LookupError, OSError):  # such as token ids out of range
        head = None
    translator.alignment_head = head or translator.alignment_head
    if not quiet:
        result = (
            "one was selected now" if head else "its data is missing or corrupted, so the last layer is used"
        )
        print(
            f"regard: {printable(str(folder))!r} has no alignment head yet, because training has not "
            f"finished; {result}.",
            file=sys.stderr,
        )


def parse_languages(languages: str) -> tuple[str, str]:
    """Parse --languages: en-de is English to German, pt-BR-en Brazilian Portuguese to English."""
    tag = r"([^-]+(?:-(?:[A-Z]{2}|[A-Z][a-z]{3}|[0-9]{3}))*)"  # may have regions and scripts: zh-Hant-TW
    match = re.fullmatch(f"{tag}-{tag}", languages)
    if match is None:
        raise ArgumentError(f"--languages is {languages!r}; pass source and target, such as en-de.")
    return match[1], match[2]


def index(option: str, number: int, count: int) -> int:
    """Return the index of a layer or head; negative numbers count from the end."""
    if -count <= number < count:
        return number % count
    raise ArgumentError(f"{option} {number} is out of range; use 0 to {count - 1}, or −1 for the last.")


def exclusive(*options: str) -> ArgumentError:
    """Return the error for options that contradict each other."""
    return ArgumentError(f"{' and '.join(options)} are mutually exclusive; pass one of them.")

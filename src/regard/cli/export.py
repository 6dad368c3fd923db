"""`regard export`."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Literal

import typer

from regard._util.text import printable
from regard.cli.options import Languages
from regard.cli.shared import check_folder, check_model, console, parse_languages


def export(
    model: Annotated[
        Path,
        typer.Argument(metavar="FOLDER", help="Folder written by regard train, or in Hugging Face format."),
    ],
    to: Annotated[
        Literal["ctranslate2", "onnx", "huggingface"],
        typer.Option("--to", help="Format of the exported model."),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FOLDER", help="New folder for the exported model.")
    ],
    languages: Languages = None,
) -> None:
    """Export a translation model to CTranslate2, ONNX or Hugging Face format.

    The exported folder contains the vocabularies and a README.md that shows how to use it without regard
    and names the alignment head. For the same tokens, greedy decoding gives the same translations.
    regard's text processing (sentence splitting, letter case, copying of numbers, URLs and tags) is not
    exported.

    Examples:
    regard export de-en --to ctranslate2 -o de-en-ct2
    regard export de-en --to huggingface -o de-en-hf
    regard export m2m100_418M --languages de-en --to onnx -o de-en-onnx
    """
    check_model(model)
    check_folder(output)
    source, target = (None, None) if languages is None else parse_languages(languages)
    from regard.translation.export.export import export_translator

    with _clean_exit():
        export_translator(model, to, output, source=source, target=target)
    readme = printable(str(output / "README.md"))
    console().print(f"Exported to {printable(str(output))}; {readme} shows how to use it.")


@contextmanager
def _clean_exit() -> Iterator[None]:
    """Leave the `with` block by an exception on Ctrl-C, SIGTERM and SIGHUP, so that it can clean up.

    Afterwards, SIGTERM and SIGHUP end the process as usual. Ignored signals remain ignored.
    """
    received: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if len(received) == 1:  # a second signal must not interrupt the cleanup
            raise KeyboardInterrupt

    names = ("SIGINT", "SIGTERM", "SIGHUP") if threading.current_thread() is threading.main_thread() else ()
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]  # Windows has no SIGHUP
    handlers = {number: signal.getsignal(number) for number in numbers}
    replaced = {
        number: handler
        for number, handler in handlers.items()
        if handler is signal.SIG_DFL or (number == signal.SIGINT and callable(handler))
    }
    for number in replaced:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in replaced.items():
            signal.signal(number, handler)
        if received:
            if replaced[received[0]] is signal.SIG_DFL:
                signal.raise_signal(received[0])
            # an interrupted import can raise another error
            raise KeyboardInterrupt

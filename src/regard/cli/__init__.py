"""The command line. `regard --help` answers at once: torch is imported by the commands that need it.

A command is a function with typer's annotations in a module of its own, and a line in `COMMANDS`. The first
line of its docstring is what `regard --help` says of it; `helping` has the examples below its own help.
Three rules keep it quick and clean:

- The standard library, typer, `regard.errors`, `files` and `text` of `regard.mechanism` and
  `regard.cli.shared` are light and imported at the top. All else is imported inside the function, after its
  arguments have been checked, so that a mistake is told before torch is loaded.
- What the user can cause is a `RegardError`, mostly an `ArgumentError`, or an `OSError`. `main` makes one
  line of it, with exit status 2. A package that is missing is told with its pip command.
- Ctrl-C is one line and status 130. A command that has said how to go on by itself ends with SystemExit(130).

    def shout(
        text: Annotated[str, typer.Argument(help="What to shout.")],
        times: Annotated[int, typer.Option(min=1, help="How often.")] = 1,
    ) -> None:
        \"\"\"Say it louder.\"\"\"
        from regard._util.text import pluralize
        console().print(f"{plain(text).upper()}, {pluralize(times, 'time')}")
"""

import os
import re
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from inspect import getdoc
from types import FrameType
from typing import Annotated, Literal, NoReturn, get_args, get_origin, get_type_hints

import typer
from typer.models import ArgumentInfo, OptionInfo

from regard import __version__
from regard._util.text import printable, shorten
from regard.cli.helping import Command, Group
from regard.cli.shared import BROKEN_PIPE, CURES, INTERRUPTED, OUT_OF_MEMORY, PACKAGES
from regard.errors import ArgumentError, RegardError

_INTERRUPTED = "regard: interrupted."
REFUSED = 2
_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")  # how the threads of OpenMP wait
_NO_MEMORY = re.compile("(allocate|not enough|out of) memory", re.IGNORECASE)  # as torch says it

# the panels of `regard --help`: each command and the module it is in
COMMANDS = {
    "Translation": {
        "demo": "demo",
        "train": "train",
        "translate": "translate",
        "align": "align",
        "evaluate": "evaluate",
        "curves": "curves",
    },
    "Words in context": {"compare": "words", "attended": "words", "embed": "words"},
    "Looking": {"look": "look", "draw": "draw"},
}

app = typer.Typer(
    cls=Group,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

# how the help calls what is given to an option, unless it says so itself; to a flag, nothing is
_VALUES: dict[object, str] = {bool: "", int: "N", float: "X", str: "TEXT"}

# typer's own refusals, an option that is not there for example; it exports one kind of them alone
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; what is refused is one line on stderr, and exit status 2. Ctrl-C is 130."""
    _wait_passively()
    _open_closed()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            # a terminal without such characters shows others; a file or a pipe gets them as they are
            terminal = stream.isatty()
            stream.reconfigure(encoding=None if terminal else "utf-8", errors="replace")
    given = None if arguments is None else list(arguments)
    try:
        with _interruptible():
            _check_arguments(sys.argv[1:] if given is None else given)
            status = app(args=given, prog_name="regard", standalone_mode=False)
            sys.stdout.flush()  # here, where it can be told what is wrong with it
    except (KeyboardInterrupt, typer.Abort):
        status = INTERRUPTED
    except BrokenPipeError:  # who reads has seen enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = BROKEN_PIPE
    except (RegardError, OSError, _UsageError, ModuleNotFoundError) as error:
        _refuse(error)
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not _NO_MEMORY.search(str(error)):
            raise
        _refuse(ArgumentError(OUT_OF_MEMORY))
    if status == INTERRUPTED:  # typer makes a status of Ctrl-C inside a command
        print(_INTERRUPTED, file=sys.stderr)
    sys.exit(status)


def _wait_passively() -> None:
    """Let OpenMP's threads sleep while they wait, instead of spinning.

    Spinning threads hold up a computation many times over if other processes need the cores; on an idle
    machine sleeping costs nothing that can be measured. OpenMP reads these variables once, when torch is
    loaded. Whoever sets one of them has decided.
    """
    if "torch" not in sys.modules and not any(name in os.environ for name in _WAITING):
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"


def _check_arguments(arguments: Sequence[str]) -> None:
    """What no shell can pass on, and no name of a file can hold; every other text is one."""
    for one in arguments:
        try:
            whole = b"\0" not in os.fsencode(one)
        except UnicodeEncodeError:
            whole = False
        if not whole:
            raise ArgumentError(
                f"the argument {shorten(one)!r} has a NUL character or half of a surrogate pair; remove it."
            )


def _open_closed() -> None:
    """Standard output or error that whoever started us has closed leads nowhere; a file opened later would
    get its number, and what is printed."""
    for name, number in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
            setattr(sys, name, os.fdopen(number, "w", encoding="utf-8", closefd=False))


@contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C during an import ends the process there: raised in one, it may come out as any other error."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        above = frame
        while above is not None:
            if above.f_code.co_filename.startswith("<frozen importlib"):
                os.write(2, f"{_INTERRUPTED}\n".encode())
                os._exit(INTERRUPTED)
            above = above.f_back
        signal.default_int_handler(number, frame)

    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not ours or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _refuse(error: Exception) -> NoReturn:
    """One line, if it is the user's to mend; a mistake of regard's own keeps its traceback."""
    if isinstance(error, ModuleNotFoundError):
        package = error.name or ""
        if not package or package.partition(".")[0] == "regard" or "." in package:
            raise error
        message = f"this needs the package {package!r}: pip install {PACKAGES.get(package, package)}"
    elif isinstance(error, _UsageError):
        message = _usage(error)
    elif isinstance(error, OSError) and error.filename and error.strerror:
        message = f"{error.filename}: {error.strerror}{CURES.get(error.errno or 0, '')}"
    else:
        message = str(error)
    print(f"regard: {printable(message)}", file=sys.stderr)
    sys.exit(REFUSED)


def _usage(error: Exception) -> str:
    """What typer refused, and where the right usage stands."""
    message = " ".join(error.format_message().split())  # type: ignore[attr-defined]
    message = message.replace("Value error, ", "")  # with which pydantic begins
    context = getattr(error, "ctx", None)
    path = "regard" if context is None else context.command_path
    return f"{message.rstrip('.?')}{'?' if message.endswith('?') else '.'} See {path} --help."


def _version(asked: bool) -> None:
    if asked:
        print(f"regard {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _about(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=_version, is_eager=True),
    ] = False,
) -> None:
    """Attention that is fast and can be looked at: translators, word alignments, words in context."""
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(REFUSED)


def _value(kind: object) -> str | None:
    """How the help calls what an option of this kind is given."""
    options = [one for one in get_args(kind) if one is not type(None)]
    if get_origin(kind) is Literal:
        return "|".join(map(str, options))
    if len(options) == 1 and get_origin(kind) is not list:  # this, or None
        return _value(options[0])
    return _VALUES.get(kind)


def _register(name: str, module: str, panel: str) -> None:
    """Add a command, with a help that reads well."""
    home = import_module(f"regard.cli.{module}")
    command = getattr(home, name)
    for hint in get_type_hints(command, include_extras=True).values():
        match get_args(hint):
            case kind, OptionInfo(metavar=None) as option:
                option.metavar = _value(kind)
            case _, ArgumentInfo(metavar=None) as argument:
                raise AssertionError(f"an argument of {name} has no name for people: {argument.help}")
    # lines within paragraphs are broken anew, to fit the terminal
    paragraphs = (getdoc(command) or "").split("\n\n")
    app.command(
        name,
        cls=getattr(home, "Command", Command),
        rich_help_panel=panel,
        help="\n\n".join(" ".join(one.split()) for one in paragraphs),
    )(command)


for _panel, _commands in COMMANDS.items():
    for _name, _module in _commands.items():
        _register(_name, _module, _panel)

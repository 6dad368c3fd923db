"""The command line. `regard --help` is fast: torch is imported only by the commands that need it.

Each command is a function with typer annotations in its own module, and a line in `COMMANDS`. The first line
of its docstring is its summary in `regard --help`; its examples are in `help.EXAMPLES`. Three rules:

- Modules import only light modules at the top: the standard library, typer, `regard.errors`, `regard._util`
  and `regard.cli.shared`. Everything else is imported inside the function, after its arguments are checked,
  so invalid arguments are reported before torch is imported.
- Mistakes of the user raise `RegardError`, usually `ArgumentError`, or `OSError`. `main` prints one line and
  exits with status 2. For a missing package it prints the pip command.
- Ctrl-C prints one line and exits with status 130. A command that has already printed how to resume raises
  SystemExit(130).

    def shout(
        text: Annotated[str, typer.Argument(metavar="TEXT", help="Text to shout.")],
        times: Annotated[int, typer.Option(min=1, help="Number of repetitions.")] = 1,
    ) -> None:
        \"\"\"Print a text in upper case.\"\"\"
        console().print(" ".join([printable(text).upper()] * times))
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
from regard.cli.help import Command, Group
from regard.cli.shared import BROKEN_PIPE, ERRNO_HINTS, INTERRUPTED, OUT_OF_MEMORY, PIP_ARGUMENTS
from regard.errors import ArgumentError, RegardError

USAGE_ERROR = 2  # exit status
_INTERRUPTED = "regard: interrupted."
_SPIN_COUNT = "10000"  # about 30 µs
_WAIT_POLICIES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")  # environment variables of OpenMP
_NO_MEMORY = re.compile("(allocate|not enough|out of) memory", re.IGNORECASE)  # torch's wording

# panels of `regard --help`: each command and its module
COMMANDS = {
    "Translation": {
        "demo": "demo",
        "train": "train",
        "translate": "translate",
        "align": "align",
        "evaluate": "evaluate",
        "curves": "curves",
    },
    "Contextual word vectors": {"compare": "words", "attention": "words", "embed": "words"},
    "Visualization": {"look": "look", "draw": "draw"},
}

app = typer.Typer(
    cls=Group,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

# default placeholders for option values; flags have none
_PLACEHOLDERS: dict[object, str] = {bool: "", int: "N", float: "X", str: "TEXT"}

# base class of typer's usage errors, which typer does not export
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command. Errors of the user print one line to stderr and exit with status 2; Ctrl-C with 130."""
    _limit_spinning()
    _reopen_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            # UTF-8 for files and pipes; a terminal replaces characters it cannot show
            stream.reconfigure(encoding=None if stream.isatty() else "utf-8", errors="replace")
    args = None if arguments is None else list(arguments)
    try:
        with _interruptible():
            _check_arguments(sys.argv[1:] if args is None else args)
            status = app(args=args, prog_name="regard", standalone_mode=False)
            sys.stdout.flush()  # errors of the last write are reported here
    except (KeyboardInterrupt, typer.Abort):
        status = INTERRUPTED
    except BrokenPipeError:  # the reader has closed the pipe, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = BROKEN_PIPE
    except (RegardError, OSError, _UsageError, ModuleNotFoundError) as error:
        _exit_with_error(error)
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not _NO_MEMORY.search(str(error)):
            raise
        _exit_with_error(ArgumentError(OUT_OF_MEMORY))
    if status == INTERRUPTED:  # typer converts Ctrl-C inside a command into a status
        print(_INTERRUPTED, file=sys.stderr)
    sys.exit(status)


def _limit_spinning() -> None:
    """Let waiting OpenMP threads spin briefly, then sleep, unless the environment says otherwise.

    By default they spin so long that other busy processes slow training down several times; without any
    spinning it is slower on an idle machine (docs/results.md). OpenMP reads the variable when it is loaded.
    """
    if "torch" not in sys.modules and not any(name in os.environ for name in _WAIT_POLICIES):
        os.environ["GOMP_SPINCOUNT"] = _SPIN_COUNT


def _check_arguments(arguments: Sequence[str]) -> None:
    """Raise for arguments that cannot be file names."""
    for argument in arguments:
        try:
            valid = b"\0" not in os.fsencode(argument)
        except UnicodeEncodeError:
            valid = False
        if not valid:
            raise ArgumentError(
                f"The argument {shorten(argument)!r} contains a NUL character or a lone surrogate; remove it."
            )


def _reopen_closed_streams() -> None:
    """Redirect closed stdout and stderr to /dev/null; otherwise the next opened file gets their output."""
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_WRONLY)
            if null != descriptor:
                os.dup2(null, descriptor)
                os.close(null)
            setattr(sys, name, os.fdopen(descriptor, "w", encoding="utf-8", closefd=False))


@contextmanager
def _interruptible() -> Iterator[None]:
    """Exit immediately on Ctrl-C during an import: raised there, it may surface as another error."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        caller = frame
        while caller is not None:
            if caller.f_code.co_filename.startswith("<frozen importlib"):
                os.write(2, f"{_INTERRUPTED}\n".encode())
                os._exit(INTERRUPTED)
            caller = caller.f_back
        signal.default_int_handler(number, frame)

    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not is_default or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _exit_with_error(error: Exception) -> NoReturn:
    """Print one line and exit. Errors in regard itself keep their traceback."""
    if isinstance(error, ModuleNotFoundError):
        package = error.name or ""
        if not package or package.partition(".")[0] == "regard" or "." in package:
            raise error
        message = f"Missing package {package!r}. Run: pip install {PIP_ARGUMENTS.get(package, package)}"
    elif isinstance(error, _UsageError):
        message = _usage_message(error)
    elif isinstance(error, OSError) and error.filename and error.strerror:
        message = f"{error.filename}: {error.strerror}{ERRNO_HINTS.get(error.errno or 0, '')}"
    else:
        message = str(error)
    print(f"regard: {printable(message)}", file=sys.stderr)
    sys.exit(USAGE_ERROR)


def _usage_message(error: Exception) -> str:
    """Return typer's message and a pointer to the help."""
    message = " ".join(error.format_message().split())  # type: ignore[attr-defined]
    message = message.replace("Value error, ", "")  # pydantic's prefix
    context = getattr(error, "ctx", None)
    path = "regard" if context is None else context.command_path
    return f"{message.rstrip('.?')}{'?' if message.endswith('?') else '.'} See {path} --help."


def _version(requested: bool) -> None:
    if requested:
        print(f"regard {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Train and inspect attention models: translation, word alignment, contextual word vectors."""
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(USAGE_ERROR)


def _placeholder(kind: object) -> str | None:
    """Return the placeholder for values of this type."""
    options = [option for option in get_args(kind) if option is not type(None)]
    if get_origin(kind) is Literal:
        return "|".join(map(str, options))
    if len(options) == 1 and get_origin(kind) is not list:  # X | None
        return _placeholder(options[0])
    return _PLACEHOLDERS.get(kind)


def _register(name: str, module: str, panel: str) -> None:
    home = import_module(f"regard.cli.{module}")
    command = getattr(home, name)
    for hint in get_type_hints(command, include_extras=True).values():
        match get_args(hint):
            case kind, OptionInfo(metavar=None) as option:
                option.metavar = _placeholder(kind)
            case _, ArgumentInfo(metavar=None) as argument:
                raise AssertionError(f"an argument of {name} has no metavar: {argument.help}")
    paragraphs = (getdoc(command) or "").split("\n\n")
    app.command(
        name,
        cls=getattr(home, "Command", Command),
        rich_help_panel=panel,
        help="\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs),  # rewrapped when printed
    )(command)


for _panel, _commands in COMMANDS.items():
    for _name, _module in _commands.items():
        _register(_name, _module, _panel)

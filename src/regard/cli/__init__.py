"""The command line. Only the requested command is imported, and torch only when it is needed.

Each command is a function with typer annotations in its own module. `app.COMMANDS` contains its summary for
`regard --help`. Its docstring is the text of `regard COMMAND --help`, where the lines after "Examples:" come
last. Three rules:

- Top-level imports are limited to the standard library, typer, and modules of regard that do not import
  torch. Options are checked by constructing library objects (`TranslationConfig`, `Beam`), most of which do
  not import torch either; `shared.naming` replaces parameter names in their errors with option names.
- User errors raise `RegardError`, usually `ArgumentError`, or `OSError`. `main` prints one line and
  exits with status 2. For a missing package it prints the pip command.
- Ctrl-C prints one line and exits with status 130. A command that has already printed how to resume raises
  SystemExit(130).

    def shout(
        text: Annotated[str, typer.Argument(metavar="TEXT", help="Text to shout.")],
        times: Annotated[int, typer.Option(help="Number of repetitions.")] = 1,
    ) -> None:
        \"\"\"Print a text in upper case.

        Examples:
        regard shout "Dogs bark."
        \"\"\"
        console().print(" ".join([printable(text).upper()] * times))
"""

import atexit
import errno
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from regard import __version__
from regard._util.extras import require
from regard._util.name_hints import as_sentence, suggest_command, suggest_option
from regard._util.text import printable, shorten
from regard._util.torch_import import defer_meta_kernels
from regard.errors import ArgumentError, RegardError

USAGE_ERROR = 2  # exit status
INTERRUPTED = 130  # 128 + SIGINT
BROKEN_PIPE = 141  # 128 + SIGPIPE
OUT_OF_MEMORY = (
    "Out of memory. Reduce --batch or --beam, or split long sentences. For train, use --set "
    "training.batch_tokens=1000 or a smaller model.width."
)
# appended to operating system errors
ERRNO_HINTS = {
    errno.ENOENT: "; check the path.",
    errno.EACCES: "; choose another path, or change its permissions.",
    errno.EPERM: "; choose another path, or change its permissions.",
    errno.EROFS: "; choose a path you can write to.",
    errno.ENOSPC: "; free some space and run the command again.",
    errno.EISDIR: "; pass a file name.",
    errno.ENOTDIR: "; part of the path is a file.",
}
_INTERRUPTED = "regard: interrupted."
_SPIN_COUNT = "1000"  # iterations; they take a few tens of microseconds
_WAIT_POLICIES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")  # OpenMP environment variables
_ACCEPTED = {"version": ["--version"], "-V": ["--version"], "help": ["--help"]}
_NO_MEMORY = re.compile("(allocate|not enough|out of) memory", re.IGNORECASE)  # torch's wording


def script() -> NoReturn:
    """Run the command line as a program: `main`, then end the process at once.

    When Python exits as usual, it frees torch's modules one by one, which takes longer than translating a
    sentence.
    """
    if sys.argv[1:2] == ["translate"]:
        defer_meta_kernels()
    try:
        main()
    except SystemExit as error:
        if isinstance(error.code, str) or _has_work_at_exit():
            raise
        atexit._run_exitfuncs()
        _drop_unwritable_output()
        os._exit(error.code or 0)
    raise AssertionError("main always exits")


def _has_work_at_exit() -> bool:
    """Whether the process must exit as usual: other threads are running, or other processes wait for it."""
    threads = [thread for thread in threading.enumerate() if not thread.daemon]
    distributed = sys.modules.get("torch.distributed")
    return len(threads) > 1 or (distributed is not None and distributed.is_initialized())


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command. User errors print one line to stderr and exit with status 2; Ctrl-C exits with 130."""
    _limit_spinning()
    _reopen_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            # UTF-8 for files and pipes; a terminal replaces characters it cannot display
            stream.reconfigure(encoding=None if stream.isatty() else "utf-8", errors="replace")
    try:
        _run(sys.argv[1:] if arguments is None else list(arguments))
    finally:
        _drop_unwritable_output()


def _run(args: list[str]) -> NoReturn:
    status = None
    try:
        with _interruptible():
            _check_arguments(args)
            args = _ACCEPTED.get(" ".join(args), args)
            if args == ["--version"]:  # works without typer
                print(f"regard {__version__}")
            elif not _run_plain(args):
                require("typer", "The command line")
                from regard.cli.app import run

                status = run(args)
            sys.stdout.flush()  # raises an error if the last write failed
    except BrokenPipeError:  # the reader has closed the pipe, as `head` does
        status = BROKEN_PIPE
    except KeyboardInterrupt:
        status = INTERRUPTED
    except Exception as error:
        if type(error).__name__ != "Abort":  # typer's exception for Ctrl-C
            _exit_with_error(error)
        status = INTERRUPTED
    if status == INTERRUPTED:  # typer converts Ctrl-C inside a command into a status
        print(_INTERRUPTED, file=sys.stderr)
    sys.exit(status)


def _run_plain(args: Sequence[str]) -> bool:
    """Run `regard translate` without typer; return False if typer must parse the arguments."""
    if args[:1] != ["translate"]:
        return False
    from regard.cli.translate.plain_arguments import parse_plain
    from regard.cli.translate.run import run

    options = parse_plain(args[1:])
    if options is None:
        return False
    run(options)
    return True


def _drop_unwritable_output() -> None:
    """Redirect a stream to /dev/null if its terminal or its reader is gone.

    Otherwise the interpreter fails to flush it at exit, and replaces the exit status with 120.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _limit_spinning() -> None:
    """Make waiting OpenMP threads spin briefly, then sleep, unless an environment variable sets a policy.

    By default, they spin so long that training is several times slower while other processes are busy.
    Without spinning, training is slower on an idle machine (docs/results.md). OpenMP reads the variable when
    it loads.
    """
    if "torch" not in sys.modules and not any(name in os.environ for name in _WAIT_POLICIES):
        os.environ["GOMP_SPINCOUNT"] = _SPIN_COUNT


def _check_arguments(arguments: Sequence[str]) -> None:
    """Raise an error for arguments that cannot be file names."""
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
    """Redirect closed stdout and stderr to /dev/null; otherwise output would go to the next file opened."""
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_WRONLY)
            if null != descriptor:
                os.dup2(null, descriptor)
                os.close(null)
            setattr(sys, name, os.fdopen(descriptor, "w", encoding="utf-8", closefd=False))


@contextmanager
def _interruptible() -> Iterator[None]:
    """Exit immediately on Ctrl-C during an import, where KeyboardInterrupt can surface as another error."""

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
    """Print one line and exit. Unexpected errors keep their traceback."""
    if isinstance(error, ModuleNotFoundError):
        package = error.name or ""
        if not package or package.partition(".")[0] == "regard" or "." in package:
            raise error
        message = f"Missing package {package!r}. Run: pip install {package}"
    elif hasattr(error, "format_message"):  # a usage error from typer
        message = _usage_message(error)
    elif isinstance(error, OSError) and error.filename and error.strerror:
        message = f"{error.filename}: {error.strerror}{ERRNO_HINTS.get(error.errno or 0, '')}"
    elif isinstance(error, RegardError | OSError):
        message = str(error)
    elif isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and _NO_MEMORY.search(str(error))
    ):
        message = OUT_OF_MEMORY
    else:
        raise error
    print(f"regard: {printable(message)}", file=sys.stderr)
    sys.exit(USAGE_ERROR)


def _usage_message(error: Exception) -> str:
    """Return typer's message and a pointer to the help."""
    message = " ".join(error.format_message().split())  # type: ignore[attr-defined]
    message = message.replace("Value error, ", "")  # pydantic's prefix
    context = getattr(error, "ctx", None)
    path = "regard" if context is None else context.command_path
    if option := getattr(error, "option_name", None):
        answer = suggest_option(path.rpartition(" ")[2], option) or suggest_command(option)
        message = f"No such option: {option}. {as_sentence(answer)}" if answer else message
    elif (command := re.match("No such command '(.+?)'", message)) and (
        answer := suggest_command(command[1])
    ):
        message = f"No such command {command[1]!r}. Use {answer}"
    return f"{message.rstrip('.?')}{'?' if message.endswith('?') else '.'} See {path} --help."

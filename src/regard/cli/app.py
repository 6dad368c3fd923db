"""The typer application. Only the requested command is imported."""

from collections.abc import Callable
from importlib import import_module
from inspect import getdoc
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup
from typer.models import OptionInfo

from regard import __version__
from regard.cli import USAGE_ERROR
from regard.errors import ArgumentError

# panels of `regard --help`: each command and its summary
COMMANDS = {
    "Translation": {
        "demo": "Train a small model in two minutes and show its word alignments.",
        "train": "Train a translation model on parallel text.",
        "translate": "Translate sentences, a file or stdin.",
        "align": "Align the words of existing translations.",
        "evaluate": "Score translations: BLEU, chrF, exact match and speed.",
        "curves": "Draw training curves.",
        "export": "Export a model to CTranslate2, ONNX or Hugging Face format.",
    },
    "Contextual word vectors": {
        "compare": "Compare a word's vectors in two sentences, layer by layer.",
        "attention": "Print how much a word attends to each word in its sentence.",
        "embed": "Compute contextual word vectors.",
    },
    "Visualization": {
        "look": "Explore attention in the browser.",
        "site": "Build a static site whose models run in the browser.",
        "draw": "Draw attention weights, a mask or a position encoding.",
    },
}
# commands whose module has a different name
_MODULES = {
    **dict.fromkeys(("compare", "attention", "embed"), "words"),
    **{name: f"{name}.command" for name in ("align", "translate")},
}

# default placeholders for option values; flags have none
_PLACEHOLDERS: dict[object, str] = {bool: "", int: "N", float: "X", str: "TEXT"}


class _Placeholders:
    """Mixin whose help shows placeholders such as N, not Python types; typer has no setting for this."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, with the names of Python types removed from their help."""
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if param.param_type_name == "argument":
                param.display_type_rich = lambda ctx: None
            elif param.metavar is None:
                param.metavar = ""
        return params


class Command(_Placeholders, TyperCommand):
    """A subcommand whose help shows placeholders instead of Python types."""


class Group(_Placeholders, TyperGroup):
    """The command `regard`; its help shows placeholders instead of Python types."""


def run(arguments: list[str]) -> Any:
    """Run a command and return its exit status."""
    app = typer.Typer(
        cls=Group,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
        epilog="Run regard COMMAND --help for a command's options and examples.",
    )
    name = arguments[0] if arguments else ""
    if any(name in commands for commands in COMMANDS.values()):  # import only this command
        add_command(app, name)
        return app(args=arguments[1:], prog_name=f"regard {name}", standalone_mode=False)
    app.callback(invoke_without_command=True)(_root)
    for panel, commands in COMMANDS.items():
        for name, summary in commands.items():
            app.command(name, help=summary, rich_help_panel=panel)(_not_imported)
    return app(args=arguments, prog_name="regard", standalone_mode=False)


def add_command(app: typer.Typer, name: str) -> None:
    """Add a command with its options."""
    module = import_module(f"regard.cli.{_MODULES.get(name, name)}")
    command = getattr(module, name)
    for hint in get_type_hints(command, include_extras=True).values():
        match get_args(hint):
            case kind, OptionInfo(metavar=None) as option:
                option.metavar = _placeholder(kind)
    text, examples = split_docstring(command)
    app.command(
        name,
        cls=getattr(module, "Command", Command),
        help=text,
        epilog=f"[bold]Examples[/bold]\n{examples}" if examples else None,
    )(command)


def split_docstring(command: Callable[..., None]) -> tuple[str, str]:
    """Return the description of a command, one line per paragraph, and its examples, one per line."""
    text, _, examples = (getdoc(command) or "").partition("\n\nExamples:\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n")), examples


def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Train and inspect attention models: translation, word alignment, contextual word vectors."""
    if version:
        print(f"regard {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        context.get_help()
        raise typer.Exit(USAGE_ERROR)


def _not_imported() -> None:
    """Stand in for a command that is listed but not imported."""
    raise ArgumentError("The command comes first: regard COMMAND [OPTIONS].")


def _placeholder(kind: object) -> str | None:
    """Return the placeholder for values of a type."""
    options = [option for option in get_args(kind) if option is not type(None)]
    if get_origin(kind) is Literal:
        return "|".join(map(str, options))
    if len(options) == 1 and get_origin(kind) is not list:  # X | None
        return _placeholder(options[0])
    return _PLACEHOLDERS.get(kind)

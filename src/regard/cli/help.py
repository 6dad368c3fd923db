"""Help texts: usage, arguments, options by topic, examples.

The layout is rendered here and not by typer, so it does not change with typer's version.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from typer.core import TyperCommand, TyperGroup

if TYPE_CHECKING:
    from rich.console import Console

_OPTIONS = "Options"
_MAX_WIDTH = 110  # columns; longer lines are hard to read
_NARROW = 60  # columns below which descriptions go under the options
_MIN_WIDTH, _DEFAULT_WIDTH = 20, 80  # minimum; width if the terminal reports 0

# command lines and what they do
EXAMPLES: dict[str, Sequence[tuple[str, str]]] = {
    "demo": [
        ("regard demo", "writes demo/transformer.png"),
        ("regard demo --model recurrent --languages en-fr", ""),
    ],
    "train": [
        ("regard train train.de train.en -o de-en", "German to English"),
        ("regard train train.de train.en -o de-en --dev dev.de dev.en --epochs 20", ""),
        ("regard train pairs.tsv -o small --preset tiny --set model.dropout=0.2", ""),
        ("regard train embedded -o dates --preset tiny", "a built-in corpus"),
        ("regard train -o de-en --resume", "after an interruption"),
        ("regard train -o de-en --resume --epochs 40", "train longer"),
        ("regard train --print-config --preset base", "all settings"),
    ],
    "translate": [
        ('regard translate -m de-en "Zwei Hunde spielen."', ""),
        ("regard translate -m de-en --file test.de -o test.out", ""),
        ('regard translate -m de-en "Zwei Hunde." --n-best 3 --scores --alignment', ""),
    ],
    "align": [
        ("regard align -m de-en test.de test.en -o test.align", ""),
        ('regard align -m de-en --text "Zwei Hunde ." "Two dogs ." --draw', "draws in the terminal"),
        ("regard align -m de-en --reverse-model en-de test.de test.en", "better: two models"),
        ("regard align -m de-en test.de test.en --gold test.gold", "alignment error rate"),
    ],
    "evaluate": [
        ("regard evaluate -m de-en test.de test.en", ""),
        ("regard evaluate -m small -m large test.de test.en --by-length", "compares two models"),
        ("regard evaluate --translations test.out test.de test.en", "scores existing translations"),
    ],
    "curves": [
        ("regard curves de-en", "writes curves.png"),
        ("regard curves small large -o both.svg", "two runs in one picture"),
    ],
    "compare": [
        ('regard compare "We sat on the bank of the river." "The bank is closed." --word bank', ""),
        ('regard compare "A dog barks." "A cat sleeps." --word dog --word cat', ""),
    ],
    "attention": [
        ('regard attention "Dogs may bark at strangers." --word bark', ""),
        ('regard attention "Dogs may bark at strangers." --word bark --layer 0 --head 3', ""),
    ],
    "embed": [
        ('regard embed "Dogs may bark."', ""),
        ("regard embed --file sentences.txt --output vectors.safetensors", ""),
    ],
    "look": [
        ("regard look", "the demo model"),
        ("regard look de-en minilm", "your translation model, and an encoder"),
    ],
    "draw": [
        ('regard draw -m de-en "Zwei Hunde spielen."', "writes picture.png"),
        ('regard draw -m minilm "Dogs may bark." --layer -1 -o last.svg', "all heads of the last layer"),
        ("regard draw weights.safetensors --head 0 --dark", ""),
        ("regard draw --mask causal --mask window:4 --size 12", ""),
        ("regard draw --positions rotary", ""),
    ],
}


class Command(TyperCommand):
    """A command with our help layout."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write usage, description, arguments, options and examples."""
        screen = _screen()
        with screen.capture() as output:
            _print_usage(screen, ctx.command_path, self.get_params(ctx))
            _print_text(screen, self.help or "")
            _print_params(screen, self.get_params(ctx))
            _print_examples(screen, self.name or "")
        formatter.write(_strip_lines(output.get()))


class Group(TyperGroup):
    """`regard` itself: its commands by topic."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write one line per command."""
        screen = _screen()
        with screen.capture() as output:
            screen.print(f"Usage: {ctx.command_path} COMMAND …", style="bold")
            _print_text(screen, self.help or "")
            panels: dict[str, list[tuple[str, str]]] = {}
            for command in (self.get_command(ctx, name) for name in self.list_commands(ctx)):
                if command is not None and not command.hidden:
                    panel = getattr(command, "rich_help_panel", None) or "Commands"
                    summary = (command.help or "").split("\n\n")[0]
                    panels.setdefault(panel, []).append((command.name or "", summary))
            width = max(len(name) for rows in panels.values() for name, _ in rows)
            for panel, rows in panels.items():
                _print_table(screen, panel, [(name.ljust(width), summary) for name, summary in rows])
            _print_params(screen, self.get_params(ctx))
            _print_text(screen, f"For options and examples of a command: {ctx.command_path} train --help")
        formatter.write(_strip_lines(output.get()))


def _screen() -> "Console":
    from rich.console import Console

    screen = Console(highlight=False, markup=False, emoji=False)
    screen.width = max(_MIN_WIDTH, min(screen.width or _DEFAULT_WIDTH, _MAX_WIDTH))
    return screen


def _strip_lines(text: str) -> str:
    """Remove the blanks that pad tables."""
    return "\n".join(line.rstrip() for line in text.split("\n"))


def _print_usage(screen: "Console", path: str, params: Sequence[Any]) -> None:
    parts = ["Usage:", path]
    for param in params:
        if param.param_type_name == "argument":
            name = _name(param) + (" …" if param.nargs == -1 else "")
            parts.append(name if param.required else f"[{name}]")
    required = (param for param in params if _is_option(param) and param.required)
    parts += [f"{max(param.opts, key=len)} {value(param)}" for param in required]
    screen.print(" ".join([*parts, "[OPTIONS]"]), style="bold")


def _print_text(screen: "Console", text: str) -> None:
    for paragraph in text.split("\n\n"):
        if paragraph:
            screen.print()
            screen.print(paragraph)


def _print_params(screen: "Console", params: Iterable[Any]) -> None:
    """Print arguments, then options by topic."""
    panels: dict[str, list[tuple[str, str]]] = {"Arguments": [], _OPTIONS: []}
    for param in params:
        if getattr(param, "hidden", False):
            continue
        panel = getattr(param, "rich_help_panel", None) or (_OPTIONS if _is_option(param) else "Arguments")
        name = _option(param) if _is_option(param) else _name(param)
        panels.setdefault(panel, []).append((name, _description(param)))
    for panel, rows in panels.items():
        if rows:
            _print_table(screen, panel, rows)


def _print_examples(screen: "Console", command: str) -> None:
    examples = EXAMPLES.get(command, ())
    if examples:
        screen.print("\nExamples", style="bold")
    width = max((len(line) for line, comment in examples if comment), default=0)
    for line, comment in examples:
        screen.print(f"  {line.ljust(width)}  # {comment}" if comment else f"  {line}", soft_wrap=True)


def _print_table(screen: "Console", title: str, rows: Iterable[tuple[str, str]]) -> None:
    from rich.padding import Padding
    from rich.table import Table

    screen.print(f"\n{title}", style="bold")
    if screen.width < _NARROW:
        for name, description in rows:
            screen.print(Padding(name.rstrip(), (0, 0, 0, 2)), style="cyan")
            screen.print(Padding(description, (0, 0, 0, 6)))
        return
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(width=0)
    table.add_column(no_wrap=True, style="cyan")
    table.add_column()
    for name, description in rows:
        table.add_row("", name, description)
    screen.print(table)


def _is_option(param: Any) -> bool:
    return bool(param.param_type_name == "option")


def _name(argument: Any) -> str:
    return str(argument.metavar or argument.name.upper())


def _option(option: Any) -> str:
    """Format an option as typed: -o, --output FILE."""
    names = sorted([*option.opts, *option.secondary_opts], key=len)
    return " ".join(filter(None, [", ".join(names), value(option)]))


def value(option: Any) -> str:
    """Return the placeholder for an option's value; empty for a flag."""
    if getattr(option, "is_flag", False) or option.name == "help":
        return ""
    return str(option.metavar or "TEXT")


def _description(param: Any) -> str:
    """Return the help text and the default."""
    if param.name == "help":
        return "Show this help."
    text = str(param.help or "")
    default = getattr(param, "default", None)
    hidden = default is False or default in (None, (), []) or callable(default)
    if hidden or not getattr(param, "show_default", True):
        return text
    return f"{text} [default: {param.opts[0] if default is True else default}]"

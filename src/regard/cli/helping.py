"""How `regard --help` and the help of each command look: usage, arguments, options by topic, examples.

typer knows what there is; how it is shown is said here, so that it is the same for each version of typer.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from typer.core import TyperCommand, TyperGroup

if TYPE_CHECKING:
    from rich.console import Console

_OPTIONS = "Options"
_WIDEST = 110  # columns; longer lines are hard to read
_NARROW = 60  # columns; with fewer, there is no room for text beside the options
_LEAST, _UNKNOWN = 20, 80  # columns that are written in at least, and if a terminal says that it has none

# commands as one would type them, and what they do
EXAMPLES: dict[str, Sequence[tuple[str, str]]] = {
    "demo": [
        ("regard demo", "the picture is demo/transformer.png"),
        ("regard demo --model recurrent --languages en-fr", ""),
    ],
    "train": [
        ("regard train train.de train.en -o de-en", "from German to English"),
        ("regard train train.de train.en -o de-en --dev dev.de dev.en --epochs 20", ""),
        ("regard train pairs.tsv -o small --preset tiny --set model.dropout=0.2", ""),
        ("regard train embedded -o dates --preset tiny", "a corpus that comes along"),
        ("regard train -o de-en --resume", "after Ctrl-C, or a power cut"),
        ("regard train -o de-en --resume --epochs 40", "longer than was planned"),
        ("regard train --settings --preset base", "what there is to --set"),
    ],
    "translate": [
        ('regard translate -m de-en "Zwei Hunde spielen."', ""),
        ("regard translate -m de-en --file test.de -o test.out", ""),
        ('regard translate -m de-en "Zwei Hunde." --n-best 3 --scores --alignment', ""),
    ],
    "align": [
        ("regard align -m de-en test.de test.en -o test.align", ""),
        ('regard align -m de-en --text "Zwei Hunde ." "Two dogs ." --draw', "drawn in the terminal"),
        ("regard align -m de-en --reverse-model en-de test.de test.en", "better links, from two models"),
        ("regard align -m de-en test.de test.en --gold test.gold", "how good they are"),
    ],
    "evaluate": [
        ("regard evaluate -m de-en test.de test.en", ""),
        ("regard evaluate -m small -m large test.de test.en --by-length", "two models, side by side"),
        ("regard evaluate --translations test.out test.de test.en", "what another program translated"),
    ],
    "curves": [
        ("regard curves de-en", "writes curves.png"),
        ("regard curves small large -o both.svg", "two trainings in one picture"),
    ],
    "compare": [
        ('regard compare "We sat on the bank of the river." "The bank is closed." --word bank', ""),
        ('regard compare "A dog barks." "A cat sleeps." --word dog --word cat', ""),
    ],
    "attended": [
        ('regard attended "Dogs may bark at strangers." --word bark', ""),
        ('regard attended "Dogs may bark at strangers." --word bark --layer 0 --head 3', ""),
    ],
    "embed": [
        ('regard embed "Dogs may bark."', ""),
        ("regard embed --file sentences.txt --output vectors.safetensors", ""),
    ],
    "look": [
        ("regard look", "the demo's model, trained meanwhile if it is not there"),
        ("regard look de-en minilm", "a translator of yours, and an encoder"),
    ],
    "draw": [
        ('regard draw -m de-en "Zwei Hunde spielen."', "writes picture.png"),
        ('regard draw -m minilm "Dogs may bark." --layer -1 -o last.svg', "the heads of the last layer"),
        ("regard draw weights.safetensors --head 0 --dark", ""),
        ("regard draw --mask causal --mask window:4 --size 12", ""),
        ("regard draw --positions rotary", ""),
    ],
}


class Command(TyperCommand):
    """A command whose help is ours."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Usage, what it does, its arguments and options, and examples."""
        screen = _screen()
        with screen.capture() as shown:
            _print_usage(screen, ctx.command_path, self.get_params(ctx))
            _print_text(screen, self.help or "")
            _print_params(screen, self.get_params(ctx))
            _print_examples(screen, self.name or "")
        formatter.write(_stripped(shown.get()))


class Group(TyperGroup):
    """`regard` itself: its commands by topic."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """What there is, a line each."""
        screen = _screen()
        with screen.capture() as shown:
            screen.print(f"Usage: {ctx.command_path} COMMAND …", style="bold")
            _print_text(screen, self.help or "")
            commands = [self.get_command(ctx, name) for name in self.list_commands(ctx)]
            panels: dict[str, list[tuple[str, str]]] = {}
            for one in commands:
                if one is not None and not one.hidden:
                    panel = getattr(one, "rich_help_panel", None) or "Commands"
                    panels.setdefault(panel, []).append((one.name or "", (one.help or "").split("\n\n")[0]))
            width = max(len(name) for rows in panels.values() for name, _ in rows)
            for panel, rows in panels.items():
                _print_table(screen, panel, [(name.ljust(width), about) for name, about in rows])
            _print_params(screen, self.get_params(ctx))
            _print_text(
                screen, f"Each command has a help of its own, with examples: {ctx.command_path} train --help"
            )
        formatter.write(_stripped(shown.get()))


def _screen() -> "Console":
    from rich.console import Console

    screen = Console(highlight=False, markup=False, emoji=False)
    screen.width = max(_LEAST, min(screen.width or _UNKNOWN, _WIDEST))
    return screen


def _stripped(text: str) -> str:
    """Without blanks at the ends of lines, with which tables are filled up."""
    return "\n".join(line.rstrip() for line in text.split("\n"))


def _print_usage(screen: "Console", path: str, params: Sequence[Any]) -> None:
    """The command with what it needs."""
    parts = ["Usage:", path]
    for one in params:
        if one.param_type_name == "argument":
            name = _name(one) + (" …" if one.nargs == -1 else "")
            parts.append(name if one.required else f"[{name}]")
    parts += [f"{max(one.opts, key=len)} {value(one)}" for one in params if _is_option(one) and one.required]
    screen.print(" ".join([*parts, "[OPTIONS]"]), style="bold")


def _print_text(screen: "Console", text: str) -> None:
    for paragraph in text.split("\n\n"):
        if paragraph:
            screen.print()
            screen.print(paragraph)


def _print_params(screen: "Console", params: Iterable[Any]) -> None:
    """Arguments, then options by topic."""
    panels: dict[str, list[tuple[str, str]]] = {"Arguments": [], _OPTIONS: []}
    for one in params:
        if getattr(one, "hidden", False):
            continue
        panel = getattr(one, "rich_help_panel", None) or (_OPTIONS if _is_option(one) else "Arguments")
        panels.setdefault(panel, []).append((_written(one) if _is_option(one) else _name(one), _about(one)))
    for panel, rows in panels.items():
        if rows:
            _print_table(screen, panel, rows)


def _print_examples(screen: "Console", command: str) -> None:
    examples = EXAMPLES.get(command, ())
    if examples:
        screen.print("\nExamples", style="bold")
    widths = [len(line) for line, about in examples if about]
    for line, about in examples:
        told = f"{line.ljust(max(widths))}  # {about}" if about else line
        screen.print(f"  {told}", soft_wrap=True)


def _print_table(screen: "Console", title: str, rows: Iterable[tuple[str, str]]) -> None:
    from rich.padding import Padding
    from rich.table import Table

    if screen.width < _NARROW:
        screen.print(f"\n{title}", style="bold")
        for name, about in rows:
            screen.print(Padding(name.rstrip(), (0, 0, 0, 2)), style="cyan")
            screen.print(Padding(about, (0, 0, 0, 6)))
        return
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(width=0)
    table.add_column(no_wrap=True, style="cyan")
    table.add_column()
    for name, about in rows:
        table.add_row("", name, about)
    screen.print(f"\n{title}", style="bold")
    screen.print(table)


def _is_option(param: Any) -> bool:
    return bool(param.param_type_name == "option")


def _name(argument: Any) -> str:
    return str(argument.metavar or argument.name.upper())


def _written(option: Any) -> str:
    """An option as one types it: -o, --output FILE."""
    names = sorted([*option.opts, *option.secondary_opts], key=len)
    return " ".join(filter(None, [", ".join(names), value(option)]))


def value(option: Any) -> str:
    """What an option is given; a flag is given nothing."""
    if getattr(option, "is_flag", False) or option.name == "help":
        return ""
    return str(option.metavar or "TEXT")


def _about(param: Any) -> str:
    """What it is for, and what it is by default."""
    if param.name == "help":
        return "Show this help."
    text = str(param.help or "")
    default = getattr(param, "default", None)
    if not getattr(param, "show_default", True) or default in (None, False, (), []) or callable(default):
        return text
    if default is True:
        return f"{text} [default: {param.opts[0]}]"
    return f"{text} [default: {default}]"

"""Generate the reference pages: `python -m pages.reference`. reference.toml lists their contents.

A page has a table of all its names, then for each group a heading, a sentence and one mkdocstrings directive
per name. The page of the command line is generated from the commands.
"""

import html
import inspect
import re
import textwrap
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import griffe

from regard.cli.help import EXAMPLES, value

FOLDER = Path(__file__).parents[1] / "docs" / "reference"


class Group(NamedTuple):
    """A heading, an introductory sentence, and dotted names as a user writes them."""

    heading: str
    about: str
    names: str
    options: str = ""  # mkdocstrings options for the group, as YAML


class Page(NamedTuple):
    """A reference page."""

    title: str
    about: str
    groups: tuple[Group, ...]


_CONTENTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
PAGES = {
    name: Page(page["title"], page["about"], tuple(Group(**group) for group in page["groups"]))
    for name, page in _CONTENTS["pages"].items()
}
WITHOUT_CONSTRUCTOR: list[str] = _CONTENTS["without_constructor"]


def names(page: str) -> list[str]:
    """Return the names on a page, as a user writes them."""
    return [name for group in PAGES[page].groups for name in group.names.split()]


@cache
def sources() -> griffe.Object:
    """Load regard with griffe, which also reads the docstrings of aliases such as `Links`."""
    loaded = griffe.load("regard", search_paths=[FOLDER.parents[1] / "src"])
    assert isinstance(loaded, griffe.Object)
    return loaded


def docstring(name: str) -> str:
    """Return the docstring of a dotted name, or an empty string."""
    text = sources()[name.removeprefix("regard.")].docstring
    return text.value if text else ""


def summary(name: str) -> str:
    """Return the first paragraph of a docstring on one line."""
    return " ".join(docstring(name).strip().split("\n\n")[0].split())


def page(name: str) -> str:
    """Render a page: a table of all names, then one directive per name."""
    title, about, groups = PAGES[name]
    rows = [
        f"| [`{name.removeprefix('regard.')}`](#{name}) | {_cell(summary(name))} |"
        for group in groups
        for name in group.names.split()
    ]
    parts = [f"# {title}\n\n{about}\n\n| name | description |\n|---|---|\n" + "\n".join(rows)]
    parts += [f"## {group.heading}\n\n{group.about}\n\n{_directives(group)}" for group in groups]
    return "\n\n".join(parts) + "\n"


def _directives(group: Group) -> str:
    return "\n\n".join(_directive(name, group.options.splitlines()) for name in group.names.split())


def _directive(name: str, options: list[str]) -> str:
    if name in WITHOUT_CONSTRUCTOR:
        options = [*options, "merge_init_into_class: false"]
    lines = [
        f"::: {name}",
        *(["    options:"] if options else []),
        *(f"        {option}" for option in options),
    ]
    return "\n".join(lines)


def command_line() -> str:
    """Render the page of the command line: description, arguments, options and examples of each command."""
    from regard.cli import COMMANDS

    parts = [
        "# Command line\n\n"
        "`regard COMMAND --help` prints the same text. Invalid arguments print one line to stderr and exit\n"
        "with status 2; Ctrl-C exits with status 130. A file named - is stdin.\n\n"
        "| command | description |\n|---|---|\n"
        + "\n".join(
            f"| [`regard {name}`](#regard-{name}) | {_cell(_paragraphs(command)[0])} |"
            for name, command in _commands()
        )
    ]
    for heading, commands in COMMANDS.items():
        parts.append(f"## {heading}")
        parts += [_command(name, command) for name, command in _commands() if name in commands]
    return "\n\n".join(parts) + "\n"


def _commands() -> Iterator[tuple[str, Callable[..., None]]]:
    from regard.cli import COMMANDS

    for commands in COMMANDS.values():
        for name, module in commands.items():
            yield name, getattr(import_module(f"regard.cli.{module}"), name)


def _command(name: str, command: Callable[..., None]) -> str:
    first, *others = _paragraphs(command)
    arguments = [parameter for parameter in parameters(name) if not parameter.option]
    options = [parameter for parameter in parameters(name) if parameter.option]
    usage = " ".join(["regard", name, "[OPTIONS]", *(argument.usage for argument in arguments)])
    parts = [f"### regard {name}", first, f"```console\n{usage}\n```", *others]
    if arguments:
        parts.append(
            "| argument | meaning |\n|---|---|\n" + "\n".join(_row(argument) for argument in arguments)
        )
    if options:
        parts.append(
            "| option | meaning | default |\n|---|---|---|\n"
            + "\n".join(f"{_row(option)} {_cell(option.default)} |" for option in options)
        )
    examples = "\n".join(f"{line}    # {note}" if note else line for line, note in EXAMPLES[name])
    parts.append(f"Examples:\n\n```console\n{examples}\n```")
    return "\n\n".join(parts)


class Parameter(NamedTuple):
    """An argument or option of a command."""

    spelled: str  # --output, -o FILE
    help: str
    default: str
    option: bool
    usage: str


def parameters(name: str) -> list[Parameter]:
    """Return the arguments and options of a command."""
    from typer.main import get_command

    from regard.cli import app

    params = get_command(app).commands[name].params  # type: ignore[attr-defined]
    return [_parameter(param, option=param.param_type_name == "option") for param in params]


def _parameter(param: Any, *, option: bool) -> Parameter:
    metavar = value(param) if option else param.metavar
    flags = ", ".join([*param.opts, *param.secondary_opts]) if option else ""
    usage = f"{metavar} …" if param.nargs == -1 else metavar
    return Parameter(
        f"`{' '.join(part for part in (flags, metavar) if part)}`",
        param.help or "",
        "required" if param.required else _default(param.default),
        option,
        usage if param.required else f"[{usage}]",
    )


def _default(default: Any) -> str:
    if default is None or default is False:
        return ""
    return "yes" if default is True else f"`{default}`"


def _row(parameter: Parameter) -> str:
    return f"| {_cell(parameter.spelled)} | {_cell(parameter.help)} |"


def _paragraphs(command: Callable[..., None]) -> list[str]:
    paragraphs = (inspect.getdoc(command) or "").split("\n\n")
    return [textwrap.fill(" ".join(text.split()), 120, break_on_hyphens=False) for text in paragraphs]


def _cell(text: str) -> str:
    """Escape text for a table cell, where a bar would end the cell."""
    # a backslash escape inside backquotes works on GitHub but not on the site: use HTML, which works on both
    coded = re.sub(r"`([^`]*\|[^`]*)`", lambda code: f"<code>{html.escape(code[1])}</code>", text)
    return " ".join(coded.replace("|", "&#124;").split())


def generated_pages() -> dict[Path, str]:
    """Return the path and text of all generated pages."""
    return {
        **{FOLDER / f"{name}.md": page(name) for name in PAGES},
        FOLDER / "command-line.md": command_line(),
    }


if __name__ == "__main__":
    for path, text in generated_pages().items():
        if not path.exists() or path.read_text("utf-8") != text:
            path.write_text(text, "utf-8")
            print(f"wrote {path}")

"""The reference's pages. `python -m pages.reference` writes them; reference.toml says what stands where.

A page has a heading for each group, a sentence, and a directive for each name, which mkdocstrings fills in
from the docstrings; on top stands a table of all of them. The command line's page is made from its functions.
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

from regard.cli.helping import EXAMPLES, value

FOLDER = Path(__file__).parents[1] / "docs" / "reference"


class Group(NamedTuple):
    """A heading, a sentence about what stands below it, and the names: dotted, as a user writes them."""

    heading: str
    about: str
    names: str
    options: str = ""  # of mkdocstrings, as YAML, for all of the group


class Page(NamedTuple):
    """A page of the reference."""

    title: str
    about: str
    groups: tuple[Group, ...]


_CONTENTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
PAGES = {
    name: Page(page["title"], page["about"], tuple(Group(**group) for group in page["groups"]))
    for name, page in _CONTENTS["pages"].items()
}
MADE: list[str] = _CONTENTS["made"]


def names(page: str) -> list[str]:
    """The names on a page, as a user writes them."""
    return [name for group in PAGES[page].groups for name in group.names.split()]


@cache
def sources() -> griffe.Object:
    """All of regard as its sources say: an alias such as `Links` has its docstring there."""
    loaded = griffe.load("regard", search_paths=[FOLDER.parents[1] / "src"])
    assert isinstance(loaded, griffe.Object)
    return loaded


def docstring(name: str) -> str:
    """The docstring of a dotted name, or nothing."""
    written = sources()[name.removeprefix("regard.")].docstring
    return written.value if written else ""


def summary(name: str) -> str:
    """The first paragraph of a docstring, on one line."""
    return " ".join(docstring(name).strip().split("\n\n")[0].split())


def page(name: str) -> str:
    """A page of names: a table of all, then a directive for each."""
    title, about, groups = PAGES[name]
    rows = [
        f"| [`{one.removeprefix('regard.')}`](#{one}) | {_cell(summary(one))} |"
        for group in groups
        for one in group.names.split()
    ]
    parts = [f"# {title}\n\n{about}\n\n| name | what it is |\n|---|---|\n" + "\n".join(rows)]
    parts += [f"## {group.heading}\n\n{group.about}\n\n{_directives(group)}" for group in groups]
    return "\n\n".join(parts) + "\n"


def _directives(group: Group) -> str:
    return "\n\n".join(_directive(name, group.options.splitlines()) for name in group.names.split())


def _directive(name: str, options: list[str]) -> str:
    if name in MADE:
        options = [*options, "merge_init_into_class: false"]
    lines = [f"::: {name}", *(["    options:"] if options else []), *(f"        {one}" for one in options)]
    return "\n".join(lines)


def command_line() -> str:
    """The page of the command line: of each command what it does, its arguments and options, examples."""
    from regard.cli import COMMANDS

    parts = [
        "# Command line\n\n"
        "`regard COMMAND --help` says the same in a terminal. What is refused is one line on stderr and\n"
        "exit status 2; Ctrl-C is status 130. A file named - is stdin.\n\n"
        "| command | what it does |\n|---|---|\n"
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
    arguments = [one for one in parameters(name) if not one.option]
    options = [one for one in parameters(name) if one.option]
    usage = " ".join(["regard", name, "[OPTIONS]", *(one.usage for one in arguments)])
    parts = [f"### regard {name}", first, f"```console\n{usage}\n```", *others]
    if arguments:
        parts.append("| argument | meaning |\n|---|---|\n" + "\n".join(_row(one) for one in arguments))
    if options:
        parts.append(
            "| option | meaning | default |\n|---|---|---|\n"
            + "\n".join(f"{_row(one)} {_cell(one.default)} |" for one in options)
        )
    examples = "\n".join(f"{line}    # {note}" if note else line for line, note in EXAMPLES[name])
    parts.append(f"For example:\n\n```console\n{examples}\n```")
    return "\n\n".join(parts)


class Parameter(NamedTuple):
    """An argument or option of a command."""

    spelled: str  # --output, -o FILE
    help: str
    default: str
    option: bool
    usage: str


def parameters(name: str) -> list[Parameter]:
    """What a command takes, as its help says."""
    from typer.main import get_command

    from regard.cli import app

    typed = get_command(app).commands[name].params  # type: ignore[attr-defined]
    return [_parameter(one, option=one.param_type_name == "option") for one in typed]


def _parameter(typed: Any, *, option: bool) -> Parameter:
    given = value(typed) if option else typed.metavar
    spellings = ", ".join([*typed.opts, *typed.secondary_opts]) if option else ""
    usage = f"{given} …" if typed.nargs == -1 else given
    return Parameter(
        f"`{' '.join(part for part in (spellings, given) if part)}`",
        typed.help or "",
        "required" if typed.required else _default(typed.default),
        option,
        usage if typed.required else f"[{usage}]",
    )


def _default(given: Any) -> str:
    if given is None or given is False:
        return ""
    return "yes" if given is True else f"`{given}`"


def _row(parameter: Parameter) -> str:
    return f"| {_cell(parameter.spelled)} | {_cell(parameter.help)} |"


def _paragraphs(command: Callable[..., None]) -> list[str]:
    paragraphs = (inspect.getdoc(command) or "").split("\n\n")
    return [textwrap.fill(" ".join(one.split()), 120, break_on_hyphens=False) for one in paragraphs]


def _cell(text: str) -> str:
    """Text inside a table, where a bar would end the cell."""
    # inside backquotes GitHub wants it escaped, and the site shows the escape: HTML is read alike by both
    coded = re.sub(r"`([^`]*\|[^`]*)`", lambda code: f"<code>{html.escape(code[1])}</code>", text)
    return " ".join(coded.replace("|", "&#124;").split())


def everything() -> dict[Path, str]:
    """The pages that are made here, and what they should say."""
    made = {FOLDER / f"{name}.md": page(name) for name in PAGES}
    return {**made, FOLDER / "command-line.md": command_line()}


if __name__ == "__main__":
    for path, text in everything().items():
        if not path.exists() or path.read_text("utf-8") != text:
            path.write_text(text, "utf-8")
            print(f"wrote {path}")

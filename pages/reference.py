"""Generate the reference pages: `python -m pages.reference`. reference.toml lists their contents.

A page has a table of all its names, then for each group a heading, a sentence and one mkdocstrings directive
per name. The command-line page is generated from the commands.
"""

import html
import re
import textwrap
import tomllib
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import griffe

FOLDER = Path(__file__).parents[1] / "docs" / "reference"


class Group(NamedTuple):
    """A heading, an introductory sentence, and dotted names in the form that users write."""

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
    """Return the names on a page in the form that users write."""
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
    """Render the command-line page: description, arguments, options and examples of each command."""
    from regard.cli.app import COMMANDS

    parts = [
        "# Command line\n\n"
        "`regard COMMAND --help` prints the text below. If an argument is invalid, the command prints one\n"
        "line to stderr and exits with status 2; Ctrl-C exits with status 130. The file\n"
        "name - means stdin.\n\n"
        "| command | description |\n|---|---|\n"
        + "\n".join(
            f"| [`regard {name}`](#regard-{name}) | {_cell(summary)} |"
            for commands in COMMANDS.values()
            for name, summary in commands.items()
        )
    ]
    for heading, commands in COMMANDS.items():
        parts += [f"## {heading}", *map(_command, commands)]
    return "\n\n".join(parts) + "\n"


def _command(name: str) -> str:
    command = typer_command(name)
    first, *others = (textwrap.fill(text, 120, break_on_hyphens=False) for text in command.help.split("\n\n"))
    parameters = [_parameter(param, option=param.param_type_name == "option") for param in command.params]
    arguments = [parameter for parameter in parameters if not parameter.option]
    options = [parameter for parameter in parameters if parameter.option]
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
    parts.append(f"Examples:\n\n```console\n{command.epilog.partition(chr(10))[2]}\n```")
    return "\n\n".join(parts)


class Parameter(NamedTuple):
    """An argument or option of a command."""

    spelled: str  # --output, -o FILE
    help: str
    default: str
    option: bool
    usage: str


def typer_command(name: str) -> Any:
    """Return a command with its help, parameters and examples."""
    import typer
    from typer.main import get_command

    from regard.cli.app import add_command

    app = typer.Typer(add_completion=False)
    add_command(app, name)
    return get_command(app)


def _parameter(param: Any, *, option: bool) -> Parameter:
    metavar = param.metavar or ""
    flags = ", ".join([*param.opts, *param.secondary_opts]) if option else ""
    usage = f"{metavar} …" if param.nargs == -1 and "…" not in metavar else metavar
    return Parameter(
        f"`{' '.join(part for part in (flags, metavar) if part)}`",
        param.help or "",
        "required" if param.required else _default(param),
        option,
        usage if param.required else f"[{usage}]",
    )


def _default(param: Any) -> str:
    if isinstance(param.show_default, str):
        return param.show_default
    if param.default is None or param.default is False:
        return ""
    return "yes" if param.default is True else f"`{param.default}`"


def _row(parameter: Parameter) -> str:
    return f"| {_cell(parameter.spelled)} | {_cell(parameter.help)} |"


def _cell(text: str) -> str:
    """Escape text for a table cell, where a bar would end the cell."""
    # a backslash escape inside backquotes works on GitHub but not on the site: use HTML, which works on both
    coded = re.sub(r"`([^`]*\|[^`]*)`", lambda code: f"<code>{html.escape(code[1])}</code>", text)
    return " ".join(coded.replace("|", "&#124;").split())


def generated_pages() -> dict[Path, str]:
    """Return the path and text of each generated page."""
    return {
        **{FOLDER / f"{name}.md": page(name) for name in PAGES},
        FOLDER / "command-line.md": command_line(),
    }


if __name__ == "__main__":
    for path, text in generated_pages().items():
        if not path.exists() or path.read_text("utf-8") != text:
            path.write_text(text, "utf-8")
            print(f"wrote {path}")

"""How docstrings become pages: an extension of griffe, which mkdocstrings reads the sources with.

Docstrings here are prose that `help` shows well. Three things are told apart for the page: examples (`>>>`)
become code, lines that explain a parameter ("mask: who may look") a list, and names in backquotes links.
"""

import html
import re
from collections.abc import Iterator
from typing import Any

import griffe

# "queries, keys: the tokens" at the start of a line; lines up to the next or an empty one belong to it
EXPLAINED = re.compile(r"(?P<names>`?[a-z]\w*`?(?:, `?[a-z]\w*`?)*): (?P<text>\S.*)")
NAME = re.compile(r"(?<!`)`(?P<name>(?:regard\.)?[A-Za-z_][\w.]*)(?P<call>\(\))?`(?!`)")


class Prose(griffe.Extension):
    """Rewrites every docstring as Markdown."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value, obj)


def markdown(text: str, obj: griffe.Object) -> str:
    """A docstring as Markdown: its examples as code, its parameters as a list, its names as links."""
    known = names(obj)
    return "\n\n".join(_block(block, obj, known) for block in _blocks(text))


def names(obj: griffe.Object) -> set[str]:
    """The names that a docstring can explain in a line of their own: parameters, fields and properties."""
    found = set()
    if isinstance(obj, griffe.Function):
        found |= {parameter.name for parameter in obj.parameters}
    if isinstance(obj, griffe.Class):
        found |= {name for name in obj.all_members if not name.startswith("_")}
        found |= {parameter.name for parameter in obj.parameters}
    return found


def _blocks(text: str) -> Iterator[str]:
    """Paragraphs; an example is one of its own, with the empty lines inside it."""
    lines: list[str] = []
    example = False
    for line in text.strip().splitlines():
        starts = line.startswith(">>> ") and not example
        ends = example and not line.strip()
        if (starts or ends or not line.strip()) and lines:
            yield "\n".join(lines)
            lines = []
        example = starts or (example and not ends)
        if line.strip():
            lines.append(line)
    if lines:
        yield "\n".join(lines)


def _block(block: str, obj: griffe.Object, known: set[str]) -> str:
    if block.startswith(">>> "):
        return f"```pycon\n{block}\n```"
    if all(line.startswith("    ") for line in block.splitlines()):
        return block  # indented: to be shown as it is
    prose: list[str] = []
    items: list[str] = []
    # several may stand on a line: "size: how many are followed. best: how many are given back"
    several = re.compile(rf"(?<=[.;]) (?=(?:{'|'.join(sorted(known) or ['(?!)'])})(?:, \w+)*: )")
    for line in several.sub("\n", block).splitlines():
        explained = EXPLAINED.fullmatch(line)
        if explained and any(name.strip("` ") in known for name in explained["names"].split(",")):
            which = ", ".join(f"**`{name.strip('` ')}`**" for name in explained["names"].split(","))
            items.append(f"- {which}: {_linked(explained['text'].removesuffix(';'), obj)}")
        elif items:
            items[-1] += "\n  " + _linked(line.strip(), obj)
        else:
            prose.append(_linked(line, obj))
    return "\n\n".join("\n".join(part) for part in (prose, items) if part)


def _linked(line: str, obj: griffe.Object) -> str:
    """The names in backquotes as links, where the reference has them."""
    return NAME.sub(lambda found: _link(found, obj), line)


def _link(found: re.Match[str], obj: griffe.Object) -> str:
    path = resolved(found["name"], obj)
    if path is None:
        return found[0]
    shown = html.escape(found["name"] + (found["call"] or ""))
    return f'<autoref identifier="{path}" optional><code>{shown}</code></autoref>'


def resolved(name: str, obj: griffe.Object) -> str | None:
    """The full path of what a docstring calls by this name; None for parameters and what is not regard's."""
    first = name.split(".")[0]
    if first in names(obj) and not (isinstance(obj, griffe.Class) and first in obj.members):
        return None
    package = obj.package
    rooms = [package.members.get(room) for room in ("models", "translation")]
    for scope in (obj, obj.parent, obj.module, package, *rooms):
        member: Any = scope
        if member is None:
            continue
        for part in name.removeprefix("regard.").split("."):
            try:
                member = member.all_members.get(part) if hasattr(member, "all_members") else None
                if member is not None and member.is_alias:
                    member = member.final_target
            except griffe.GriffeError:
                member = None
            if member is None:
                break
        if member is not None and member.path.startswith("regard.") and member is not obj:
            return str(member.path)
    return None

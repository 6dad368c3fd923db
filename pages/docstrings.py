"""A griffe extension that converts docstrings to Markdown for mkdocstrings.

Examples (`>>>`) become code blocks, lines that describe a parameter ("mask: allowed keys") become a list, and
names in backquotes become links.
"""

import html
import re
from collections.abc import Iterator
from typing import Any

import griffe

# "queries, keys: the tokens" at the start of a line; the following lines continue the description
PARAMETER = re.compile(r"(?P<names>`?[a-z]\w*`?(?:, `?[a-z]\w*`?)*): (?P<text>\S.*)")
NAME = re.compile(r"(?<!`)`(?P<name>(?:regard\.)?[A-Za-z_][\w.]*)(?P<call>\(\))?`(?!`)")


class MarkdownDocstrings(griffe.Extension):
    """Converts every docstring to Markdown."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value, obj)


def markdown(text: str, obj: griffe.Object) -> str:
    """Convert a docstring to Markdown, with code blocks, a parameter list and links."""
    known = parameter_names(obj)
    return "\n\n".join(_block(block, obj, known) for block in _blocks(text))


def parameter_names(obj: griffe.Object) -> set[str]:
    """Return the names that a docstring may describe: parameters, fields and properties."""
    names = set()
    if isinstance(obj, griffe.Function):
        names |= {parameter.name for parameter in obj.parameters}
    if isinstance(obj, griffe.Class):
        names |= {name for name in obj.all_members if not name.startswith("_")}
        names |= {parameter.name for parameter in obj.parameters}
    return names


def _blocks(text: str) -> Iterator[str]:
    """Split a docstring into paragraphs and examples."""
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
        return block  # indented: already a code block
    prose: list[str] = []
    items: list[str] = []
    # one line may describe several parameters: "size: beam size. n_best: hypotheses to return"
    separator = re.compile(rf"(?<=[.;]) (?=(?:{'|'.join(sorted(known) or ['(?!)'])})(?:, \w+)*: )")
    for line in separator.sub("\n", block).splitlines():
        match = PARAMETER.fullmatch(line)
        if match and any(name.strip("` ") in known for name in match["names"].split(",")):
            names = ", ".join(f"**`{name.strip('` ')}`**" for name in match["names"].split(","))
            items.append(f"- {names}: {_add_links(match['text'].removesuffix(';'), obj)}")
        elif items:
            items[-1] += "\n  " + _add_links(line.strip(), obj)
        else:
            prose.append(_add_links(line, obj))
    return "\n\n".join("\n".join(part) for part in (prose, items) if part)


def _add_links(line: str, obj: griffe.Object) -> str:
    """Link the names in backquotes that are in the reference."""
    return NAME.sub(lambda match: _link(match, obj), line)


def _link(match: re.Match[str], obj: griffe.Object) -> str:
    path = resolve(match["name"], obj)
    if path is None:
        return match[0]
    label = html.escape(match["name"] + (match["call"] or ""))
    return f'<autoref identifier="{path}" optional><code>{label}</code></autoref>'


def resolve(name: str, obj: griffe.Object) -> str | None:
    """Return the full path of a name in a docstring; None for parameters and names outside regard."""
    first = name.split(".")[0]
    if first in parameter_names(obj) and not (isinstance(obj, griffe.Class) and first in obj.members):
        return None
    package = obj.package
    subpackages = [package.members.get(name) for name in ("models", "translation")]
    for scope in (obj, obj.parent, obj.module, package, *subpackages):
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

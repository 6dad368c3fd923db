"""The interactive view as one text: its ES modules, one below the other, each after those that it needs.

A module imports others relatively and by their names, exports at the beginning of a line, and shares no
top-level name with another. So nothing needs to be parsed: imports and the word `export` are left out.
"""

import re
from functools import lru_cache
from importlib.resources import files

from regard.errors import ArgumentError

_IMPORT = re.compile(
    r"^import \{ *(?P<names>[\w$, ]+?),? *\} from \"\./(?P<module>[\w-]+\.js)\";[ \t]*$", re.M
)
_NEARLY = re.compile(r"^[ \t]*import\b|^[ \t]*export\s+(?:\*|\{)|\bimport\s*\(|^[ \t]+export\b", re.M)
_EXPORT = re.compile(r"^export (?=(?:async function|function|const|let|class)\b)", re.M)
_DEFAULT = re.compile(r"^export default\b", re.M)
_NAMES = re.compile(
    r"^(?:export )?(?:async function|function|const|let|var|class)\*? (\{[^}]*\}|\[[^\]]*\]|[\w$]+)", re.M
)


def bundle(entry: str) -> str:
    """A module of the view with all that it needs, as one text.

    entry: "export.js", the script of a page, or "widget.js", a module with a default export.

    >>> from regard.app.bundle import bundle
    >>> "import {" in bundle("export.js")
    False
    """
    return _joined(entry)


def style() -> str:
    """The view's style sheet.

    >>> from regard.app.bundle import style
    >>> ".regard-attention" in style()
    True
    """
    return static("attention/attention.css")


def static(name: str) -> str:
    """A file of the front end, as text.

    >>> from regard.app.bundle import static
    >>> static("export.html").splitlines()[0]
    '<!doctype html>'
    """
    return files("regard.app").joinpath("static", *name.split("/")).read_text("utf-8")


@lru_cache(maxsize=8)
def _joined(entry: str) -> str:
    texts: dict[str, str] = {}
    _collect(entry, texts, ())
    return join(texts, entry)


def _collect(name: str, texts: dict[str, str], above: tuple[str, ...]) -> None:
    """Modules by their names, each after those that it imports."""
    if name in above:
        raise ArgumentError(f"{' imports '.join((*above, name))}; modules of a bundle stand in one order.")
    if name in texts:
        return
    text = static(f"attention/{name}")
    for needed in _IMPORT.finditer(text):
        _collect(needed["module"], texts, (*above, name))
    texts[name] = text


def join(texts: dict[str, str], entry: str) -> str:
    """Modules, in an order in which each has what it needs above it, as one.

    >>> from regard.app.bundle import join
    >>> parts = {"a.js": "export const one = 1;", "b.js": 'import { one } from "./a.js";\\none + 1;'}
    >>> print(join(parts, "b.js"))
    // a.js
    const one = 1;
    // b.js
    one + 1;
    """
    owners: dict[str, str] = {}
    exported: dict[str, set[str]] = {}
    parts = []
    for name, text in texts.items():
        _check_imports(name, text, exported)
        for declared in top_level(text):
            if declared in owners:
                raise ArgumentError(
                    f"{name} and {owners[declared]} both declare {declared!r} at their top level; the "
                    "modules of a bundle share one scope, so give one of them another name."
                )
            owners[declared] = name
        exported[name] = {one for line in text.splitlines() if _EXPORT.match(line) for one in top_level(line)}
        body = _EXPORT.sub("", _IMPORT.sub("", text)).strip("\n")
        if _DEFAULT.search(body) and name != entry:
            raise ArgumentError(
                f"{name} has a default export; only the entry of a bundle, {entry}, can have one."
            )
        parts.append(f"// {name}\n{body}")
    return "\n".join(parts)


def _check_imports(name: str, text: str, exported: dict[str, set[str]]) -> None:
    """Only imports that can be left out: of names that were exported above, as they are called there."""
    found = _NEARLY.search(_IMPORT.sub("", text))
    if found:
        line = _IMPORT.sub("", text)[found.start() :].strip().splitlines()[0]
        raise ArgumentError(
            f"{name} has the line {line[:80]!r}; a bundle takes imports on one line, "
            'import { name } from "./module.js"; and exports as declarations at the beginning of a line.'
        )
    for imported in _IMPORT.finditer(text):
        for one in filter(None, (part.strip() for part in imported["names"].split(","))):
            if one not in exported.get(imported["module"], set()):
                raise ArgumentError(
                    f"{name} imports {one!r} from {imported['module']}, which does not export it."
                )


def top_level(text: str) -> list[str]:
    """The names that a module declares at the beginning of a line.

    >>> from regard.app.bundle import top_level
    >>> top_level("const [a, b] = f();\\nexport class C {\\n  const d = 1;\\n}\\nasync function e() {}")
    ['a', 'b', 'C', 'e']
    """
    found = []
    for declared in _NAMES.finditer(text):
        found += re.findall(r"[\w$]+", re.sub(r"[\w$]+ *:", "", declared[1]))
    return found

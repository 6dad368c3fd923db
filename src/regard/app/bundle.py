"""Bundle ES modules into one script, each module after its imports.

Each import is on one line, by name, from "./x.js" or "../folder/x.js"; each export starts a line.
Bundling therefore needs no parser. No two modules of the view declare the same top-level name, so `bundle`
only removes imports and the word `export`. `bundle_page` wraps each module in a function, and supports
`import(…)` of the bundle's modules.
"""

import posixpath
import re
from collections.abc import Sequence
from functools import lru_cache
from importlib.resources import files

from regard.errors import ArgumentError

_IMPORT = re.compile(
    r"^import \{ *(?P<names>[\w$, ]+?),? *\} from \"(?P<path>(?:\./|\.\./[\w-]+/)[\w-]+\.js)\";[ \t]*$", re.M
)
_UNSUPPORTED = re.compile(r"^[ \t]*import\b|^[ \t]*export\s+(?:\*|\{)|\bimport\s*\(|^[ \t]+export\b", re.M)
_EXPORT = re.compile(r"^export (?=(?:async function|function|const|let|class)\b)", re.M)
_DEFAULT_EXPORT = re.compile(r"^export default\b", re.M)
_DECLARATION = re.compile(
    r"^(?:export )?(?:async function|function|const|let|var|class)\*? (\{[^}]*\}|\[[^\]]*\]|[\w$]+)", re.M
)


@lru_cache(maxsize=8)
def bundle(entry: str) -> str:
    """Return a module and its dependencies as one script.

    entry: "attention/export.js", the script of a page, or "attention/widget.js", which has a default export.

    >>> from regard.app.bundle import bundle
    >>> "import {" in bundle("attention/export.js")
    False
    """
    modules: dict[str, str] = {}
    _collect(entry, modules, ())
    return join(modules, entry)


_PATH = re.compile(r"(?P<path>(?:\./|(?:\.\./)+)(?:[\w-]+/)*[\w-]+\.js)")
_NAMED_IMPORT = re.compile(
    rf"^(?P<kind>import|export) \{{(?P<names>[^}}]*)\}} from \"{_PATH.pattern}\";[ \t]*$", re.M
)
_LOADER = """\
const modules = new Map();
const load = (from, path) => modules.get(new URL(path, `bundle:///${from}`).pathname.slice(1));
const loadLater = async (from, path) => load(from, path);
"""


def bundle_page(entries: Sequence[str]) -> str:
    """Return modules and their dependencies as one script; entries run in the given order.

    >>> from regard.app.bundle import bundle_page
    >>> script = bundle_page(["page/sections/lookup.js", "page/page.js"])
    >>> "import {" in script, script.count('modules.set("shared/dom.js"')
    (False, 1)
    """
    modules: dict[str, str] = {}
    for entry in entries:
        _collect(entry, modules, (), _NAMED_IMPORT)
    return _LOADER + "\n".join(_scoped(name, text) for name, text in modules.items())


def _scoped(name: str, text: str) -> str:
    """Wrap a module in a function that returns its exports."""
    exports: list[str] = []

    def imported(statement: re.Match[str]) -> str:
        if statement["kind"] == "export":  # a re-export
            parts = statement["names"].split(",")
            exports.extend(part.rpartition(" as ")[2].strip() for part in parts if part.strip())
        names = statement["names"].replace(" as ", ": ")
        return f'const {{{names}}} = load("{name}", "{statement["path"]}");'

    body = re.sub(r"\bimport\(", f'loadLater("{name}", ', _NAMED_IMPORT.sub(imported, text))
    if unsupported := _UNSUPPORTED.search(body):
        line = body[unsupported.start() :].strip().splitlines()[0]
        raise ArgumentError(f"{name}: cannot bundle {line[:80]!r}. Use named imports and exports.")
    exports += [item for line in body.splitlines() if _EXPORT.match(line) for item in top_level(line)]
    body = _EXPORT.sub("", body).strip("\n")
    return f'modules.set("{name}", (() => {{\n{body}\nreturn {{ {", ".join(exports)} }};\n}})());'


def style() -> str:
    """Return the style sheet of the view.

    >>> from regard.app.bundle import style
    >>> ".regard-attention" in style()
    True
    """
    return static("attention/attention.css")


def static(name: str) -> str:
    """Return a static file as text.

    >>> from regard.app.bundle import static
    >>> static("export.html").splitlines()[0]
    '<!doctype html>'
    """
    return files("regard.app").joinpath("static", *name.split("/")).read_text("utf-8")


@lru_cache(maxsize=8)
def static_names(folder: str) -> list[str]:
    """Return the names of the modules in a static folder, without their extension.

    >>> from regard.app.bundle import static_names
    >>> "lookup" in static_names("page/sections")
    True
    """
    paths = files("regard.app").joinpath("static", *folder.split("/")).iterdir()
    return sorted(path.name.removesuffix(".js") for path in paths if path.name.endswith(".js"))


def _collect(
    name: str, modules: dict[str, str], parents: tuple[str, ...], imports: re.Pattern[str] = _IMPORT
) -> None:
    """Add a module to `modules`, after the modules it imports."""
    if name in parents:
        raise ArgumentError(f"Circular import: {' imports '.join((*parents, name))}.")
    if name in modules:
        return
    text = static(name)
    for statement in imports.finditer(text):
        _collect(_resolve(name, statement["path"]), modules, (*parents, name), imports)
    modules[name] = text


def _resolve(name: str, path: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(name), path))


def join(modules: dict[str, str], entry: str) -> str:
    """Join modules that are sorted by dependency.

    >>> from regard.app.bundle import join
    >>> modules = {"a.js": "export const one = 1;", "b.js": 'import { one } from "./a.js";\\none + 1;'}
    >>> print(join(modules, "b.js"))
    // a.js
    const one = 1;
    // b.js
    one + 1;
    """
    owners: dict[str, str] = {}
    exports: dict[str, set[str]] = {}
    parts = []
    for name, text in modules.items():
        _check_imports(name, text, exports)
        for declared in top_level(text):
            if declared in owners:
                raise ArgumentError(
                    f"{name} and {owners[declared]} both declare {declared!r}. The modules of a bundle share "
                    "one scope; rename one of them."
                )
            owners[declared] = name
        exported = (line for line in text.splitlines() if _EXPORT.match(line))
        exports[name] = {declared for line in exported for declared in top_level(line)}
        body = _EXPORT.sub("", _IMPORT.sub("", text)).strip("\n")
        if _DEFAULT_EXPORT.search(body) and name != entry:
            raise ArgumentError(
                f"{name} has a default export; only the bundle's entry, {entry}, may have one."
            )
        parts.append(f"// {name}\n{body}")
    return "\n".join(parts)


def _check_imports(name: str, text: str, exports: dict[str, set[str]]) -> None:
    """Raise if a module has unsupported imports or imports a name that its source does not export."""
    rest = _IMPORT.sub("", text)
    if unsupported := _UNSUPPORTED.search(rest):
        line = rest[unsupported.start() :].strip().splitlines()[0]
        raise ArgumentError(
            f'{name}: cannot bundle {line[:80]!r}. Use import {{ name }} from "./module.js"; on one line '
            "and export declarations at the start of a line."
        )
    for statement in _IMPORT.finditer(text):
        module = _resolve(name, statement["path"])
        for imported in filter(None, (part.strip() for part in statement["names"].split(","))):
            if imported not in exports.get(module, set()):
                raise ArgumentError(f"{name} imports {imported!r} from {module}, which does not export it.")


def top_level(text: str) -> list[str]:
    """Return the names that a module declares at the start of a line.

    >>> from regard.app.bundle import top_level
    >>> top_level("const [a, b] = f();\\nexport class C {\\n  const d = 1;\\n}\\nasync function e() {}")
    ['a', 'b', 'C', 'e']
    """
    names = []
    for declaration in _DECLARATION.finditer(text):
        names += re.findall(r"[\w$]+", re.sub(r"[\w$]+ *:", "", declaration[1]))
    return names

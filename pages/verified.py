"""Find the pages that must run: their text or code has changed since the last run.

`verified.txt` has one line per page: a digest, and the modules of regard that the page imported. The digest
covers the page, these modules and the kernels without comments and docstrings, and the version of torch.
"""

import ast
import hashlib
import re
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import torch

from pages.runner import CODE, ROOT, STYLE
from regard._util.files import write_atomic

PACKAGE = ROOT / "src/regard"
RECORD = Path(__file__).with_name("verified.txt")
ALWAYS = {"README.md"}  # the first code that new users run


def is_verified(page: Path) -> bool:
    """Return whether the page and the code that it uses are unchanged since it last ran."""
    name = _name(page)
    if name in ALWAYS or not CODE.search(page.read_text("utf-8") + "\n"):
        return False
    digest, modules = _records().get(name, ("", ()))
    return digest == _digest(page, modules)


def record(page: Path) -> None:
    """Record that a page has run in this process, with the modules imported so far."""
    files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    own = (file for file in files if file and file.endswith(".py") and "site-packages" not in file)
    paths = map(Path.resolve, map(Path, own))  # slow, so not for torch's thousands of files
    modules = sorted(path.relative_to(PACKAGE).as_posix() for path in paths if path.is_relative_to(PACKAGE))
    records = {**_records(), _name(page): (_digest(page, modules), modules)}
    lines = (f"{name} {digest} {' '.join(used)}\n" for name, (digest, used) in sorted(records.items()))
    write_atomic(RECORD, "".join(lines).encode())


def _records() -> dict[str, tuple[str, list[str]]]:
    lines = RECORD.read_text("utf-8").splitlines() if RECORD.exists() else []
    return {name: (digest, used) for name, digest, *used in map(str.split, lines) if (ROOT / name).exists()}


def _name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def _digest(page: Path, modules: Iterable[str]) -> str:
    digests = [_of_bytes(page), _of_bytes(STYLE), torch.__version__.partition("+")[0]]
    digests += [f"{module} {_of_code(PACKAGE / module)}" for module in modules]
    digests += [_of_kernel(file) for file in _files(ROOT / "kernels")]
    if any(name.startswith("app/") for name in modules):
        digests += [_of_bytes(file) for file in _files(PACKAGE / "app/static")]
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()[:16]


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


@cache
def _of_bytes(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


@cache
def _of_kernel(file: Path) -> str:
    """Return the digest of a C++ file, excluding comments."""
    return hashlib.sha256(re.sub(r" *//.*", "", file.read_text("utf-8")).encode()).hexdigest()


@cache
def _of_code(file: Path) -> str:
    """Return the digest of a module, excluding comments and docstrings; empty if the file does not exist."""
    if not file.exists():
        return ""
    tree = ast.parse(file.read_bytes())
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            and ast.get_docstring(node) is not None
        ):
            node.body = node.body[1:]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()

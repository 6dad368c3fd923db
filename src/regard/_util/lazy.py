"""Lazy packages: public names are listed in `__init__.pyi` and imported on first use.

Importing torch takes a second and matplotlib another half second; `regard --help` needs neither.
"""

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from regard._util.name_hints import unknown_attribute


def attach(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Create the `__getattr__`, `__dir__` and `__all__` of a package from the `__init__.pyi` next to `file`.

    Submodules are also attributes and are imported on first use.

    >>> import regard
    >>> "attend" in dir(regard), regard.mechanism.masks.__name__
    (True, 'regard.mechanism.masks')
    """
    folder = Path(file).parent
    modules = _read_stub(folder / "__init__.pyi")
    submodules = sorted(
        path.stem
        for path in folder.iterdir()
        if not path.name.startswith(("_", ".")) and (path.suffix == ".py" or (path / "__init__.py").exists())
    )

    def load(name: str) -> Any:
        module_name = modules.get(name, package)
        if module_name == package:
            return import_module(f"{package}.{name}")
        module = import_module(module_name)
        return getattr(module, name) if name in vars(module) else import_module(f"{module_name}.{name}")

    def __getattr__(name: str) -> Any:
        if name not in modules and name not in submodules:
            raise _unknown(package, folder, name, [*modules, *submodules])
        value = load(name)
        setattr(sys.modules[package], name, value)  # later accesses bypass __getattr__
        return value

    def __dir__() -> list[str]:
        return sorted({*vars(sys.modules[package]), *modules, *submodules})

    return __getattr__, __dir__, sorted(modules)


def _read_stub(stub: Path) -> dict[str, str]:
    """Map each public name to the module that defines it."""
    if not stub.exists():
        return {}
    return {
        alias.name: node.module or ""
        for node in ast.parse(stub.read_text("utf-8")).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def _unknown(package: str, folder: Path, name: str, names: list[str]) -> AttributeError:
    """Return the error for an unknown name. Suggest the same name in a subpackage, ignoring case."""
    for stub in sorted(folder.glob("*/__init__.pyi")):
        for public in _read_stub(stub):
            if not name.startswith("_") and public.lower() == name.lower() and public not in names:
                answer = f"Use {package}.{stub.parent.name}.{public}."
                return AttributeError(f"module {package!r} has no attribute {name!r}. {answer}", name=name)
    return unknown_attribute(package, name, names, module=True)

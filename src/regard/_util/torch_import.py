"""Import torch without the parts that a short command does not need."""

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any

_META = "torch._meta_registrations"


class _Deferred(ModuleType):
    """A module that is imported when one of its attributes is first read."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # read by the import system
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


def defer_meta_kernels() -> None:
    """Defer the import of torch's Python kernels for meta tensors until a module uses them.

    Importing them takes a quarter of the time of `import torch`, and only compilers and models on the meta
    device need them. Until they are imported, some operations on meta tensors raise NotImplementedError. This
    function has no effect once torch has been imported. Call it only in a process that runs a single command.

    >>> import torch
    >>> from regard._util.torch_import import defer_meta_kernels
    >>> defer_meta_kernels()  # no effect: torch has been imported
    """
    if "torch" not in sys.modules and importlib.util.find_spec("torch") is not None:
        sys.modules.setdefault(_META, _Deferred(_META))

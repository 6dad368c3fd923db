"""The memory that a piece of code asks for: the largest tensor that any of its operations makes."""

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor, and the operation that made it.

    What counts is what a tensor holds: a view that repeats a row holds one row.
    """

    def __init__(self) -> None:
        super().__init__()
        self.elements, self.by = 0, ""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for made in tree_leaves(result):
            if isinstance(made, Tensor):
                elements = made.untyped_storage().nbytes() // made.element_size()
                if elements > self.elements:
                    self.elements, self.by = elements, str(function)
        return result

"""Measure memory: the largest tensor that any operation creates."""

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Largest(TorchDispatchMode):
    """Record the number of elements of the largest tensor and the operation that created it.

    Sizes are storage sizes: an expanded row counts as one row.
    """

    def __init__(self) -> None:
        super().__init__()
        self.elements, self.by = 0, ""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                elements = tensor.untyped_storage().nbytes() // tensor.element_size()
                if elements > self.elements:
                    self.elements, self.by = elements, str(function)
        return result

"""Call `score_mod` and `mask_mod` functions on tensors of indices with `torch.vmap`."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from regard.errors import DTypeError, ShapeError


class Substitution(TorchFunctionMode):
    """Replace captured tensors in all torch calls.

    A function keeps references to its captured tensors, so this is the only way to replace them.

    replacements: id of a captured tensor → new tensor.
    """

    def __init__(self, replacements: Mapping[int, Tensor]) -> None:
        super().__init__()
        self.replacements = replacements

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = self._replace(args), self._replace(kwargs or {})
        if func is Tensor.__getitem__:
            table, at = args
            items = at if isinstance(at, tuple) else (at,)
            tensors = [i for i in items if isinstance(i, Tensor)]
            # inside vmap, an index tensor has no Python value, so the call needs advanced indexing
            if tensors and all(isinstance(i, Tensor) or type(i) is int for i in items):
                indices = [torch.as_tensor(i, device=table.device) for i in items]
                return torch.ops.aten.index.Tensor(table, indices)
        return func(*args, **kwargs)

    def _replace(self, tree: Any) -> Any:
        if isinstance(tree, Tensor):
            return self.replacements.get(id(tree), tree) if self.replacements else tree
        if type(tree) in (list, tuple):
            return type(tree)(map(self._replace, tree))
        if type(tree) is dict:
            return {name: self._replace(item) for name, item in tree.items()}
        return tree


def freeze(function: Any, frozen: dict[int, Any] | None = None) -> Any:
    """Return a copy of a function that keeps the current values of the variables in its enclosing scopes.

    A function defined in a loop shares these variables with the functions of later iterations, which could
    otherwise change the result of its backward pass.

    frozen: id of a function → its copy, for functions that refer to themselves.
    """
    frozen = {} if frozen is None else frozen
    if type(function) is tuple:
        return tuple(freeze(item, frozen) for item in function)
    if not isinstance(function, FunctionType) or not function.__closure__:
        return function
    if id(function) not in frozen:
        cells = tuple(CellType() for _ in function.__closure__)
        code, scope = function.__code__, function.__globals__
        copy = FunctionType(code, scope, function.__name__, function.__defaults__, cells)
        copy.__kwdefaults__ = function.__kwdefaults__
        copy.__dict__.update(function.__dict__)
        frozen[id(function)] = copy
        for cell, source in zip(cells, function.__closure__, strict=True):
            with suppress(ValueError):  # the variable has no value yet
                cell.cell_contents = freeze(source.cell_contents, frozen)
    return frozen[id(function)]


NO_REPLACEMENTS: Mapping[int, Tensor] = {}


def map_scores(
    score_mod: Callable[..., Tensor], scores: Tensor, *indices: Tensor, replacements: Mapping[int, Tensor]
) -> Tensor:
    """Return score_mod(score, b, h, q, k) for scores (b, h, q, k) and one vector per index.

    replacements: see `Substitution`.
    """
    in_dims = [(0, None, None, None, 0), (0, None, None, 0, None), (0, None, 0, None, None)]
    result = _map(score_mod, [*in_dims, (0, 0, None, None, None)], (scores, *indices), replacements)
    return _checked("score_mod", result, scores.shape)


def map_mask(mask_mod: Callable[..., Tensor], *indices: Tensor) -> Tensor:
    """Return mask_mod(b, h, q, k) for one vector per index, as a boolean tensor (b, h, q, k)."""
    in_dims = [(None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)]
    result = _map(mask_mod, in_dims, indices)
    return _checked_mask(result, tuple(len(index) for index in indices))


def map_mask_blocks(mask_mod: Callable[..., Tensor], *indices: Tensor) -> Tensor:
    """Return mask_mod(b, h, q, k) for p blocks: b (p), h (p), q (p, rows), k (p, columns)."""
    in_dims = [(None, None, None, 0), (None, None, 0, None), (0, 0, 0, 0)]
    shape = (*indices[2].shape, indices[3].shape[-1])
    return _checked_mask(_map(mask_mod, in_dims, indices), shape)


def _map(
    function: Callable[..., Tensor],
    in_dims: list[Any],
    args: tuple[Tensor, ...],
    replacements: Mapping[int, Tensor] = NO_REPLACEMENTS,
) -> Tensor:
    """Apply `function` under nested vmaps, one for each entry of `in_dims`, innermost first."""
    for dims in in_dims:
        function = torch.vmap(function, dims)
    with Substitution(replacements):
        return function(*args)


def _checked(name: str, result: Tensor, shape: tuple[int, ...]) -> Tensor:
    if tuple(result.shape) != tuple(shape):
        raise ShapeError(
            f"{name} returned a tensor of shape {tuple(result.shape[len(shape) :])}; it must return a "
            "scalar tensor, without axes, for each query and key."
        )
    return result


def _checked_mask(result: Any, shape: tuple[int, ...]) -> Tensor:
    mask = _checked("mask_mod", result, shape)
    if mask.dtype is not torch.bool:
        raise DTypeError(f"mask_mod returned {mask.dtype}; it must return torch.bool (True = may attend).")
    return mask

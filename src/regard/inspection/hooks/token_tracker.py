"""Follow tokens through a model that divides them into windows, to find the position of each query and key.

Each tensor of activations has an index: a tensor of the same shape that contains the number of the token
to which each activation belongs. Convolutions and embeddings number the tokens of their output, and so do
linear layers and norms if their input has no index. Operations that rearrange a tensor (view, permute, roll,
pad, …) are repeated on its index. Functions that act on each token separately preserve the index, and the
output of attention takes the index of the query. The output of any other operation has no index.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary


class Tokens(NamedTuple):
    """The token that each entry of a tensor belongs to.

    numbers: token numbers from 0 to batch · tokens − 1, or −1 for padding, in the shape of the tensor. All
        features of a token have the same number.
    batch: number of images or texts. tokens: number of tokens in each.
    numbering: identifies the numbering; later numberings have larger values.
    """

    numbers: Tensor
    batch: int
    tokens: int
    numbering: int


class TokenTracker:
    """Tracks the tokens of one thread's activations.

    >>> import torch
    >>> from regard.inspection.hooks.token_tracker import TokenTracker
    >>> tracker, x = TokenTracker(), torch.randn(1, 2, 3)
    >>> y = torch.nn.functional.layer_norm(x, (3,))
    >>> tracker.follow("layer_norm", torch.nn.functional.layer_norm, (x, (3,)), {}, y)
    >>> z = y.flip(1)
    >>> tracker.follow("flip", torch.flip, (y, (1,)), {}, z)
    >>> tracker.get(z).numbers[0, :, 0]
    tensor([1, 0])
    """

    def __init__(self) -> None:
        self._tokens: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._numberings = 0

    def follow(self, name: str, func: Any, args: Any, kwargs: Any, output: Any) -> None:
        """Determine the tokens of a function's output."""
        rule = _RULES.get(name)
        if rule is None:
            return
        tokens: Tokens | None = None
        # if a rule does not support these arguments, the output has no index
        with torch.no_grad(), suppress(RuntimeError, ValueError, TypeError, IndexError, KeyError):
            tokens = rule(self, func, args, kwargs, output)
        outputs = tensors(output)
        indices = [] if tokens is None else tensors(tokens.numbers)
        for number, tensor in enumerate(outputs):
            if tokens is not None and len(indices) == len(outputs) and indices[number].shape == tensor.shape:
                self._tokens[tensor] = tokens._replace(numbers=indices[number])
            else:
                self._tokens.pop(tensor, None)

    def get(self, x: Any) -> Tokens | None:
        return self._tokens.get(x) if isinstance(x, Tensor) else None

    def number(self, x: Tensor, features: int) -> Tokens:
        """Number the tokens of a tensor.

        features: the feature axis. If there are several other axes, the first is the batch.
        """
        sizes = [n for axis, n in enumerate(x.shape) if axis != features % x.dim()]
        batch = sizes[0] if len(sizes) > 1 else 1
        count = torch.Size(sizes).numel()
        index = torch.arange(count, device=x.device).reshape(sizes).unsqueeze(features).expand(x.shape)
        self._numberings += 1
        return Tokens(index, batch, count // max(batch, 1), self._numberings)

    def pair(self, query: Tensor, key: Tensor, *, transposed: bool = False) -> tuple[Tokens, Tokens] | None:
        """Return the tokens of queries (…, h, q, d) and keys (…, h, k, d), or (…, h, d, k) if transposed.

        The token numbers have the shapes (…, q) and (…, k).
        """
        queries, keys = self.get(query), self.get(key)
        if queries is None or keys is None or queries[1:] != keys[1:]:
            return None
        queries = _rows(queries)
        keys = _rows(keys._replace(numbers=keys.numbers.mT) if transposed else keys)
        return None if queries is None or keys is None else (queries, keys)

    def set_output(self, output: Tensor, query: Tensor | Tokens, heads: int) -> None:
        """Assign the tokens of the queries to the output of attention. heads: the output's head axis."""
        tokens = self.get(query) if isinstance(query, Tensor) else query
        rows = _rows(tokens) if isinstance(query, Tensor) and tokens is not None else tokens
        if rows is not None and rows.numbers.dim() + 2 == output.dim():
            index = rows.numbers.unsqueeze(-1).unsqueeze(heads)
            self._tokens[output] = rows._replace(numbers=index.expand(output.shape))

    def clear(self) -> None:
        """Forget all tensors."""
        self._tokens.clear()


def tensors(x: Any) -> list[Tensor]:
    """Return the tensors in nested lists and tuples.

    >>> import torch
    >>> from regard.inspection.hooks.token_tracker import tensors
    >>> len(tensors([torch.ones(2), (torch.ones(3), 5)]))
    2
    """
    if isinstance(x, Tensor):
        return [x]
    if isinstance(x, list | tuple):
        return [tensor for item in x if isinstance(item, Tensor | list | tuple) for tensor in tensors(item)]
    return []


def _rows(tokens: Tokens) -> Tokens | None:
    """Reduce an index (…, h, n, d) to (…, n), if it does not depend on head and feature."""
    index = tokens.numbers
    if index.dim() < 3 or not index.numel():
        return None
    rows = index[..., 0, :, 0]
    return tokens._replace(numbers=rows) if torch.equal(rows, index[..., -1, :, -1]) else None


# Rules

Rule = Callable[[TokenTracker, Any, Any, Any, Any], Any]
RuleType = TypeVar("RuleType")


def _convolution(tracker: TokenTracker, func: Any, args: Any, kwargs: Any, output: Tensor) -> Tokens | None:
    space = {"conv1d": 1, "conv2d": 2, "conv3d": 3}[func.__name__]
    if output.dim() != space + 2 or 0 in output.shape:
        return None
    tokens = tracker.number(output, 1)
    if all(n == 1 for n in output.shape[2:]):  # one patch per batch entry
        return tokens._replace(batch=1, tokens=output.shape[0])
    return tokens


def _features(tracker: TokenTracker, func: Any, args: Any, kwargs: Any, output: Tensor) -> Tokens | None:
    """The rule for linear layers and norms, which act on the last axis."""
    tokens = tracker.get(args[0] if args else kwargs["input"])
    if tokens is not None and tokens.numbers.shape[:-1] == output.shape[:-1] and output.numel():
        rows = tokens.numbers[..., :1]
        if torch.equal(rows, tokens.numbers[..., -1:]):
            return tokens._replace(numbers=rows.expand(output.shape))
    return _embedding(tracker, func, args, kwargs, output)


def _embedding(tracker: TokenTracker, func: Any, args: Any, kwargs: Any, output: Tensor) -> Tokens | None:
    return tracker.number(output, -1) if output.dim() > 1 else None


def _elementwise(tracker: TokenTracker, func: Any, args: Any, kwargs: Any, output: Tensor) -> Tokens | None:
    operands = [tracker.get(operand) for operand in tensors(args)]
    same_shape = [
        tokens for tokens in operands if tokens is not None and tokens.numbers.shape == output.shape
    ]
    # the residual stream has the oldest numbering
    return min(same_shape, key=lambda tokens: tokens.numbering, default=None)


def _rearranged(tracker: TokenTracker, func: Any, args: Any, kwargs: Any, output: Any) -> Any:
    tokens = tracker.get(args[0])
    return None if tokens is None else tokens._replace(numbers=func(tokens.numbers, *args[1:], **kwargs))


def _reshaped(tracker: TokenTracker, func: Any, args: Any, kwargs: Any, output: Tensor) -> Tokens | None:
    tokens = tracker.get(args[0])
    return None if tokens is None else tokens._replace(numbers=tokens.numbers.reshape(output.shape))


def _padded(tracker: TokenTracker, func: Any, args: Any, kwargs: Any, output: Tensor) -> Tokens | None:
    tokens, mode = tracker.get(args[0]), args[2] if len(args) > 2 else kwargs.get("mode", "constant")
    if tokens is None or mode != "constant":
        return None
    sizes = args[1] if len(args) > 1 else kwargs["pad"]
    return tokens._replace(numbers=torch.nn.functional.pad(tokens.numbers, sizes, value=-1))


def _joined(tracker: TokenTracker, func: Any, args: Any, kwargs: Any, output: Tensor) -> Tokens | None:
    parts = [tokens for tokens in map(tracker.get, args[0]) if tokens is not None]
    if len(parts) != len(args[0]) or any(part[1:] != parts[0][1:] for part in parts):
        return None
    return parts[0]._replace(numbers=func([part.numbers for part in parts], *args[1:], **kwargs))


def rule_table(*rows: tuple[str, RuleType]) -> dict[str, RuleType]:
    """Return the rule of each function and of its in-place version. rows: function names and their rule."""
    rules = {name: rule for names, rule in rows for name in names.split()}
    return rules | {f"{name}_": rule for name, rule in rules.items() if not name.startswith("__")}


_RULES: dict[str, Rule] = rule_table(
    ("conv1d conv2d conv3d", _convolution),
    ("linear layer_norm rms_norm", _features),
    ("embedding", _embedding),
    ("add sub mul div __radd__ __rmul__ __rsub__ true_divide multiply neg pow", _elementwise),
    ("dropout gelu relu silu sigmoid tanh normalize clamp nan_to_num", _elementwise),
    ("float half bfloat16 double to type type_as contiguous clone detach", _elementwise),
    ("view reshape flatten unflatten unsqueeze squeeze view_as reshape_as", _reshaped),
    ("permute transpose swapaxes swapdims movedim moveaxis mT T roll flip", _rearranged),
    ("__getitem__ split tensor_split chunk unbind narrow select index_select unfold expand", _rearranged),
    ("pad", _padded),
    ("cat concat stack", _joined),
)

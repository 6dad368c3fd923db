"""Random calls to `attention`: shapes, options and numbers."""

import itertools
import math
from collections.abc import Callable, Iterable
from random import Random
from typing import Any

import torch
from torch import Tensor

import regard
from tests.cases import BIASES, MIXED_WIDTHS, NORMALIZERS, SCORES, Draw, Shape
from tests.fuzz.case import Case

# around the tile sizes of the kernels: one less, equal, one more
QUERIES = (1, 2, 3, 5, 7, 8, 9, 16, 17, 23, 24, 25, 31, 33, 48, 49)
KEYS = (*QUERIES, 63, 64, 65, 127, 129, 257)
WIDTHS = (1, 2, 3, 4, 5, 8, 11, 16, 17, 24, 32, 33, 64, 65)
PAIRS = 20_000  # maximum number of query-key pairs in all heads

SCORE_NAMES = list(SCORES)
NORMALIZER_TABLE: dict[str, Callable[[Shape, Draw], Any]] = {
    **NORMALIZERS,
    "softmax sharp": lambda shape, draw: regard.Softmax(temperature=0.1),
    "no sink": lambda shape, draw: regard.Softmax1(-math.inf),
    "entmax 1.05": lambda shape, draw: regard.Entmax(1.05),
    "entmax 2": lambda shape, draw: regard.Entmax(2.0),
    "entmax 4": lambda shape, draw: regard.Entmax(4.0),
}
BIAS_PARTS = ("dense", "dense of keys", "dense of queries", "relative", "alibi", "t5")
RELATIVE = ("relative", "alibi", "t5")


class Call:
    """A call to `attention`, whose numbers are available in any dtype.

    seen: the mask as a boolean tensor, from its definition.
    """

    def __init__(
        self,
        case: Case,
        *,
        dtypes: Iterable[torch.dtype] = (torch.float32,) * 4 + (torch.float64, torch.bfloat16, torch.float16),
        scores: Iterable[str] = SCORE_NAMES,
        normalizers: Iterable[str] = tuple(NORMALIZER_TABLE),
        magnitudes: Iterable[float] = (1, 1, 1, 1, 0.01, 10, 100),
        masks: bool = True,
        biases: bool = True,
        zero: float = 0.04,
        pairs: int = PAIRS,
    ) -> None:
        random = case.random
        self.dtype = random.choice(list(dtypes))
        self.normalize = random.choice(list(normalizers))
        self.score = random.choice([*scores, *(name for name in ("scaled dot", "dot") if name in scores)])
        if self.score == "function" and self.dtype.itemsize < 4:
            self.score = "scaled dot"  # a score function computes in the dtype of its inputs
        self.shape = draw_shape(random, self.score, zero, pairs)
        self.magnitude = random.choice(list(magnitudes))
        if self.dtype is torch.float16:
            self.magnitude = min(self.magnitude, 100)
        self.seed = str(random.getrandbits(64))
        self.mask: Any = None
        self.seen: Tensor | None = None
        told = "no mask"
        if masks and case.chance(0.7):
            self.mask, self.seen, told = draw_mask(random, self.shape)
        count = random.choice((0, 0, 1, 1, 2, 5)) if biases and self.shape.heads else 0
        self.bias = [random.choice(BIAS_PARTS) for _ in range(count)]
        if count and case.chance(0.1):
            self.bias = [random.choice(RELATIVE) for _ in range(3)]
        q, k, v = (" × ".join(map(str, shape)) for shape in self.shape)
        case.note(
            f"{str(self.dtype)[6:]} query {q}, key {k}, value {v}, query times {self.magnitude:g}, "
            f"score {self.score}, normalize {self.normalize}, mask {told}, bias {self.bias or None}"
        )

    def inputs(self, dtype: torch.dtype | None = None) -> list[Tensor]:
        """Return query, key and value: the same numbers in every dtype."""
        draw = Draw(self.seed, dtype or self.dtype, "cpu", self.dtype)
        tensors = [draw(*shape) for shape in self.shape]
        tensors[0] = (tensors[0].double() * self.magnitude).to(self.dtype).to(tensors[0].dtype)
        return tensors

    def options(self, dtype: torch.dtype | None = None) -> dict[str, Any]:
        """Return score, normalize and bias; parameters stay float32 in half precision, as in training."""
        precise = torch.float64 if self.dtype is torch.float64 else torch.float32
        draw = Draw(self.seed + " options", dtype or precise, "cpu", self.dtype)
        shape = self.shape
        parts = [BIASES[name](shape, draw) for name in self.bias]
        return {
            "score": SCORES[self.score](shape, draw),
            "normalize": NORMALIZER_TABLE[self.normalize](shape, draw),
            "bias": parts[0] if len(parts) == 1 else parts or None,
        }

    @property
    def rounding(self) -> float:
        """Return half a unit in the last place of the dtype that the operator computes in."""
        return 2.0**-53 if self.dtype is torch.float64 else 2.0**-24


def draw_shape(random: Random, score: str, zero: float = 0.0, pairs: int = PAIRS) -> Shape:
    """Draw the shapes of query, key and value."""
    while True:
        q, k, d, e = (random.choice(sizes) for sizes in (QUERIES, KEYS, WIDTHS, WIDTHS))
        if random.random() < 0.3:
            q = k
        axes = random.choice((0, 1, 1, 2, 2, 2, 2, 3))
        groups, shared = random.choice((1, 1, 2, 3)), random.choice((1, 1, 1, 2, 4))
        batch = [random.choice((1, 2, 3)) for _ in range(max(axes - 1, 0))]
        if random.random() < zero:
            at = random.randrange(5)
            q, k, d, e = (0 if i == at else size for i, size in enumerate((q, k, d, e)))
            batch = [0, *batch[1:]] if at == 4 else batch
        if score in ("cosine", *MIXED_WIDTHS):
            d = max(d, 2 if score == "cosine" else 1)  # the cosine of single numbers is constant
        total = math.prod(batch) * (groups * shared if axes else 1) * q * k
        cost = 8 * d if score in MIXED_WIDTHS or score in ("function", "gaussian") else 1
        if total * max(cost, 1) > pairs * (20 if cost > 1 else 1):
            continue
        key_width = d + 6 if score in MIXED_WIDTHS and random.random() < 0.7 else d
        if not axes:
            return Shape((q, d), (k, key_width), (k, e))
        key_heads, value_heads = groups, groups
        if random.random() < 0.15:  # one of the tensors broadcasts
            key_heads, value_heads = random.choice(((1, groups), (groups, 1)))
        query_heads = 1 if shared == 1 and random.random() < 0.1 else groups * shared
        return Shape(
            (*_broadcasting(random, batch), query_heads, q, d),
            (*_broadcasting(random, batch), key_heads, k, key_width),
            (*_broadcasting(random, batch), value_heads, k, e),
        )


def _broadcasting(random: Random, batch: list[int]) -> list[int]:
    """Return the batch axes of one tensor, some of which may be 1 or missing."""
    if random.random() < 0.8:
        return batch
    axes = [random.choice((size, 1)) for size in batch]
    return axes[random.randrange(len(axes) + 1) :] if random.random() < 0.3 else axes


# Masks: the object, its boolean tensor, and its text


def draw_mask(random: Random, shape: Shape, depth: int = 2) -> tuple[Any, Tensor, str]:
    """Draw a mask for these shapes."""
    return _mask(random, shape, depth, random.choice(("end", "end", "start")))


def _mask(random: Random, shape: Shape, depth: int, align: Any) -> tuple[Any, Tensor, str]:
    lead, q, k = shape.lead, shape.queries, shape.keys
    if depth and random.random() < 0.35:
        mask, seen, told = _mask(random, shape, depth - 1, align)
        for _ in range(random.choice((1, 1, 2, 4))):
            other, also, more = _mask(random, shape, depth - 1, align)
            if isinstance(mask, Tensor) and isinstance(other, Tensor):
                continue  # torch itself computes & of two tensors
            if random.random() < 0.5:
                mask, seen, told = mask & other, seen & also, f"({told} & {more})"
            else:
                mask, seen, told = mask | other, seen | also, f"({told} | {more})"
        return mask, seen, told
    match random.choice(("rule", "rule", "padding", "documents", "tensor")):
        case "rule":
            rule, told = draw_rule(random, align, q, k)
            return rule, rule_sees(rule, q, k), told
        case "padding":
            axes = random.randrange(len(lead) + 1)
            sizes = [random.choice((size, 1)) for size in lead[:axes]]
            lengths = torch.tensor([random.randint(0, k + 1) for _ in range(math.prod(sizes))])
            lengths = lengths.long().reshape(sizes)
            side: Any = random.choice(("right", "left"))
            given = lengths if axes else int(lengths)
            wide = lengths.reshape(*sizes, *[1] * (len(lead) - axes + 2))
            key = torch.arange(k)
            seen = key < wide if side == "right" else key >= k - wide
            return regard.Padding(given, side=side), seen, f"Padding({lengths.tolist()}, side={side!r})"
        case "documents":
            return _documents(random, q, k)
    sizes = [random.choice((size, size, 1)) for size in (*lead, q, k)]
    sizes = sizes[random.randrange(len(sizes) - 1) :]
    share, seed = random.choice((0.05, 0.6, 0.95, 1.0)), random.getrandbits(40)
    tensor = torch.rand(sizes, generator=torch.Generator().manual_seed(seed)) < share
    return tensor, tensor, f"bool{tuple(sizes)} {share:.0%} True"


def draw_rule(random: Random, align: Any, q: int, k: int) -> tuple[Any, str]:
    """Draw a mask that is defined by positions."""
    reach = random.choice((0, 1, 2, 5, k))
    match random.choice(("causal", "causal", "window", "sides", "prefix")):
        case "causal":
            return regard.Causal(align=align), f"Causal({align!r})"
        case "window":
            return regard.Window(reach + 1, align=align), f"Window({reach + 1}, align={align!r})"
        case "sides":
            left, right = random.choice(((reach, None), (None, reach), (reach, 1), (0, reach)))
            return (
                regard.Window(left=left, right=right, align=align),
                f"Window(left={left}, right={right}, align={align!r})",
            )
    return regard.Prefix(reach, align=align), f"Prefix({reach}, align={align!r})"


def rule_sees(rule: Any, q: int, k: int) -> Tensor:
    """Return a rule as a boolean tensor (q, k), from its definition."""
    here = torch.arange(q)[:, None] + (0 if rule.align == "start" else k - q)
    key = torch.arange(k)
    match rule:
        case regard.Causal():
            return key <= here
        case regard.Prefix(length=length):
            return (key < length) | (key <= here)
    seen = torch.ones(q, k, dtype=torch.bool)
    if rule.left is not None:
        seen = seen & (here - key <= rule.left)
    if rule.right is not None:
        seen = seen & (key - here <= rule.right)
    return seen


def _documents(random: Random, q: int, k: int) -> tuple[Any, Tensor, str]:
    count = random.choice((1, 2, 3, 5))
    queries = _split(random, q, count)
    keys = queries if q == k and random.random() < 0.7 else _split(random, k, count)
    within, told = draw_rule(random, random.choice(("end", "start")), q, k)
    if random.random() < 0.5:
        within = None
    seen = torch.zeros(q, k, dtype=torch.bool)
    starts = itertools.accumulate(queries, initial=0), itertools.accumulate(keys, initial=0)
    for row, column, rows, columns in zip(*starts, queries, keys, strict=False):
        block = torch.ones(rows, columns, dtype=torch.bool)
        block = block if within is None else rule_sees(within, rows, columns)
        seen[row : row + rows, column : column + columns] = block
    given: tuple[Any, ...] = (queries,) if keys is queries else (queries, keys)
    given = tuple(torch.tensor(some) for some in given) if random.random() < 0.5 else given
    told = f"Documents({queries}, {keys}, within={told if within is not None else None})"
    return regard.Documents(*given, within=within), seen, told


def _split(random: Random, total: int, parts: int) -> list[int]:
    cuts = sorted(random.randint(0, total) for _ in range(parts - 1))
    return [end - start for start, end in itertools.pairwise([0, *cuts, total])]


# Memory layouts


def lay_out(random: Random, x: Tensor) -> Tensor:
    """Return the same numbers with other strides; differentiable."""
    match random.choice(("plain", "plain", "transposed", "heads inside", "strided", "offset", "expanded")):
        case "transposed" if x.dim() > 1:
            return x.mT.contiguous().mT
        case "heads inside" if x.dim() > 2:
            return x.transpose(-3, -2).contiguous().transpose(-3, -2)
        case "strided":
            return torch.stack([x, x + 1], -1)[..., 0]
        case "offset":
            return torch.cat([x.flatten()[:0].new_ones(1), x.flatten()])[1:].reshape(x.shape)
        case "expanded" if x.dim() > 2 and x.shape[0] == 1:
            return x[0].expand(x.shape)
        case "expanded" if not x.requires_grad:
            return torch._neg_view(-x)  # the minus sign is a flag of the view, not in memory
    return x

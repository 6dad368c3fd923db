"""Check the arguments of a call and convert them to a `Problem`."""

import math
from collections.abc import Sequence
from typing import NamedTuple, TypedDict

import torch
from torch import Tensor, nn

from regard._util.checks import check_dense, check_device, check_number
from regard._util.text import pluralize, type_name
from regard.errors import DeviceError, DTypeError, ShapeError
from regard.mechanism import reference
from regard.mechanism.biases import RelativeBias
from regard.mechanism.call import keyword_hints, validation
from regard.mechanism.call.problem import Problem, ProblemConfig, Tile
from regard.mechanism.masks.algebra import CallShape, Mask, as_mask, terms_of
from regard.mechanism.normalizers import BUILT_IN_TYPES, Normalizer, Sink, Softmax, Softmax1
from regard.mechanism.quantized import Quantized
from regard.mechanism.scores import BUILT_IN, Prepared, ScaledDot, Score, ScoreFunction
from regard.mechanism.torch_state import concrete

# Number of rows on which a custom normalizer is checked: more than 2, because an incorrect reduction could
# also produce an axis of size 1 or 2.
_CHECKED_ROWS = 7

Bias = Tensor | RelativeBias | list[Tensor | RelativeBias] | tuple[Tensor | RelativeBias, ...]


class Call(NamedTuple):
    """The arguments of a call, except for query, key and value."""

    score: Score | ScoreFunction = ScaledDot()
    mask: Mask | Tensor | None = None
    bias: Bias | None = None
    normalize: Normalizer | Sink = Softmax()
    dropout: float = 0.0
    generator: torch.Generator | None = None


class Options(TypedDict, total=False):
    """The keyword arguments of `attention` and `attend`."""

    score: Score | ScoreFunction
    mask: Mask | Tensor | None
    bias: Bias | None
    normalize: Normalizer | Sink
    dropout: float
    generator: torch.Generator | None
    implementation: str | None


class Layout(NamedTuple):
    """Batch axes, key heads g, query heads r per key head, and whether the inputs have a heads axis."""

    batch: tuple[int, ...]
    groups: int
    per_group: int
    has_heads: bool

    @classmethod
    def of(cls, query: Tensor, key: Tensor | Quantized, value: Tensor | Quantized) -> "Layout":
        """Return the layout of a call; raise ShapeError if the shapes are incompatible."""
        heads, key_heads, value_heads = (t.shape[-3] if t.dim() > 2 else 1 for t in (query, key, value))
        if key_heads != value_heads and key_heads != 1 and value_heads != 1:
            raise ShapeError(
                f"key has {key_heads} heads and value has {value_heads}; the numbers must be equal, or one "
                "of them must be 1."
            )
        groups = key_heads if value_heads == 1 else value_heads  # 0 if either has 0 heads
        heads = groups if heads == 1 else heads
        if heads != groups and (groups == 0 or heads % groups):
            raise ShapeError(
                f"query has {pluralize(heads, 'head')} and {'value' if key_heads == 1 else 'key'} has "
                f"{groups}; the number of query heads must be a multiple of the number of key and value "
                "heads. Heads are axis -3."
            )
        batch = _broadcast([t.shape[:-3] for t in (query, key, value)])
        if batch is None:
            raise ShapeError(
                f"the batch axes of query {tuple(query.shape)}, key {tuple(key.shape)} and value "
                f"{tuple(value.shape)} do not broadcast; the axes before the last three must have equal "
                "sizes or size 1."
            )
        has_heads = max(query.dim(), key.dim(), value.dim()) > 2
        return cls(batch, groups, heads // groups if groups else 1, has_heads)

    @property
    def heads(self) -> int:
        return self.groups * self.per_group

    @property
    def lead(self) -> tuple[int, ...]:
        """Leading axes of output and weights."""
        return (*self.batch, self.heads) if self.has_heads else ()

    def per_query(self, x: Tensor) -> Tensor:
        """Reshape query, bias or mask: … h q · -> … g r q ·. If all heads share x, g and r are 1."""
        x = self._pad(x)
        if x.shape[-3] == 1 and self.heads != 1:
            return x.unsqueeze(-3)
        return x.unflatten(-3, (self.groups, self.per_group))

    def per_key(self, x: Tensor) -> Tensor:
        """Reshape key or value: … g k · -> … g 1 k ·."""
        return self._pad(x).unsqueeze(-3)

    def per_head(self, x: Tensor) -> Tensor:
        """Reshape one value per head, or one value for all heads: (h) or () -> … g r 1 1."""
        return self.per_query(x.reshape(-1, 1, 1))

    def _pad(self, x: Tensor) -> Tensor:
        missing = len(self.batch) + 3 - x.dim()
        return x[(None,) * missing] if missing else x

    def merge(self, x: Tensor) -> Tensor:
        """Convert to the caller's axes: … g r q e -> … h q e, or q e."""
        x = x.flatten(-4, -3)
        return x if self.has_heads else x.squeeze(-3)


def _broadcast(shapes: Sequence[Sequence[int]]) -> tuple[int, ...] | None:
    """Return the broadcast shape, or None if the shapes do not broadcast.

    torch.broadcast_shapes would take longer than a small attention call.
    """
    axes = max(map(len, shapes))
    result = [1] * axes
    for shape in shapes:
        for axis, size in enumerate(shape, axes - len(shape)):
            if size != 1 and result[axis] != 1 and result[axis] != size:
                return None
            result[axis] = size if size != 1 else result[axis]
    return tuple(result)


def prepare(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, call: Call, *, keep_dtype: bool = False
) -> Problem:
    """Check a call and return it as a `Problem`.

    keep_dtype: keep bfloat16 and float16 instead of converting to float32. Only the kernels support this.
    """
    normalize, dropout = as_normalizer(call.normalize), call.dropout
    built_in = type(normalize) in BUILT_IN_TYPES
    call_shape = CallShape(layout.lead, query.shape[-2], key.shape[-2], query.device)
    dtype = query.dtype if keep_dtype or query.dtype is torch.float64 else torch.float32
    prepared, function_scores = _score(call.score, query, key, layout, dtype)
    tensors = {
        "query": prepared.query,
        "key": prepared.key,
        "value": layout.per_key(value.to(dtype)),
    }
    if prepared.vector is not None:
        tensors["vector"] = layout.per_query(prepared.vector[None])

    biases = [*prepared.biases, *function_scores]
    for part in as_biases(call.bias):
        if isinstance(part, RelativeBias):
            lines = sum(name.startswith("line") for name in tensors)
            tensors[f"line{lines}"] = _line(part, layout, call_shape, dtype)
        else:
            biases.append(layout.per_query(_dense(part, call_shape, dtype)))
    tensors.update({f"bias{i}": term for i, term in enumerate(biases)})

    terms = () if call.mask is None else terms_of(as_mask(call.mask), call_shape)
    for i, term in enumerate(terms):
        for name, tensor in term._asdict().items():
            if tensor is not None:
                tensors[f"{name}{i}"] = layout.per_query(tensor)

    sink = normalize.sink() if type(normalize) is Softmax1 or not built_in else None
    if sink is not None:
        tensors["sink"] = _sink(normalize, sink, layout, call_shape, dtype)
        normalize = Softmax1() if type(normalize) is Softmax1 else normalize
    if dropout or any(name.startswith("line") for name in tensors):
        tensors["row"] = layout.per_query(torch.arange(call_shape.queries, device=call_shape.device)[:, None])
    if dropout:
        heads = torch.arange(math.prod((*layout.batch, layout.heads)), device=call_shape.device)
        tensors["head"] = layout.per_query(heads.reshape(*layout.batch, layout.heads, 1, 1))
        seed_device = call_shape.device if call.generator is None else call.generator.device
        seed = torch.randint(2**32 - 1, (), device=seed_device, generator=call.generator)
        tensors["seed"] = layout.per_head(seed.to(call_shape.device))
    name = getattr(call.score, "__name__", type(call.score).__name__)
    config = ProblemConfig(
        normalize,
        prepared.family,
        prepared.scale,
        None if prepared.softcap == math.inf else prepared.softcap,
        dropout,
        len(terms),
        call_shape.queries,
        score=name,
    )
    problem = Problem(config, tensors)
    if not built_in:
        _check_normalizer(problem)
    return problem


def as_normalizer(normalize: Normalizer | Sink) -> Normalizer:
    """Return a normalizer unchanged; for a `Sink`, return its `Softmax1`."""
    if isinstance(normalize, Sink):
        normalizer = normalize()
        if not isinstance(normalizer, Normalizer):
            raise DTypeError(
                f"{type(normalize).__name__}.forward returned {type_name(normalizer)}; it must return "
                "a normalizer: Softmax1(self.score)."
            )
        return normalizer
    if isinstance(normalize, Normalizer):
        return normalize
    if isinstance(normalize, type) and issubclass(normalize, Normalizer | Sink):
        name = normalize.__name__
        raise DTypeError(f"normalize is the class {name}; pass an instance: normalize={name}().")
    name = f"{type(normalize).__module__}.{type(normalize).__qualname__}"
    raise DTypeError(
        f"normalize is {normalize!r} of type {name}, which is not a normalizer; "
        f"pass normalize={keyword_hints.suggest_normalizer(normalize)}, or derive from Normalizer."
    )


def check_arguments(query: Tensor, key: Tensor | Quantized, value: Tensor | Quantized, call: Call) -> None:
    """Raise unless query, key and value are compatible dense tensors, and dropout is a probability."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if isinstance(tensor, Quantized) and name != "query":
            continue
        if not isinstance(tensor, Tensor):
            raise DTypeError(f"{name} is {type_name(tensor)}; pass a tensor: torch.as_tensor({name}).")
        check_dense(name, tensor)
    check_shapes(query, key, value)
    cure = "It is the dropout probability."
    check_number("attention got dropout", call.dropout, min=0, below=1, cure=cure)
    if call.generator is not None and not isinstance(call.generator, torch.Generator):
        raise DTypeError(
            f"generator is {call.generator!r}; pass a torch.Generator: torch.Generator().manual_seed(0)."
        )


def check_shapes(query: Tensor, key: Tensor | Quantized, value: Tensor | Quantized) -> None:
    """Raise unless dtypes and devices are equal and key and value have the same number of tokens."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() < 2:
            raise ShapeError(
                f"{name} has shape {tuple(tensor.shape)}; it needs at least 2 axes, (tokens, features). "
                f"For a single vector, pass {name}[None]."
            )
        if not tensor.is_floating_point():
            raise DTypeError(
                f"{name} has dtype {tensor.dtype}; it must be floating point. Use {name}.float()."
            )
        if tensor.dtype != query.dtype:
            raise DTypeError(
                f"query has dtype {query.dtype} and {name} has {tensor.dtype}; the dtypes must be equal. "
                f"Use {name}.to(query.dtype)."
            )
        if tensor.device != query.device:
            raise DeviceError(
                f"query is on {query.device} and {name} on {tensor.device}; use {name}.to(query.device)."
            )
    if key.shape[-2] != value.shape[-2]:
        raise ShapeError(
            f"key has {pluralize(key.shape[-2], 'token')} and value has {int(value.shape[-2]):,}; they must "
            "match along axis -2."
        )


def _check_normalizer(problem: Problem) -> None:
    """Check a custom normalizer on the last rows, because a causal mask hides most keys from the first."""
    if not concrete(*problem.tensors.values()) or 0 in (*problem.lead(), problem.queries, problem.keys):
        return
    lead = tuple(slice(0, min(size, 2)) for size in problem.lead()[:-1])
    rows = slice(max(problem.queries - _CHECKED_ROWS, 0), problem.queries)
    part = problem.without("value").part(Tile(lead, rows, slice(0, problem.keys)))
    with torch.no_grad():
        scores = reference.scores(part)
        validation.normalizer(problem.config.normalize, scores)
        sums = reference.apply_normalizer(part, scores, reference.tau(part, scores)).sum(-1)
    if "sink" not in problem.tensors:
        validation.row_sums(problem.config.normalize, sums, (scores != -math.inf).any(-1))


def _score(
    score: Score | ScoreFunction, query: Tensor, key: Tensor, layout: Layout, dtype: torch.dtype
) -> tuple[Prepared, list[Tensor]]:
    """Return the prepared score, and the dense scores if the score is a function."""
    check_score(score)
    if isinstance(score, nn.Module):
        check_device("the score", score, query.device)
    if isinstance(score, Score):
        per_query, per_key = layout.per_query(query.to(dtype)), layout.per_key(key.to(dtype))
        prepared = score.prepare(per_query, per_key)
        if type(score) in BUILT_IN and "prepare" not in vars(score):  # the instance may override `prepare`
            return prepared, []
        lead = (*layout.batch, layout.groups, layout.per_group)
        return validation.prepared(score, prepared, per_query, per_key, lead), []
    grouped = layout.per_group > 1 and key.dim() > 2 and key.shape[-3] > 1
    repeated = key.repeat_interleave(layout.per_group, -3) if grouped else key
    shape = (*layout.lead, query.shape[-2], key.shape[-2])
    scores = validation.function_scores(score(query, repeated), query, repeated, shape)
    # query and key have width zero; the function's scores are added as a bias
    empty = Prepared(layout.per_query(query[..., :0].to(dtype)), layout.per_key(key[..., :0].to(dtype)))
    return empty, [layout.per_query(torch.atleast_2d(scores.to(dtype)))]


def as_biases(bias: Bias | None) -> Sequence[Tensor | RelativeBias]:
    """Return the bias argument as a tuple."""
    if bias is None:
        return ()
    return tuple(bias) if isinstance(bias, list | tuple) else (bias,)


def _dense(bias: Tensor, call_shape: CallShape, dtype: torch.dtype) -> Tensor:
    if not isinstance(bias, Tensor):
        name = bias.__name__ if isinstance(bias, type) else type(bias).__name__
        cure = "pass a tensor, a relative bias such as ALiBi(heads), or a list of them"
        if isinstance(bias, type):
            cure = f"pass an instance, {name}(…)"
        elif isinstance(bias, Mask):
            cure = "pass masks as mask="
        kind = f"the class {name}" if isinstance(bias, type) else type_name(bias)
        raise DTypeError(f"bias is {kind}, which cannot be added to scores; {cure}.")
    if not bias.is_floating_point():
        cure = (
            "Pass a boolean tensor (True = may attend) as mask=."
            if bias.dtype is torch.bool
            else "Use bias.float()."
        )
        raise DTypeError(
            f"bias has dtype {bias.dtype}; it is added to the scores, so it must be floating point. {cure}"
        )
    shape = (*call_shape.lead, call_shape.queries, call_shape.keys)
    if not validation.broadcasts(bias.shape, shape):
        raise ShapeError(
            f"bias has shape {tuple(bias.shape)}, which does not broadcast to the shape of the scores, "
            f"{shape}. Insert axes of size 1 where the bias is shared."
        )
    check_dense("bias", bias)
    check_device("bias", bias, call_shape.device)
    return torch.atleast_2d(bias.to(dtype))


def _line(bias: RelativeBias, layout: Layout, call_shape: CallShape, dtype: torch.dtype) -> Tensor:
    check_device("bias", bias, call_shape.device)
    length = max(call_shape.queries + call_shape.keys - 1, 0)
    result = bias.line(call_shape.queries, call_shape.keys, call_shape.device)
    line = validation.line(bias, result, layout.heads, length, call_shape.device).to(dtype)
    return layout.per_query(line.unsqueeze(-2))  # h l -> h 1 l


def _sink(
    normalize: Normalizer, sink: Tensor | float, layout: Layout, call_shape: CallShape, dtype: torch.dtype
) -> Tensor:
    sink = validation.sink(normalize, sink, layout.heads, call_shape.device)
    tensor = sink if isinstance(sink, Tensor) else torch.tensor(sink, dtype=dtype, device=call_shape.device)
    return layout.per_head(tensor.to(dtype))


def check_score(score: object) -> None:
    """Raise unless `score` is a `Score` or a function."""
    if isinstance(score, type):
        raise DTypeError(f"score is the class {score.__name__}; pass an instance: score={score.__name__}(…).")
    if not isinstance(score, Score) and not callable(score):
        raise DTypeError(
            f"score is {type_name(score)}; pass a score, such as {keyword_hints.suggest_score(score)}, or a "
            "function of (query, key)."
        )

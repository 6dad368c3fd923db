"""Cross-entropy over a vocabulary in linear memory: the logits are computed a few rows at a time.

Let z = x Wᵀ + b, let p = softmax(z), and let y be the smoothed one-hot label (Szegedy et al. 2016, section
7). The loss of a row is −y · log p, and its gradients are

    d = p − y        dx = d W        dW = dᵀ x        db = d

The gradients are computed in the forward pass, while the logits exist; the backward pass only scales them.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from regard._util.checks import check_int, check_number
from regard.errors import ArgumentError, DeviceError, DTypeError, ShapeError
from regard.mechanism.torch_state import transformed

IGNORE = -100  # torch's default ignore_index
# bytes per block of logits: enough rows for fast matrix products, but small enough for the cache
_BYTES = 4 * 2**20
_LOW = (torch.bfloat16, torch.float16)


def vocabulary_loss(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    *,
    label_smoothing: float = 0.0,
    ignore_index: int = IGNORE,
) -> Tensor:
    """Return the mean cross-entropy of softmax(x weightᵀ + bias), without storing all logits.

    x: (…, m). weight: (V, m). bias: (V) or None. labels: (…); labels equal to `ignore_index` are skipped.
    The result equals F.cross_entropy(F.linear(x, weight, bias), labels, label_smoothing=label_smoothing,
    ignore_index=ignore_index), except that it returns 0 if all labels are ignored. For bfloat16 and float16
    inputs, sums and the result are float32. Second derivatives are not supported.

    >>> import torch
    >>> from regard.models.loss import vocabulary_loss
    >>> x, weight = torch.zeros(5, 4), torch.randn(100, 4)
    >>> vocabulary_loss(x, weight, None, torch.arange(5))  # uniform: log 100
    tensor(4.6052)
    >>> vocabulary_loss(x, weight, None, torch.tensor([1, 2, 3, 100, -100]))
    Traceback (most recent call last):
    regard.errors.ArgumentError: Label 100 is out of range for a vocabulary of 100. ...
    """
    _check(x, weight, bias, labels)
    check_number("vocabulary_loss got label_smoothing", label_smoothing, min=0, below=1)
    check_int("vocabulary_loss got ignore_index", ignore_index, min=-(2**63))
    rows, dtype = x.reshape(-1, x.shape[-1]), _autocast(x) or x.dtype
    rows, weight, flat = rows.to(dtype), weight.to(dtype), labels.reshape(-1).long()
    bias = None if bias is None else bias.to(dtype)
    if transformed():  # torch.func transforms need all logits
        options: dict[str, Any] = {"label_smoothing": label_smoothing, "ignore_index": ignore_index}
        total = F.cross_entropy(F.linear(rows, weight, bias), flat, reduction="sum", **options)
        return total / (flat != ignore_index).sum().clamp(min=1)
    grad = torch.is_grad_enabled()
    needs = [grad and t is not None and t.requires_grad for t in (rows, weight, bias)]
    return _loss(rows, weight, bias, flat, float(label_smoothing), ignore_index, needs)[0]


@torch.library.custom_op("regard::vocabulary_loss", mutates_args=())
def _loss(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    label_smoothing: float,
    ignore_index: int,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the mean loss, the number of labels, and gradients of the summed loss (empty if not needed)."""
    kept = labels != ignore_index
    n = int(kept.sum())
    _check_labels(labels[kept] if n < len(labels) else labels, len(weight))
    gradients = _empty_gradients(x, weight, needs)
    if n == 0:
        total = x.new_zeros((), dtype=_wide(x.dtype))
        for gradient in gradients:
            gradient.zero_()
    elif n == len(labels):
        total = _sum(x, weight, bias, labels, label_smoothing, gradients)
    else:  # skip ignored rows
        index = kept.nonzero().squeeze(1)
        partial = (gradients[0].new_empty(n if needs[0] else 0, x.shape[1]), *gradients[1:])
        total = _sum(x[index], weight, bias, labels[index], label_smoothing, partial)
        if needs[0]:
            gradients[0].zero_()[index] = partial[0]
    return total / max(n, 1), labels.new_full((), n), *gradients


def _sum(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    label_smoothing: float,
    gradients: tuple[Tensor, ...],
) -> Tensor:
    """Return the summed loss, and write its gradients to the non-empty tensors in `gradients`."""
    n, size, wide = len(x), len(weight), _wide(x.dtype)
    step = max(1, min(n, _BYTES // (size * wide.itemsize)))
    buffer = x.new_empty(step, size, dtype=wide)
    total = x.new_zeros((), dtype=wide)
    dweight = _accumulator(gradients[1], wide)
    dbias = _accumulator(gradients[2], wide)
    with torch.autocast(x.device.type, enabled=False):
        for start in range(0, n, step):
            rows = slice(start, min(start + step, n))
            block, target = x[rows], labels[rows, None]
            logs = _log_softmax(block, weight, bias, buffer[: len(block)])
            total -= (1 - label_smoothing) * logs.gather(1, target).sum()
            if label_smoothing:
                total -= label_smoothing / size * logs.sum()
            if not any(map(torch.numel, gradients)):
                continue
            d = logs.exp_()
            if label_smoothing:
                d.sub_(label_smoothing / size)
            d.scatter_add_(1, target, d.new_full((), label_smoothing - 1).expand_as(target))
            if dbias.numel():
                dbias += d.sum(0)
            d = d.to(x.dtype)
            if gradients[0].numel():
                torch.mm(d, weight, out=gradients[0][rows])
            if dweight.numel():
                _add_product(dweight, d, block, first=start == 0)
    for gradient, accumulated in ((gradients[1], dweight), (gradients[2], dbias)):
        if gradient is not accumulated:
            gradient.copy_(accumulated)
    return total


def _log_softmax(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    """Compute log softmax(x weightᵀ + bias) and write it to `out`."""
    if x.dtype != out.dtype:
        out.copy_(torch.mm(x, weight.T))
        if bias is not None:
            out.add_(bias)
    elif bias is None:
        torch.mm(x, weight.T, out=out)
    else:
        torch.addmm(bias, x, weight.T, out=out)
    return torch._log_softmax(out, 1, False, out=out)


def _add_product(total: Tensor, d: Tensor, x: Tensor, first: bool) -> None:
    """Add dᵀ x to `total`, or overwrite `total` for the first block."""
    if total.dtype == d.dtype:
        total.addmm_(d.T, x, beta=0 if first else 1)
    elif first:
        total.copy_(torch.mm(d.T, x))
    else:
        total.add_(torch.mm(d.T, x))


def _accumulator(gradient: Tensor, wide: torch.dtype) -> Tensor:
    """Return a float32 tensor to accumulate a 16-bit gradient, or the gradient itself for other dtypes."""
    summed = gradient if gradient.dtype == wide else torch.empty_like(gradient, dtype=wide)
    return summed.zero_() if summed.dim() == 1 else summed


def _empty_gradients(x: Tensor, weight: Tensor, needs: list[bool]) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate uninitialized tensors for the needed gradients, and empty tensors for the others."""
    (n, m), size = x.shape, len(weight)
    return (
        x.new_empty(n if needs[0] else 0, m),
        x.new_empty(size if needs[1] else 0, m),
        x.new_empty(size if needs[2] else 0),
    )


@_loss.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    label_smoothing: float,
    ignore_index: int,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return x.new_empty((), dtype=_wide(x.dtype)), labels.new_empty(()), *_empty_gradients(x, weight, needs)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.needs = inputs[-1]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output[1:])


def _backward(ctx: Any, grad: Tensor | None, _: None, *second: Tensor | None) -> tuple[Tensor | None, ...]:
    """Scale the gradients of the summed loss to gradients of the mean."""
    if any(gradient is not None for gradient in second):
        raise ArgumentError(
            "vocabulary_loss does not support second derivatives; use "
            "F.cross_entropy(F.linear(x, weight, bias), labels)."
        )
    n, *gradients = ctx.saved_tensors
    if grad is None:
        return (None,) * 7
    scale = grad / n.clamp(min=1)
    scaled = [
        gradient * scale if needed else None for gradient, needed in zip(gradients, ctx.needs, strict=True)
    ]
    return *scaled, None, None, None, None


_loss.register_autograd(_backward, setup_context=_setup_context)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for sums over the vocabulary."""
    return torch.float32 if dtype in _LOW else dtype


def _autocast(x: Tensor) -> torch.dtype | None:
    """Return the autocast dtype, or None if autocast is off or, as in torch, if the input is float64."""
    kind = x.device.type
    if x.dtype is torch.float64 or kind == "meta" or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> None:
    if x.dim() < 1 or weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        raise ShapeError(
            f"x has shape {tuple(x.shape)} and weight {tuple(weight.shape)}; they must be (…, m) and (V, m)."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ShapeError(
            f"bias has shape {tuple(bias.shape)} and weight {tuple(weight.shape)}; bias must be "
            f"({weight.shape[0]},)."
        )
    if labels.shape != x.shape[:-1]:
        raise ShapeError(
            f"labels have shape {tuple(labels.shape)} and x {tuple(x.shape)}; labels must be "
            f"{tuple(x.shape[:-1])}."
        )
    if labels.is_floating_point() or labels.dtype is torch.bool or labels.is_complex():
        raise DTypeError(f"labels have dtype {labels.dtype}; pass integers: labels.long().")
    for name, tensor in (("weight", weight), ("bias", bias), ("labels", labels)):
        if tensor is not None and tensor.device != x.device:
            raise DeviceError(
                f"x is on {x.device} and {name} on {tensor.device}; use {name}.to({str(x.device)!r})."
            )
    mixed = [t for t in (weight, bias) if t is not None and t.dtype != x.dtype]
    if not x.is_floating_point() or (mixed and _autocast(x) is None):
        others = ", ".join(str(t.dtype) for t in (weight, bias) if t is not None)
        raise DTypeError(
            f"x has dtype {x.dtype} and the parameters have {others}; they must have the same floating-point "
            "dtype. Use x.to(weight.dtype)."
        )


def _check_labels(labels: Tensor, size: int) -> None:
    if not labels.numel():
        return
    low, high = (int(bound) for bound in labels.aminmax())
    if low < 0 or high >= size:
        label = low if low < 0 else high
        raise ArgumentError(
            f"Label {label} is out of range for a vocabulary of {size}. To skip such labels, pass "
            f"ignore_index={label}."
        )

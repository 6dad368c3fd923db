"""Reference weights: the `output_attentions` of a model, or the outputs of its softmax functions."""

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from benchmarks.architectures.inputs import run


def references(eager: Any, batch: dict[str, Tensor]) -> tuple[str, list[Tensor], Any]:
    """Return the kind of reference, its weights, and the output of the model.

    The weights are eager's attentions if it returns any; otherwise, the softmax outputs that are factors of
    later products, and the weights of SDPA calls.
    """
    recorder = SoftmaxRecorder()
    with recorder:
        output = run(eager, batch)
    try:
        attentions = eager_attentions(run(eager, batch, output_attentions=True, return_dict=True))
    except (TypeError, ValueError):
        attentions = []
    if any(not 0 <= float(weights.min()) <= float(weights.max()) <= 1.001 for weights in attentions):
        attentions = []  # squeezebert and prophetnet return scores
    return ("attentions", attentions, output) if attentions else ("softmax", recorder.used, output)


def eager_attentions(output: Any) -> list[Tensor]:
    """Return all attentions in an eager output."""
    attentions: list[Tensor] = []
    items = output.items() if hasattr(output, "items") else []
    for name, value in items:
        if hasattr(value, "items"):
            attentions += eager_attentions(value)
        elif "attentions" in name and isinstance(value, tuple | list):
            attentions += _flat(value)
    return attentions


def _flat(x: Any) -> list[Tensor]:
    if isinstance(x, Tensor):
        return [x] if x.dim() >= 3 else []
    return [tensor for item in x or () for tensor in _flat(item)] if isinstance(x, tuple | list) else []


def sdpa_weights(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute the weights of a call to scaled_dot_product_attention from its definition, in float64."""
    key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3) if enable_gqa else key
    scores = query.double() @ key.double().mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, float("-inf"))
    elif attn_mask is not None:
        scores = scores + attn_mask
    return torch.softmax(scores, -1).nan_to_num().float()  # rows without visible keys are 0


class SoftmaxRecorder(TorchFunctionMode):
    """Records softmax outputs (…, q, k) that are a factor in a later product, and weights of SDPA calls."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Tensor] = []
        self.used: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name == "softmax" and output.dim() >= 3:
            self.outputs.append(output)
        elif name == "scaled_dot_product_attention":
            call = inspect.signature(sdpa_weights).bind(*args, **(kwargs or {}))
            self.used.append(sdpa_weights(*call.args, **call.kwargs))
        elif name in ("matmul", "bmm", "einsum", "baddbmm"):
            factors = _flat(args)
            self.used += [
                w for w in self.outputs
                if any(x.data_ptr() == w.data_ptr() and x.numel() == w.numel() for x in factors)
                and all(w is not other for other in self.used)
            ]  # fmt: skip
        return output

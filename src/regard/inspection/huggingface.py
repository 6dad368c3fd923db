"""Hugging Face models on regard: `enable()`, then attn_implementation="regard"."""

import math
import sys
import weakref
from collections.abc import Hashable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.errors import ArgumentError
from regard.inspection.interventions import through_interface
from regard.inspection.layers import own_attention
from regard.inspection.mask_compaction import cheapest, hides, readable
from regard.inspection.tensor_like import Attentions
from regard.mechanism.mask_algebra import Mask
from regard.mechanism.masks import Causal
from regard.mechanism.normalizers import Softmax, Softmax1
from regard.mechanism.operator import Options, attend, attention
from regard.mechanism.scores import ScaledDot

NAME = "regard"
_CAUSAL, _SOFTMAX = Causal(align="start"), Softmax()
_ONE_SCORE = lru_cache(maxsize=256)(ScaledDot)
_COLLECTOR: Any = None  # transformers' own: what the running model collects from its modules


def enable() -> None:
    """Make "regard" an attention implementation of transformers, with its masks.

    Then `from_pretrained(…, attn_implementation="regard")` and `model.set_attn_implementation("regard")`
    work, also for `generate`. With `output_attentions=True` passed to the call, `outputs.attentions` holds
    lazy weights, which pass for tensors.

    >>> import regard, torch, transformers
    >>> regard.huggingface.enable()
    >>> config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=9)
    >>> model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="regard").eval()
    >>> model(torch.tensor([[1, 2, 3]]), output_attentions=True).attentions[0].shape
    torch.Size([1, 2, 3, 3])
    """
    global _COLLECTOR
    attentions, masks = _interfaces()
    with suppress(ImportError):
        from transformers.utils import output_capturing

        _COLLECTOR = output_capturing._active_collector
    attentions.register(NAME, hosted_attention)
    masks.register(NAME, hosted_mask)


def check(model: nn.Module) -> None:
    """Raise unless a model computes on regard what it computes on eager attention.

    All its attentions must go through transformers' interface: a model with attention of its own, Bloom for
    one, can carry any implementation's name. After `enable()`, a model that reads token ids also runs on a
    few of them, on regard and on eager: the outputs must agree, and none may depend on later tokens unless
    eager's does.

    >>> import regard, transformers
    >>> sizes = {"hidden_size": 8, "n_layer": 1, "n_head": 2, "vocab_size": 9}
    >>> regard.huggingface.check(transformers.BloomModel(transformers.BloomConfig(**sizes)))
    Traceback (most recent call last):
    regard.errors.ArgumentError: BloomAttention computes attention of its own, and not on regard; ...
    """
    own = own_attention(model, through_interface)
    if own:
        raise ArgumentError(
            f"{', '.join(own)} computes attention of its own, and not on regard; if it calls torch's SDPA, "
            "`with regard.patched():` serves it."
        )
    if NAME in _interfaces()[0]._global_mapping:
        _try(model)


def disable() -> None:
    """Undo `enable`. Set models that still run on regard to another implementation first.

    >>> import regard
    >>> regard.huggingface.enable()
    >>> regard.huggingface.disable()
    """
    for interface in _interfaces():
        interface._global_mapping.pop(NAME, None)


def _try(model: nn.Module) -> None:
    """Run a model on a few tokens, on regard and on eager, and raise where they disagree."""
    ids = torch.arange(3, 9, device=next((p.device for p in model.parameters()), None))[None]
    decoder = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
    changed = ids.clone()
    changed[:, -1] = 2
    results = {}
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        for implementation in ("eager", NAME):
            with _set_to(model, implementation), torch.no_grad():
                outputs = []
                for last in (ids, changed):
                    given = {"input_ids": ids, "decoder_input_ids": last} if decoder else {"input_ids": last}
                    outputs.append(model(**given)[0])
            results[implementation] = outputs
    except Exception:
        if results:
            raise  # it runs on eager, and not on regard
        return  # it does not read plain token ids
    finally:
        for module in training:
            module.training = True
    (theirs, theirs_changed), (ours, ours_changed) = results["eager"], results[NAME]
    if (
        not theirs.is_floating_point()
        or theirs.shape[:2] != ids.shape
        or not bool(torch.isfinite(theirs).all())
    ):
        return
    name, eps, scale = type(model).__name__, torch.finfo(theirs.dtype).eps, float(theirs.abs().max())
    here, there = (
        float((a - b)[:, :-1].abs().max()) for a, b in ((ours, ours_changed), (theirs, theirs_changed))
    )
    if there <= 4 * eps * scale < here:
        raise ArgumentError(
            f"{name} on regard reads the future: another last token changes earlier outputs by {here:.2g}, "
            f'on eager by {there:.2g}. Use attn_implementation="eager" for this model.'
        )
    apart = float((ours - theirs).abs().max())
    if not apart <= 10 * math.sqrt(eps) * max(scale, eps):
        raise ArgumentError(
            f"{name} on regard is off by {apart:.2g} from eager, where the largest output is {scale:.2g}. "
            'Use attn_implementation="eager" for this model.'
        )


@contextmanager
def _set_to(model: nn.Module, implementation: str) -> Iterator[None]:
    """A model on another implementation for a while."""
    configs: list[Any] = []
    waiting: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    while waiting:
        config = waiting.pop()
        if hasattr(config, "_attn_implementation_internal") and all(config is not one for one in configs):
            configs.append(config)
            waiting += [getattr(config, name, None) for name in config.sub_configs]
    before = [config._attn_implementation_internal for config in configs]
    model.set_attn_implementation(implementation)  # type: ignore[operator]
    try:
        yield
    finally:
        for config, name in zip(configs, before, strict=True):
            config._attn_implementation_internal = name


def _interfaces() -> tuple[Any, Any]:
    try:
        from transformers.masking_utils import AttentionMaskInterface
        from transformers.modeling_utils import AttentionInterface
    except ImportError:
        raise ArgumentError(
            "regard.huggingface needs the package transformers, 5.3 or newer: pip install transformers."
        ) from None
    return AttentionInterface, AttentionMaskInterface


def hosted_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **more: Any,
) -> tuple[Tensor, Attentions | None]:
    """An attention as transformers calls it: (b, h, q, d), (b, g, k, d), (b, g, k, e) → (b, q, h, e).

    Beside it the lazy weights, if the model was asked for its attentions.
    """
    if more.get("cache") is not None:  # pages of continuous batching
        layer = getattr(module, "layer_idx", 0)
        key, value = more["cache"].update(key_states=key, value_states=value, layer_idx=layer, kwargs=more)
    wanted = _asked_for_weights(more)
    seen = _seen(module, query, key, attention_mask, is_causal, more)
    if seen.span is not None and not wanted:  # nobody sees the keys before and behind
        keys = slice(*seen.span)
        key, value, seen = key[:, :, keys], value[:, :, keys], seen.inside
    elif wanted and (key.shape[2] != query.shape[2] or key.is_inference()):
        key = key.clone()  # a static cache is written to again
    query, score = _score(query, scaling, more.get("softcap"))
    sink = more.get("s_aux")
    options = Options(
        score=score,
        mask=seen.mask,
        bias=seen.bias,
        normalize=_SOFTMAX if sink is None else Softmax1(sink),
        dropout=dropout,
    )
    if not wanted:
        return attention(query, key, value, **options).transpose(1, 2).contiguous(), None
    output, weights = attend(query, key, value, **options)
    return output.transpose(1, 2).contiguous(), Attentions.of(weights)


class _Seen(NamedTuple):
    """Who sees whom: a mask, numbers to add, and the keys that matter at all, if they are fewer."""

    mask: Mask | Tensor | None = None
    bias: Any = None
    span: tuple[int, int] | None = None
    causal: bool = False

    @property
    def inside(self) -> "_Seen":
        """The same among the keys of the span alone."""
        bias = None if self.bias is None or self.span is None else self.bias[..., slice(*self.span)]
        return _Seen(_CAUSAL if self.causal else None, bias)


_EVERYTHING, _BACK = _Seen(), _Seen(_CAUSAL, causal=True)


def _seen(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    attention_mask: Tensor | None,
    is_causal: bool | None,
    more: dict[str, Any],
) -> _Seen:
    bias, queries, keys = more.get("position_bias"), query.shape[2], key.shape[2]
    causal = queries > 1 and _looks_back_only(module, is_causal)
    mask = _chosen(module, query, key, attention_mask, causal, more) if more else attention_mask
    if mask is not None:
        found, additive, span = _split(mask, key)
        both = _both(bias, additive)
        return _Seen(found, both, span if both is None else None)
    if not causal:
        return _EVERYTHING if bias is None else _Seen(bias=bias)
    if keys > queries:  # a static cache that was empty
        return _Seen(_CAUSAL, bias, (0, queries), causal=True)
    return _BACK if bias is None else _Seen(_CAUSAL, bias, causal=True)


def hosted_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    **more: Any,
) -> Tensor | None:
    """A mask as transformers asks for it: boolean (b, 1, q, k), or None where causality says it all."""
    from transformers import masking_utils

    sizes = (batch_size, q_length, kv_length, q_offset, kv_offset)
    if torch.compiler.is_compiling():
        more["allow_is_causal_skip"] = False  # which model asks cannot be found out here
        return masking_utils.sdpa_mask(*sizes, attention_mask=attention_mask, **more)
    if not _flags_suffice(_asking(sys._getframe(1))):
        return masking_utils.eager_mask(*sizes, attention_mask=attention_mask, **more)
    with torch.inference_mode(False):  # so that changes are counted
        everybody = more.get("mask_function") is masking_utils.bidirectional_mask_function
        if everybody and more.get("allow_is_bidirectional_skip") and not more.get("use_vmap"):
            return _padding(attention_mask, sizes)
        return masking_utils.sdpa_mask(*sizes, attention_mask=attention_mask, **more)


_SUFFICE: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()


def _asking(frame: FrameType | None) -> nn.Module | None:
    """The model that asks for a mask: the nearest one up the stack."""
    from transformers import PreTrainedModel

    while frame is not None:
        code = frame.f_code
        if code.co_argcount and code.co_varnames[0] == "self":
            model = frame.f_locals.get("self")
            if isinstance(model, PreTrainedModel):
                return model
        frame = frame.f_back
    return None


def _flags_suffice(model: nn.Module | None) -> bool:
    """Whether a mask can be left out, because the attentions of a model say by `is_causal` what it would say.

    transformers leaves masks out for classes that support SDPA. Others may rely on the mask alone: the
    attentions of nllb-moe's decoder have is_causal=False, and without a mask they would read the future.
    They may also have attention of their own, which adds the mask to the scores. They get the masks that
    eager gets, unless every attention goes through the interface and is causal, as those of gemma2 and
    gpt-oss are.
    """
    if model is None:
        return False
    if model._supports_sdpa:
        return True
    if model not in _SUFFICE:
        hosted = [module for module in model.modules() if through_interface(module)]
        causal = all(getattr(module, "is_causal", None) is True for module in hosted)
        _SUFFICE[model] = bool(hosted) and causal and not own_attention(model, through_interface)
    return _SUFFICE[model]


@lru_cache(maxsize=1024)
def _causal_by_default(kind: Hashable) -> bool:
    """Whether an attention that has no `is_causal` is causal without a mask: as SDPA or as eager has it."""
    from transformers import PreTrainedModel

    assert isinstance(kind, type)
    home = vars(sys.modules.get(kind.__module__, object))
    models = [
        one
        for one in home.values()
        if isinstance(one, type) and issubclass(one, PreTrainedModel) and one.__module__ == kind.__module__
    ]
    return not models or any(model._supports_sdpa for model in models)


def _padding(attention_mask: Tensor | None, sizes: tuple[int, ...]) -> Tensor | None:
    """A mask that only hides padding, once for all rows."""
    batch, queries, keys, _, offset = sizes
    if attention_mask is None or (readable(attention_mask) and bool(attention_mask.all())):
        return None
    short = keys + offset - attention_mask.shape[-1]
    if short > 0:
        attention_mask = nn.functional.pad(attention_mask, (0, short))
    seen = attention_mask[:, offset : offset + keys].bool().clone()
    return seen[:, None, None].expand(batch, 1, queries, keys)


def _asked_for_weights(more: dict[str, Any]) -> bool:
    """Whether the model was called with output_attentions=True: it says so, or collects them."""
    if more.get("output_attentions"):
        return True
    collected = None if _COLLECTOR is None else _COLLECTOR.get()
    return any("attentions" in name for name in collected or ())


def _looks_back_only(module: nn.Module, is_causal: bool | None) -> bool:
    if is_causal is None:
        is_causal = getattr(module, "is_causal", None)
    return _causal_by_default(type(module)) if is_causal is None else bool(is_causal)  # type: ignore[arg-type]


def _split(mask: Tensor, key: Tensor) -> tuple[Mask | Tensor | None, Tensor | None, tuple[int, int] | None]:
    """A mask as a regard mask, as numbers to add, and the keys that all rows see, if only these matter."""
    keys = key.shape[2]
    if mask.shape[-1] > keys:
        mask = mask[..., :keys]
    if mask.dtype is not torch.bool:
        plain = not mask.requires_grad and readable(mask)
        seen = hides(mask) if plain else None
        if seen is None:
            return None, mask, None
        mask = seen
    found, span = cheapest(mask)
    return found, None, span if found is not None and mask.shape[-1] == keys else None


def _both(bias: Tensor | None, additive: Tensor | None) -> Any:
    if bias is None or additive is None:
        return additive if bias is None else bias
    return [bias, additive]


def _score(query: Tensor, scaling: Any, softcap: float | None) -> tuple[Tensor, ScaledDot]:
    if isinstance(scaling, Tensor):  # learned
        return query * scaling, ScaledDot(1.0, softcap)
    make = ScaledDot if torch.compiler.is_compiling() else _ONE_SCORE
    return query, make(scaling, softcap)


def _chosen(
    module: nn.Module, query: Tensor, key: Tensor, mask: Tensor | None, causal: bool, more: dict[str, Any]
) -> Tensor | None:
    """The mask, with the few keys that an indexer chose for each query."""
    if more.get("block_indices") is not None:
        places = more.get("position_ids")
        if places is None:
            places = torch.arange(key.shape[2] - query.shape[2], key.shape[2], device=query.device)
        places = torch.atleast_2d(places).expand(query.shape[0], -1)
        return module.indexer.build_block_mask(  # type: ignore[union-attr, operator]
            more["block_indices"], mask, key.shape[2], query.dtype, query.device, places
        )
    if more.get("indices") is None:
        return mask
    few = more["indices"].long()  # b q n
    seen = few.new_zeros(*few.shape[:2], key.shape[2], dtype=torch.bool).scatter(-1, few, True)[:, None]
    if mask is None:
        return seen & _CAUSAL.dense(query.shape[2], key.shape[2]).to(seen.device) if causal else seen
    if mask.dtype is torch.bool:
        return mask & seen
    return mask.masked_fill(~seen, torch.finfo(mask.dtype).min)

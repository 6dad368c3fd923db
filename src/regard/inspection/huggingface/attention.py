"""The attention implementation "regard" for transformers, and the functions that run models on it."""

import math
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard._util.extras import install_command, require
from regard._util.name_hints import hint_arguments
from regard._util.text import type_name
from regard.errors import ArgumentError
from regard.inspection.calls.mask_reading import as_boolean, compact, readable
from regard.inspection.editing.interventions import uses_interface
from regard.inspection.hooks.interception import calling_module
from regard.inspection.hooks.interface_call import InterfaceCall, check_keywords, eager_function, parse
from regard.inspection.huggingface import packing
from regard.inspection.layers import own_attention
from regard.mechanism.masks.algebra import Mask
from regard.mechanism.masks.by_position import Causal
from regard.mechanism.normalizers import Softmax, Softmax1
from regard.mechanism.operator import Options, attend, attention
from regard.mechanism.quantized import Quantized
from regard.mechanism.scores import ScaledDot
from regard.mechanism.weights.weights import Weights
from regard.models.layers.dropout import eval_mode

NAME = "regard"
_CAUSAL, _SOFTMAX = Causal(align="start"), Softmax()
_cached_score = lru_cache(maxsize=256)(ScaledDot)
_COLLECTOR: Any = None  # transformers' context variable for the outputs that the running model collects


@hint_arguments
def enable() -> None:
    """Register "regard" as an attention implementation of transformers, with its mask function.

    Then use `from_pretrained(…, attn_implementation="regard")` or `model.set_attn_implementation("regard")`;
    `generate` is supported. If the model is called with `output_attentions=True`, `outputs.attentions`
    contains lazy weights that behave like tensors.

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
    """Raise an ArgumentError if the outputs of a model with regard and with eager attention differ.

    All attention layers of the model must use the attention interface of transformers. Models with their own
    attention, such as Bloom, accept any implementation name and ignore it. After `enable()`, a model that
    takes token ids is also run on a few tokens. Its outputs must match eager attention, and may depend on
    later tokens only if they do so with eager attention.

    >>> import regard, transformers
    >>> sizes = {"hidden_size": 8, "n_layer": 1, "n_head": 2, "vocab_size": 9}
    >>> regard.huggingface.check(transformers.BloomModel(transformers.BloomConfig(**sizes)))
    Traceback (most recent call last):
    regard.errors.ArgumentError: The attention of BloomAttention cannot be replaced: it does not use ...
    """
    own = own_attention(model, uses_interface)
    if own:
        raise ArgumentError(
            f"The attention of {', '.join(own)} cannot be replaced: it does not use transformers' attention "
            "interface. If it calls torch's SDPA, use `with regard.patched():`."
        )
    if NAME in _interfaces()[0]._global_mapping:
        _compare_with_eager(model)


def disable() -> None:
    """Undo `enable`. First switch all models that use "regard" to another implementation.

    >>> import regard
    >>> regard.huggingface.enable()
    >>> regard.huggingface.disable()
    """
    for interface in _interfaces():
        interface._global_mapping.pop(NAME, None)


def pack(model: nn.Module) -> nn.Module:
    """Run the layers of a model without padding, with the same outputs. Returns the model.

    Supports text encoders and decoders of transformers that use its attention interface, and models that
    contain them, such as a SentenceTransformer, in inference and training. A padded batch with an
    `attention_mask` costs only as much as its real tokens; outputs at padding are 0. A loss must ignore the
    outputs at padding. With padding on the left, a language model predicts the first token of a text from
    padding: set the label of this token to -100. `unpack` restores the model.

    Without gradients, float32 linear layers run in regard's kernels on AMD processors (Zen 3 and newer),
    where torch's are slower.

    The model runs with padding, as before, inside `torch.compile`, `regard.watch` and `regard.edit`, if there
    is padding between tokens, and if it is called with a key-value cache, `output_attentions=True` or
    `output_router_logits=True`. A packed model creates a cache only if `use_cache=True`.

    `pack` runs the model on a few tokens with and without padding, and raises an error if the outputs differ.

    >>> import regard, torch, transformers
    >>> config = transformers.BertConfig(
    ...     hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=30
    ... )
    >>> model = regard.huggingface.pack(transformers.BertModel(config).eval())
    >>> ids, mask = torch.tensor([[1, 2, 3], [4, 0, 0]]), torch.tensor([[1, 1, 1], [1, 0, 0]])
    >>> model(ids, attention_mask=mask).last_hidden_state[1, 1:].abs().max()  # padding
    tensor(0., grad_fn=...)
    """
    if packing.is_packed(model):
        return model
    enable()
    roots = _root_models(model)
    before = [root.config._attn_implementation for root in roots]
    packing.install(model)
    try:
        for root in roots:
            root.set_attn_implementation(NAME)
        with eval_mode(model):
            packing.check_packing(model)
    except BaseException:
        packing.remove(model)
        for root, implementation in zip(roots, before, strict=True):
            root.set_attn_implementation(implementation)
        raise
    for root, implementation in zip(roots, before, strict=True):
        root._regard_previous_attention = implementation
    return model


def unpack(model: nn.Module) -> nn.Module:
    """Undo `pack`: run the model with padding and its previous attention implementation.

    >>> import regard, transformers
    >>> config = transformers.BertConfig(
    ...     hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=30
    ... )
    >>> model = regard.huggingface.pack(transformers.BertModel(config))
    >>> regard.huggingface.unpack(model).config._attn_implementation
    'sdpa'
    """
    if packing.remove(model):
        for root in _root_models(model):
            root.set_attn_implementation(root.__dict__.pop("_regard_previous_attention"))
    return model


def quantized_cache(model: nn.Module) -> Any:
    """Create an int8 key-value cache for `generate`. It takes about a quarter of the memory of float32.

    Pass it as `model.generate(…, past_key_values=cache)`. Keys and values have one scale per token and head,
    and the kernels read the int8 values in place. Each query attends to the quantized keys, so
    `watch`, `edit` and returned weights show the attention that was actually computed.

    The model must use attn_implementation="regard". Layers with full attention and with a sliding window are
    supported.

    >>> import regard, torch, transformers
    >>> regard.huggingface.enable()
    >>> config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=9, eos_token_id=None)
    >>> model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="regard").eval()
    >>> cache = regard.huggingface.quantized_cache(model)
    >>> tokens = model.generate(torch.tensor([[1, 2, 3]]), past_key_values=cache, max_new_tokens=5)
    >>> cache.layers[0].keys
    Quantized(shape=(1, 2, 7, 4), dtype=torch.float32)
    """
    _interfaces()
    from regard.inspection.huggingface.int8_cache import create_cache

    config: Any = getattr(model, "config", None)
    if not hasattr(config, "get_text_config"):
        raise ArgumentError(f"quantized_cache got {type_name(model)}; pass a transformers model.")
    if config.is_encoder_decoder:
        raise ArgumentError(
            f"{type(model).__name__} is an encoder-decoder model; quantized_cache supports decoder-only "
            "models."
        )
    decoder = config.get_text_config(decoder=True)
    if decoder._attn_implementation != NAME:
        raise ArgumentError(
            f"{type(model).__name__} uses {decoder._attn_implementation!r} attention, which cannot read a "
            'quantized cache. Call regard.huggingface.enable() and model.set_attn_implementation("regard").'
        )
    if getattr(decoder, "kv_lora_rank", None):
        raise ArgumentError(
            f"{type(model).__name__} caches latent vectors, from which it computes keys and values; "
            "these cannot be quantized. Omit past_key_values=."
        )
    own = own_attention(model, uses_interface)
    if own:
        raise ArgumentError(
            f"The attention of {', '.join(own)} cannot read a quantized cache: it does not use transformers' "
            "attention interface. Omit past_key_values=."
        )
    return create_cache(config)


def _root_models(model: nn.Module) -> list[Any]:
    """Return the outermost transformers models in a module."""
    from transformers import PreTrainedModel

    if isinstance(model, PreTrainedModel):
        return [model]
    return [root for child in model.children() for root in _root_models(child)]


def _compare_with_eager(model: nn.Module) -> None:
    """Run a model on a few tokens with regard and with eager attention, and raise if the outputs differ."""
    ids = torch.arange(3, 9, device=next((p.device for p in model.parameters()), None))[None]
    changed = ids.clone()
    changed[:, -1] = 2
    has_decoder = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
    results = {}
    try:
        for implementation in ("eager", NAME):
            outputs = []
            with eval_mode(model), _implementation(model, implementation), torch.no_grad():
                for tokens in (ids, changed):
                    source = {"input_ids": ids, "decoder_input_ids": tokens}
                    outputs.append(model(**source if has_decoder else {"input_ids": tokens})[0])
            results[implementation] = outputs
    except Exception:
        if results:
            raise  # eager attention works, but regard fails
        return  # the model does not accept plain token ids
    (eager, eager_changed), (hosted, hosted_changed) = results["eager"], results[NAME]
    if not eager.is_floating_point() or eager.shape[:2] != ids.shape or not bool(torch.isfinite(eager).all()):
        return
    name, eps, scale = type(model).__name__, torch.finfo(eager.dtype).eps, float(eager.abs().max())
    leak, eager_leak = (
        float((a - b)[:, :-1].abs().max()) for a, b in ((hosted, hosted_changed), (eager, eager_changed))
    )
    if eager_leak <= 4 * eps * scale < leak:
        raise ArgumentError(
            f"{name} attends to future tokens with regard: changing the last token changes earlier outputs "
            "by "
            f'{leak:.2g}, but by {eager_leak:.2g} with eager attention. Use attn_implementation="eager".'
        )
    error = float((hosted - eager).abs().max())
    if not error <= 10 * math.sqrt(eps) * max(scale, eps):
        raise ArgumentError(
            f"The outputs of {name} with regard and with eager attention differ by {error:.2g}; the largest "
            f'output is {scale:.2g}. Use attn_implementation="eager".'
        )


@contextmanager
def _implementation(model: nn.Module, name: str) -> Iterator[None]:
    """Set the attention implementation of a model inside a `with` block."""
    configs: list[Any] = []
    queue: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    while queue:
        config = queue.pop()
        if hasattr(config, "_attn_implementation_internal") and all(config is not c for c in configs):
            configs.append(config)
            queue += [getattr(config, sub_config, None) for sub_config in config.sub_configs]
    before = [config._attn_implementation_internal for config in configs]
    model.set_attn_implementation(name)  # type: ignore[operator]
    try:
        yield
    finally:
        for config, implementation in zip(configs, before, strict=True):
            config._attn_implementation_internal = implementation


def _interfaces() -> tuple[Any, Any]:
    require("transformers", "regard.huggingface")
    try:
        from transformers.masking_utils import AttentionMaskInterface
        from transformers.modeling_utils import AttentionInterface
    except ImportError:
        raise ArgumentError(
            f"regard.huggingface requires transformers 5.3 or newer: {install_command('transformers')}"
        ) from None
    return AttentionInterface, AttentionMaskInterface


# Attention


def hosted_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor | Quantized,
    value: Tensor | Quantized,
    attention_mask: Tensor | None = None,
    **keywords: Any,
) -> tuple[Tensor, Weights | None]:
    """Attention function for transformers: (b, h, q, d), (b, g, k, d), (b, g, k, e) → (b, q, h, e).

    Also returns the lazy weights if the model was called with output_attentions=True.
    """
    cache = keywords.pop("cache", None)
    if cache is not None:  # paged cache of continuous batching
        layer = getattr(module, "layer_idx", 0)
        key, value = cache.update(key_states=key, value_states=value, layer_idx=layer, kwargs=keywords)
    if not torch.compiler.is_compiling():
        check_keywords(eager_function(module), keywords)
    call = parse(NAME, module, query, key, value, attention_mask, **keywords)
    mask = packing.packed_mask(module, call.causal, keywords)
    if mask is not None:
        call = call._replace(mask=mask, causal=False)
    return compute(call, _needs_weights(keywords))


def compute(call: InterfaceCall, need_weights: bool = False) -> tuple[Tensor, Weights | None]:
    """Compute the output (b, q, h, e) of a parsed call, and its lazy weights if needed."""
    visible, key, value = visible_keys(call), call.key, call.value
    if visible.span is not None and not need_weights:  # no query attends to keys outside the span
        keys = slice(*visible.span)
        key, value, visible = key[:, :, keys], value[:, :, keys], visible.within_span()
    elif need_weights and _is_overwritten(key, call.query):
        key = key.clone()
    make_score = ScaledDot if torch.compiler.is_compiling() else _cached_score
    arguments = Options(
        score=make_score(call.scale, call.softcap),
        mask=visible.mask,
        bias=visible.bias,
        normalize=_SOFTMAX if call.sink is None else Softmax1(call.sink),
        dropout=call.dropout,
    )
    if not need_weights:
        return attention(call.query, key, value, **arguments).transpose(1, 2).contiguous(), None
    output, weights = attend(call.query, key, value, **arguments)
    return output.transpose(1, 2).contiguous(), weights


def _is_overwritten(key: Tensor | Quantized, query: Tensor) -> bool:
    """Return whether later steps may overwrite the keys, as in a static or quantized cache."""
    return isinstance(key, Quantized) or key.shape[2] != query.shape[2] or key.is_inference()


def _needs_weights(options: dict[str, Any]) -> bool:
    """Return whether the model was called with output_attentions=True, even if it is not passed to layers."""
    if options.get("output_attentions"):
        return True
    collected = None if _COLLECTOR is None else _COLLECTOR.get()
    return any("attentions" in name for name in collected or ())


class _Visible(NamedTuple):
    """The visible keys: mask, biases, and a span of keys that includes all visible ones, if known."""

    mask: Mask | Tensor | None = None
    bias: Any = None
    span: tuple[int, int] | None = None
    causal: bool = False

    def within_span(self) -> "_Visible":
        """Return the mask and biases for the keys of the span."""
        bias = None if self.bias is None or self.span is None else self.bias[..., slice(*self.span)]
        return _Visible(_CAUSAL if self.causal else None, bias)


_ALL_KEYS, _CAUSAL_KEYS = _Visible(), _Visible(_CAUSAL, causal=True)


def visible_keys(call: InterfaceCall) -> _Visible:
    """Return the mask and the biases of a parsed call."""
    bias: Any = call.bias
    queries, keys = call.query.shape[2], call.key.shape[2]
    if isinstance(call.mask, Mask):
        return _Visible(call.mask, bias)
    if call.mask is not None:
        boolean, additive, span = _split_mask(call.mask, keys)
        if additive is not None:
            bias = additive if bias is None else [bias, additive]
        return _Visible(boolean, bias, span if bias is None else None)
    if not call.causal:
        return _ALL_KEYS if bias is None else _Visible(bias=bias)
    if keys > queries:  # a static cache that was empty before this call
        return _Visible(_CAUSAL, bias, (0, queries), causal=True)
    return _CAUSAL_KEYS if bias is None else _Visible(_CAUSAL, bias, causal=True)


def _split_mask(
    mask: Tensor, keys: int
) -> tuple[Mask | Tensor | None, Tensor | None, tuple[int, int] | None]:
    """Return a boolean or an additive mask, and the span of keys if it is the same for all rows."""
    if mask.shape[-1] > keys:
        mask = mask[..., :keys]
    if mask.dtype is not torch.bool:
        boolean = as_boolean(mask) if not mask.requires_grad and readable(mask) else None
        if boolean is None:
            return None, mask, None
        mask = boolean
    compacted, span = compact(mask)
    return compacted, None, span if compacted is not None and mask.shape[-1] == keys else None


# Masks


def hosted_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> Tensor | None:
    """Mask function for transformers: boolean (b, 1, q, k), or None if `is_causal` suffices."""
    from transformers import PreTrainedModel, masking_utils

    sizes = (batch_size, q_length, kv_length, q_offset, kv_offset)
    if torch.compiler.is_compiling():
        options["allow_is_causal_skip"] = False  # the calling model cannot be found while compiling
        return masking_utils.sdpa_mask(*sizes, attention_mask=attention_mask, **options)
    model = calling_module(lambda module: isinstance(module, PreTrainedModel))
    if packing.is_packing(model):
        return None  # packed layers use a `Documents` mask
    if not _flags_suffice(model):
        return masking_utils.eager_mask(*sizes, attention_mask=attention_mask, **options)
    with torch.inference_mode(False):  # inference tensors have no version counter
        bidirectional = options.get("mask_function") is masking_utils.bidirectional_mask_function
        if bidirectional and options.get("allow_is_bidirectional_skip") and not options.get("use_vmap"):
            return _padding_mask(attention_mask, sizes)
        return masking_utils.sdpa_mask(*sizes, attention_mask=attention_mask, **options)


_FLAGS_SUFFICE: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()


def _flags_suffice(model: nn.Module | None) -> bool:
    """Return whether the `is_causal` flags of a model's layers can replace a causal mask.

    transformers omits masks for classes that support SDPA. Other classes may rely on the mask alone: the
    decoder layers of nllb-moe have is_causal=False and would attend to future tokens without it. Some compute
    their own attention and add the mask to the scores. All these classes use the masks of eager attention,
    unless all their layers use the interface and are causal, as in gemma2 and gpt-oss.
    """
    if model is None:
        return False
    if model not in _FLAGS_SUFFICE:
        layers = [module for module in model.modules() if uses_interface(module)]
        if model._supports_sdpa:
            _FLAGS_SUFFICE[model] = not any(map(_needs_causal_mask, layers))
        else:
            causal = all(getattr(module, "is_causal", None) is True for module in layers)
            _FLAGS_SUFFICE[model] = bool(layers) and causal and not own_attention(model, uses_interface)
    return _FLAGS_SUFFICE[model]


def _needs_causal_mask(layer: nn.Module) -> bool:
    """Return whether only a mask makes a layer causal, as in PaliGemma's text layers."""
    bidirectional = getattr(getattr(layer, "config", None), "use_bidirectional_attention", None)
    return bool(bidirectional) and getattr(layer, "is_causal", None) is False


def _padding_mask(attention_mask: Tensor | None, sizes: tuple[int, ...]) -> Tensor | None:
    """Create a mask that only hides padding and is the same for all queries."""
    batch, queries, keys, _, offset = sizes
    if attention_mask is None or (readable(attention_mask) and bool(attention_mask.all())):
        return None
    missing = keys + offset - attention_mask.shape[-1]
    if missing > 0:
        attention_mask = nn.functional.pad(attention_mask, (0, missing))
    visible = attention_mask[:, offset : offset + keys].bool().clone()
    return visible[:, None, None].expand(batch, 1, queries, keys)

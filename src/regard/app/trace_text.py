"""Trace a text through a loaded model: a language model, a translator or an encoder."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import nn

from regard.app.trace import Trace, can_trace, trace_ids
from regard.errors import ArgumentError
from regard.models.encoders.bert import BertEncoder
from regard.models.encoders.pretrained import PretrainedEncoder
from regard.models.text_model import TextModel
from regard.translation.translator import Translator

MAX_TOKENS = 64  # tokens in a traced text; a response can then have several hundred thousand values


class TracedText(NamedTuple):
    """A trace, the function from an id to its token, and the function that appends an id to the text.

    >>> import regard
    >>> from regard.app.trace_text import trace_text
    >>> traced = trace_text(regard.load_encoder("minilm"), "Dogs bark.")
    >>> traced.trace.stacks[0].tokens, len(traced.trace.stacks[0].layers)
    (['[CLS]', 'dogs', 'bark', '.', '[SEP]'], 6)
    """

    trace: Trace
    token: Callable[[int], str]
    append: Callable[[int], str]


def network(model: Any) -> nn.Module:
    """Return the torch module of a loaded translator, language model or encoder.

    >>> import regard
    >>> from regard.app.trace_text import network
    >>> encoder, stories = regard.load_encoder("minilm"), regard.load_language_model("stories")
    >>> network(encoder) is encoder, network(stories) is stories.model
    (True, True)
    """
    inner = getattr(model, "model", model)
    assert isinstance(inner, nn.Module)
    return inner


def supports(model: Any) -> bool:
    """Return whether `trace_text` supports a loaded model.

    >>> import regard
    >>> from regard.app.trace_text import supports
    >>> supports(regard.load_encoder("minilm"))
    True
    """
    known = isinstance(model, Translator | BertEncoder | PretrainedEncoder | TextModel)
    return known and can_trace(network(model))


def trace_text(model: Any, text: str, target: str | None = None) -> TracedText:
    """Trace a text; for a translator, also trace `target`, by default its own translation of the text.

    >>> import regard
    >>> from regard.app.trace_text import trace_text
    >>> traced = trace_text(regard.load_language_model("stories"), "Tom ran.")
    >>> traced.trace.stacks[0].tokens
    ['<s>', 'tom', 'ran', '.']
    """
    if not supports(model):
        kind = type(network(model)).__name__
        raise ArgumentError(
            f"Only Transformers can be traced, and this model is a {kind}. Choose a language model, a "
            "translator of kind transformer, or a BERT-like encoder such as minilm."
        )
    if isinstance(model, Translator):
        return _trace_translation(model, text, target)
    if target is not None:
        raise ArgumentError(
            f"Got the target {target[:40]!r}, but only a translator reads a target. Omit it, or choose a "
            "translator."
        )
    encoder = isinstance(model, BertEncoder | PretrainedEncoder)
    return _trace_encoder(model, text) if encoder else _trace_language_model(model, text)


def check_length(name: str, tokens: Sequence[Any], max_tokens: int = MAX_TOKENS) -> None:
    """Raise an ArgumentError if a text is too long to trace.

    >>> from regard.app.trace_text import check_length
    >>> check_length("The text", ["dogs"] * 70)
    Traceback (most recent call last):
    regard.errors.ArgumentError: The text has 70 tokens; a trace covers at most 64. Shorten it.
    """
    limit = min(max_tokens, MAX_TOKENS)
    if len(tokens) > limit:
        reader = "a trace covers" if limit == MAX_TOKENS else "this model reads"
        raise ArgumentError(f"{name} has {len(tokens)} tokens; {reader} at most {limit}. Shorten it.")


def _trace_language_model(model: TextModel, text: str) -> TracedText:
    ids = model.encode(text)
    positions = model.model.decoder.positions
    check_length("The text", ids, getattr(positions, "max_length", None) or MAX_TOKENS)
    trace = trace_ids(model.model, ids, tokens=[model.tokens[i] for i in ids])
    return TracedText(trace, model.tokens.__getitem__, lambda new: model.decode([*ids, new]))


def _trace_encoder(model: BertEncoder | PretrainedEncoder, text: str) -> TracedText:
    if isinstance(model, PretrainedEncoder):
        ids, tokens, _ = model.tokenizer([text])[0]
        max_tokens = model.max_tokens
    else:
        ids, max_tokens = model.encode(text), model.config.max_positions
        tokens = [model.vocabulary[i] for i in ids]
    check_length("The text", ids, max_tokens)

    def no_token(_: int) -> str:
        raise ArgumentError(
            "An encoder does not predict the next token. Choose a language model or a translator."
        )

    trace = trace_ids(network(model) if isinstance(model, BertEncoder) else model, ids, tokens=tokens)
    return TracedText(trace, no_token, no_token)


def _trace_translation(model: Translator, text: str, target: str | None) -> TracedText:
    source = model.tokens.source.segment(text)
    if not source.ids:
        raise ArgumentError("The source has no tokens; type at least one word.")
    special = model.tokens.special
    check_length("The source", special.source(source.ids), model.max_tokens + 1)
    if target is None:
        translation = model.translate([text])[0]
        ids, pieces, unknown = list(translation.token_ids), list(translation.tokens), {}
    else:
        segments = model.tokens.target.segment(target)
        ids, pieces, unknown = list(segments.ids), list(segments.pieces), segments.unknown
    check_length("The target", special.target_inputs(ids), model.max_tokens + 1)

    def token(new: int) -> str:
        return model.tokens.target.decode([new]).pieces[0] or model.tokens.target.piece(new)

    around = special.source([])
    first = len(special.source_prefix)
    marks = [model.tokens.source.piece(i) for i in around]
    trace = trace_ids(
        model.model,
        special.source(source.ids),
        special.target_inputs(ids),
        tokens=[*marks[:first], *source.pieces, *marks[first:]],
        target_tokens=[*map(token, special.target_start), *pieces],
    )

    return TracedText(trace, token, lambda new: model.tokens.target.decode([*ids, new], unknown).text)

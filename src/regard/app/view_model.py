"""View models: the data behind the interactive view in notebooks, pages and files.

A ViewModel has one or more inputs of a model; an input has texts (tokens) and layers (attention weights).

>>> import torch, regard
>>> from regard.app.view_model import ViewModel
>>> x = torch.eye(3).expand(2, 3, 3)
>>> view = ViewModel.of(regard.attend(x, x, x)[1], queries=["dogs", "bark", "loudly"])
>>> view.describe()["inputs"][0]["layers"][0]["heads"]
2
>>> view.ask("tile", {"rows": [0, 2], "heads": [1]}).shape
(1, 2, 3)
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from regard._util.checks import check_sentences
from regard._util.text import pluralize, shorten, type_name
from regard.app import protocol
from regard.errors import ArgumentError, DTypeError
from regard.inspection.layer_view import (
    InputView,
    LayerKind,
    LayerView,
    TextView,
    split_batch,
    utf8_text,
)
from regard.inspection.layers import layer_label
from regard.inspection.recordings.recording import Seen
from regard.mechanism.weights.weights import Weights
from regard.models.encoders.base import WordEncoder
from regard.models.layers.attention import Attends, is_cross_attention, watch_layers
from regard.models.seq2seq import Seq2Seq
from regard.translation.alignment.alignment import Alignment
from regard.translation.alignment.cross_attention import watch_forced_decoding
from regard.translation.decoding.strategies import Beam, Strategy
from regard.translation.translation import Translation
from regard.translation.translator import Translator

__all__ = [
    "InputView",
    "LayerView",
    "TextView",
    "ViewModel",
    "look_at_text",
    "look_at_translation",
    "look_at_translations",
    "view_alignments",
]

START_MARK, END_MARK = "[START]", "[END]"
_MAX_INPUTS = 64  # maximum batch size
_MAX_ALIGNMENT = 2**24  # source words × target words

_Tokens = Sequence[str]
# the tokens of a layer's queries, the tokens of its keys, and whether they belong to different texts
_Axes = tuple[_Tokens, _Tokens, bool]


@dataclass(frozen=True, eq=False)
class ViewModel:
    """A title and inputs, each with texts and the attention weights between them.

    >>> import torch
    >>> from regard.app.view_model import ViewModel
    >>> ViewModel.of(torch.eye(2), queries=["a", "dog"], keys=["ein", "Hund"], title="Dogs")
    ViewModel('Dogs': 1 input, 1 layer)
    """

    title: str
    inputs: Sequence[InputView]

    @classmethod
    def of(
        cls,
        x: Any,
        queries: Sequence[str] | None = None,
        keys: Sequence[str] | None = None,
        title: str = "",
    ) -> "ViewModel":
        """Create a view of attention weights.

        x: `Weights` or a tensor (…, queries, keys), where each batch entry becomes an input; a `Seen`; a
        mapping from names to weights; an `Alignment`; translations; or a ViewModel, which is returned as is.
        queries, keys: tokens of the rows and columns. Default: keys = queries; numbers if both are None.
        """
        if isinstance(x, ViewModel):
            return x
        if isinstance(queries, str) or isinstance(keys, str):
            raise DTypeError("queries and keys must be lists of tokens, not strings; split the text.")
        if isinstance(x, Translation):
            return view_alignments([x], title=title)
        if isinstance(x, Alignment):
            return cls(title, [_alignment_input(x)])
        if isinstance(x, Sequence) and x and all(isinstance(item, Translation) for item in x):
            return view_alignments(x, title=title)
        if isinstance(x, Weights | Tensor):
            x = {"": x}
        named = dict(_calls(x)) if isinstance(x, Seen) else x
        if not isinstance(named, Mapping):
            raise DTypeError(
                f"Cannot view {type_name(x)}. Pass weights, a tensor, a Seen, translations, or a "
                "mapping from names to weights."
            )
        if not named:
            raise ArgumentError("There are no weights to show. Call the model inside the with block.")
        if isinstance(x, Seen) and queries is None and keys is None:
            return cls(title, list(_inputs(named, lambda name, size, row: _seen_axes(x, name, size, row))))
        return cls(title, list(_inputs(named, lambda name, size, _: _axes(name, size, queries, keys))))

    def describe(self) -> dict[str, Any]:
        """Return the title, tokens and layers, without the weights, as JSON-serializable values."""
        inputs = [model_input.describe() for model_input in self.inputs]
        return {"title": utf8_text(self.title), "inputs": inputs}

    def ask(self, question: str, arguments: Mapping[str, Any] | None = None) -> protocol.Answer:
        """Answer a question about a layer: tile (an array), topk, received, heads or numbers.

        arguments: "input" and "layer" (default: 0), and the arguments of the question. Invalid arguments
        raise an ArgumentError.

        >>> import torch
        >>> from regard.app.view_model import ViewModel
        >>> ViewModel.of(torch.eye(3)).ask("topk", {"side": "query", "position": 1, "k": 1})
        Ranking(positions=[1], weights=[1.0])
        """
        parsed = protocol.parse(question, arguments)
        return parsed.on(self.layer(parsed)).answer()

    def layer(self, question: protocol.Question) -> LayerView:
        """Return the layer that a question is about."""
        protocol.check_index("input", question.input, len(self.inputs))
        layers = self.inputs[question.input].layers
        protocol.check_index("layer", question.layer, len(layers))
        return layers[question.layer]

    def __repr__(self) -> str:
        layers = sum(len(model_input.layers) for model_input in self.inputs)
        return (
            f"ViewModel({self.title!r}: {pluralize(len(self.inputs), 'input')}, {pluralize(layers, 'layer')})"
        )


def _calls(seen: Seen) -> Iterator[tuple[str, Weights | Tensor]]:
    """Yield the weights of each module call; the steps of a decoder are joined."""
    for name in (name for name in seen if "@" not in name):
        calls = seen.calls(name)
        if len(calls) > 1 and all(weights.shape[-2] == 1 for weights in calls):
            yield name, seen.joined(name)
        else:
            yield name, calls[0]
            yield from ((f"{name}@{number}", weights) for number, weights in enumerate(calls[1:], 2))


def _inputs(
    named: Mapping[str, Any], axes: Callable[[str, Sequence[int], int], _Axes]
) -> Iterator[InputView]:
    """Yield an input for each batch entry. axes(name, size, entry) returns the tokens of a layer."""
    split = {}
    for name, weights in named.items():
        if not isinstance(weights, Weights | Tensor) or weights.dim() < 2:
            raise DTypeError(
                f"{name or 'weights'!r} is {type_name(weights)}; it must be regard.Weights or a "
                "torch.Tensor of shape (…, queries, keys)."
            )
        split[name] = split_batch(weights)
    batch = max(map(len, split.values()))
    if batch > _MAX_INPUTS:
        raise ArgumentError(
            f"The weights have a batch size of {batch}; at most {_MAX_INPUTS} inputs can be shown. Select "
            "some of them, such as weights[:8]."
        )
    for entry in range(batch):
        texts: list[TextView] = []
        layers = []
        for name, parts in split.items():
            if entry < len(parts):
                *tokens, cross = axes(name, parts[entry].shape[-2:], entry)
                sides = [TextView(tuple(side)) for side in tokens]
                texts += (text for text in dict.fromkeys(sides) if text not in texts)
                queries, keys = map(texts.index, sides)
                kind: LayerKind = "cross" if queries != keys or cross else "self"
                layers.append(LayerView(name, layer_label(name), kind, parts[entry], queries, keys))
        yield InputView(str(entry + 1) if batch > 1 else "", texts, layers)


def _axes(name: str, size: Sequence[int], queries: _Tokens | None, keys: _Tokens | None) -> _Axes:
    """Choose a layer's tokens. With two texts, a self-attention layer uses the one whose length matches."""
    cross = is_cross_attention(name)
    if queries is None and keys is None:
        return TextView.numbered(size[0]).tokens, TextView.numbered(size[1]).tokens, cross
    first, second = (queries if queries is not None else keys), (keys if keys is not None else queries)
    assert first is not None
    assert second is not None
    if name and not cross and size[0] == size[1] and first is not second:
        # encoder layers prefer the keys, which are the source
        text, other = (second, first) if "encoder" in name.split(".") else (first, second)
        tokens = text if len(text) == size[0] else other
        return tokens, tokens, False
    return first, second, cross


def _seen_axes(seen: Seen, name: str, size: Sequence[int], row: int) -> _Axes:
    """Return the recorded tokens of a layer, or numbers if they are unknown."""
    queries, keys = (
        tokens if tokens is not None and len(tokens) == n else TextView.numbered(n).tokens
        for tokens, n in zip(seen.texts(name, row), size, strict=True)
    )
    return queries, keys, seen.kind(name) == "cross"


# Translations


def view_alignments(translations: Sequence[Translation], *, title: str = "") -> ViewModel:
    """Create a view of word alignments, with one input per translation.

    For a model without attention, an input has a note with the reason instead of layers.

    >>> import torch
    >>> from regard.translation import Alignment, Translation
    >>> from regard.app.view_model import view_alignments
    >>> alignment = Alignment(("ein", "Hund"), ("a", "dog"), torch.eye(2))
    >>> translation = Translation("ein Hund", "a dog", -0.1, ["a", "dog"], _align=lambda: alignment)
    >>> view_alignments([translation]).describe()["inputs"][0]["layers"][0]["kind"]
    'words'
    """
    return ViewModel(title, [_translation_input(translation) for translation in translations])


def _translation_input(translation: Translation) -> InputView:
    title = f"{translation.source} → {translation.text}"
    source, target = translation.source.split(), translation.text.split()
    reason = ""
    if len(source) * len(target) > _MAX_ALIGNMENT:
        reason = f"Too long to align: {len(source):,} source words and {len(target):,} target words."
    elif source and target:
        try:
            return _alignment_input(translation.alignment, title, translation.note)
        except ArgumentError as error:  # the model has no attention
            reason = str(error)
    texts = [TextView(tuple(source)), TextView(tuple(target))]
    return InputView(title, texts, [], join_notes(translation.note, reason))


def join_notes(*notes: str) -> str:
    """Join the notes that are not empty."""
    return " · ".join(filter(None, notes))


def _alignment_input(alignment: Alignment, title: str = "", note: str = "") -> InputView:
    weights = alignment.weights.detach().float().nan_to_num(0, 0, 0).clamp(0, 1)
    texts = [TextView(alignment.source_words), TextView(alignment.target_words)]
    return InputView(title, texts, [LayerView("alignment", "words", "words", weights, 1, 0)], note)


def look_at_translation(
    translator: Translator,
    sentences: str | Sequence[str],
    *,
    strategy: Strategy = Beam(),  # noqa: B008 (a frozen value)
    title: str = "",
) -> ViewModel:
    """Translate sentences and view all attention layers of the model.

    strategy: `Beam`, `Greedy` or `Sample`.

    >>> from regard.models import TransformerConfig, Transformer
    >>> from regard.translation import Tokenizer, Translator, TokenizerPair
    >>> from regard.app.view_model import look_at_translation
    >>> tokens = Tokenizer.learn(["ein Hund bellt", "a dog barks"] * 10, kind="words")
    >>> model = Transformer(len(tokens), TransformerConfig(width=16, heads=2, layers=1), share=True)
    >>> view = look_at_translation(Translator(model, TokenizerPair(tokens, tokens)), ["ein Hund"])
    >>> [layer["label"] for layer in view.describe()["inputs"][0]["layers"]][-3:]  # the first is "words"
    ['encoder 0', 'decoder 0', 'decoder 0 to source']
    """
    return look_at_translations(translator, translator.translate(sentences, strategy=strategy), title=title)


def look_at_translations(
    translator: Translator, translations: Sequence[Translation], *, title: str = ""
) -> ViewModel:
    """View all attention layers of a translator for its translations.

    The first layer of each input is the word alignment. The others have subword tokens; the end token of the
    source and the start token of the target count as special tokens.

    >>> from regard.models import TransformerConfig, Transformer
    >>> from regard.translation import Tokenizer, Translator, TokenizerPair
    >>> from regard.app.view_model import look_at_translations
    >>> tokens = Tokenizer.learn(["ein Hund bellt", "a dog barks"] * 10, kind="words")
    >>> model = Transformer(len(tokens), TransformerConfig(width=16, heads=2, layers=1), share=True)
    >>> translator = Translator(model, TokenizerPair(tokens, tokens))
    >>> look_at_translations(translator, translator.translate(["ein Hund", "bellt"]), title="Dogs")
    ViewModel('Dogs': 2 inputs, ...)
    """
    return ViewModel(title, [_translator_input(translator, translation) for translation in translations])


def _translator_input(translator: Translator, translation: Translation) -> InputView:
    """Return the view of a translation: its alignment and all attention layers."""
    words = _translation_input(translation)
    source = translator.tokens.source.segment(translation.source)
    # use the tokens that the model generated: tokenizing its text again may give different ones
    ids, pieces = translation.token_ids, translation.tokens
    if len(ids) != len(pieces) or not ids:  # the translation was not generated by the model
        target = translator.tokens.target.segment(translation.text)
        ids, pieces = target.ids, target.pieces
    length, limit = max(len(source.ids), len(ids)), translator.max_tokens
    if length > limit:
        reason = f"Only words are shown: a text has {length} tokens, but the model reads at most {limit}."
        return replace(words, note=join_notes(words.note, reason))
    if not source.ids:
        return words
    texts = list(_token_texts(translator, source.pieces, pieces))
    layers = _attention_layers(translator.model, source.ids, ids, len(words.texts))
    return replace(words, texts=[*words.texts, *texts], layers=[*words.layers, *layers])


def _token_texts(translator: Translator, source: Sequence[str], target: Sequence[str]) -> Iterator[TextView]:
    """Yield the tokens of source and target, with the special tokens around them."""
    special, around = translator.tokens.special, translator.tokens.special.source([])
    if translator.tokens.target.origin is None:  # a model that regard trained from scratch
        before, after, start = [], [END_MARK], [START_MARK]
    else:
        first = len(special.source_prefix)
        before, after = (
            [translator.tokens.source.piece(i) for i in part] for part in (around[:first], around[first:])
        )
        start = [translator.tokens.target.piece(i) for i in special.target_start]
    last = len(before) + len(source)
    marked = (*range(len(before)), *range(last, last + len(after)))
    yield TextView((*before, *source, *after), special=marked)
    yield TextView((*start, *target), special=tuple(range(len(start))))


def _attention_layers(
    model: Seq2Seq, source: Sequence[int], target: Sequence[int], source_text: int
) -> Iterator[LayerView]:
    """Yield every attention layer. source_text: index of the source text; the target text comes next."""
    modules = ((name.replace("_orig_mod.", ""), module) for name, module in model.named_modules())
    names = [name for name, module in modules if isinstance(module, Attends)]
    if not names:
        return
    ((_, seen),) = watch_forced_decoding(model, [source], [target], names)
    for name, calls in seen.items():
        if not calls:
            continue
        weights = calls[0] if len(calls) == 1 else torch.cat([call.dense() for call in calls], -2)
        kind: LayerKind = "cross" if is_cross_attention(name) else "self"
        queries = source_text if "encoder" in name.split(".") else source_text + 1
        keys = source_text if kind == "cross" else queries
        yield LayerView(name, layer_label(name), kind, weights, queries, keys)


# Encoders


def look_at_text(encoder: WordEncoder, texts: str | Sequence[str], *, title: str = "") -> ViewModel:
    """View all attention layers of an encoder, with one input per text.

    >>> import regard
    >>> from regard.app.view_model import look_at_text
    >>> view = look_at_text(regard.load_encoder("minilm"), "Dogs bark.").describe()["inputs"][0]
    >>> view["texts"]
    [{'tokens': ['[CLS]', 'dogs', 'bark', '.', '[SEP]'], 'special': [0, 4]}]
    >>> view["layers"][0]["label"], len(view["layers"])
    ('layer 0', 6)
    """
    return ViewModel(title, [_encoder_input(encoder, text) for text in check_sentences(texts)])


def _encoder_input(encoder: WordEncoder, sentence: str) -> InputView:
    seen: list[tuple[str, Weights]] = []
    with watch_layers(encoder, lambda name, weights: seen.append((name, weights))):
        (tokens,) = encoder.eval_token_vectors([sentence])
    if not seen:
        raise ArgumentError(
            f"{type(encoder).__name__} has no attention to show. Use an encoder with attention, such as BERT."
        )
    spans = tokens.spans
    names = tokens.tokens or [sentence[slice(*span)] if span else "(special)" for span in spans]
    text = TextView(tuple(names), tuple(index for index, span in enumerate(spans) if span is None))
    layers = [
        LayerView(name, f"layer {number}", "self", weights) for number, (name, weights) in enumerate(seen)
    ]
    return InputView(shorten(sentence), [text], layers)

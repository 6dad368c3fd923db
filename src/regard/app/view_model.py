"""An exhibit: something to be looked at; a notebook, a page and a file all ask it the same questions.

Exhibit → inputs, what a model read → texts, their tokens; layers, the weights between them

>>> import torch, regard
>>> from regard.app.view_model import ViewModel
>>> x = torch.eye(3).expand(2, 3, 3)
>>> exhibit = ViewModel.of(regard.attend(x, x, x)[1], queries=["dogs", "bark", "loudly"])
>>> exhibit.describe()["inputs"][0]["layers"][0]["heads"]
2
>>> exhibit.ask("tile", {"rows": [0, 2], "heads": [1]}).arrays[0].shape
(1, 2, 3)
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard._util.text import pluralize, shorten
from regard.app import protocol
from regard.errors import ArgumentError, DTypeError
from regard.inspection.layer_view import Answer, InputView, Kind, LayerView, TextView, split_batch, utf8_text
from regard.inspection.layers import is_cross_attention, layer_label
from regard.inspection.watch import Seen
from regard.mechanism.weights.matrix import Weights
from regard.models.encoders.base import WordEncoder
from regard.models.encoders.words import check_sentences
from regard.models.layers.attention import Attends, watch_layers
from regard.models.seq2seq import Seq2Seq
from regard.translation.alignment.alignment import Alignment
from regard.translation.alignment.cross_attention import watch_forced_decoding
from regard.translation.decoding.search import Beam, Strategy
from regard.translation.tokens import Segmentation
from regard.translation.translator import Translation, Translator

__all__ = [
    "Answer",
    "InputView",
    "LayerView",
    "TextView",
    "ViewModel",
    "exhibit_of_translations",
    "look_at_text",
    "look_at_translation",
    "look_at_translations",
]

START_MARK, END_MARK = "[START]", "[END]"
Sides = tuple[
    Sequence[str], Sequence[str], bool
]  # the tokens of rows and columns; whether they are two texts
_MOST_INPUTS = 64  # of a batch
_MOST_PAIRS = 2**24  # words × words of an alignment


@dataclass(frozen=True, eq=False)
class ViewModel:
    """Something to be looked at: inputs, each with texts and the weights between them; and a title.

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
        """An exhibit of weights, of what `regard.watch` saw, of a mapping from names to weights, …

        x: `Weights` or a tensor, (…, queries, keys), each of a batch as an input of its own; a `Seen`; a
        mapping; an `Alignment`; translations; or an exhibit, which is answered as it is.
        queries, keys: the tokens of both sides. Without keys, the queries read each other; without either,
        tokens are numbered.
        """
        if isinstance(x, ViewModel):
            return x
        if isinstance(queries, str) or isinstance(keys, str):
            raise DTypeError("queries and keys are lists of tokens, and got a string; split the text.")
        if isinstance(x, Translation):
            return exhibit_of_translations([x], title=title)
        if isinstance(x, Alignment):
            return cls(title, [_words(x)])
        if isinstance(x, Sequence) and x and all(isinstance(one, Translation) for one in x):
            return exhibit_of_translations(x, title=title)
        if isinstance(x, Weights | Tensor):
            x = {"": x}
        named = dict(_calls(x)) if isinstance(x, Seen) else x
        if not isinstance(named, Mapping):
            raise DTypeError(
                f"an exhibit got a {type(x).__name__}; it is made of weights, a tensor, a Seen, or a mapping "
                "from names to weights."
            )
        if not named:
            raise ArgumentError("there are no weights to be shown; call the model inside the with block.")
        if isinstance(x, Seen) and queries is None and keys is None:
            return cls(title, list(_inputs(named, lambda name, size, row: _seen_sides(x, name, size, row))))
        return cls(title, list(_inputs(named, lambda name, size, _: _sides(name, size, queries, keys))))

    def describe(self) -> dict[str, Any]:
        """What JSON can hold: titles, tokens and layers, without the weights."""
        return {"title": utf8_text(self.title), "inputs": [one.describe() for one in self.inputs]}

    def ask(self, question: str, arguments: Mapping[str, Any] | None = None) -> Answer:
        """Answer a question about a layer: tile, top, received, heads or numbers.

        arguments: "input" and "layer", both 0 unless given, and those of the question. Whatever is wrong with
        them is said by an ArgumentError.
        """
        layer, given = self._layer(arguments)
        return protocol.ask(layer, question, given)

    def pairs(self, question: str, arguments: Mapping[str, Any] | None = None) -> int:
        """How many weights an answer would read, queries × keys × heads, found without reading any."""
        layer, given = self._layer(arguments)
        return protocol.pairs(layer, question, given)

    def unread(self, arguments: Mapping[str, Any] | None = None) -> int:
        """How many weights have to be read before the first answer about a layer, where τ is unknown."""
        return protocol.unread(self._layer(arguments)[0])

    def _layer(self, arguments: Mapping[str, Any] | None) -> tuple[LayerView, dict[str, Any]]:
        """The layer that is asked about, and the other arguments."""
        if not isinstance(arguments, Mapping | None):
            raise ArgumentError(f"the arguments are a {type(arguments).__name__}; give a mapping of names.")
        given = dict(arguments or {})
        chosen = _choose("input", given.pop("input", 0), self.inputs)
        return _choose("layer", given.pop("layer", 0), chosen.layers), given

    def __repr__(self) -> str:
        layers = sum(len(one.layers) for one in self.inputs)
        return f"ViewModel({self.title!r}: {pluralize(len(self.inputs), 'input')}, {pluralize(layers, 'layer')})"


def _choose(what: str, number: Any, among: Sequence[Any]) -> Any:
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < len(among):
        cure = f"give 0 to {len(among) - 1}." if among else "there is none."
        raise ArgumentError(f"{what} is {number!r:.80}; {cure}")
    return among[number]


# Of weights


def _calls(seen: Seen) -> Iterator[tuple[str, Weights | Tensor]]:
    """What each module did: once, several times, or step by step, which is joined."""
    for name in (name for name in seen if "@" not in name):
        calls = seen.calls(name)
        if len(calls) > 1 and all(weights.shape[-2] == 1 for weights in calls):
            yield name, seen.joined(name)
        else:
            yield name, calls[0]
            yield from ((f"{name}@{number}", weights) for number, weights in enumerate(calls[1:], 2))


def _inputs(named: Mapping[str, Any], sides: Callable[[str, tuple[int, int], int], Sides]) -> Iterator[InputView]:
    """An input of each entry of a batch; `sides` knows the tokens of a layer of that size in an entry."""
    split = {}
    for name, weights in named.items():
        if not isinstance(weights, Weights | Tensor) or weights.dim() < 2:
            raise DTypeError(
                f"{name or 'the weights'!r} is a {type(weights).__name__}; a layer is regard.Weights or a "
                "torch.Tensor of (…, queries, keys)."
            )
        split[name] = split_batch(weights)
    most = max(map(len, split.values()))
    if most > _MOST_INPUTS:
        raise ArgumentError(
            f"the weights are of a batch of {most}; at most {_MOST_INPUTS} are shown side by side, so choose "
            "some: weights of x[:8]."
        )
    for number in range(most):
        some = {name: parts[number] for name, parts in split.items() if number < len(parts)}
        found = {name: sides(name, _size(weights), number) for name, weights in some.items()}
        yield _input(str(number + 1) if most > 1 else "", some, found)


def _size(weights: Weights | Tensor) -> tuple[int, int]:
    return int(weights.shape[-2]), int(weights.shape[-1])


def _input(
    title: str,
    named: Mapping[str, Weights | Tensor],
    sides: Mapping[str, Sides],
) -> InputView:
    texts: list[TextView] = []

    def number(tokens: Sequence[str]) -> int:
        text = TextView(tuple(tokens))
        if text not in texts:
            texts.append(text)
        return texts.index(text)

    layers = []
    for name, weights in named.items():
        rows, columns, across = sides[name]
        first, second = number(rows), number(columns)
        kind: Kind = "cross" if first != second or across else "self"
        layers.append(LayerView(name, layer_label(name), kind, weights, first, second))
    return InputView(title, texts, layers)


def _sides(
    name: str, size: tuple[int, int], queries: Sequence[str] | None, keys: Sequence[str] | None
) -> Sides:
    """The tokens of rows and columns: in a model with two texts, each layer has those that fit."""
    given = [tokens for tokens in (queries, keys) if tokens is not None]
    if not given:
        return TextView.numbered(size[0]).tokens, TextView.numbered(size[1]).tokens, is_cross_attention(name)
    one, other = given[0], given[-1]
    if name and not is_cross_attention(name) and len(set(size)) == 1 and len(given) == 2:
        own = other if "encoder" in name.split(".") else one  # keys are the source's
        own = own if len(own) == size[0] else (one if own is other else other)
        return own, own, False
    return one, other, is_cross_attention(name)


def _seen_sides(seen: Seen, name: str, size: tuple[int, int], row: int) -> Sides:
    """The tokens that a recording knows, and numbers where it does not."""
    known = seen.texts(name, row)
    found = [
        tokens if tokens is not None and len(tokens) == n else TextView.numbered(n).tokens
        for tokens, n in zip(known, size, strict=True)
    ]
    return found[0], found[1], seen.kind(name) == "cross"


# Of translations


def exhibit_of_translations(translations: Sequence[Translation], *, title: str = "") -> ViewModel:
    """Translations and which word came from which: an input of each, with the alignment of its words.

    translations: what `Translator.translate` made.
    title: what stands on top.

    A translation by a model without attention has no layers, and a note that says why.

    >>> import torch
    >>> from regard.translation import Alignment, Translation
    >>> from regard.app.view_model import exhibit_of_translations
    >>> read = Alignment(("ein", "Hund"), ("a", "dog"), torch.eye(2))
    >>> translation = Translation("ein Hund", "a dog", -0.1, ["a", "dog"], _align=lambda: read)
    >>> exhibit_of_translations([translation]).describe()["inputs"][0]["layers"][0]["kind"]
    'words'
    """
    return ViewModel(title, [_translated(one) for one in translations])


def _translated(translation: Translation) -> InputView:
    words = translation.source.split(), translation.text.split()
    reason = ""
    if len(words[0]) * len(words[1]) > _MOST_PAIRS:
        sizes = [f"{len(side):,}" for side in words]
        reason = f"{sizes[0]} source words and {sizes[1]} target words are too many to be aligned."
    elif all(words):
        try:
            return _words(translation.alignment, _title(translation), translation.note)
        except ArgumentError as error:  # the model does not attend
            reason = str(error)
    note = "; ".join(filter(None, (translation.note, reason)))
    return InputView(_title(translation), [TextView(tuple(side)) for side in words], [], note)


def _title(translation: Translation) -> str:
    return f"{translation.source} → {translation.text}"


def _words(alignment: Alignment, title: str = "", note: str = "") -> InputView:
    """An alignment of words, as an input of its own."""
    weights = alignment.weights.detach().float().nan_to_num(0, 0, 0).clamp(0, 1)
    texts = [TextView(alignment.source_words), TextView(alignment.target_words)]
    return InputView(title, texts, [LayerView("alignment", "words", "words", weights, 1, 0)], note)


def look_at_translation(
    translator: Translator,
    sentences: str | Sequence[str],
    *,
    how: Strategy = Beam(),  # noqa: B008 (a frozen value)
    title: str = "",
) -> ViewModel:
    """Translate sentences, and show every attention of the model while it reads them and its translations.

    translator, sentences: who translates what.
    how: how translations are found: `Beam`, `Greedy` or `Sample`.
    title: what stands on top.

    >>> from regard.models import TransformerConfig, Transformer
    >>> from regard.translation import Tokenizer, Translator, TokenizerPair
    >>> from regard.app.view_model import look_at_translation
    >>> tokens = Tokenizer.learn(["ein Hund bellt", "a dog barks"] * 10, kind="words")
    >>> model = Transformer(len(tokens), TransformerConfig(width=16, heads=2, layers=1), share=True)
    >>> found = look_at_translation(Translator(model, TokenizerPair(tokens, tokens)), ["ein Hund"])
    >>> [layer["label"] for layer in found.describe()["inputs"][0]["layers"]][-3:]  # after that of words
    ['encoder 0', 'decoder 0', 'decoder 0 to source']
    """
    return look_at_translations(translator, translator.translate(sentences, strategy=how), title=title)


def look_at_translations(
    translator: Translator, translations: Sequence[Translation], *, title: str = ""
) -> ViewModel:
    """Every attention of a model while it reads sentences and their translations, which it made before.

    The first layer of each input is the alignment of its words; the others have the pieces as tokens, the
    source with its end mark and the target with its start mark, which are special.

    translator, translations: who made which.
    title: what stands on top.

    >>> from regard.models import TransformerConfig, Transformer
    >>> from regard.translation import Tokenizer, Translator, TokenizerPair
    >>> from regard.app.view_model import look_at_translations
    >>> tokens = Tokenizer.learn(["ein Hund bellt", "a dog barks"] * 10, kind="words")
    >>> model = Transformer(len(tokens), TransformerConfig(width=16, heads=2, layers=1), share=True)
    >>> translator = Translator(model, TokenizerPair(tokens, tokens))
    >>> look_at_translations(translator, translator.translate(["ein Hund", "bellt"]), title="Dogs")
    ViewModel('Dogs': 2 inputs, ...)
    """
    return ViewModel(title, [_read(translator, one) for one in translations])


def _read(translator: Translator, translation: Translation) -> InputView:
    """A translation with its alignment, and what the model looks at while it reads both."""
    words = _translated(translation)
    source = translator.tokens.source.segment(translation.source)
    target = _written(translator, translation)
    most = max(len(source.ids), len(target.ids))
    if not source.ids or most > translator.max_tokens:
        why = f"its {most} pieces are more than the {translator.max_tokens} that the model reads at once"
        notes = (words.note, f"only the words are shown, as {why}" if most > translator.max_tokens else "")
        return InputView(words.title, words.texts, words.layers, "; ".join(filter(None, notes)))
    texts = [*words.texts, *_pieces(source, target)]
    layers = list(_attentions(translator.model, source.ids, target.ids, len(words.texts)))
    return InputView(words.title, texts, [*words.layers, *layers], words.note)


def _written(translator: Translator, translation: Translation) -> Segmentation:
    """The pieces that the model wrote; its text, cut again, may give others. One made by hand has no ids."""
    if len(translation._ids) != len(translation.tokens) or not translation._ids:
        return translator.tokens.target.segment(translation.text)
    return Segmentation([], translation._ids, translation.tokens, [], {})


def _pieces(source: Segmentation, target: Segmentation) -> tuple[TextView, TextView]:
    """What a model reads of both sides, with its marks."""
    before, after = (*source.pieces, END_MARK), (START_MARK, *target.pieces)
    return TextView(before, special=(len(source.pieces),)), TextView(after, special=(0,))


def _attentions(model: Seq2Seq, source: Sequence[int], target: Sequence[int], first: int) -> Iterator[LayerView]:
    """A layer of each attention, its texts numbered from `first`: source, then target."""
    modules = ((name.replace("_orig_mod.", ""), module) for name, module in model.named_modules())
    names = [name for name, module in modules if isinstance(module, Attends)]
    if not names:
        return
    ((_, seen),) = watch_forced_decoding(model, [source], [target], names)
    for name, calls in seen.items():
        if not calls:
            continue
        weights = calls[0] if len(calls) == 1 else torch.cat([one.dense() for one in calls], -2)
        encoder = "encoder" in name.split(".")
        kind: Kind = "cross" if is_cross_attention(name) else "self"
        queries = first if encoder else first + 1
        keys = first if kind == "cross" else queries
        yield LayerView(name, layer_label(name), kind, weights, queries, keys)


# Of encoders


def look_at_text(encoder: WordEncoder, texts: str | Sequence[str], *, title: str = "") -> ViewModel:
    """Every attention of an encoder while it reads texts, an input of each; its marks are special.

    title: what stands on top.

    >>> import regard
    >>> from regard.app.view_model import look_at_text
    >>> found = look_at_text(regard.load_encoder("minilm"), "Dogs bark.").describe()["inputs"][0]
    >>> found["texts"]
    [{'tokens': ['[CLS]', 'dogs', 'bark', '.', '[SEP]'], 'special': [0, 4]}]
    >>> found["layers"][0]["label"], len(found["layers"])
    ('layer 0', 6)
    """
    return ViewModel(title, [_read_text(encoder, text) for text in check_sentences(texts)])


def _read_text(encoder: WordEncoder, sentence: str) -> InputView:
    seen: list[tuple[str, Weights]] = []
    with watch_layers(encoder, lambda name, weights: seen.append((name, weights))):
        (tokens,) = encoder._tokens([sentence])
    if not seen:
        raise ArgumentError(
            f"{type(encoder).__name__} does not attend, so that there is nothing to look at; take an encoder "
            "with attention, such as BERT."
        )
    spans = tokens.spans
    names = tokens.names or [sentence[slice(*span)] if span else "(mark)" for span in spans]
    text = TextView(tuple(names), tuple(place for place, span in enumerate(spans) if span is None))
    layers = [LayerView(name, f"layer {number}", "self", weights) for number, (name, weights) in enumerate(seen)]
    return InputView(shorten(sentence), [text], layers)

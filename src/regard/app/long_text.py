"""Views of long texts: attention in a model that reads them in passages, or co-occurrence of their words."""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional as F

from regard._util import interrupt
from regard._util.text import pluralize, shorten
from regard.app.stories.grammar import stories
from regard.app.stories.words import CAPITALIZED
from regard.app.view_model import InputView, LayerView, TextView, ViewModel
from regard.errors import ArgumentError
from regard.inspection.calls.capture import CapturedCall
from regard.mechanism.operator import attend
from regard.mechanism.scores import ScaledDot
from regard.mechanism.weights.weights import Weights
from regard.models.encoders.pretrained import PretrainedEncoder
from regard.models.encoders.static import StaticEncoder
from regard.models.encoders.words import split_words
from regard.models.layers.attention import watch_layers
from regard.models.packed import Packed
from regard.models.text_model import TextModel, join_tokens, load_language_model

STORIES, CO_OCCURRENCE = "stories", "co-occurrence"
MAX_WORDS = 40_000  # words in a co-occurrence map
MAX_TOKENS = 16_384  # tokens in all passages together; the queries and keys of minilm then take 0.3 GB
_STORY_TOKENS = 64  # tokens per passage; the longest stories in the training data have 63
_WIDTH, _HEADS = 64, 8  # width of the co-occurrence vectors, and number of slices
_SENTENCE_END = re.compile(r"(?<=[.!?…。！？])\s+|\n+")

_Count = Callable[[Sequence[str]], list[int]]  # texts → number of tokens in each, including special tokens


def split_passages(text: str, count: _Count, max_tokens: int) -> list[str]:
    """Split a text into passages of up to `max_tokens` tokens, at the ends of sentences if possible.

    count: function from texts to the number of tokens in each, including special tokens.

    >>> from regard.app.long_text import split_passages
    >>> split_passages("One two. Three four five. Six.", lambda texts: [len(t.split()) for t in texts], 4)
    ['One two.', 'Three four five. Six.']
    """
    sentences = [sentence for sentence in _SENTENCE_END.split(text) if sentence.strip()]
    (special,) = count([""])
    passages: list[list[str]] = []
    size = 0
    for sentence, tokens in _fit(sentences, count, max_tokens):
        if not passages or size + tokens - special > max_tokens:
            passages, size = [*passages, []], special
        passages[-1].append(sentence)
        size += tokens - special
    joined = [" ".join(passage) for passage in passages]
    # joining can add tokens, so the passages are fitted again
    return [passage for passage, _ in _fit(joined, count, max_tokens)]


def _fit(texts: Sequence[str], count: _Count, max_tokens: int) -> Iterator[tuple[str, int]]:
    """Yield texts with their token counts; halve texts that are too long, between words if possible."""
    for text, tokens in zip(texts, count(texts) if texts else [], strict=True):
        if tokens <= max_tokens or len(text) < 2:
            yield text, tokens
            continue
        middle = len(text) // 2
        space = text.find(" ", middle)
        cut = space if space > 0 else middle
        yield from _fit([text[:cut], text[cut:].lstrip() or text[cut:]], count, max_tokens)


def look_at_passages(encoder: PretrainedEncoder, text: str, *, title: str = "") -> ViewModel:
    """View the attention of an encoder on a long text, split into passages that the encoder can read.

    >>> import regard
    >>> from regard.app.long_text import look_at_passages
    >>> view = look_at_passages(regard.load_encoder("minilm"), "Dogs may bark. " * 200)
    >>> view.inputs[0].note
    '804 tokens in 2 passages, which the model reads one by one: tokens attend only within their passage.'
    """

    def count(texts: Sequence[str]) -> list[int]:
        return [len(ids) for ids in encoder.tokenizer.ids(texts)]

    encodings = encoder.tokenizer(split_passages(text, count, encoder.max_tokens))
    packed = _pack([encoding.ids for encoding in encodings])
    tokens = [token for encoding in encodings for token in encoding.tokens]
    spans = [span for encoding in encodings for span in encoding.spans]
    special = tuple(i for i, span in enumerate(spans) if span is None)
    layers = _watch(encoder, lambda: encoder.states(packed))
    return _passages_view(title, text, TextView(tuple(tokens), special), layers, len(encodings))


def look_at_stories(text: str) -> ViewModel:
    """Show the attention of the stories model on a long text. Each paragraph is a separate passage.

    >>> from regard.app.long_text import look_at_stories, sample_stories
    >>> view = look_at_stories(sample_stories(500)).describe()["inputs"][0]
    >>> [layer["label"] for layer in view["layers"]]
    ['layer 0', 'layer 1', 'layer 2']
    """
    model = _stories()

    def count(texts: Sequence[str]) -> list[int]:
        return [len(model.encode(text)) for text in texts]

    passages = [
        passage for line in text.splitlines() for passage in split_passages(line, count, _STORY_TOKENS)
    ]
    ids = [model.encode(passage) for passage in passages]
    packed = _pack(ids)
    starts = tuple(accumulate(map(len, ids[:-1]), initial=0))
    tokens = TextView(tuple(model.tokens[i] for passage in ids for i in passage), starts)
    layers = _watch(model.model, lambda: model.model.hidden(packed))
    return _passages_view(STORIES, text, tokens, layers, len(passages))


@cache
def _stories() -> TextModel:
    return load_language_model(STORIES)


def _pack(passages: Sequence[Sequence[int]]) -> Packed:
    tokens = sum(map(len, passages))
    if not 1 <= tokens <= MAX_TOKENS:
        raise ArgumentError(
            f"The text has {tokens:,} tokens; it must have 1 to {MAX_TOKENS:,}. Shorten the text, or "
            f"choose {CO_OCCURRENCE!r}, which takes up to {MAX_WORDS:,} words."
        )
    return Packed.of(passages)


@torch.no_grad()
def _watch(model: torch.nn.Module, run: Callable[[], object]) -> list[LayerView]:
    """Run a model and return its attention layers."""
    layers: list[LayerView] = []

    def add(name: str, weights: Weights) -> None:
        interrupt.check()  # a layer takes a second on a long text
        layers.append(LayerView(name, f"layer {len(layers)}", "self", weights))

    with watch_layers(model, add):
        run()
    return layers


def _passages_view(
    title: str, text: str, tokens: TextView, layers: list[LayerView], passages: int
) -> ViewModel:
    note = f"{pluralize(len(tokens.tokens), 'token')} in {pluralize(passages, 'passage')}"
    if passages > 1:
        note += ", which the model reads one by one: tokens attend only within their passage"
    return ViewModel(title, [InputView(shorten(text), [tokens], layers, f"{note}.")])


def sample_stories(words: int, seed: int = 0) -> str:
    """Return stories from the grammar with about `words` words, one per paragraph.

    >>> from regard.app.long_text import sample_stories
    >>> sample_stories(100) == sample_stories(100)
    True
    """
    paragraphs: list[str] = []
    total = 0
    for story in stories(words, seed):
        if total >= words:
            break
        paragraphs.append(join_tokens(story.split(), CAPITALIZED))
        total += len(paragraphs[-1].split())
    return "\n\n".join(paragraphs)


def view_co_occurrence(text: str) -> ViewModel:
    """View the similarity of word vectors learned from the co-occurrence counts of the text itself.

    The weights are a softmax over cosines, so they can be viewed like attention weights. No model reads the
    text.

    >>> from regard.app.long_text import view_co_occurrence
    >>> view = view_co_occurrence("the dog barks and the dog sleeps and the cat sleeps")
    >>> [(layer["label"], layer["heads"]) for layer in view.describe()["inputs"][0]["layers"]]
    [('whole vectors', 1), ('8 slices', 8)]
    """
    words = [word.text for word in split_words(text)]
    if not 2 <= len(words) <= MAX_WORDS:
        raise ArgumentError(f"The text has {pluralize(len(words), 'word')}; it must have 2 to {MAX_WORDS:,}.")
    (tokens,) = StaticEncoder.learn([text], width=_WIDTH).token_vectors([text])
    vectors = tokens.vectors[0].detach()  # (n, m)
    slices = vectors.unflatten(1, (_HEADS, -1)).transpose(0, 1)  # n (h d) -> h n d
    scale = 2 * math.log(len(words))  # keeps the weights concentrated in longer texts
    layers = [
        LayerView("whole", "whole vectors", "self", _lazy_weights(vectors[None], scale)),
        LayerView("slices", f"{_HEADS} slices", "self", _lazy_weights(slices, scale)),
    ]
    note = (
        f"{len(words):,} words. Not the attention of a model: the map compares words by the words near them "
        "in this text."
    )
    return ViewModel(CO_OCCURRENCE, [InputView(shorten(text), [TextView(tuple(words))], layers, note)])


def _lazy_weights(x: Tensor, scale: float) -> Weights:
    """Return the softmax of scale · cosine, lazily; only τ is computed here, row by row."""
    directions = F.normalize(x, dim=-1).contiguous()
    weights = CapturedCall(directions, directions, scale=scale).weights()
    if not weights.compute_tau():  # no kernels available
        return attend(directions, directions, directions[..., :1], score=ScaledDot(scale))[1]
    return Weights(weights.problem, None, x.shape[:-2], tau_from_kernels=True)

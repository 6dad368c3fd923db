"""Simultaneous translation with an infinite lag equals greedy decoding; emitted words never change."""

import math
import re
from functools import cache

import pytest
import torch

from regard.errors import ArgumentError, DTypeError
from regard.models import RecurrentConfig, RecurrentSeq2Seq, Transformer, TransformerConfig
from regard.translation import (
    AlignmentHead,
    Greedy,
    Tokenizer,
    TokenizerPair,
    Translator,
    average_lagging,
    translate_simultaneously,
)
from regard.translation.simultaneous import _PrefixDecoder
from regard.translation.text.profile import TextProfile
from tests.cases import rotated

LINES = ["ein Hund bellt", "eine Katze", "zwei Hunde"]


@cache
def _tokens() -> Tokenizer:
    return Tokenizer.learn(LINES * 5, size=50)


def translator(kind: str, seed: int, shift: str = "output") -> Translator:
    torch.manual_seed(seed)
    tokens = _tokens()
    if kind == "transformer":
        model = Transformer(len(tokens), TransformerConfig(width=16, heads=2, layers=2), share=True)
    else:
        model = RecurrentSeq2Seq(len(tokens), RecurrentConfig(width=16), share=True)
    with torch.no_grad():
        model.output_weight[2] += 0.02  # makes some translations end
    return Translator(
        model.eval(), TokenizerPair(tokens, tokens), alignment_head=AlignmentHead(0, shift=shift)
    )


@pytest.mark.parametrize("kind", ["transformer", "recurrent"])
def test_an_infinite_lag_equals_greedy_decoding(kind):
    model = translator(kind, 0)
    for line in LINES[:2]:
        emissions = list(translate_simultaneously(model, line.split(), lag=math.inf))
        (offline,) = model.translate(line, strategy=Greedy())
        assert " ".join(emission.text for emission in emissions) == offline.text
        assert {emission.words_read for emission in emissions} <= {len(line.split())}


@pytest.mark.parametrize("shift", ["input", "output"])
def test_words_arrive_in_order_and_a_larger_lag_is_never_earlier(shift):
    model = translator("transformer", 1, shift)
    first = []
    for lag in (0, 1, 3, math.inf):
        emissions = list(translate_simultaneously(model, iter(LINES[0].split()), lag=lag))
        reads = [emission.words_read for emission in emissions]
        assert reads == sorted(set(reads))
        assert all(emission.text for emission in emissions)
        assert not reads or reads[0] > min(lag, 2)
        first.append(reads[0] if reads else len(LINES[0].split()))
    assert first == sorted(first)


def test_with_lag_0_at_most_one_token_attends_to_the_last_word():
    """Otherwise, the model completes the translation after the first word."""
    words, numbers = LINES[0].split(), []
    for seed in range(4):
        decoder = _PrefixDecoder(translator("transformer", seed))
        for last in range(len(words)):
            old = len(decoder._aligned)
            decoder.read(" ".join(words[: last + 1]), 0)
            new = decoder._aligned[old:]
            assert all(word < last for word in new[:-1])
            numbers.append(len(new))
    assert max(numbers) > 0


def test_words_are_consumed_only_as_needed():
    model, read = translator("transformer", 1), []

    def words():
        for word in LINES[0].split():
            read.append(word)
            yield word

    for emission in translate_simultaneously(model, words(), lag=1):
        assert emission.words_read == len(read)


def test_average_lagging():
    """Ma et al. 2019: a full-sentence translation lags by its length, wait-k by k."""
    for n in (1, 4, 9):
        assert average_lagging([n] * n, n) == n
        for k in range(1, n + 1):
            assert average_lagging([min(k + t, n) for t in range(n)], n) == pytest.approx(k)
    assert average_lagging([4] * 8, 4) == 4
    with pytest.raises(ArgumentError, match="0 target words"):
        average_lagging([], 3)


def test_arguments_are_checked():
    model = translator("transformer", 0)
    with pytest.raises(DTypeError, match=r"text\.split"):
        list(translate_simultaneously(model, "ein Hund"))
    with pytest.raises(ArgumentError, match="lag"):
        list(translate_simultaneously(model, ["ein"], lag=-1))
    assert list(translate_simultaneously(model, [])) == []


SPANS = (
    *("15:30", "https://a.de/b?c=1", "3,50€", "{{ user.name }}", "🍕", "漢字"),
    *("3,5 %", "§ 5", "+49 30 123 456", "`a b c`", "3 x 4 = 12"),
)


PROTECTED = [
    "zwei <b>Hunde</b> <i class='x y'>bellen<br/></i>",
    "ein (<b>kleiner Hund</b>) bellt [<i>laut im <u>Garten</u></i>] <b>(und oft)</b>",
    "15:30 ein Hund 15:30",
    "ein " + " Hund ".join(SPANS),
    *(f"ein Hund {span} bellt laut im Garten" for span in SPANS),
]


@rotated(sampled=2, line=PROTECTED, copies=[True, False], lag=[0, 1, 3])
def test_protected_text_and_tags_survive_once_and_in_order(line, copies, lag):
    """The model has random parameters, so it may generate anything."""
    model = translator("transformer", 1)
    model.reader.copies = copies
    emissions = list(translate_simultaneously(model, line.split(), lag=lag))
    text = " ".join(emission.text for emission in emissions)
    for span in SPANS:
        assert text.count(span) == line.count(span), (line, text)
    assert re.findall(r"<[^<>]*>|[][()]", text) == re.findall(r"<[^<>]*>|[][()]", line)
    assert "⁇" not in text


def test_capitals_are_restored():
    torch.manual_seed(0)
    profile = TextProfile.of([(line, line) for line in LINES * 9])
    model = translator("transformer", 1)
    model = Translator(model.model, model.tokens, profile=profile, alignment_head=model.alignment_head)
    shouted = list(translate_simultaneously(model, ["EIN", "HUND", "BELLT"], lag=1))
    plain = list(translate_simultaneously(model, ["ein", "Hund", "bellt"], lag=1))
    assert [emission.text for emission in shouted] == [emission.text.upper() for emission in plain]


@pytest.mark.parametrize("kind", ["transformer", "recurrent"])
def test_the_decoder_continues_greedily(kind):
    """Once the whole source is read, the tokens equal greedy decoding."""
    model = translator(kind, 0)
    for line in LINES:
        decoder = _PrefixDecoder(model)
        decoder._extend(model.reader.read_whole(line).parts[0].segmentation, math.inf)
        (offline,) = model.translate(line, strategy=Greedy())
        assert decoder._tokens == offline.token_ids

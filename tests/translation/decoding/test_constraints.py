"""Constrained search: all phrases appear, probabilities are correct, and limits hold."""

import pytest
import torch

from regard.errors import ArgumentError, ShapeError
from regard.models import Packed, Transformer, TransformerConfig
from regard.translation.decoding.constraints import Constraints, allocate, count_phrases
from regard.translation.decoding.search import search
from regard.translation.decoding.strategies import Beam, Greedy, Sample
from regard.translation.tokens import UNKNOWN

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model() -> Transformer:
    torch.manual_seed(0)
    return Transformer(40, TransformerConfig(width=16, heads=2, layers=1)).eval()


def contains(tokens: list[int], phrase: list[int]) -> bool:
    return any(tokens[i : i + len(phrase)] == phrase for i in range(len(tokens)))


def test_all_phrases_appear(model):
    phrases = [[], [[8, 9]], [[5], [5], [6, 7, 8]], [[9, 9, 9, 9]]]
    source = Packed.of([[5, 6, 2], [7, 2], [8, 9, 10, 2], [11, 2]])
    for strategy in (Greedy(), Beam(3, n_best=2), Beam(8)):
        for limit in (8, 20):
            results = search(model, source, strategy, max_new_tokens=limit, constraints=Constraints(phrases))
            for own, hypotheses in zip(phrases, results, strict=True):
                for hypothesis in hypotheses:
                    assert len(hypothesis.tokens) < limit or not hypothesis.finished
                    assert all(contains(hypothesis.tokens, phrase) for phrase in own)
                    assert hypothesis.tokens.count(5) >= own.count([5])


def test_without_phrases_nothing_changes(model):
    source = Packed.of([[5, 6, 2], [7, 2]])
    plain = search(model, source, Beam(4), max_new_tokens=9)
    assert search(model, source, Beam(4), max_new_tokens=9, constraints=Constraints([[], []])) == plain
    mixed = search(model, source, Beam(4), max_new_tokens=9, constraints=Constraints([[], [[3, 4]]]))
    assert mixed[0][0].tokens == plain[0][0].tokens


def test_phrase_that_begins_with_another_phrase(model):
    phrases = [[[5], [5, 6]], [[5, 6], [5]]]  # like "fire" and "firefighter"; 6 continues a word
    for strategy in (Greedy(), Beam(5)):
        results = search(
            model,
            Packed.of([[5, 6, 2], [7, 2]]),
            strategy,
            max_new_tokens=9,
            constraints=Constraints(phrases, inner=[6, 7]),
        )
        for (best,) in results:
            assert contains(best.tokens, [5, 6])
            assert best.tokens.count(5) >= 2


def test_sentences_without_phrases_do_not_depend_on_the_batch(model):
    sources, phrases = [[5, 6, 2], [7, 2], [8, 9, 10, 2]], [[], [[8, 9]], []]
    for strategy in (
        Greedy(),
        Beam(4, n_best=2),
        Beam(4, early_stopping=True),
        Beam(4, early_stopping="never"),
    ):
        batch = search(
            model, Packed.of(sources), strategy, max_new_tokens=9, constraints=Constraints(phrases, [0, 1, 2])
        )
        for source, own, limit, hypotheses in zip(sources, phrases, [0, 1, 2], batch, strict=True):
            constraints = Constraints([own], [limit])
            (alone,) = search(model, Packed.of([source]), strategy, max_new_tokens=9, constraints=constraints)
            assert [h.tokens for h in hypotheses] == [h.tokens for h in alone]


def test_unknown_tokens_are_limited(model):
    source = Packed.of([[5, 6, 2], [7, 2]])
    with torch.no_grad():
        bias = model.output_weight.clone()
        model.output_weight[UNKNOWN] = 3 * model.output_weight.abs().max()  # prefer the unknown token
    try:
        for limits in ([0, 0], [2, 0]):
            constraints = Constraints([[], []], max_unknown=limits)
            for hypotheses, limit in zip(
                search(model, source, Beam(3), max_new_tokens=9, constraints=constraints), limits, strict=True
            ):
                assert hypotheses[0].tokens.count(UNKNOWN) <= limit
    finally:
        with torch.no_grad():
            model.output_weight.copy_(bias)


def test_errors(model):
    source = Packed.of([[5, 2]])
    for constraints, strategy, error, message in [
        (Constraints([]), Beam(), ShapeError, "1 sentence and constraints for 0"),
        (Constraints([[[5]]]), Sample(), ArgumentError, "cannot be forced when sampling"),
        (
            Constraints([[[5] * 9]]),
            Beam(),
            ArgumentError,
            "have 9 tokens, but its translation can have at most 8",
        ),
    ]:
        with pytest.raises(error, match=message):
            search(model, source, strategy, max_new_tokens=9, constraints=constraints)


def test_counts_and_banks():
    assert count_phrases([8, 9, 8], [[8, 9]]) == (2, set())
    assert count_phrases([8], [[8, 9], [8]]) == (1, {8})
    assert allocate([3, 0, 0, 0, 0], 2) == [0, 1]
    assert allocate([0, 1], 5) == [0, 1]

"""Validation: the scores do not depend on the batches."""

import pytest
import torch

from regard.models.packed import Packed
from regard.models.seq2seq import Seq2Seq
from regard.translation.alignment.alignment_head import AlignmentHead
from regard.translation.alignment.attention_aligner import align
from regard.translation.alignment.cross_attention import cross_attention_layers, has_cross_attention
from regard.translation.config import TranslationConfig
from regard.translation.data.batches import Batch
from regard.translation.data.pairs import Pair
from regard.translation.decoding.search import search
from regard.translation.decoding.strategies import Greedy
from regard.translation.tokens import END
from regard.translation.training import validation
from regard.translation.training.callbacks import ValidationResult
from regard.translation.training.validation import (
    DevSet,
    DivergenceMonitor,
    OverfittingMonitor,
    dev_loss,
    translate_greedy,
    validate,
)
from tests.translation.small import DEV, PAIRS, TOKENS, small_config

LONG = [*PAIRS[:7], Pair("1 2 3 4 5 6 7 8 9 0 1", "1 0"), Pair("1", "1 2 3 4 5"), *PAIRS[20:23]]


@pytest.fixture(params=["transformer", "recurrent", "plain"])
def model(request: pytest.FixtureRequest) -> Seq2Seq:
    torch.manual_seed(0)
    made = small_config(request.param).model.build(TOKENS.sizes())
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=1.0)  # makes ties unlikely, so rounding does not matter
    return made


def test_the_loss_is_the_mean_over_all_tokens(model, monkeypatch):
    alone = []
    for pair in LONG:
        batch = Batch.of([(TOKENS.source.encode(pair.source), TOKENS.target.encode(pair.target))])
        alone.append((float(model.eval().loss(batch.source, batch.target).detach()), batch.labels))
    mean = sum(loss * labels for loss, labels in alone) / sum(labels for _, labels in alone)
    model.train()
    for budget in (1, 30, 4096):
        monkeypatch.setattr(validation, "_BATCH_TOKENS", budget)
        dev = DevSet.from_pairs(LONG, TOKENS)
        assert sum(batch.labels for batch in dev.batches) == sum(labels for _, labels in alone)
        assert dev_loss(model, dev.batches) == pytest.approx(mean, rel=1e-5)
    assert model.training  # restored
    assert all(parameter.grad is None for parameter in model.parameters())


def test_translations_are_in_the_order_of_their_sources(model, monkeypatch):
    sources = DevSet.from_pairs(LONG, TOKENS).sources
    wanted = []
    for source in sources:
        packed = Packed.of([[*source, END]])
        ((best,),) = search(model, packed, Greedy(), max_new_tokens=2 * len(source) + 10)
        wanted.append(TOKENS.target.decode(best.tokens).text.split())
    monkeypatch.setattr(validation, "_BATCH_SENTENCES", 5)
    found = [text.split() for text in translate_greedy(model, TOKENS, sources)]
    # a translation without an end token is as long as the longest in its batch
    assert all(a[: len(b)] == b for a, b in zip(found, wanted, strict=True))
    assert len({tuple(words) for words in found}) > 1


def test_a_larger_value_is_better(model):
    dev = DevSet.from_pairs(DEV[:1], TOKENS)
    found = validate(model, TOKENS, dev, 7)
    assert found.score("loss") == -found.loss
    assert found.score("bleu") == pytest.approx(found.bleu, abs=0.002 * found.loss)
    assert 0 <= found.bleu <= 100
    assert 0 <= found.exact <= 1
    assert (found.step, found.best, found.sample.source) == (7, False, DEV[0].source)
    assert validate(model, TOKENS, dev, 7) == found


def test_perfect_translations_have_perfect_scores(monkeypatch, model):
    pairs = [Pair(f"{pair.source} {pair.source}", f"{pair.target} {pair.target}") for pair in DEV]
    right = [pair.target for pair in pairs]
    monkeypatch.setattr(validation, "translate_greedy", lambda *given: right)
    found = validate(model, TOKENS, DevSet.from_pairs(pairs, TOKENS), 1)
    assert (found.bleu, found.exact) == (pytest.approx(100), 1)
    monkeypatch.setattr(validation, "translate_greedy", lambda *given: [*right[:-1], ""])
    found = validate(model, TOKENS, DevSet.from_pairs(pairs, TOKENS), 1)
    assert found.bleu < 100
    assert found.exact == pytest.approx((len(pairs) - 1) / len(pairs))


def test_the_sample_is_a_pair_and_its_translation(model):
    dev = DevSet.from_pairs(LONG, TOKENS)
    sample = validate(model, TOKENS, dev, 1).sample
    index = [pair.source for pair in LONG].index(sample.source)
    assert index == 7  # the longest of the first eight
    assert sample.reference == LONG[index].target
    assert sample.translation == translate_greedy(model, TOKENS, dev.sources)[index]


def test_the_loss_is_over_all_pairs_and_bleu_over_some(model, monkeypatch):
    monkeypatch.setattr(validation, "_MAX_TRANSLATED", 3)
    dev = DevSet.from_pairs(LONG, TOKENS)
    assert len(dev.sources) == 3
    assert sum(len(batch.source) for batch in dev.batches) == len(LONG)
    assert validate(model, TOKENS, dev, 1).sample.source in {pair.source for pair in LONG[:3]}


@pytest.mark.parametrize("better", [True, False])
def test_the_loss_breaks_ties_of_bleu(better, monkeypatch):
    """BLEU counts 4-grams, which these targets do not have."""
    model = small_config("plain").model.build(TOKENS.sizes())
    dev = DevSet.from_pairs(DEV, TOKENS)
    monkeypatch.setattr(validation, "translate_greedy", lambda *given: [pair.target for pair in DEV])
    first = validate(model, TOKENS, dev, 1)
    monkeypatch.setattr(validation, "dev_loss", lambda *given: first.loss + (-0.1 if better else 0.1))
    second = validate(model, TOKENS, dev, 1)
    assert first.bleu == second.bleu == 0
    assert (second.score("bleu") > first.score("bleu")) == better


def test_the_sample_has_an_alignment(model):
    sample = validate(model, TOKENS, DevSet.from_pairs(LONG, TOKENS), 1).sample
    if not has_cross_attention(model):
        assert sample.alignment is None
        return
    head = AlignmentHead(layer=min(1, len(cross_attention_layers(model)) - 1), shift="output")
    (wanted,) = align(model, TOKENS, [(sample.source, sample.translation)], head)
    assert sample.alignment == wanted.to_dict()


def test_overfitting_is_reported_once_and_only_if_loss_and_bleu_become_worse():
    def warnings(*scores: tuple[float, float]) -> list[str]:
        monitor = OverfittingMonitor(TranslationConfig.preset("tiny"))
        results = [
            ValidationResult(50 * (i + 1), loss, bleu, 0.0, None) for i, (loss, bleu) in enumerate(scores)
        ]
        return [text for result in results if (text := monitor.check(result))]

    assert len(warnings((2, 10), (2.1, 9.5), (2.2, 8.9), (2.3, 8.5), (2.4, 8), (2.5, 7))) == 1
    assert not warnings((2, 10), (2.1, 10.5), (2.2, 11), (2.3, 11.5), (2.4, 12))  # BLEU improves
    assert not warnings((2, 10), (1.9, 8), (1.8, 7), (1.7, 6))  # the loss improves
    assert not warnings((2, 10), (2.001, 9), (2.002, 8), (2.003, 8))  # barely worse


def test_divergence_is_reported_once():
    monitor = DivergenceMonitor(TranslationConfig.preset("tiny"))
    noisy = [6.5, 4.0, 3.0, 3.5, 2.6, 4.5]  # short reports before a validation are noisy
    assert [monitor.check(50 * n, loss) for n, loss in enumerate(noisy, 1)] == [None] * len(noisy)
    assert monitor.check(350, 20.2).startswith("Training has diverged: since update 250,")
    assert monitor.check(400, 70.0) is None


def test_a_small_loss_may_double():
    monitor = DivergenceMonitor(TranslationConfig.preset("tiny"))
    assert [monitor.check(50 * n, loss) for n, loss in enumerate([2.0, 0.01, 0.5], 1)] == [None] * 3

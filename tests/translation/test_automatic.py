"""The preset auto: settings grow with the corpus, and every choice is valid."""

from collections import Counter
from itertools import pairwise

import pytest
import torch

from regard.translation.automatic import choose_config, describe_choice
from regard.translation.config import TranslationConfig
from regard.translation.data.statistics import CorpusStatistics
from regard.translation.training import timing

SIZES = [10**n for n in range(3, 10)]


@pytest.fixture
def tokens_per_second(monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
    """Return a table of the measured training speeds by model width; tests may change it."""
    speeds = {128: 24_000.0, 192: 12_000.0, 256: 8000.0, 512: 1000.0}
    monkeypatch.setattr(timing, "tokens_per_second", lambda config, length: speeds[config.model.width])
    return speeds


def test_a_larger_corpus_never_gets_a_smaller_model():
    configs = [choose_config(CorpusStatistics(pairs=n // 100, characters=n)) for n in SIZES]
    for small, large in pairwise(configs):
        assert small.model.width <= large.model.width
        assert small.model.layers <= large.model.layers
        assert small.tokens.size <= large.tokens.size
        assert small.model.dropout >= large.model.dropout
        assert small.training.epochs >= large.training.epochs
    assert all(config.model.width % config.model.heads == 0 for config in configs)


@pytest.mark.parametrize("width", [128, 256, 512])
def test_the_width_alone_may_be_changed(width):
    for pairs in (1000, 10_000, 30_000, 300_000):
        statistics = CorpusStatistics(pairs=pairs, characters=130 * pairs)
        config = choose_config(statistics, change=lambda config: config.override([f"model.width={width}"]))
        assert config.model.width == width


@pytest.mark.parametrize(("model", "width"), [("transformer", 192), ("recurrent", 256), ("plain", 256)])
def test_models_without_guided_alignment_are_wider_and_need_more_dropout(model, width):
    statistics = CorpusStatistics(pairs=29_000, characters=3.9e6)
    config = choose_config(statistics, model)
    assert (config.model.width, config.training.batch_tokens) == (width, 1250 if width == 192 else 2500)
    dropout = [choose_config(statistics, model, epochs=epochs).model.dropout for epochs in (20, 30, 50)]
    assert dropout == ([0.2, 0.2, 0.2] if model == "transformer" else [0.2, 0.3, 0.3])


def test_regularization_follows_the_length_of_training(tokens_per_second):
    statistics = CorpusStatistics(pairs=29_000, characters=3.9e6)
    configs = [choose_config(statistics, epochs=epochs) for epochs in (1, 8, 20, 60)]
    assert [config.model.dropout for config in configs] == [0.1, 0.1, 0.2, 0.2]
    assert [config.training.epochs for config in configs] == [1, 8, 20, 60]
    quick, slow = (choose_config(statistics, minutes=minutes) for minutes in (0.01, 10_000))
    assert (quick.model.dropout, slow.model.dropout) == (0.1, 0.2)
    assert (quick.training.minutes, slow.training.minutes) == (0.01, 10_000)


def test_the_number_of_epochs_follows_the_measured_speed(tokens_per_second):
    statistics = CorpusStatistics(pairs=29_000, characters=3.9e6)
    config = choose_config(statistics, minutes=40)
    seconds = config.training.epochs * statistics.tokens / tokens_per_second[192]
    assert 0.85 * 2400 < seconds < 2400
    tokens_per_second[192] *= 2
    faster = choose_config(statistics, minutes=40)
    assert faster.training.epochs == pytest.approx(2 * config.training.epochs, abs=2)


def test_the_speed_is_measured_with_the_changed_settings(tokens_per_second):
    statistics = CorpusStatistics(pairs=29_000, characters=3.9e6)
    settings = ["model.width=128", "training.threads=1"]
    config = choose_config(statistics, minutes=40)
    changed = choose_config(statistics, minutes=40, change=lambda config: config.override(settings))
    assert (changed.model.width, changed.training.threads) == (128, 1)
    ratio = tokens_per_second[128] / tokens_per_second[192]
    assert changed.training.epochs == pytest.approx(ratio * config.training.epochs, abs=2)


def test_a_model_size_that_is_set_is_measured_once(monkeypatch):
    measured = []
    monkeypatch.setattr(timing, "tokens_per_second", lambda config, length: measured.append(config) or 1.0)
    settings = ["model.width=512", "model.layers=6", "model.heads=16"]
    statistics = CorpusStatistics(pairs=10**6, characters=2e8)
    config = choose_config(statistics, minutes=1, change=lambda config: config.override(settings))
    assert (config.model.width, len(measured)) == (512, 1)


def test_the_measurement_uses_the_threads_of_the_config(monkeypatch):
    threads, before = [], torch.get_num_threads()

    def time_steps(*args, **options):
        threads.append(torch.get_num_threads())
        return [1.0]

    monkeypatch.setattr(timing, "time_steps", time_steps)
    for number in (0, before + 1):
        timing.tokens_per_second(TranslationConfig.preset("tiny").override([f"training.threads={number}"]), 5)
    assert threads == [before, before + 1]
    assert torch.get_num_threads() == before


def test_the_speed_of_training_is_measured():
    config = TranslationConfig.preset("tiny")
    larger = config.override(["model.layers=6", "model.width=256"])
    few, many = (timing.tokens_per_second(each, 12) for each in (larger, config))
    assert 0 < few < many
    for model in ("recurrent", "plain"):
        assert timing.tokens_per_second(TranslationConfig.preset("tiny", model), 5) > 0


def test_a_large_corpus_gets_a_smaller_model_if_there_is_little_time(tokens_per_second):
    statistics = CorpusStatistics(pairs=10**7, characters=2e9)
    models = [choose_config(statistics, minutes=minutes).model for minutes in (1, 10**7)]
    assert [model.width for model in models] == [192, 512]


def test_every_model_and_size_gives_a_valid_config():
    for n in (0, *SIZES):
        for model in ("transformer", "recurrent", "plain"):
            statistics = CorpusStatistics(pairs=n, characters=n)
            config = choose_config(statistics, model)
            assert config.model.kind == model
            assert TranslationConfig.from_dict(config.to_dict()) == config
            assert str(config.model.width) in describe_choice(statistics, config)


def test_the_vocabulary_covers_the_characters():
    many = Counter({chr(0x4E00 + n): 1 + 100_000 // (n + 1) for n in range(3000)})
    config = choose_config(CorpusStatistics(pairs=1000, characters=1e5, alphabet=many))
    assert config.tokens.character_coverage < 1
    assert 1000 < config.tokens.size < 5000
    few = choose_config(CorpusStatistics(pairs=1000, characters=1e5, alphabet=Counter("abcdef")))
    assert few.tokens.character_coverage == 1
    assert few.tokens.size < config.tokens.size


def test_short_training_uses_small_batches():
    statistics = CorpusStatistics(pairs=29_000, characters=3.9e6)
    sizes = [
        choose_config(statistics, epochs=epochs).training.batch_tokens for epochs in (1, 3, 5, 8, 12, 13, 20)
    ]
    assert sizes == sorted(sizes)
    assert (sizes[0], sizes[-1]) == (600, 1250)
    assert 8 * statistics.tokens / sizes[3] == pytest.approx(8000, rel=0.1)


@pytest.mark.parametrize(
    ("setting", "guided", "sampled"),
    [
        ("model.kind='transformer'", True, True),
        ("model.kind='recurrent'", False, True),
        ("tokens.kind='bpe'", True, False),
        ("training.guided_alignment_weight=0", False, True),
    ],
)
def test_settings_that_need_a_transformer_or_unigrams_follow_the_changes(setting, guided, sampled):
    config = choose_config(
        CorpusStatistics(pairs=3000, characters=400_000), change=lambda config: config.override([setting])
    )
    assert (config.training.guided_alignment_weight > 0, config.training.subword_sampling > 0) == (
        guided,
        sampled,
    )


def test_only_small_corpora_are_aligned_for_training():
    sizes = [(30_000, 4 * 10**6), (10**6, 10**8)]
    configs = [choose_config(CorpusStatistics(pairs=pairs, characters=n)) for pairs, n in sizes]
    assert [config.training.guided_alignment_weight > 0 for config in configs] == [True, False]

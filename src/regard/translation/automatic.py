"""The preset `auto`: settings based on the size of the corpus.

Torch is imported only if the training time is limited, to measure the speed of training.

A small corpus needs a small model, a small vocabulary and strong regularization; a large corpus
needs the opposite. Sennrich and Zhang 2019 and Araabi and Monz 2020 report the same trends.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from regard.translation.config import Model, TranslationConfig
from regard.translation.data.statistics import CorpusStatistics

_TOKENS_PER_ENTRY = 45  # occurrences of an average vocabulary entry in the corpus
_MIN_VOCABULARY = 200
_MANY_CHARACTERS = 1000  # with more distinct characters, the text has Han characters or a syllabary
_VALIDATIONS = 20  # number of validations per training run
_MINUTES_PER_VALIDATION = 3  # if training time is limited; one validation takes about 10 seconds
_MIN_UPDATES = 50  # minimum number of updates between validations
_SHORT_UPDATES = 8000  # short runs use smaller batches to reach this number of updates
_MIN_BATCH = 600  # tokens in the smallest batch of a short run
_SHORT_EPOCHS, _SHORT_LEARNING_RATE = 10, 1.5e-3  # a run with fewer epochs is short
_LONG_EPOCHS = 25  # without guided alignment, a run with at least as many epochs needs more dropout
_MAX_LENGTH = 100  # tokens in the longest sentence of a speed measurement
_MIN_EPOCHS = 4  # if fewer epochs fit into the available time, a smaller model learns more
_GUIDED_WEIGHT = 0.3
_MAX_GUIDED_TOKENS = 10_000_000  # with more text, aligning it takes minutes
_TRAINING = 0.9  # fraction of the available time that is not spent in validation and preparation


class _Row(NamedTuple):
    """Settings for corpora of up to `max_tokens` tokens, source plus target."""

    max_tokens: float
    layers: int
    width: int
    heads: int  # a power of two, so that --set model.width=256 alone is valid for every row
    vocabulary: int  # maximum size
    batch_tokens: int
    learning_rate: float
    epochs: int


_TABLE = (
    #    tokens, layers, width, heads, vocabulary, batch, learning rate, epochs
    _Row(200_000, 2, 128, 4, 4000, 1500, 2e-3, 40),
    _Row(500_000, 3, 192, 4, 4000, 2000, 1.5e-3, 30),
    _Row(2_000_000, 3, 192, 4, 4000, 1250, 2e-3, 20),
    _Row(10_000_000, 3, 256, 8, 8000, 4000, 1e-3, 12),
    _Row(100_000_000, 6, 512, 16, 16_000, 8000, 7e-4, 8),
    _Row(float("inf"), 6, 512, 16, 32_000, 16_000, 7e-4, 4),
)
_RECURRENT_TABLE = (*_TABLE[:2], _Row(2_000_000, 3, 256, 8, 4000, 2500, 1e-3, 20), *_TABLE[3:])
_SMALLEST = 2  # index of the smallest row to use if time is short


def choose_config(
    statistics: CorpusStatistics,
    model: Model = "transformer",
    *,
    epochs: int | None = None,
    minutes: float | None = None,
    change: Callable[[TranslationConfig], TranslationConfig] = lambda config: config,
) -> TranslationConfig:
    """Choose all settings for a corpus of the given size: the preset `auto`.

    epochs, minutes: length of training. Default: the number of epochs in the table.
    change: changes some of the chosen settings, such as
        `lambda config: config.override(["training.threads=1"])`.

    `train` uses this function by default; to change some settings, pass
    `config=lambda statistics: choose_config(statistics, change=…)`.

    | tokens | layers | width | heads | vocabulary | batch | learning rate | epochs |
    |---|---|---|---|---|---|---|---|
    | up to 200,000 | 2 | 128 | 4 | tokens / 45 | 1,500 | 0.002 | 40 |
    | up to 500,000 | 3 | 192 | 4 | 4,000 | 2,000 | 0.0015 | 30 |
    | up to 2 million | 3 | 192 | 4 | 4,000 | 1,250 | 0.002 | 20 |
    | up to 10 million | 3 | 256 | 8 | 8,000 | 4,000 | 0.001 | 12 |
    | up to 100 million | 6 | 512 | 16 | 16,000 | 8,000 | 0.0007 | 8 |
    | more | 6 | 512 | 16 | 32,000 | 16,000 | 0.0007 | 4 |

    Regularization depends on the number of epochs, because a model that sees each pair only a few times
    cannot overfit: dropout 0.1 below 10 epochs, then 0.2, and 0.3 from 25 epochs on without guided alignment;
    from 10 epochs on, 10% of the words are split into random subwords, if the tokens are unigrams. Below 10
    epochs, batches are smaller if training would otherwise have fewer than 8,000 updates, and the learning
    rate is at least 0.0015 up to a width of 256. Up to 10 million tokens, one head of a Transformer learns
    to attend to the words that the lexical aligner links (guided alignment, Garg et al. 2019). Training
    stops early if 6 validations in a row bring no improvement. Recurrent models have one or two layers and,
    for 500,000 to 2 million tokens, width 256, batches of 2,500 tokens and a learning rate of 0.001. The
    number of epochs that fit into `minutes` is estimated from the speed of a few training steps on random
    sentences with the changed settings.

    >>> from regard.translation.automatic import choose_config
    >>> from regard.translation.data.statistics import CorpusStatistics
    >>> config = choose_config(CorpusStatistics(pairs=3000, characters=400_000))
    >>> config.model.width, config.model.layers, config.tokens.size
    (128, 2, 2000)
    >>> choose_config(CorpusStatistics(pairs=29_000, characters=3.9e6), epochs=8).model.dropout
    0.1
    """
    base = TranslationConfig.preset("small", model)
    table = _TABLE if model == "transformer" else _RECURRENT_TABLE

    def config_of(row: _Row) -> TranslationConfig:
        resized = _resize(base, row, statistics)
        kind = change(resized).model.kind  # `change` may select another kind of model
        return change(_set_guided_alignment(resized, kind, statistics))

    row, passes = _plan(table, config_of, statistics, epochs, minutes)
    short = passes < _SHORT_EPOCHS
    batch_tokens, learning_rate = row.batch_tokens, row.learning_rate
    if short:
        batch_tokens = _shrink_batch(row, passes * statistics.tokens)
        learning_rate = max(learning_rate, _SHORT_LEARNING_RATE) if row.width <= 256 else learning_rate
    updates = passes * statistics.tokens / batch_tokens
    validations = min(_VALIDATIONS, max(minutes / _MINUTES_PER_VALIDATION, 5)) if minutes else _VALIDATIONS
    changed = config_of(row)
    guided = changed.training.guided_alignment_weight > 0
    sampling = not short and changed.tokens.kind == "unigram"
    long = passes >= _LONG_EPOCHS and not guided
    chosen = _resize(base, row, statistics).replace(
        {
            "model": {"dropout": 0.1 if short else 0.3 if long else 0.2},
            "training": {
                "batch_tokens": batch_tokens,
                "learning_rate": learning_rate,
                "warmup": 400 if row.width <= 256 else 4000,
                "epochs": passes,
                "minutes": float(minutes or 0),
                "subword_sampling": 0.1 if sampling else 0.0,
                "guided_alignment_weight": _GUIDED_WEIGHT if guided else 0.0,
                "validate_every": max(_MIN_UPDATES, round(updates / validations)),
                "patience": 6,
            },
        }
    )
    return change(chosen)


def _resize(base: TranslationConfig, row: _Row, statistics: CorpusStatistics) -> TranslationConfig:
    """Return a config with the model size, vocabulary and batch size of a table row."""
    model = {"width": row.width}
    if base.model.kind == "transformer":
        model |= {"layers": row.layers, "heads": row.heads}
    training = {"batch_tokens": row.batch_tokens}
    return base.replace({"model": model, "tokens": _tokens(statistics, row), "training": training})


def _set_guided_alignment(
    config: TranslationConfig, model: Model, statistics: CorpusStatistics
) -> TranslationConfig:
    """Return a config with guided alignment for Transformers if the corpus is small enough to be aligned."""
    guided = model == "transformer" and statistics.tokens <= _MAX_GUIDED_TOKENS
    return config.replace({"training": {"guided_alignment_weight": _GUIDED_WEIGHT if guided else 0.0}})


def _shrink_batch(row: _Row, tokens: int) -> int:
    """Return the batch size of a short run. tokens: corpus size × number of epochs."""
    return min(max(round(tokens // _SHORT_UPDATES, -2), _MIN_BATCH), row.batch_tokens)


def _plan(
    table: Sequence[_Row],
    config_of: Callable[[_Row], TranslationConfig],
    statistics: CorpusStatistics,
    epochs: int | None,
    minutes: float | None,
) -> tuple[_Row, int]:
    """Return the table row for a corpus and the number of epochs; choose a smaller model if time is short.

    config_of: returns the model settings for a row, including the user's changes.
    """
    index = next(i for i, row in enumerate(table) if statistics.tokens <= row.max_tokens)
    if epochs or not minutes or not statistics.tokens:
        return table[index], epochs or table[index].epochs
    config = config_of(table[index])
    passes = _epochs_in(minutes, config, statistics)
    while passes < _MIN_EPOCHS and index > _SMALLEST:
        smaller = config_of(table[index - 1])
        if smaller.model == config.model and table[index - 1].width < table[index].width:
            break  # the user chose the size
        index, config = index - 1, smaller
        passes = _epochs_in(minutes, config, statistics)
    return table[index], passes


def _epochs_in(minutes: float, config: TranslationConfig, statistics: CorpusStatistics) -> int:
    """Estimate how many epochs fit into `minutes`, to choose model size, regularization and validations."""
    from regard.translation.training.timing import tokens_per_second  # imports torch

    length = statistics.tokens // max(2 * statistics.pairs, 1)  # mean length of a sentence
    speed = tokens_per_second(config, min(max(length, 1), _MAX_LENGTH))
    return max(int(_TRAINING * 60 * minutes * speed / statistics.tokens), 1)


def _tokens(statistics: CorpusStatistics, row: _Row) -> dict[str, Any]:
    """Return the vocabulary size and character coverage."""
    characters = len(statistics.alphabet)
    settings: dict[str, Any] = {}
    if characters > _MANY_CHARACTERS:
        settings["character_coverage"] = 0.9995
        counts = list(accumulate(count for _, count in statistics.alphabet.most_common()))
        characters = 1 + bisect_left(counts, 0.9995 * counts[-1])
    size = min(max(statistics.tokens // _TOKENS_PER_ENTRY, _MIN_VOCABULARY), row.vocabulary)
    size = max(size, 3 * characters // 2 + 50)
    return settings | {"size": round(size, -2 if size >= 1000 else -1)}


def describe_choice(statistics: CorpusStatistics, config: TranslationConfig) -> str:
    """Return a line with the size of the corpus and the most important settings.

    >>> from regard.translation.automatic import choose_config, describe_choice
    >>> from regard.translation.data.statistics import CorpusStatistics
    >>> statistics = CorpusStatistics(pairs=29_000, characters=3.9e6)
    >>> print(describe_choice(statistics, choose_config(statistics)))
    29,000 pairs, 870,000 tokens: 3 layers, width 192, vocabulary 4,000, dropout 0.2, 20 epochs
    """
    tokens = float(f"{statistics.tokens:.2g}")
    size = f"{tokens / 1e6:.1f} M" if tokens >= 1e6 else f"{tokens:,.0f}"
    model, training = config.model, config.training
    return (
        f"{statistics.pairs:,} pairs, {size} tokens: {model.layers} layer{'s' * (model.layers > 1)}, "
        f"width {model.width}, vocabulary {config.tokens.size:,}, dropout {model.dropout:g}, "
        f"{training.duration()}"
    )

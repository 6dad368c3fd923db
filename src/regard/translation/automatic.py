"""The preset `auto`: settings chosen from the size of the corpus. Does not import torch.

A small corpus needs a small model, a small vocabulary and much regularization; a large one needs the
opposite. Sennrich and Zhang 2019 and Araabi and Monz 2020 measure the same trends.
"""

from bisect import bisect_left
from itertools import accumulate
from typing import Any, NamedTuple

from regard.translation.config import Model, TranslationConfig
from regard.translation.data.statistics import CorpusStatistics

_TOKENS_PER_ENTRY = 45  # occurrences of an average vocabulary entry in the corpus
_MIN_VOCABULARY = 200
_MANY_CHARACTERS = 1000  # distinct characters: a language written with Han characters or syllables
_VALIDATIONS = 20  # during training
_MIN_UPDATES = 50  # between validations


class _Row(NamedTuple):
    """Settings for corpora of up to so many tokens, source plus target."""

    max_tokens: float
    layers: int
    width: int
    dropout: float
    vocabulary: int  # at most
    subword_sampling: float
    batch_tokens: int
    learning_rate: float
    epochs: int


# A head has 32 dimensions. The time of an update grows with the width, layers, vocabulary and batch.
_TABLE = (
    #    tokens, layers, width, dropout, vocabulary, sampling, batch, rate, epochs
    _Row(200_000, 2, 128, 0.3, 4000, 0.1, 1500, 2e-3, 40),
    _Row(500_000, 3, 192, 0.3, 4000, 0.1, 2000, 1.5e-3, 30),
    _Row(2_000_000, 3, 256, 0.2, 4000, 0.1, 2500, 1e-3, 20),
    _Row(10_000_000, 3, 256, 0.1, 8000, 0.0, 4000, 1e-3, 12),
    _Row(100_000_000, 6, 512, 0.1, 16_000, 0.0, 8000, 7e-4, 8),
    _Row(float("inf"), 6, 512, 0.1, 32_000, 0.0, 16_000, 7e-4, 4),
)


def choose_config(statistics: CorpusStatistics, model: Model = "transformer") -> TranslationConfig:
    """Choose all settings for a corpus of this size: the preset `auto`.

    Only the number of tokens and of distinct characters matters. `train` uses this function by default; to
    change some settings, pass `config=lambda statistics: choose_config(statistics).override([…])`.

    | tokens | layers | width | dropout | vocabulary | batch | learning rate | epochs |
    |---|---|---|---|---|---|---|---|
    | up to 200,000 | 2 | 128 | 0.3 | tokens / 45 | 1,500 | 0.002 | 40 |
    | up to 500,000 | 3 | 192 | 0.3 | up to 4,000 | 2,000 | 0.0015 | 30 |
    | up to 2 million | 3 | 256 | 0.2 | 4,000 | 2,500 | 0.001 | 20 |
    | up to 10 million | 3 | 256 | 0.1 | 8,000 | 4,000 | 0.001 | 12 |
    | up to 100 million | 6 | 512 | 0.1 | 16,000 | 8,000 | 0.0007 | 8 |
    | more | 6 | 512 | 0.1 | 32,000 | 16,000 | 0.0007 | 4 |

    Up to 2 million tokens, 10 % of the words are split into random subwords in each epoch. Recurrent models
    have one or two layers. Training stops early if 6 validations in a row bring no improvement.

    >>> from regard.translation.automatic import choose_config
    >>> from regard.translation.data.statistics import CorpusStatistics
    >>> config = choose_config(CorpusStatistics(pairs=3000, characters=400_000))
    >>> config.model.width, config.model.layers, config.tokens.size
    (128, 2, 2000)
    """
    row = next(row for row in _TABLE if statistics.tokens <= row.max_tokens)
    updates = row.epochs * statistics.tokens / row.batch_tokens
    settings: dict[str, dict[str, Any]] = {
        "model": {
            "width": row.width,
            "layers": row.layers,
            "heads": row.width // 32,
            "dropout": row.dropout,
        },
        "tokens": _tokens(statistics, row),
        "training": {
            "batch_tokens": row.batch_tokens,
            "learning_rate": row.learning_rate,
            "warmup": 400 if row.width <= 256 else 4000,
            "epochs": row.epochs,
            "subword_sampling": row.subword_sampling,
            "validate_every": max(_MIN_UPDATES, round(updates / _VALIDATIONS)),
            "patience": 6,
        },
    }
    base = TranslationConfig.preset("small", model)
    if model != "transformer":
        del settings["model"]["layers"], settings["model"]["heads"]
    return base.replace(settings)


def _tokens(statistics: CorpusStatistics, row: _Row) -> dict[str, Any]:
    """Return the vocabulary size and character coverage."""
    characters = len(statistics.alphabet)
    settings: dict[str, Any] = {}
    if characters > _MANY_CHARACTERS:
        settings["character_coverage"] = 0.9995
        counts = list(accumulate(count for _, count in statistics.alphabet.most_common()))
        characters = 1 + bisect_left(counts, 0.9995 * counts[-1])
    size = min(max(statistics.tokens // _TOKENS_PER_ENTRY, _MIN_VOCABULARY), row.vocabulary)
    size = round(max(size, 1.5 * characters + 50), -2 if size >= 1000 else -1)
    return settings | {"size": int(size)}


def describe_choice(statistics: CorpusStatistics, config: TranslationConfig) -> str:
    """Return a line with the size of the corpus and the most important settings.

    >>> from regard.translation.automatic import choose_config, describe_choice
    >>> from regard.translation.data.statistics import CorpusStatistics
    >>> statistics = CorpusStatistics(pairs=29_000, characters=3.9e6)
    >>> print(describe_choice(statistics, choose_config(statistics)))
    29,000 pairs, 870,000 tokens: 3 layers, width 256, vocabulary 4,000, dropout 0.2, 20 epochs
    """
    tokens = float(f"{statistics.tokens:.2g}")
    size = f"{tokens / 1e6:.1f} M" if tokens >= 1e6 else f"{tokens:,.0f}"
    model, training = config.model, config.training
    return (
        f"{statistics.pairs:,} pairs, {size} tokens: {model.layers} layer{'s' * (model.layers > 1)}, "
        f"width {model.width}, vocabulary {config.tokens.size:,}, dropout {model.dropout:g}, "
        f"{training.duration()}"
    )

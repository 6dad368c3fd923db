"""A tiny training task: reverse the digits of a number."""

from collections.abc import Sequence
from pathlib import Path

from regard.translation.config import TranslationConfig
from regard.translation.data.batches import InMemoryPairs
from regard.translation.data.pairs import Pair
from regard.translation.tokens import Tokenizer, TokenizerPair
from regard.translation.training.callbacks import Callback
from regard.translation.training.loop import Trainer, TrainingResult
from regard.translation.training.preparation import TrainingData

PAIRS = [Pair(" ".join(str(n)), " ".join(reversed(str(n)))) for n in range(95, 155)]
DEV = [Pair(" ".join(str(n)), " ".join(reversed(str(n)))) for n in range(98, 118, 4)]
_SHARED = Tokenizer.learn([pair.source for pair in PAIRS], kind="words", size=20)
TOKENS = TokenizerPair(_SHARED, _SHARED)
IDS = InMemoryPairs([(_SHARED.encode(pair.source), _SHARED.encode(pair.target)) for pair in PAIRS])
_SETTINGS = """
model.width=16 model.layers=1 model.heads=2 model.dropout=0.2 tokens.kind=words tokens.size=20
training.updates=10 training.batch_tokens=64 training.accumulate=2 training.warmup=4 training.validate_every=4
training.save_every=3 training.average_checkpoints=3 training.unknown_rate=0.2 training.learning_rate=0.01
training.metric=loss training.threads=1
"""


def small_config(model: str = "transformer", *settings: str) -> TranslationConfig:
    """A config with everything that makes resuming difficult, unless overridden."""
    return TranslationConfig.preset("tiny", model).override([*_SETTINGS.split(), *settings])


def small_trainer(
    folder: Path,
    config: TranslationConfig | None = None,
    *,
    pairs: InMemoryPairs = IDS,
    dev: Sequence[Pair] = DEV,
    callbacks: Sequence[Callback] = (),
) -> Trainer:
    """A trainer in a folder, which is created if necessary."""
    folder.mkdir(parents=True, exist_ok=True)
    data = TrainingData(TOKENS, pairs, list(dev))
    return Trainer(folder, config or small_config(), data, callbacks=callbacks)


def train_small(folder: Path, config: TranslationConfig | None = None) -> TrainingResult:
    """Train in a folder, from its last checkpoint."""
    return small_trainer(folder, config).run()

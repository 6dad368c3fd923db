"""Train the language model of the page on stories of the grammar."""

import torch

from regard.app.stories.grammar import stories
from regard.app.stories.words import BOYS, GIRLS
from regard.models.layers.blocks import TransformerConfig
from regard.models.packed import Packed
from regard.models.text_model import TextModel

CONFIG = TransformerConfig(width=96, layers=3, heads=4, ffn_dim=384, dropout=0.0)
_TRAINING_STORIES, _HELD_OUT_STORIES = 100_000, 500
_HELD_OUT_SEED = 1_000_003  # differs from every seed of the training stories used here


def train_stories(updates: int, seed: int = 0, *, progress: bool = False) -> tuple[TextModel, float]:
    """Train a model; return it with its loss on held-out stories, in nats per token."""

    def report(update: int, loss: float) -> None:
        if update % 100 == 0:
            print(f"update {update:5d} of {updates}   loss {loss:.3f}", flush=True)

    model = TextModel.learn(
        list(stories(_TRAINING_STORIES, seed)),
        CONFIG,
        capitalized=(*GIRLS, *BOYS, "i"),
        updates=updates,
        batch_size=48,
        seed=seed,
        report=report if progress else None,
    )
    return model, held_out_loss(model)


def held_out_loss(model: TextModel) -> float:
    """Return the mean cross-entropy of held-out stories, in nats per token."""
    texts = [[*model.encode(text), 1] for text in stories(_HELD_OUT_STORIES, _HELD_OUT_SEED)]
    with torch.no_grad():
        return float(model.model.loss(Packed.of(texts)))

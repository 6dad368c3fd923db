"""Races of one decoding step with caches: the same Transformer, attending by regard or by torch's SDPA."""

from collections.abc import Callable, Iterator
from functools import partial
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.harness import Lineup, Race
from regard.mechanism.masks import Padding
from regard.models import Attends, Packed, Transformer, TransformerConfig

VOCABULARY = 8_000


def stepping() -> Iterator[Race]:
    """Sentences of 12 to 24 source tokens, after 20 target tokens; 1, 64, and 64 beams of 5 at once."""
    for sentences in (1, 64, 320):
        yield Race(
            "stepping", f"{sentences} × 24 source, 20 target", partial(_contenders, sentences), target=1.0
        )


def _contenders(sentences: int) -> Lineup:
    torch.manual_seed(0)
    model = Transformer(VOCABULARY, TransformerConfig(width=256, heads=8, layers=3), share=True).eval()
    source = Packed.of([[5] * (24 - i % 13) for i in range(sentences)])
    with torch.no_grad():
        state = model.start(source)
        tokens = torch.randint(VOCABULARY, (20, sentences))
        for some in tokens:
            model.step(some, state)

    def step() -> Tensor:
        logits = model.step(tokens[0], state)
        for cache in state.caches:
            cache.length -= 1  # the next call overwrites what this one appended
        return logits

    return Lineup({"regard": step, "sdpa": partial(_with_sdpa, step)}, "fused")


def _with_sdpa(step: Callable[[], Tensor]) -> Tensor:
    with patch.object(Attends, "attention", _sdpa):
        return step()


def _sdpa(self: Attends, query: Tensor, key: Tensor, value: Tensor, **options: object) -> Tensor:
    mask = options["mask"]
    seen = None  # one query sees all that came before it
    if isinstance(mask, Padding):
        seen = (torch.arange(key.shape[-2]) < mask.lengths[:, None])[:, None, None]  # b 1 1 k
    return scaled_dot_product_attention(query, key, value, attn_mask=seen)

"""One decoding step with KV caches: the same Transformer with attention from regard or torch's SDPA."""

from collections.abc import Callable, Iterator
from functools import partial
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.harness import Candidates, Comparison
from regard.mechanism.masks.by_length import Padding
from regard.models import Attends, Packed, Transformer, TransformerConfig

VOCABULARY = 8_000


def stepping() -> Iterator[Comparison]:
    """12 to 24 source tokens, 20 previous target tokens; batches of 1, 64, and 320 (64 beams of 5)."""
    for sentences in (1, 64, 320):
        yield Comparison(
            "stepping", f"{sentences} × 24 source, 20 target", partial(_setup, sentences), target=1.0
        )


def _setup(sentences: int) -> Candidates:
    torch.manual_seed(0)
    model = Transformer(VOCABULARY, TransformerConfig(width=256, heads=8, layers=3), share=True).eval()
    source = Packed.of([[5] * (24 - i % 13) for i in range(sentences)])
    with torch.no_grad():
        state = model.start(source)
        tokens = torch.randint(VOCABULARY, (20, sentences))
        for ids in tokens:
            model.step(ids, state)

    def step() -> Tensor:
        logits = model.step(tokens[0], state)
        for cache in state.caches:
            cache.length -= 1  # the next call overwrites this step
        return logits

    return Candidates({"regard": step, "sdpa": partial(_with_sdpa, step)}, "fused")


def _with_sdpa(step: Callable[[], Tensor]) -> Tensor:
    with patch.object(Attends, "attention", _sdpa):
        return step()


def _sdpa(self: Attends, query: Tensor, key: Tensor, value: Tensor, **options: object) -> Tensor:
    mask = options["mask"]
    visible = None  # a single query attends to all earlier keys
    if isinstance(mask, Padding):
        visible = (torch.arange(key.shape[-2]) < mask.lengths[:, None])[:, None, None]  # b 1 1 k
    return scaled_dot_product_attention(query, key, value, attn_mask=visible)

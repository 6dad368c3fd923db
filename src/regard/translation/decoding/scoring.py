"""Token log probabilities of given translations (forced decoding)."""

from collections.abc import Sequence

import torch

from regard.models.layers.dropout import eval_mode
from regard.models.packed import Packed
from regard.models.seq2seq import Seq2Seq

_BATCH_TOKENS = 4096  # target tokens per batch


@torch.no_grad()
def token_log_probabilities(
    model: Seq2Seq, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]
) -> list[list[float]]:
    """Return the log probability of each target token.

    sources, targets: token ids without special tokens.

    >>> from regard.models import TransformerConfig, Transformer
    >>> from regard.translation.decoding.scoring import token_log_probabilities
    >>> model = Transformer(100, TransformerConfig(width=16, heads=2, layers=1))
    >>> [len(values) for values in token_log_probabilities(model, [[5, 6], [7]], [[8], []])]
    [1, 0]
    """
    results: list[list[float]] = [[] for _ in sources]
    batch: list[int] = []
    device, special = model.output_weight.device, model.special_tokens
    prefix = len(special.target_prefix)

    def flush() -> None:
        if not batch:
            return
        source = Packed.of([special.source(sources[i]) for i in batch], device)
        target = Packed.of([special.target_inputs(targets[i]) for i in batch], device)
        with eval_mode(model):
            logits = model(source, target).float().log_softmax(-1)
        row = 0
        for i in batch:
            ids = torch.tensor(list(targets[i]), dtype=torch.long, device=device)
            rows = logits[row + prefix : row + prefix + len(ids)]
            results[i] = rows.gather(1, ids[:, None])[:, 0].tolist()
            row += prefix + len(ids) + 1
        batch.clear()

    for i in sorted(range(len(sources)), key=lambda i: len(targets[i])):
        if not targets[i]:
            continue
        if sum(len(targets[j]) + 1 for j in batch) + len(targets[i]) > _BATCH_TOKENS:
            flush()
        batch.append(i)
    flush()
    return results

"""Teaching a head where words come from: an extra loss for one head of a Transformer's decoder.

loss = −1/n Σ_i log Σ_j weights[i, j], where i are those of n target tokens that have links, to the j

After Garg et al. 2019, "Jointly learning to align and translate", eq. 5, where each link has a logarithm of
its own; here it does not matter at which piece of a linked word it looks. The links are those of `LexicalAligner`.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.errors import ArgumentError
from regard.mechanism.scores import ScaledDot
from regard.models.layers.attention import MultiHeadAttention
from regard.models.packed import Packed
from regard.models.seq2seq import Seq2Seq
from regard.translation.alignment.cross_attention import (
    AlignmentHead,
    Shift,
    cross_attention_layers,
    layer_name,
)
from regard.translation.data.links import Links
from regard.translation.tokens import Cut


class GuidedLoss:
    """What the guided head has just computed, and how far it is from given links; see `guide_head`."""

    def __init__(self, head: int, shift: Shift) -> None:
        self.head, self.shift = head, shift
        self._query: Tensor | None = None
        self._key: Tensor | None = None

    def look(self, module: nn.Module, given: tuple[Any, ...]) -> None:
        """Project the head's queries and keys once more, before the attention of the model does."""
        assert isinstance(module, MultiHeadAttention)
        query, source = given
        if not isinstance(source, Tensor):  # a decoding step, which nobody guides
            return
        key_head = self.head // (module.heads // module.key_heads)
        self._query, self._key = _project(module, 0, self.head, query), _project(module, 1, key_head, source)

    def loss(self, source: Packed, target: Packed, links: Sequence[Tensor]) -> Tensor:
        """How little the head looks where it should: a mean over all labels, like the model's own loss.

        source, target: the batch that the model has just read, with its marks.
        links: of each sentence, (n, 2): source token and target token, counted without marks.
        """
        if self._query is None or self._key is None:
            raise ArgumentError(
                "the guide has seen no batch; call the model's loss inside the with block first."
            )
        if not len(source) == len(target) == len(links):
            raise ArgumentError(
                f"the guide got {len(source)} source sentences, {len(target)} target sentences and links of "
                f"{len(links)}; give the links of each sentence pair, an empty (0, 2) where there are none."
            )
        query, key = _padded(target.inputs(), self._query), _padded(source, self._key)
        scores = query.float() @ key.float().mT / key.shape[-1] ** 0.5  # b t s
        real = torch.arange(key.shape[1], device=key.device) < source.lengths[:, None]
        scores = scores.masked_fill(~real[:, None], -torch.inf)
        sentence = torch.arange(len(links)).repeat_interleave(torch.tensor([len(some) for some in links]))
        column, row = torch.cat([*links, torch.zeros(0, 2, dtype=torch.long)]).T
        wanted = torch.zeros_like(scores, dtype=torch.bool)
        wanted[sentence, row + (self.shift == "input"), column] = True
        linked = wanted.any(-1)
        scores, wanted = scores[linked], wanted[linked]
        missed = scores.logsumexp(-1) - scores.masked_fill(~wanted, -torch.inf).logsumexp(-1)
        return missed.sum() / len(target.outputs().tokens)


def default_guided_head(model: Seq2Seq) -> AlignmentHead:
    """The head that a training guides: one of the layer before the last (Garg et al. 2019, section 4.2)."""
    return AlignmentHead(layer=max(len(cross_attention_layers(model)) - 2, 0), heads=(0,))


@contextmanager
def guide_head(model: Seq2Seq, choice: AlignmentHead) -> Iterator[GuidedLoss]:
    """While it lasts, a `GuidedLoss` sees what one head of a Transformer computes: add its loss to the model's.

    >>> import torch
    >>> from regard.models import Packed, TransformerConfig, Transformer
    >>> from regard.translation.alignment.cross_attention import AlignmentHead
    >>> from regard.translation.alignment.guided_loss import guide_head
    >>> model = Transformer(100, TransformerConfig(width=16, heads=2, layers=2))
    >>> source, target = Packed.of([[5, 6, 2]]), Packed.of([[1, 7, 8, 2]])
    >>> with guide_head(model, AlignmentHead(layer=0, heads=(1,))) as guide:
    ...     loss = model.loss(source, target)
    ...     loss = loss + 0.05 * guide.loss(source, target, [torch.tensor([[0, 0], [1, 1]])])
    >>> loss.backward()
    """
    module = model.get_submodule(layer_name(model, choice))
    if choice.heads is None or len(choice.heads) != 1:
        raise ArgumentError(f"the choice has heads={choice.heads}; one head is guided: heads=(0,).")
    if not isinstance(module, MultiHeadAttention) or module.score != ScaledDot():
        raise ArgumentError(
            f"this {type(model).__name__} cannot be guided; guide a Transformer with scaled dot products."
        )
    guide = GuidedLoss(choice.heads[0], choice.shift)
    handle = module.register_forward_pre_hook(guide.look)
    try:
        yield guide
    finally:
        handle.remove()


def token_links(source: Cut, target: Cut, links: Links) -> Tensor:
    """Links of words as links of their pieces, (n, 2): source token and target token.

    >>> from regard.translation.alignment.guided_loss import token_links
    >>> from regard.translation.tokens import Cut
    >>> source = Cut(["Hunde"], [5, 6], ["▁Hund", "e"], [0, 0], {})
    >>> target = Cut(["the", "dogs"], [7, 8, 9], ["▁the", "▁dog", "s"], [0, 1, 1], {})
    >>> token_links(source, target, frozenset({(0, 1)})).tolist()
    [[0, 1], [0, 2], [1, 1], [1, 2]]
    """
    found = [
        (i, j)
        for i, one in enumerate(source.word_of)
        for j, other in enumerate(target.word_of)
        if (one, other) in links
    ]
    return torch.tensor(found, dtype=torch.long).reshape(-1, 2)


def _project(module: MultiHeadAttention, which: int, head: int, x: Tensor) -> Tensor:
    """The queries (0) or keys (1) of one head: (…, n, m) → (…, n, d)."""
    weight, bias = module.projection(which)
    rows = slice(head * module.head_width, (head + 1) * module.head_width)
    return F.linear(x, weight[rows], None if bias is None else bias[rows])


def _padded(sentences: Packed, x: Tensor) -> Tensor:
    return sentences.pad(x) if x.dim() == 2 else x

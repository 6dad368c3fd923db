"""Guided alignment: an additional loss that trains one decoder head to attend to linked words.

loss = −1/n Σ_i ((1 − ε) log Σ_j weights[i, j] + ε/s Σ_k log weights[i, k])

i: target tokens with links. j: source tokens linked to i. k: all s source tokens. n: total number of labels.

After Garg et al. 2019, "Jointly learning to align and translate", eq. 5. The paper takes the
logarithm of each link's weight; here, the weights of all source tokens linked to i are summed first. The
second term is label smoothing (Szegedy et al. 2016, section 7): without it, the scores grow without bound,
and training diverges at high learning rates. The links come from `LexicalAligner`.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard._util.text import pluralize, type_name
from regard.errors import ArgumentError
from regard.mechanism.scores import Dot, ScaledDot
from regard.models.generation import SpecialTokens
from regard.models.layers.attention import MultiHeadAttention
from regard.models.packed import Packed
from regard.models.seq2seq import Seq2Seq
from regard.translation.alignment.alignment_head import AlignmentHead, Shift
from regard.translation.alignment.cross_attention import cross_attention_layers, layer_name
from regard.translation.alignment.links import Links
from regard.translation.tokens import Segmentation

_SMOOTHING = 0.1  # ε


class GuidedLoss:
    """Alignment loss for one attention head; created by `guide_head`.

    scaled: whether the head scales its scores; see `ScaledDot`.
    """

    def __init__(
        self,
        head: int,
        shift: Shift,
        special: SpecialTokens = SpecialTokens(),  # noqa: B008 (a frozen value)
        *,
        scaled: bool = True,
    ) -> None:
        self.head, self.shift, self.special, self.scaled = head, shift, special, scaled
        self._query: Tensor | None = None
        self._key: Tensor | None = None

    def record(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Forward pre-hook: project the head's queries and keys, and keep them for `loss`."""
        assert isinstance(module, MultiHeadAttention)
        query, source = inputs
        if not isinstance(source, Tensor):  # a decoding step with cached keys
            return
        key_head = self.head // (module.heads // module.key_heads)
        self._query, self._key = _project(module, 0, self.head, query), _project(module, 1, key_head, source)

    def loss(self, source: Packed, target: Packed, links: Sequence[Tensor]) -> Tensor:
        """Compute the alignment loss for the last batch: a mean over all labels, like the model's loss.

        source, target: the batch, with special tokens.
        links: for each sentence, (n, 2): source and target token indices, not counting special tokens.
        """
        if self._query is None or self._key is None:
            raise ArgumentError("GuidedLoss has no batch yet; call model.loss inside the with block first.")
        if not len(source) == len(target) == len(links):
            raise ArgumentError(
                f"GuidedLoss got {pluralize(len(source), 'source sentence')}, "
                f"{pluralize(len(target), 'target sentence')} and {pluralize(len(links), 'tensor')} of "
                "links; pass one tensor of links per pair, with shape (0, 2) for a pair without links."
            )
        query, key = _padded(target.inputs(), self._query), _padded(source, self._key)
        scores = query.float() @ key.float().mT  # b t s
        if self.scaled:
            scores = scores / key.shape[-1] ** 0.5
        is_token = torch.arange(key.shape[1], device=key.device) < source.lengths[:, None]
        means = scores.masked_fill(~is_token[:, None], 0).sum(-1) / source.lengths[:, None]
        scores = scores.masked_fill(~is_token[:, None], -torch.inf)
        sentence = torch.arange(len(links)).repeat_interleave(torch.tensor([len(pair) for pair in links]))
        column, row = torch.cat([*links, torch.zeros(0, 2, dtype=torch.long)]).T
        linked = torch.zeros_like(scores, dtype=torch.bool)
        row, column = row + len(self.special.target_prefix), column + len(self.special.source_prefix)
        linked[sentence, row + (self.shift == "input"), column] = True
        has_link = linked.any(-1)
        scores, linked, means = scores[has_link], linked[has_link], means[has_link]
        aligned = scores.masked_fill(~linked, -torch.inf).logsumexp(-1)
        losses = scores.logsumexp(-1) - (1 - _SMOOTHING) * aligned - _SMOOTHING * means
        return losses.sum() / len(target.labels().tokens)


def default_guided_head(model: Seq2Seq) -> AlignmentHead:
    """Return the head to guide: head 0 of the penultimate layer (Garg et al. 2019, section 4.2)."""
    return AlignmentHead(layer=max(len(cross_attention_layers(model)) - 2, 0), heads=(0,))


@contextmanager
def guide_head(model: Seq2Seq, alignment_head: AlignmentHead) -> Iterator[GuidedLoss]:
    """Record one head of a Transformer inside a `with` block; yield a `GuidedLoss` to add to the loss.

    >>> import torch
    >>> from regard.models import Packed, TransformerConfig, Transformer
    >>> from regard.translation.alignment.alignment_head import AlignmentHead
    >>> from regard.translation.alignment.guided_loss import guide_head
    >>> model = Transformer(100, TransformerConfig(width=16, heads=2, layers=2))
    >>> source, target = Packed.of([[5, 6, 2]]), Packed.of([[1, 7, 8, 2]])
    >>> with guide_head(model, AlignmentHead(layer=0, heads=(1,))) as guided:
    ...     loss = model.loss(source, target)
    ...     loss = loss + 0.05 * guided.loss(source, target, [torch.tensor([[0, 0], [1, 1]])])
    >>> loss.backward()
    """
    heads = alignment_head.heads
    module = model.get_submodule(layer_name(model, alignment_head))
    if heads is None or len(heads) != 1:
        raise ArgumentError(f"guide_head got heads={heads}; it guides exactly one head, such as heads=(0,).")
    if not isinstance(module, MultiHeadAttention) or module.score not in (ScaledDot(), Dot()):
        raise ArgumentError(
            f"guide_head got {type_name(model)}; it needs a Transformer with dot-product scores."
        )
    scaled = module.score == ScaledDot()  # T5 does not scale its scores
    guided = GuidedLoss(heads[0], alignment_head.shift, model.special_tokens, scaled=scaled)
    handle = module.register_forward_pre_hook(guided.record)
    try:
        yield guided
    finally:
        handle.remove()


def token_links(source: Segmentation, target: Segmentation, links: Links) -> Tensor:
    """Convert word links to token links, (n, 2): source token and target token."""
    pairs = [
        (i, j)
        for i, source_word in enumerate(source.word_of)
        for j, target_word in enumerate(target.word_of)
        if (source_word, target_word) in links
    ]
    return torch.tensor(pairs, dtype=torch.long).reshape(-1, 2)


def _project(module: MultiHeadAttention, which: int, head: int, x: Tensor) -> Tensor:
    """Project to the queries (which=0) or keys (which=1) of one head: (…, n, m) → (…, n, d)."""
    weight, bias = module.projection(which)
    rows = slice(head * module.head_width, (head + 1) * module.head_width)
    return F.linear(x, weight[rows], None if bias is None else bias[rows])


def _padded(sentences: Packed, x: Tensor) -> Tensor:
    return sentences.pad(x) if x.dim() == 2 else x

import random

import pytest
import torch
from torch import Tensor

from regard.errors import ArgumentError
from regard.models import Packed, Transformer, TransformerConfig
from regard.models.recurrent import RecurrentConfig, RecurrentSeq2Seq
from regard.translation.alignment.alignment_head import AlignmentHead
from regard.translation.alignment.cross_attention import cross_weights
from regard.translation.alignment.guided_loss import guide_head, token_links
from regard.translation.tokens import END, START, Segmentation

SOURCES, TARGETS = [[5, 6, 7, 8, 9], [10, 11], [12]], [[20, 21, 22], [23, 24, 25, 26], []]
LINKS = [torch.tensor([[4, 0], [1, 2], [2, 2]]), torch.tensor([[0, 3]]), torch.zeros(0, 2, dtype=torch.long)]


@pytest.fixture(autouse=True)
def _seeded(one_thread: None) -> None:
    torch.manual_seed(0)


def packed(sources: list[list[int]], targets: list[list[int]]) -> tuple[Packed, Packed]:
    return (
        Packed.of([[*source, END] for source in sources]),
        Packed.of([[START, *target, END] for target in targets]),
    )


@pytest.mark.parametrize("shift", ["input", "output"])
@pytest.mark.parametrize(
    ("layer", "head", "key_heads", "scaled"), [(0, 0, 4, True), (1, 3, 4, False), (1, 2, 2, True)]
)
def test_the_loss_equals_the_weights_formula(shift, layer, head, key_heads, scaled):
    sizes = {"width": 16, "heads": 4, "key_heads": key_heads, "layers": 2}
    config = TransformerConfig(**sizes, dropout=0.0, scale_scores=scaled)
    model, alignment_head = Transformer(37, config), AlignmentHead(layer, (head,), shift)
    source, target = packed(SOURCES, TARGETS)
    with guide_head(model, alignment_head) as guided:
        model.loss(source, target)
        loss = guided.loss(source, target, LINKS)
    weights = cross_weights(model, SOURCES, TARGETS, alignment_head)
    words = [weights[0][0], weights[0][2], weights[1][3]]
    rows = [torch.cat([row, 1 - row.sum(-1, keepdim=True)]) for row in words]  # with the end token
    linked = [weights[0][0, 4], weights[0][2, 1] + weights[0][2, 2], weights[1][3, 0]]
    losses = [0.9 * weight.log() + 0.1 * row.log().mean() for weight, row in zip(linked, rows, strict=True)]
    expected = -torch.stack(losses).sum() / 10  # 3 + 4 + 0 tokens, and 3 end tokens
    torch.testing.assert_close(loss, expected)
    loss.backward()
    gradient = model.decoder.blocks[layer].cross.in_proj.weight.grad
    assert gradient is not None
    assert gradient.abs().sum() > 0
    with guide_head(model, alignment_head) as guided:  # a padded batch has the same loss
        model.loss(*_padded(source, target)[0], **_padded(source, target)[1])
        torch.testing.assert_close(guided.loss(source, target, LINKS), expected)


def _padded(source: Packed, target: Packed) -> tuple[list[Tensor], dict[str, Tensor]]:
    tokens = [batch.pad(batch.tokens) for batch in (source, target)]
    return tokens, {"source_lengths": source.lengths, "target_lengths": target.lengths}


def test_large_scores_are_penalized():
    """Otherwise, the scores grow without bound, and training diverges."""
    model = Transformer(37, TransformerConfig(width=16, heads=2, layers=1, dropout=0.0))
    source, target = packed([[5, 6]], [[20, 21]])
    sizes = []
    for scale in (1.0, 100.0):
        with guide_head(model, AlignmentHead(0, (0,))) as guided:
            model.loss(source, target)
            assert guided._query is not None
            assert guided._key is not None
            # a head that attends to the linked words alone
            guided._query = scale * torch.eye(3, guided._query.shape[-1]).roll(-1, 0)
            guided._key = torch.eye(3, guided._key.shape[-1]).roll(-1, 0)
            sizes.append(float(guided.loss(source, target, [torch.tensor([[0, 0], [1, 1]])])))
    assert sizes[1] > sizes[0]


def test_without_links_the_loss_is_zero():
    model = Transformer(37, TransformerConfig(width=16, heads=4, layers=2))
    source, target = packed(SOURCES, TARGETS)
    with guide_head(model, AlignmentHead(0, (0,))) as guided:
        model.loss(source, target)
    loss = guided.loss(source, target, [LINKS[2]] * 3)
    loss.backward()  # in distributed training, every process calls backward
    assert loss == 0
    assert not model.decoder.blocks[0].cross._forward_pre_hooks  # the hook is removed


def test_invalid_heads_models_and_links():
    model = Transformer(37, TransformerConfig(width=16, heads=4, layers=2))
    source, target = packed(SOURCES, TARGETS)
    recurrent = RecurrentSeq2Seq(37, RecurrentConfig(width=16))
    for other, heads, message in (
        (model, None, "it guides exactly one head"),
        (model, (0, 1), "it guides exactly one head"),
        (recurrent, (0,), "got a RecurrentSeq2Seq; it needs a Transformer"),
    ):
        with pytest.raises(ArgumentError, match=message), guide_head(other, AlignmentHead(0, heads)):
            pass
    with guide_head(model, AlignmentHead(0, (0,))) as guided:
        with pytest.raises(ArgumentError, match="has no batch yet"):
            guided.loss(source, target, LINKS)
        model.loss(source, target)
        with pytest.raises(ArgumentError, match=r"3 source sentences, .* and 2 tensors of links"):
            guided.loss(source, target, LINKS[:2])


def test_word_links_become_links_of_all_their_tokens():
    source = Segmentation(["a", "b"], [5, 6, 7], ["p"] * 3, [0, 0, 1], {})
    target = Segmentation(["x", "y", "z"], [5, 6, 7, 8], ["p"] * 4, [0, 1, 1, 2], {})
    links = token_links(source, target, frozenset({(0, 1), (1, 2)}))
    assert links.tolist() == [[0, 1], [0, 2], [1, 1], [1, 2], [2, 3]]
    assert token_links(source, target, frozenset()).shape == (0, 2)


def test_a_guided_head_aligns():
    """Sources are translated in reverse word order: these few updates suffice only with the guided loss."""
    rng = random.Random(0)
    sources = [rng.sample(range(5, 20), rng.randint(3, 6)) for _ in range(24)]
    targets = [[word + 15 for word in reversed(source)] for source in sources]
    links = [torch.tensor([[len(s) - 1 - i, i] for i in range(len(s))]) for s in sources]
    accuracy = {}
    for strength in (0.0, 1.0):
        torch.manual_seed(0)
        model = Transformer(37, TransformerConfig(width=32, heads=2, layers=1))
        alignment_head = AlignmentHead(0, (1,))
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        batch = packed(sources, targets)
        for _ in range(25):
            with guide_head(model, alignment_head) as guided:
                loss = model.loss(*batch) + strength * guided.loss(*batch, links)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        best = [weights.argmax(-1) for weights in cross_weights(model, sources, targets, alignment_head)]
        hits = [int((row == pair[:, 0]).sum()) for row, pair in zip(best, links, strict=True)]
        accuracy[strength] = sum(hits) / sum(map(len, links))
    assert accuracy[1.0] > 0.9
    assert accuracy[1.0] > accuracy[0.0] + 0.3

"""A memory that many rows read gives each what a memory of its own would give."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import regard
from regard.models import KeyValues, MultiHeadAttention, Packed, Transformer, TransformerConfig
from regard.models.layers.kv_cache import RowMap
from tests.models.exact import close, filled, normal

pytestmark = pytest.mark.usefixtures("one_thread")

SELECTIONS = st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=9), min_size=1, max_size=4)


def select(readers: RowMap, memory: list[int], rows: list[int]) -> tuple[RowMap, list[int]]:
    """The readers, and which of the first memories theirs are."""
    readers, kept = readers.select(torch.tensor(rows))
    return readers, memory if kept is None else [memory[i] for i in kept.tolist()]


@given(memories=st.integers(1, 6), selections=SELECTIONS)
def test_rows_keep_their_source(memories: int, selections: list[list[int]]) -> None:
    readers, held, reads = RowMap(memories), list(range(memories)), list(range(memories))
    for selection in selections:
        rows = [row % len(reads) for row in selection]
        readers, held = select(readers, held, rows)
        reads = [reads[row] for row in rows]
        assert len(readers) == len(reads)
        found = range(len(held)) if readers.reads is None else readers.reads.tolist()
        assert [held[i] for i in found] == reads
        assert 4 * len(set(reads)) > 3 * len(held) or set(reads) == set(held)


@given(memories=st.integers(1, 5), selections=SELECTIONS, queries=st.integers(1, 3))
def test_shared_source_equals_copies(
    memories: int, selections: list[list[int]], queries: int
) -> None:
    layer = filled(MultiHeadAttention(12, 4, key_heads=2, head_width=(3, 5)))
    lengths = torch.arange(memories) % 3 + 1
    whole = layer.project_source(normal(memories, 3, 12))
    readers, held, reads = RowMap(memories), list(range(memories)), list(range(memories))
    for selection in selections:
        rows = [row % len(reads) for row in selection]
        readers, held = select(readers, held, rows)
        reads = [reads[row] for row in rows]
    x = normal(len(reads), queries, 12).requires_grad_()
    shared = KeyValues(whole.key[held], whole.value[held], readers)
    found = layer(x, shared, mask=regard.Padding(lengths[held]))
    wanted = layer(x, whole.select(torch.tensor(reads)), mask=regard.Padding(lengths[reads]))
    close(found, wanted)
    ours, theirs = (torch.autograd.grad(y.square().sum(), x, retain_graph=True)[0] for y in (found, wanted))
    close(ours, theirs)
    assert torch.equal(readers.spread(readers.gather(x[:, None])), x[:, None])


@torch.no_grad()
def test_unused_sources_are_dropped_from_a_quarter_on() -> None:
    model = Transformer(20, TransformerConfig(width=8, heads=2, layers=2)).eval()
    state = model.start(Packed.of([[5, 6], [7], [8, 9, 10], [11], [12]]))
    place = state.memories[0].key.data_ptr()
    for rows, held in (
        ([0, 0, 1, 1, 2, 3, 4], 5),
        ([0, 1, 2, 3, 4, 5], 5),
        ([5, 1, 4], 3),
        ([0, 0, 2, 1], 3),
    ):
        state.select(torch.tensor(rows))
        model.step(torch.full((len(rows),), 3), state)
        assert len(state.memories[0].key) == len(state.memories[1].value) == held
        assert (state.memories[0].key.data_ptr() == place) == (held == 5)
    assert len(state) == 4

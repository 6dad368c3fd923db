"""Rows that share a source give the same results as rows with copies of it."""

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


def select(row_map: RowMap, sources: list[int], rows: list[int]) -> tuple[RowMap, list[int]]:
    """Return the new row map, and the original sources that it still contains."""
    row_map, kept = row_map.select(torch.tensor(rows))
    return row_map, sources if kept is None else [sources[i] for i in kept.tolist()]


@given(sources=st.integers(1, 6), selections=SELECTIONS)
def test_rows_keep_their_source(sources: int, selections: list[list[int]]) -> None:
    row_map, held, reads = RowMap(sources), list(range(sources)), list(range(sources))
    for selection in selections:
        rows = [row % len(reads) for row in selection]
        row_map, held = select(row_map, held, rows)
        reads = [reads[row] for row in rows]
        assert len(row_map) == len(reads)
        actual = range(len(held)) if row_map.source_of_row is None else row_map.source_of_row.tolist()
        assert [held[i] for i in actual] == reads
        assert 4 * len(set(reads)) > 3 * len(held) or set(reads) == set(held)


@given(sources=st.integers(1, 5), selections=SELECTIONS, queries=st.integers(1, 3))
def test_shared_source_equals_copies(sources: int, selections: list[list[int]], queries: int) -> None:
    layer = filled(MultiHeadAttention(12, 4, key_heads=2, head_width=(3, 5)))
    lengths = torch.arange(sources) % 3 + 1
    whole = layer.project_source(normal(sources, 3, 12))
    row_map, held, reads = RowMap(sources), list(range(sources)), list(range(sources))
    for selection in selections:
        rows = [row % len(reads) for row in selection]
        row_map, held = select(row_map, held, rows)
        reads = [reads[row] for row in rows]
    x = normal(len(reads), queries, 12).requires_grad_()
    shared = KeyValues(whole.key[held], whole.value[held], row_map)
    actual = layer(x, shared, mask=regard.Padding(lengths[held]))
    expected = layer(x, whole.select(torch.tensor(reads)), mask=regard.Padding(lengths[reads]))
    close(actual, expected)
    ours, theirs = (
        torch.autograd.grad(y.square().sum(), x, retain_graph=True)[0] for y in (actual, expected)
    )
    close(ours, theirs)
    assert torch.equal(row_map.ungroup(row_map.group(x[:, None])), x[:, None])


@torch.no_grad()
def test_unused_sources_are_dropped_from_a_quarter_on() -> None:
    model = Transformer(20, TransformerConfig(width=8, heads=2, layers=2)).eval()
    state = model.start(Packed.of([[5, 6], [7], [8, 9, 10], [11], [12]]))
    place = state.sources[0].key.data_ptr()
    for rows, held in (
        ([0, 0, 1, 1, 2, 3, 4], 5),
        ([0, 1, 2, 3, 4, 5], 5),
        ([5, 1, 4], 3),
        ([0, 0, 2, 1], 3),
    ):
        state.select(torch.tensor(rows))
        model.step(torch.full((len(rows),), 3), state)
        assert len(state.sources[0].key) == len(state.sources[1].value) == held
        assert (state.sources[0].key.data_ptr() == place) == (held == 5)
    assert len(state) == 4

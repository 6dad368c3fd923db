"""Heat maps: what they show, what they hold, and what they refuse."""

from itertools import pairwise

import pytest
import torch
from matplotlib.figure import Figure

import regard
from regard.view.pictures import CELLS, LABELS


def weights_of(n: int, *lead: int) -> regard.Weights:
    x = torch.randn(*lead, n, 4)
    return regard.attend(x, x, x, mask=regard.Causal())[1]


def test_a_small_matrix_is_shown_as_it_is():
    weights = weights_of(5)
    axes = Figure().subplots()
    image = regard.heatmap(axes, weights, queries=list("abcde"), keys=list("vwxyz"), title="five")
    torch.testing.assert_close(torch.tensor(image.get_array().data), weights.dense())
    assert [label.get_text() for label in axes.get_xticklabels()] == list("vwxyz")
    assert [label.get_text() for label in axes.get_yticklabels()] == list("abcde")
    assert axes.get_title() == "five"
    assert len(axes.texts) == 25  # each cell with its number


def test_a_large_matrix_is_pooled_and_counts_tokens():
    n = 3 * CELLS
    axes = Figure().subplots()
    image = regard.heatmap(axes, weights_of(n), log=True)
    assert image.get_array().shape == (CELLS, CELLS)
    assert axes.get_xlim() == (-0.5, n - 0.5)
    assert axes.get_ylim() == (n - 0.5, -0.5)


@pytest.mark.parametrize("n", [3, 40, 41, 200, 1000])
def test_labels_do_not_overlap(n):
    figure = Figure(figsize=(8, 8))
    axes = figure.subplots()
    regard.heatmap(axes, weights_of(n), keys=[str(i) for i in range(n)])
    figure.canvas.draw()
    assert 1 <= len(axes.get_xticks()) <= LABELS
    for axis in (axes.yaxis,):
        boxes = [label.get_window_extent() for label in axis.get_ticklabels()]
        assert all(not a.overlaps(b) for a, b in pairwise(boxes))


def test_numbers_along_an_axis_do_not_overlap():
    figure = Figure(figsize=(3, 3))
    axes = figure.subplots()
    regard.heatmap(axes, torch.zeros(20, 30_000))
    figure.canvas.draw()
    boxes = [label.get_window_extent() for label in axes.get_xticklabels()]
    assert all(not a.overlaps(b) for a, b in pairwise(boxes))


def test_what_is_no_matrix_is_refused():
    with pytest.raises(regard.ShapeError, match=r"\(2, 3, 5, 5\).*weights\[0, 0\]"):
        regard.heatmap(Figure().subplots(), weights_of(5, 2, 3))
    with pytest.raises(regard.ShapeError, match="4 tokens for 5 keys"):
        regard.heatmap(Figure().subplots(), weights_of(5), keys=list("abcd"))

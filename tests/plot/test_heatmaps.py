"""Pictures of matrices: the right numbers in the right places, and what is refused."""

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

import regard
from regard.plot import grids
from regard.plot.heatmaps import (
    CELLS,
    SMALL,
    draw_alignments,
    draw_heads,
    draw_mask,
    draw_positions,
    draw_weights,
)


def weights_of(n: int, *lead: int) -> regard.Weights:
    x = torch.randn(*lead, n, 4)
    return regard.attend(x, x, x, mask=regard.Causal())[1]


@pytest.fixture
def figures(monkeypatch):
    """The figures that are drawn, before they are written."""
    drawn = []
    save = grids.save
    monkeypatch.setattr(grids, "save", lambda figure, path: drawn.append(figure) or save(figure, path))
    return drawn


def images(figure) -> list[np.ndarray]:
    """The matrices of a figure, in order; a colour bar has none."""
    return [axes.images[0].get_array().data for axes in figure.axes if axes.images]


def names(axis) -> list[str]:
    return [label.get_text() for label in axis.get_ticklabels()]


def test_a_small_matrix_is_shown_as_it_is():
    weights = weights_of(5)
    axes = Figure().subplots()
    image = regard.heatmap(axes, weights, queries=list("abcde"), keys=list("vwxyz"), title="five")
    torch.testing.assert_close(torch.tensor(image.get_array().data), weights.dense())
    assert names(axes.xaxis) == list("vwxyz")
    assert names(axes.yaxis) == list("abcde")
    assert axes.get_title() == "five"
    assert len(axes.texts) == 25  # each cell with its number


def test_a_large_matrix_is_pooled_and_counts_tokens():
    n = 3 * CELLS
    axes = Figure().subplots()
    weights = weights_of(n)
    image = regard.heatmap(axes, weights, log=True)
    pooled = weights.pool(CELLS, CELLS)
    torch.testing.assert_close(torch.tensor(image.get_array().data), pooled)
    assert axes.get_xlim() == (-0.5, n - 0.5)
    assert axes.get_ylim() == (n - 0.5, -0.5)
    dense = regard.heatmap(Figure().subplots(), weights.dense())
    torch.testing.assert_close(torch.tensor(dense.get_array().data), pooled)


def test_numbers_along_an_axis_do_not_overlap():
    figure = Figure(figsize=(3, 3))
    axes = figure.subplots()
    regard.heatmap(axes, torch.zeros(20, 30_000))
    figure.canvas.draw()
    boxes = [label.get_window_extent() for label in axes.get_xticklabels()]
    assert len(boxes) > 1
    assert all(not a.overlaps(b) for a, b in pairwise(boxes))


def test_axes_without_tokens_have_names():
    axes = Figure().subplots()
    regard.heatmap(axes, torch.eye(3), names=("output", "input"), keys=list("abc"))
    assert (axes.get_ylabel(), axes.get_xlabel()) == ("output", "")


def test_numbers_can_be_read_on_their_cells():
    axes = Figure().subplots()
    regard.heatmap(axes, torch.tensor([[0.0, 1.0]]), log=True)
    assert [text.get_color() for text in axes.texts] == ["black", "white"]


@pytest.mark.parametrize("matrix", [torch.zeros(3, 3), torch.full((3, 3), float("nan")), -torch.ones(2, 2)])
@pytest.mark.parametrize("log", [False, True])
def test_unusual_numbers_are_drawn(matrix, log, tmp_path):
    draw_weights(matrix, tmp_path / "x.svg", log=log)


def test_what_is_no_matrix_is_refused(tmp_path):
    with pytest.raises(regard.ShapeError, match=r"\(2, 3, 5, 5\).*weights\[0, 0\]"):
        regard.heatmap(Figure().subplots(), weights_of(5, 2, 3))
    with pytest.raises(regard.ShapeError, match="4 tokens for 5 keys"):
        regard.heatmap(Figure().subplots(), weights_of(5), keys=list("abcd"))
    with pytest.raises(regard.ShapeError, match="3 tokens for 5 queries"):
        draw_weights(weights_of(5), tmp_path / "x.png", queries=list("abc"))
    with pytest.raises(regard.ShapeError, match=r"these are \(5,\)"):
        draw_weights(torch.zeros(5), tmp_path / "x.png")
    with pytest.raises(regard.ArgumentError, match="nothing to draw"):
        draw_weights(torch.zeros(0, 3), tmp_path / "x.png")
    with pytest.raises(regard.ArgumentError, match=r"2,000 matrices.*choose 1 to 1,024"):
        draw_weights(torch.zeros(2000, 1, 1), tmp_path / "x.png")
    assert list(tmp_path.iterdir()) == []


def test_several_heads_are_a_grid(tmp_path, figures):
    weights = weights_of(7, 2, 3)
    draw_weights(weights, tmp_path / "x.svg", queries=list("abcdefg"), keys=list("tuvwxyz"))
    torch.testing.assert_close(torch.tensor(np.stack(images(figures[0]))), weights.dense().reshape(6, 7, 7))
    first, *_, last = [axes for axes in figures[0].axes if axes.images]
    assert (first.get_title(), last.get_title()) == ("head 0", "")
    assert (names(first.yaxis), names(first.xaxis)) == (list("abcdefg"), [])  # at the outer edges alone
    assert (names(last.yaxis), names(last.xaxis)) == ([], list("tuvwxyz"))


def test_heads_are_called_what_one_says(tmp_path, figures):
    draw_weights(weights_of(3, 2), tmp_path / "x.svg", titles=["0, 3", "4, 1"])
    draw_heads(
        {"dot": weights_of(3, 2), "cosine": weights_of(3, 2)}, tmp_path / "y.svg", titles=["softmax", "hard"]
    )
    drawn = [[axes.get_title() for axes in figure.axes if axes.images] for figure in figures]
    assert drawn == [["0, 3", "4, 1"], ["softmax", "hard", "", ""]]
    with pytest.raises(regard.ArgumentError, match="1 titles for 2 heads"):
        draw_weights(weights_of(3, 2), tmp_path / "z.svg", titles=["one"])


def test_heat_maps_that_are_compared_share_their_limits():
    axes = Figure().subplots()
    assert regard.heatmap(axes, torch.eye(2) / 2).get_clim() == (0, 0.5)
    assert regard.heatmap(axes, torch.eye(2) / 2, limits=(0, 1)).get_clim() == (0, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"limits": (1, 0)}, r"limits are 1 and 0; .* the first smaller than the second"),
        ({"limits": (2, 2)}, "limits are 2 and 2"),
        ({"limits": (1,)}, r"limits are \(1,\); give two numbers"),
        ({"limits": (0, 1, 2)}, r"limits are \(0, 1, 2\); give two numbers"),
        ({"limits": 1}, r"limits are 1; give two numbers.*limits=\(0, 1\)"),
        ({"limits": (None, 1)}, r"limits are \(None, 1\); give two numbers"),
        ({"limits": (0, float("nan"))}, "limits are 0 and nan; both must be finite"),
        ({"limits": (float("-inf"), 1)}, "limits are -inf and 1; both must be finite"),
        ({"limits": (0, 1), "log": True}, r"limits are 0 and 1, and log=True .*limits=\(0\.0001, 1\)"),
        ({"limits": (-2, -1), "log": True}, r"limits are -2 and -1, and log=True .*begin above 0"),
        ({"names": None}, r"names are None; give two strings.*\('', ''\) for none"),
        ({"names": "ab"}, "names are 'ab'; give two strings"),
        ({"names": ("queries",)}, r"names are \('queries',\); give two strings"),
    ],
)
def test_a_heat_map_says_what_is_wrong(options, message):
    axes = Figure().subplots()
    with pytest.raises(regard.ArgumentError, match=message):
        regard.heatmap(axes, torch.eye(2), **options)
    assert not axes.images


def test_limits_may_be_logarithmic_and_numbers_of_any_kind():
    axes = Figure().subplots()
    assert regard.heatmap(axes, torch.eye(2), limits=(0.1, 1), log=True).get_clim() == (0.1, 1)
    assert regard.heatmap(axes, torch.eye(2), limits=torch.tensor([0, 2])).get_clim() == (0, 2)
    assert regard.heatmap(axes, torch.eye(2), limits=[np.float32(0), np.int64(3)]).get_clim() == (0, 3)


@pytest.mark.parametrize("made", [np.array, list])
def test_arrays_are_drawn_as_tensors_are(made, tmp_path, figures):
    rows = [[0.25, 0.75, 0.0], [0.5, 0.0, 0.5]]
    image = regard.heatmap(Figure().subplots(), made(rows))
    np.testing.assert_allclose(image.get_array().data, rows)
    draw_weights(made(rows), tmp_path / "x.svg")
    draw_heads({"a": made(rows)}, tmp_path / "y.svg")
    for figure in figures:
        np.testing.assert_allclose(images(figure)[0], rows)


def test_an_array_that_runs_backwards_or_cannot_be_written_is_drawn():
    rows = np.eye(3)[::-1]
    rows.flags.writeable = False
    np.testing.assert_array_equal(regard.heatmap(Figure().subplots(), rows).get_array().data, rows)


def test_what_holds_no_numbers_is_refused(tmp_path):
    with pytest.raises(regard.ShapeError, match=r"weights of shape \(0, 3\).*at least one query and one key"):
        regard.heatmap(Figure().subplots(), torch.zeros(0, 3))
    for wrong in ("weights", [[0.5], [0.5, 0.5]], {"a": torch.eye(2)}):
        with pytest.raises(regard.DTypeError, match=rf"type {type(wrong).__name__}.*a tensor or an array"):
            regard.heatmap(Figure().subplots(), wrong)
    for wrong in (weights_of(3, 2), torch.zeros(2, 3, 3), [weights_of(3, 2)]):
        with pytest.raises(regard.DTypeError, match=rf"{type(wrong).__name__}; give weights by name, {{"):
            draw_heads(wrong, tmp_path / "x.svg")
    with pytest.raises(regard.DTypeError, match=r"titles hold 1, of the type int; give strings: str\(title"):
        draw_weights(weights_of(3, 2), tmp_path / "x.svg", titles=[1, 2])
    with pytest.raises(regard.DTypeError, match=r"path is 8, of the type int; give one that ends in \.png"):
        draw_mask(regard.Causal(), 8)
    assert list(tmp_path.iterdir()) == []


def test_large_heads_are_pooled(tmp_path, figures):
    weights = weights_of(3 * SMALL, 2)
    draw_weights(weights, tmp_path / "x.png")
    torch.testing.assert_close(torch.tensor(np.stack(images(figures[0]))), weights.pool(SMALL, SMALL))


def test_a_row_for_each_layer_and_a_column_for_each_head(tmp_path, figures):
    model = regard.models.LanguageModel(50, regard.models.TransformerConfig(width=16, heads=2, layers=3))
    with regard.watch(model) as seen:
        model(torch.tensor([[5, 6, 7, 8]]))
    draw_heads(seen, tmp_path / "x.svg", queries=list("abcd"), keys=list("abcd"))
    wanted = torch.cat([weights.dense()[0] for weights in seen.values()])
    torch.testing.assert_close(torch.tensor(np.stack(images(figures[0]))), wanted.detach())
    texts = [text.get_text() for text in figures[0].texts]
    assert texts[:3] == ["decoder 0", "decoder 1", "decoder 2"]
    limits = {axes.images[0].get_clim() for axes in figures[0].axes if axes.images}
    assert len(limits) == 1  # all in the same colours


def test_heads_of_a_batch_are_refused(tmp_path):
    with pytest.raises(regard.ShapeError, match=r"weights of 'a' have the shape \(2, 3, 5, 5\)"):
        draw_heads({"a": weights_of(5, 2, 3)}, tmp_path / "x.png")
    with pytest.raises(regard.ArgumentError, match="got no layers"):
        draw_heads({}, tmp_path / "x.png")


def aligned(sources: int, targets: int) -> SimpleNamespace:
    weights = torch.rand(targets, sources)
    words = {
        "source_words": [f"s{i}" for i in range(sources)],
        "target_words": [f"t{i}" for i in range(targets)],
    }
    return SimpleNamespace(weights=weights, **words)


@pytest.mark.parametrize("size", [1, 12, 50])
def test_an_alignment_names_the_words(size, tmp_path, figures):
    one = aligned(size, size)
    path = draw_alignments(one, tmp_path / "x.png", title="a $title^$ 漢")
    assert path.read_bytes().startswith(b"\x89PNG")
    axes = figures[0].axes[0]
    assert names(axes.xaxis) == one.source_words
    assert names(axes.yaxis) == one.target_words
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("source", "target")


def test_alignments_side_by_side(tmp_path, figures):
    some = [aligned(3, 4), aligned(5, 2)]
    draw_alignments(some, tmp_path / "x.svg", titles=["one", "two"])
    for image, one in zip(images(figures[0]), some, strict=True):
        np.testing.assert_allclose(image, one.weights)
    with pytest.raises(regard.ArgumentError, match="1 titles for 2 alignments"):
        draw_alignments(some, tmp_path / "y.svg", titles=["one"])
    draw_alignments(some, tmp_path / "z.svg", across=1)
    left = [axes.get_position().x0 for axes in figures[-1].axes if axes.images]
    assert left[0] == left[1]  # one below the other


def test_what_is_no_alignment_is_refused(tmp_path):
    for sources, targets in ((0, 1), (1, 0)):
        with pytest.raises(regard.ArgumentError, match="give sentences that have words"):
            draw_alignments(aligned(sources, targets), tmp_path / "x.png")
    wrong = SimpleNamespace(source_words=list("abc"), target_words=list("de"), weights=torch.zeros(3, 2))
    with pytest.raises(regard.ShapeError, match=r"2 target words and 3 source words has weights of shape"):
        draw_alignments(wrong, tmp_path / "x.png")
    assert list(tmp_path.iterdir()) == []


MASKS = [
    regard.Causal(),
    regard.Window(2),
    regard.Prefix(3) & regard.Window(left=2, right=2),
    regard.Documents([2, 5], within=regard.Causal()),
    regard.Padding(4) | regard.Causal(),
    torch.eye(7, dtype=torch.bool),
]


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_a_mask_is_drawn_as_it_is(mask, tmp_path, figures):
    draw_mask(mask, tmp_path / "x.svg", queries=7)
    wanted = mask if isinstance(mask, torch.Tensor) else mask.dense(7)
    np.testing.assert_array_equal(images(figures[0])[0], wanted.float())


@pytest.mark.parametrize(
    ("mask", "size"),
    [
        (regard.Documents([2, 4]), (6, 6)),
        (regard.Documents([2, 3], [7, 4]), (5, 11)),
        (torch.rand(5, 7, generator=torch.Generator().manual_seed(0)) > 0.5, (5, 7)),
        (regard.Causal(), (8, 8)),
    ],
    ids=str,
)
def test_a_mask_has_its_own_size(mask, size, tmp_path, figures):
    draw_mask(mask, tmp_path / "x.svg")
    wanted = mask if isinstance(mask, torch.Tensor) else mask.dense(*size)
    np.testing.assert_array_equal(images(figures[0])[0], wanted.float())


def test_a_mask_with_names_for_its_keys_alone_has_its_own_queries(tmp_path, figures):
    draw_mask(torch.ones(5, 3, dtype=torch.bool), tmp_path / "x.svg", keys=list("abc"))
    assert images(figures[0])[0].shape == (5, 3)
    assert names(figures[0].axes[0].xaxis) == list("abc")


def test_a_mask_of_a_batch_and_one_with_tokens(tmp_path, figures):
    mask = regard.Padding([1, 3])
    draw_mask(mask, tmp_path / "x.svg", queries=list("abc"), keys=list("wxyz"), lead=[2])
    np.testing.assert_array_equal(np.stack(images(figures[0])), mask.dense(3, 4, [2]).float())
    assert names(figures[0].axes[0].yaxis) == list("abc")


def test_masks_side_by_side_have_titles(tmp_path, figures):
    masks = torch.stack([regard.Causal().dense(3), regard.Window(2).dense(3)])
    draw_mask(masks, tmp_path / "x.svg", queries=3, lead=[2], titles=["causal", "window"])
    assert [axes.get_title() for axes in figures[0].axes[:2]] == ["causal", "window"]
    with pytest.raises(regard.ArgumentError, match="1 titles for 2 masks"):
        draw_mask(masks, tmp_path / "x.svg", queries=3, lead=[2], titles=["causal"])


def test_a_large_mask_is_pooled(tmp_path, figures):
    draw_mask(regard.Causal(), tmp_path / "x.png", queries=2 * CELLS)
    (image,) = images(figures[0])
    assert image.shape == (CELLS, CELLS)
    assert (image[0, 0], image[0, 1], image[1, 0]) == (0.75, 0, 1)


def test_positions_are_matrices(tmp_path, figures):
    learned = regard.models.LearnedPositions(20, 8)
    draw_positions(regard.models.SinusoidalPositions(8), tmp_path / "s.svg", length=20)
    draw_positions(learned, tmp_path / "l.svg", length=20)
    draw_positions(regard.models.RotaryPositions(8), tmp_path / "r.svg", length=20)
    sinusoidal, vectors, rotary = map(images, figures)
    np.testing.assert_allclose(sinusoidal[0], regard.models.SinusoidalPositions(8)(torch.arange(20)))
    np.testing.assert_allclose(vectors[0], learned.vectors.detach())
    np.testing.assert_allclose(rotary[0], regard.models.RotaryPositions(8)(torch.arange(20)).cos[:, :4])
    assert len(rotary) == 2


def test_biases_are_lines_and_others_are_refused(tmp_path):
    for bias in (regard.ALiBi(3), regard.T5Bias(12), regard.ClippedRelativeBias(torch.zeros(5))):
        assert draw_positions(bias, tmp_path / "x.svg", length=5).stat().st_size
    with pytest.raises(regard.DTypeError, match="got a Linear; it draws Sinusoidal, Learned, Rotary"):
        draw_positions(torch.nn.Linear(2, 2), tmp_path / "y.svg")
    with pytest.raises(regard.ArgumentError, match="length"):
        draw_positions(regard.ALiBi(3), tmp_path / "y.svg", length=0)

"""Heatmaps: values, labels and errors."""

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

import regard
from regard.plot.heatmaps import (
    MAX_CELLS,
    MAX_GRID_CELLS,
    draw_alignments,
    draw_heads,
    draw_mask,
    draw_positions,
    draw_weights,
)


def weights_of(n: int, *lead: int) -> regard.Weights:
    x = torch.randn(*lead, n, 4)
    return regard.attend(x, x, x, mask=regard.Causal())[1]


def images(figure) -> list[np.ndarray]:
    """Return the matrices of a figure, in order."""
    return [axes.images[0].get_array().data for axes in figure.axes if axes.images]


def names(axis) -> list[str]:
    return [label.get_text() for label in axis.get_ticklabels()]


def test_a_small_matrix_is_not_pooled():
    weights = weights_of(5)
    axes = Figure().subplots()
    image = regard.heatmap(axes, weights, queries=list("abcde"), keys=list("vwxyz"), title="five")
    torch.testing.assert_close(torch.tensor(image.get_array().data), weights.dense())
    assert names(axes.xaxis) == list("vwxyz")
    assert names(axes.yaxis) == list("abcde")
    assert axes.get_title() == "five"
    assert len(axes.texts) == 25  # a number in each cell


def test_a_large_matrix_is_pooled_and_axes_count_tokens():
    n = 3 * MAX_CELLS
    axes = Figure().subplots()
    weights = weights_of(n)
    image = regard.heatmap(axes, weights, log=True)
    pooled = weights.pool(MAX_CELLS, MAX_CELLS)
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


def test_wrong_shapes_raise(tmp_path):
    with pytest.raises(regard.ShapeError, match=r"\(2, 3, 5, 5\).*weights\[0, 0\]"):
        regard.heatmap(Figure().subplots(), weights_of(5, 2, 3))
    with pytest.raises(regard.ShapeError, match="4 tokens for 5 keys"):
        regard.heatmap(Figure().subplots(), weights_of(5), keys=list("abcd"))
    with pytest.raises(regard.ShapeError, match="3 tokens for 5 queries"):
        draw_weights(weights_of(5), tmp_path / "x.png", queries=list("abc"))
    with pytest.raises(regard.ShapeError, match=r"got shape \(5,\)"):
        draw_weights(torch.zeros(5), tmp_path / "x.png")
    with pytest.raises(regard.ArgumentError, match="Nothing to draw"):
        draw_weights(torch.zeros(0, 3), tmp_path / "x.png")
    with pytest.raises(regard.ArgumentError, match=r"2,000 matrices; select 1 to 1,024"):
        draw_weights(torch.zeros(2000, 1, 1), tmp_path / "x.png")
    assert list(tmp_path.iterdir()) == []


def test_heads_are_drawn_as_a_grid(tmp_path, figures):
    weights = weights_of(7, 2, 3)
    draw_weights(weights, tmp_path / "x.svg", queries=list("abcdefg"), keys=list("tuvwxyz"))
    torch.testing.assert_close(torch.tensor(np.stack(images(figures[0]))), weights.dense().reshape(6, 7, 7))
    first, *_, last = [axes for axes in figures[0].axes if axes.images]
    assert (first.get_title(), last.get_title()) == ("head 0", "")
    assert (names(first.yaxis), names(first.xaxis)) == (list("abcdefg"), [])  # only at the outer edges
    assert (names(last.yaxis), names(last.xaxis)) == ([], list("tuvwxyz"))


def test_titles_of_heads(tmp_path, figures):
    draw_weights(weights_of(3, 2), tmp_path / "x.svg", titles=["0, 3", "4, 1"])
    draw_heads(
        {"dot": weights_of(3, 2), "cosine": weights_of(3, 2)}, tmp_path / "y.svg", titles=["softmax", "hard"]
    )
    drawn = [[axes.get_title() for axes in figure.axes if axes.images] for figure in figures]
    assert drawn == [["0, 3", "4, 1"], ["softmax", "hard", "", ""]]
    with pytest.raises(regard.ArgumentError, match="1 title for 2 heads"):
        draw_weights(weights_of(3, 2), tmp_path / "z.svg", titles=["one"])


def test_limits_set_the_color_scale():
    axes = Figure().subplots()
    assert regard.heatmap(axes, torch.eye(2) / 2).get_clim() == (0, 0.5)
    assert regard.heatmap(axes, torch.eye(2) / 2, limits=(0, 1)).get_clim() == (0, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"limits": (1, 0)}, r"limits=\(1, 0\): .* the first must be smaller than the second"),
        ({"limits": (2, 2)}, r"limits=\(2, 2\): both must be finite"),
        ({"limits": (1,)}, r"limits=\(1,\): pass two numbers"),
        ({"limits": (0, 1, 2)}, r"limits=\(0, 1, 2\): pass two numbers"),
        ({"limits": 1}, r"limits=1: pass two numbers.*limits=\(0, 1\)"),
        ({"limits": (None, 1)}, r"limits=\(None, 1\): pass two numbers"),
        ({"limits": (0, float("nan"))}, r"limits=\(0, nan\): both must be finite"),
        ({"limits": (float("-inf"), 1)}, r"limits=\(-inf, 1\): both must be finite"),
        ({"limits": (0, 1), "log": True}, r"limits=\(0, 1\): a logarithmic scale .*\(0\.0001, 1\)"),
        ({"limits": (-2, -1), "log": True}, r"limits=\(-2, -1\): .* needs positive limits"),
        ({"names": None}, r"names=None; pass two strings"),
        ({"names": "ab"}, r"names='ab'; pass two strings"),
        ({"names": ("queries",)}, r"names=\('queries',\); pass two strings"),
    ],
)
def test_errors_of_a_heatmap(options, message):
    axes = Figure().subplots()
    with pytest.raises(regard.ArgumentError, match=message):
        regard.heatmap(axes, torch.eye(2), **options)
    assert not axes.images


def test_limits_may_be_logarithmic_and_of_any_numeric_type():
    axes = Figure().subplots()
    assert regard.heatmap(axes, torch.eye(2), limits=(0.1, 1), log=True).get_clim() == (0.1, 1)
    assert regard.heatmap(axes, torch.eye(2), limits=torch.tensor([0, 2])).get_clim() == (0, 2)
    assert regard.heatmap(axes, torch.eye(2), limits=[np.float32(0), np.int64(3)]).get_clim() == (0, 3)


@pytest.mark.parametrize("made", [np.array, list])
def test_arrays_are_drawn_like_tensors(made, tmp_path, figures):
    rows = [[0.25, 0.75, 0.0], [0.5, 0.0, 0.5]]
    image = regard.heatmap(Figure().subplots(), made(rows))
    np.testing.assert_allclose(image.get_array().data, rows)
    draw_weights(made(rows), tmp_path / "x.svg")
    draw_heads({"a": made(rows)}, tmp_path / "y.svg")
    for figure in figures:
        np.testing.assert_allclose(images(figure)[0], rows)


def test_arrays_with_negative_strides_or_read_only_are_drawn():
    rows = np.eye(3)[::-1]
    rows.flags.writeable = False
    np.testing.assert_array_equal(regard.heatmap(Figure().subplots(), rows).get_array().data, rows)


def test_wrong_types_raise(tmp_path):
    with pytest.raises(regard.ShapeError, match=r"weights of shape \(0, 3\).*at least one query and one key"):
        regard.heatmap(Figure().subplots(), torch.zeros(0, 3))
    for wrong in ("weights", [[0.5], [0.5, 0.5]], {"a": torch.eye(2)}):
        message = rf"values \(a {type(wrong).__name__}\); pass lazy weights, a tensor or an array"
        with pytest.raises(regard.DTypeError, match=message):
            regard.heatmap(Figure().subplots(), wrong)
    for wrong in (weights_of(3, 2), torch.zeros(2, 3, 3), [weights_of(3, 2)]):
        with pytest.raises(regard.DTypeError, match=rf"{type(wrong).__name__}; pass a mapping, {{"):
            draw_heads(wrong, tmp_path / "x.svg")
    with pytest.raises(regard.DTypeError, match=r"must be strings, got 1 of type int\. Pass str\(title"):
        draw_weights(weights_of(3, 2), tmp_path / "x.svg", titles=[1, 2])
    with pytest.raises(regard.DTypeError, match="path must be a string or a Path, got 8 of type int"):
        draw_mask(regard.Causal(), 8)
    assert list(tmp_path.iterdir()) == []


def test_large_heads_are_pooled(tmp_path, figures):
    weights = weights_of(3 * MAX_GRID_CELLS, 2)
    draw_weights(weights, tmp_path / "x.png")
    torch.testing.assert_close(
        torch.tensor(np.stack(images(figures[0]))), weights.pool(MAX_GRID_CELLS, MAX_GRID_CELLS)
    )


@pytest.mark.parametrize(("heads", "rows", "columns"), [(6, 1, 6), (7, 3, 3), (12, 3, 4), (16, 4, 4)])
@pytest.mark.sampled(2)
def test_many_heads_of_one_layer_are_a_grid(tmp_path, figures, heads, rows, columns):
    for draw in (lambda x, path: draw_heads({"layer 5": x}, path), draw_weights):
        draw(torch.eye(5).expand(heads, 5, 5), tmp_path / "x.svg")
        boxes = [axes.get_position() for axes in figures[-1].axes if axes.get_title().startswith("head")]
        assert len(boxes) == heads
        assert len({round(box.y0, 3) for box in boxes}) == rows
        assert len({round(box.x0, 3) for box in boxes}) == columns


def test_draw_heads_has_a_row_per_layer_and_a_column_per_head(tmp_path, figures):
    model = regard.models.LanguageModel(50, regard.models.TransformerConfig(width=16, heads=2, layers=3))
    with regard.watch(model) as seen:
        model(torch.tensor([[5, 6, 7, 8]]))
    draw_heads(seen, tmp_path / "x.svg", queries=list("abcd"), keys=list("abcd"))
    expected = torch.cat([weights.dense()[0] for weights in seen.values()])
    torch.testing.assert_close(torch.tensor(np.stack(images(figures[0]))), expected.detach())
    texts = [text.get_text() for text in figures[0].texts]
    assert texts[:3] == ["decoder 0", "decoder 1", "decoder 2"]
    limits = {axes.images[0].get_clim() for axes in figures[0].axes if axes.images}
    assert len(limits) == 1  # the same color scale


def test_heads_of_a_batch_raise(tmp_path):
    with pytest.raises(regard.ShapeError, match=r"weights of 'a' have shape \(2, 3, 5, 5\); .*\(h, q, k\)"):
        draw_heads({"a": weights_of(5, 2, 3)}, tmp_path / "x.png")
    with pytest.raises(regard.ArgumentError, match="got no layers"):
        draw_heads({}, tmp_path / "x.png")


def alignment(sources: int, targets: int) -> SimpleNamespace:
    weights = torch.rand(targets, sources)
    words = {
        "source_words": [f"s{i}" for i in range(sources)],
        "target_words": [f"t{i}" for i in range(targets)],
    }
    return SimpleNamespace(weights=weights, **words)


@pytest.mark.parametrize("size", [1, 12, 50])
def test_an_alignment_is_labeled_with_its_words(size, tmp_path, figures):
    words = alignment(size, size)
    draw_alignments(words, tmp_path / "x.png", title="a $title^$ 漢")
    axes = figures[0].axes[0]
    assert names(axes.xaxis) == words.source_words
    assert names(axes.yaxis) == words.target_words
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("source", "target")


def test_alignments_side_by_side(tmp_path, figures):
    alignments = [alignment(3, 4), alignment(5, 2)]
    draw_alignments(alignments, tmp_path / "x.svg", titles=["one", "two"])
    for image, words in zip(images(figures[0]), alignments, strict=True):
        np.testing.assert_allclose(image, words.weights)
    with pytest.raises(regard.ArgumentError, match="1 title for 2 alignments"):
        draw_alignments(alignments, tmp_path / "y.svg", titles=["one"])
    draw_alignments(alignments, tmp_path / "z.svg", columns=1)
    left = [axes.get_position().x0 for axes in figures[-1].axes if axes.images]
    assert left[0] == left[1]  # aligned in one column


def test_invalid_alignments_raise(tmp_path):
    for sources, targets in ((0, 1), (1, 0)):
        with pytest.raises(
            regard.ArgumentError, match=rf"alignment of {targets} target words? and {sources} source words?;"
        ):
            draw_alignments(alignment(sources, targets), tmp_path / "x.png")
    wrong = SimpleNamespace(source_words=list("abc"), target_words=list("de"), weights=torch.zeros(3, 2))
    with pytest.raises(
        regard.ShapeError, match=r"2 target words and 3 source words has weights of shape \(3, 2\).*\(2, 3\)"
    ):
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
def test_a_small_mask_is_not_pooled(mask, tmp_path, figures):
    draw_mask(mask, tmp_path / "x.svg", queries=7)
    expected = mask if isinstance(mask, torch.Tensor) else mask.dense(7)
    np.testing.assert_array_equal(images(figures[0])[0], expected.float())


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
def test_default_size_of_a_mask(mask, size, tmp_path, figures):
    draw_mask(mask, tmp_path / "x.svg")
    expected = mask if isinstance(mask, torch.Tensor) else mask.dense(*size)
    np.testing.assert_array_equal(images(figures[0])[0], expected.float())


def test_a_mask_with_key_tokens_only_has_its_own_queries(tmp_path, figures):
    draw_mask(torch.ones(5, 3, dtype=torch.bool), tmp_path / "x.svg", keys=list("abc"))
    assert images(figures[0])[0].shape == (5, 3)
    assert names(figures[0].axes[0].xaxis) == list("abc")


def test_a_mask_of_a_batch_with_tokens(tmp_path, figures):
    mask = regard.Padding([1, 3])
    draw_mask(mask, tmp_path / "x.svg", queries=list("abc"), keys=list("wxyz"), lead=[2])
    np.testing.assert_array_equal(np.stack(images(figures[0])), mask.dense(3, 4, [2]).float())
    assert names(figures[0].axes[0].yaxis) == list("abc")


def test_masks_side_by_side_have_titles(tmp_path, figures):
    masks = torch.stack([regard.Causal().dense(3), regard.Window(2).dense(3)])
    draw_mask(masks, tmp_path / "x.svg", queries=3, lead=[2], titles=["causal", "window"])
    assert [axes.get_title() for axes in figures[0].axes[:2]] == ["causal", "window"]
    with pytest.raises(regard.ArgumentError, match="1 title for 2 masks"):
        draw_mask(masks, tmp_path / "x.svg", queries=3, lead=[2], titles=["causal"])


def test_a_large_mask_is_pooled(tmp_path, figures):
    draw_mask(regard.Causal(), tmp_path / "x.png", queries=2 * MAX_CELLS)
    (image,) = images(figures[0])
    assert image.shape == (MAX_CELLS, MAX_CELLS)
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


def test_biases_are_drawn_and_other_types_raise(tmp_path):
    for bias in (regard.ALiBi(3), regard.T5Bias(12), regard.ClippedRelativeBias(torch.zeros(5))):
        assert draw_positions(bias, tmp_path / "x.svg", length=5).stat().st_size
    with pytest.raises(regard.DTypeError, match="got a Linear; pass SinusoidalPositions, LearnedPositions"):
        draw_positions(torch.nn.Linear(2, 2), tmp_path / "y.svg")
    with pytest.raises(regard.ArgumentError, match="length"):
        draw_positions(regard.ALiBi(3), tmp_path / "y.svg", length=0)

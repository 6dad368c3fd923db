"""The non-local block compared with the paper's equations, written densely."""

import copy
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

import regard
from regard.models.layers.nonlocal_block import Kind, NonLocal

KINDS = get_args(Kind)
QUICK = ("embedded", "concat")
some_quick = pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind not in QUICK)) for kind in KINDS]
)
GRIDS = [(7,), (3, 5), (2, 3, 5), (2, 1, 3, 2)]
CHANNELS = 6


def awake(*args: Any, **options: Any) -> NonLocal:
    """Return a block that is not the identity."""
    block = NonLocal(*args, **options)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return block


def paper(block: NonLocal, x: Tensor) -> Tensor:
    """Compute equations 1 to 6, one position at a time, without pooling."""
    b, c, *grid = x.shape
    places = x.reshape(b, c, -1).transpose(1, 2)
    n = places.shape[1]
    theta, phi, g = block.query_map(places), block.key_map(places), block.value_map(places)
    rows = []
    for i in range(n):
        dots = torch.stack([(theta[:, i] * phi[:, j]).sum(-1) for j in range(n)], -1)
        if block.kind in ("gaussian", "embedded"):
            f, c_of_x = dots.exp(), dots.exp().sum(-1, keepdim=True)
        elif block.kind == "dot":
            f, c_of_x = dots, torch.tensor(n)
        else:
            assert isinstance(block.score, regard.Concat)
            w = torch.cat([block.score.query_map[0], block.score.key_map[0]])
            pairs = [torch.cat([theta[:, i], phi[:, j]], -1) for j in range(n)]
            f, c_of_x = torch.stack([(pair @ w).relu() for pair in pairs], -1), torch.tensor(n)
        rows.append(sum((f / c_of_x)[:, j, None] * g[:, j] for j in range(n)))
    output = block.out_proj(torch.stack(rows, 1))
    if block.norm is not None:
        norm = block.norm
        mean, variance = norm.running_mean, norm.running_var
        if block.training:
            mean, variance = output.mean((0, 1)), output.var((0, 1), correction=0)
        assert mean is not None
        assert variance is not None
        output = (output - mean) / (variance + norm.eps).sqrt() * norm.weight + norm.bias
    return output.transpose(1, 2).reshape(b, c, *grid) + x


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sampled(3)
def test_block_equals_the_paper(kind: Kind, grid: tuple[int, ...], norm: bool) -> None:
    block = awake(CHANNELS, kind, norm=norm).double()
    x = torch.randn(3, CHANNELS, *grid, dtype=torch.float64)
    torch.testing.assert_close(block(x), paper(copy.deepcopy(block), x))
    block.eval()
    torch.testing.assert_close(block(x), paper(block, x))


def test_kinds_differ() -> None:
    x = torch.randn(2, CHANNELS, 7)
    blocks = [awake(CHANNELS, kind, inner=CHANNELS, norm=False) for kind in KINDS]
    with torch.no_grad():
        for block in blocks:  # all blocks share the same maps
            for name in ("query_map", "key_map", "value_map", "out_proj"):
                if not isinstance(getattr(block, name), nn.Identity):
                    getattr(block, name).weight.copy_(torch.eye(CHANNELS))
                    getattr(block, name).bias.zero_()
        gaussian, embedded, dot, concat = (block(x) for block in blocks)
    torch.testing.assert_close(gaussian, embedded)  # θ and φ are the identity
    assert not torch.allclose(dot, embedded, atol=0.01)
    assert not torch.allclose(dot, concat, atol=0.01)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_new_block_is_the_identity(kind: Kind, norm: bool) -> None:
    block, x = NonLocal(CHANNELS, kind, norm=norm), torch.randn(2, CHANNELS, 3, 5)
    assert torch.equal(block(x), x)
    assert torch.equal(block.eval()(x), x)
    assert not torch.allclose(awake(CHANNELS, kind, norm=norm)(x), x)


@pytest.mark.parametrize("norm", [False, True])
def test_new_block_has_gradients(norm: bool) -> None:
    """W, or the scale of its norm, gets a gradient although it is zero."""
    block = NonLocal(CHANNELS, norm=norm)
    block(torch.randn(2, CHANNELS, 3, 5)).square().sum().backward()
    zero = block.out_proj.weight if block.norm is None else block.norm.weight
    assert zero.grad is not None
    assert (zero == 0).all()
    assert (zero.grad != 0).all()


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_reach_every_parameter(kind: Kind, norm: bool) -> None:
    torch.manual_seed(3)
    block = awake(CHANNELS, kind, norm=norm).double()
    block(torch.randn(2, CHANNELS, 3, 5, dtype=torch.float64) / 2).pow(3).sum().backward()
    unseen = set()
    if kind == "embedded":
        unseen.add("key_map.bias")  # shifts all scores in a row, which does not change softmax
    if norm and kind in ("gaussian", "embedded"):
        unseen.add("value_map.bias")  # shifts all outputs, which does not change the norm
    for name, parameter in block.named_parameters():
        assert parameter.grad is not None, name
        assert (parameter.grad.abs().max() > 1e-9) == (name not in unseen), name


@given(st.permutations(range(15)), st.sampled_from(KINDS))
def test_position_order_is_irrelevant(order: list[int], kind: Kind) -> None:
    """Permuted positions give permuted outputs."""
    block = awake(CHANNELS, kind)
    x = torch.randn(2, CHANNELS, 15)
    torch.testing.assert_close(block(x[..., order]), block(x)[..., order], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_grid_axes_are_only_a_shape(kind: Kind) -> None:
    block, x = awake(CHANNELS, kind), torch.randn(2, CHANNELS, 2, 3, 5)
    torch.testing.assert_close(block(x).flatten(2), block(x.flatten(2)))
    torch.testing.assert_close(block(x.transpose(2, 4)), block(x).transpose(2, 4), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("grid", "pool"), [((7,), 2), ((11,), 4), ((5, 7), (2, 3)), ((3, 5, 7), (1, 2, 2))])
def test_pool_takes_the_maximum_of_cells(
    kind: Kind, grid: tuple[int, ...], pool: int | tuple[int, ...]
) -> None:
    block, x = awake(CHANNELS, kind, pool=pool, norm=False), torch.randn(2, CHANNELS, *grid)
    max_pool: Any = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[len(grid) - 1]

    def cells(part: nn.Module) -> Tensor:
        return max_pool(part(x.movedim(1, -1)).movedim(-1, 1), pool).flatten(2).mT  # b k e

    query = block.query_map(x.flatten(2).mT)
    output = regard.attention(
        query, cells(block.key_map), cells(block.value_map), score=block.score, normalize=block.normalize
    )
    expected = x + block.out_proj(output).mT.unflatten(2, grid)
    torch.testing.assert_close(block(x), expected, atol=1e-4, rtol=1e-4)


def test_pool_of_one_changes_nothing() -> None:
    block, x = awake(CHANNELS), torch.randn(2, CHANNELS, 3, 5)
    expected = block(x)
    block.pool = (1, 1)
    assert torch.equal(block(x), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_any_strides(kind: Kind) -> None:
    block, x = awake(CHANNELS, kind), torch.randn(2, CHANNELS, 3, 5)
    expected = block(x)
    last = block(x.to(memory_format=torch.channels_last))
    torch.testing.assert_close(last, expected, atol=1e-4, rtol=1e-4)
    assert last.is_contiguous(memory_format=torch.channels_last)
    assert expected.is_contiguous()
    wide = torch.randn(2, 2 * CHANNELS, 6, 5).flip(-1)
    wide[:, ::2, ::2] = x
    torch.testing.assert_close(block(wide[:, ::2, ::2]), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_watched_weights_reproduce_the_output(kind: Kind) -> None:
    block, x = awake(CHANNELS, kind, norm=False), torch.randn(2, CHANNELS, 3, 5)
    with regard.watch(nn.Sequential(block)) as seen:
        output = block(x)
    weights = seen["0"]
    assert weights.shape == (2, 1, 15, 15)
    places = x.flatten(2).mT
    expected = places + block.out_proj(weights.dense()[:, 0] @ block.value_map(places))
    torch.testing.assert_close(output.flatten(2).mT, expected, atol=1e-4, rtol=1e-4)
    if kind in ("gaussian", "embedded"):
        torch.testing.assert_close(weights.dense().sum(-1), torch.ones(2, 1, 15))


def test_large_grid_needs_linear_memory() -> None:
    """128 × 128 positions: dense weights would take a gigabyte."""
    block, x = awake(2), torch.randn(1, 2, 128, 128)
    with torch.no_grad(), regard.watch(block) as seen:
        block(x)
    picture = block.attention_map(seen[0], (100, 3), grid=(128, 128))
    assert picture.shape == (1, 128, 128)
    assert picture.sum().item() == pytest.approx(1, abs=1e-3)


def test_attention_map_is_the_row_of_a_position() -> None:
    block, x = awake(CHANNELS, pool=(1, 2, 1)), torch.randn(2, CHANNELS, 2, 5, 3)
    with regard.watch(block) as seen:
        block(x)
    dense = seen[0].dense()[:, 0].unflatten(1, (2, 5, 3)).unflatten(-1, (2, 2, 3))
    for position in [(0, 0, 0), (1, 3, 2), (-1, 4, -3)]:
        picture = block.attention_map(seen[0], position, grid=x.shape[2:])
        torch.testing.assert_close(picture, dense[(slice(None), *position)])
    with pytest.raises(
        regard.ArgumentError, match=r"\(0, 5, 0\) and a grid of \(2, 5, 3\); 5 is out of range"
    ):
        block.attention_map(seen[0], (0, 5, 0), grid=(2, 5, 3))
    with pytest.raises(regard.ArgumentError, match="one index per axis"):
        block.attention_map(seen[0], (0, 5), grid=(2, 5, 3))
    with pytest.raises(regard.ShapeError, match=r"weights of 30 × 12 positions.*105 × 45"):
        block.attention_map(seen[0], (0, 0, 0), grid=(5, 7, 3))
    with pytest.raises(regard.ShapeError, match="one size per grid axis"):
        block.attention_map(seen[0], (0, 0), grid=(5, 6))


def test_any_normalizer() -> None:
    block = awake(CHANNELS, normalize=regard.Sparsemax())
    with regard.watch(block) as seen:
        block(torch.randn(2, CHANNELS, 3, 5))
    assert (seen[0].dense() == 0).any()


@pytest.mark.parametrize("kind", KINDS)
def test_saved_state_gives_the_same_output(kind: Kind, tmp_path: Path) -> None:
    block, x = awake(CHANNELS, kind), torch.randn(2, CHANNELS, 3, 5)
    block(x)  # updates the running mean
    save_file(block.state_dict(), tmp_path / "block.safetensors")
    other = NonLocal(CHANNELS, kind)
    other.load_state_dict(load_file(tmp_path / "block.safetensors"))
    assert torch.equal(other.eval()(x), block.eval()(x))


@pytest.mark.sampled(2)
@some_quick
def test_compiled_block_equals_the_eager_one(kind: Kind) -> None:
    torch.compiler.reset()
    block, x = awake(CHANNELS, kind, pool=2, norm=False), torch.randn(2, CHANNELS, 4, 6, requires_grad=True)
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), block(x), atol=1e-4, rtol=1e-4)
    (ours,), (theirs,) = (torch.autograd.grad(f(x).square().sum(), x) for f in (compiled, block))
    torch.testing.assert_close(ours, theirs, atol=1e-2, rtol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_meta_device_shape(kind: Kind) -> None:
    with torch.device("meta"):
        block = NonLocal(CHANNELS, kind, pool=2)
        output = block(torch.empty(2, CHANNELS, 4, 6))
    assert output.is_meta
    assert output.shape == (2, CHANNELS, 4, 6)


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_is_close(kind: Kind) -> None:
    block, x = NonLocal(CHANNELS, kind, norm=False), torch.randn(2, CHANNELS, 3, 5)
    nn.init.eye_(block.out_proj.weight)
    with torch.autocast("cpu", torch.bfloat16):
        low = block(x)
    assert low.dtype is torch.float32
    torch.testing.assert_close(low, block(x), atol=0.05, rtol=0.05)


def test_one_channel() -> None:
    assert NonLocal(1)(torch.randn(2, 1, 5)).shape == (2, 1, 5)
    assert NonLocal(5).head_width == 2


class Pixels(nn.Module):
    """Predict at each marked pixel whether the other marked pixel has the same color."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.in_proj, self.middle = nn.Conv2d(3, 16, 1), middle
        self.out_proj = nn.Sequential(nn.Conv2d(16, 64, 1), nn.ReLU(), nn.Conv2d(64, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.out_proj(self.middle(self.in_proj(x)))[:, 0]


def pixels() -> tuple[Tensor, Tensor, Tensor]:
    """Return 5 × 7 images with two distant marked pixels, each red or blue; channels: mark, red, blue."""
    x = torch.zeros(32, 3, 5, 7)
    equal = torch.zeros(32, 5, 7)
    for i in range(32):
        colours = i % 2, i // 2 % 2
        ends = (i // 4 % 5, i // 20), (4 - i // 4 % 3, 6 - i // 12 % 2)
        for (row, column), colour in zip(ends, colours, strict=True):
            x[i, 0, row, column] = x[i, 1 + colour, row, column] = 1
            equal[i, row, column] = colours[0] == colours[1]
    return x, equal, x[:, 0].bool()


def accuracy(middle: nn.Module) -> float:
    """Return the training accuracy."""
    x, equal, marked = pixels()
    model = Pixels(middle)
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    for _ in range(200):
        optimizer.zero_grad()
        F.binary_cross_entropy_with_logits(model(x)[marked], equal[marked]).backward()
        optimizer.step()
    with torch.no_grad():
        return ((model(x)[marked] > 0) == equal[marked].bool()).float().mean().item()


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("one_thread")
@some_quick
def test_distant_pixels_are_compared(kind: Kind) -> None:
    torch.manual_seed(2)  # with some seeds, all relu inputs of "concat" are negative and training fails
    assert accuracy(NonLocal(16, kind)) == 1


@pytest.mark.usefixtures("one_thread")
def test_convolution_does_not_compare_distant_pixels() -> None:
    torch.manual_seed(0)
    assert accuracy(nn.Conv2d(16, 16, 3, padding=1)) < 0.8  # the receptive field is 3 × 3


def test_invalid_input_is_rejected() -> None:
    block = NonLocal(6)
    with pytest.raises(regard.ShapeError, match=r"\(2, 5, 3, 3\).*\(b, 6, …grid\)"):
        block(torch.randn(2, 5, 3, 3))
    with pytest.raises(regard.ShapeError, match="at least one grid axis"):
        block(torch.randn(2, 6))
    with pytest.raises(regard.DTypeError, match="got a list"):
        block([1.0])
    with pytest.raises(regard.ShapeError, match=r"pool=\(2, 2\) and a grid of \(4,\)"):
        NonLocal(6, pool=(2, 2))(torch.randn(2, 6, 4))
    with pytest.raises(regard.ShapeError, match=r"pool=\(5,\) and a grid of \(4,\)"):
        NonLocal(6, pool=5)(torch.randn(2, 6, 4))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"channels": 0}, "channels=0; it must be at least 1"),
        ({"channels": 2.0}, "channels=2.0; it must be an integer"),
        ({"channels": 6, "inner": 0}, "inner=0; it must be at least 1"),
        ({"channels": 6, "pool": 0}, "pool=0; it must be at least 1"),
        ({"channels": 6, "pool": (2, -1)}, "pool=-1; it must be at least 1"),
        ({"channels": 6, "kind": "cosine"}, "kind='cosine'; choose one of gaussian, embedded, dot, concat"),
    ],
)
def test_invalid_settings_are_rejected(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(regard.RegardError, match=message):
        NonLocal(**arguments)

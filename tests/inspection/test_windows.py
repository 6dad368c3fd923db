"""Windowed attention yields one map per layer, with each window at the positions of its tokens."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import regard
from regard.errors import ArgumentError
from regard.inspection.calls.windows import runs
from tests.cases import looped


def image_map(blocks: torch.Tensor, batch: int, height: int, width: int, window: int, shift: int):
    """Place the weights (windows, h, w², w²) of an image, one pair of tokens at a time."""
    padded = [-(-n // window) * window for n in (height, width)]
    columns = padded[1] // window
    per_image = (padded[0] // window) * columns
    heads = blocks.shape[1]
    result = torch.zeros(batch, heads, height * width, height * width)

    def token(number: int, place: int) -> int | None:
        row = (number // columns) * window + place // window
        column = (number % columns) * window + place % window
        row, column = (row + shift) % padded[0], (column + shift) % padded[1]  # before the cyclic shift
        return row * width + column if row < height and column < width else None

    for image in range(batch):
        for number in range(per_image):
            places = [token(number, place) for place in range(window**2)]
            block = blocks[image * per_image + number]
            for i, query in enumerate(places):
                for j, key in enumerate(places):
                    if query is not None and key is not None:
                        result[image, :, query, key] = block[:, i, j]
    return result


def swin(version: str, *, size: int = 24, **options):
    transformers = pytest.importorskip("transformers")
    config = {"image_size": size, "patch_size": 4, "embed_dim": 12, "depths": [2, 2], "num_heads": [2, 3]}
    name = {"1": "Swin", "2": "Swinv2"}[version]
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}Model")(
        getattr(transformers, f"{name}Config")(**{**config, "window_size": 3, **options})
    ).eval()
    for parameter in model.parameters():  # initial biases are zero
        nn.init.normal_(parameter, std=0.3)
    return model


def eager_blocks(model, x):
    """Return the eager weights of every layer, by module name."""
    found, hooks = {}, []
    for name, module in model.named_modules():
        if type(module).__name__ in ("SwinAttention", "SwinSelfAttention", "Swinv2SelfAttention"):
            hooks.append(
                module.register_forward_hook(lambda m, a, output, name=name: found.update({name: output[1]}))
            )
    model.config._attn_implementation = "eager"
    with torch.no_grad():
        model(x, output_attentions=True)
    for hook in hooks:
        hook.remove()
    return {name: weights for name, weights in found.items() if weights is not None}


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize(("version", "size"), [("1", 24), ("2", 24), ("1", 28), ("2", 28)])
@pytest.mark.sampled(3)
def test_windows_of_swin_are_placed_in_the_image(version: str, size: int, implementation: str) -> None:
    """Covers shifted windows and, for 7 × 7 patches, padded ones."""
    model, x = swin(version, size=size), torch.randn(2, 3, size, size)
    model.config._attn_implementation = implementation
    with torch.no_grad(), regard.watch(model) as seen:
        model(x)
    side = size // 4
    blocks = eager_blocks(model, x)
    assert len(seen) == 4
    checked = 0
    for name in seen:
        module = model.get_submodule(name.split(".attention")[0])
        stage = int(name.split(".")[2])
        here = -(-side // 2) if stage else side
        raw = blocks[next(key for key in blocks if key.startswith(name) or name.startswith(key))]
        shift = int(module.shift_size)
        expected = image_map(raw, 2, here, here, int(module.window_size), shift)
        checked += shift > 0
        torch.testing.assert_close(seen[name].dense(), expected, atol=1e-5, rtol=0)
        row = seen[name][1, 0, here + 2]
        torch.testing.assert_close(row, expected[1, 0, here + 2], atol=1e-5, rtol=0)
    assert checked, "no shifted window was compared"


def test_raw_windows_and_their_positions() -> None:
    model, x = swin("1"), torch.randn(2, 3, 24, 24)
    with torch.no_grad(), regard.watch(model, layers=0) as seen:
        model(x)
    (windows,) = seen.windows(0)
    assert windows.weights.shape == (8, 2, 9, 9)
    assert windows.queries[0].tolist() == [0, 1, 2, 6, 7, 8, 12, 13, 14]  # 6 × 6 patches
    assert windows.queries[4].tolist() == [36 + p for p in windows.queries[0].tolist()]
    block = seen[0].dense()[0][:, windows.queries[0]][:, :, windows.keys[0]]
    torch.testing.assert_close(block, windows.weights.dense()[0], atol=1e-6, rtol=0)


def test_the_map_is_lazy_and_has_linear_memory() -> None:
    held = []
    for size in (24, 48):
        model = swin("1", size=size)
        with torch.no_grad(), regard.watch(model, layers=0) as seen:
            model(torch.randn(1, 3, size, size))
        seen[0].topk(1)
        held.append(seen[0].held)
    assert held[1] < 4.5 * held[0]  # four times the tokens


def test_reductions_and_storage_of_a_map(tmp_path) -> None:
    model = swin("1")
    with torch.no_grad(), regard.watch(model) as seen:
        model(torch.randn(2, 3, 24, 24))
    weights, dense = seen[1], seen[1].dense()
    torch.testing.assert_close(weights.received(), dense.sum(-2), atol=1e-5, rtol=0)
    torch.testing.assert_close(weights.pool(3, 3), F.avg_pool2d(dense, 12), atol=1e-5, rtol=0)
    torch.testing.assert_close(weights.mean("heads").dense(), dense.mean(1), atol=1e-6, rtol=0)
    assert seen.storage(1) == seen.to("cpu").storage(1) == "lazy"
    assert seen.to("cpu").windows(1)[0].weights.shape == (8, 2, 9, 9)
    again = regard.Seen.load(seen.save(tmp_path / "swin"))
    torch.testing.assert_close(again[1].dense(), dense)
    assert not seen.heads(frame=False)[0]["entropy"] < 0
    with pytest.raises(ArgumentError, match="no recorded windows"):
        again.windows(1)


def test_norms_and_gradients_have_the_order_of_the_image() -> None:
    model, x, dense = swin("1"), torch.randn(2, 3, 24, 24), []
    model.config._attn_implementation = "eager"

    def keep(module, args, output) -> None:
        output[1].retain_grad()
        dense.append(output[1])

    name = "encoder.layers.0.blocks.0.attention"
    hook = model.get_submodule(name).register_forward_hook(keep)
    with regard.watch(model, layers=0, gradients=True) as seen:
        model(x).last_hidden_state.square().sum().backward()
    hook.remove()
    expected = image_map(dense[0].grad, 2, 6, 6, 3, 0)
    inside = seen[name].dense() > 0
    found = torch.where(inside, seen.gradients()[name].dense(), 0.0)
    assert expected.abs().max() > 0
    torch.testing.assert_close(found, expected, atol=1e-5 * float(expected.abs().max()), rtol=1e-4)
    norms = seen.norms(project=False)[name]
    assert torch.equal(norms.dense() > 0, inside)


class OwnWindows(nn.Module):
    """A model with its own windows: 1-D, reversed, selected by a gather."""

    def __init__(self, overlap: bool = False, by_name: bool = False) -> None:
        super().__init__()
        self.qkv, self.window_size, self.overlap, self.by_name = nn.Linear(6, 18), 3, overlap, by_name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        order = torch.arange(x.shape[1]).flip(0)
        q, k, v = self.qkv(x)[:, order].chunk(3, -1)
        q, k, v = (t.unflatten(1, (-1, self.window_size)).flatten(0, 1)[:, None] for t in (q, k, v))
        if self.overlap:  # each window also attends to the next one
            k, v = (torch.cat([t, t.roll(-1, 0)], -2) for t in (k, v))
        if self.by_name:
            return F.scaled_dot_product_attention(query=q, key=k, value=v)
        return F.scaled_dot_product_attention(q, k, v)


@looped("by_name", [False, True])
def test_windows_of_own_code(by_name: bool) -> None:
    model, x = OwnWindows(by_name=by_name), torch.randn(2, 12, 6)
    with torch.no_grad(), regard.watch(model) as seen:
        model(x)
    assert seen[0].shape == (2, 1, 12, 12)
    q, k, _ = model.qkv(x).chunk(3, -1)
    window = torch.arange(12) // 3
    scores = (q @ k.mT / 6**0.5).masked_fill(window[:, None] != window, -torch.inf)
    torch.testing.assert_close(seen[0].dense()[:, 0], scores.softmax(-1), atol=1e-5, rtol=0)


def test_windows_that_cannot_be_one_map_stay_raw() -> None:
    """A key that is in two windows has two positions, so there is no single map."""
    model = OwnWindows(overlap=True)
    with torch.no_grad(), regard.watch(model) as seen:
        model(torch.randn(2, 12, 6))
    assert seen[0].shape == (8, 1, 3, 6)
    with pytest.raises(ArgumentError, match="could not be traced"):
        seen.windows(0)


def test_windows_of_qwen_vl() -> None:
    """Covers windows of several sizes in their own order, and layers that attend to whole images."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

    torch.manual_seed(0)
    config = transformers.models.qwen2_5_vl.configuration_qwen2_5_vl.Qwen2_5_VLVisionConfig(
        depth=2,
        hidden_size=16,
        intermediate_size=16,
        num_heads=2,
        out_hidden_size=8,
        patch_size=2,
        window_size=8,
        fullatt_block_indexes=[1],
    )
    model = Qwen2_5_VisionTransformerPretrainedModel(config).eval()
    grid = torch.tensor([[1, 6, 10], [1, 4, 4]])
    n = 76
    x = torch.randn(n, 3 * 2 * 2 * 2)
    with torch.no_grad(), regard.watch(model) as seen:
        model(x, grid_thw=grid)
    assert [w.shape for w in seen.values()] == [(1, 2, n, n)] * 2
    # patches are in groups of 2 × 2; a window has 4 × 4 patches
    place, image = [], []
    for number, (_, height, width) in enumerate(grid.tolist()):
        for group in range(height // 2 * (width // 2)):
            row, column = group // (width // 2) // 2, group % (width // 2) // 2
            place += [(number, row, column)] * 4
            image += [number] * 4
    same = torch.tensor([[a == b for b in place] for a in place])
    assert torch.equal(seen[0].dense()[0, 0] > 0, same)
    image = torch.tensor(image)
    assert torch.equal(seen[1].dense()[0, 0] > 0, image[:, None] == image)
    for weights in seen.values():
        torch.testing.assert_close(weights.sum(-1), torch.ones(1, 2, n))
    assert sum(w.weights.shape[0] for w in seen.windows(0)) == 7
    assert "query" in seen[1].problem.tensors
    assert seen[1].problem["query"].shape[-1] == 8  # query and key, not weights


def test_models_without_windows_are_not_followed() -> None:
    from regard.inspection.layers import has_windows

    assert not has_windows(nn.TransformerEncoderLayer(8, 2))
    assert has_windows(OwnWindows())


def test_runs_cover_exactly_the_positions() -> None:
    positions = torch.tensor([[7, 3, 4, -1, 0], [2, 1, 0, 9, 8]])
    start, stop = runs(positions)
    for row, ends in zip(positions.tolist(), zip(start.tolist(), stop.tolist(), strict=True), strict=True):
        covered = [p for a, b in zip(*ends, strict=True) for p in range(a, b)]
        assert sorted(covered) == sorted(p for p in row if p >= 0)


@looped("name", ["swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256"])
@looped("fused", [True, False])
def test_windows_of_timm(name: str, fused: bool) -> None:
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    options = {"embed_dim": 24, "depths": (2, 2), "num_heads": (2, 3), "img_size": 64, "window_size": 4}
    model = timm.create_model(name, **options).eval()
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = fused
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad(), regard.watch(model) as seen:
        model(x)
    assert [w.shape[-1] for w in seen.values()] == [256, 256, 64, 64]
    for name in seen:
        block, side = model.get_submodule(name.rpartition(".")[0]), int(seen[name].shape[-1] ** 0.5)
        (windows,) = seen.windows(name)
        expected = image_map(windows.weights.dense(), 2, side, side, 4, int(block.shift_size[0]))
        torch.testing.assert_close(seen[name].dense(), expected, atol=1e-5, rtol=0)


def test_windows_of_torchvision() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        models = pytest.importorskip("torchvision.models.swin_transformer", exc_type=ImportError)
    torch.manual_seed(0)
    model = models.SwinTransformer([4, 4], 12, [2, 2], [2, 3], [3, 3]).eval()
    with torch.no_grad(), regard.watch(model) as seen:
        model(torch.randn(2, 3, 28, 28))
    assert [w.shape[-1] for w in seen.values()] == [49, 49, 16, 16]
    for name in seen:
        side = int(seen[name].shape[-1] ** 0.5)
        shift = model.get_submodule(name).shift_size[0]
        (windows,) = seen.windows(name)
        expected = image_map(windows.weights.dense(), 2, side, side, 3, shift)
        torch.testing.assert_close(seen[name].dense(), expected, atol=1e-5, rtol=0)

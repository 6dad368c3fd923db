"""Conversion to and from torch's multi-head attention preserves the outputs."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from regard.models import MultiHeadAttention
from tests.models import exact
from tests.models.exact import normal

pytestmark = pytest.mark.usefixtures("one_thread")

THEIRS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no bias": {"bias": False},
    "other widths": {"kdim": 7, "vdim": 5},
    "other keys": {"kdim": 7},
    "other values": {"vdim": 5, "bias": False},
    "zero": {"add_zero_attn": True},
    "zero of other widths": {"add_zero_attn": True, "kdim": 7, "vdim": 5},
    "dropout": {"dropout": 0.3},
}


close = partial(exact.close, within=1e-12)


def theirs(name: str, **options: Any) -> nn.MultiheadAttention:
    module = nn.MultiheadAttention(12, 4, batch_first=True, **THEIRS[name], **options).double()
    with torch.no_grad():
        for seed, parameter in enumerate(module.parameters()):
            parameter.copy_(normal(*parameter.shape, seed=seed) / 2)
    return module


def inputs(module: nn.MultiheadAttention) -> list[Tensor]:
    assert module.kdim is not None
    assert module.vdim is not None
    return [normal(2, 3, 12), normal(2, 5, module.kdim), normal(2, 5, module.vdim, seed=1)]


# Both directions


@pytest.mark.parametrize("name", THEIRS)
def test_from_torch(name: str) -> None:
    module = theirs(name).eval()
    layer, given = MultiHeadAttention.from_torch(module), inputs(module)
    close(layer(*given), module(*given, need_weights=False)[0])


@pytest.mark.parametrize("name", THEIRS)
def test_round_trip(name: str) -> None:
    module = theirs(name).eval()
    layer = MultiHeadAttention.from_torch(module)
    back = layer.to_torch()
    assert back.batch_first
    assert (back.dropout, back.add_zero_attn) == (module.dropout, module.add_zero_attn)
    assert back.state_dict().keys() == module.state_dict().keys()
    for key, tensor in module.state_dict().items():
        assert torch.equal(back.state_dict()[key], tensor), key
    for ours, once in zip(MultiHeadAttention.from_torch(back).parameters(), layer.parameters(), strict=True):
        assert torch.equal(ours, once)


@pytest.mark.parametrize("name", THEIRS)
def test_to_torch(name: str) -> None:
    options = dict(THEIRS[name])
    widths = options.pop("kdim", 12), options.pop("vdim", 12)
    layer = MultiHeadAttention(
        12,
        4,
        source_width=widths,
        linear_bias=options.pop("bias", True),
        normalize=regard.Softmax1() if options.pop("add_zero_attn", False) else regard.Softmax(),
        **options,
    )
    module, given = layer.double().eval().to_torch(), [normal(2, 3, 12), normal(2, 5, widths[0])]
    given.append(normal(2, 5, widths[1], seed=1))
    close(module(*given, need_weights=False)[0], layer(*given))


@pytest.mark.parametrize("name", ["plain", "zero"])
def test_masks_are_equivalent(name: str) -> None:
    """True means masked in torch."""
    module = theirs(name).eval()
    layer, given = MultiHeadAttention.from_torch(module), inputs(module)
    lengths = torch.tensor([5, 2])
    padded = torch.arange(5) >= lengths[:, None]
    close(layer(*given, mask=regard.Padding(lengths)), module(*given, key_padding_mask=padded)[0])
    allowed = torch.ones(3, 5, dtype=torch.bool).tril()
    close(
        layer(*given, mask=regard.Causal(align="start")),
        module(*given, attn_mask=~allowed)[0],
    )
    bias = normal(3, 5)
    close(layer(*given, bias=bias), module(*given, attn_mask=bias)[0])


@pytest.mark.parametrize("name", ["plain", "no bias", "zero"])
def test_weights_agree(name: str) -> None:
    module = theirs(name).eval()
    layer, given = MultiHeadAttention.from_torch(module), inputs(module)
    with regard.watch(layer) as seen:
        layer(*given)
    weights = module(*given, average_attn_weights=False)[1]
    close(seen[0].dense(), weights[..., :5])  # torch's last key is the zero key


@pytest.mark.parametrize("name", ["plain", "other widths"])
def test_gradients_agree(name: str) -> None:
    module = theirs(name)
    layer, given = MultiHeadAttention.from_torch(module), inputs(module)
    layer(*given).square().sum().backward()
    module(*given)[0].square().sum().backward()
    assert module.out_proj.weight.grad is not None
    close(layer.out_proj.weight.grad, module.out_proj.weight.grad, within=1e-10)
    if name == "plain":
        assert isinstance(layer.in_proj, nn.Linear)
        assert module.in_proj_weight.grad is not None
        close(layer.in_proj.weight.grad, module.in_proj_weight.grad, within=1e-10)


def test_sequence_first_layers_take_transposed_inputs() -> None:
    module = nn.MultiheadAttention(12, 4).double().eval()
    layer, x = MultiHeadAttention.from_torch(module), normal(2, 5, 12)
    close(layer(x), module(x.mT.permute(2, 0, 1), *[x.transpose(0, 1)] * 2)[0].transpose(0, 1))
    close(layer(x[0]), module(x[0], x[0], x[0])[0])


# Dtype, mode and device


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_dtype_and_mode_are_kept(training: bool, dtype: torch.dtype) -> None:
    module = nn.MultiheadAttention(12, 4, dropout=0.5).to(dtype).train(training)
    layer = MultiHeadAttention.from_torch(module)
    back = layer.to_torch()
    for converted in (layer, back):
        assert converted.training == training
        assert {parameter.dtype for parameter in converted.parameters()} == {dtype}
        assert converted.dropout == 0.5


def test_conversion_copies_parameters() -> None:
    module = theirs("plain").eval()
    layer = MultiHeadAttention.from_torch(module)
    given = inputs(module)
    before = layer(*given)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    assert torch.equal(layer(*given), before)


def test_meta_device_layers_are_converted() -> None:
    with torch.device("meta"):
        layer = MultiHeadAttention.from_torch(nn.MultiheadAttention(12, 4))
        assert layer.to_torch().in_proj_weight.is_meta


# Invalid arguments


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        ({"score": regard.Dot()}, r"score=Dot.*only ScaledDot"),
        ({"score": regard.ScaledDot(scale=2.0)}, r"score=ScaledDot\(scale=2.0"),
        ({"score": regard.General(3, 3)}, "score=General"),
        ({"score": lambda q, k: q @ k.mT}, "score=<function"),
        ({"normalize": regard.Sparsemax()}, r"normalize=Sparsemax.*Softmax\(.*Softmax1"),
        ({"normalize": regard.Softmax(temperature=2.0)}, "temperature=2.0"),
        ({"normalize": regard.Softmax1(0.5)}, "normalize=Softmax1"),
        ({"normalize": regard.Softmax1(torch.zeros(4))}, "normalize=Softmax1"),
        ({"normalize": regard.Sink(4)}, "normalize=Sink"),
        ({"key_heads": 2}, "key_heads=2.*only 4"),
        ({"head_width": 5}, r"head_width=\(5, 5\).*only \(3, 3\)"),
        ({"head_width": (3, 5)}, r"head_width=\(3, 5\).*only \(3, 3\)"),
    ],
)
def test_layers_without_torch_equivalent_are_rejected(layer: dict[str, Any], message: str) -> None:
    with pytest.raises(regard.ArgumentError, match=message):
        MultiHeadAttention(12, 4, **layer).to_torch()


def test_uneven_head_widths_are_rejected() -> None:
    with pytest.raises(regard.ArgumentError, match="head_width"):
        MultiHeadAttention(10, 4, head_width=2).to_torch()


def test_unsupported_torch_layers_are_rejected() -> None:
    with pytest.raises(regard.ArgumentError, match="add_bias_kv=True"):
        MultiHeadAttention.from_torch(nn.MultiheadAttention(12, 4, add_bias_kv=True))
    with pytest.raises(regard.DTypeError, match="got a Linear"):
        MultiHeadAttention.from_torch(nn.Linear(3, 4))  # type: ignore[arg-type]

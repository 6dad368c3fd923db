"""Unusual calls to a model: torch.func transforms and half precision."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import regard
from regard.errors import ArgumentError


class HandAttention(nn.Module):
    num_heads = 2

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.used = nn.Linear(8, 24), torch.empty(0)

    def heads(self, x: torch.Tensor):
        return (t.unflatten(-1, (2, -1)).transpose(-3, -2) for t in self.qkv(x).chunk(3, -1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.heads(x)
        self.used = F.softmax(query @ key.mT * 0.5, -1)
        return (self.used @ value).transpose(-3, -2).flatten(-2)


class DirectAttention(HandAttention):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(*self.heads(x)).transpose(-3, -2).flatten(-2)


class TorchAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


def own() -> nn.Module:
    return regard.models.MultiHeadAttention(8, 2)


TRANSFORMS = {
    "vmap": lambda model, x: torch.vmap(model)(x),
    "grad": lambda model, x: torch.func.grad(lambda x: model(x).sum())(x),
    "jvp": lambda model, x: torch.func.jvp(model, (x,), (x,))[1],
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize(
    ("transform", "build"),
    [
        *(("grad", build) for build in (HandAttention, DirectAttention, TorchAttention, own)),
        *(("vmap", build) for build in (HandAttention, DirectAttention, own)),
        *(("jvp", build) for build in (HandAttention, own)),  # SDPA has no forward-mode derivative
    ],
)
def test_transforms_run_unchanged_and_say_why_nothing_is_recorded(build, transform: str) -> None:
    model, x = build().eval(), torch.randn(3, 5, 8)
    expected = TRANSFORMS[transform](model, x)
    with regard.watch(model) as seen:
        output = TRANSFORMS[transform](model, x)
    torch.testing.assert_close(output, expected)
    for layer in seen:
        with pytest.raises(ArgumentError, match=r"torch\.func transform"):
            seen[layer]
    assert len(seen) == 1


def test_edits_by_hand_inside_a_transform_are_refused() -> None:
    model = HandAttention()
    with (
        pytest.raises(ArgumentError, match=r"inside a torch\.func transform"),
        regard.edit(model, "", 0, regard.ZeroAblation()),
    ):
        torch.vmap(model)(torch.randn(3, 5, 8))


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("build", [HandAttention, DirectAttention])
def test_norms_of_models_in_half_precision(build, dtype: torch.dtype) -> None:
    model, x = build(), torch.randn(2, 5, 8)
    with regard.watch(model, values=True) as expected:
        model(x)
    with regard.watch(model.to(dtype), values=True) as seen:
        model(x.to(dtype))
    for name in ("dense", "received"):
        found, right = (getattr(s.norms(project=False)[""], name)() for s in (seen, expected))
        torch.testing.assert_close(found.float(), right, atol=3e-2, rtol=3e-2)
    summed = seen.norms(project=False)[""].summed()
    torch.testing.assert_close(
        summed.float(), expected.norms(project=False)[""].summed(), atol=3e-2, rtol=3e-2
    )

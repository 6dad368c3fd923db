"""`watch` records handwritten attention, SDPA imported by name, FlexAttention, and nested tensors."""

import math
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.functional import scaled_dot_product_attention as imported_by_name
from torch.overrides import TorchFunctionMode

import regard
from regard.errors import ArgumentError
from regard.inspection.hooks.functional_calls import capture_flex, capture_sdpa

B, H, Q, D = 2, 3, 7, 5
LOWEST = torch.finfo(torch.float32).min


class ByHand(nn.Module):
    """Attention as a function of query, key and value (b, h, n, d); keeps the weights that it used."""

    def __init__(self, function: Callable[..., tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.function, self.num_heads = function, H
        self.used: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = x.unbind(0)
        weights, output = self.function(query, key, value)
        self.used.append(weights)
        return output


def inputs(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(3, B, H, Q, D, generator=torch.Generator().manual_seed(0), dtype=dtype)


def causal() -> Tensor:
    return torch.ones(Q, Q, dtype=torch.bool).tril()


def attention(change: Callable[[Tensor], Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return an attention function that changes its scores before the softmax."""

    def function(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        weights = change(query @ key.transpose(-1, -2)).softmax(-1)
        return weights, weights @ value

    return function


def scaled_in_place(scores: Tensor) -> Tensor:
    scores /= math.sqrt(D)
    scores += torch.linspace(-1, 1, Q)
    return scores.masked_fill_(~causal(), LOWEST)


MIXTURE = nn.Parameter(torch.randn(H, H, generator=torch.Generator().manual_seed(2)), requires_grad=False)
BIAS = torch.randn(H, Q, Q, generator=torch.Generator().manual_seed(1))
PADDING = torch.zeros(B, 1, 1, Q).index_fill(3, torch.tensor([Q - 1]), LOWEST)

LAZY: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda s: s,
    "scale": lambda s: s * D**-0.5,
    "divide by a tensor": lambda s: s / torch.tensor(D).sqrt(),
    "scale per head": lambda s: s * torch.arange(1.0, H + 1)[:, None, None],
    "causal with masked_fill": lambda s: s.masked_fill(~causal(), -math.inf),
    "causal with where": lambda s: torch.where(causal(), s, torch.tensor(LOWEST)),
    "causal with an additive mask": lambda s: s + torch.full((Q, Q), LOWEST).triu(1),
    "padding": lambda s: s + PADDING,
    "bias": lambda s: s + BIAS,
    "bias, then scale": lambda s: (s + BIAS) * 0.5,
    "scale and bias": lambda s: torch.add(BIAS, s * 0.5),
    "subtract the maximum": lambda s: s - s.amax(-1, keepdim=True),
    "softcap": lambda s: 3 * torch.tanh(s / 3),
    "in place": scaled_in_place,
    "heads in the batch": lambda s: s.view(B * H, Q, Q).add(0.1).view(B, H, Q, Q) + PADDING,
    "merged after the bias": lambda s: (s + BIAS).view(B * H, Q, Q).mul(0.3).view(B, H, Q, Q),
    "clamp to finite": lambda s: torch.max(s + PADDING, torch.tensor(LOWEST)),
    "cast": lambda s: s.double().float().contiguous(),
}
DENSE: dict[str, Callable[[Tensor], Tensor]] = {
    "clamp": lambda s: s.clamp(-1, 1),
    "power": lambda s: s.pow(2),
    "keys shifted": lambda s: s.roll(1, -1),
    "added by index": lambda s: s + torch.cat([s[..., 1:], s[..., :1]], -1).sigmoid(),
    "mixed heads": lambda s: F.linear(s.permute(0, 2, 3, 1), torch.ones(H, H).tril()).permute(0, 3, 1, 2),
    "mixed heads by einsum": lambda s: torch.einsum("bhqk,hg->bgqk", s, MIXTURE),
    "signed": lambda s: s.abs().sqrt() * s.sign(),
}


def recorded(model: nn.Module, *args: Any) -> tuple[regard.Seen, Any]:
    """Run a watched model; the output must be bitwise equal to the unwatched one."""
    with torch.no_grad():
        before = model(*args)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with regard.watch(model) as seen:
                during = model(*args)
    assert torch.equal(before, during)
    return seen, during


@pytest.mark.parametrize("name", [*LAZY, *DENSE])
def test_weights_equal_those_that_the_model_used(name: str) -> None:
    model = ByHand(attention((LAZY | DENSE)[name]))
    seen, _ = recorded(model, inputs())
    assert len(seen) == 1
    assert seen.storage(0) == ("lazy" if name in LAZY else "dense")
    torch.testing.assert_close(seen[0].dense(), model.used[-1], rtol=0, atol=1e-5)


def test_a_changed_chain_is_not_stored_as_lazy() -> None:
    """If an operation is not traced, here a change through a view, the compared rows differ."""

    def change(scores: Tensor) -> Tensor:
        scores.view(-1)[:: Q + 1] -= 1.0
        return scores

    model = ByHand(attention(change))
    with torch.inference_mode(), regard.watch(model) as seen:
        model(inputs())
    assert seen.storage(0) == "dense"
    torch.testing.assert_close(seen[0].dense(), model.used[-1].clone(), rtol=0, atol=1e-6)


def flattened(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    query, key, value = (x.reshape(B * H, Q, D) for x in (query, key, value))
    weights = torch.bmm(query, key.transpose(1, 2)).softmax(-1)
    return weights.view(B, H, Q, Q), torch.bmm(F.dropout(weights, 0.5, False), value)


def with_baddbmm(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    query, key, value = (x.reshape(B * H, Q, D) for x in (query, key, value))
    bias = BIAS.repeat(B, 1, 1)
    scores = bias.baddbmm(batch1=query, batch2=key.transpose(1, 2), beta=0.5, alpha=0.3)
    weights = scores.view(B, H, Q, Q).softmax(-1)
    return weights, torch.bmm(weights.view(B * H, Q, Q), value)


def with_einsum(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    weights = torch.einsum("bhqd,bhkd->bhqk", query, key).softmax(-1)
    return weights, torch.einsum("bhqk,bhkd->bqhd", weights, value)


def sequence_first(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    query, key, value = (x.permute(2, 0, 1, 3) for x in (query, key, value))
    weights = F.softmax(torch.einsum("ibnd,jbnd->bnij", query, key) + BIAS, dim=3)
    return weights, torch.einsum("bnij,jbnd->ibnd", weights, value)


def twice_used(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    weights = (query @ key.mT).softmax(-1)
    return weights, weights @ value + weights @ value.flip(-1)


def masked_afterwards(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    weights = (query @ key.mT).softmax(-1).masked_fill(~causal(), 0.0)  # rows sum to less than one
    return weights, weights @ value


def with_sink(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    scores = torch.cat([query @ key.mT, torch.ones(B, H, Q, 1)], -1)
    weights = scores.softmax(-1)[..., :-1]
    return weights, weights @ value


def shared_key(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    weights = torch.einsum("bhqd,bkd->bhqk", query, key[:, 0]).softmax(-1)  # multi-query attention
    return weights, torch.einsum("bhqk,bkd->bhqd", weights, value[:, 0])


def tied_rows(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Sum the scores over rows as well as features: tied row attention over a sequence alignment."""
    query, key, value = (torch.stack([x, x.flip(-1)]) for x in (query, key, value))
    weights = torch.einsum("rbhqd,rbhkd->bhqk", query, key).softmax(-1)
    return weights, torch.einsum("bhqk,rbhkd->rbqhd", weights, value)


def heads_last(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    weights = torch.softmax(0.3 * torch.einsum("bqhd,bkhd->bqkh", query, key), dim=2)
    output = torch.einsum("bqkh,bkhd->bqhd", F.dropout(weights, 0.5, False), value)
    return weights.permute(0, 3, 1, 2), output


def keys_first(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    weights = (key @ query.mT).softmax(-2)
    return weights.mT, value.mT @ weights


def transposed_by_property(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    weights = (key @ query.mT).mT.softmax(-1)
    return weights, (value.mT @ weights.mT).mT


def keys_first_transposed(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    weights = (key @ query.mT).softmax(-2)
    return weights.mT, weights.transpose(-2, -1) @ value


def of_distances(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    weights = (-torch.cdist(query, key).square()).softmax(-1)
    return weights, weights @ value


def heads_mixed_afterwards(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    weights = (query @ key.mT).softmax(-1)
    return weights, F.conv2d(weights, MIXTURE[..., None, None]) @ value


def signed_afterwards(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    scores = query @ key.mT
    weights = scores.abs().softmax(-1)
    return weights, (weights * scores.sign()) @ value


def blended(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    weights = 0.3 * (query @ key.mT).softmax(-1) + 0.7 * BIAS.softmax(-1)
    return weights, weights @ value


def with_pseudoinverse(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Multiply with a scaled copy of the weights: the first step of an iterative pseudoinverse."""
    weights = (query @ key.mT).softmax(-1)
    inverse = weights.transpose(-1, -2) / weights.sum(-2).max()
    inverse = 2 * inverse - inverse @ (weights @ inverse)
    return weights, inverse @ value


def heads_before_the_batch(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    query, key, value = (x.transpose(0, 1).reshape(H * B, Q, D) for x in (query, key, value))
    weights = torch.bmm(query, key.mT).softmax(-1)
    return weights.view(H, B, Q, Q).transpose(0, 1), torch.bmm(weights, value)


def heads_concatenated(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Concatenate the heads along the batch axis, as in the Set Transformer."""
    features = (x.transpose(1, 2).flatten(2) for x in (query, key, value))
    query, key, value = (torch.cat(x.split(D, 2), 0) for x in features)
    weights = torch.bmm(query, key.mT).clamp(-1, 1).softmax(-1)
    return weights.view(H, B, Q, Q).transpose(0, 1), torch.bmm(weights, value)


def by_log_softmax(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    weights = (query @ key.mT).masked_fill(~causal(), -math.inf).log_softmax(-1).exp()
    return weights, weights @ value


def by_exponentials(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    scores = query @ key.mT
    exponentials = (scores - scores.amax(-1, keepdim=True)).exp()
    weights = exponentials / exponentials.sum(-1, keepdim=True)
    return weights, weights @ value


def by_masked_exponentials(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    exponentials = (query @ key.mT).exp() * causal()
    weights = exponentials / exponentials.sum(-1, keepdim=True)
    return weights, weights @ value


def without_nan(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    hidden = torch.arange(Q)[:, None] >= Q - 2  # the last queries are padding and have no keys
    weights = torch.nan_to_num((query @ key.mT).masked_fill(hidden, -math.inf).softmax(-1))
    return weights, weights @ value


def by_addmm(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    weights = torch._softmax(torch.addmm(BIAS[0], query[0, 0], key[0, 0].T, beta=2, alpha=0.3), -1, False)
    return weights, weights.mm(value[0, 0])


FORMS = [heads_before_the_batch, heads_concatenated, by_log_softmax, by_exponentials]
FORMS += [by_masked_exponentials, without_nan, by_addmm]
FORMS += [flattened, with_baddbmm, with_einsum, sequence_first, twice_used, masked_afterwards, with_sink]
FORMS += [shared_key, tied_rows, heads_last, keys_first, of_distances, heads_mixed_afterwards]
FORMS += [blended, signed_afterwards, with_pseudoinverse, transposed_by_property, keys_first_transposed]


@pytest.mark.parametrize("function", FORMS)
def test_forms_of_the_products(function: Callable[..., tuple[Tensor, Tensor]]) -> None:
    model = ByHand(function)
    seen, _ = recorded(model, inputs())
    assert list(seen) == [""]
    torch.testing.assert_close(seen[0].dense(), model.used[-1], rtol=0, atol=1e-5)


@pytest.mark.parametrize("function", [shared_key, tied_rows])
def test_einsum_with_shared_or_summed_axes_is_lazy(function: Callable[..., tuple[Tensor, Tensor]]) -> None:
    seen, _ = recorded(ByHand(function), inputs())
    assert seen.storage(0) == "lazy"


def test_both_parts_of_split_weights_are_recorded() -> None:
    def function(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        weights = (query @ key.mT).softmax(-1)
        return weights, weights[..., :3] @ value[..., :3, :] + weights[..., 3:] @ value[..., 3:, :]

    model = ByHand(function)
    seen, _ = recorded(model, inputs())
    parts = torch.cat([seen[name].dense() for name in seen], -1)
    torch.testing.assert_close(parts, model.used[-1], rtol=0, atol=1e-5)


class SlotAttention(nn.Module):
    """Applies softmax over the queries, which compete for keys: its rows are not distributions over keys."""

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.einsum("bqd,bkd->bqk", x[:, :3], x).softmax(1)
        return torch.einsum("bqk,bkd->bqd", weights / weights.sum(-1, keepdim=True), x)


def test_a_softmax_over_queries_is_not_recorded() -> None:
    with (
        pytest.warns(UserWarning, match="SlotAttention: watch could not trace its softmax"),
        regard.watch(model := SlotAttention()) as seen,
    ):
        model(torch.randn(B, Q, D))
    assert not seen


def test_the_weights_are_those_before_dropout() -> None:
    def function(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        weights = (query @ key.mT).softmax(-1)
        return weights, F.dropout(weights, 0.5, True) @ value

    model = ByHand(function)
    with torch.no_grad(), regard.watch(model) as seen:
        model(inputs())
    assert seen.storage(0) == "lazy"
    torch.testing.assert_close(seen[0].dense(), model.used[-1], rtol=0, atol=1e-6)


def test_gradients_are_unchanged() -> None:
    model, x = ByHand(attention(LAZY["bias"])), inputs().requires_grad_()
    (expected,) = torch.autograd.grad(model(x).square().sum(), x)
    with regard.watch(model) as seen:
        (gradient,) = torch.autograd.grad(model(x).square().sum(), x)
    assert torch.equal(gradient, expected)
    torch.testing.assert_close(seen[0].dense(), model.used[-1].detach(), rtol=0, atol=1e-6)


def test_lazy_weights_need_linear_memory() -> None:
    class Long(ByHand):
        def forward(self, x: Tensor) -> Tensor:
            scores = (x @ x.mT).masked_fill(~torch.ones(len(x), len(x), dtype=torch.bool).tril(), -math.inf)
            return scores.softmax(-1) @ x

    with torch.no_grad(), regard.watch(Long(with_einsum)) as seen:
        Long.forward(seen_model := Long(with_einsum), torch.randn(8, 4))  # not the watched model
    assert not seen
    with torch.no_grad(), regard.watch(seen_model) as seen:
        seen_model(torch.randn(1024, 4))
    assert seen.storage(0) == "lazy"
    assert seen[0].held < 100 * 1024 * 4


def test_softmax_without_products_is_not_attention() -> None:
    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Parameter(torch.randn(8, 4))
            self.experts = nn.Parameter(torch.randn(4, 8))

        def forward(self, x: Tensor) -> Tensor:
            routed = (x @ self.gate).softmax(-1) @ self.experts
            return routed + F.linear(x, self.gate.mT).softmax(-1) @ self.experts

    model = nn.Sequential(Router(), ByHand(with_einsum))
    with regard.watch(model) as seen:
        model[0](torch.randn(3, 5, 8))
        model[1](inputs())
    assert list(seen) == ["1"]


# SDPA and FlexAttention


class ByName(ByHand):
    def forward(self, x: Tensor) -> Tensor:
        return imported_by_name(*x.unbind(0), is_causal=True)


def test_sdpa_imported_by_name_is_seen_once() -> None:
    seen, _ = recorded(ByName(with_einsum), inputs())
    query, key, _ = inputs().unbind(0)
    expected = (query @ key.mT / math.sqrt(D)).masked_fill(~causal(), -math.inf).softmax(-1)
    assert list(seen) == [""]
    torch.testing.assert_close(seen[0].dense(), expected, rtol=0, atol=1e-6)


def test_sdpa_is_seen_once_with_patch_and_edit() -> None:
    model = ByName(with_einsum)
    with regard.patched(), regard.watch(model) as seen:
        F.scaled_dot_product_attention(*inputs().unbind(0))  # outside the model
        model(inputs())
    assert list(seen) == [""]


class Flex(ByHand):
    def __init__(self, score_mod: Any = None) -> None:
        super().__init__(with_einsum)
        self.score_mod = score_mod

    def forward(self, x: Tensor) -> Tensor:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 128, 128, device="cpu")
        return flex_attention(*x.unbind(0), score_mod=self.score_mod, block_mask=mask)


@pytest.mark.parametrize(
    ("score_mod", "storage"), [(None, "lazy"), (lambda s, b, h, q, k: s - (q - k), "dense")]
)
@pytest.mark.filterwarnings("ignore:.*flex_attention.*")
def test_flex_attention(score_mod: Any, storage: str) -> None:
    x = torch.randn(3, 1, 2, 128, 16)
    model = Flex(score_mod)
    with torch.no_grad():
        before = model(x)
        with regard.watch(model) as seen:
            output = model(x)
    assert torch.equal(output, before)
    assert seen.storage(0) == storage
    torch.testing.assert_close(seen[0].dense() @ x[2], output, rtol=0, atol=1e-5)
    assert seen.causal(0)


class Traced:
    """A function as torch.compile passes it to FlexAttention: no signature, and its tensors attached."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def __call__(self, *args: Any) -> Tensor:
        return self.function(*args)


def test_flex_attention_with_compiled_functions() -> None:
    query, key, value = torch.randn(3, 2, 3, 5, 4).unbind(0)
    bias, last = torch.randn(3), torch.tensor([2, 4])  # per head; per text
    score_mod = Traced(lambda s, b, h, q, k, bias: s + bias[h] * (q - k))
    mask_mod = Traced(lambda b, h, q, k, last: k <= last[b])
    arguments = (query, key, value, score_mod, (5, 5, mask_mod), 0.5, {}, (bias,), (last,))
    call = capture_flex((value,), *arguments)
    distance = torch.arange(5)[:, None] - torch.arange(5)
    scores = query @ key.mT * 0.5 + bias[:, None, None] * distance
    expected = scores.masked_fill(torch.arange(5) > last[:, None, None, None], -math.inf).softmax(-1)
    torch.testing.assert_close(call.weights().dense(), expected, rtol=0, atol=1e-6)


@pytest.mark.slow  # imports torch and the compiler in a separate process
@pytest.mark.parametrize("imported", ["before", "inside"])
def test_flex_attention_may_load_the_compiler_inside_the_block(imported: str) -> None:
    code = f"""
        import sys, torch, regard
        if {imported!r} == "before":
            import torch.nn.attention.flex_attention
        assert "torch._dynamo.eval_frame" not in sys.modules
        class Flex(torch.nn.Module):
            def forward(self, x):
                from torch.nn.attention.flex_attention import flex_attention
                return flex_attention(x, x, x, score_mod=lambda s, b, h, q, k: s - (q - k).abs())
        model, x, compile = Flex(), torch.randn(1, 2, 5, 4), torch.compile
        with torch.no_grad(), regard.watch(model) as seen:
            output = model(x)
        assert torch.compile is compile
        i = torch.arange(5)
        expected = (x @ x.mT / 2 - (i[:, None] - i).abs()).softmax(-1)
        torch.testing.assert_close(seen[0].dense(), expected)
        torch.testing.assert_close(output, expected @ x)
        print(len(seen))
    """
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.stdout, result.returncode) == ("1\n", 0), result.stderr


def test_an_error_while_reading_a_call_does_not_stop_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("an unknown form")

    monkeypatch.setattr("regard.inspection.hooks.tracing.add_window_positions", fail)
    model = ByName(with_einsum)
    with regard.watch(model) as seen:
        output = model(inputs())
    assert torch.equal(output, model(inputs()))
    with pytest.raises(ArgumentError, match="could not be read: AssertionError: an unknown form"):
        seen[0]


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.filterwarnings("ignore:.*nested tensors.*")
def test_nested_tensors(layout: torch.layout) -> None:
    class Nested(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x)

    model, (sequences, x) = Nested(), nested(layout)
    with torch.no_grad(), regard.watch(model) as seen:
        model(x)
    check_nested(seen[0].dense(), sequences, is_causal=False)


@pytest.mark.filterwarnings("ignore:.*nested tensors.*")
def test_causal_nested_tensors() -> None:
    """torch has no kernel for them on the CPU, so the call is captured without running it."""
    sequences, x = nested(torch.jagged)
    call = capture_sdpa(x, x, x, x, is_causal=True)
    assert call is not None
    check_nested(call.weights().dense(), sequences, is_causal=True)


def nested(layout: torch.layout) -> tuple[list[Tensor], Tensor]:
    sequences = [torch.randn(n, H, D) for n in (5, 3)]
    x = torch.nested.nested_tensor(sequences, layout=layout).transpose(1, 2)
    return sequences, x.contiguous() if layout is torch.strided else x


def check_nested(weights: Tensor, sequences: list[Tensor], is_causal: bool) -> None:
    assert tuple(weights.shape) == (2, H, 5, 5)
    for row, sequence in enumerate(sequences):
        n, q = len(sequence), sequence.transpose(0, 1)
        scores = q @ q.mT / math.sqrt(D)
        if is_causal:
            scores = scores.masked_fill(~torch.ones(n, n, dtype=torch.bool).tril(), -math.inf)
        torch.testing.assert_close(weights[row, :, :n, :n], scores.softmax(-1), rtol=0, atol=1e-6)
        assert not weights[row, :, n:].any()


# Modes and threads


def test_other_modes_keep_working() -> None:
    calls = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.append(getattr(func, "__name__", ""))
            return func(*args, **(kwargs or {}))

    model = ByHand(with_einsum)
    with Mode():
        with regard.watch(model) as outer:
            model(inputs())
        with regard.watch(model) as first:
            mode = Mode()
            mode.__enter__()
            model(inputs())
        model(inputs())  # the first watch has ended: its mode is removed and the other one stays
        mode.__exit__(None, None, None)
    assert len(outer) == len(first) == 1
    assert calls.count("einsum") == 2 * 4 + 2 * 1


def test_torch_function_modes_are_restored() -> None:
    from torch.overrides import _get_current_function_mode_stack

    with pytest.raises(ZeroDivisionError), regard.watch(ByHand(with_einsum)):
        _ = 1 / 0
    assert _get_current_function_mode_stack() == []


# Unentered watches, and missed attention


def test_watch_without_with() -> None:
    with pytest.warns(UserWarning, match="was not entered and recorded nothing. Use it in a with statement"):
        regard.watch(ByHand(with_einsum))
    watching = regard.watch(ByHand(with_einsum))
    with pytest.raises(regard.ArgumentError, match=r"with regard\.watch"):
        watching[0]
    with pytest.raises(AttributeError, match=r"with regard\.watch"):
        watching.heads()
    with watching, pytest.raises(regard.ArgumentError, match="already been entered"):
        watching.__enter__()


class LinearAttention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.relu() @ (x.relu().mT @ x)


class ThreadedAttention(nn.Module):
    """Computes its attention in a worker thread, which watch cannot follow."""

    def forward(self, x: Tensor) -> Tensor:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(lambda: (x @ x.mT).softmax(-1) @ x).result()


class SampledAttention(nn.Module):
    """Deformable attention: the weights do not compare queries with keys."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Linear(D, Q)

    def forward(self, x: Tensor) -> Tensor:
        return self.weights(x).softmax(-1) @ x


@pytest.mark.parametrize(
    ("unseen", "reason"),
    [
        (LinearAttention, "LinearAttention: it does not call softmax in the watched thread"),
        (ThreadedAttention, "ThreadedAttention: it does not call softmax in the watched thread"),
        (SampledAttention, "SampledAttention: watch could not trace its softmax to a product of queries"),
    ],
)
def test_partly_seen_models_say_what_was_not_seen(unseen: type[nn.Module], reason: str) -> None:
    model = nn.Sequential(ByHand(attention(LAZY["plain"])), unseen())
    with (
        pytest.warns(UserWarning, match=f"Sequential: watch did not record: {reason}"),
        regard.watch(model) as seen,
    ):
        model(inputs())
    assert list(seen) == ["0"]
    assert reason in seen.unseen
    assert reason in repr(seen)
    with pytest.raises(KeyError, match=reason):
        _ = seen["1"]


def test_layers_written_by_hand_are_selected_by_number() -> None:
    class OwnAttention(ByHand):
        def forward(self, x: Tensor) -> Tensor:
            query, key, _ = x.unbind(0)
            return torch.stack([query, key, (query @ key.mT).softmax(-1) @ key])

    model = nn.Sequential(OwnAttention(with_einsum), OwnAttention(with_einsum), OwnAttention(with_einsum))
    with regard.watch(model, layers=[0, -1], heads=[1]) as seen:
        model(inputs())
    assert list(seen) == ["0", "2"]
    assert tuple(seen[0].shape) == (B, 1, Q, Q)


def test_tokens_belong_to_the_call_of_the_model() -> None:
    """A module that runs twice per call has entries @2, …, each with the tokens of its own call."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.attention = nn.Embedding(9, 8), ByHand(with_einsum)

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embedding(ids)
            for _ in range(2):
                x = (x @ x.mT).softmax(-1) @ x
            return x

    model = Shared()
    with regard.watch(model, tokenizer=lambda ids: [str(i) for i in ids]) as seen:
        model(torch.tensor([[1, 2, 3]]))
        model(torch.tensor([[4, 5, 6]]))
    assert list(seen) == ["", "@2", "@3", "@4"]
    assert [seen.texts(name)[0] for name in seen] == [["1", "2", "3"]] * 2 + [["4", "5", "6"]] * 2


def test_the_output_projection_of_a_module_without_parameters_is_that_of_its_parent() -> None:
    class Projected(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attend, self.to_out = ByHand(with_einsum), nn.Linear(H * D, H * D)

        def forward(self, x: Tensor) -> Tensor:
            return self.to_out(self.attend(x).flatten(2))

    model = Projected()
    with torch.no_grad(), regard.watch(model, values=True) as seen:
        model(inputs())
    value = inputs()[2]
    projection = model.to_out.weight.detach().unflatten(1, (H, D))
    projected = torch.einsum("bhkd,ohd->bhko", value, projection)
    expected = seen[0].dense() * projected.norm(dim=-1)[..., None, :]
    torch.testing.assert_close(seen.norms()["attend"].dense(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["BigBird", "BigBirdPegasus"])
def test_block_sparse_attention_is_refused_with_its_cure(name: str) -> None:
    """Its blocks do not form a map; the same model with full attention is recorded."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 50, "max_position_embeddings": 256, "block_size": 8, "num_random_blocks": 1}
    sizes |= {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    if name == "BigBirdPegasus":
        sizes |= {"d_model": 16, "encoder_layers": 2, "decoder_layers": 1, "encoder_ffn_dim": 16}
        sizes |= {"decoder_ffn_dim": 16, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    ids = torch.randint(5, 50, (1, 128))
    for kind in ("block_sparse", "original_full"):
        torch.manual_seed(0)
        config = getattr(transformers, f"{name}Config")(attention_type=kind, **sizes)
        model = getattr(transformers, f"{name}Model")(config).eval()
        with torch.no_grad(), regard.watch(model) as seen:
            model(ids)
        encoder = [layer for layer in seen if layer.startswith("encoder")]
        assert len(encoder) == 2
        for layer in encoder:
            if kind == "original_full":
                assert seen[layer].shape == (1, 2, 128, 128)
                continue
            with pytest.raises(ArgumentError, match='attention_type="original_full"'):
                seen[layer]


class SequencePooling(nn.Module):
    """Sequence pooling in compact convolutional transformers (Hassani et al. 2021, eq. 2)."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return (F.softmax(self.scores(x), dim=1).transpose(-1, -2) @ x).squeeze(-2)


def test_pooling_by_a_softmax_is_named_as_unseen() -> None:
    model = nn.Sequential(regard.models.MultiHeadAttention(8, 2), SequencePooling())
    with pytest.warns(UserWarning, match="SequencePooling: it multiplies"), regard.watch(model) as seen:
        model(torch.randn(2, 5, 8))
    assert list(seen) == ["0"]
    assert "SequencePooling" in seen.unseen


class AxialAttention(nn.Module):
    """Row and column attention over a sequence alignment (Rao et al. 2021): heads come first."""

    def __init__(self, equation: str) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(12, 12) for _ in range(3))
        self.equation, self.num_heads, self.used = equation, 3, torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:  # rows, columns, batch, features
        query, key, value = (f(x).unflatten(-1, (3, 4)) for f in (self.query, self.key, self.value))
        first, second, out = self.equation.replace("->", ",").split(",")
        self.used = torch.einsum(self.equation, query * 0.5, key).softmax(-1)
        return torch.einsum(f"{out},{second}->{first}", self.used, value)


@pytest.mark.parametrize(
    ("equation", "order"),
    [("rinhd,rjnhd->hnij", (1, 0, 2, 3)), ("icnhd,jcnhd->hcnij", (1, 2, 0, 3, 4))],
)
def test_heads_on_the_first_axis_are_heads(equation: str, order: tuple[int, ...]) -> None:
    """The result is the same if the number of rows, columns or texts equals the number of heads."""
    for size in ((5, 7, 2), (5, 7, 3), (5, 3, 2), (3, 3, 3)):
        model = AxialAttention(equation)
        with regard.watch(model, values=True) as seen:
            model(torch.randn(*size, 12))
        torch.testing.assert_close(seen[0].dense(), model.used.permute(order), atol=1e-5, rtol=0)
        assert seen[0].shape[-3] == 3
        assert len(seen.heads(frame=False)) == 3
        with pytest.raises(ArgumentError, match="could not be traced"):
            seen.norms(project=False)
    edited = regard.edit(model, None, [0], regard.ZeroAblation())
    with edited, pytest.raises(ArgumentError, match="one tensor of values per head"):
        model(torch.randn(3, 3, 3, 12))


def test_heads_before_windows_are_heads() -> None:
    """The layout of Hiera, (b, h, windows, n, d), with as many texts as heads."""

    class MaskUnitAttention(nn.Module):
        num_heads = 2

        def __init__(self) -> None:
            super().__init__()
            self.projection = nn.Linear(8, 24)

        def forward(self, x: Tensor) -> Tensor:  # b n d
            query, key, value = self.projection(x).reshape(2, 5, 3, 3, 2, 4).permute(3, 0, 4, 2, 1, 5)
            self.used = (query @ key.mT).softmax(-1)
            return (self.used @ value).sum()

    model = MaskUnitAttention()
    with regard.watch(model) as seen:
        model(torch.randn(2, 15, 8))
    torch.testing.assert_close(seen[0].dense(), model.used.transpose(1, 2), atol=1e-5, rtol=0)


def plain_attention(x: Tensor) -> Tensor:
    return torch.softmax(x @ x.transpose(-2, -1), -1) @ x


with warnings.catch_warnings():  # deprecated, but in use
    warnings.simplefilter("ignore")
    scripted_attention = torch.jit.script(plain_attention)


class CallsScript(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return scripted_attention(x)


class Plain(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return plain_attention(x)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript_is_named_as_unseen() -> None:
    x = torch.randn(2, 5, 8)
    for layer in (CallsScript(), torch.jit.script(Plain()), torch.jit.trace(Plain(), x)):
        model = nn.Sequential(Plain(), layer)
        with pytest.warns(UserWarning, match="its softmax runs as TorchScript"), regard.watch(model) as seen:
            model(x)
        assert list(seen) == ["0"]
        name = getattr(layer, "original_name", "CallsScript")
        assert seen.unseen.startswith(f"{name}: its softmax runs as TorchScript")
    with pytest.raises(ArgumentError, match="watch\\(\\) got Plain as TorchScript"):
        regard.watch(torch.jit.script(Plain()))


@pytest.mark.parametrize("form", ["unsqueeze", "einsum"])
def test_one_query_per_text_is_not_a_batch_of_queries(form: str) -> None:
    """In a recurrent decoder, the weights (b, k) have no query axis (Luong et al. 2015)."""

    class Step(nn.Module):
        def forward(self, state: Tensor, states: Tensor) -> Tensor:
            self.used = torch.bmm(states, state.unsqueeze(2)).squeeze(2).softmax(-1)
            if form == "einsum":
                return torch.einsum("bk,bkd->bd", self.used, states)
            return torch.bmm(self.used.unsqueeze(1), states).squeeze(1)

    model = Step()
    with regard.watch(model) as seen:
        model(torch.randn(3, 4), torch.randn(3, 5, 4))
    assert seen[0].shape == (3, 1, 5)
    torch.testing.assert_close(seen[0].dense().squeeze(1), model.used, rtol=0, atol=1e-6)
    assert seen.kind(0) == "cross"


def test_both_softmaxes_of_differential_attention_are_recorded() -> None:
    """softmax − λ softmax (Ye et al. 2025, eq. 1) has negative weights."""
    first, second = torch.randn(2, 2, 3, 5, 4), torch.randn(2, 2, 3, 5, 4)

    class Differential(nn.Module):
        def forward(self, value: Tensor) -> Tensor:
            weights = [(query @ key.mT).softmax(-1) for query, key in (first, second)]
            return (weights[0] - 0.3 * weights[1]) @ value

    model = Differential()
    with regard.watch(model) as seen:
        model(torch.randn(2, 3, 5, 4))
    assert len(seen) == 2
    for recorded_weights, (query, key) in zip(seen.values(), (first, second), strict=True):
        torch.testing.assert_close(recorded_weights.dense(), (query @ key.mT).softmax(-1), rtol=0, atol=1e-6)

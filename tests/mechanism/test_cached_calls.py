"""The kernels' cache of calls is used only for plain tensors, outside autocast, transforms and modes."""

import threading

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import regard
from regard.mechanism import dispatch, fused, operator

pytestmark = pytest.mark.skipif(
    not fused.available() or dispatch.FROM_ENVIRONMENT not in (None, "fused") or operator._CALLS is None,
    reason="no fast path",
)
SHAPE = 2, 3, 5, 8
DEFAULTS = regard.ScaledDot(), None, regard.Softmax()


class Subclass(torch.Tensor):
    pass


CHANGES = {
    "negated": torch._neg_view,
    "subclass": lambda x: x.as_subclass(Subclass),
    "double": lambda x: x.double(),
    "bfloat16": lambda x: x.bfloat16(),
    "strides": lambda x: x.mT.contiguous().mT,
    "shape": lambda x: x[:1],
    "sparse": lambda x: x.to_sparse(),
    "meta": lambda x: x.to("meta"),
    "zero": lambda x: torch._efficientzerotensor(x.shape),
    "array": lambda x: x.numpy(),
    "none": lambda x: None,
}


class Counting(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def tensors():
    """Three tensors whose call is cached."""
    operator._CACHE.clear()
    inputs = [torch.randn(SHAPE) for _ in range(3)]
    regard.attention(*inputs)
    assert is_cached(*inputs)
    return inputs


def lookup(query, key, value, parts=DEFAULTS, need_tau=False):
    return operator._CALLS.run(query, key, value, *parts, need_tau)


def is_cached(*args, **options):
    return lookup(*args, **options) is not None


def dense(*inputs, **options):
    doubles = (x.detach().resolve_neg().double() for x in inputs)
    return regard.attention(*doubles, implementation="reference", **options).float()


def test_a_cached_call_equals_the_formula(tensors):
    torch.testing.assert_close(regard.attention(*tensors), dense(*tensors))
    assert lookup(*tensors).data_ptr() != lookup(*tensors).data_ptr()
    output, weights = lookup(*tensors, need_tau=True)
    assert torch.equal(output, lookup(*tensors))
    torch.testing.assert_close(weights @ tensors[2], output)


@pytest.mark.parametrize("place", [0, 1, 2], ids=["query", "key", "value"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_other_tensors_are_not_served(tensors, change, place):
    tensors[place] = change(tensors[place])
    assert not is_cached(*tensors)


def test_a_negated_view_is_read_as_negated(tensors):
    tensors[0] = torch._neg_view(tensors[0])
    torch.testing.assert_close(regard.attention(*tensors), dense(*tensors))


def test_other_states_are_not_served(tensors):
    with torch.autocast("cpu", torch.bfloat16):
        assert not is_cached(*tensors)
    with torch.autograd.forward_ad.dual_level():
        assert not is_cached(*tensors)
    with Counting() as mode:
        assert not is_cached(*tensors)
        regard.attention(*tensors)
    assert mode.calls
    seen = []
    torch.vmap(lambda x: seen.append(is_cached(x, x, x)) or x)(torch.randn(4, *SHAPE))
    torch.vmap(lambda x: seen.append(is_cached(*tensors)) or x)(torch.randn(4, 2))
    torch.jit.trace(lambda x: seen.append(is_cached(*tensors)) or x + 1, torch.ones(2), check_trace=False)
    assert len(seen) == 3
    assert not any(seen)
    assert is_cached(*tensors)


def test_inference_mode_is_served(tensors):
    with torch.inference_mode():
        assert lookup(*tensors).is_inference()
        inner = [x.clone() for x in tensors]
        assert torch.equal(lookup(*inner), lookup(*tensors))


def test_a_default_device_does_not_move_the_output(tensors):
    bfloats = [x.bfloat16() for x in tensors]
    expected = [regard.attention(*tensors), regard.attention(*bfloats)]
    with torch.device("meta"):
        actual = [regard.attention(*tensors), regard.attention(*bfloats)]
    assert all(map(torch.equal, actual, expected))


@pytest.mark.parametrize("place", [0, 1, 2], ids=["query", "key", "value"])
def test_gradients_are_attached_where_required(tensors, place):
    tensors[place] = torch.nn.Parameter(tensors[place])
    assert lookup(*tensors)[3]
    assert regard.attention(*tensors).requires_grad
    with torch.no_grad():
        assert not regard.attention(*tensors).requires_grad
    regard.attention(*tensors).square().sum().backward()
    leaf = tensors[place].detach().double().requires_grad_()
    doubles = [leaf if i == place else x.double() for i, x in enumerate(tensors)]
    regard.attention(*doubles, implementation="reference").square().sum().backward()
    torch.testing.assert_close(tensors[place].grad.double(), leaf.grad, rtol=1e-4, atol=1e-5)


def test_parts_are_compared_by_value(tensors):
    score, mask, normalize = regard.ScaledDot(0.3), regard.Window(2), regard.Softmax(2.0)
    regard.attention(*tensors, score=score, mask=mask, normalize=normalize)
    equal = regard.ScaledDot(0.3), regard.Window(2), regard.Softmax(2.0)
    assert torch.equal(lookup(*tensors, equal), lookup(*tensors, (score, mask, normalize)))
    for i, other in enumerate((regard.ScaledDot(0.4), regard.Window(3), regard.Softmax(3.0))):
        assert not is_cached(*tensors, [*equal[:i], other, *equal[i + 1 :]])
    torch.testing.assert_close(
        regard.attention(*tensors, mask=regard.Causal()), dense(*tensors, mask=regard.Causal())
    )


def test_a_result_that_is_not_finite_takes_the_general_path(tensors):
    tensors[1][0, 0, 4] = torch.nan
    assert not is_cached(*tensors)
    mask = regard.Causal()
    for _ in range(2):
        actual = regard.attention(*tensors, mask=mask)
        torch.testing.assert_close(actual, dense(*tensors, mask=mask), equal_nan=True)


def test_threads_may_clear_the_cache(tensors):
    expected, wrong = regard.attention(*tensors), []

    def work():
        for _ in range(200):
            if not torch.equal(regard.attention(*tensors), expected):
                wrong.append(1)
            operator._CACHE.clear()

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong

"""regard falls back to the general path if torch lacks a private function."""

import textwrap

import pytest
import torch

import regard
from regard.mechanism import dispatch, fused, operator, torch_state
from tests.fresh import run_fresh

PRIVATE = {
    "_transforms_active": "_C._are_functorch_transforms_active",
    "_tracing_state": "_C._get_tracing_state",
    "_dispatch_mode": "_C._get_dispatch_mode",
    "_dispatch_modes": "_C._len_torch_dispatch_stack",
    "_dispatch_keys": "_C._dispatch_keys",
    "_legacy_batched": "_C._functorch.is_legacy_batchedtensor",
}


def child(code: str) -> list[str]:
    done = run_fresh(textwrap.dedent(code), warnings="ignore")
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.split()


def test_every_private_function_exists():
    """Without them, regard still works, but more slowly: find a replacement for this torch version."""
    for name, path in PRIVATE.items():
        assert getattr(torch_state, name) is torch_state.private(path) is not None, path
    assert torch_state.private("_C._nothing_of_the_kind") is None
    assert torch_state.private("_nothing._at._all") is None
    assert None not in torch_state._MODES
    assert None not in torch_state._PLAIN_CPU_KEYS
    assert torch_state._PROBES_AVAILABLE
    assert torch_state.FakeTensor is torch._subclasses.fake_tensor.FakeTensor


@pytest.mark.slow
def test_regard_is_imported_without_them():
    """The functions are deleted from torch before regard is imported."""
    code = f"""
        import importlib, pkgutil, torch

        paths = {[*PRIVATE.values(), "_C._TorchDispatchModeKey", "_C._nn.scaled_dot_product_attention"]}
        for path in [*paths, "autograd.forward_ad._current_level"]:
            *outer, name = path.split(".")
            at = torch
            for part in outer:
                at = getattr(at, part)
            delattr(at, name)
        import regard.mechanism
        for module in pkgutil.iter_modules(regard.mechanism.__path__):
            importlib.import_module("regard.mechanism." + module.name)
        from regard.mechanism.torch_state import batched, concrete, forward_mode, plain_cpu
        from regard.mechanism.torch_state import traced, transformed

        x = torch.ones(2, 3)
        print(plain_cpu(x), concrete(x), batched(x), traced(), transformed(), forward_mode())
    """
    assert child(code) == ["False", "False", "False", "True", "True", "True"]


def test_missing_private_functions_fall_back():
    """TorchScript's registration and the class of fake tensors are deleted after torch has used them."""
    code = """
        import importlib, torch, regard
        from regard.mechanism import torch_state, sdpa

        del torch.jit._builtins._register_builtin
        importlib.reload(sdpa)
        del torch.jit._builtins
        importlib.reload(sdpa)
        import torch._subclasses.fake_tensor as home
        real = home.FakeTensor
        del home.FakeTensor
        importlib.reload(torch_state)
        home.FakeTensor = real
        x = torch.randn(2, 3, 5, 8)
        found = sdpa.scaled_dot_product_attention(x, x, x, is_causal=True)
        expected = regard.attention(x, x, x, mask=regard.Causal(), implementation="reference")
        print(torch.allclose(found, expected, atol=1e-6))
        print(torch_state.subclassed(x), torch_state.FakeTensor is real)
    """
    assert child(code) == ["True", "False", "False"]


@pytest.mark.parametrize("missing", PRIVATE)
@pytest.mark.parametrize("mask", [None, regard.Causal(), regard.Padding([3, 5])], ids=repr)
def test_results_are_the_same_without_them(missing, mask, monkeypatch):
    def run() -> list[torch.Tensor]:
        torch.manual_seed(0)
        tensors = [torch.randn(2, 3, 5, 8, requires_grad=True) for _ in range(3)]
        output, weights = regard.attend(*tensors, mask=mask)
        return [output, weights.dense(), *torch.autograd.grad(output.square().sum(), tensors)]

    expected = run()
    monkeypatch.setattr(torch_state, missing, None)
    monkeypatch.setattr(torch_state, "_PROBES_AVAILABLE", missing in ("_dispatch_mode", "_legacy_batched"))
    for actual, right in zip(run(), expected, strict=True):
        torch.testing.assert_close(actual, right, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(
    not fused.available() or dispatch.FROM_ENVIRONMENT not in (None, "fused"), reason="no fast path"
)
def test_the_fast_path_needs_all_private_functions(monkeypatch):
    x = torch.randn(2, 3, 5, 8)
    operator._CACHE.clear()
    regard.attention(x, x, x)
    assert len(operator._CACHE) == 1
    operator._CACHE.clear()
    monkeypatch.setattr(torch_state, "_PROBES_AVAILABLE", False)
    regard.attention(x, x, x)
    assert not operator._CACHE


def test_a_first_import_in_inference_mode_keeps_the_fast_path():
    program = """
import torch
with torch.inference_mode():
    from regard.mechanism.torch_state import plain_cpu
assert plain_cpu(torch.ones(2))
with torch.inference_mode():
    assert plain_cpu(torch.ones(2))
"""
    done = run_fresh(program)
    assert done.returncode == 0, done.stderr

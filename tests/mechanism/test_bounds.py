"""Reading lazy weights takes memory for some rows, never for the whole matrix."""

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import regard
from regard.mechanism import tiled
from tests.recorder import Largest

pytestmark = pytest.mark.usefixtures("one_thread")  # threads only wait for each other in small operations
D = 16


def attended(n: int, **options: Any) -> regard.Weights:
    x = torch.randn(n, D, generator=torch.Generator().manual_seed(0))
    return regard.attend(x, x, x, **options)[1]


masks = pytest.mark.parametrize("mask", [None, regard.Causal()], ids=["full", "causal"])


@masks
def test_4096_tokens_make_no_matrix(mask, monkeypatch):
    monkeypatch.setattr(tiled, "TILE", 2**16)
    n = 4096
    with Largest() as largest:
        weights = attended(n, mask=mask)
        weights.topk(5)
        weights.entropy()
        weights.received()
        weights.pool(128, 128)  # sums of 128 bands of rows, for each key
        weights[n // 2]
    assert 2**16 <= largest.elements < n * n / 16, largest.by


LOOKS: dict[str, Callable[[regard.Weights], Any]] = {
    "aligned": lambda weights: weights.argmax(-1),
    "row": lambda weights: weights[-1],
    "some rows": lambda weights: weights[100:105],
    "picked rows": lambda weights: weights[[5, 7, 11]],
    "picked pairs": lambda weights: weights[[5, 7, 11], [1, 2, 3]],
    "column": lambda weights: weights[:, 3],
    "columns": lambda weights: weights[:, ::100],
    "product": lambda weights: weights @ torch.ones(weights.shape[-1], 2),
    "transposed": lambda weights: weights.T @ torch.ones(weights.shape[-2], 2),
    "copied": lambda weights: copy.deepcopy(weights).entropy(),
    "rollout": lambda weights: regard.rollout([weights] * 2, 3),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"mask": regard.Causal()},
    "window": {"mask": regard.Window(9)},
    "padding": {"mask": regard.Padding(8)},
    "sparse": {"normalize": regard.Entmax15()},
    "relative bias": {"bias": regard.ALiBi(1)},
    "dropout": {"dropout": 0.5},
}


@pytest.mark.parametrize("options", OPTIONS)
def test_no_look_makes_a_matrix(options, monkeypatch):
    monkeypatch.setattr(tiled, "TILE", 2**12)
    n = 300
    with Largest() as largest:
        weights = attended(n, **OPTIONS[options])
    assert 0 < largest.elements < n * n / 4, largest.by
    for name, look in LOOKS.items():
        with Largest() as largest:
            look(weights)
        assert 0 < largest.elements < n * n / 2, (name, largest.by)


def test_a_mean_over_many_heads_makes_no_matrix(monkeypatch):
    monkeypatch.setattr(tiled, "TILE", 2**14)
    n, heads = 400, 16
    x = torch.randn(heads, n, D)
    weights = regard.attend(x, x, x)[1]
    with Largest() as largest:
        weights.mean("heads").entropy()
        regard.rollout([weights, weights], 0)
    assert 0 < largest.elements < n * n, largest.by


def test_weights_hold_no_matrix():
    n = 600
    weights = attended(n, mask=regard.Causal() | regard.Padding(9), bias=regard.ALiBi(1))
    held = sum(tensor.untyped_storage().nbytes() for tensor in weights.problem.tensors.values())
    assert 0 < held < 4 * n * (2 * D + 40)


# The full size, in a separate process

LIMIT = 10**9  # bytes above the inputs; the dense weights of 32,768 tokens would take 4 GB

PROGRAM = """
import json, sys, time
import regard, torch


def memory(which):  # not ru_maxrss, which starts at the value of the parent process
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(which))


queries, keys, options, looks = json.loads(sys.argv[1])
torch.manual_seed(0)
query, key, value = (torch.randn(n, 64) for n in (queries, keys, keys))
before, seconds = memory("VmRSS"), {}
for look in ("attend", *looks):
    begin = time.perf_counter()
    if look == "attend":
        output, weights = eval(f"regard.attend(query, key, value, {options})")
    else:
        eval(f"weights{look}")
    seconds[look] = round(time.perf_counter() - begin, 1)
print(json.dumps([memory("VmHWM") - before, seconds]))
"""


def above_inputs(*arguments: Any) -> int:
    """Return the peak memory in bytes of a call and several reads of its weights, in a new process."""
    command = [sys.executable, "-c", PROGRAM, json.dumps(arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    above, seconds = json.loads(done.stdout)
    print(f"{arguments[:3]}: {above / 1e6:.0f} MB above the inputs; {seconds} seconds")
    return above


linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is read from /proc")
FIVE = [".topk(5)", ".entropy()", ".received()", ".pool(128, 128)", "[30_000]"]


@linux
@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("mask", "tokens"), [("None", 32_768), ("regard.Causal()", 65_536)])
def test_peak_memory_stays_under_a_gigabyte(mask, tokens):
    assert above_inputs(tokens, tokens, f"mask={mask}", FIVE) < LIMIT


@linux
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_million_keys_by_a_handful_of_rows():
    assert above_inputs(4, 2**20, "", [".topk(5)", ".entropy()", ".received()"]) < LIMIT


@linux
@pytest.mark.slow
def test_a_gigabyte_is_detected():
    assert above_inputs(16_384, 16_384, "", [".dense()"]) > LIMIT

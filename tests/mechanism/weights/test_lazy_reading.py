"""Reading lazy weights: a row is the same in every part, and nothing is computed twice."""

import copy
import itertools
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard.mechanism import fused, operator
from regard.mechanism.weights.weights import Weights
from tests import cases

kernels = pytest.mark.skipif(not fused.available(), reason="the kernels were not built")
D = 64


def near_ties(heads: int, groups: int, queries: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return query and key whose scores are near 9e4 and differ by about 1, so rounding is visible."""
    generator = torch.Generator().manual_seed(heads + groups + queries + keys)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    base = randn(D)
    base *= (9e4 * D**0.5 / base.square().sum()).sqrt()
    query, key = base + 0.01 * randn(heads, queries, D), base + 0.01 * randn(groups, keys, D)
    return query, key, randn(groups, keys, D)


# The summation order of the kernels depends on the number of rows: sizes at the threshold and far from it.
WHOLES = {
    "many rows": (2, 2, 40, 50),
    "four rows": (2, 2, 4, 50),
    "three rows": (2, 2, 3, 50),
    "one row": (3, 3, 1, 400),
    "four heads of one row": (8, 2, 1, 300),
    "three heads of one row": (6, 2, 1, 300),
    "eight heads of one row": (16, 2, 1, 300),
    "nine heads of one row": (18, 2, 1, 300),
    "four heads of two rows": (8, 2, 2, 300),
    "groups": (6, 2, 40, 50),
}
NORMALIZERS = (regard.Softmax(), regard.Softmax1(9e4), regard.Sparsemax(), regard.Entmax15())
SUM_TO_ONE = {repr(n): n for n in (*NORMALIZERS[:1], *NORMALIZERS[2:], regard.Entmax(1.3))}


def attend(size: str, **options: Any) -> tuple[Weights, Tensor]:
    """Return lazy weights with scores near 9e4, and the dense matrix."""
    _, weights = regard.attend(*near_ties(*WHOLES[size]), **options)
    return weights, weights.dense()


def test_the_scores_are_large_and_the_weights_are_spread():
    query, key, value = near_ties(*WHOLES["many rows"])
    weights = regard.attend(query.double(), key.double(), value.double())[1]
    assert 8e4 < weights.scores().abs().max() < 1e5
    assert weights.dense().amax(-1).median() < 0.9
    rounded = regard.attend(query, key, value, implementation="reference")[1].dense()
    assert (rounded - weights.dense()).abs().max() > 1e-4  # rounding is visible


@kernels
@pytest.mark.parametrize("normalize", NORMALIZERS, ids=repr)
@cases.looped("mask", [None, regard.Causal()])
@cases.looped("size", WHOLES)
def test_a_row_is_the_same_in_every_part(size: str, mask: Any, normalize: regard.Normalizer) -> None:
    weights, dense = attend(size, mask=mask, normalize=normalize)
    heads, queries, keys = dense.shape
    for row in {0, 1 % queries, queries // 2, queries - 1}:
        assert torch.equal(weights[:, row], dense[:, row])
        assert torch.equal(weights[:, row : row + 3], dense[:, row : row + 3])
        assert torch.equal(weights[:, [row, row]], dense[:, [row, row]])
        repeated = weights.rows(torch.tensor([row] * 9))
        assert torch.equal(repeated.dense(), dense[:, [row] * 9])
        assert torch.equal(repeated.topk(3).values, dense[:, [row] * 9].topk(3, -1).values)
    for head in range(heads):
        one = weights.heads(head)
        assert torch.equal(one.dense(), dense[head])
        assert torch.equal(one[queries - 1], dense[head, queries - 1])
        assert torch.equal(one.topk(3).values, dense[head].topk(3, -1).values)
        assert torch.equal(one.T @ torch.eye(queries), dense[head].mT)
    assert torch.equal(weights.topk(5).values, dense.topk(5, -1).values)
    assert torch.equal(weights.pool(queries, keys), dense)
    for rows, columns in itertools.product((1, 2, queries), (1, 7, keys)):
        part = (slice(queries - rows, queries), slice(3, 3 + columns))
        wanted = dense[:, part[0], part[1]]
        assert torch.equal(weights.pool(queries, keys, within=part), wanted)
        mean = weights.pool(1, 1, within=part)
        assert torch.allclose(mean, wanted.mean((-2, -1), keepdim=True), rtol=1e-6, atol=1e-9)
    assert torch.equal(weights.T @ torch.eye(queries), dense.mT)
    assert torch.allclose(weights @ torch.eye(keys), dense, rtol=2e-6, atol=1e-8)


# cases that the single-query kernel supports
SINGLE = cases.product(
    ["one query"],
    ["dot", "scale"],
    ["softmax", "temperature"],
    ["no mask", "padding"],
    ["no bias"],
    cases.Shape((2, 3, 1, 16), (2, 3, 40, 16), (2, 3, 40, 16)),
)
# kernel reads are bitwise equal; torch's matmul rounds a row depending on its position
NAMES = ["fused", "reference", "tiled"] if fused.available() else ["reference", "tiled"]
READ_ALONE = [(case, name) for case in cases.TABLE for name in NAMES]


@cases.looped(
    "case implementation",
    [*((case, NAMES[0]) for case in SINGLE), *READ_ALONE[::13]],
    slow=[*((case, name) for case in SINGLE for name in NAMES[1:]), *READ_ALONE],
)
def test_a_row_read_alone_equals_that_row_of_the_whole(case: cases.Case, implementation: str) -> None:
    tensors, options = case.tensors(torch.float32), case.options(torch.float32)
    weights = regard.attend(*tensors, **options, implementation=implementation)[1].detach()
    dense, tolerance = weights.dense(), 0.0 if weights.compute_tau() else 1e-5
    for row in {0, 2 % dense.shape[-2], dense.shape[-2] - 1}:
        for columns in (slice(None), slice(1, 5)):
            read, expected = weights[..., row, columns], dense[..., row, columns]
            torch.testing.assert_close(read, expected, rtol=tolerance, atol=tolerance)


@kernels
@cases.looped("mask", [None, regard.Causal()])
@cases.looped("size", WHOLES)
def test_weights_whose_tau_is_not_known_agree_with_those_whose_is(
    size: str, mask: Any, tmp_path: Any
) -> None:
    weights, dense = attend(size, mask=mask)
    queries = dense.shape[-2]
    for again in (
        regard.Weights.load(weights.save(tmp_path / "weights.safetensors")),
        pickle.loads(pickle.dumps(weights)),
        copy.deepcopy(weights),
        pickle.loads(pickle.dumps(weights.heads(slice(None)))),
    ):
        assert torch.allclose(again[:, queries - 1], dense[:, queries - 1], rtol=1e-5, atol=1e-9)
        assert torch.allclose(again.dense(), dense, rtol=1e-5, atol=1e-9)
        assert torch.allclose(again.heads(1).dense(), dense[1], rtol=1e-5, atol=1e-9)
        top = again.topk(5).values  # the kernels have computed τ
        assert torch.allclose(top, dense.topk(5, -1).values, rtol=1e-5, atol=1e-9)
        assert torch.equal(again[:, queries - 1].topk(5, -1).values, top[:, queries - 1])


@kernels
@cases.crossed(size=WHOLES, normalize=SUM_TO_ONE, implementation=["reference", "tiled", "fused"])
def test_rows_sum_to_one_in_every_reading(size: str, normalize: str, implementation: str) -> None:
    weights, dense = attend(size, normalize=SUM_TO_ONE[normalize], implementation=implementation)
    queries, keys = dense.shape[-2:]
    last = slice(queries - 1, queries)
    reads = {
        "dense": dense,
        "row": weights[:, last],
        "head": weights.heads(1)[last],
        "pool": weights.pool(1, keys, within=(last, slice(None))),
        "product": weights @ torch.eye(keys),
        "transpose": (weights.T @ torch.eye(queries)).mT,
        "mean": weights.mean("heads").dense(),
    }
    off = {name: float((read.sum(-1) - 1).abs().max()) for name, read in reads.items()}
    assert max(off.values()) < 1e-5, off


@pytest.mark.parametrize("implementation", ["reference", "tiled"])
def test_a_part_costs_no_more_than_its_pairs(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from regard.mechanism import reference

    x = torch.randn(2, 64, 16, generator=torch.Generator().manual_seed(0))
    weights = regard.attend(x, x, x, implementation=implementation)[1]
    dense, seen = weights.dense(), []
    scores = reference.scores
    monkeypatch.setattr(reference, "scores", lambda part: seen.append(part.keys) or scores(part))
    pooled = weights.pool(40, 20, within=(slice(0, 40), slice(30, 50)))
    assert torch.allclose(pooled, dense[:, :40, 30:50], rtol=2e-5, atol=1e-9)
    assert seen == [20]


# Number of kernel launches


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the kernels that ran, in order, excluding calls cached in the kernels."""
    operator._CACHE.clear()
    names: list[str] = []
    run, forward = fused.Encoded.run, fused.Prepared.forward

    def record(self: fused.Encoded, kernel: str, *args: Any) -> bool:
        names.append(kernel)
        return run(self, kernel, *args)

    def record_forward(self: fused.Prepared, *tensors: Any) -> bool:
        names.append("forward")
        return forward(self, *tensors)

    monkeypatch.setattr(fused.Encoded, "run", record)
    monkeypatch.setattr(fused.Prepared, "forward", record_forward)
    return names


BIAS = torch.linspace(0, 1, 30).expand(30, 30).clone()
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": regard.Causal()},
    "dense mask": {"mask": torch.ones(30, 30, dtype=torch.bool).tril()},
    "bias": {"bias": BIAS},
    "entmax": {"normalize": regard.Entmax15()},
    "sigmoid": {"normalize": regard.Sigmoid()},
    "additive": {"score": regard.Additive(16, 16, 16)},
    "one query": {},
}


@kernels
@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("call", CALLS)
def test_tau_is_computed_once(call: str, graph: bool, launches: list[str]) -> None:
    x = torch.randn(2, 30, 16, generator=torch.Generator().manual_seed(0), requires_grad=graph)
    with torch.set_grad_enabled(graph):
        weights = regard.attend(x[:, -1:] if call == "one query" else x, x, x, **CALLS[call])[1]
    with torch.no_grad():
        weights.topk(5)
        assert launches == ["forward", "topk"]
        weights.entropy()
        weights.dense()
        weights.received()
        weights[:, -1]
        weights.heads(1).topk(2)
        weights.detach().to("cpu").entropy()
    assert launches[2:] == ["entropy", "weights", "backward", "weights", "topk", "entropy"]


@kernels
@pytest.mark.parametrize(
    "again",
    [
        lambda weights, folder: regard.Weights.load(weights.save(folder / "weights.safetensors")),
        lambda weights, _: pickle.loads(pickle.dumps(weights)),
        lambda weights, _: copy.deepcopy(weights),
    ],
    ids=["file", "pickle", "copy"],
)
def test_tau_of_other_kernels_is_recomputed_once(
    again: Callable[[Weights, Any], Weights], launches: list[str], tmp_path: Any
) -> None:
    x = torch.randn(2, 30, 16, generator=torch.Generator().manual_seed(0))
    weights = again(regard.attend(x, x, x)[1], tmp_path)
    launches.clear()
    weights.topk(5)
    weights.entropy()
    weights.heads(0).entropy()
    assert launches == ["forward", "topk", "entropy", "entropy"]


@kernels
def test_a_wrong_tau_in_a_file_does_no_harm(tmp_path: Any) -> None:
    x = torch.randn(2, 30, 16, generator=torch.Generator().manual_seed(0))
    weights = regard.attend(x, x, x)[1]
    dense, path = weights.dense(), tmp_path / "weights.safetensors"
    problem = weights.problem
    spoilt = Weights(problem.with_tensors({**problem.tensors, "tau": problem["tau"] + 1}), None, (2,))
    again = regard.Weights.load(spoilt.save(path))
    assert torch.equal(again.dense(), dense)
    assert torch.equal(again.pool(30, 30), dense)
    assert torch.equal(again.topk(30).values.sort(-1).values, dense.sort(-1).values)


@kernels
def test_tau_computed_by_torch_is_not_used_with_kernels(launches: list[str]) -> None:
    """Some rows contain NaN: torch computes the output, and the kernels the weights of the other rows."""
    x = torch.randn(2, 30, 16, generator=torch.Generator().manual_seed(0))
    key = x.clone()
    key[:, 20] = torch.nan
    weights = regard.attend(x, key, x, mask=regard.Causal())[1]
    reference = regard.attend(x, key, x, mask=regard.Causal(), implementation="reference")[1].dense()
    for read in (
        weights.dense(),
        torch.stack([weights[:, row] for row in range(30)], 1),
        weights.pool(30, 30),
    ):
        assert torch.allclose(read, reference, equal_nan=True, atol=1e-6)
    launches.clear()
    weights.entropy()
    weights.topk(3)
    assert launches.count("topk") == launches.count("entropy") == 0  # not retried after the first failure
    assert not reference[:, :20].isnan().any()
    assert reference[:, 20:].isnan().any()


# Threads


@pytest.mark.parametrize("implementation", [None, "tiled"])
def test_threads_may_read_the_same_weights(implementation: str | None) -> None:
    x = torch.randn(4, 60, 16, generator=torch.Generator().manual_seed(0))
    expected = regard.attend(x, x, x, implementation=implementation)[1]
    wanted = (expected.topk(3).values, expected.dense(), expected.pool(3, 3), expected.entropy())
    for _ in range(20):
        weights, start = regard.attend(x, x, x, implementation=implementation)[1], threading.Barrier(4)

        def look(weights: Weights = weights, start: threading.Barrier = start) -> bool:
            start.wait()
            seen = (weights.topk(3).values, weights.dense(), weights.pool(3, 3), weights.entropy())
            return all(map(torch.equal, seen, wanted))

        with ThreadPoolExecutor(4) as pool:
            assert all(task.result() for task in [pool.submit(look) for _ in range(4)])

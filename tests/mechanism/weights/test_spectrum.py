"""Singular values and vectors of lazy weights, compared with the dense decomposition."""

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

import regard
from regard.mechanism.weights import tensor_like
from tests.cases import looped

B, H, Q, K, D = 2, 3, 97, 101, 7


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def make(*lead: int, sharpness: float = 1.0, dtype: torch.dtype = torch.float32, **options) -> regard.Weights:
    query, key, value = (randn(*lead, n, D).to(dtype) for n in (Q, K, K))
    return regard.attend(sharpness * query, key, value, **options)[1]


CASES = {
    "batch": lambda: make(B, H),
    "sharp": lambda: make(H, sharpness=5.0),  # the singular values decay slowly
    "causal": lambda: make(H, mask=regard.Causal()),
    "float64": lambda: make(H, dtype=torch.float64),
    "mean": lambda: make(B, H).mean("heads"),
    "one head": lambda: make(),
    "hidden": lambda: make(B, H, mask=regard.Padding([0, 5])),  # rank 0 and rank at most 5
}


@looped("case", CASES)
def test_the_leading_values_equal_those_of_the_dense_matrix(case):
    weights = CASES[case]()
    for k in (1, 5):
        U, S, V = weights.svd(k)
        dense = weights.dense()
        expected = torch.linalg.svdvals(dense)[..., :k]
        torch.testing.assert_close(S, expected, rtol=2e-3, atol=1e-5)
        assert U.shape == (*weights.shape[:-1], k)
        assert V.shape == (*weights.shape[:-2], K, k)
        for vectors in (U, V):  # orthonormal, except for zero vectors
            eye = torch.eye(k, dtype=S.dtype).expand(*S.shape, k)
            torch.testing.assert_close(vectors.mT @ vectors, eye, rtol=0, atol=1e-4)
        # definition: W V = U S
        torch.testing.assert_close(dense @ V, U * S[..., None, :], rtol=0, atol=0.02)


def test_all_values_are_exact():
    weights = make(H, dtype=torch.float64)
    svd = weights.svd(Q)
    torch.testing.assert_close(svd.S, torch.linalg.svdvals(weights.dense()), rtol=1e-8, atol=1e-12)
    torch.testing.assert_close(svd.U * svd.S[..., None, :] @ svd.V.mT, weights.dense())


def test_more_iterations_are_more_accurate():
    weights = make(sharpness=5.0, dtype=torch.float64)
    expected = torch.linalg.svdvals(weights.dense())[:5]
    errors = [float((weights.svd(5, niter=n).S - expected).abs().max()) for n in (0, 1, 3)]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 100 * errors[2]


def test_the_result_is_reproducible():
    weights = make(H)
    before = torch.get_rng_state()
    assert torch.equal(weights.svd(3).U, weights.svd(3).U)
    assert torch.equal(torch.get_rng_state(), before)


def test_spectral_entropy():
    def dense_entropy(weights: regard.Weights) -> Tensor:
        values = torch.linalg.svdvals(weights.dense())
        return torch.special.entr(values / values.sum(-1, keepdim=True)).sum(-1)

    weights = make(H, dtype=torch.float64)
    bounds = [weights.svd(k).entropy() for k in (1, 5, 20, Q)]
    torch.testing.assert_close(bounds[-1], dense_entropy(weights))
    for smaller, larger in itertools.pairwise(bounds):
        assert (smaller < larger).all()
    assert torch.equal(bounds[0], torch.zeros_like(bounds[0]))
    hidden = make(B, H, mask=regard.Padding([0, 5])).svd(3).entropy()
    assert torch.equal(hidden[0], torch.zeros(H))


@pytest.mark.parametrize("k", [0, Q + 1])
def test_k_is_between_one_and_the_size(k):
    with pytest.raises(regard.ArgumentError, match=f"k={k} for weights with {Q} queries and {K} keys"):
        make().svd(k)
    with pytest.raises(regard.ArgumentError, match="niter=-1"):
        make().svd(2, niter=-1)


def test_torch_svd_lowrank_needs_no_dense_matrix(monkeypatch):
    weights = make(H)
    expected = torch.linalg.svdvals(weights.dense())[:, :4]
    mean = weights.dense().mean(-2, keepdim=True).expand(H, Q, K)
    centered = torch.svd_lowrank(weights, 4, niter=20, M=mean)[1]
    torch.testing.assert_close(
        centered, torch.linalg.svdvals(weights.dense() - mean)[:, :4], rtol=0.05, atol=1e-3
    )
    monkeypatch.setattr(tensor_like, "MAX_DENSE_BYTES", 0)
    torch.testing.assert_close(torch.svd_lowrank(weights, q=4, niter=3)[1], expected, rtol=1e-3, atol=1e-5)


def test_weights_as_a_scipy_operator(monkeypatch):
    linalg = pytest.importorskip("scipy.sparse.linalg")
    weights = make(mask=regard.Causal())
    dense = weights.numpy()
    monkeypatch.setattr(tensor_like, "MAX_DENSE_BYTES", 0)
    operator = linalg.aslinearoperator(weights.linear_operator())
    x, y = np.linspace(-1, 1, K), np.linspace(0, 2, 2 * Q).reshape(Q, 2)
    assert operator.shape == (Q, K)
    assert operator.dtype == np.float32
    assert np.allclose(operator @ x, dense @ x, atol=1e-5)
    assert np.allclose(operator.T @ y, dense.T @ y, atol=1e-4)
    values = linalg.svds(operator, 3, return_singular_vectors=False)
    assert np.allclose(sorted(values), sorted(np.linalg.svd(dense)[1][:3]), atol=1e-4)
    with pytest.raises(regard.ArgumentError, match=r"linear_operator\(\)"):
        linalg.aslinearoperator(weights)
    with pytest.raises(regard.ArgumentError, match="select one"):
        make(H).linear_operator()


def test_long_weights_in_linear_memory():
    x = torch.zeros(199 * 101, 2)
    weights = regard.attend(x, x, x, mask=regard.Documents([101] * 199))[1]
    assert weights.nbytes > tensor_like.MAX_DENSE_BYTES
    svd = weights.svd(3, niter=1)  # uniform weights in each document: 199 singular values are 1
    torch.testing.assert_close(svd.S, torch.ones(3))
    torch.testing.assert_close(svd.entropy().exp(), torch.tensor(3.0))

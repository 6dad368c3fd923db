"""Singular values and vectors of a lazy matrix, computed only from products with the matrix."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard._util.text import pluralize
from regard.errors import ArgumentError, MissingExtraError
from regard.mechanism.weights.reader import LazyMatrix

_OVERSAMPLING = 8  # columns in addition to k (Halko et al. 2011, section 4.2, recommend 5 to 10)
ITERATIONS = 3


class SVD(NamedTuple):
    """Leading singular values and vectors: weights ≈ U · diag(S) · Vᵀ, named as in `torch.svd_lowrank`.

    U: (…, q, k). S: (…, k), in descending order. V: (…, keys, k).

    >>> import torch, regard
    >>> x = torch.zeros(4, 2)
    >>> svd = regard.attend(x, x, x)[1].svd(1)  # uniform weights have rank 1
    >>> svd.S
    tensor([1.0000])
    """

    U: Tensor
    S: Tensor
    V: Tensor

    def entropy(self) -> Tensor:
        """Return the spectral entropy −Σ p log p, p = S / ΣS, in nats (Roy and Vetterli 2007, eq. 2 and 3).

        Its exponential is the effective rank. The entropy is computed from the k leading values,
        which gives a lower bound that grows with k toward the entropy of all singular values.

        >>> import torch, regard
        >>> x = 100 * torch.eye(4)
        >>> regard.attend(x, x, x)[1].svd(4).entropy().exp()  # the identity matrix has four equal values
        tensor(4.0000)
        """
        total = self.S.sum(-1, keepdim=True)
        return torch.special.entr(self.S / torch.where(total > 0, total, 1.0)).sum(-1)


@torch.no_grad()
def svd(weights: LazyMatrix, k: int, iterations: int) -> SVD:
    """Compute the k leading singular triplets by randomized block Krylov iteration.

    Musco and Musco 2015, algorithm 2. The subspace is spanned by W Ω, (W Wᵀ) W Ω, …, (W Wᵀ)ⁱ W Ω, and
    computing the result takes 2 · iterations + 2 products.
    """
    queries, keys = weights.shape[-2:]
    largest = min(queries, keys)
    if not min(largest, 1) <= k <= largest:
        raise ArgumentError(
            f"svd got k={k} for weights with {pluralize(queries, 'query')} and {pluralize(keys, 'key')}; k "
            f"must be between 1 and {largest}, the smaller of the two."
        )
    if iterations < 0:
        raise ArgumentError(f"svd got niter={iterations}; it must be at least 0.")
    block = min(k + _OVERSAMPLING, largest)
    # a fixed seed, so that the same weights have the same singular vectors
    random = torch.randn(keys, block, generator=torch.Generator().manual_seed(0), dtype=weights.dtype)
    blocks: list[Tensor] = [torch.linalg.qr(weights._product(random.to(weights.device))).Q]
    for _ in range(iterations):
        if len(blocks) * block >= queries:
            break  # the subspace is the whole space
        previous = weights._product(blocks[-1], transposed=True)
        blocks.append(torch.linalg.qr(weights._product(previous)).Q)
    basis = torch.linalg.qr(torch.cat(blocks, -1)).Q if len(blocks) > 1 else blocks[0]
    # W ≈ Q Qᵀ W, and Wᵀ Q is tall and narrow
    v, s, uh = torch.linalg.svd(weights._product(basis, transposed=True), full_matrices=False)
    return SVD(basis @ uh.mT[..., :k], s[..., :k], v[..., :k])


def linear_operator(weights: LazyMatrix) -> Any:
    """Return a scipy LinearOperator for a matrix of shape (q, k)."""
    try:
        from scipy.sparse.linalg import LinearOperator  # type: ignore[import-untyped]
    except ModuleNotFoundError:
        raise MissingExtraError(
            "weights.linear_operator needs the package scipy, which is not installed. Run: pip install scipy",
            name="scipy",
        ) from None
    if weights.ndim != 2:
        raise ArgumentError(
            f"linear_operator: weights of shape {tuple(weights.shape)} contain several matrices; select one, "
            "e.g. weights.batch(0).heads(3)."
        )

    def times(x: Any, transposed: bool = False) -> Any:
        factor = torch.as_tensor(x, device=weights.device).to(weights.dtype)
        with torch.no_grad():
            return weights._product(factor, transposed=transposed).cpu().numpy()

    def transposed_times(x: Any) -> Any:
        return times(x, transposed=True)

    dtype = torch.empty(0, dtype=weights.dtype).numpy().dtype
    return LinearOperator(
        tuple(weights.shape),
        matvec=times,
        rmatvec=transposed_times,
        matmat=times,
        rmatmat=transposed_times,
        dtype=dtype,
    )

"""Vectors for the tokens of a vocabulary."""

import math

import torch
from torch import Tensor, nn

from regard._util.checks import check_int
from regard.errors import ArgumentError, DTypeError
from regard.mechanism.torch_state import concrete


class Embedding(nn.Embedding):
    """A vector for each token of a vocabulary, times √m: Vaswani et al. 2017, section 3.4.

    vocabulary, width: how many tokens there are, and the length m of a vector.

    >>> import torch, regard
    >>> embedding = regard.models.Embedding(100, 16)
    >>> embedding(torch.tensor([5, 6])).shape
    torch.Size([2, 16])
    >>> embedding(torch.tensor([5, 100]))
    Traceback (most recent call last):
    regard.errors.ArgumentError: token 100 is outside of the vocabulary, which has the tokens 0 to 99; ...
    """

    def __init__(self, vocabulary: int, width: int) -> None:
        check_int("the model got a vocabulary", vocabulary, min=1)
        super().__init__(vocabulary, width)
        nn.init.normal_(self.weight, std=width**-0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        """(…) → (…, m)."""
        try:
            return super().forward(tokens) * math.sqrt(self.embedding_dim)
        except IndexError:
            raise ArgumentError(outside(tokens, self.num_embeddings)) from None
        except RuntimeError as error:
            if tokens.is_floating_point() or tokens.dtype is torch.bool:
                raise DTypeError(f"the tokens are of {tokens.dtype}; a token is a whole number.") from error
            raise


def outside(tokens: Tensor, vocabulary: int) -> str:
    """What to say of a token that the vocabulary does not have."""
    wrong = tokens[(tokens < 0) | (tokens >= vocabulary)]
    which = f"token {int(wrong[0])}" if concrete(wrong) and wrong.numel() else "a token"
    return (
        f"{which} is outside of the vocabulary, which has the tokens 0 to {vocabulary - 1}; tokenize with "
        "the vocabulary that the model was made for."
    )

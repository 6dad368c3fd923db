"""Token embeddings."""

import math

import torch
from torch import Tensor, nn

from regard._util.checks import check_int
from regard.errors import ArgumentError, DTypeError
from regard.mechanism.torch_state import concrete


class Embedding(nn.Embedding):
    """Token embedding, scaled by √m (Vaswani et al. 2017, section 3.4).

    vocab_size: number of tokens in the vocabulary. width: vector dimension m.
    scale: whether to multiply the vectors by √m.

    >>> import torch, regard
    >>> embedding = regard.models.Embedding(100, 16)
    >>> embedding(torch.tensor([5, 6])).shape
    torch.Size([2, 16])
    >>> embedding(torch.tensor([5, 100]))
    Traceback (most recent call last):
    regard.errors.ArgumentError: Token 100 is out of range for a vocabulary of 100; ...
    """

    def __init__(self, vocab_size: int, width: int, *, scale: bool = True) -> None:
        check_int("Embedding got vocab_size", vocab_size, min=1)
        super().__init__(vocab_size, width)
        self.scale = scale
        nn.init.normal_(self.weight, std=width**-0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the vectors of tokens: (…) → (…, m)."""
        try:
            vectors = super().forward(tokens)
            return vectors * math.sqrt(self.embedding_dim) if self.scale else vectors
        except IndexError:
            raise ArgumentError(out_of_range(tokens, self.num_embeddings)) from None
        except RuntimeError as error:
            if tokens.is_floating_point() or tokens.dtype is torch.bool:
                raise DTypeError(
                    f"tokens have dtype {tokens.dtype}; pass integers: tokens.long()."
                ) from error
            raise


def out_of_range(tokens: Tensor, vocab_size: int) -> str:
    """Return the error message for a token outside the vocabulary."""
    wrong = tokens[(tokens < 0) | (tokens >= vocab_size)]
    token = f"Token {int(wrong[0])}" if concrete(wrong) and wrong.numel() else "A token"
    return f"{token} is out of range for a vocabulary of {vocab_size}; use this model's tokenizer."

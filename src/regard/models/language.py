"""Decoder-only and encoder-only Transformers: causal and masked language models.

Batches are `Packed` (no padding) or padded token ids (b, l) with lengths; both give the same results.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard._util.checks import check_int, check_number, check_type
from regard._util.name_hints import hint_arguments
from regard._util.text import pluralize, type_name
from regard.errors import ArgumentError, DTypeError, ShapeError
from regard.mechanism.masks.algebra import Mask
from regard.mechanism.torch_state import concrete
from regard.models.layers.blocks import Caches, Stack, TransformerConfig
from regard.models.layers.dropout import eval_mode
from regard.models.layers.embedding import Embedding, out_of_range
from regard.models.loss import IGNORE, vocabulary_loss
from regard.models.packed import ModelInput, Packed, as_packed, check_batch, token_mask


@hint_arguments
class LanguageModel(nn.Module):
    """Decoder-only Transformer (Radford et al. 2018).

    vocab_size: number of tokens in the vocabulary. config: the architecture.

    Tokens are `Packed`, or padded (b, l) with `lengths` (b).
    mask: additional restriction on attention, e.g. `Window(4)`. caches: keys and values from previous calls.

    >>> import torch, regard
    >>> model = regard.models.LanguageModel(100, regard.models.TransformerConfig(width=16, heads=2, layers=2))
    >>> model(torch.tensor([[5, 6, 7]])).shape  # logits
    torch.Size([1, 3, 100])
    >>> model.loss(regard.models.Packed.of([[5, 6, 7], [8, 9]])).backward()
    >>> model.generate([5, 6], max_new_tokens=3)
    [5, 6, ...]
    """

    def __init__(self, vocab_size: int, config: TransformerConfig = TransformerConfig()) -> None:  # noqa: B008 (a frozen value)
        super().__init__()
        check_type(
            f"{type(self).__name__} got a config", config, TransformerConfig, "TransformerConfig(width=256)"
        )
        self.embedding = Embedding(vocab_size, config.width)
        self.decoder = Stack(config, causal=True)

    @property
    def output_weight(self) -> Tensor:
        """Output embedding matrix (V, m), tied to the input embedding (Press and Wolf 2017)."""
        return self.embedding.weight

    def hidden(
        self,
        tokens: Tensor | Packed,
        lengths: Tensor | None = None,
        *,
        mask: Mask | None = None,
        caches: Caches | None = None,
    ) -> Tensor:
        """Return outputs before the vocabulary projection: (…, m) for tokens of shape (…)."""
        if caches is not None and (lengths is not None or isinstance(tokens, Packed)):
            raise ArgumentError(
                f"caches require sentences of equal length, but this batch is "
                f"{'Packed' if lengths is None else 'padded'}; pass tokens (b, l) without lengths."
            )
        inputs = ModelInput.of(tokens, lengths, causal=True, start=caches[0].length if caches else 0)
        assert inputs.mask is not None  # always set by causal=True
        both = inputs.mask if mask is None else inputs.mask & mask
        return self.decoder(
            self.embedding(inputs.tokens), mask=both, positions=inputs.positions, caches=caches
        )

    def forward(
        self,
        tokens: Tensor | Packed,
        lengths: Tensor | None = None,
        *,
        mask: Mask | None = None,
        caches: Caches | None = None,
    ) -> Tensor:
        """Return next-token logits (…, V). With caches, positions continue from previous calls."""
        return F.linear(self.hidden(tokens, lengths, mask=mask, caches=caches), self.output_weight)

    def loss(
        self,
        tokens: Tensor | Packed,
        lengths: Tensor | None = None,
        *,
        mask: Mask | None = None,
        label_smoothing: float = 0.0,
    ) -> Tensor:
        """Return the mean cross-entropy of all tokens except the first of each sentence.

        mask: mask for the inputs, which are the sentences without their last token.
        """
        if isinstance(tokens, Tensor) and not concrete(tokens):  # while tracing, the lengths are unknown
            check_batch(tokens, lengths)
            return self._padded_loss(tokens, lengths, mask, label_smoothing)
        packed = as_packed(tokens, lengths)
        inputs, labels = packed.inputs(), packed.labels().tokens
        if not len(labels):
            raise ArgumentError(
                f"The batch has {pluralize(len(packed), 'sentence')} and "
                f"{pluralize(len(packed.tokens), 'token')}; the loss needs at least one sentence with at "
                "least two tokens."
            )
        if isinstance(tokens, Tensor) and mask is not None:  # the mask refers to padded rows
            return self._padded_loss(tokens, lengths, mask, label_smoothing)
        x = self.hidden(inputs, mask=mask)
        return vocabulary_loss(x, self.output_weight, None, labels, label_smoothing=label_smoothing)

    def _padded_loss(
        self, tokens: Tensor, lengths: Tensor | None, mask: Mask | None, label_smoothing: float
    ) -> Tensor:
        labels = tokens[:, 1:]
        if lengths is not None:
            lengths = lengths - 1
            labels = torch.where(token_mask(labels, lengths), labels, IGNORE)
        x = self.hidden(tokens[:, :-1], lengths, mask=mask)
        return vocabulary_loss(x, self.output_weight, None, labels, label_smoothing=label_smoothing)

    @torch.no_grad()
    def generate(
        self,
        prompt: Sequence[int],
        *,
        max_new_tokens: int,
        end: int | None = None,
        mask: Mask | None = None,
        temperature: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> list[int]:
        """Generate up to `max_new_tokens` tokens after a prompt; return the prompt and its continuation.

        end: token that ends the text and is included in the result. mask: a rule such as `Window(4)`.
        temperature: sampling temperature; 0 selects the most probable token.
        generator: random number generator; default: torch's global generator.
        """
        check_int("generate got max_new_tokens", max_new_tokens)
        check_number("generate got temperature", temperature, min=0)
        if end is not None:
            check_int("generate got end", end)
        tokens, caches = _prompt(prompt), self.decoder.caches()
        new, max_length = list(tokens), len(tokens) + max_new_tokens
        with eval_mode(self):
            while len(tokens) < max_length and (end is None or tokens[-1] != end):
                step = torch.tensor([new], device=self.output_weight.device)
                logits = self(step, mask=mask, caches=caches)[0, -1]
                if temperature:
                    probabilities = torch.softmax((logits - logits.max()) / temperature, -1)
                    new = [int(torch.multinomial(probabilities, 1, generator=generator))]
                else:
                    new = [int(logits.argmax())]
                tokens += new
        return tokens


def _prompt(prompt: Sequence[int]) -> list[int]:
    """Convert a prompt to a list of token ids."""
    try:
        tokens = [int(token) for token in prompt]
    except (TypeError, ValueError, RuntimeError):
        raise DTypeError(
            f"generate got a prompt of type {type(prompt).__name__}; pass one list of token ids: "
            "generate([5, 6], max_new_tokens=10)."
        ) from None
    if not tokens:
        raise ArgumentError("generate got an empty prompt; pass at least a start token.")
    return tokens


class MaskedLanguageModel(nn.Module):
    """Encoder-only Transformer with a masked language modeling head (Devlin et al. 2019).

    vocab_size: number of tokens in the vocabulary. config: the architecture.

    Tokens are `Packed`, or padded (b, l) with `lengths` (b).

    >>> import torch, regard
    >>> model = regard.models.MaskedLanguageModel(
    ...     100, regard.models.TransformerConfig(width=16, heads=2, layers=2)
    ... )
    >>> batch = regard.models.Packed.of([[5, 6, 7], [8, 9]])
    >>> tokens, labels = regard.models.mask_tokens(batch, mask_id=1, vocab_size=100)
    >>> model.loss(tokens, labels).backward()
    >>> model(tokens).shape  # logits
    torch.Size([5, 100])
    """

    def __init__(self, vocab_size: int, config: TransformerConfig = TransformerConfig()) -> None:  # noqa: B008
        super().__init__()
        check_type(
            f"{type(self).__name__} got a config", config, TransformerConfig, "TransformerConfig(width=256)"
        )
        self.embedding = Embedding(vocab_size, config.width)
        self.encoder = Stack(config)
        self.head = nn.Sequential(nn.Linear(config.width, config.width), nn.GELU(), config.make_norm())
        self.output_bias = nn.Parameter(torch.zeros(vocab_size))

    @property
    def output_weight(self) -> Tensor:
        """Output embedding matrix (V, m), tied to the input embedding."""
        return self.embedding.weight

    def states(self, tokens: Tensor | Packed, lengths: Tensor | None = None) -> list[Tensor]:
        """Return the embeddings and each block's output, all of shape (…, m) for tokens of shape (…)."""
        inputs = ModelInput.of(tokens, lengths)
        return self.encoder.states(
            self.embedding(inputs.tokens), mask=inputs.mask, positions=inputs.positions
        )

    def forward(self, tokens: Tensor | Packed, lengths: Tensor | None = None) -> Tensor:
        """Return logits (…, V) for the original token at each position."""
        return F.linear(self.head(self.states(tokens, lengths)[-1]), self.output_weight, self.output_bias)

    def loss(self, tokens: Tensor | Packed, labels: Tensor, *, lengths: Tensor | None = None) -> Tensor:
        """Return the mean cross-entropy of the labels (…), which are −100 for tokens to ignore."""
        check_batch(tokens, lengths)
        shape = tuple((tokens.tokens if isinstance(tokens, Packed) else tokens).shape)
        if tuple(labels.shape) != shape:
            raise ShapeError(
                f"tokens have shape {shape} and labels {tuple(labels.shape)}; pass one label per token, "
                "with −100 for tokens to ignore."
            )
        x = self.states(tokens, lengths)[-1]
        if concrete(labels):  # skip ignored positions before the vocabulary projection
            x, labels = x[labels != IGNORE], labels[labels != IGNORE]
        return vocabulary_loss(self.head(x), self.output_weight, self.output_bias, labels)


def mask_tokens(
    batch: Packed,
    *,
    mask_id: int,
    vocab_size: int,
    probability: float = 0.15,
    special_ids: Sequence[int] = (),
    generator: torch.Generator | None = None,
) -> tuple[Packed, Tensor]:
    """Mask tokens for masked language modeling (Devlin et al. 2019, section 3.1).

    batch: the sentences. mask_id: id of the mask token. vocab_size: number of tokens in the vocabulary.
    probability: fraction of tokens to predict. Of these, 80% become `mask_id`, 10% become a random token, and
        10% are left unchanged.
    special_ids: tokens that are never masked, e.g. the start and end tokens.
    generator: random number generator; default: torch's global generator.

    Returns the masked batch and its labels, which are −100 for tokens that were not selected.

    >>> import torch, regard
    >>> batch = regard.models.Packed.of([[5, 6, 7], [8, 9]])
    >>> tokens, labels = regard.models.mask_tokens(batch, mask_id=1, vocab_size=10, probability=0.5)
    >>> bool((labels[labels != -100] == batch.tokens[labels != -100]).all())
    True
    """
    if not isinstance(batch, Packed):
        raise DTypeError(f"mask_tokens got {type_name(batch)}; pass a Packed, e.g. pack(tokens, lengths).")
    check_number("mask_tokens got probability", probability, above=0, max=1)
    check_int("mask_tokens got vocab_size", vocab_size, min=1)
    check_int("mask_tokens got mask_id", mask_id)
    if mask_id >= vocab_size:
        raise ArgumentError(out_of_range(torch.tensor([mask_id]), vocab_size))
    tokens = batch.tokens
    draws = torch.rand(2, len(tokens), generator=generator).to(tokens.device)
    special = torch.tensor([*special_ids], dtype=tokens.dtype, device=tokens.device)
    maskable = ~torch.isin(tokens, special)
    priority = torch.where(maskable, draws[0], 2.0)
    selected = priority < probability
    if bool(maskable.any()) and not bool(selected.any()):
        selected[priority.argmin()] = True  # at least one label, even in small batches
    random = torch.randint(vocab_size, (len(tokens),), generator=generator).to(tokens.device)
    masked = torch.where(selected & (draws[1] < 0.8), mask_id, tokens)
    masked = torch.where(selected & (draws[1] >= 0.9), random, masked)
    return Packed(masked, batch.lengths), torch.where(selected, tokens, IGNORE)

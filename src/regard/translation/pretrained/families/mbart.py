"""mBART (Liu et al. 2020) and mBART-50 (Tang et al. 2020)."""

from pathlib import Path

from regard.models.generation import SpecialTokens
from regard.translation.pretrained.choice import Choice
from regard.translation.pretrained.families import bart, fairseq
from regard.translation.pretrained.languages import MBART_25, MBART_50, find_language
from regard.translation.pretrained.layout import Layout
from regard.translation.pretrained.settings import Settings
from regard.translation.tokens import TokenizerPair

FILES = fairseq.FILES
OFFSET = 2  # unused rows at the beginning of the position table


def read_layout(settings: Settings) -> Layout:
    """Read the architecture: pre-norm, with learned positions and a norm after the embeddings."""
    settings.require("static_position_embeddings", False)
    encoder, decoder = bart.read_stacks(
        settings,
        activation="gelu",
        scale_embedding=False,
        norm_first=True,
        positions="learned",
        embedding_norm=True,
    )
    return bart.shared_layout(settings, "mbart", encoder, decoder, output_bias=True, position_offset=OFFSET)


def read_tokens(folder: Path, layout: Layout, choice: Choice) -> TokenizerPair:
    """Read tokenizer.json or sentencepiece.bpe.model."""
    end = choice.token("eos_token_id", 2)
    # mBART-50 puts the language token at the start of both sentences, mBART at the end of the source
    start = choice.generation.get("decoder_start_token_id", choice.config.get("decoder_start_token_id"))
    name = choice.tokenizer.get("tokenizer_class", choice.config.get("tokenizer_class", ""))
    is_50 = "50" in name if isinstance(name, str) and name else start == end
    if not is_50:
        choice.check_no_forced_token()
    tokenizer, languages = fairseq.read_tokenizer(folder, layout, choice, MBART_50 if is_50 else MBART_25)
    source = find_language(folder, "source", choice.language("source"), languages)
    if choice.target is None and not is_50 and start in languages.values():
        target = choice.token("decoder_start_token_id")
    else:
        target = fairseq.target_language(choice, languages)
    tokenizer.special = SpecialTokens(
        padding=choice.config.integer("pad_token_id", 1, min=0),
        start=choice.token("decoder_start_token_id", end) if is_50 else target,
        end=end,
        unknown=fairseq.UNKNOWN,
        source_prefix=(source,) if is_50 else (),
        source_suffix=(end,) if is_50 else (end, source),
        target_prefix=(target,) if is_50 else (),
        suppressed=choice.suppressed(),
    )
    return TokenizerPair(tokenizer, tokenizer)

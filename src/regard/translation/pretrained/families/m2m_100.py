"""M2M-100 (Fan et al. 2021) and NLLB (NLLB Team 2022)."""

from collections.abc import Mapping
from pathlib import Path

from regard.errors import ArgumentError
from regard.models.generation import SpecialTokens
from regard.translation.pretrained.choice import Choice
from regard.translation.pretrained.families import bart, fairseq
from regard.translation.pretrained.languages import M2M_100, WMT_21, find_language
from regard.translation.pretrained.layout import Layout
from regard.translation.pretrained.settings import Settings
from regard.translation.pretrained.tokenizer import (
    PretrainedTokenizer,
    SentencePieceTokenizer,
    read_sentencepiece,
    read_vocabulary,
)
from regard.translation.tokens import TokenizerPair

FILES = (*fairseq.FILES, "vocab.json")
_POSITIONS = frozenset(f"model.{side}.embed_positions.weights" for side in ("encoder", "decoder"))


def read_layout(settings: Settings) -> Layout:
    """Read the architecture: pre-norm, with fairseq's sinusoidal positions."""
    encoder, decoder = bart.read_stacks(
        settings,
        activation="relu",
        scale_embedding=True,
        norm_first=True,
        positions="sinusoidal",
        sinusoids="fairseq",
    )
    return bart.shared_layout(settings, "m2m_100", encoder, decoder, output_bias=False, ignored=_POSITIONS)


def read_tokens(folder: Path, layout: Layout, choice: Choice) -> TokenizerPair:
    """Read vocab.json and sentencepiece.bpe.model (M2M-100), or NLLB's tokenizer files."""
    size = layout.vocab_sizes[0]
    if (folder / "vocab.json").exists():
        ids = read_vocabulary(folder / "vocab.json", size)
        languages = _languages(folder, ids, choice, size)
        if "<unk>" not in ids:
            raise ArgumentError(f"{folder / 'vocab.json'} lacks <unk>; copy it again.")
        processor = read_sentencepiece(folder / "sentencepiece.bpe.model")
        special = _special(choice, languages, ids["<unk>"], legacy=False)
        named = {**ids, **{f"__{code}__": i for code, i in languages.items()}}
        tokenizer: PretrainedTokenizer = SentencePieceTokenizer(processor, named, special, size)
    else:
        tokenizer, languages = fairseq.read_tokenizer(folder, layout, choice, codes=())
        legacy = choice.tokenizer.flag("legacy_behaviour", False)
        tokenizer.special = _special(choice, languages, tokenizer.special.unknown, legacy=legacy)
    return TokenizerPair(tokenizer, tokenizer)


def _languages(folder: Path, ids: Mapping[str, int], choice: Choice, size: int) -> dict[str, int]:
    """Return the ids of the language tokens, which follow the vocabulary."""
    kind = choice.tokenizer.get("language_codes", "m2m100")
    codes = {"m2m100": M2M_100, "wmt21": WMT_21}.get(kind if isinstance(kind, str) else "")
    if codes is None or len(ids) + len(codes) > size:
        raise ArgumentError(
            f"{folder} has language_codes={kind!r}, a vocabulary of {len(ids)} and vocab_size={size}; regard "
            "supports only m2m100 and wmt21, and vocab_size must leave room for their language tokens."
        )
    return {code: len(ids) + i for i, code in enumerate(codes)}


def _special(choice: Choice, languages: Mapping[str, int], unknown: int, *, legacy: bool) -> SpecialTokens:
    end = choice.token("eos_token_id", 2)
    source = find_language(choice.folder, "source", choice.language("source"), languages)
    target = fairseq.target_language(choice, languages)
    return SpecialTokens(
        padding=choice.config.integer("pad_token_id", 1, min=0),
        start=choice.token("decoder_start_token_id", 2),
        end=end,
        unknown=unknown,
        source_prefix=() if legacy else (source,),
        source_suffix=(end, source) if legacy else (end,),
        target_prefix=(target,),
        suppressed=choice.suppressed(),
    )

"""Tokenizers of NLLB and mBART: tokenizer.json, or a SentencePiece model with fairseq's ids."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from regard.errors import ArgumentError
from regard.models.checkpoint_files import read_json
from regard.models.generation import SpecialTokens
from regard.translation.pretrained.choice import Choice
from regard.translation.pretrained.languages import find_language
from regard.translation.pretrained.layout import Layout
from regard.translation.pretrained.tokenizer import (
    JsonTokenizer,
    PretrainedTokenizer,
    SentencePieceTokenizer,
    read_sentencepiece,
    read_tokenizer_json,
)

JSON, MODEL, SPECIAL = "tokenizer.json", "sentencepiece.bpe.model", "special_tokens_map.json"
FILES = (JSON, MODEL, SPECIAL, "tokenizer_config.json")
_FIRST = ("<s>", "<pad>", "</s>", "<unk>")
UNKNOWN = 3
_CODE = re.compile(r"[a-z]{2,3}_[A-Z][A-Za-z]+")  # a language token, such as deu_Latn or de_DE


def read_tokenizer(
    folder: Path, layout: Layout, choice: Choice, codes: Sequence[str]
) -> tuple[PretrainedTokenizer, dict[str, int]]:
    """Return the tokenizer, and the ids of the language tokens.

    codes: languages whose tokens follow the vocabulary, used if the folder does not list its languages.
    """
    size, special = layout.vocab_sizes[0], SpecialTokens(unknown=UNKNOWN)
    listed = _listed(folder, choice)
    if (folder / JSON).exists():
        tokenizer = read_tokenizer_json(folder / JSON, size)
        ids = tokenizer.get_vocab(with_added_tokens=True)
        names = listed or codes or [token for token in ids if _CODE.fullmatch(token)]
        languages = _check_languages(folder, {code: ids[code] for code in names if code in ids})
        if ids.get("<unk>") != UNKNOWN:
            raise ArgumentError(
                f"{folder / JSON} assigns the id {ids.get('<unk>')} to <unk>; it must be {UNKNOWN}."
            )
        result: PretrainedTokenizer = JsonTokenizer(tokenizer, special, size)
        result.controls |= set(languages.values())
        return result, languages
    if not (folder / MODEL).exists():
        raise ArgumentError(f"{folder} has no tokenizer; add {JSON}, or {MODEL}.")
    processor = read_sentencepiece(folder / MODEL)
    pieces = [processor.id_to_piece(i) for i in range(processor.get_piece_size())]
    # fairseq replaces SentencePiece's three special tokens with four
    ids = {piece: i for i, piece in enumerate([*_FIRST, *pieces[3:]])}
    numbered = enumerate(listed or codes, start=len(pieces) + 1)
    languages = _check_languages(folder, {code: i for i, code in numbered})
    if max([*ids.values(), *languages.values()]) >= size:
        raise ArgumentError(
            f"{folder / MODEL} has {len(pieces)} tokens and {len(languages)} languages, but config.json has "
            f"vocab_size={size}; use the tokenizer and config.json of the same model."
        )
    result = SentencePieceTokenizer(processor, {**ids, **languages}, special, size)
    result.controls |= set(languages.values())
    return result, languages


def target_language(choice: Choice, languages: Mapping[str, int]) -> int:
    """Return the id of the target language: the caller's choice, or the folder's default."""
    forced = choice.generation.get("forced_bos_token_id")
    if choice.target is None and isinstance(forced, int) and forced in languages.values():
        return forced
    return find_language(choice.folder, "target", choice.language("target"), languages)


def _check_languages(folder: Path, languages: dict[str, int]) -> dict[str, int]:
    """Raise if the folder lists no languages, for example because a tokenizer file is missing."""
    if not languages:
        raise ArgumentError(
            f"{folder} lists no languages. Copy the whole folder, including vocab.json (M2M-100), or "
            f"{SPECIAL} and tokenizer_config.json (NLLB)."
        )
    return languages


def _listed(folder: Path, choice: Choice) -> list[str]:
    """Return the language tokens that the folder lists."""
    path = folder / SPECIAL
    tokens = read_json(path).get("additional_special_tokens") if path.exists() else None
    for name in ("additional_special_tokens", "extra_special_tokens"):
        tokens = tokens or choice.tokenizer.get(name)
    if not isinstance(tokens, list):
        return []
    names = [token.get("content") if isinstance(token, dict) else token for token in tokens]
    return [name for name in names if isinstance(name, str) and _CODE.fullmatch(name)]

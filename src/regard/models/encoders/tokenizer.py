"""Tokenizers for pretrained models, loaded from untrusted files."""

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from regard._util.extras import require
from regard._util.text import shorten
from regard.errors import ArgumentError, MissingExtraError
from regard.models.checkpoint_files import read_json, read_text
from regard.models.encoders.checkpoint_layouts import CheckpointLayout

# Limits for tokenizer.json. The Rust library aborts the process if it runs out of memory, so anything far
# beyond real tokenizers is rejected.
_MAX_GROWTH = 10_000  # factor by which normalization may lengthen a text; real tokenizers stay below 2,000
_MAX_STEPS = 64  # steps in a sequence
_MAX_DEPTH = 8  # levels of nested sequences
_MAX_SPECIAL = 1000  # special tokens added to a sentence
_MAX_COPIES = 4  # copies of a sentence in a template
_MAX_AFFIX = 64  # bytes in a subword prefix or suffix
_MAX_WORD = 10_000  # characters in a word that is split into subwords
# growth factors in UTF-8 bytes; NFKC makes U+FDFA 11 times as long
_UNICODE = {"NFC": 3, "NFD": 3, "NFKC": 11, "NFKD": 11, "Lowercase": 2}
_NORMALIZERS = {"BertNormalizer": 10, "ByteLevel": 2, "Strip": 1, "StripAccents": 1, "Nmt": 1}
_PRE_TOKENIZERS = {
    **dict.fromkeys(("BertPreTokenizer", "CharDelimiterSplit", "Delimiter", "Digits", "FixedLength"), 1),
    **dict.fromkeys(("Punctuation", "Split", "UnicodeScripts", "Whitespace", "WhitespaceSplit"), 1),
    "ByteLevel": 4,
    "Metaspace": 5,
}


class Encoding(NamedTuple):
    """Token ids, token strings, and the span [start, stop) of each token, or None for special tokens."""

    ids: list[int]
    tokens: list[str]
    spans: list[tuple[int, int] | None]


class SubwordTokenizer:
    """A tokenizer from the package `tokenizers`, validated against the model's vocabulary."""

    def __init__(self, tokenizer: Any, vocab_size: int, folder: Path) -> None:
        with guard_tokenizer(f"Cannot use the tokenizer in {folder}"):
            tokenizer.no_truncation()  # the encoder raises an error for texts that are too long
            tokenizer.no_padding()
            largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        if largest >= vocab_size:
            raise ArgumentError(
                f"The tokenizer in {folder} has token ids up to {largest}, but the model has a vocabulary of "
                f"{vocab_size}; use the tokenizer of this model."
            )
        self.tokenizer = tokenizer
        token = getattr(tokenizer.model, "unk_token", None) or "<unk>"
        self.unknown_id: int | None = tokenizer.token_to_id(token)  # None for byte-level BPE

    def __call__(self, sentences: Sequence[str]) -> list[Encoding]:
        """Tokenize sentences and add special tokens."""
        with guard_tokenizer("Cannot tokenize these sentences"):
            encodings = self.tokenizer.encode_batch(list(sentences))
        return [Encoding(encoding.ids, encoding.tokens, _spans(encoding)) for encoding in encodings]

    def ids(self, sentences: Sequence[str]) -> list[list[int]]:
        """Return only the token ids of sentences."""
        with guard_tokenizer("Cannot tokenize these sentences"):
            return [encoding.ids for encoding in self.tokenizer.encode_batch_fast(list(sentences))]


def _spans(encoding: Any) -> list[tuple[int, int] | None]:
    pairs = zip(encoding.offsets, encoding.special_tokens_mask, strict=True)
    return [None if special else span for span, special in pairs]


@contextmanager
def guard_tokenizer(message: str) -> Iterator[None]:
    """Convert errors from `tokenizers` to ArgumentError, including Rust panics, which are not Exceptions."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit, MissingExtraError):
        raise
    except BaseException as error:
        raise ArgumentError(f"{message}: {type(error).__name__}: {str(error)[:200]}") from error


def read_tokenizer(folder: Path, layout: CheckpointLayout) -> SubwordTokenizer:
    """Read tokenizer.json, or vocab.txt (BERT), or vocab.json and merges.txt (RoBERTa)."""
    if (folder / "tokenizer.json").exists():
        path = folder / "tokenizer.json"
        return SubwordTokenizer(check_tokenizer_json(path, read_json(path)), layout.vocab_size, folder)
    if not layout.family.bytes and (folder / "vocab.txt").exists():
        tokenizer = _read_word_piece(folder, layout.vocab_size)
    elif layout.family.bytes and (folder / "vocab.json").exists() and (folder / "merges.txt").exists():
        tokenizer = _read_byte_bpe(folder, layout.vocab_size)
    else:
        files = "vocab.json and merges.txt" if layout.family.bytes else "vocab.txt"
        raise ArgumentError(f"{folder} has no tokenizer; add tokenizer.json, or {files}.")
    return SubwordTokenizer(tokenizer, layout.vocab_size, folder)


def check_tokenizer_json(path: Path, settings: Mapping[str, Any]) -> Any:
    """Build the tokenizer from the content of a tokenizer.json, after checking it."""
    try:
        _check(settings)
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        raise ArgumentError(f"{path} is not supported: {shorten(str(error), 200)}") from None
    # Serialize again: for duplicate keys, Rust could read values other than those checked here.
    text = json.dumps({**settings, "decoder": None, "truncation": None, "padding": None})
    with guard_tokenizer(f"{path} is not a valid tokenizer"):
        return _package().Tokenizer.from_str(text)


def _check(tokenizer: Mapping[str, Any]) -> None:
    """Raise ValueError if a tokenizer exceeds the limits in this module or has unknown parts."""
    growth = _growth(_steps(tokenizer.get("normalizer"), "normalizers"))
    for step in _steps(tokenizer.get("pre_tokenizer"), "pretokenizers"):
        growth *= _known(step, _PRE_TOKENIZERS)
        if step["type"] == "FixedLength" and step["length"] < 1:
            raise ValueError("its FixedLength pre-tokenizer has length 0")
    if growth > _MAX_GROWTH:
        raise ValueError(
            f"its normalizer can make a text {growth:,.0f} times as long; the limit is {_MAX_GROWTH:,}"
        )
    _check_post_processor(_steps(tokenizer.get("post_processor"), "processors"))
    _check_model(tokenizer["model"])


def _steps(part: Any, key: str, depth: int = 0) -> list[Mapping[str, Any]]:
    """Return the steps of a part as a flat list. The field `key` of a Sequence contains its steps."""
    if part is None:
        return []
    if not isinstance(part, dict) or depth > _MAX_DEPTH:
        raise ValueError(f"a part is not an object, or is nested more than {_MAX_DEPTH} levels deep")
    if part.get("type") != "Sequence":
        return [part]
    steps = [step for child in part[key] for step in _steps(child, key, depth + 1)]
    if len(steps) > _MAX_STEPS:
        raise ValueError(f"a sequence has {len(steps):,} steps; the limit is {_MAX_STEPS}")
    return steps


def _known(step: Mapping[str, Any], growths: Mapping[str, int]) -> int:
    kind = step.get("type")
    if not isinstance(kind, str) or kind not in growths:
        raise ValueError(f"it contains a component of the unknown type {str(kind)[:40]!r}")
    return growths[kind]


def _growth(steps: Sequence[Mapping[str, Any]]) -> float:
    """Return the maximum factor by which normalizers can lengthen a text."""
    growth, done = 1.0, set[str]()
    for step in steps:
        kind = step.get("type")
        if kind in _UNICODE:
            # repeating a normalization changes nothing, unless another step comes in between
            growth *= 1 if kind in done else _UNICODE[kind]
            done.add(kind)
            continue
        if kind == "Replace":
            growth *= _replacement_growth(step)
        elif kind == "Prepend":
            # the text is prepended to each segment between special tokens; a segment may be one byte long
            growth *= 1 + _size(step["prepend"])
        elif kind == "Precompiled":
            growth *= _charsmap_growth(step["precompiled_charsmap"])
        else:
            growth *= _known(step, _NORMALIZERS)
        done.clear()
    return growth


def _size(text: Any) -> int:
    if not isinstance(text, str):
        raise ValueError(f"it contains {str(text)[:40]!r} instead of a string")
    return len(text.encode(errors="surrogatepass"))


def _replacement_growth(step: Mapping[str, Any]) -> float:
    """Return the growth factor of a replacement. A regex may match everywhere, a string only itself."""
    pattern, size = step["pattern"], _size(step["content"])
    text = pattern.get("String") if isinstance(pattern, dict) else pattern
    if isinstance(text, str) and text:
        return max(1.0, size / _size(text))
    return 1.0 + size


def _charsmap_growth(charsmap: Any) -> int:
    """Return the growth factor of a SentencePiece table: a trie, then zero-terminated replacement texts."""
    content = base64.b64decode(charsmap)
    end = 4 + int.from_bytes(content[:4], "little")
    if len(content) < end:
        raise ValueError("its precompiled_charsmap is truncated")
    texts = content[end:]
    return max(1, *map(len, texts.split(b"\0")))


def _check_post_processor(steps: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError if a post-processor adds too many special tokens or copies of a sentence."""
    added, copies = 0, 1
    for step in steps:
        kind = step.get("type")
        if kind == "TemplateProcessing":
            sizes = {name: len(token["ids"]) for name, token in step["special_tokens"].items()}
            for template in (step["single"], step["pair"]):
                added += sum(sizes[item["SpecialToken"]["id"]] for item in template if "SpecialToken" in item)
            copies *= max(1, sum("Sequence" in item for item in step["single"]))
        elif kind not in ("BertProcessing", "RobertaProcessing", "ByteLevel"):
            raise ValueError(f"it contains a component of the unknown type {str(kind)[:40]!r}")
    if added > _MAX_SPECIAL or copies > _MAX_COPIES:
        raise ValueError(
            f"it adds {added:,} special tokens to a sentence and repeats the sentence {copies:,} times; the "
            f"limits are {_MAX_SPECIAL:,} and {_MAX_COPIES}"
        )


def _check_model(model: Mapping[str, Any]) -> None:
    """Raise ValueError if affixes or words are too long, or if a merge would cause a Rust panic."""
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(name) is not None and _size(model[name]) > _MAX_AFFIX:
            raise ValueError(f"its {name} has {_size(model[name]):,} bytes; the limit is {_MAX_AFFIX}")
    if not 0 <= model.get("max_input_chars_per_word", 0) <= _MAX_WORD:
        raise ValueError(f"its max_input_chars_per_word is not between 0 and {_MAX_WORD:,}")
    prefix = _size(model.get("continuing_subword_prefix") or "")
    for merge in model.get("merges") or () if prefix else ():
        second = merge.partition(" ")[2] if isinstance(merge, str) else merge[1]
        if len(second.encode()[:prefix].decode(errors="ignore").encode()) < prefix:
            raise ValueError(f"its merge {second[:40]!r} is shorter than continuing_subword_prefix")


def _read_word_piece(folder: Path, vocab_size: int) -> Any:
    """Read BERT's WordPiece tokenizer (Devlin et al. 2019, section 3)."""
    package = _package()
    lines = read_text(folder / "vocab.txt").replace("\r\n", "\n").removesuffix("\n").split("\n")
    ids = {line: i for i, line in enumerate(lines)}
    required = ["[CLS]", "[SEP]", "[UNK]"]
    special = _special_tokens(folder / "vocab.txt", ids, vocab_size, required, ["[PAD]", "[MASK]"])
    options = _options(folder)
    with guard_tokenizer(f"{folder / 'vocab.txt'} is not a valid vocabulary"):
        tokenizer = package.Tokenizer(package.models.WordPiece(ids, unk_token="[UNK]"))
        tokenizer.normalizer = package.normalizers.BertNormalizer(
            clean_text=True,
            handle_chinese_chars=options.get("tokenize_chinese_chars") is not False,
            strip_accents=options.get("strip_accents") if "strip_accents" in options else None,
            lowercase=options.get("do_lower_case") is not False,
        )
        tokenizer.pre_tokenizer = package.pre_tokenizers.BertPreTokenizer()
        tokenizer.add_special_tokens(special)
        tokenizer.post_processor = package.processors.BertProcessing(
            ("[SEP]", ids["[SEP]"]), ("[CLS]", ids["[CLS]"])
        )
    return tokenizer


def _read_byte_bpe(folder: Path, vocab_size: int) -> Any:
    """Read RoBERTa's byte-level BPE tokenizer (Radford et al. 2019, section 2.2)."""
    package = _package()
    ids = read_json(folder / "vocab.json")
    invalid = next((token for token, i in ids.items() if isinstance(i, bool) or not isinstance(i, int)), None)
    if invalid is not None:
        raise ArgumentError(
            f"{folder / 'vocab.json'} gives {invalid[:40]!r} an id that is not an integer. "
            "Copy or download it again."
        )
    optional = ["<pad>", "<unk>", "<mask>"]
    special = _special_tokens(folder / "vocab.json", ids, vocab_size, ["<s>", "</s>"], optional)
    lines = read_text(folder / "merges.txt").replace("\r\n", "\n").split("\n")
    merges = [tuple(line.split(" ")) for line in lines if line and not line.startswith("#version")]
    prefix_space = _options(folder).get("add_prefix_space") is True
    with guard_tokenizer(f"{folder / 'vocab.json'} and merges.txt are not a valid tokenizer"):
        tokenizer = package.Tokenizer(package.models.BPE(ids, merges))
        tokenizer.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
        tokenizer.add_special_tokens(special)
        tokenizer.post_processor = package.processors.RobertaProcessing(
            ("</s>", ids["</s>"]), ("<s>", ids["<s>"]), add_prefix_space=prefix_space
        )
    return tokenizer


def _special_tokens(
    path: Path, ids: dict[str, int], vocab_size: int, required: list[str], optional: list[str]
) -> list[str]:
    """Validate the token ids of a vocabulary and return its special tokens."""
    missing = [token for token in required if token not in ids]
    if missing:
        raise ArgumentError(
            f"{path} lacks {', '.join(missing)}, which the tokenizer requires; use the "
            "vocabulary of this model."
        )
    low, high = min(ids.values()), max(ids.values())
    if low < 0 or high >= vocab_size:
        raise ArgumentError(
            f"{path} has token ids from {low} to {high}, but the model has a vocabulary of {vocab_size}; "
            "use the vocabulary of this model."
        )
    return [token for token in (*required, *optional) if token in ids]


def _options(folder: Path) -> dict[str, Any]:
    """Return the boolean settings in tokenizer_config.json, if it exists."""
    path = folder / "tokenizer_config.json"
    settings = read_json(path) if path.exists() else {}
    return {name: value for name, value in settings.items() if isinstance(value, bool)}


def _package() -> Any:
    require("tokenizers", "load_encoder")
    import tokenizers
    import tokenizers.models
    import tokenizers.normalizers
    import tokenizers.pre_tokenizers
    import tokenizers.processors

    return tokenizers

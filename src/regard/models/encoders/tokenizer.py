"""Subwords: the tokenizers of pretrained models, from sentences to token numbers and back to characters."""

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from regard._util.text import shorten
from regard.errors import ArgumentError
from regard.models.encoders.checkpoint_layouts import CheckpointLayout, read_json, read_text

# Bounds on what a tokenizer.json may do to a text. Rust ends the process when memory is exhausted, so what
# would need much more than any real tokenizer is refused before it is made.
_GROWTH = 10_000  # times as many bytes after normalizing; real ones stay below 2,000 by the same measure
_STEPS = 64  # of a chain
_DEPTH = 8  # of chains in chains
_MARKS_ADDED = 1000  # to each sentence
_COPIES = 4  # of a sentence
_AFFIX = 64  # bytes of what stands before or behind the pieces of a word
_WORD = 10_000  # characters of a word that is cut into pieces
# how many times longer a text may become, in UTF-8; U+FDFA becomes 11 times as long
_UNICODE = {"NFC": 3, "NFD": 3, "NFKC": 11, "NFKD": 11, "Lowercase": 2}
_NORMALIZERS = {"BertNormalizer": 10, "ByteLevel": 2, "Strip": 1, "StripAccents": 1, "Nmt": 1}
_PRE_TOKENIZERS = {
    **dict.fromkeys(("BertPreTokenizer", "CharDelimiterSplit", "Delimiter", "Digits", "FixedLength"), 1),
    **dict.fromkeys(("Punctuation", "Split", "UnicodeScripts", "Whitespace", "WhitespaceSplit"), 1),
    "ByteLevel": 4,
    "Metaspace": 5,
}


class Encoding(NamedTuple):
    """The tokens of a sentence, their names, and the characters [start, stop) of each; None for marks."""

    tokens: list[int]
    names: list[str]
    spans: list[tuple[int, int] | None]


class SubwordTokenizer:
    """A tokenizer of the package `tokenizers`, from a folder, checked against its model's vocabulary."""

    def __init__(self, tokenizer: Any, vocabulary: int, where: Path) -> None:
        with guarded(f"the tokenizer in {where} cannot be used"):
            tokenizer.no_truncation()  # what is too long is refused, not cut
            tokenizer.no_padding()
            largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        if largest >= vocabulary:
            raise ArgumentError(
                f"the tokenizer in {where} has tokens up to {largest} and the model has vectors for 0 to "
                f"{vocabulary - 1}; take both from the same folder."
            )
        self.tokenizer = tokenizer
        mark = getattr(tokenizer.model, "unk_token", None) or "<unk>"
        self.unknown: int | None = tokenizer.token_to_id(mark)  # pieces of bytes have no use for it

    def __call__(self, sentences: Sequence[str]) -> list[Encoding]:
        """The tokens of each sentence, start and end mark included."""
        with guarded("these sentences cannot be tokenized"):
            found = self.tokenizer.encode_batch(list(sentences))
        return [Encoding(one.ids, one.tokens, _spans(one)) for one in found]

    def tokens(self, sentences: Sequence[str]) -> list[list[int]]:
        """The token numbers of each sentence alone."""
        with guarded("these sentences cannot be tokenized"):
            return [one.ids for one in self.tokenizer.encode_batch_fast(list(sentences))]


def _spans(encoding: Any) -> list[tuple[int, int] | None]:
    marks = encoding.special_tokens_mask
    return [None if mark else span for span, mark in zip(encoding.offsets, marks, strict=True)]


@contextmanager
def guarded(what: str) -> Iterator[None]:
    """Say what went wrong inside `tokenizers`, whose panics are no Exceptions."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise ArgumentError(f"{what}: {type(error).__name__}: {str(error)[:200]}") from error


def read_tokenizer(folder: Path, layout: CheckpointLayout) -> SubwordTokenizer:
    """A folder's tokenizer: tokenizer.json, or BERT's vocab.txt, or RoBERTa's vocab.json and merges.txt."""
    if (folder / "tokenizer.json").exists():
        path = folder / "tokenizer.json"
        found = read_json(path)
        try:
            _check(found)
        except (ValueError, TypeError, AttributeError, LookupError) as error:
            raise ArgumentError(
                f"{path} is no tokenizer that regard uses: {shorten(str(error), 200)}"
            ) from None
        # What is not needed is left out. It is written anew, as names that occur twice would be read as other
        # values in Rust than those that were checked.
        text = json.dumps(found | {"decoder": None, "truncation": None, "padding": None})
        with guarded(f"{path} is no tokenizer"):
            tokenizer = _package().Tokenizer.from_str(text)
        return SubwordTokenizer(tokenizer, layout.vocabulary, folder)
    if not layout.family.bytes and (folder / "vocab.txt").exists():
        tokenizer = _word_pieces(folder, layout.vocabulary)
    elif layout.family.bytes and (folder / "vocab.json").exists() and (folder / "merges.txt").exists():
        tokenizer = _byte_pieces(folder, layout.vocabulary)
    else:
        also = "vocab.json and merges.txt" if layout.family.bytes else "vocab.txt"
        raise ArgumentError(f"{folder} has no tokenizer; load_encoder reads tokenizer.json, or {also}.")
    return SubwordTokenizer(tokenizer, layout.vocabulary, folder)


def _check(tokenizer: Mapping[str, Any]) -> None:
    """Raise ValueError if a tokenizer makes much more of a text than any real one, or has unknown parts."""
    growth = _grows(_chain(tokenizer.get("normalizer"), "normalizers"))
    for one in _chain(tokenizer.get("pre_tokenizer"), "pretokenizers"):
        growth *= _known(one, _PRE_TOKENIZERS)
        if one["type"] == "FixedLength" and one["length"] < 1:
            raise ValueError("its pieces have no length")
    if growth > _GROWTH:
        raise ValueError(
            f"its normalizer makes texts up to {growth:,.0f} times as long, and {_GROWTH:,} are allowed"
        )
    _check_marks(_chain(tokenizer.get("post_processor"), "processors"))
    _check_model(tokenizer["model"])


def _chain(given: Any, inner: str, depth: int = 0) -> list[Mapping[str, Any]]:
    """The steps of a part, one after the other; `inner` is what a Sequence calls them."""
    if given is None:
        return []
    if not isinstance(given, dict) or depth > _DEPTH:
        raise ValueError(f"a part of it is no object, or more than {_DEPTH} sequences deep")
    if given.get("type") != "Sequence":
        return [given]
    steps = [step for one in given[inner] for step in _chain(one, inner, depth + 1)]
    if len(steps) > _STEPS:
        raise ValueError(f"it has {len(steps):,} steps in a sequence, and {_STEPS} are allowed")
    return steps


def _known(step: Mapping[str, Any], growths: Mapping[str, int]) -> int:
    kind = step.get("type")
    if not isinstance(kind, str) or kind not in growths:
        raise ValueError(f"there is no {str(kind)[:40]!r} that regard knows")
    return growths[kind]


def _grows(steps: Sequence[Mapping[str, Any]]) -> float:
    """How many times longer a text can become by some normalizers."""
    growth, done = 1.0, set[str]()
    for step in steps:
        kind = step.get("type")
        if kind in _UNICODE:
            # what is normalized already grows no more, until something else is put in
            growth *= 1 if kind in done else _UNICODE[kind]
            done.add(kind)
            continue
        if kind == "Replace":
            growth *= _replaced(step)
        elif kind == "Prepend":
            growth *= 1 + _size(step["prepend"])  # of each part between special tokens, which may be one byte
        elif kind == "Precompiled":
            growth *= _compiled(step["precompiled_charsmap"])
        else:
            growth *= _known(step, _NORMALIZERS)
        done.clear()
    return growth


def _size(text: Any) -> int:
    if not isinstance(text, str):
        raise ValueError(f"it has {str(text)[:40]!r} where a text should be")
    return len(text.encode(errors="surrogatepass"))


def _replaced(step: Mapping[str, Any]) -> float:
    """A pattern may match nothing, and thus everywhere; a text only itself."""
    pattern, size = step["pattern"], _size(step["content"])
    text = pattern.get("String") if isinstance(pattern, dict) else pattern
    if isinstance(text, str) and text:
        return max(1.0, size / _size(text))
    return 1.0 + size


def _compiled(charsmap: Any) -> int:
    """SentencePiece's own: a table of characters, and what they become, each with a zero byte behind it."""
    content = base64.b64decode(charsmap)
    end = 4 + int.from_bytes(content[:4], "little")
    if len(content) < end:
        raise ValueError("its precompiled_charsmap is cut off")
    texts = content[end:]
    return max(1, *map(len, texts.split(b"\0")))


def _check_marks(steps: Sequence[Mapping[str, Any]]) -> None:
    """How many marks are put around sentences, and how often a sentence is repeated."""
    added, copies = 0, 1
    for step in steps:
        kind = step.get("type")
        if kind == "TemplateProcessing":
            sizes = {name: len(mark["ids"]) for name, mark in step["special_tokens"].items()}
            for pieces in (step["single"], step["pair"]):
                added += sum(sizes[one["SpecialToken"]["id"]] for one in pieces if "SpecialToken" in one)
            copies *= max(1, sum("Sequence" in one for one in step["single"]))
        elif kind not in ("BertProcessing", "RobertaProcessing", "ByteLevel"):
            raise ValueError(f"there is no {str(kind)[:40]!r} that regard knows")
    if added > _MARKS_ADDED or copies > _COPIES:
        raise ValueError(f"it adds {added:,} marks to a sentence, or repeats it {copies:,} times")


def _check_model(model: Mapping[str, Any]) -> None:
    """What stands before or behind pieces is added to each; merges that are shorter panic in Rust."""
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(name) is not None and _size(model[name]) > _AFFIX:
            raise ValueError(f"its {name} has {_size(model[name]):,} bytes, and {_AFFIX} are allowed")
    if not 0 <= model.get("max_input_chars_per_word", 0) <= _WORD:
        raise ValueError(f"its max_input_chars_per_word is above {_WORD:,}")
    prefix = _size(model.get("continuing_subword_prefix") or "")
    for merge in model.get("merges") or () if prefix else ():
        second = merge.partition(" ")[2] if isinstance(merge, str) else merge[1]
        if len(second.encode()[:prefix].decode(errors="ignore").encode()) < prefix:
            raise ValueError(f"it merges {second[:40]!r}, which is shorter than the prefix of its pieces")


def _word_pieces(folder: Path, vocabulary: int) -> Any:
    """BERT's tokenizer: Devlin et al. 2019, section 3; the marks are [CLS] and [SEP]."""
    package = _package()
    lines = read_text(folder / "vocab.txt").replace("\r\n", "\n").removesuffix("\n").split("\n")
    numbers = {line: i for i, line in enumerate(lines)}
    marks = _marks(
        folder / "vocab.txt", numbers, vocabulary, ["[CLS]", "[SEP]", "[UNK]"], ["[PAD]", "[MASK]"]
    )
    options = _options(folder)
    with guarded(f"{folder / 'vocab.txt'} is no vocabulary"):
        tokenizer = package.Tokenizer(package.models.WordPiece(numbers, unk_token="[UNK]"))
        tokenizer.normalizer = package.normalizers.BertNormalizer(
            clean_text=True,
            handle_chinese_chars=options.get("tokenize_chinese_chars") is not False,
            strip_accents=options.get("strip_accents") if "strip_accents" in options else None,
            lowercase=options.get("do_lower_case") is not False,
        )
        tokenizer.pre_tokenizer = package.pre_tokenizers.BertPreTokenizer()
        tokenizer.add_special_tokens(marks)
        tokenizer.post_processor = package.processors.BertProcessing(
            ("[SEP]", numbers["[SEP]"]), ("[CLS]", numbers["[CLS]"])
        )
    return tokenizer


def _byte_pieces(folder: Path, vocabulary: int) -> Any:
    """RoBERTa's tokenizer, pieces of bytes: Radford et al. 2019, section 2.2; the marks are <s> and </s>."""
    package = _package()
    numbers = read_json(folder / "vocab.json")
    wrong = next((name for name, i in numbers.items() if isinstance(i, bool) or not isinstance(i, int)), None)
    if wrong is not None:
        raise ArgumentError(f"{folder / 'vocab.json'} gives {wrong[:40]!r} a number that is none.")
    marks = _marks(folder / "vocab.json", numbers, vocabulary, ["<s>", "</s>"], ["<pad>", "<unk>", "<mask>"])
    lines = read_text(folder / "merges.txt").replace("\r\n", "\n").split("\n")
    merges = [tuple(line.split(" ")) for line in lines if line and not line.startswith("#version")]
    before = _options(folder).get("add_prefix_space") is True
    with guarded(f"{folder / 'vocab.json'} and merges.txt are no tokenizer"):
        tokenizer = package.Tokenizer(package.models.BPE(numbers, merges))
        tokenizer.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=before)
        tokenizer.add_special_tokens(marks)
        tokenizer.post_processor = package.processors.RobertaProcessing(
            ("</s>", numbers["</s>"]), ("<s>", numbers["<s>"]), add_prefix_space=before
        )
    return tokenizer


def _marks(
    path: Path, numbers: dict[str, int], vocabulary: int, needed: list[str], more: list[str]
) -> list[str]:
    """The special marks of a vocabulary; its numbers are checked on the way."""
    missing = [mark for mark in needed if mark not in numbers]
    if missing:
        raise ArgumentError(f"{path} lacks {' and '.join(missing)}, which every sentence needs.")
    least, largest = min(numbers.values()), max(numbers.values())
    if least < 0 or largest >= vocabulary:
        raise ArgumentError(
            f"{path} has tokens from {least} to {largest} and the model has vectors for 0 to "
            f"{vocabulary - 1}; take both from the same folder."
        )
    return [mark for mark in (*needed, *more) if mark in numbers]


def _options(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json, whose true and false are all that is read; it may be absent."""
    path = folder / "tokenizer_config.json"
    found = read_json(path) if path.exists() else {}
    return {name: value for name, value in found.items() if isinstance(value, bool)}


def _package() -> Any:
    try:
        import tokenizers
        import tokenizers.models
        import tokenizers.normalizers
        import tokenizers.pre_tokenizers
        import tokenizers.processors
    except ImportError:
        raise ArgumentError(
            "load_encoder needs the package tokenizers, which is not installed: pip install tokenizers."
        ) from None
    return tokenizers

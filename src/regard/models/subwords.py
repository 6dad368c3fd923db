"""Subwords: the tokenizers of pretrained models, from sentences to token numbers and back to characters."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from regard.errors import ArgumentError
from regard.models.layouts import Layout, read_json, read_text


class Pieces(NamedTuple):
    """The tokens of a sentence, their names, and the characters [start, stop) of each; None for marks."""

    tokens: list[int]
    names: list[str]
    spans: list[tuple[int, int] | None]


class Subwords:
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

    def __call__(self, sentences: Sequence[str]) -> list[Pieces]:
        """The tokens of each sentence, start and end mark included."""
        with guarded("these sentences cannot be tokenized"):
            found = self.tokenizer.encode_batch(list(sentences))
        return [Pieces(one.ids, one.tokens, _spans(one)) for one in found]

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


def read_subwords(folder: Path, layout: Layout) -> Subwords:
    """A folder's tokenizer: tokenizer.json, or BERT's vocab.txt, or RoBERTa's vocab.json and merges.txt."""
    if (folder / "tokenizer.json").exists():
        text = read_text(folder / "tokenizer.json")
        with guarded(f"{folder / 'tokenizer.json'} is no tokenizer"):
            tokenizer = _package().Tokenizer.from_str(text)
        return Subwords(tokenizer, layout.vocabulary, folder)
    if not layout.family.bytes and (folder / "vocab.txt").exists():
        tokenizer = _word_pieces(folder, layout.vocabulary)
    elif layout.family.bytes and (folder / "vocab.json").exists() and (folder / "merges.txt").exists():
        tokenizer = _byte_pieces(folder, layout.vocabulary)
    else:
        also = "vocab.json and merges.txt" if layout.family.bytes else "vocab.txt"
        raise ArgumentError(f"{folder} has no tokenizer; load_encoder reads tokenizer.json, or {also}.")
    return Subwords(tokenizer, layout.vocabulary, folder)


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

"""The file format of `LexicalAligner`: one safetensors file with word lists and expected counts."""

import json
import os
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from regard._util.files import check_loadable, open_regular, write_atomic
from regard.errors import ArgumentError
from regard.translation.alignment.lexicon import Lexicon, WordPairs
from regard.translation.alignment.vocabulary import Vocabulary

if TYPE_CHECKING:
    from regard.translation.alignment.lexical_aligner import LexicalAligner

FORMAT, VERSION = "regard aligner", 1
_MAX_HEADER_BYTES = 1 << 16
_SIDES = ("source", "target")
_SURROGATES = "surrogatepass"  # a word in Python may contain a lone surrogate
_DTYPES = {
    "source.words": np.uint8,  # UTF-8, separated by line breaks
    "target.words": np.uint8,
    "pairs": np.int64,  # source id × target vocabulary size + target id, ascending
    "counts": np.float32,  # expected number of links for each pair
    "source.frequencies": np.int64,  # occurrences of each word
    "target.frequencies": np.int64,
    "source.null": np.float64,  # p(word | null)
    "target.null": np.float64,
    "source.jumps": np.float64,  # p(jump) between source words
    "target.jumps": np.float64,
}


def write_aligner(path: str | os.PathLike[str], aligner: "LexicalAligner") -> None:
    """Write an aligner to a file atomically."""
    pairs = aligner.lexicon.pairs
    arrays: dict[str, NDArray[Any]] = {
        "pairs": pairs.keys,
        "counts": aligner.lexicon.counts.astype(np.float32),
    }
    for side, name in enumerate(_SIDES):
        text = "\n".join(pairs.words[side].numbers)
        arrays[f"{name}.words"] = np.frombuffer(text.encode(errors=_SURROGATES), dtype=np.uint8)
        arrays[f"{name}.frequencies"] = aligner.lexicon.frequencies[side]
        arrays[f"{name}.null"] = aligner.null[1 - side]  # in direction 0, target words are observed
        arrays[f"{name}.jumps"] = aligner.jumps[side]  # in direction 0, jumps are between source words
    write_atomic(path, save(arrays, {"format": FORMAT, "version": str(VERSION)}))


def read_aligner(path: str | os.PathLike[str]) -> "LexicalAligner":
    """Read and check an aligner."""
    from regard.translation.alignment.lexical_aligner import LexicalAligner

    name = os.fspath(path)
    check_loadable(path)
    _check_header(path)
    with open_regular(path) as file:
        content = file.read()
    try:
        arrays = load(content)
        _check_arrays(arrays)
        words = _read_words(arrays["source.words"]), _read_words(arrays["target.words"])
        _check_values(arrays, words)
    except (SafetensorError, ValueError, KeyError) as error:
        raise ArgumentError(
            f"{name!r} is corrupted ({error}). Train the aligner again with regard align --save."
        ) from None
    frequencies = arrays["source.frequencies"], arrays["target.frequencies"]
    lexicon = Lexicon(WordPairs(words, arrays["pairs"]), frequencies)
    lexicon.update(arrays["counts"].astype(np.float64))
    return LexicalAligner(
        lexicon,
        (arrays["target.null"], arrays["source.null"]),
        (arrays["source.jumps"], arrays["target.jumps"]),
    )


def _check_header(path: str | os.PathLike[str]) -> None:
    """Raise unless the header identifies an aligner in this version of the format."""
    name = os.fspath(path)
    with open_regular(path) as file:
        start = file.read(8 + _MAX_HEADER_BYTES)
    length = int.from_bytes(start[:8], "little")
    try:
        metadata = json.loads(start[8 : 8 + length])["__metadata__"]
        format, version = metadata["format"], int(metadata["version"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        format, version = None, 0
    if format != FORMAT:
        raise ArgumentError(
            f"{name!r} is not an aligner. Pass a file written by regard align --save; for a folder "
            "written by regard train, use --model."
        )
    if version != VERSION:
        raise ArgumentError(
            f"{name!r} uses version {version} of the aligner format; this version of regard reads "
            f"version {VERSION}. "
            f"{'Upgrade regard' if version > VERSION else 'Train the aligner again with --save'}."
        )


def _check_arrays(arrays: dict[str, NDArray[Any]]) -> None:
    if arrays.keys() != _DTYPES.keys():
        raise ValueError(f"unexpected arrays: {', '.join(sorted(arrays))}")
    for key, dtype in _DTYPES.items():
        if arrays[key].dtype != dtype or arrays[key].ndim != 1:
            raise ValueError(
                f"{key} is a {arrays[key].ndim}-dimensional array of {arrays[key].dtype}, not a "
                f"1-dimensional array of {np.dtype(dtype)}"
            )


def _read_words(array: NDArray[Any]) -> Vocabulary:
    words = array.tobytes().decode(errors=_SURROGATES).split("\n")
    vocabulary = Vocabulary(words)
    if len(vocabulary) != len(words):
        raise ValueError("a word occurs twice")
    return vocabulary


def _check_values(arrays: dict[str, NDArray[Any]], words: tuple[Vocabulary, Vocabulary]) -> None:
    keys, counts = arrays["pairs"], arrays["counts"]
    if not len(keys) or len(keys) != len(counts):
        raise ValueError(f"it has {len(keys)} pairs and {len(counts)} counts")
    if keys[0] < 0 or keys[-1] >= len(words[0]) * len(words[1]) or (np.diff(keys) <= 0).any():
        raise ValueError("pairs are out of range or not sorted")
    for side, vocabulary in zip(_SIDES, words, strict=True):
        null, jumps = arrays[f"{side}.null"], arrays[f"{side}.jumps"]
        frequencies = arrays[f"{side}.frequencies"]
        if {len(null), len(frequencies)} != {len(vocabulary)} or len(jumps) % 2 == 0:
            raise ValueError(f"{side}.null, {side}.frequencies or {side}.jumps has the wrong length")
        if (frequencies < 0).any():
            raise ValueError(f"{side}.frequencies contains negative values")
        for name, values in ((f"{side}.null", null), (f"{side}.jumps", jumps)):
            if not ((values > 0) & (values <= 1)).all():  # rejects NaN too
                raise ValueError(f"{name} contains a value that is not a probability above 0")
    if not (np.isfinite(counts).all() and (counts >= 0).all()):
        raise ValueError("counts contains negative or non-finite values")

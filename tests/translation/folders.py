"""Small model folders with random weights; helpers that read and corrupt files."""

import resource
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest
import torch

from regard.errors import ArgumentError
from regard.translation.alignment.alignment_head import AlignmentHead
from regard.translation.config import TranslationConfig
from regard.translation.model_folder import write_config
from regard.translation.tokens import Tokenizer, TokenizerPair
from regard.translation.training.checkpoint import write_parameters, write_tokens

TEXT = [
    "ein Hund bellt laut. und?",
    "zwei Katzen schlafen heute gern",
    "eine Frau singt sehr laut und lacht",
    "a dog barks loudly",
    "two cats sleep gladly today",
    "a woman sings very loudly and laughs!",
] * 5


def tokens(kind: str = "bpe", shared: bool = True) -> TokenizerPair:
    """Return a shared vocabulary, or two of different sizes."""
    source = Tokenizer.learn(TEXT, kind=kind, size=90)
    return TokenizerPair(source, source if shared else Tokenizer.learn(TEXT, kind=kind, size=80))


def config(kind: str = "transformer", max_tokens: int = 40, more: Sequence[str] = ()) -> TranslationConfig:
    """Return the config of a small model."""
    settings = ["model.width=16", "model.layers=2", "model.heads=2", f"corpus.max_tokens={max_tokens}"]
    return TranslationConfig.preset("tiny", kind).override([*settings, "tokens.kind=bpe", *more])


def write(
    folder: Path, kind: str = "transformer", max_tokens: int = 40, seed: int = 0, more: Sequence[str] = ()
) -> Path:
    """Write a model folder."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    settings = config(kind, max_tokens, more)
    sides = tokens(shared=settings.tokens.shared)
    model = settings.model.build(sides.sizes())
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)  # makes ties unlikely, so rounding does not matter
    head = {} if kind == "plain" else {"alignment": AlignmentHead(layer=0, shift="output").to_dict()}
    write_config(folder, settings, **head)
    write_tokens(folder, sides)
    write_parameters(folder, model.state_dict())
    return folder


def content(folder: Path) -> dict[str, bytes]:
    """Return the contents of all files in a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def check_flipped_bits(
    files: Iterable[Path], read: Callable[[], object], message: str, bits: Sequence[int] | int = 8
) -> None:
    """Flip these bits, or this number of random bits, in each file: each flip must make `read` fail."""
    rng = Random(0)
    for path in files:
        whole = path.read_bytes()
        for bit in rng.sample(range(8 * len(whole)), bits) if isinstance(bits, int) else bits:
            damaged = bytearray(whole)
            damaged[bit // 8] ^= 1 << bit % 8
            path.write_bytes(damaged)
            with pytest.raises(ArgumentError, match=message):
                read()
        path.write_bytes(whole)
    read()


@contextmanager
def no_file_larger_than(size: int) -> Iterator[None]:
    """Make larger writes fail, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

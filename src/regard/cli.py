"""The command line: `regard embed`, `regard compare` and `regard attended`."""

import json
import sys
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from regard import __version__
from regard.errors import ArgumentError, RegardError
from regard.mechanism.files import write_whole
from regard.models.words import bar

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor

    from regard.models.encoders import Embedded
    from regard.models.pretrained import PretrainedEncoder

BAR = 20  # characters
NUMBERS = 6  # of each vector that are shown

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Model = Annotated[str, typer.Option(help='"minilm", or a folder with a BERT, RoBERTa, DistilBERT or MiniLM.')]
Word = Annotated[str, typer.Option(help="A word of the sentence.")]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; what regard refuses is one line on stderr, and exit status 2."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without such characters shows others
    try:
        app(args=None if arguments is None else list(arguments), prog_name="regard")
    except (RegardError, OSError) as error:
        message = str(error)
        if isinstance(error, OSError) and error.filename and error.strerror:
            message = f"{error.filename}: {error.strerror}"
        print(f"regard: {_plain(message)}", file=sys.stderr)
        sys.exit(2)


def _version(asked: bool) -> None:
    if asked:
        print(f"regard {__version__}")
        raise typer.Exit


@app.callback()
def _about(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Attention that is fast and can be looked at."""


@app.command()
def embed(
    sentences: Annotated[list[str] | None, typer.Argument(help="Sentences; quote each.")] = None,
    file: Annotated[
        Path | None, typer.Option(help="A file with a sentence on each line; - is stdin.")
    ] = None,
    model: Model = "minilm",
    layer: Annotated[int | None, typer.Option(help="Of this layer alone; 0 is the embedding.")] = None,
    output: Annotated[
        Path | None, typer.Option(help="Write the vectors whole: a .safetensors, .npy or .json file.")
    ] = None,
) -> None:
    """A vector for each word of a sentence: shown in short, or written whole."""
    given = [*(sentences or []), *([] if file is None else _lines(file))]
    if not given:
        raise ArgumentError('embed got no sentences; give some: regard embed "Dogs bark." or --file FILE.')
    if output is not None and output.suffix not in _WRITERS:
        raise ArgumentError(f"--output is {str(output)!r}; it can end in {', '.join(_WRITERS)}.")
    encoder = _load(model)
    if layer is not None and not -encoder.layers <= layer < encoder.layers:
        raise ArgumentError(
            f"--layer is {layer} and this model has layers 0 to {encoder.layers - 1}; −1 is the last."
        )
    embedded = encoder.embed(given)
    if output is not None:
        write_whole(output, _WRITERS[output.suffix](embedded, layer))
        size = "every layer" if layer is None else f"layer {layer % encoder.layers}"
        words = sum(map(len, embedded))
        print(
            f"{output}: {len(embedded)} sentences, {words} words, {size}, {encoder.recipe.width} numbers each"
        )
        return
    _show_vectors(embedded, (encoder.best_layer if layer is None else layer) % encoder.layers)


@app.command()
def compare(
    first: Annotated[str, typer.Argument(help="A sentence; quote it.")],
    second: Annotated[str, typer.Argument(help="Another one.")],
    word: Annotated[list[str], typer.Option(help="A word of both; give it twice for one of each.")],
    model: Model = "minilm",
) -> None:
    """How alike a word is in two sentences, layer by layer."""
    if len(word) > 2:
        raise ArgumentError(f"compare got {len(word)} words; give one for both sentences, or one for each.")
    encoder = _load(model)
    found = encoder.compare(first, second, word=word[0] if len(word) == 1 else (word[0], word[1]))
    console = _console()
    for name, sentence in zip(found.words, found.sentences, strict=True):
        console.print(f"{_plain(name)}: {_plain(sentence)}")
    console.print(f"\n{'layer':>9}  cosine", style="bold")
    best = found.best_layer % encoder.layers
    for layer, cosine in enumerate(found.similarities.tolist()):
        name = "embedding" if layer == 0 else str(layer)
        mark = "  tells meanings apart best" if layer == best and encoder.best_layer != -1 else ""
        console.print(f"{name:>9}  {cosine:6.3f}  {bar(cosine, BAR):{BAR if mark else 0}}{mark}".rstrip())
    console.print(
        "\nThe cosine of the word's two vectors: the embedding knows the word and its place alone, and each "
        "layer has seen more of the sentence around it.",
        style="dim",
    )


@app.command()
def attended(
    sentence: Annotated[str, typer.Argument(help="A sentence; quote it.")],
    word: Word,
    model: Model = "minilm",
    layer: Annotated[int | None, typer.Option(help="From 1 on; the mean of all by default.")] = None,
    head: Annotated[int | None, typer.Option(help="From 0 on; the mean of all by default.")] = None,
) -> None:
    """What a word of a sentence attends to: the weights of its attention, which add up to 1."""
    found = _load(model).attended(sentence, word, layer=layer, head=head)
    names = _padded([_plain(one.word) for one in found])
    console, most = _console(), max(one.weight for one in found)
    for name, one in zip(names, found, strict=True):
        console.print(f"{name}  {one.weight:5.3f}  {bar(one.weight / most, BAR)}".rstrip())


def _load(model: str) -> "PretrainedEncoder":
    from regard.models.pretrained import load_encoder

    return load_encoder(model)


def _lines(path: Path) -> list[str]:
    """The lines of a file that are not empty."""
    try:
        text = sys.stdin.read() if str(path) == "-" else path.read_text("utf-8")
    except UnicodeDecodeError:
        raise ArgumentError(f"{str(path)!r} is no UTF-8 text; convert it first: iconv -t utf-8.") from None
    return [line for line in text.splitlines() if line.strip()]


def _show_vectors(embedded: Sequence["Embedded"], layer: int) -> None:
    console = _console()
    for each in embedded:
        console.print(_plain(each.sentence), style="bold")
        names = _padded(["word", *map(_plain, each.words)])
        console.print(f"  {names[0]}  {'length':>7}  first numbers at layer {layer}", style="dim")
        for name, vector in zip(names[1:], each.vectors[layer], strict=True):
            numbers = " ".join(f"{number:7.3f}" for number in vector[:NUMBERS].tolist())
            console.print(f"  {name}  {float(vector.norm()):7.3f}  {numbers} …")


def _write_safetensors(embedded: Sequence["Embedded"], layer: int | None) -> bytes:
    """A tensor for each sentence, named by its number; the words are in the metadata."""
    from safetensors.torch import save

    tensors = {str(i): _chosen(each, layer).contiguous() for i, each in enumerate(embedded)}
    words = {str(i): json.dumps(each.words, ensure_ascii=False) for i, each in enumerate(embedded)}
    return save(tensors, words)


def _write_npy(embedded: Sequence["Embedded"], layer: int | None) -> bytes:
    """The words of all sentences in one array: (words, m), or (layers, words, m)."""
    import numpy
    import torch

    file = BytesIO()
    numpy.save(file, torch.cat([_chosen(each, layer) for each in embedded], -2).numpy(), allow_pickle=False)
    return file.getvalue()


def _write_json(embedded: Sequence["Embedded"], layer: int | None) -> bytes:
    """A list of sentences with their words and vectors."""
    found = [
        {"sentence": each.sentence, "words": each.words, "vectors": _chosen(each, layer).tolist()}
        for each in embedded
    ]
    return json.dumps(found, ensure_ascii=False).encode()


_WRITERS = {".safetensors": _write_safetensors, ".npy": _write_npy, ".json": _write_json}


def _chosen(embedded: "Embedded", layer: int | None) -> "Tensor":
    return embedded.vectors if layer is None else embedded.vectors[layer]


def _console() -> "Console":
    """Colours on a terminal, plain text elsewhere; lines are never broken."""
    from rich.console import Console

    return Console(soft_wrap=True, highlight=False, markup=False, emoji=False)


def _padded(names: Sequence[str]) -> list[str]:
    """Names of equal width, as a terminal counts it."""
    from rich.cells import cell_len

    width = max(map(cell_len, names))
    return [name + " " * (width - cell_len(name)) for name in names]


def _plain(text: str) -> str:
    """Without the characters that a terminal obeys."""
    return "".join(character if character.isprintable() else "�" for character in text)

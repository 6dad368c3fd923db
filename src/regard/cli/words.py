"""Words in context: `regard embed`, `regard compare` and `regard attended`."""

import json
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from regard._util.files import write_atomic
from regard._util.text import printable
from regard.cli.shared import check_encoder, check_output, console, padded, read
from regard.errors import ArgumentError

if TYPE_CHECKING:
    from torch import Tensor

    from regard.models.encoders.base import WordVectors
    from regard.models.encoders.pretrained import PretrainedEncoder

BAR = 20  # characters
NUMBERS = 6  # of each vector that are shown

Model = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        metavar="NAME",
        help='"minilm", or a folder with a BERT, RoBERTa, DistilBERT or MiniLM of Hugging Face\'s layout.',
    ),
]


def embed(
    sentences: Annotated[
        list[str] | None, typer.Argument(metavar="SENTENCE", help="Sentences, each in quotes.")
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A text file with a sentence on each line; - is stdin."),
    ] = None,
    model: Model = "minilm",
    layer: Annotated[
        int | None,
        typer.Option(
            help="The vectors of this layer: 0 is before any attention, -1 the last. By default the one that "
            "tells meanings apart best, and in a file all of them."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Write the vectors, with all their numbers, to a .safetensors, .npy or .json file.",
        ),
    ] = None,
) -> None:
    """Give each word of a sentence a vector: its first numbers are printed, or all are written to a file."""
    check_encoder(model)
    given = [*(sentences or []), *([] if file is None else _lines(file))]
    if not given:
        raise ArgumentError('embed got no sentences; give some: regard embed "Dogs bark." or --file FILE.')
    if output is not None:
        _check_output(output)
    encoder = _load(model)
    if layer is not None and not -encoder.layers <= layer < encoder.layers:
        raise ArgumentError(
            f"--layer is {layer} and this model has layers 0 to {encoder.layers - 1}; −1 is the last."
        )
    from regard._util.text import pluralize

    embedded = encoder.embed(given)
    if output is not None:
        write_atomic(output, _WRITERS[output.suffix](embedded, layer))
        size = "every layer" if layer is None else f"layer {layer % encoder.layers}"
        sizes = f"{pluralize(len(embedded), 'sentence')}, {pluralize(sum(map(len, embedded)), 'word')}"
        print(f"{output}: {sizes}, {size}, {pluralize(encoder.config.width, 'number')} each")
        return
    _show_vectors(embedded, (encoder.best_layer if layer is None else layer) % encoder.layers)


def compare(
    first: Annotated[str, typer.Argument(metavar="FIRST", help="A sentence in quotes.")],
    second: Annotated[str, typer.Argument(metavar="SECOND", help="Another one.")],
    word: Annotated[
        list[str],
        typer.Option(
            metavar="WORD", help="A word of both sentences; repeat it for two words, one of each sentence."
        ),
    ],
    model: Model = "minilm",
) -> None:
    """Tell how alike a word is in two sentences, layer by layer.

    Of vectors, layer 0 is before any attention; the attention of layer 0 makes those of layer 1, and so on.
    """
    check_encoder(model)
    if len(word) > 2:
        raise ArgumentError(f"compare got {len(word)} words; give one for both sentences, or one for each.")
    for sentence, one in zip((first, second), (word[0], word[-1]), strict=True):
        _check_word(sentence, one)
    from regard._util.text import bar

    encoder = _load(model)
    found = encoder.compare(first, second, word=(word[0], word[-1]))
    screen = console()
    for name, sentence in zip(found.words, found.sentences, strict=True):
        screen.print(f"{printable(name)}: {printable(sentence)}")
    screen.print(f"\n{'layer':>9}  cosine", style="bold")
    best = found.best_layer % encoder.layers
    for layer, cosine in enumerate(found.similarities.tolist()):
        name = "embedding" if layer == 0 else str(layer)
        mark = "  best on Word-in-Context" if layer == best and encoder.best_layer != -1 else ""
        screen.print(f"{name:>9}  {cosine:6.3f}  {bar(cosine, BAR):{BAR if mark else 0}}{mark}".rstrip())
    screen.print(
        "\nThe cosine of the word's two vectors: the embedding knows the word and its place alone, and each "
        "layer has seen more of the sentence around it.",
        style="dim",
    )


def attended(
    sentence: Annotated[str, typer.Argument(metavar="SENTENCE", help="A sentence in quotes.")],
    word: Annotated[
        str | None, typer.Argument(metavar="WORD", help="A word of it; or say it with --word.")
    ] = None,
    named: Annotated[str | None, typer.Option("--word", metavar="WORD", help="A word of it.")] = None,
    model: Model = "minilm",
    layer: Annotated[
        int | None,
        typer.Option(help="One layer, counted from 0; -1 is the last. By default the mean of all."),
    ] = None,
    head: Annotated[
        int | None,
        typer.Option(help="One head, counted from 0; -1 is the last. By default the mean of all."),
    ] = None,
) -> None:
    """Show what a word of a sentence attends to: its weights, which add up to 1."""
    given = [one for one in (word, named) if one is not None]
    if len(given) != 1:
        raise ArgumentError(
            f'attended got {len(given)} words; give one: regard attended "Dogs may bark." bark'
        )
    check_encoder(model)
    _check_word(sentence, given[0])
    from regard._util.text import bar

    found = _load(model).attended_words(sentence, given[0], layer=layer, head=head)
    names = padded([printable(one.word) for one in found])
    screen, most = console(), max(one.weight for one in found)
    for name, one in zip(names, found, strict=True):
        screen.print(f"{name}  {one.weight:5.3f}  {bar(one.weight / most, BAR)}".rstrip())


def _check_word(sentence: str, word: str) -> None:
    """Before a model is loaded, which takes seconds."""
    from regard.models.encoders.words import check_sentences, find_word, split_words

    (given,) = check_sentences([sentence])
    find_word(word, [one.text for one in split_words(given)], given)


def _check_output(path: Path) -> None:
    """Before anything is computed: a known ending, and a place to write to."""
    shown = repr(str(path))
    if path.name in _WRITERS:
        raise ArgumentError(f"--output is {shown}, an ending without a name; give one: vectors{path.name}.")
    if path.suffix not in _WRITERS:
        raise ArgumentError(f"--output is {shown}; it can end in {', '.join(_WRITERS)}.")
    check_output(path)


def _load(model: str) -> "PretrainedEncoder":
    from regard.models.encoders.pretrained import load_encoder

    return load_encoder(model)


def _lines(path: Path) -> list[str]:
    """The lines of a file that are not empty; str.splitlines would also cut at U+2028 and others."""
    return [line.removesuffix("\r") for line in read(path).split("\n") if line.strip()]


def _show_vectors(embedded: Sequence["WordVectors"], layer: int) -> None:
    screen = console()
    for each in embedded:
        screen.print(printable(each.sentence), style="bold")
        names = padded(["word", *map(printable, each.words)])
        screen.print(f"  {names[0]}  {'length':>7}  first numbers at layer {layer}", style="dim")
        for name, vector in zip(names[1:], each.vectors[layer], strict=True):
            numbers = " ".join(f"{number:7.3f}" for number in vector[:NUMBERS].tolist())
            screen.print(f"  {name}  {float(vector.norm()):7.3f}  {numbers} …")


def _write_safetensors(embedded: Sequence["WordVectors"], layer: int | None) -> bytes:
    """A tensor for each sentence, named by its number; the words are in the metadata."""
    from safetensors.torch import save

    tensors = {str(i): _chosen(each, layer).contiguous() for i, each in enumerate(embedded)}
    words = {str(i): json.dumps(each.words, ensure_ascii=False) for i, each in enumerate(embedded)}
    return save(tensors, words)


def _write_npy(embedded: Sequence["WordVectors"], layer: int | None) -> bytes:
    """The words of all sentences in one array: (words, m), or (layers, words, m)."""
    import numpy
    import torch

    file = BytesIO()
    numpy.save(file, torch.cat([_chosen(each, layer) for each in embedded], -2).numpy(), allow_pickle=False)
    return file.getvalue()


def _write_json(embedded: Sequence["WordVectors"], layer: int | None) -> bytes:
    """A list of sentences with their words and vectors."""
    found = [
        {"sentence": each.sentence, "words": each.words, "vectors": _chosen(each, layer).tolist()}
        for each in embedded
    ]
    return json.dumps(found, ensure_ascii=False).encode()


_WRITERS = {".safetensors": _write_safetensors, ".npy": _write_npy, ".json": _write_json}


def _chosen(embedded: "WordVectors", layer: int | None) -> "Tensor":
    return embedded.vectors if layer is None else embedded.vectors[layer]

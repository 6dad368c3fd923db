"""Contextual word vectors: `regard embed`, `regard compare` and `regard attention`."""

import json
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from regard._util.files import write_atomic
from regard._util.text import bar, pluralize, printable
from regard.cli.shared import check_encoder, check_output, console, index, print_table, read
from regard.errors import ArgumentError

if TYPE_CHECKING:
    from torch import Tensor

    from regard.models.encoders.base import WordVectors
    from regard.models.encoders.pretrained import PretrainedEncoder

BAR = 20  # width of a bar in characters
SHOWN_FEATURES = 6  # number of features to print per vector

Model = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        metavar="NAME",
        help='"minilm", or a folder with a Hugging Face BERT, RoBERTa, DistilBERT or MiniLM model.',
    ),
]


def embed(
    sentences: Annotated[
        list[str] | None, typer.Argument(metavar="SENTENCE", help="Sentences, each in quotes.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Text file with one sentence per line; - for stdin.")
    ] = None,
    model: Model = "minilm",
    layer: Annotated[
        int | None,
        typer.Option(
            help="Layer to use: 0 for the vectors before any attention, -1 for the last layer.",
            show_default="for minilm, the layer that best separates word senses; otherwise the last; with "
            "--output, all",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Write the full vectors to a .safetensors, .npy or .json file.",
        ),
    ] = None,
) -> None:
    """Compute contextual word vectors.

    Prints the first few features of each vector, or writes the full vectors to a file.

    Examples:
    regard embed "Dogs may bark."
    regard embed --file sentences.txt --output vectors.safetensors
    """
    check_encoder(model)
    texts = [*(sentences or []), *([] if file is None else _lines(file))]
    if not texts:
        raise ArgumentError(
            'embed needs sentences: pass them in quotes, as in regard embed "Dogs bark.", or use --file FILE.'
        )
    if output is not None:
        _check_output(output)
    encoder = _load(model)
    if layer is not None:
        layer = index("--layer", layer, encoder.layers)
    embedded = encoder.embed(texts)
    if output is not None:
        write_atomic(output, _WRITERS[output.suffix](embedded, layer))
        layers = "all layers" if layer is None else f"layer {layer}"
        sizes = f"{pluralize(len(embedded), 'sentence')}, {pluralize(sum(map(len, embedded)), 'word')}"
        print(f"{output}: {sizes}, {layers}, {pluralize(encoder.config.width, 'number')} each")
        return
    _show_vectors(embedded, encoder.best_layer % encoder.layers if layer is None else layer)


def compare(
    first: Annotated[str, typer.Argument(metavar="FIRST", help="A sentence in quotes.")],
    second: Annotated[str, typer.Argument(metavar="SECOND", help="Another sentence in quotes.")],
    word: Annotated[
        list[str],
        typer.Option(
            metavar="WORD",
            help="Word that occurs in both sentences. To compare different words, pass --word twice.",
        ),
    ],
    model: Model = "minilm",
) -> None:
    """Compare a word's vectors in two sentences, layer by layer.

    Layer 0 holds the vectors before any attention; attention layer 0 produces the vectors of layer 1, and so
    on.

    Examples:
    regard compare "We sat on the river bank." "The bank is closed." --word bank
    regard compare "A dog barks." "A cat sleeps." --word dog --word cat
    """
    check_encoder(model)
    if len(word) > 2:
        raise ArgumentError(f"compare got {len(word)} words; pass one, or one for each sentence.")
    _check_word(first, word[0])
    _check_word(second, word[-1])
    encoder = _load(model)
    comparison = encoder.compare(first, second, word=(word[0], word[-1]))
    screen = console()
    for name, sentence in zip(comparison.words, comparison.sentences, strict=True):
        screen.print(f"{printable(name)}: {printable(sentence)}")
    screen.print()
    best = None if encoder.best_layer == -1 else comparison.best_layer % encoder.layers
    rows = [
        [
            "embedding" if layer == 0 else str(layer),
            f"{cosine:.3f}",
            bar(cosine, BAR),
            "best on Word-in-Context" if layer == best else "",
        ]
        for layer, cosine in enumerate(comparison.similarities.tolist())
    ]
    print_table(rows, ["layer", "cosine", "", ""], justify="rrll")
    screen.print(
        "\nCosine similarity of the word's two vectors. The embedding depends only on the word and its "
        "position; each subsequent layer adds context.",
        style="dim",
        soft_wrap=not screen.is_terminal,
    )


def attention(
    sentence: Annotated[str, typer.Argument(metavar="SENTENCE", help="A sentence in quotes.")],
    word: Annotated[str | None, typer.Argument(metavar="WORD", help="Word in the sentence.")] = None,
    named: Annotated[
        str | None, typer.Option("--word", metavar="WORD", help="Same as the argument WORD.")
    ] = None,
    model: Model = "minilm",
    layer: Annotated[
        int | None,
        typer.Option(help="Layer to use, counted from 0; -1 is the last.", show_default="mean of all"),
    ] = None,
    head: Annotated[
        int | None,
        typer.Option(help="Head to use, counted from 0; -1 is the last.", show_default="mean of all"),
    ] = None,
) -> None:
    """Print how much a word attends to each word in its sentence. The weights sum to 1.

    Examples:
    regard attention "Dogs may bark at strangers." bark
    regard attention "Dogs may bark at strangers." bark --layer 0 --head 3
    """
    words = [each for each in (word, named) if each is not None]
    if len(words) != 1:
        raise ArgumentError(
            f'attention got {len(words)} words; pass one: regard attention "Dogs may bark." bark'
        )
    check_encoder(model)
    _check_word(sentence, words[0])
    attended = _load(model).attended_words(sentence, words[0], layer=layer, head=head)
    largest = max(each.weight for each in attended)
    print_table(
        [[printable(each.word), f"{each.weight:.3f}", bar(each.weight / largest, BAR)] for each in attended],
        justify="lrl",
    )


def _check_word(sentence: str, word: str) -> None:
    """Raise an error if the word is not in the sentence. Called before the model is loaded."""
    from regard._util.checks import check_sentences
    from regard.models.encoders.words import find_word, split_words

    (text,) = check_sentences([sentence])
    find_word(word, [each.text for each in split_words(text)], text)


def _check_output(path: Path) -> None:
    """Raise an error unless vectors can be written to the path."""
    if path.name in _WRITERS:
        raise ArgumentError(f"--output {str(path)!r} is only an extension; use vectors{path.name}.")
    if path.suffix not in _WRITERS:
        raise ArgumentError(f"--output {str(path)!r} must end in one of {', '.join(_WRITERS)}.")
    check_output(path)


def _load(model: str) -> "PretrainedEncoder":
    from regard.models.encoders.pretrained import load_encoder

    return load_encoder(model)


def _lines(path: Path) -> list[str]:
    """Return the non-empty lines of a file; str.splitlines would also split at characters such as U+2028."""
    return [line.removesuffix("\r") for line in read(path).split("\n") if line.strip()]


def _show_vectors(embedded: Sequence["WordVectors"], layer: int) -> None:
    screen = console()
    for each in embedded:
        screen.print(printable(each.sentence), style="bold")
        rows = [
            [printable(word), f"{float(vector.norm()):.3f}", _features(vector)]
            for word, vector in zip(each.words, each.vectors[layer], strict=True)
        ]
        print_table(rows, ["word", "length", f"first features at layer {layer}"], justify="lrl")


def _features(vector: "Tensor") -> str:
    return " ".join(f"{number:7.3f}" for number in vector[:SHOWN_FEATURES].tolist()) + " …"


def _write_safetensors(embedded: Sequence["WordVectors"], layer: int | None) -> bytes:
    """Serialize one tensor per sentence, named by sentence number, with the words in the metadata."""
    from safetensors.torch import save

    tensors = {str(i): _select(each, layer).contiguous() for i, each in enumerate(embedded)}
    words = {str(i): json.dumps(each.words, ensure_ascii=False) for i, each in enumerate(embedded)}
    return save(tensors, words)


def _write_npy(embedded: Sequence["WordVectors"], layer: int | None) -> bytes:
    """Serialize one array for the words of all sentences: (words, m), or (layers, words, m)."""
    import numpy
    import torch

    file = BytesIO()
    numpy.save(file, torch.cat([_select(each, layer) for each in embedded], -2).numpy(), allow_pickle=False)
    return file.getvalue()


def _write_json(embedded: Sequence["WordVectors"], layer: int | None) -> bytes:
    """Serialize a list of sentences with their words and vectors."""
    sentences = [
        {"sentence": each.sentence, "words": each.words, "vectors": _select(each, layer).tolist()}
        for each in embedded
    ]
    return json.dumps(sentences, ensure_ascii=False).encode()


_WRITERS = {".safetensors": _write_safetensors, ".npy": _write_npy, ".json": _write_json}


def _select(embedded: "WordVectors", layer: int | None) -> "Tensor":
    return embedded.vectors if layer is None else embedded.vectors[layer]

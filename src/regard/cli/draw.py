"""`regard draw`."""

import json
from functools import partial, reduce
from itertools import starmap
from operator import and_
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard._util.files import MAX_TEXT_BYTES, read_regular
from regard._util.text import printable, shorten
from regard.cli.options import PictureFile
from regard.cli.shared import check_encoder, check_input, check_picture, console, exclusive, index, load, read
from regard.errors import ArgumentError
from regard.models.layers.positions import KINDS, PositionKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from regard.inspection.layer_view import LayerView
    from regard.mechanism.masks.algebra import Mask

_appearance = partial(typer.Option, rich_help_panel="Appearance")
_with_model = partial(typer.Option, rich_help_panel="With --model")
_WEIGHTS = "a weights file"
_MAX_SIZE = 50_000  # maximum number of queries or keys in a mask
_DEFAULT_SIZE = {"mask": 12, "positions": 64}
_WIDTH, _HEADS = 64, 8  # dimensions of the position encodings
# options that apply to each kind of picture
_OPTIONS = {
    _WEIGHTS: ("--head", "--queries", "--keys", "--log"),
    "--model": ("--heads", "--layer", "--head", "--log"),
    "--mask": ("--size", "--queries", "--keys"),
    "--positions": ("--size",),
}


def draw(
    subject: Annotated[
        str | None,
        typer.Argument(
            metavar="WEIGHTS|SENTENCE",
            help="A .safetensors file written by Weights.save; or, with --model, a sentence in quotes.",
        ),
    ] = None,
    output: PictureFile = Path("picture.png"),
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            metavar="FOLDER",
            help="Draw this model's attention for SENTENCE: a folder written by regard train, an encoder "
            'folder, or "minilm".',
        ),
    ] = None,
    mask: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MASK",
            help="Draw a mask: causal, window:4, prefix:3, padding:5 or documents:3,4. Repeat to intersect "
            "masks.",
        ),
    ] = None,
    positions: Annotated[
        PositionKind | None,
        typer.Option(
            metavar="KIND", help=f"Draw a position encoding: {', '.join(KINDS[:-1])} or {KINDS[-1]}."
        ),
    ] = None,
    heads: Annotated[
        bool,
        _with_model(
            "--heads",
            help="For a translation model: draw every cross-attention head instead of the word alignment.",
        ),
    ] = False,
    layer: Annotated[
        int | None, _with_model(help="Layer to draw, counted from 0; -1 is the last.", show_default="all")
    ] = None,
    head: Annotated[
        int | None,
        _with_model(
            help="Head to draw, counted from 0; -1 is the last. Also applies to a weights file.",
            show_default="all",
        ),
    ] = None,
    size: Annotated[
        str | None,
        _appearance(
            metavar="N",
            help="Number of queries and keys in a mask, such as 12 or 8x12, or number of positions.",
            show_default="for a mask, its own size or 12; for positions, 64",
        ),
    ] = None,
    queries: Annotated[
        str | None,
        _appearance(
            metavar="TOKENS",
            help="Row labels: tokens separated by spaces, or a text file with one token per line.",
        ),
    ] = None,
    keys: Annotated[
        str | None, _appearance(metavar="TOKENS", help="Column labels, in the same format as --queries.")
    ] = None,
    title: Annotated[str | None, _appearance(metavar="TEXT", help="Title of the plot.")] = None,
    log: Annotated[
        bool, _appearance("--log", help="Logarithmic color scale, to distinguish small weights.")
    ] = False,
    dark: Annotated[bool, _appearance("--dark", help="Dark background.")] = False,
) -> None:
    """Draw attention weights, a model's attention, a mask or a position encoding.

    For a translation model, draws the word alignment between the sentence and its translation; for an
    encoder, every layer and head. For training curves, use regard curves.

    Examples:
    regard draw -m de-en "Zwei Hunde spielen."  # writes picture.png
    regard draw -m minilm "Dogs may bark." --layer -1 -o last.svg
    regard draw weights.safetensors --head 0 --dark
    regard draw --mask causal --mask window:4 --size 12
    regard draw --positions rotary
    """
    options = {
        "--heads": heads or None,
        "--layer": layer,
        "--head": head,
        "--size": size,
        "--queries": queries,
        "--keys": keys,
        "--log": log or None,
    }
    kind = _kind(subject, {"--model": model, "--mask": mask, "--positions": positions})
    if model is not None:
        check_encoder(model)
    _check_options(kind, [name for name, value in options.items() if value is not None])
    check_picture(output)
    style: dict[str, Any] = {"dark": dark} if title is None else {"dark": dark, "title": title}
    if kind == "--positions":
        summary = _draw_positions(positions or "", size, output, style)
    elif kind == "--mask":
        summary = _draw_mask([_parse_mask(rule) for rule in mask or ()], size, (queries, keys), output, style)
    elif model is not None:
        summary = _draw_model(model, subject or "", (heads, layer, head), output, {**style, "log": log})
    else:
        tokens = {"queries": _tokens(queries, "--queries"), "keys": _tokens(keys, "--keys")}
        summary = _draw_file(Path(subject or ""), head, output, {**style, **tokens, "log": log})
    for line in (*summary.split("\n"), f"Picture: {output}"):
        console().print(printable(line))


def _kind(subject: str | None, options: dict[str, object]) -> str:
    """Return the kind of picture; raise an error unless the arguments select exactly one."""
    if options["--model"] == "":
        raise ArgumentError('--model is empty; pass a folder, or "minilm".')
    if subject is not None and not subject.strip():
        raise ArgumentError("WEIGHTS or SENTENCE is empty; pass a file or a sentence.")
    kinds = [name for name, value in options.items() if value]
    if len(kinds) > 1:
        raise exclusive(*kinds)
    if not kinds:
        if subject is None:
            raise ArgumentError("draw needs a weights file, --model with a sentence, --mask, or --positions.")
        _check_file(Path(subject))
        return _WEIGHTS
    if kinds == ["--model"] and subject is None:
        raise ArgumentError('--model needs a sentence in quotes: regard draw -m minilm "Dogs bark."')
    if kinds != ["--model"] and subject is not None:
        raise ArgumentError(f"{kinds[0]} takes no file or sentence; remove {shorten(subject)!r}.")
    return kinds[0]


def _check_file(path: Path) -> None:
    if path.is_dir():
        raise ArgumentError(
            f"{str(path)!r} is a folder; use --model to draw its model's attention, or regard curves to draw "
            "its training curves."
        )
    if not path.exists() and len(str(path).split()) > 1:
        raise ArgumentError(
            f"The file {shorten(str(path))!r} does not exist. For a sentence, add --model FOLDER."
        )
    check_input(path, "WEIGHTS")


def _check_options(kind: str, options: list[str]) -> None:
    """Raise an error if an option does not apply to this kind of picture."""
    wrong = [name for name in options if name not in _OPTIONS[kind]]
    if wrong:
        valid = ", ".join(_OPTIONS[kind]) or "no options except --output, --title and --dark"
        raise ArgumentError(f"{wrong[0]} does not apply to {kind}, which accepts {valid}.")


def _draw_file(path: Path, head: int | None, output: Path, style: dict[str, Any]) -> str:
    from regard.mechanism.weights.weights import Weights
    from regard.plot.heatmaps import draw_weights

    weights = Weights.load(path)
    if head is not None:
        if not weights.has_heads:
            raise ArgumentError(f"--head {head}: the file has only one head; remove the option.")
        weights = weights.heads(index("--head", head, weights.shape[-3]))
    draw_weights(weights, output, **style)
    return f"{' × '.join(f'{n:,}' for n in weights.shape)} weights"


def _draw_model(
    model: str,
    sentence: str,
    selection: tuple[bool, int | None, int | None],
    output: Path,
    style: dict[str, Any],
) -> str:
    from regard.app.view_model import look_at_text, look_at_translations
    from regard.plot.heatmaps import draw_alignments

    if not _is_translator(Path(model)):
        from regard.models.encoders.pretrained import load_encoder

        if selection[0]:
            raise ArgumentError(
                f"--heads applies only to translation models; remove it, because all heads of {model!r} are "
                "drawn by default."
            )
        (view,) = look_at_text(load_encoder(model), [sentence]).inputs
        return _draw_layers(view.layers, view.texts, selection[1:], output, style)
    from regard.translation.alignment.cross_attention import cross_attention_layers

    translator = load(Path(model), device="cpu", aligning=selection == (False, None, None))
    cross_attention_layers(translator.model)  # raises an error for a model without attention
    (translation,) = translator.translate([sentence], alignment=True)
    if selection == (False, None, None):
        if style.pop("log"):
            raise ArgumentError("--log applies only to heads; add --heads, or remove --log.")
        draw_alignments(translation.alignment, output, **style)
        return translation.text
    (view,) = look_at_translations(translator, [translation]).inputs
    layers = [layer for layer in view.layers if layer.kind == "cross"]
    if not layers:
        raise ArgumentError(f"No heads to draw: {view.note or 'the sentence has no words'}.")
    return f"{translation.text}\n{_draw_layers(layers, view.texts, selection[1:], output, style)}"


def _draw_layers(
    layers: "Sequence[LayerView]", texts: Any, selection: Any, output: Path, style: dict[str, Any]
) -> str:
    """Draw the selected layers and heads, by default all."""
    from regard._util.text import pluralize
    from regard.plot.heatmaps import draw_heads, draw_weights

    layer, head = selection
    if layer is not None:
        layers = [layers[index("--layer", layer, len(layers))]]
    heads = int(layers[0].weights.shape[-3])
    if head is not None:
        head = index("--head", head, heads)
    tokens = [texts[layers[0].queries].tokens, texts[layers[0].keys].tokens]
    style = {**style, "queries": tokens[0], "keys": tokens[1]}
    weights = {
        view.label: view.weights if head is None else view.weights[..., head : head + 1, :, :]
        for view in layers
    }
    if len(weights) == 1 and head is not None:
        style.setdefault("title", f"{layers[0].label}, head {head}")
        draw_weights(next(iter(weights.values())), output, **style)
    else:
        draw_heads(weights, output, first=head or 0, **style)
    shown = f"{pluralize(len(weights), 'layer')} × {pluralize(heads if head is None else 1, 'head')}"
    return f"{shown}, {len(tokens[0])} × {len(tokens[1])} tokens"


def _draw_mask(
    rules: list[tuple[str, list[int]]],
    size: str | None,
    tokens: tuple[str | None, str | None],
    output: Path,
    style: dict[str, Any],
) -> str:
    shape = None if size is None else _shape(size)
    labels = [_tokens(tokens[0], "--queries"), _tokens(tokens[1], "--keys")]
    if shape is not None and any(labels):
        raise exclusive("--size", "--queries or --keys")
    from regard.plot.heatmaps import draw_mask

    mask = reduce(and_, starmap(_mask, rules))
    sizes: list[Any] = list(shape or mask.default_size() or (_DEFAULT_SIZE["mask"],) * 2)
    sides = [label or labels[1 - i] or sizes[i] for i, label in enumerate(labels)] if any(labels) else sizes
    draw_mask(mask, output, queries=sides[0], keys=sides[1], **style)
    return repr(mask)


def _parse_mask(rule: str) -> tuple[str, list[int]]:
    """Parse causal, window:4 or documents:3,4 into a name and numbers."""
    name, _, text = rule.partition(":")
    parts = text.split(",") if text else []
    numbers = [int(part) for part in parts if part.isdecimal() and len(part) < 7]
    if len(numbers) == len(parts):
        match name, numbers:
            case ("causal", []) | ("window" | "prefix" | "padding", [_]):
                return name, numbers
            case "documents", [_, *_] if all(numbers):
                return name, numbers
    raise ArgumentError(
        f"--mask is {shorten(rule)!r}; use causal, window:4, prefix:3, padding:5 or documents:3,4."
    )


def _mask(name: str, numbers: list[int]) -> "Mask":
    from regard.mechanism.masks.by_length import Documents, Padding
    from regard.mechanism.masks.by_position import Causal, Prefix, Window

    if name == "documents":
        return Documents(numbers)
    kinds = {"causal": Causal, "window": Window, "prefix": Prefix, "padding": Padding}
    return kinds[name](*numbers)


def _draw_positions(kind: str, size: str | None, output: Path, style: dict[str, Any]) -> str:
    length, columns = (_DEFAULT_SIZE["positions"],) * 2 if size is None else _shape(size)
    if length != columns:
        raise ArgumentError(f"--size is {size!r}; for positions, pass one number: --size {length}.")
    from torch import manual_seed

    from regard.models.layers.position_encoding import PositionSizes, make_positions
    from regard.plot.heatmaps import draw_positions

    manual_seed(0)
    encoding = make_positions(kind, PositionSizes(_WIDTH, _HEADS, _WIDTH, max_positions=length))
    title = f"{kind} positions" + (", untrained" if any(True for _ in encoding.parameters()) else "")
    draw_positions(encoding, output, length=length, **{"title": title, **style})
    return title


def _shape(size: str) -> tuple[int, int]:
    """Parse --size: 12, or 8x12."""
    numbers = size.lower().split("x")
    if len(numbers) > 2 or not all(n.isdecimal() and len(n) < 7 and int(n) for n in numbers):
        raise ArgumentError(
            f"--size is {shorten(size)!r}; pass one number, or queries x keys, such as 12 or 8x12."
        )
    if max(map(int, numbers)) > _MAX_SIZE:
        raise ArgumentError(f"--size is {size}; the maximum is {_MAX_SIZE:,}.")
    return int(numbers[0]), int(numbers[-1])


def _tokens(value: str | None, option: str) -> list[str] | None:
    """Return the lines of a file, or the words in `value`."""
    if value is None:
        return None
    if len(value) < 256 and Path(value).is_file():
        return [line.removesuffix("\r") for line in read(Path(value), option).removesuffix("\n").split("\n")]
    tokens = value.split()
    if not tokens:
        raise ArgumentError(f"{option} is {value!r}; pass one or more tokens separated by spaces.")
    return tokens


def _is_translator(folder: Path) -> bool:
    from regard.translation.model_folder import CONFIG, FORMAT

    try:
        config = json.loads(read_regular(folder / CONFIG, MAX_TEXT_BYTES))
    except (OSError, ValueError, RecursionError):
        return False  # the error is reported when the model is loaded
    kind = FORMAT.rpartition(" ")[0]  # without the version
    return isinstance(config, dict) and str(config.get("format")).startswith(kind)

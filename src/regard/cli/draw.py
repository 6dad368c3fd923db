"""`regard draw`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import typer

from regard._util.files import MAX_TEXT_BYTES, read_regular
from regard._util.text import printable, shorten
from regard.cli.evaluate import check_picture
from regard.cli.shared import check_encoder, check_input, console, load, read
from regard.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from regard.inspection.layer_view import LayerView
    from regard.mechanism.mask_algebra import Mask

Positions = Literal["sinusoidal", "learned", "rotary", "alibi", "t5"]

_SHOW = "How it is drawn"
_MODEL = "With --model"
_LARGEST = 50_000  # queries and keys of a mask
_SIZE = {"mask": 12, "positions": 64}
_WIDTH, _HEADS = 64, 8  # of positions
# what goes with each kind of picture
_GOES = {
    "a file of weights": ("--head", "--queries", "--keys", "--log"),
    "--model": ("--heads", "--layer", "--head", "--log"),
    "--mask": ("--size", "--queries", "--keys"),
    "--positions": ("--size",),
}


def draw(
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="WEIGHTS|SENTENCE",
            help="A .safetensors file that Weights.save wrote; or, with --model, a sentence in quotes.",
        ),
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="The picture: a .png, .svg or .pdf file.")
    ] = Path("picture.png"),
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            metavar="FOLDER",
            help="Draw what this model attends to in SENTENCE: a folder that regard train wrote, one with an "
            'encoder, or "minilm".',
        ),
    ] = None,
    mask: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RULE",
            help="Draw a mask: causal, window:4, prefix:3, padding:5 or documents:3,4. Repeated, all of them "
            "hold.",
        ),
    ] = None,
    positions: Annotated[
        Positions | None,
        typer.Option(
            metavar="KIND", help=f"Draw how positions are written: {', '.join(get_args(Positions))}."
        ),
    ] = None,
    heads: Annotated[
        bool,
        typer.Option(
            "--heads",
            help="Of a translator: every head that looks at the source, instead of the alignment of words.",
            rich_help_panel=_MODEL,
        ),
    ] = False,
    layer: Annotated[
        int | None,
        typer.Option(
            help="One layer, counted from 0; -1 is the last. By default all.", rich_help_panel=_MODEL
        ),
    ] = None,
    head: Annotated[
        int | None,
        typer.Option(
            help="One head, counted from 0; -1 is the last. Also of a file of weights. By default all.",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    size: Annotated[
        str | None,
        typer.Option(
            metavar="N",
            help="How many queries and keys a mask has, 12 or 8x12 [default: 12]; how many positions "
            "[default: 64].",
            rich_help_panel=_SHOW,
        ),
    ] = None,
    queries: Annotated[
        str | None,
        typer.Option(
            metavar="TOKENS",
            help="What the rows are called: tokens between blanks, or a text file with one on each line.",
            rich_help_panel=_SHOW,
        ),
    ] = None,
    keys: Annotated[
        str | None,
        typer.Option(metavar="TOKENS", help="The same for the columns.", rich_help_panel=_SHOW),
    ] = None,
    title: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="What is written above the picture.", rich_help_panel=_SHOW),
    ] = None,
    log: Annotated[
        bool,
        typer.Option(
            "--log", help="Logarithmic colours, by which small weights differ, too.", rich_help_panel=_SHOW
        ),
    ] = False,
    dark: Annotated[bool, typer.Option("--dark", help="Light on dark paper.", rich_help_panel=_SHOW)] = False,
) -> None:
    """Draw weights, what a model attends to, a mask or positions.

    A translator's picture is the alignment of a sentence and its translation; an encoder's has every layer
    and head. How models learned is drawn by regard curves.
    """
    given = {
        "--heads": heads or None,
        "--layer": layer,
        "--head": head,
        "--size": size,
        "--queries": queries,
        "--keys": keys,
        "--log": log or None,
    }
    kind = _kind(what, model, mask, positions)
    _check(kind, [name for name, value in given.items() if value is not None])
    check_picture(output, "--output")
    look: dict[str, Any] = {"dark": dark} if title is None else {"dark": dark, "title": title}
    if kind == "--positions":
        about = _draw_positions(positions or "sinusoidal", size, output, look)
    elif kind == "--mask":
        about = _draw_mask(mask or [], size, (queries, keys), output, look)
    elif model is not None:
        about = _draw_model(model, what or "", (heads, layer, head), output, {**look, "log": log})
    else:
        tokens = {"queries": _tokens(queries, "--queries"), "keys": _tokens(keys, "--keys")}
        about = _draw_file(Path(what or ""), head, output, {**look, **tokens, "log": log})
    for line in (*about.split("\n"), f"The picture is {output}."):
        console().print(printable(line))


def _kind(what: str | None, model: str | None, mask: list[str] | None, positions: str | None) -> str:
    """What is to be drawn: one thing."""
    if model is not None and not model:
        raise ArgumentError('--model is empty; name a folder, or "minilm".')
    if what is not None and not what.strip():
        raise ArgumentError("there is nothing to draw: WEIGHTS, or the SENTENCE, is empty; give some.")
    named = {"--model": model, "--mask": mask, "--positions": positions}
    kinds = [name for name, value in named.items() if value]
    if len(kinds) > 1:
        raise ArgumentError(f"{' and '.join(kinds)} are different pictures; give one of them.")
    if kinds in (["--mask"], ["--positions"]) and what is not None:
        raise ArgumentError(f"{kinds[0]} is a picture of its own; leave {shorten(what)!r} away.")
    if kinds == ["--model"] and what is None:
        raise ArgumentError(
            '--model needs a sentence; give one in quotes: regard draw -m minilm "Dogs bark."'
        )
    if not kinds and what is None:
        raise ArgumentError(
            "there is nothing to draw; give a file of weights, --model and a sentence, --mask or --positions."
        )
    if model is not None:
        check_encoder(model)
    for rule in mask or []:
        _rule(rule)
    if not kinds:
        _check_file(Path(what or ""))
    return kinds[0] if kinds else "a file of weights"


def _check_file(path: Path) -> None:
    if path.is_dir():
        raise ArgumentError(
            f"{str(path)!r} is a folder; what its model attends to is drawn by --model, and how it learned "
            "by regard curves."
        )
    if not path.exists() and len(str(path).split()) > 1:
        raise ArgumentError(f"there is no file {shorten(str(path))!r}; with a sentence goes --model FOLDER.")
    check_input(path, "WEIGHTS")


def _check(kind: str, given: list[str]) -> None:
    """Options that make sense together."""
    wrong = [name for name in given if name not in _GOES[kind]]
    if wrong:
        raise ArgumentError(f"{wrong[0]} does not go with {kind}; what does is {', '.join(_GOES[kind])}.")


def _draw_file(path: Path, head: int | None, output: Path, look: dict[str, Any]) -> str:
    from regard.mechanism.weights.matrix import Weights
    from regard.plot.heatmaps import draw_weights

    weights = Weights.load(path)
    if head is not None:
        if not weights.has_heads:
            raise ArgumentError(f"--head is {head} and the weights are of one head; leave it away.")
        weights = weights.heads(_checked("--head", head, weights.shape[-3]))
    draw_weights(weights, output, **look)
    return f"{' × '.join(f'{n:,}' for n in weights.shape)} weights"


def _draw_model(
    model: str, sentence: str, which: tuple[bool, int | None, int | None], output: Path, look: dict[str, Any]
) -> str:
    from regard.app.view_model import look_at_text, look_at_translations
    from regard.plot.heatmaps import draw_alignments

    if not _is_translator(Path(model)):
        from regard.models.encoders.pretrained import load_encoder

        if which[0]:
            raise ArgumentError(f"--heads goes with translators; {model!r} draws every head by itself.")
        (found,) = look_at_text(load_encoder(model), [sentence]).inputs
        return _draw_layers(found.layers, found.texts, which[1:], output, look)
    from regard.translation.alignment.cross_attention import cross_attention_layers

    translator = load(Path(model), device="cpu", aligning=which == (False, None, None))
    cross_attention_layers(translator.model)  # refuses a model without attention, before the work
    (translation,) = translator.translate([sentence], alignment=True)
    if which == (False, None, None):
        if look.pop("log"):
            raise ArgumentError("--log is for heads; add --heads, or leave it away.")
        draw_alignments(translation.alignment, output, **look)
        return translation.text
    (found,) = look_at_translations(translator, [translation]).inputs
    layers = [one for one in found.layers if one.kind == "cross"]
    if not layers:
        raise ArgumentError(f"there are no heads to draw: {found.note or 'the sentence has no words'}.")
    return f"{translation.text}\n{_draw_layers(layers, found.texts, which[1:], output, look)}"


def _draw_layers(
    layers: "Sequence[LayerView]", texts: Any, which: Any, output: Path, look: dict[str, Any]
) -> str:
    """Every layer and head, or those that were asked for."""
    from regard._util.text import pluralize
    from regard.plot.heatmaps import draw_heads, draw_weights

    layer, head = which
    if layer is not None:
        layers = [layers[_checked("--layer", layer, len(layers))]]
    number = int(layers[0].weights.shape[-3])
    if head is not None:
        head = _checked("--head", head, number)
    tokens = [texts[layers[0].queries].tokens, texts[layers[0].keys].tokens]
    look = {**look, "queries": tokens[0], "keys": tokens[1]}
    some = {
        one.label: one.weights if head is None else one.weights[..., head : head + 1, :, :] for one in layers
    }
    if len(some) == 1 and head is not None:
        look.setdefault("title", f"{layers[0].label}, head {head}")
        draw_weights(next(iter(some.values())), output, **look)
    else:
        draw_heads(some, output, first=head or 0, **look)
    many = f"{pluralize(len(some), 'layer')} × {pluralize(number if head is None else 1, 'head')}"
    return f"{many}, {len(tokens[0])} × {len(tokens[1])} tokens"


def _draw_mask(
    rules: list[str],
    size: str | None,
    tokens: tuple[str | None, str | None],
    output: Path,
    look: dict[str, Any],
) -> str:
    shape = None if size is None else _shape(size)
    named = [_tokens(tokens[0], "--queries"), _tokens(tokens[1], "--keys")]
    if shape is not None and any(named):
        raise ArgumentError("--size and tokens both say how many there are; give one of the two.")
    from regard.plot.heatmaps import draw_mask

    made = _mask(rules[0])
    for rule in rules[1:]:
        made = made & _mask(rule)
    sizes: list[Any] = list(shape or made.drawn_size() or (_SIZE["mask"], _SIZE["mask"]))
    sides = [one or named[1 - i] or sizes[i] for i, one in enumerate(named)] if any(named) else sizes
    draw_mask(made, output, queries=sides[0], keys=sides[1], **look)
    return repr(made)


def _rule(rule: str) -> tuple[str, list[int]]:
    """The name of a mask and its numbers: what causal, window:4 and documents:3,4 say."""
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
        f"--mask is {shorten(rule)!r}; it can be causal, window:4, prefix:3, padding:5 or documents:3,4."
    )


def _mask(rule: str) -> "Mask":
    from regard.mechanism.masks import Causal, Documents, Padding, Prefix, Window

    name, numbers = _rule(rule)
    if name == "documents":
        return Documents(numbers)
    kinds = {"causal": Causal, "window": Window, "prefix": Prefix, "padding": Padding}
    return kinds[name](*numbers)


def _draw_positions(kind: Positions, size: str | None, output: Path, look: dict[str, Any]) -> str:
    length, columns = (_SIZE["positions"],) * 2 if size is None else _shape(size)
    if length != columns:
        raise ArgumentError(f"--size is {size!r}; positions have one number: --size {length}.")
    from torch import manual_seed

    from regard.mechanism.biases import ALiBi, T5Bias
    from regard.models.layers.positions import LearnedPositions, RotaryPositions, SinusoidalPositions
    from regard.plot.heatmaps import draw_positions

    manual_seed(0)
    made: dict[str, nn.Module] = {
        "sinusoidal": SinusoidalPositions(_WIDTH),
        "learned": LearnedPositions(length, _WIDTH),
        "rotary": RotaryPositions(_WIDTH),
        "alibi": ALiBi(_HEADS),
        "t5": T5Bias(_HEADS),
    }
    about = f"{kind} positions" + (", before any training" if kind in ("learned", "t5") else "")
    draw_positions(made[kind], output, length=length, **{"title": about, **look})  # type: ignore[arg-type]
    return about


def _shape(size: str) -> tuple[int, int]:
    """What --size says: 12, or 8x12."""
    numbers = size.lower().split("x")
    if len(numbers) > 2 or not all(n.isdecimal() and len(n) < 7 and int(n) for n in numbers):
        raise ArgumentError(f"--size is {shorten(size)!r}; it is a number, or queries and keys: 12 or 8x12.")
    if max(map(int, numbers)) > _LARGEST:
        raise ArgumentError(f"--size is {size} and at most {_LARGEST:,} are drawn; give fewer.")
    return int(numbers[0]), int(numbers[-1])


def _tokens(given: str | None, option: str) -> list[str] | None:
    """Of a file, a line each; or between blanks."""
    if given is None:
        return None
    if len(given) < 256 and Path(given).is_file():
        return [line.removesuffix("\r") for line in read(Path(given), option).removesuffix("\n").split("\n")]
    tokens = given.split()
    if not tokens:
        raise ArgumentError(f"{option} is {given!r}, which has no tokens; give some, with blanks between.")
    return tokens


def _checked(option: str, number: int, many: int) -> int:
    """A number of a layer or a head, counted from 0; −1 is the last."""
    if -many <= number < many:
        return number % many
    raise ArgumentError(
        f"{option} is {number} and there are 0 to {many - 1}; give one of them, or −1 for the last."
    )


def _is_translator(folder: Path) -> bool:
    from regard.translation.training.checkpoint import CONFIG, FORMAT

    try:
        config = json.loads(read_regular(folder / CONFIG, MAX_TEXT_BYTES))
    except (OSError, ValueError, RecursionError):
        return False  # the one who loads it says what is wrong
    kind = FORMAT.rpartition(" ")[0]  # of any version
    return isinstance(config, dict) and str(config.get("format")).startswith(kind)

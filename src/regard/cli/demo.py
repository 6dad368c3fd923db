"""`regard demo`."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from regard.cli.shared import check_folder, two_languages


def demo(
    model: Annotated[
        Literal["transformer", "recurrent", "plain"],
        typer.Option(
            help="What to train: a Transformer, a recurrent network with Bahdanau's attention, or a plain "
            "one without attention."
        ),
    ] = "transformer",
    languages: Annotated[
        str, typer.Option(metavar="FROM-TO", help="From which language to which.")
    ] = "en-de",
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="FOLDER", help="Where the model and the picture go."),
    ] = Path("demo"),
    seed: Annotated[int, typer.Option(min=0, help="Another number, another corpus and another model.")] = 0,
) -> None:
    """Train a small translator in two minutes, and see which word came from which.

    The corpus is made by regard: dates, times and numbers in words. The values that are translated at the end
    did not occur in the training.
    """
    two_languages(languages)
    for folder in (output, output / model):
        check_folder(folder)
    from regard.cli.demo_steps import show

    show(model, languages, output, seed)

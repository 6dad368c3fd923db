"""`regard demo`."""

from pathlib import Path
from typing import Annotated, Literal

import typer


def demo(
    model: Annotated[
        Literal["transformer", "recurrent", "plain"],
        typer.Option(help="recurrent is with Bahdanau's attention, plain without any."),
    ] = "transformer",
    languages: Annotated[str, typer.Option(help="From which language to which.")] = "en-de",
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The folder for the model and the picture.")
    ] = Path("demo"),
    seed: Annotated[int, typer.Option(min=0, help="Another seed: another corpus, another model.")] = 0,
) -> None:
    """Train a small translator in two minutes, and see which word came from which.

    The corpus is made by regard: dates, times and numbers in words. The values that are translated at the end
    did not occur in the training.
    """
    from regard.demo import show

    show(model, languages, output, seed)

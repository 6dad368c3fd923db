"""`regard demo`."""

from pathlib import Path
from typing import Annotated

import typer

from regard.cli.shared import check_folder, naming, parse_languages
from regard.translation.config import Model
from regard.translation.training.training_config import TrainingConfig


def demo(
    model: Annotated[
        Model,
        typer.Option(
            metavar="NAME",
            help="transformer, recurrent (RNN with Bahdanau attention) or plain (no attention).",
        ),
    ] = "transformer",
    languages: Annotated[str, typer.Option(metavar="FROM-TO", help="Source and target languages.")] = "en-de",
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="FOLDER", help="Where to save the model and the picture."),
    ] = Path("demo"),
    seed: Annotated[int, typer.Option(help="Random seed for the corpus and training.")] = 0,
) -> None:
    """Train a small translation model in two minutes and show its word alignments.

    The corpus consists of generated dates, times and numbers, spelled out. The test sentences contain values
    that do not occur in the training data.

    Examples:
    regard demo  # writes demo/transformer.png
    regard demo --model recurrent --languages en-fr
    """
    parse_languages(languages)
    with naming(**{"training.seed": "--seed"}):
        TrainingConfig(seed=seed)
    for folder in (output, output / model):
        check_folder(folder)
    from regard.cli.demo_pipeline import run

    run(model, languages, output, seed)

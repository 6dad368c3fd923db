"""`regard train`."""

import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from regard.cli.shared import INTERRUPTED, check_input, console
from regard.errors import ArgumentError
from regard.mechanism.text import plain

_HOW = "Model and size"
_DATA = "Data"
_LONG = "How long"


def train(
    source: Annotated[
        str | None,
        typer.Argument(
            help="A file with a sentence on each line; or, without TARGET, one with pairs: .tsv or .jsonl, "
            "also gzipped; - is stdin. embedded: dates, times and numbers; bible: Greek and English."
        ),
    ] = None,
    target: Annotated[str | None, typer.Argument(help="Their translations, line by line.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The model folder to make, or to go on in.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the last checkpoint, if there is one.")
    ] = False,
    model: Annotated[
        Literal["transformer", "recurrent", "plain"] | None,
        typer.Option(
            help="A Transformer, the default; Bahdanau's attention; none at all.", rich_help_panel=_HOW
        ),
    ] = None,
    preset: Annotated[
        Literal["tiny", "small", "base"],
        typer.Option(help="For a minute, twenty, a large machine.", rich_help_panel=_HOW),
    ] = "small",
    config: Annotated[
        Path | None, typer.Option(help="A TOML file with any settings.", rich_help_panel=_HOW)
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", help="One setting: --set training.rate=0.001", rich_help_panel=_HOW),
    ] = None,
    settings: Annotated[
        bool,
        typer.Option("--settings", help="Show all settings as TOML, and do nothing.", rich_help_panel=_HOW),
    ] = False,
    dev: Annotated[
        tuple[str, str] | None,
        typer.Option(help="Two files to judge by, SOURCE TARGET.", show_default=False, rich_help_panel=_DATA),
    ] = None,
    form: Annotated[
        Literal["tsv", "jsonl"] | None,
        typer.Option(help="Of one file with pairs, if its name does not say it.", rich_help_panel=_DATA),
    ] = None,
    swap: Annotated[
        bool, typer.Option("--swap", help="Translate from TARGET to SOURCE.", rich_help_panel=_DATA)
    ] = False,
    languages: Annotated[str, typer.Option(help="Of the embedded corpus.", rich_help_panel=_DATA)] = "en-de",
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Times through the data.", rich_help_panel=_LONG)
    ] = None,
    updates: Annotated[
        int | None, typer.Option(min=1, help="Updates of the weights, instead.", rich_help_panel=_LONG)
    ] = None,
    shard: Annotated[
        bool, typer.Option("--shard", help="Under torchrun: share out the parameters, too (FSDP2).")
    ] = False,
) -> None:
    """Train a translator on two files of sentences; then translate, align and evaluate with its folder."""
    if output is None and not settings:
        raise ArgumentError("train got no folder to write to; name one: --output FOLDER.")
    if target is not None:
        _check_two(source or "", target)
    if epochs is not None and updates is not None:
        raise ArgumentError(f"--epochs is {epochs} and --updates {updates}; a training ends by one of them.")
    for path in (source, target, *(dev or ())):
        if path not in (None, "embedded", "bible"):
            check_input(Path(path))
    from regard.translation.plan import Plan, toml

    single = list(setting or [])
    single += [] if epochs is None else [f"training.epochs={epochs}", "training.updates=none"]
    single += [] if updates is None else [f"training.updates={updates}"]
    plan = Plan.preset(preset, model or "transformer")
    if config is not None:
        plan = Plan.read(config, plan)
        if model is not None:
            plan = plan.changed({"model": {"kind": model}})
    plan = plan.but(single)
    if settings:
        print(toml(plan))
        return
    assert output is not None
    if resume:
        _check_same(output, single)
    from regard.cli.training import run

    finished = run(
        output,
        plan,
        source,
        target,
        dev=dev,
        form=form,
        swap=swap,
        languages=languages,
        resume=resume,
        shard=shard,
    )
    if os.environ.get("RANK", "0") != "0":  # the first of torchrun's processes speaks for all
        raise SystemExit(0 if finished else INTERRUPTED)
    if not finished:
        console().print(f"Go on with: regard train --output {plain(str(output))} --resume")
        raise SystemExit(INTERRUPTED)
    console().print(f'Now try: regard translate --model {plain(str(output))} "A sentence."')


def _check_two(source: str, target: str) -> None:
    """Two files with the sentences of one language each."""
    if source == target and source != "-":
        raise ArgumentError(f"SOURCE and TARGET are both {source!r}; give the translations as TARGET.")
    for path in (source, target):
        if Path(path.removesuffix(".gz")).suffix in (".tsv", ".jsonl"):
            raise ArgumentError(
                f"{path!r} is a file with pairs, and there is another one beside it; give it alone, or two "
                "files with a sentence on each line."
            )


def _check_same(output: Path, settings: list[str]) -> None:
    """A training goes on as it was begun: single settings that say otherwise would have no effect."""
    from regard.translation.checkpoint import CONFIG, read_config
    from regard.translation.plan import Plan
    from regard.translation.preparation import prepared

    if not (output / CONFIG).exists() or prepared(output) is None:  # nothing was begun yet
        return
    begun = Plan.of(read_config(output)["plan"])
    for setting in settings:
        if begun.but([setting]) != begun:
            raise ArgumentError(
                f"{str(output)!r} was begun with another setting than {setting}, and goes on as it was "
                "begun; leave it out, or train in a new folder."
            )

"""`regard train`."""

import errno
import os
import shlex
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from regard.cli.resuming import PRESET, Asked, check_same
from regard.cli.shared import INTERRUPTED, check_input, console, two_languages
from regard.errors import ArgumentError
from regard.mechanism.text import plain

if TYPE_CHECKING:
    from regard.translation.corpus import Pair
    from regard.translation.plan import Plan

_HOW = "Model and size"
_DATA = "Data"
_LONG = "How long"
_OWN = ("embedded", "bible")  # corpora that come along
_PAIRS = (".tsv", ".jsonl")


class Command(TyperCommand):
    """`regard train`, whose --dev takes two files, or one with pairs."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """An empty second name after the one of a file with pairs."""
        return super().parse_args(ctx, list(_with_two(args)))


def _with_two(arguments: Sequence[str]) -> Iterator[str]:
    before = ""
    for one in arguments:
        name, equals, value = one.partition("=")
        yield one
        if (before == "--dev" and _of_pairs(one)) or (name == "--dev" and equals and _of_pairs(value)):
            yield ""
        before = one


def _of_pairs(path: str) -> bool:
    """Whether the name says that a file has both sides."""
    return Path(path.removesuffix(".gz")).suffix in _PAIRS


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
        Literal["tiny", "small", "base"] | None,
        typer.Option(help="For a minute; twenty, the default; a large machine.", rich_help_panel=_HOW),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="A TOML file with any settings.", rich_help_panel=_HOW)
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", help="One setting: --set training.rate=0.001", rich_help_panel=_HOW),
    ] = None,
    settings: Annotated[
        bool,
        typer.Option(
            "--settings",
            help="Show all settings and what they mean, as TOML, and do nothing.",
            rich_help_panel=_HOW,
        ),
    ] = False,
    dev: Annotated[
        tuple[str, str] | None,
        typer.Option(
            metavar="SOURCE TARGET",
            help="Two files to judge by, or one with pairs.",
            show_default=False,
            rich_help_panel=_DATA,
        ),
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
        int | None, typer.Option(min=1, help="Updates of the parameters, instead.", rich_help_panel=_LONG)
    ] = None,
    shard: Annotated[
        bool, typer.Option("--shard", help="Under torchrun: share out the parameters, too (FSDP2).")
    ] = False,
) -> None:
    """Train a translator on two files of sentences; then translate, align and evaluate with its folder."""
    if output is None and not settings:
        raise ArgumentError("train got no folder to write to; name one: --output FOLDER.")
    if epochs is not None and updates is not None:
        raise ArgumentError(f"--epochs is {epochs} and --updates {updates}; a training ends by one of them.")
    judged_by = None if dev is None else [*dev[:1], *filter(None, dev[1:])]
    _check_files(source, target, judged_by, form)
    single = list(setting or [])
    single += [] if epochs is None else [f"training.epochs={epochs}", "training.updates=none"]
    single += [] if updates is None else [f"training.updates={updates}"]
    asked = Asked(preset, model, config, single, source, target, judged_by, swap, languages)
    plan = _plan(asked)
    if settings:
        from regard.translation.settings import toml

        print(toml(plan))
        return
    assert output is not None
    if resume:
        check_same(output, asked)
    with _full_disk(output):
        finished = _run(output, plan, asked, form=form, resume=resume, shard=shard)
    if os.environ.get("RANK", "0") != "0":  # the first of torchrun's processes speaks for all
        raise SystemExit(0 if finished else INTERRUPTED)
    if not finished:
        console().print(f"Go on with: {_going_on(output)}")
        raise SystemExit(INTERRUPTED)
    from regard.translation.preparation import dev_sentence

    sentence = shlex.quote(plain(dev_sentence(output)))
    console().print(f"Now try: regard translate --model {_quoted(output)} {sentence}")


def _check_files(source: str | None, target: str | None, dev: Sequence[str] | None, form: str | None) -> None:
    """Before anything is loaded: files that can be read, and that fit together."""
    named = [("SOURCE", source), ("TARGET", target), *(("--dev", path) for path in dev or ())]
    if target is not None:
        _check_two(source or "", target)
        if form is not None:
            raise ArgumentError(
                f"--form {form} is about one file with pairs, and there are two; leave it out."
            )
    if dev is not None and len(dev) == 2:
        for file in filter(_of_pairs, dev):
            raise ArgumentError(f"--dev has the file with pairs {file!r} and another one; give it alone.")
    streams = [name for name, path in named if path == "-"]
    if len(streams) > 1:
        raise ArgumentError(f"{' and '.join(streams)} are both -, and stdin is read once; name a file.")
    for name, path in named:
        if path is not None and path not in _OWN:
            check_input(Path(path), name)


def _check_two(source: str, target: str) -> None:
    """Two files with the sentences of one language each."""
    if source == target:
        cure = "give pairs as TSV, and no TARGET" if source == "-" else "give the translations as TARGET"
        raise ArgumentError(f"SOURCE and TARGET are both {source!r}; {cure}.")
    for path in (source, target):
        if _of_pairs(path):
            raise ArgumentError(
                f"{path!r} is a file with pairs, and there is another one beside it; give it alone, or two "
                "files with a sentence on each line."
            )


def _plan(asked: Asked) -> "Plan":
    """Preset, then a file, then single settings."""
    from regard.translation.plan import Plan

    plan = Plan.preset(asked.preset or PRESET, asked.model or "transformer")  # type: ignore[arg-type]
    if asked.config is not None:
        plan = Plan.read(asked.config, plan)
        if asked.model is not None:
            plan = plan.changed({"model": {"kind": asked.model}})
    return plan.but(asked.single)


def _run(output: Path, plan: "Plan", asked: Asked, *, form: Any, resume: bool, shard: bool) -> bool:
    """Train; whether it came to its end."""
    from regard.translation.distributed import join_world
    from regard.translation.formats import read_pairs
    from regard.translation.progress import display
    from regard.translation.training import train

    pairs, held = _corpus(asked, form)
    if asked.dev is not None:
        held = read_pairs(*asked.dev)
    if asked.swap:
        pairs, held = _swapped(pairs), _swapped(held)
    with join_world(shard=shard) as world:
        outcome = train(
            output,
            pairs,
            dev=held,
            plan=plan,
            resume=resume,
            listeners=[display()] if world.rank == 0 else [],
            world=world,
            origin=asked.origin(),
        )
    return outcome.finished


def _corpus(asked: Asked, form: Any) -> "tuple[Iterable[Pair] | None, Iterable[Pair] | None]":
    """The pairs that were asked for, and those to judge by if they come along."""
    source, target = asked.source, asked.target
    if source is None:
        return None, None
    if source in _OWN and target is None and not Path(source).exists():
        return _embedded(asked.languages) if source == "embedded" else (_bible(), None)
    from regard.translation.formats import read_pairs

    return read_pairs(source, target, form=form), None


def _embedded(languages: str) -> "tuple[Iterable[Pair], Iterable[Pair]]":
    from regard.translation.dates import embedded

    corpus = embedded(*two_languages(languages))
    return corpus.train, corpus.dev


def _bible() -> "Iterable[Pair]":
    from regard.translation.bible import bible

    return [verse.pair for verse in bible()]


def _swapped(pairs: "Iterable[Pair] | None") -> "Iterable[Pair] | None":
    from regard.translation.corpus import Pair

    return None if pairs is None else (Pair(target, source) for source, target in pairs)


@contextmanager
def _full_disk(output: Path) -> Iterator[None]:
    """A training that ran out of space goes on from its last checkpoint."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise ArgumentError(
            f"{error.filename or output}: {error.strerror}; free some space, then go on with "
            f"{_going_on(output)}"
        ) from None


def _going_on(output: Path) -> str:
    return f"regard train --output {_quoted(output)} --resume"


def _quoted(path: Path) -> str:
    return shlex.quote(plain(str(path)))

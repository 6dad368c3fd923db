"""`regard train`."""

import errno
import os
import shlex
import signal
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from regard._util.files import check_regular
from regard._util.text import printable, shorten
from regard.cli.helping import Command as Plain
from regard.cli.resuming import PRESET, Asked, begun_plan
from regard.cli.shared import (
    CONFIG,
    SIGNALLED,
    check_folder,
    check_input,
    check_model,
    console,
    two_languages,
)
from regard.errors import ArgumentError

if TYPE_CHECKING:
    from regard.translation.config import TranslationConfig
    from regard.translation.data.pairs import Pair
    from regard.translation.training.loop import TrainingResult

_HOW = "Model and size"
_DATA = "Data"
_LONG = "How long"
_OWN = ("embedded", "bible")  # corpora that come along
# the names of files with pairs; .txt may be one, too, and mostly is one side of a corpus
PAIRS = (".tsv", ".tab", ".jsonl", ".ndjson", ".json")
# what other programs call settings, or people expect as options
_SETTINGS = {
    **dict.fromkeys(("lr", "learning-rate", "rate"), "training.learning_rate=0.001"),
    **dict.fromkeys(("batch", "batch-size", "batch-tokens", "tokens", "max-tokens"), "training.batch_tokens=4096"),
    **dict.fromkeys(("accumulate", "accum", "grad-accum", "update-freq"), "training.accumulate=2"),
    **dict.fromkeys(("steps", "max-steps", "max-updates"), "training.updates=1000"),
    **dict.fromkeys(("warmup", "warmup-steps", "warmup-updates"), "training.warmup=400"),
    **dict.fromkeys(("schedule", "scheduler", "lr-scheduler"), "training.schedule=inverse-sqrt"),
    **dict.fromkeys(("smoothing", "label-smoothing"), "training.label_smoothing=0.1"),
    **dict.fromkeys(("decay", "weight-decay"), "training.weight_decay=0.01"),
    **dict.fromkeys(("clip", "clip-norm", "grad-clip", "max-grad-norm"), "training.max_grad_norm=1.0"),
    **dict.fromkeys(("precision", "bf16", "fp16", "amp"), "training.precision=bfloat16"),
    **dict.fromkeys(("patience", "early-stopping"), "training.patience=5"),
    **dict.fromkeys(("save-every", "save-interval", "save"), "training.save_every=1000"),
    **dict.fromkeys(("judge", "eval-every", "valid-freq", "validate-every"), "training.validate_every=1000"),
    "seed": "training.seed=1",
    "threads": "training.threads=2",
    "average": "training.average_checkpoints=5",
    "guide": "training.guided_alignment_weight=0.3",
    "criterion": "training.metric=loss",
    **dict.fromkeys(("width", "dim", "d-model", "hidden-size", "embed-dim"), "model.width=256"),
    **dict.fromkeys(("hidden", "ffn", "ffn-dim", "d-ff"), "model.ffn_dim=1024"),
    **dict.fromkeys(("layers", "num-layers", "n-layers"), "model.layers=3"),
    **dict.fromkeys(("heads", "num-heads", "n-heads"), "model.heads=8"),
    "dropout": "model.dropout=0.1",
    "norm": "model.norm=rms",
    "activation": "model.activation=gelu",
    "positions": "model.positions=rotary",
    "normalize": "model.normalize=entmax15",
    **dict.fromkeys(("vocab", "vocab-size", "vocabulary"), "tokens.size=8000"),
    **dict.fromkeys(("max-length", "max-len", "longest"), "corpus.max_tokens=256"),
}


class Command(Plain):
    """`regard train`, whose --dev takes two files, or one with pairs."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """An empty second name after the one of a file with pairs; settings are told from options."""
        known = {name for one in self.params for name in one.opts}
        for one in args:
            name = one.partition("=")[0]
            setting = _SETTINGS.get(name.removeprefix("--").replace("_", "-").lower())
            if one.startswith("--") and name not in known and setting is not None:
                raise ArgumentError(
                    f"there is no option {name}; it is a setting: --set {setting}, for example. See regard "
                    "train --settings."
                )
        return super().parse_args(ctx, list(_with_two(args)))


def _with_two(arguments: Sequence[str]) -> Iterator[str]:
    before = ""
    for one, after in zip_longest(arguments, arguments[1:]):
        name, equals, value = one.partition("=")
        yield one
        given = one if before == "--dev" else value if name == "--dev" and equals else None
        if given is not None and (of_pairs(given) or after is None or after.startswith("-")):
            yield ""
        before = one


def of_pairs(path: str) -> bool:
    """Whether the name says that a file has both sides."""
    return Path(path.lower().removesuffix(".gz")).suffix in PAIRS


def train(
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="SOURCE",
            help="A text file with a sentence on each line. Without TARGET: a file with pairs, .tsv (source, "
            "tab, target) or .jsonl, or - for stdin, or a corpus that comes along: embedded (dates, times "
            "and numbers in words) or bible (Greek and English). All may be gzipped.",
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Argument(metavar="TARGET", help="A text file with their translations, line by line."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FOLDER", help="The folder to make for the model. Always needed."
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on with a training that was interrupted, from its last checkpoint. The folder knows the "
            "rest, so that no other option is needed; with --epochs or --updates it becomes longer, also if "
            "it had come to its end.",
        ),
    ] = False,
    model: Annotated[
        Literal["transformer", "recurrent", "plain"] | None,
        typer.Option(
            help="What to train: a Transformer (the default), a recurrent network with Bahdanau's attention, "
            "or a plain one without attention.",
            rich_help_panel=_HOW,
        ),
    ] = None,
    preset: Annotated[
        Literal["tiny", "small", "base"] | None,
        typer.Option(
            help="How large, and how long: tiny takes a minute or two and suits a first try; small (the "
            "default) takes twenty minutes for 29,000 pairs on two cores; base is the Transformer of the "
            "paper, for a large machine.",
            rich_help_panel=_HOW,
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A TOML file with settings, such as --settings prints, instead of the preset's.",
            rich_help_panel=_HOW,
        ),
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="Change one setting, such as training.learning_rate=0.001; can be repeated. --settings shows all.",
            rich_help_panel=_HOW,
        ),
    ] = None,
    settings: Annotated[
        bool,
        typer.Option(
            "--settings",
            help="Print all settings with their values and what they mean, and train nothing.",
            rich_help_panel=_HOW,
        ),
    ] = False,
    dev: Annotated[
        tuple[str, str] | None,
        typer.Option(
            metavar="SOURCE TARGET",
            help="Two text files (or one with pairs) by which the model is judged while it learns. Without "
            "them, some pairs are held back for that.",
            show_default=False,
            rich_help_panel=_DATA,
        ),
    ] = None,
    form: Annotated[
        Literal["tsv", "jsonl"] | None,
        typer.Option(
            help="What a file with pairs, or stdin, contains, if its name does not say it.",
            rich_help_panel=_DATA,
        ),
    ] = None,
    swap: Annotated[
        bool,
        typer.Option("--swap", help="Learn to translate from TARGET to SOURCE.", rich_help_panel=_DATA),
    ] = False,
    languages: Annotated[
        str,
        typer.Option(
            metavar="FROM-TO", help="Of the embedded corpus: from which to which.", rich_help_panel=_DATA
        ),
    ] = "en-de",
    epochs: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="How often to go through the data. The preset's by default, which --settings shows.",
            rich_help_panel=_LONG,
        ),
    ] = None,
    updates: Annotated[
        int | None,
        typer.Option(
            min=1, help="Or: after how many updates of the parameters to end.", rich_help_panel=_LONG
        ),
    ] = None,
    shard: Annotated[
        bool,
        typer.Option(
            "--shard", help="Under torchrun: each process holds a part of the parameters only (FSDP2)."
        ),
    ] = False,
) -> None:
    """Train a translator on two files of sentences, line by line translations of each other.

    The folder that it makes is what regard translate, align, evaluate, curves, draw and look are given.
    """
    if output is None and not settings:
        raise ArgumentError("train got no folder to write to; name one: --output FOLDER.")
    if epochs is not None and updates is not None:
        raise ArgumentError(f"--epochs is {epochs} and --updates {updates}; a training ends by one of them.")
    judged_by = None if dev is None else [*dev[:1], *filter(None, dev[1:])]
    _check_files(source, target, judged_by, form)
    _check_before(languages, config, setting or [])
    if output is not None and not settings:  # which only shows what there is
        _check_folder(source, output, resume)
    single = list(setting or [])
    single += [] if epochs is None else [f"training.epochs={epochs}", "training.updates=none"]
    single += [] if updates is None else [f"training.updates={updates}"]
    asked = Asked(preset, model, config, single, source, target, judged_by, swap, languages)
    plan = _plan(asked)
    if settings:
        print(plan.to_toml())
        return
    assert output is not None
    if resume:
        plan = begun_plan(output, asked) or plan
    with _full_disk(output):
        outcome = _run(output, plan, asked, form=form, resume=resume, shard=shard)
    status = 0 if outcome.finished else SIGNALLED + (outcome.signal or signal.SIGINT)
    if os.environ.get("RANK", "0") != "0":  # the first of torchrun's processes speaks for all
        raise SystemExit(status)
    if status:
        with suppress(OSError):  # the terminal may be closed
            console().print(f"Go on with: {_going_on(output)}")
        raise SystemExit(status)
    from regard.translation.training.preparation import sample_source

    sentence = shlex.quote(printable(sample_source(output)))
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
        for file in filter(of_pairs, dev):
            raise ArgumentError(f"--dev has the file with pairs {file!r} and another one; give it alone.")
    streams = [name for name, path in named if path == "-"]
    if len(streams) > 1:
        raise ArgumentError(f"{' and '.join(streams)} are both -, and stdin is read once; name a file.")
    for name, path in named:
        if path is not None and path not in _OWN:
            check_input(Path(path), name)


def _check_before(languages: str, config: Path | None, setting: Sequence[str]) -> None:
    """What else can be told without torch, which takes seconds to load."""
    two_languages(languages)
    if config is not None:
        check_regular(config)
    for one in setting:
        name, equals, _ = one.partition("=")
        if not equals or name.count(".") != 1:
            raise ArgumentError(f"the setting {shorten(one)!r} is not understood; write section.name=value.")


def _check_folder(source: str | None, output: Path, resume: bool) -> None:
    """A folder that can be made, or gone on with; and if there is none to go on with, pairs."""
    check_folder(output)
    if source is None and not resume:
        raise ArgumentError(
            "there is nothing to train on; give the pairs: two files, SOURCE and TARGET, or one of pairs."
        )
    if source is None and not (output / CONFIG).exists():
        if output.is_dir() and any(output.iterdir()):
            check_model(output)
        raise ArgumentError(
            f"there is nothing to go on with in {str(output)!r}; give the pairs to train on as well."
        )


def _check_two(source: str, target: str) -> None:
    """Two files with the sentences of one language each."""
    if source == target:
        cure = "give pairs as TSV, and no TARGET" if source == "-" else "give the translations as TARGET"
        raise ArgumentError(f"SOURCE and TARGET are both {source!r}; {cure}.")
    for path in (source, target):
        if of_pairs(path):
            raise ArgumentError(
                f"{path!r} is a file with pairs, and there is another one beside it; give it alone, or two "
                "files with a sentence on each line."
            )


def _plan(asked: Asked) -> "TranslationConfig":
    """Preset, then a file, then single settings."""
    from regard.translation.config import TranslationConfig

    plan = TranslationConfig.preset(asked.preset or PRESET, asked.model or "transformer")  # type: ignore[arg-type]
    if asked.config is not None:
        plan = TranslationConfig.from_toml(asked.config, plan)
        if asked.model is not None:
            plan = plan.replace({"model": {"kind": asked.model}})
    return plan.override(asked.single)


def _run(
    output: Path, plan: "TranslationConfig", asked: Asked, *, form: Any, resume: bool, shard: bool
) -> "TrainingResult":
    """Train; how it ended."""
    from regard.models.layers.allocation import keep_memory, return_memory
    from regard.translation.data.formats import read_pairs
    from regard.translation.training.distributed import join_world
    from regard.translation.training.progress import create_display
    from regard.translation.training.train import train

    pairs, held = _corpus(asked, form)
    if asked.dev is not None:
        held = read_pairs(*asked.dev)
    if asked.swap:
        pairs, held = _swapped(pairs), _swapped(held)
    with join_world(shard=shard) as world:
        if world.device.type == "cpu":
            return_memory() if shard else keep_memory()
        return train(
            output,
            pairs,
            dev=held,
            config=plan,
            resume=resume,
            callbacks=[create_display()] if world.rank == 0 else [],
            world=world,
            origin=asked.origin(),
        )


def _corpus(asked: Asked, form: Any) -> "tuple[Iterable[Pair] | None, Iterable[Pair] | None]":
    """The pairs that were asked for, and those to judge by if they come along."""
    source, target = asked.source, asked.target
    if source is None:
        return None, None
    if source in _OWN and target is None and not Path(source).exists():
        return _embedded(asked.languages) if source == "embedded" else (_bible(), None)
    from regard.translation.data.formats import read_pairs

    return read_pairs(source, target, form=form), None


def _embedded(languages: str) -> "tuple[Iterable[Pair], Iterable[Pair]]":
    from regard.translation.data.builtin import embedded_corpus

    corpus = embedded_corpus(*two_languages(languages))
    return corpus.train, corpus.dev


def _bible() -> "Iterable[Pair]":
    from regard.translation.data.bible import bible

    return [verse.pair for verse in bible()]


def _swapped(pairs: "Iterable[Pair] | None") -> "Iterable[Pair] | None":
    from regard.translation.data.pairs import Pair

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
    return shlex.quote(printable(str(path)))

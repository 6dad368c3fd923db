"""What `regard demo` shows: a translator trained on the embedded corpus, its translations and alignments."""

import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from regard._util.files import MAX_TEXT_BYTES, read_regular
from regard._util.text import pluralize, printable
from regard.app.standalone import write_page
from regard.cli.shared import SIGNALLED, console, two_languages
from regard.errors import ArgumentError
from regard.models.layers.allocation import keep_memory
from regard.plot.heatmaps import draw_alignments
from regard.plot.terminal import draw_alignment
from regard.translation.config import Model, TranslationConfig
from regard.translation.data.builtin import EmbeddedCorpus, embedded_corpus
from regard.translation.data.pairs import Pair
from regard.translation.evaluation import evaluate
from regard.translation.training.checkpoint import MODEL
from regard.translation.training.progress import create_display
from regard.translation.training.train import train
from regard.translation.translator import Translation, Translator, load_translator

# What two minutes on two cores suffice for. Small pieces, so that numbers are made of the same ones.
_TOKENS = ["tokens.kind=bpe", "tokens.size=300"]
_EPOCHS = {"transformer": 7, "recurrent": 6, "plain": 10}
_SHOWN = 3  # pairs, and translations
_ON_PAGE = 30
_MARK = ".demo"  # a file in folders that the next demo may replace; it says the languages
# what a training writes into its folder
_OWN = (
    *(_MARK, "config.json", "*.model", "model.safetensors", "log.csv", "samples.jsonl", ".regard-*.part"),
    *("data/*.ids", "data/*.tsv", "data/ready", "data/.regard-*.part", "tensorboard/events.out.tfevents.*"),
    *("checkpoints/step-*/*", "checkpoints/.*.part/*"),
)
LANGUAGES = ("en", "de")


def show(model: Model, languages: str, output: Path, seed: int = 0) -> None:
    """Train, translate what was held out, count what is right, and draw where the model looked."""
    say = console().print
    corpus = embedded_corpus(*two_languages(languages), seed=seed)
    say(f"{len(corpus.train):,} pairs of dates, times and numbers in words, such as", style="bold")
    for pair in corpus.train[:_SHOWN]:
        say(f"  {printable(pair.source)}\n    {printable(pair.target)}")
    folder = output / model
    say(f"\nA {model} model learns them, on {pluralize(torch.get_num_threads(), 'core')}:", style="bold")
    _train(folder, _plan(model, seed), corpus, languages)
    translator = load_translator(folder)
    say(f"\n{_judged(translator, corpus)}", style="bold")
    attends = model != "plain"
    found = translator.translate([pair.source for pair in _telling(corpus.test)], alignment=attends)
    shown = found[:_SHOWN]
    _show(shown, attends)
    say("")
    if attends:
        picture = output / f"{model}.png"
        draw_alignments(
            [one.alignment for one in shown[:2]], picture, titles=[one.source for one in shown[:2]]
        )
        say(f"The picture: {printable(str(picture))}")
    page = write_page(output / f"{model}.html", found, title=f"{languages}, {model}")
    say(f"The page, to be opened in a browser: {page.resolve().as_uri()}")
    say(f"The model: {printable(str(folder))}. Go on with it:")
    option = "--alignment " if attends else ""
    program = "regard" if shutil.which("regard") else os.path.relpath(sys.argv[0])
    say(f'  {program} translate --model {printable(str(folder))} {option}"{shown[0].source}"')
    say(f"  {program} curves {printable(str(folder))}")
    say(f"  {program} look {printable(str(folder))}")


def is_trained(folder: Path) -> bool:
    """Whether a folder has a model, and no demo that was cut off."""
    from regard.app.server.routes.training import state_of

    return (folder / MODEL).is_file() and not ((folder / _MARK).is_file() and state_of(folder) == "stopped")


def trained(folder: Path) -> str:
    """The languages of the demo's Transformer in a folder, which is trained first if it is not there."""
    if not is_trained(folder):
        console().print(f"The demo model is trained first, in {printable(str(folder))}; that takes two minutes.")
        _train(folder, _plan("transformer", 0), embedded_corpus(*LANGUAGES), "-".join(LANGUAGES))
    mark = folder / _MARK
    return read_regular(mark, MAX_TEXT_BYTES).decode(errors="replace") if mark.is_file() else ""


def _plan(model: Model, seed: int) -> TranslationConfig:
    settings = [*_TOKENS, f"training.epochs={_EPOCHS[model]}", f"training.seed={seed}"]
    return TranslationConfig.preset("tiny", model).override(settings)


def _train(folder: Path, config: TranslationConfig, corpus: EmbeddedCorpus, languages: str = "") -> None:
    """In place of the model of an earlier demo, and of nothing else that somebody may have there."""
    if (folder / _MARK).is_file():
        _remove(folder)
    elif folder.exists():
        raise ArgumentError(
            f"{str(folder)!r} is there and was not made by a demo; name another folder: --output FOLDER."
        )
    folder.mkdir(parents=True)
    (folder / _MARK).write_text(languages)
    keep_memory()
    outcome = train(folder, corpus.train, dev=corpus.dev, config=config, resume=True, callbacks=[create_display()])
    if not outcome.finished:
        console().print(f"Go on with: regard train --output {printable(str(folder))} --resume")
        raise SystemExit(SIGNALLED + (outcome.signal or signal.SIGINT))


def _remove(folder: Path) -> None:
    """The model of an earlier demo; if there is anything else in its folder, nothing is removed."""
    known = [path for pattern in _OWN for path in folder.glob(pattern)]
    files = [path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()]
    for path in files:
        if path.is_symlink() or path not in known:
            raise ArgumentError(
                f"{str(path)!r} was not made by the demo, which would replace its folder; move it away, or "
                "name another folder: --output FOLDER."
            )
    shutil.rmtree(folder)


def _judged(translator: Translator, corpus: EmbeddedCorpus) -> str:
    """How many held-out sentences are translated exactly."""
    begun = time.monotonic()
    written = translator.translate([pair.source for pair in corpus.test])
    speed = len(written) / (time.monotonic() - begun)
    scores = evaluate([one.text for one in written], [pair.target for pair in corpus.test])
    return (
        f"{len(written):,} sentences with values that it has never seen: {scores.exact:.1%} exactly right, "
        f"BLEU {scores.bleu:.1f}, {speed:.0f} sentences a second."
    )


def _telling(pairs: Sequence[Pair]) -> list[Pair]:
    """A few sentences with something to see: neither short nor wider than a terminal."""
    fit = [pair for pair in pairs if 4 <= len(pair.source.split()) <= 9]
    return sorted(fit or pairs, key=lambda pair: -len(pair.target.split()))[:_ON_PAGE]


def _show(shown: Sequence[Translation], attends: bool) -> None:
    say = console().print
    for one in shown:
        say(f"\n{printable(one.source)}", style="bold")
        say(f"  {printable(one.text)}")
        if attends:
            draw_alignment(one.alignment)

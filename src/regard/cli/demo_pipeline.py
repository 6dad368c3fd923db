"""The steps of `regard demo`: train on the embedded corpus, translate, show alignments."""

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
from regard.cli.shared import SIGNAL_EXIT, console, parse_languages
from regard.errors import ArgumentError
from regard.models.layers.allocation import keep_memory
from regard.plot.heatmaps import draw_alignments
from regard.plot.terminal import draw_alignment
from regard.translation.config import Model, TranslationConfig
from regard.translation.data.builtin import EmbeddedCorpus, embedded_corpus
from regard.translation.data.pairs import Pair
from regard.translation.evaluation import evaluate
from regard.translation.model_folder import MODEL, OWN_FILES
from regard.translation.training.progress import create_display
from regard.translation.training.train import train
from regard.translation.translation import Translation
from regard.translation.translator import Translator, load_translator

# Sized to train in a minute and a half on two cores. The vocabulary is small, so all numbers share tokens.
_TOKENS = ["tokens.kind=bpe", "tokens.size=300"]
_DURATION = {"transformer": "updates=600", "recurrent": "epochs=6", "plain": "epochs=10"}
_DEV = 300  # number of validation pairs; few, because validation runs after every epoch
_SHOWN = 3  # number of pairs and translations to print
_ON_PAGE = 30  # maximum number of translations on the HTML page
_MARKER = ".demo"  # marks a folder that the next demo may replace; contains the languages
LANGUAGES = ("en", "de")


def run(model: Model, languages: str, output: Path, seed: int = 0) -> None:
    """Train, translate the held-out sentences, report accuracy, and draw the alignments."""
    say = console().print
    corpus = embedded_corpus(*parse_languages(languages), seed=seed)
    say(f"{len(corpus.train):,} pairs of dates, times and numbers in words, for example", style="bold")
    for pair in corpus.train[:_SHOWN]:
        say(f"  {printable(pair.source)}\n    {printable(pair.target)}")
    folder = output / model
    cores = pluralize(torch.get_num_threads(), "core")
    say(f"\nTraining a {model} model on {cores}:", style="bold")
    _train(folder, _config(model, seed), corpus, languages)
    translator = load_translator(folder)
    say(f"\n{_accuracy(translator, corpus)}", style="bold")
    has_attention = model != "plain"
    sources = [pair.source for pair in _interesting(corpus.test)]
    translations = translator.translate(sources, alignment=has_attention)
    shown = translations[:_SHOWN]
    _print(shown, has_attention)
    say("")
    if has_attention:
        picture, drawn = output / f"{model}.png", shown[:2]
        alignments = [translation.alignment for translation in drawn]
        draw_alignments(alignments, picture, titles=[translation.source for translation in drawn])
        say(f"Picture: {printable(str(picture))}")
    page = write_page(output / f"{model}.html", translations, title=f"{languages}, {model}")
    say(f"Page for the browser: {page.resolve().as_uri()}")
    say(f"Model: {printable(str(folder))}. Next steps:")
    option = "--alignment " if has_attention else ""
    program = "regard" if shutil.which("regard") else os.path.relpath(sys.argv[0])
    say(f'  {program} translate --model {printable(str(folder))} {option}"{shown[0].source}"')
    say(f"  {program} curves {printable(str(folder))}")
    say(f"  {program} look {printable(str(folder))}")


def is_trained(folder: Path) -> bool:
    """Return whether a folder has a model that was not left by an interrupted demo."""
    from regard.app.server.routes.training import state_of

    return (folder / MODEL).is_file() and not ((folder / _MARKER).is_file() and state_of(folder) == "stopped")


def ensure_trained(folder: Path) -> str:
    """Train the demo's Transformer if the folder has no model; return its languages."""
    if not is_trained(folder):
        console().print(f"Training the demo model in {printable(str(folder))}; this takes two minutes.")
        _train(folder, _config("transformer", 0), embedded_corpus(*LANGUAGES), "-".join(LANGUAGES))
    marker = folder / _MARKER
    return read_regular(marker, MAX_TEXT_BYTES).decode(errors="replace") if marker.is_file() else ""


def _config(model: Model, seed: int) -> TranslationConfig:
    settings = [*_TOKENS, f"training.{_DURATION[model]}", f"training.seed={seed}"]
    return TranslationConfig.preset("tiny", model).override(settings)


def _train(folder: Path, config: TranslationConfig, corpus: EmbeddedCorpus, languages: str = "") -> None:
    """Train a model, replacing only a model from an earlier demo."""
    if (folder / _MARKER).is_file():
        _remove(folder)
    elif folder.exists():
        raise ArgumentError(
            f"{str(folder)!r} exists and was not created by the demo; choose another folder: --output FOLDER."
        )
    folder.mkdir(parents=True)
    (folder / _MARKER).write_text(languages)
    keep_memory()
    result = train(
        folder, corpus.train, dev=corpus.dev[:_DEV], config=config, resume=True, callbacks=[create_display()]
    )
    if not result.finished:
        console().print(f"Resume with: regard train --output {printable(str(folder))} --resume")
        raise SystemExit(SIGNAL_EXIT + (result.signal or signal.SIGINT))


def _remove(folder: Path) -> None:
    """Delete the model from an earlier demo; raise an error if its folder contains other files."""
    demo_files = {path for pattern in (_MARKER, *OWN_FILES) for path in folder.glob(pattern)}
    for path in folder.rglob("*"):
        if path.is_symlink() or (not path.is_dir() and path not in demo_files):
            raise ArgumentError(
                f"{str(path)!r} was not created by the demo, which would delete it; move the file, or "
                "choose another folder: --output FOLDER."
            )
    shutil.rmtree(folder)


def _accuracy(translator: Translator, corpus: EmbeddedCorpus) -> str:
    """Translate the test set and return a sentence about accuracy and speed."""
    start = time.monotonic()
    translations = translator.translate([pair.source for pair in corpus.test])
    speed = len(translations) / (time.monotonic() - start)
    scores = evaluate([each.text for each in translations], [pair.target for pair in corpus.test])
    return (
        f"{len(translations):,} sentences with unseen values: {scores.exact:.1%} exactly right, "
        f"BLEU {scores.bleu:.1f}, {speed:.0f} sentences per second."
    )


def _interesting(pairs: Sequence[Pair]) -> list[Pair]:
    """Select sentences of four to nine words, which fit in a terminal."""
    fit = [pair for pair in pairs if 4 <= len(pair.source.split()) <= 9]
    return sorted(fit or pairs, key=lambda pair: -len(pair.target.split()))[:_ON_PAGE]


def _print(translations: Sequence[Translation], has_attention: bool) -> None:
    say = console().print
    for translation in translations:
        say(f"\n{printable(translation.source)}", style="bold")
        say(f"  {printable(translation.text)}")
        if has_attention:
            draw_alignment(translation.alignment)

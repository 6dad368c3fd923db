"""Train the shipped translator for dates, times and numbers: python -m regard.app.dates FOLDER.

The folder is written after training has finished, each file atomically. Parameters are stored in float16.
"""

import argparse
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

from regard._util.files import write_atomic
from regard.translation.config import TranslationConfig
from regard.translation.data.builtin import EmbeddedCorpus, embedded_corpus
from regard.translation.evaluation import evaluate
from regard.translation.model_folder import CONFIG, DATA, DEV, MODEL, PROFILE, SHARED
from regard.translation.training.checkpoint import write_parameters
from regard.translation.training.progress import create_display
from regard.translation.training.train import train
from regard.translation.translator import load_translator

# 403,200 parameters; 99.1% exact match on the test set, whose values do not occur in the training data
_SETTINGS = (
    *("tokens.kind=bpe", "tokens.size=300", "model.width=96", "model.ffn_dim=192"),
    *("training.epochs=10", "training.seed=0"),
)
_EXAMPLES = 40  # validation sentences in the shipped folder


def make_corpus() -> EmbeddedCorpus:
    """Return the training data: one value per sentence."""
    return embedded_corpus("en", "de", size=12_000, values=(1, 1))


def train_dates(output: Path, updates: int | None = None) -> None:
    """Train the translator for `updates` optimizer updates, by default ten epochs, and write its folder."""
    shorter = [] if updates is None else [f"training.updates={updates}"]
    config = TranslationConfig.preset("tiny").override([*_SETTINGS, *shorter])
    corpus = make_corpus()
    with tempfile.TemporaryDirectory() as folder:
        train(folder, corpus.train, dev=corpus.dev, config=config, callbacks=[create_display()])
        compact(Path(folder), output)


def compact(folder: Path, output: Path) -> None:
    """Copy the files needed for translation; convert the parameters to float16."""
    (output / DATA).mkdir(parents=True, exist_ok=True)
    for name in (CONFIG, PROFILE, SHARED):
        write_atomic(output / name, (folder / name).read_bytes())
    lines = (folder / DEV).read_text("utf-8").splitlines(keepends=True)
    write_atomic(output / DEV, "".join(lines[:_EXAMPLES]).encode())
    write_parameters(output, {name: x.half() for name, x in load_file(folder / MODEL).items()})


def accuracy(folder: Path) -> str:
    """Translate the test set; return a sentence that states the exact-match rate."""
    test = make_corpus().test
    translations = load_translator(folder).translate([pair.source for pair in test])
    scores = evaluate([each.text for each in translations], [pair.target for pair in test])
    return f"{len(test):,} sentences with unseen values: {scores.exact:.1%} exactly right."


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m regard.app.dates", description=__doc__)
    parser.add_argument("folder", help="Where to save the model.", type=Path)
    parser.add_argument("--updates", type=int, help="Optimizer updates. [default: ten epochs]")
    arguments = parser.parse_args()
    start = time.monotonic()
    train_dates(arguments.folder, arguments.updates)
    seconds, threads = time.monotonic() - start, torch.get_num_threads()
    print(f"{seconds:.0f} s on {threads} threads. Saved in {arguments.folder}.")
    print(accuracy(arguments.folder))

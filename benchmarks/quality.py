"""BLEU on Multi30k test2016 by number of training pairs, settings and seed.

    python -m benchmarks.quality --pairs 3000 5000 --seeds 0 1 2
    python -m benchmarks.quality --pairs 29000 --minutes 15 40 --only auto
    python -m benchmarks.quality --pairs 3000 --only auto guided --set training.epochs=20

Each variant is the preset auto with some settings changed; `small` is the preset of that name.
`back-translated` adds twice as many pairs: target lines that follow in the corpus, and samples of a model for
the other direction, trained on the same pairs. The runs are sequential, and each appends its result to
--output, so an interrupted benchmark can be continued.
"""

import argparse
import json
import shutil
import time
from collections.abc import Sequence
from itertools import islice, product
from pathlib import Path

from benchmarks.multi30k import FOLDER
from regard.models import keep_memory
from regard.translation import (
    Pair,
    Sample,
    TranslationConfig,
    choose_config,
    evaluate,
    load_translator,
    read_pairs,
    train,
)
from regard.translation.training.progress import create_display

VARIANTS: dict[str, list[str]] = {
    "auto": [],
    "no-sampling": ["training.subword_sampling=0"],
    "more-sampling": ["training.subword_sampling=0.2"],
    "guided": ["training.guided_alignment_weight=0.3"],
    "dropout-0.1": ["model.dropout=0.1"],
    "dropout-0.4": ["model.dropout=0.4"],
    "half-vocabulary": [],  # see _config
    "double-vocabulary": [],
    "wider": [],
    "deeper": [],
    "average-5": ["training.average_checkpoints=5"],
    "smoothing-0.2": ["training.label_smoothing=0.2"],
    "back-translated": [],  # see _back_translate
    "small": [],
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.quality", description=__doc__.split("\n")[0])
    parser.add_argument("--languages", default="de-en", help="source and target [default: de-en]")
    parser.add_argument("--pairs", type=int, nargs="+", default=[3000], help="training pairs [default: 3000]")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="random seeds [default: 0]")
    parser.add_argument(
        "--minutes", type=float, nargs="+", default=[0.0], help="training time [default: the preset's]"
    )
    parser.add_argument(
        "--only", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="variants [default: all]"
    )
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="settings of all runs")
    parser.add_argument(
        "--output", type=Path, default=Path("quality.jsonl"), help="results [default: quality.jsonl]"
    )
    args = parser.parse_args()
    keep_memory()
    lines = args.output.read_text().splitlines() if args.output.exists() else []
    done = {json.dumps(json.loads(line)["run"]) for line in lines}
    for pairs, minutes, seed, variant in product(args.pairs, args.minutes, args.seeds, args.only):
        run = [args.languages, pairs, minutes, seed, variant, args.set]
        if json.dumps(run) in done:
            continue
        result = measure(args.languages.split("-"), pairs, minutes, seed, variant, args.set)
        with args.output.open("a") as file:
            file.write(json.dumps({"run": run} | result) + "\n")
        print(*run[:5], " ".join(f"{name} {value}" for name, value in result.items()), flush=True)


def measure(
    languages: Sequence[str], pairs: int, minutes: float, seed: int, variant: str, settings: Sequence[str]
) -> dict[str, float]:
    """Train one model; return its BLEU on test2016 (beam 5), parameters and times."""
    folder = Path("quality-model")
    shutil.rmtree(folder, ignore_errors=True)
    train_set, dev, test = (
        read_pairs(*(FOLDER / f"{name}.{language}" for language in languages))
        for name in ("train", "val", "test_2016_flickr")
    )
    common = [f"training.seed={seed}", *([f"training.minutes={minutes}"] if minutes else []), *settings]

    def choose(statistics) -> TranslationConfig:
        return _config(choose_config(statistics, minutes=minutes or None), variant).override(
            [*VARIANTS[variant], *common]
        )

    start, cpu = time.monotonic(), time.process_time()
    corpus = list(islice(train_set, pairs))
    if variant == "back-translated":
        lines = [pair.target for pair in islice(train_set, 2 * pairs)]
        dev = list(dev)
        corpus += _back_translate(corpus, dev, lines, seed, settings)
    train(folder, corpus, dev=dev, config=choose, callbacks=[create_display()])
    seconds, cpu = time.monotonic() - start, time.process_time() - cpu
    translator = load_translator(folder)
    sources, references = zip(*test, strict=True)
    bleu = evaluate([str(line) for line in translator.translate(sources)], references).bleu
    parameters = sum(parameter.numel() for parameter in translator.model.parameters())
    return {
        "bleu": round(bleu, 2),
        "parameters": parameters,
        "seconds": round(seconds),
        "cpu_seconds": round(cpu),
    }


def _back_translate(
    pairs: Sequence[Pair], dev: Sequence[Pair], lines: Sequence[str], seed: int, settings: Sequence[str]
) -> list[Pair]:
    """Pair target lines with tagged samples of a model for the other direction (Caswell et al. 2019)."""
    folder = Path("quality-reverse")
    shutil.rmtree(folder, ignore_errors=True)
    train(
        folder,
        [Pair(target, source) for source, target in pairs],
        dev=[Pair(target, source) for source, target in dev],
        config=lambda statistics: choose_config(statistics).override([f"training.seed={seed}", *settings]),
        callbacks=[create_display()],
    )
    samples = load_translator(folder).translate(lines, strategy=Sample(seed=seed))
    return [Pair(f"<BT> {sample}", line) for sample, line in zip(samples, lines, strict=True)]


def _config(config: TranslationConfig, variant: str) -> TranslationConfig:
    """Apply a variant to the config that the preset chose."""
    model, size = config.model, config.tokens.size
    changes: dict[str, list[str]] = {
        "half-vocabulary": [f"tokens.size={size // 2}"],
        "double-vocabulary": [f"tokens.size={size * 2}"],
        "wider": [f"model.width={2 * model.width}", f"model.heads={2 * model.heads}"],
        "deeper": [f"model.layers={model.layers + 1}"],
    }
    if variant == "small":
        return TranslationConfig.preset("small")
    return config.override(changes.get(variant, []))


if __name__ == "__main__":
    main()

"""BLEU of JoeyNMT on Multi30k test2016 after training on a few pairs, to compare with `benchmarks.quality`.

    make bench-peers
    python -m benchmarks.joeynmt_quality --pairs 3000 5000 --seeds 0 1 2

JoeyNMT trains a Transformer on the same pairs, divided into pieces by a joint SentencePiece vocabulary, which
JoeyNMT 2.3 cannot load itself with sentencepiece 0.2.2. Its best checkpoint on the validation set translates
test2016 with beam 5. The learning rate follows an inverse square root, because JoeyNMT's plateau scheduler
does not work with torch 2.13. Runs are sequential.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from itertools import islice, product
from pathlib import Path
from typing import Any

import sentencepiece

from benchmarks.multi30k import FOLDER
from regard.translation import evaluate

SPECIAL = {"unk_token": "<unk>", "pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
SETS = {"train": "train", "dev": "val", "test": "test_2016_flickr"}
MAX_DEV = 300  # validation pairs; JoeyNMT takes minutes to translate all 1,014


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.joeynmt_quality", description=__doc__.split("\n")[0])
    parser.add_argument("--languages", default="de-en", help="source and target [default: de-en]")
    parser.add_argument("--pairs", type=int, nargs="+", default=[3000], help="training pairs [default: 3000]")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="random seeds [default: 0]")
    parser.add_argument("--vocabulary", type=int, default=2000, help="joint vocabulary size [default: 2000]")
    parser.add_argument("--layers", type=int, default=2, help="layers of encoder and decoder [default: 2]")
    parser.add_argument("--width", type=int, default=128, help="model dimension [default: 128]")
    parser.add_argument("--dropout", type=float, default=0.3, help="[default: 0.3]")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="[default: 0.002]")
    parser.add_argument("--batch-tokens", type=int, default=1500, help="tokens per batch [default: 1500]")
    parser.add_argument("--epochs", type=int, default=50, help="[default: 50]")
    args = parser.parse_args()
    for pairs, seed in product(args.pairs, args.seeds):
        start, folder = time.monotonic(), Path("joeynmt-model")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        bleu = measure(folder, args.languages.split("-"), pairs, seed, args)
        print(
            args.languages, pairs, seed, f"bleu {bleu:.2f} seconds {time.monotonic() - start:.0f}", flush=True
        )


def measure(
    folder: Path, languages: Sequence[str], pairs: int, seed: int, options: argparse.Namespace
) -> float:
    """Train JoeyNMT in a folder; return the BLEU of test2016."""
    text = {
        (name, language): read_lines(
            FOLDER / f"{file}.{language}", {"train": pairs, "dev": MAX_DEV}.get(name)
        )
        for language, (name, file) in product(languages, SETS.items())
    }
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*text["train", languages[0]], *text["train", languages[1]]]),
        model_prefix=str(folder / "tokens"),
        vocab_size=options.vocabulary,
        character_coverage=1.0,
        unk_id=0,
        pad_id=1,
        bos_id=2,
        eos_id=3,
        minloglevel=2,
    )
    tokens = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokens.model"))
    write_lines(folder / "vocabulary", (tokens.id_to_piece(i) for i in range(4, tokens.get_piece_size())))
    for (name, language), lines in text.items():
        write_lines(
            folder / f"{name}.{language}", (" ".join(pieces) for pieces in tokens.encode(lines, out_type=str))
        )
    config = folder / "config.yaml"  # JSON is valid YAML
    config.write_text(json.dumps(joeynmt_config(folder, languages, seed, options), indent=1))
    done = subprocess.run(
        [sys.executable, "-m", "joeynmt", "train", config, "--skip-test"],
        env=os.environ | {"PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"JoeyNMT failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    subprocess.run(
        [sys.executable, "-m", "joeynmt", "test", config, "--output-path", folder / "translations"],
        check=True,
        capture_output=True,
    )
    translations = [tokens.decode(line.split()) for line in read_lines(folder / "translations.test")]
    return float(evaluate(translations, text["test", languages[1]]).bleu)


def joeynmt_config(
    folder: Path, languages: Sequence[str], seed: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Return a JoeyNMT 2.3 config: a pre-norm Transformer with tied embeddings."""
    side = {
        "max_length": 100,
        "lowercase": False,
        "normalize": False,
        "level": "word",  # the pieces
        "voc_file": str(folder / "vocabulary"),
    }
    stack = {
        "type": "transformer",
        "num_layers": options.layers,
        "num_heads": options.width // 32,
        "embeddings": {"embedding_dim": options.width, "scale": True, "dropout": 0.0},
        "hidden_size": options.width,
        "ff_size": 4 * options.width,
        "dropout": options.dropout,
        "layer_norm": "pre",
    }
    symbols = {"unk_id": 0, "pad_id": 1, "bos_id": 2, "eos_id": 3}
    return {
        "name": "multi30k",
        "joeynmt_version": "2.3.0",
        "model_dir": str(folder / "model"),
        "use_cuda": False,
        "random_seed": seed + 1,  # JoeyNMT does not accept 0
        "data": {
            **{name: str(folder / name) for name in SETS},
            "dataset_type": "plain",
            "src": {"lang": languages[0], **side},
            "trg": {"lang": languages[1], **side},
            "special_symbols": SPECIAL | symbols,
        },
        "testing": {
            "beam_size": 5,
            "beam_alpha": 1.0,
            "batch_size": 1024,
            "batch_type": "token",
            "max_output_length": 100,
            "eval_metrics": ["bleu"],
            "sacrebleu_cfg": {"tokenize": "none"},
        },
        "training": {
            "optimizer": "adamw",
            "adam_betas": [0.9, 0.98],
            "normalization": "tokens",
            "learning_rate": options.learning_rate,
            "scheduling": "warmupinversesquareroot",
            "learning_rate_warmup": 400,
            "loss": "crossentropy",
            "label_smoothing": 0.1,
            "clip_grad_norm": 1.0,
            "batch_size": options.batch_tokens,
            "batch_type": "token",
            "epochs": options.epochs,
            "validation_freq": 600,
            "logging_freq": 100,
            "early_stopping_metric": "bleu",
            "shuffle": True,
            "keep_best_ckpts": 3,
            "overwrite": True,
        },
        "model": {
            "initializer": "xavier_uniform",
            "embed_initializer": "xavier_uniform",
            "bias_initializer": "zeros",
            "tied_embeddings": True,
            "tied_softmax": True,
            "encoder": stack,
            "decoder": stack,
        },
    }


def read_lines(path: Path, count: int | None = None) -> list[str]:
    """Return the first lines of a file, or all of them."""
    with path.open(encoding="utf-8") as file:
        return [line.rstrip("\n") for line in islice(file, count)]


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Write lines, each followed by a newline."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in lines)


if __name__ == "__main__":
    main()

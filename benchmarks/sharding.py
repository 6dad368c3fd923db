"""Peak memory of each training process, with and without sharded parameters.

Every run starts torchrun, trains a few updates with validation, averaging and checkpoints, and reports the
peak resident memory (VmHWM) of each process, with one thread each. `regard train` keeps freed memory and
`regard train --shard` returns it. To isolate the effect of sharding, data-parallel training is measured
both ways.
"""

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.machine import peak_memory

VOCABULARY, LENGTH, PAIRS = 8_000, 24, 400


class Size(NamedTuple):
    """A Transformer: model dimension and blocks per stack."""

    width: int
    layers: int


class Mode(NamedTuple):
    """A training mode: sharded or not, and whether freed memory is kept or returned."""

    shard: bool
    keep: bool

    @property
    def name(self) -> str:
        """Label for printing."""
        return f"{'sharded' if self.shard else 'parallel'}, {'kept' if self.keep else 'returned'}"


MODES = (Mode(shard=False, keep=True), Mode(shard=False, keep=False), Mode(shard=True, keep=False))
SIZES = (Size(512, 6), Size(768, 6))
PROCESSES = (2, 4)


def main(quick: bool = False) -> list[dict[str, object]]:
    """Print and return the peak of rank 0 and the highest of the other ranks, in MB."""
    sizes, processes = ((Size(128, 2),), (2,)) if quick else (SIZES, PROCESSES)
    print(
        "\npeak memory per process in MB, rank 0 / highest of the others; freed memory kept or returned;\n"
        f"vocabulary of {VOCABULARY:,}, 1,000 tokens per batch, average of two checkpoints"
    )
    results: list[dict[str, object]] = []
    for size in sizes:
        for number in processes:
            print(f"  width {size.width}, {size.layers} + {size.layers} blocks, {number} processes")
            for mode in MODES:
                results.append(_run(size, number, mode))
                _print_row(mode, results[-1])
    return results


def _run(size: Size, processes: int, mode: Mode) -> dict[str, object]:
    header: dict[str, object] = {**size._asdict(), "processes": processes, **mode._asdict()}
    numbers = [str(int(number)) for number in (*size, *mode)]
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"),
            *("-m", "benchmarks.sharding", folder, *numbers),
        ]
        process = subprocess.run(command, capture_output=True, text=True)
        if process.returncode:
            return header | {"error": process.stderr}
        return header | {
            "peaks_mb": [float(_peak_file(folder, rank).read_text()) for rank in range(processes)]
        }


def _peak_file(folder: str | Path, rank: int) -> Path:
    return Path(folder) / f"peak-{rank}"


def _print_row(mode: Mode, result: dict[str, object]) -> None:
    if "error" in result:
        print(f"    {mode.name:24}failed: {str(result['error']).strip().splitlines()[-1]}", flush=True)
        return
    first, *others = result["peaks_mb"]  # type: ignore[misc]
    print(f"    {mode.name:24}{first:8,.0f} / {max(others):,.0f}", flush=True)


def measure(folder: Path, size: Size, mode: Mode) -> None:
    """Train in this process, started by torchrun, and write its peak memory to a file."""
    from regard.models import keep_memory, return_memory
    from regard.translation.config import TranslationConfig
    from regard.translation.data.batches import InMemoryPairs
    from regard.translation.data.pairs import Pair
    from regard.translation.tokens import Tokenizer, TokenizerPair
    from regard.translation.training.distributed.world import join_world
    from regard.translation.training.loop import Trainer
    from regard.translation.training.preparation import TrainingData

    torch.set_num_threads(1)
    _ = keep_memory() if mode.keep else return_memory()
    words = [f"w{number}" for number in range(VOCABULARY - 4)]
    tokens = Tokenizer.learn([" ".join(words)], kind="words", size=VOCABULARY)
    sentences = torch.randint(len(words), (PAIRS, LENGTH), generator=torch.Generator().manual_seed(0))
    texts = [" ".join(words[number] for number in row) for row in sentences.tolist()]
    ids = InMemoryPairs([(tokens.encode(text), tokens.encode(text)) for text in texts])
    dev = [Pair(text, text) for text in texts[:8]]
    config = TranslationConfig.preset("base").override(
        [
            *(f"model.width={size.width}", f"model.layers={size.layers}", f"model.heads={size.width // 64}"),
            *("training.batch_tokens=1000", "training.updates=4", "training.validate_every=2"),
            *("training.save_every=2", "training.average_checkpoints=2", "training.metric=loss"),
        ]
    )
    with join_world(shard=mode.shard) as world:
        Trainer(folder, config, TrainingData(TokenizerPair(tokens, tokens), ids, dev), world=world).run()
        _peak_file(folder, world.rank).write_text(str(peak_memory()))


if __name__ == "__main__":
    width, layers, shard, keep = map(int, sys.argv[2:])
    measure(Path(sys.argv[1]), Size(width, layers), Mode(bool(shard), bool(keep)))

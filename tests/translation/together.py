"""The script that torchrun starts: train `small` in a folder.

    torchrun … together.py FOLDER [--shard] [--kill RANK:UPDATE] [--full UPDATE] [--held] [setting=value …]

--kill: kill this process before this update, once.
--full: from this update on, files cannot grow beyond a few kilobytes.
--held: each process writes FOLDER/held-RANK: the peak number of parameters that it held inside a block, and
    the size of the model.
"""

import gc
import os
import resource
import signal
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from regard.errors import RegardError
from regard.models.layers.blocks import FeedForward
from regard.translation.config import TranslationConfig
from regard.translation.data.batches import InMemoryPairs
from regard.translation.training.distributed.world import World, join_world
from regard.translation.training.loop import Trainer, TrainingResult
from regard.translation.training.preparation import TrainingData
from regard.translation.training.progress import PlainDisplay
from tests.translation.small import DEV, PAIRS, TOKENS, small_config

_SHARED = TOKENS.source
_LONG = ([_SHARED.encode("1")[0]] * 40, [_SHARED.encode("2")[0]] * 40)
# the long pair is a batch by itself: only one process gets a part of it
_ALL = [*((_SHARED.encode(pair.source), _SHARED.encode(pair.target)) for pair in PAIRS), _LONG]
IDS = InMemoryPairs(_ALL)
LINKS = InMemoryPairs([(range(len(source))[::-1], range(len(source))) for source, _ in _ALL])  # reversed
DATA = TrainingData(TOKENS, IDS, DEV, LINKS)
_SETTINGS = """
model.dropout=0 training.accumulate=2 training.batch_tokens=64 training.max_grad_norm=2 training.updates=14
training.validate_every=4 training.save_every=3 training.average_checkpoints=8 training.metric=loss
training.threads=1
"""


def config(model: str = "transformer", settings: Sequence[str] = ()) -> TranslationConfig:
    """Return a config without dropout, which is sampled per process; keep and average all checkpoints."""
    guided = ["guided_alignment_weight=0.3"] if model == "transformer" else []
    return small_config(model, *_SETTINGS.split(), *guided, *settings)


def train(folder: Path, config: TranslationConfig, world: World | None = None) -> TrainingResult:
    """Train in a folder, from its last checkpoint."""
    return Trainer(folder, config, DATA, world=world).run()


class FailingTrainer(Trainer):
    """A trainer that can be killed, or run out of disk space."""

    options: Namespace

    def _update(self, batches):
        options, step, mark = self.options, self.progress.step, self.folder / "killed"
        if options.kill == f"{self.world.rank}:{step}" and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if options.full is not None and step >= options.full:
            resource.setrlimit(resource.RLIMIT_FSIZE, (8000, 8000))
        return super()._update(batches)


class Held:
    """Measures the peak number of parameter values in this process inside a block, in memory or mapped."""

    def __init__(self) -> None:
        self.peak = 0
        register_module_forward_hook(self._count)

    def _count(self, module: nn.Module, inputs: object, output: object) -> None:
        if isinstance(module, FeedForward):
            objects = gc.get_objects()
            parameters = (item for item in objects if isinstance(item, nn.Parameter) and not item.is_meta)
            self.peak = max(self.peak, sum(map(self._numel, parameters)))

    @staticmethod
    def _numel(parameter: nn.Parameter) -> int:
        local = getattr(parameter, "_local_tensor", parameter)  # sharded parameters
        return local.numel() if local.untyped_storage().nbytes() else 0  # FSDP empties freed storage


def main(arguments: Sequence[str] | None = None) -> None:
    """Train as one of several processes."""
    gc.freeze()  # `Held` counts later objects
    parser = ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="transformer")
    parser.add_argument("--shard", action="store_true")
    parser.add_argument("--kill")
    parser.add_argument("--full", type=int)
    parser.add_argument("--held", action="store_true")
    parser.add_argument("settings", nargs="*")
    options = parser.parse_intermixed_args(arguments)
    torch.set_num_threads(1)
    try:
        with join_world(shard=options.shard) as world:
            settings = config(options.model, options.settings)
            trainer = FailingTrainer(options.folder, settings, DATA, callbacks=[PlainDisplay()], world=world)
            trainer.options = options
            held = Held() if options.held else None
            finished = trainer.run().finished
            if held is not None:
                whole = sum(parameter.numel() for parameter in trainer.model.parameters())
                (options.folder / f"held-{world.rank}").write_text(f"{held.peak} {whole}")
    except (RegardError, OSError) as error:
        sys.exit(f"refused: {error}")
    if world.rank == 0:
        print("finished" if finished else "stopped")


if __name__ == "__main__":
    main()

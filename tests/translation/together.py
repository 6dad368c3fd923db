"""What torchrun starts in each process: the training of `small`, in a folder.

    torchrun … together.py FOLDER [--shard] [--kill RANK:UPDATE] [--full UPDATE] [--held] [setting=value …]

--kill: that process is killed before that update, the first time it comes there.
--full: from that update on no file can grow beyond a few kilobytes.
--held: each process writes FOLDER/held-RANK: the most parameters that it held inside a block, and how many
    the model has.
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
from regard.translation.training.distributed import World, join_world
from regard.translation.training.loop import Trainer, TrainingResult
from regard.translation.training.progress import PlainDisplay
from tests.translation.small import DEV, PAIRS, TOKENS, small_config

_SHARED = TOKENS.source
_LONG = ([_SHARED.encode("1")[0]] * 40, [_SHARED.encode("2")[0]] * 40)
# the long pair is a batch of its own, of which one process alone gets a part
_ALL = [*((_SHARED.encode(one.source), _SHARED.encode(one.target)) for one in PAIRS), _LONG]
IDS = InMemoryPairs(_ALL)
LINKS = InMemoryPairs(
    [(range(len(source))[::-1], range(len(source))) for source, _ in _ALL]
)  # the last is the first


def config(model: str = "transformer", settings: Sequence[str] = ()) -> TranslationConfig:
    """Without dropout, which each process draws by itself; all checkpoints are kept, and averaged."""
    ours = [
        *("model.dropout=0", "training.accumulate=2", "training.batch_tokens=64", "training.max_grad_norm=2"),
        *(
            "training.updates=14",
            "training.validate_every=4",
            "training.save_every=3",
            "training.average_checkpoints=8",
        ),
        *("training.metric=loss", "training.threads=1"),
        *(["training.guided_alignment_weight=0.3"] if model == "transformer" else []),
    ]
    return small_config(model, *ours, *settings)


def train(folder: Path, config: TranslationConfig, world: World | None = None) -> TrainingResult:
    """Train in a folder, from wherever it stands."""
    return Trainer(folder, config, TOKENS, IDS, DEV, links=LINKS, world=world).run()


class Fated(Trainer):
    """A training to which something happens."""

    fate: Namespace

    def _update(self, batches):  # type: ignore[no-untyped-def]
        fate, step, mark = self.fate, self.progress.step, self.folder / "killed"
        if fate.kill == f"{self.world.rank}:{step}" and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if fate.full is not None and step >= fate.full:
            resource.setrlimit(resource.RLIMIT_FSIZE, (8000, 8000))
        return super()._update(batches)


class Held:
    """The most numbers that all living parameters of this process had inside a block, in memory or mapped."""

    def __init__(self) -> None:
        self.most = 0
        register_module_forward_hook(self._count)

    def _count(self, module: nn.Module, given: object, output: object) -> None:
        if isinstance(module, FeedForward):
            found = (one for one in gc.get_objects() if isinstance(one, nn.Parameter) and not one.is_meta)
            self.most = max(self.most, sum(map(self._numbers, found)))

    @staticmethod
    def _numbers(parameter: nn.Parameter) -> int:
        local = getattr(parameter, "_local_tensor", parameter)  # of a sharded one
        return local.numel() if local.untyped_storage().nbytes() else 0  # FSDP empties what it frees


def main() -> None:
    """Train, as one of several processes."""
    parser = ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="transformer")
    parser.add_argument("--shard", action="store_true")
    parser.add_argument("--kill")
    parser.add_argument("--full", type=int)
    parser.add_argument("--held", action="store_true")
    parser.add_argument("settings", nargs="*")
    given = parser.parse_intermixed_args()
    torch.set_num_threads(1)
    try:
        with join_world(shard=given.shard) as world:
            data, settings = (TOKENS, IDS, DEV), config(given.model, given.settings)
            trainer = Fated(
                given.folder, settings, *data, links=LINKS, callbacks=[PlainDisplay()], world=world
            )
            trainer.fate = given
            held = Held() if given.held else None
            finished = trainer.run().finished
            if held is not None:
                whole = sum(parameter.numel() for parameter in trainer.model.parameters())
                (given.folder / f"held-{world.rank}").write_text(f"{held.most} {whole}")
    except (RegardError, OSError) as error:
        sys.exit(f"refused: {error}")
    if world.rank == 0:
        print("finished" if finished else "stopped")


if __name__ == "__main__":
    main()

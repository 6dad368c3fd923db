"""Distributed training in two processes over gloo equals training in one process.

The slow tests start the processes with torchrun, the others with a fork.
"""

import errno
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from regard.errors import ArgumentError
from regard.translation.model_folder import MODEL, OPTIMIZER
from regard.translation.training.checkpoint import Checkpoint
from regard.translation.training.distributed.world import RemoteError, Sharded, World, join_world
from regard.translation.training.train import train as train_folder
from regard.translation.translator import load_translator
from tests.translation.processes import run_together, torchrun_variables
from tests.translation.small import DEV, PAIRS
from tests.translation.together import config, train

ROOT = Path(__file__).parents[4]
KINDS = {"parallel": False, "sharded": True}
UPDATES = config().training.updates
assert UPDATES is not None
SHARD = pytest.mark.parametrize("shard", KINDS.values(), ids=KINDS)
BEGUN = 6  # a regular checkpoint

Folder = Callable[..., Path]


def worlds(*quick: str) -> pytest.MarkDecorator:
    """Parametrize over all models, parallel and sharded; the models not named here are slow tests."""
    names = [f"{model} {kind}" for model in ("transformer", "recurrent", "plain") for kind in KINDS]
    return pytest.mark.parametrize(
        "world", [pytest.param(name, marks=[pytest.mark.slow] * (name not in quick)) for name in names]
    )


def command(folder: Path, *options: object, processes: int = 2, restarts: int = 0) -> list[str]:
    """Return the torchrun command."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    script = [f"--max-restarts={restarts}", "-m", "tests.translation.together", str(folder)]
    return [*start, *script, *map(str, options)]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def together(folder: Path, *options: object, processes: int = 2, restarts: int = 0, status: int = 0) -> str:
    """Train in several processes; return their output."""
    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        command(folder, *options, processes=processes, restarts=restarts),
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
    )
    assert done.returncode == status, done.stdout
    return done.stdout


def begun(alone: Path, folder: Path) -> Path:
    """Copy the checkpoints of a single-process run, up to the middle of the run."""
    shutil.copytree(alone / "checkpoints", folder / "checkpoints")
    for checkpoint in Checkpoint.all(folder):
        if checkpoint.step > BEGUN:
            shutil.rmtree(checkpoint.path)
    assert [checkpoint.step for checkpoint in Checkpoint.all(folder)][-1:] == [BEGUN]
    return folder


def last(folder: Path) -> Checkpoint:
    found = Checkpoint.all(folder)[-1]
    assert found.step == UPDATES
    return found


def assert_close(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """Check equality up to rounding, relative to the largest value of each kind of tensor."""
    assert found.keys() == wanted.keys()
    kinds = {name: name.partition(":")[0] if ":" in name else "" for name in found}
    for name, tensor in found.items():
        scale = max(float(found[other].abs().max()) for other in found if kinds[other] == kinds[name])
        assert tensor.numel() == wanted[name].numel()
        difference = float((_decided(name, tensor) - _decided(name, wanted[name])).abs().max())
        assert difference <= 1e-3 * scale, (name, difference, scale)


def _decided(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Exclude key biases: softmax is invariant to them, so only rounding determines them."""
    if name.endswith("in_proj.bias") and ":" not in name:
        query, _, value = tensor.chunk(3)
        return torch.cat([query, value])
    return tensor.reshape(-1)


def assert_same_training(first: Path, second: Path) -> None:
    """Check for equal weights, optimizer state and best validation."""
    a, b = last(first), last(second)
    for name in (MODEL, OPTIMIZER):
        assert_close(load_file(a.path / name), load_file(b.path / name))
    assert a.state()["best_step"] == b.state()["best_step"]
    assert math.isclose(a.state()["best"], b.state()["best"], rel_tol=1e-3)


def assert_equal_training(first: Path, second: Path) -> None:
    """Check for bitwise equality."""
    for name in (MODEL, OPTIMIZER):
        assert (last(first).path / name).read_bytes() == (last(second).path / name).read_bytes()
    assert (first / MODEL).read_bytes() == (second / MODEL).read_bytes()


@pytest.fixture(scope="module")
def trained_alone(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """Folders trained in this process, one per model, with all checkpoints."""
    made: dict[str, Path] = {}

    def folder(model: str = "transformer") -> Path:
        if model not in made:
            made[model] = tmp_path_factory.mktemp(model)
            train(made[model], config(model))
        return made[model]

    return folder


@pytest.fixture
def one_of_one(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Set the environment of a single process under torchrun."""
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", **torchrun_variables(1)}.items():
        monkeypatch.setenv(name, value)
    yield
    assert not torch.distributed.is_initialized()


def test_without_torchrun_there_is_one_process(monkeypatch):
    with join_world() as world:
        assert (type(world), world.rank, world.size, world.sum(2.5)) == (World, 0, 1, 2.5)
    with pytest.raises(ArgumentError, match="torchrun --nproc-per-node 2"), join_world(shard=True):
        pass
    monkeypatch.setenv("WORLD_SIZE", "2")  # otherwise each process would train alone in the same folder
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ArgumentError, match="WORLD_SIZE=2, but LOCAL_RANK is not set"), join_world():
        pass


@pytest.mark.sampled(2)
@worlds("recurrent parallel", "plain sharded")  # the next test trains Transformers
@pytest.mark.usefixtures("one_of_one", "one_thread")
def test_a_world_of_one_equals_a_single_process(world, trained_alone, tmp_path):
    model, kind = world.split()
    with join_world(shard=KINDS[kind]) as joined:
        assert type(joined) is (Sharded if KINDS[kind] else World)
        train(tmp_path, config(model), joined)
    assert_same_training(trained_alone(model), tmp_path)


@pytest.mark.sampled(2)
@SHARD
@pytest.mark.usefixtures("one_of_one", "one_thread")
def test_checkpoints_are_interchangeable(shard, trained_alone, tmp_path):
    """A single-process run is resumed in several processes, then in a single process again."""
    begun(trained_alone(), tmp_path)
    with join_world(shard=shard) as world:
        train(tmp_path, config(), world)
    names = ["SHA256SUMS", "model.safetensors", "optimizer.safetensors", "state.json"]
    for checkpoint in Checkpoint.all(tmp_path):
        assert sorted(path.name for path in checkpoint.path.iterdir()) == names
        if checkpoint.step > 9:
            shutil.rmtree(checkpoint.path)
    train(tmp_path, config())
    assert_same_training(trained_alone(), tmp_path)


@pytest.mark.sampled(3)
@worlds("recurrent sharded", "plain parallel", "transformer sharded")
@pytest.mark.usefixtures("one_of_one", "one_thread")
def test_a_model_trained_in_a_world_translates(world, tmp_path):
    model, kind = world.split()
    short = config(
        model, ["updates=4", "validate_every=2", "average_checkpoints=2", "guided_alignment_weight=0"]
    )
    with join_world(shard=KINDS[kind]) as joined:
        assert train_folder(tmp_path / "model", PAIRS, dev=DEV, config=short, world=joined).finished
    translator = load_translator(tmp_path / "model")
    assert len(translator.translate(["1 2 3"])) == 1
    assert not list(tmp_path.rglob("*.part"))


@SHARD
@pytest.mark.usefixtures("one_of_one")
def test_an_error_destroys_the_process_group(shard):
    with pytest.raises(ArgumentError, match="mine"), join_world(shard=shard) as world, world.sync_errors():
        raise ArgumentError("mine")
    with pytest.raises(SystemExit), join_world(shard=shard):  # reported by the other process
        raise RemoteError("its own")


@pytest.mark.usefixtures("one_of_one", "one_thread")
def test_a_failed_sharded_checkpoint_keeps_the_last_one(trained_alone, tmp_path, monkeypatch):
    def full(*given: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    folder = begun(trained_alone(), tmp_path)
    with monkeypatch.context() as patch, join_world(shard=True) as world:
        patch.setattr("regard.translation.training.distributed.world.json", SimpleNamespace(dumps=full))
        with pytest.raises(OSError, match=r"No space left on device.*step-00000008"):
            train(folder, config(), world)
    assert Checkpoint.all(folder)[-1].step == BEGUN
    assert not list(folder.rglob("*.part"))
    train(folder, config())
    assert_same_training(trained_alone(), folder)


@pytest.mark.sampled(2)
@SHARD
def test_two_processes_equal_one(shard, trained_alone, tmp_path):
    """Training continues from a checkpoint of one process; the slow tests train from the start."""
    folder = begun(trained_alone(), tmp_path)
    arguments = [str(folder), *["--shard"] * shard]
    preload = "sacrebleu, torch.distributed.fsdp, tests.translation.together"
    done = run_together(f"tests.translation.together.main({arguments})", preload=preload)
    assert (done.returncode, done.stderr) == (0, "")
    assert_same_training(trained_alone(), folder)
    assert done.stdout.count("finished") == 1  # only rank 0 prints
    assert "resuming after step" in done.stdout


@pytest.mark.slow
@SHARD
def test_a_process_holds_a_part_of_a_sharded_model(shard, tmp_path):
    """This is true in updates and in validations; without sharding, a process holds the whole model."""
    settings = ["model.layers=4", "updates=4", "validate_every=2", "save_every=2"]
    together(tmp_path, "--held", *["--shard"] * shard, *settings)
    for rank in range(2):
        most, whole = map(int, (tmp_path / f"held-{rank}").read_text().split())
        assert whole / 2 < most < 0.8 * whole if shard else most >= whole


@pytest.mark.slow
@SHARD
def test_a_failed_write_ends_all_processes_and_damages_nothing(shard, trained_alone, tmp_path):
    folder = begun(trained_alone(), tmp_path)
    output = together(folder, "--full", 8, *["--shard"] * shard, status=1)
    (refused,) = [line for line in output.splitlines() if line.startswith("refused:")]
    assert "step-00000009" in refused
    assert max(path.name for path in (folder / "checkpoints").iterdir()) == "step-00000008"
    assert not list(folder.rglob("*.part"))
    train(folder, config())
    assert_same_training(trained_alone(), folder)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("killed", "options"), [(1, []), (0, ["--shard"])], ids=["parallel", "sharded"])
def test_a_killed_process_changes_nothing(killed, options, tmp_path):
    """torchrun restarts all processes from the last checkpoint; the weights are the same."""
    together(tmp_path / "whole", *options)
    output = together(tmp_path / "cut", *options, "--kill", f"{killed}:10", restarts=1)
    assert (tmp_path / "cut" / "killed").exists()
    assert "resuming after step 9" in output
    assert_equal_training(tmp_path / "whole", tmp_path / "cut")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_three_processes_sum_in_the_same_order_after_a_restart(tmp_path):
    """The model has dropout, and DistributedDataParallel has rebuilt its buckets."""
    settings = ["model.dropout=0.2", "model.width=48"]
    together(tmp_path / "whole", *settings, processes=3)
    together(tmp_path / "cut", *settings, "--kill", "2:10", processes=3, restarts=1)
    assert_equal_training(tmp_path / "whole", tmp_path / "cut")


@pytest.mark.slow
@pytest.mark.timeout(900)
@SHARD
@pytest.mark.parametrize("model", ["recurrent", "plain"])
def test_two_processes_train_recurrent_models(shard, model, trained_alone, tmp_path):
    together(tmp_path, "--model", model, *["--shard"] * shard)
    assert_same_training(trained_alone(model), tmp_path)


@pytest.mark.slow
@SHARD
def test_interrupted_processes_save_and_end(shard, trained_alone, tmp_path):
    folder = begun(trained_alone(), tmp_path)
    options = ["updates=1000000", "schedule=constant", *["--shard"] * shard]
    process = subprocess.Popen(
        command(folder, *options), cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        while "dev loss" not in process.stdout.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        output = process.communicate(timeout=120)[0]
    finally:
        process.kill()
    assert "checkpoint saved" in output
    assert "stopped" in output
    step = Checkpoint.all(folder)[-1].step
    assert f"Stopped after update {step}" in output


@pytest.mark.slow
@SHARD
def test_a_damaged_checkpoint_is_reported_once(shard, trained_alone, tmp_path):
    folder = begun(trained_alone(), tmp_path)
    for checkpoint in Checkpoint.all(folder):
        (checkpoint.path / MODEL).write_bytes(b"not safetensors")
    output = together(folder, *["--shard"] * shard, status=1)
    (refused,) = [line for line in output.splitlines() if line.startswith("refused:")]
    assert f"step-{BEGUN:08}' is corrupted" in refused

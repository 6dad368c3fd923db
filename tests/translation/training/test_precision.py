"""The precision of training is measured once and stored in the checkpoint."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from regard.cli.resume import DEFAULT_LANGUAGES, TrainOptions, _check_config
from regard.errors import ArgumentError
from regard.mechanism import fused
from regard.translation.training import loop, precision
from regard.translation.training.checkpoint import Checkpoint
from regard.translation.training.loop import Progress
from regard.translation.training.precision import MIN_SPEEDUP, PrecisionChoice, choose_precision
from tests.translation.small import Interrupts, Recorder, small_config, small_trainer

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
AUTO = ("precision=auto", "updates=4", "save_every=2", "validate_every=4", "average_checkpoints=1")


def choose(monkeypatch: pytest.MonkeyPatch, products: float, step: float, parameters: int = 1000) -> Any:
    """Choose the precision for given speedups; return the choice and the training steps that were timed."""
    run = list[str]()
    monkeypatch.setattr(precision, "_time_products", lambda width, device: (1e-3 * products, 1e-3))

    def time(run_step: Any, rounds: int) -> tuple[float, float]:
        run_step("bfloat16")
        return step, 1.0

    monkeypatch.setattr(precision, "time_steps", time)
    return choose_precision(run.append, width=16, parameters=parameters, device=CPU), run


def test_bfloat16_is_chosen_where_products_and_steps_are_faster(monkeypatch):
    for products, step, parameters, expected, steps in (
        (0.3, 2.0, 1000, "float32", 0),  # slow products: steps are not timed
        (MIN_SPEEDUP - 0.01, 2.0, 1000, "float32", 0),
        (2.0, MIN_SPEEDUP - 0.01, 1000, "float32", 1),
        (2.0, MIN_SPEEDUP + 0.01, 1000, "bfloat16", 1),
        (2.0, 1.0, 10**9, "bfloat16", 0),  # too large to time a step
    ):
        choice, run = choose(monkeypatch, products, step, parameters)
        assert (choice.precision, len(run)) == (expected, steps), (products, step)
        assert str(choice).startswith(f"matrix products in {expected}: ")


def test_a_processor_that_cannot_run_bfloat16(monkeypatch):
    monkeypatch.setattr(precision, "runs_bfloat16", lambda device: False)
    choice, run = choose(monkeypatch, 2.0, 2.0)
    assert choice == PrecisionChoice("float32", "this processor has no bfloat16 instructions")
    assert not run


def test_processes_choose_together(monkeypatch):
    monkeypatch.setattr(precision, "_time_products", lambda width, device: (1.5, 1.0))

    def sums(numbers):  # the other process is slower in bfloat16
        return [a + b for a, b in zip(numbers, (1.0, 3.0, 1.0) if len(numbers) == 3 else (0.0,), strict=True)]

    choice = choose_precision(lambda _: None, width=4, parameters=10, device=CPU, sums=sums)
    assert choice.precision == "float32"


def test_a_measurement_runs_both_precisions():
    dtypes = list[torch.dtype]()

    def run(name):
        with precision.autocast(name, CPU):
            dtypes.append(torch.nn.functional.linear(torch.ones(1, 2), torch.ones(3, 2)).dtype)

    times = precision.time_steps(run, rounds=2)
    assert dtypes == [torch.float32, torch.bfloat16] * 2
    assert all(0 < seconds < 10 for seconds in times)
    assert all(seconds > 0 for seconds in precision._time_products(8, CPU))


def test_a_resumed_run_keeps_the_chosen_precision(tmp_path, monkeypatch):
    class Fast(Recorder):
        about = ""

        def on_begin(self, about: str, step: int, steps: int) -> None:
            self.about = about

    recorder, config = Fast(), small_config("transformer", *AUTO)
    choice = PrecisionChoice("bfloat16", "1.60 × as fast as float32 on this machine")
    monkeypatch.setattr(loop, "choose_precision", lambda run_step, **sizes: run_step("float32") or choice)
    assert not small_trainer(tmp_path, config, callbacks=[recorder, Interrupts("on_save", 2)]).run().finished
    assert "\nmatrix products in bfloat16: 1.60 × as fast as float32 on this machine" in recorder.about
    assert Checkpoint.all(tmp_path)[-1].state()["precision"] == "bfloat16"

    monkeypatch.setattr(loop, "choose_precision", None)  # another processor does not measure again
    trainer = small_trainer(tmp_path, config, callbacks=[recorder])
    assert trainer.run().finished
    assert trainer.progress.precision == "bfloat16"
    assert "\nmatrix products in bfloat16, as before" in recorder.about

    longer = small_config("transformer", *AUTO, "precision=float32", "updates=6")
    trainer = small_trainer(tmp_path, longer, callbacks=[recorder])
    assert trainer.run().finished
    assert trainer._precision == "float32"

    choice = PrecisionChoice("float32", "bfloat16 is only 0.50 × as fast as float32 on this machine")
    monkeypatch.setattr(loop, "choose_precision", lambda run_step, **sizes: choice)  # measured again
    trainer = small_trainer(tmp_path, small_config("transformer", *AUTO, "updates=8"), callbacks=[recorder])
    assert trainer.run().finished
    assert trainer.progress.precision == "float32"


def test_a_precision_may_change_when_a_run_is_resumed():
    config = small_config("transformer", "precision=auto")
    assert config.is_extended_by(small_config("transformer", "precision=bfloat16"))
    assert not config.is_extended_by(config)
    assert not config.is_extended_by(small_config("transformer", "precision=bfloat16", "seed=1"))
    assert not config.is_extended_by(small_config("transformer", "precision=bfloat16", "updates=1"))
    with pytest.raises(ArgumentError, match="must be one of auto, float32, bfloat16, got 'float16'"):
        small_config("transformer", "precision=float16")


def test_the_command_may_change_the_precision():
    started = small_config("transformer", "precision=auto")
    options = TrainOptions(
        None, None, None, ["training.precision=bfloat16"], None, None, None, False, DEFAULT_LANGUAGES
    )
    config = _check_config(Path("model"), started.to_dict(), options)
    assert config == small_config("transformer", "precision=bfloat16")


def test_a_checkpoint_without_a_precision_can_be_resumed():
    state = Progress(step=3).state
    del state["precision"]
    assert Progress.from_state(state).precision == ""
    with pytest.raises(ValueError, match="precision is 'int3'"):
        Progress.from_state(json.loads(json.dumps(state | {"precision": "int3"})))


class Dtypes(TorchDispatchMode):
    """Records the result dtypes of all matrix products, norms and softmaxes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, set[torch.dtype]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        for name in ("mm", "addmm", "native_layer_norm", "_log_softmax"):
            if func._schema.name == f"aten::{name}":
                first = result[0] if isinstance(result, tuple) else result
                self.seen.setdefault(name, set()).add(first.dtype)
        return result


@pytest.mark.skipif(not fused.available(), reason="needs the kernels")
def test_products_are_bfloat16_norms_float32_and_attention_runs_in_the_kernels(tmp_path, monkeypatch):
    config = small_config(
        "transformer", "precision=bfloat16", "updates=1", "model.dropout=0.1", "accumulate=2"
    )
    calls, call = list[str](), fused._call

    def record(name: str, problem: Any, *args: Any, **options: Any) -> bool:
        calls.append(name)
        return call(name, problem, *args, **options)

    monkeypatch.setattr(fused, "_call", record)
    trainer = small_trainer(tmp_path, config)
    trainer._start()
    trainer._set_precision()
    calls.clear()
    with Dtypes() as dtypes:
        trainer._try_batch(*next(trainer.batches.from_step(0)))
    layers = 3 * config.model.layers  # attention of an encoder and a decoder block, and cross-attention
    assert calls == ["forward"] * layers + ["backward"] * layers
    assert dtypes.seen["native_layer_norm"] == {torch.float32}
    assert dtypes.seen["addmm"] | dtypes.seen["mm"] == {torch.bfloat16}
    assert {p.grad.dtype for p in trainer.model.parameters()} == {torch.float32}

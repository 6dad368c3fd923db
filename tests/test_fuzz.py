"""The fuzzer runs for a minute, and detects known mistakes."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import regard
from regard.mechanism.masks.by_position import Causal
from tests import naive
from tests.cases import looped, pairs
from tests.fuzz import __main__ as command
from tests.fuzz import oracle, runner
from tests.fuzz.case import Case, Failure
from tests.fuzz.draw import draw_mask, draw_shape
from tests.fuzz.targets import autocast, custom, folders, mutation, operator, weights

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.slow
def test_a_minute_finds_nothing():
    seed = ["--seed", "0"] if "CI" in os.environ else []
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz", "--minutes", "1", *seed],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


# The oracle


@looped("case", pairs(masks=["no mask", "union", "padding"]), ids=lambda case: case.name, sampled=4)
def test_the_oracle_agrees_with_the_formulas_pair_by_pair(case):
    inputs, options = case.tensors(), case.options()
    output, expected = naive.attention(*inputs, **options)
    mask, (queries, keys) = options.pop("mask"), output.shape[-2:-1] + inputs[1].shape[-2:-1]
    seen = torch.tensor(
        [
            [[naive.sees(mask, at, i, j, queries, keys) for j in range(keys)] for i in range(queries)]
            for at in naive.indices(output.shape[:-2])
        ]
    ).reshape(expected.shape)
    found = oracle.attention(*inputs, **options, seen=seen)
    assert torch.allclose(found.output, output, atol=1e-8)
    assert torch.allclose(found.weights, expected, atol=1e-8)


def test_drawn_masks_mean_what_they_say(tmp_path):
    for number in range(100):
        random = Case("masks", number, tmp_path).random
        shape = draw_shape(random, "dot", pairs=300)
        mask, seen, text = draw_mask(random, shape)
        seen = seen.expand(*shape.lead, shape.queries, shape.keys)
        for at in naive.indices(shape.lead):
            for i in range(shape.queries):
                for j in range(shape.keys):
                    wanted = naive.sees(mask, at, i, j, shape.queries, shape.keys)
                    assert bool(seen[(*at, i, j)]) == wanted, text


# Detection of mistakes


def finds(target: Callable[[Case], None], folder: Path, message: str, cases: int = 40) -> bool:
    """Return whether one of several cases fails with this message."""
    for number in range(cases):
        try:
            target(Case("test", number, folder))
        except Failure as failure:
            if message in str(failure):
                return True
    return False


@pytest.mark.sampled(3)
@pytest.mark.parametrize("target", [operator.ordinary, weights.run, autocast.run])
def test_a_result_that_is_off_by_one_percent_is_found(target, monkeypatch, tmp_path):
    right = regard.attention, regard.attend

    def attention(*args, **options):
        return right[0](*args, **options) * 1.01

    def attend(*args, **options):
        output, lazy = right[1](*args, **options)
        return output * 1.01, lazy

    monkeypatch.setattr(regard, "attention", attention)
    monkeypatch.setattr(regard, "attend", attend)
    assert finds(target, tmp_path, "output is wrong", 20)


def test_a_wrong_gradient_is_found(monkeypatch, tmp_path):
    right = regard.attention

    def attention(query, *args, **options):
        return right(query * 1.0 + 0.01 * (query - query.detach()), *args, **options)

    monkeypatch.setattr(regard, "attention", attention)
    assert finds(operator.ordinary, tmp_path, "the gradient of query is wrong")


def test_a_mask_that_is_off_by_one_is_found(monkeypatch, tmp_path):
    monkeypatch.setattr(Causal, "ranges", lambda self, position, keys: (None, position))
    assert finds(operator.ordinary, tmp_path, "is wrong")


def test_infinities_that_vanish_are_found(monkeypatch, tmp_path):
    right = regard.attention

    def attention(*args, implementation=None, **options):
        output = right(*args, implementation="reference", **options)
        return output.nan_to_num() if implementation == "tiled" else output

    monkeypatch.setattr(regard, "attention", attention)
    assert finds(operator.extreme, tmp_path, "differ in what is NaN")


def test_a_custom_class_that_one_implementation_accepts_is_found(monkeypatch, tmp_path):
    right = regard.attend

    def attend(query, key, value, *, implementation=None, **options):
        options = {} if implementation == "tiled" else options  # tiled ignores the custom class
        return right(query, key, value, implementation="tiled", **options)

    monkeypatch.setattr(regard, "attend", attend)
    assert finds(custom.run, tmp_path, "one implementation refuses what another accepts")


def test_a_mask_that_is_read_late_is_found(monkeypatch, tmp_path):
    right = regard.attend

    def attend(*args, mask=None, **options):
        """Use the mask of the first call with these sizes for all calls."""
        return right(*args, mask=kept.setdefault(args[0].shape, mask), **options)

    kept: dict[torch.Size, object] = {}
    monkeypatch.setattr(regard, "attend", attend)
    assert finds(mutation.masks, tmp_path, "not that of the mask at the time of the call")


def test_a_loader_that_accepts_a_flipped_bit_is_found(monkeypatch, tmp_path):
    file, saved = tmp_path / "numbers.safetensors", tmp_path / "result"

    def load(folder: Path) -> dict[str, torch.Tensor]:
        return {"numbers": torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8)}

    file.write_bytes(bytes(100))
    torch.save(load(tmp_path), saved)
    monkeypatch.setitem(folders.USES, "numbers loaded", load)
    folders._check("numbers loaded", tmp_path, file, saved, exact=True)
    folders.flip(Case("test", 0, tmp_path), file, [file])
    with pytest.raises(Failure, match="gives another result"):
        folders._check("numbers loaded", tmp_path, file, saved, exact=True)


@pytest.mark.slow
def test_a_read_of_weights_that_differs_from_the_whole_is_found(monkeypatch, tmp_path):
    right = regard.Weights.received
    monkeypatch.setattr(regard.Weights, "received", lambda self: right(self) + 0.1)
    assert finds(weights.run, tmp_path, "received() is wrong")


# The runner


@pytest.mark.slow
def test_deaths_and_hangs_are_failures_of_their_cases(monkeypatch, tmp_path):
    monkeypatch.setattr(runner, "TIMEOUT", 2.0)
    problems = list(runner.cases("broken", iter(range(10, 16)), tmp_path))
    kinds = [None if problem is None else problem.kind for problem in problems]
    assert kinds == [
        None,
        "a failure",
        "KeyError from broken.py, run",
        "the process died: SIGSEGV",
        "the case hangs",
        None,
    ]
    assert problems[3] is not None
    assert (problems[3].number, problems[3].notes) == (13, "way 3")


def test_a_failure_is_printed_once_with_the_command_that_replays_it(monkeypatch, capsys):
    monkeypatch.setitem(runner.WEIGHTS, "broken", 1)
    assert command.main(["--only", "broken", "--case", "1"]) == 1
    printed = capsys.readouterr().out
    assert "FAILED broken: a failure" in printed
    assert "python -m tests.fuzz --only broken --case 1" in printed
    assert command.main(["--only", "broken", "--case", "5"]) == 0


def test_cases_follow_from_target_and_number(tmp_path):
    first, again, other = (Case("operator", number, tmp_path) for number in (7, 7, 8))
    drawn = [draw_shape(case.random, "dot") for case in (first, again, other)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert torch.equal(first.randn(3), again.randn(3))

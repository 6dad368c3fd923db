"""Training logs: content, recovery after a kill, and reading."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.errors import ArgumentError
from regard.translation.training import logs
from regard.translation.training.callbacks import Callback, Report, SampleTranslation, ValidationResult
from regard.translation.training.logs import CsvLog, LogRow, SampleLog, TensorBoardLog, read_log

STEPS = range(50, 501, 50)


def report(step: int) -> Report:
    return Report(step, 1000, step / 7, 100 / step, 1e-3 / step, 7800 + step / 3, step * 1.1, 90.0)


def validation(step: int) -> ValidationResult:
    return ValidationResult(step, 120 / step, step / 13, 0.5, SampleTranslation("a", "b", "c"), True)


def train(log: Callback, after: int = 0, validation_first: bool = False) -> None:
    """Log a report every 50 steps and a validation every 100."""
    log.on_begin("a model", after, 1000)
    for step in (step for step in STEPS if step > after):
        if step % 100 == 0 and validation_first:
            log.on_validation(validation(step))
        log.on_report(report(step))
        if step % 100 == 0 and not validation_first:
            log.on_validation(validation(step))


def begun(folder: Path) -> CsvLog:
    """Return the log of a new training run."""
    log = CsvLog(folder)
    log.on_begin("a model", 0, 1000)
    return log


def test_a_row_for_each_report_and_its_validation(tmp_path):
    train(CsvLog(tmp_path))
    rows = read_log(tmp_path)
    assert (tmp_path / "log.csv").read_text().splitlines()[0] == (
        "step,epoch,loss,learning_rate,tokens_per_second,seconds,dev_loss,dev_bleu"
    )
    assert [row.step for row in rows] == list(STEPS)
    assert [row.step for row in rows if row.dev_bleu is not None] == list(STEPS)[1::2]
    assert rows[1] == pytest.approx(
        LogRow(100, 100 / 7, 1.0, 1e-5, 7800 + 100 / 3, 110.0, 1.2, 100 / 13), rel=1e-6
    )


def test_the_order_of_report_and_validation_does_not_matter(tmp_path):
    train(CsvLog(tmp_path / "a"))
    train(CsvLog(tmp_path / "b"), validation_first=True)
    assert (tmp_path / "a/log.csv").read_bytes() == (tmp_path / "b/log.csv").read_bytes()


def test_each_row_is_written_immediately(tmp_path):
    log = begun(tmp_path)
    assert read_log(tmp_path) == []
    log.on_report(report(50))
    assert [row.step for row in read_log(tmp_path)] == [50]
    log.on_validation(validation(50))
    assert read_log(log.path)[0].dev_loss == pytest.approx(2.4)


def test_a_validation_without_a_report_has_the_time_of_the_last_one(tmp_path):
    log = begun(tmp_path)
    log.on_validation(validation(10))
    log.on_report(report(50))
    log.on_validation(validation(70))
    first, _, last = read_log(tmp_path)
    assert (first.loss, first.seconds) == (None, None)
    assert (last.step, last.loss, last.seconds) == (70, None, pytest.approx(55))


@given(data=st.data())
def test_a_log_killed_at_any_byte_is_completed_on_resume(data, tmp_path_factory):
    folder: Path = tmp_path_factory.mktemp("log")
    train(CsvLog(folder))
    whole = (folder / "log.csv").read_bytes()
    cut = data.draw(st.integers(0, len(whole)))
    (folder / "log.csv").write_bytes(whole[:cut])
    complete = [row.step for row in read_log(folder)]
    assert complete == list(STEPS)[: max(whole[:cut].count(b"\n") - 1, 0)]
    after = data.draw(st.sampled_from([0, *complete]))  # the last checkpoint
    CsvLog(folder).on_begin("a model", after, 1000)
    assert [row.step for row in read_log(folder)] == [step for step in complete if step <= after]
    train(CsvLog(folder), after)
    assert (folder / "log.csv").read_bytes() == whole


def test_a_row_may_become_shorter(tmp_path):
    log = begun(tmp_path)
    for loss in (1.2345678, 2.0):
        log.on_validation(validation(100)._replace(loss=loss))
    assert read_log(tmp_path)[0].dev_loss == 2.0
    log.on_report(report(150))
    assert [row.step for row in read_log(tmp_path)] == [100, 150]


def test_a_new_run_starts_a_new_log(tmp_path):
    train(CsvLog(tmp_path))
    CsvLog(tmp_path).on_begin("a model", 0, 1000)
    assert read_log(tmp_path) == []


def test_a_removed_log_does_not_stop_a_run(tmp_path):
    log = begun(tmp_path)
    for step in (50, 100):
        log.on_report(report(step))
    log.path.unlink()
    for step in (150, 200):
        log.on_report(report(step))
    assert [row.step for row in read_log(tmp_path)] == [150, 200]


def test_nan_and_inf_are_logged(tmp_path):
    log = begun(tmp_path)
    log.on_report(report(1)._replace(loss=float("nan"), learning_rate=float("inf")))
    (row,) = read_log(tmp_path)
    assert row.loss != row.loss
    assert row.learning_rate == float("inf")


def test_other_columns_and_line_breaks_are_read(tmp_path):
    (tmp_path / "x.csv").write_bytes(",".join(["more", *LogRow._fields]).encode() + b"\r\nx,7,,2.5,,,,,\r\n")
    assert read_log(tmp_path / "x.csv") == [LogRow(7, loss=2.5)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a,b\n1,2\n", "is not a training log: its first line must be step,epoch"),
        (logs._HEADER + b"1,2\n" + b"2,,,,,,,\n", "line 2: expected a number in each of 8 columns"),
        (logs._HEADER + b"x,,,,,,,\n", "line 2"),
        (logs._HEADER + b"1,x,,,,,,\n", "line 2"),
        (b"\x00\xff\n", "is not a training log"),
        (b"x" * 200_000 + b"\n", "is not a training log"),
        (logs._HEADER + b"1,,2" + b"0" * 200_000 + b",,,,,\n", "line 2"),
        (logs._HEADER + b"1" + b"0" * 400 + b",,,,,,,\n", "line 2"),
        (logs._HEADER + b"-1,,,,,,,\n", "line 2"),
        (logs._HEADER + b"1,,1e300,,,,,\n", "line 2"),
    ],
)
def test_other_files_are_rejected(content, message, tmp_path):
    (tmp_path / "log.csv").write_bytes(content)
    with pytest.raises(ArgumentError, match=message):
        read_log(tmp_path)


def test_a_missing_log_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"log\.csv"):
        read_log(tmp_path)


def test_a_full_disk_names_the_file(tmp_path):
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full on this system")
    log = begun(tmp_path)
    log._start = log._stop = 0
    log.path.unlink()
    log.path.symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"No space left on device: '.*log\.csv'"):
        log.on_report(report(1))


def samples(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text("utf-8").splitlines()]


def test_a_sample_for_each_validation(tmp_path):
    log = SampleLog(tmp_path)
    log.on_begin("a model", 0, 1000)
    assert samples(tmp_path) == []  # created immediately
    alignment = {"source_words": ["ä"], "target_words": ["b"], "links": "0-0", "weights": [[1.0]]}
    log.on_validation(validation(100)._replace(sample=SampleTranslation("ä", "b", "c", alignment)))
    log.on_validation(validation(300))
    assert samples(tmp_path) == [
        {"step": 100, "source": "ä", "text": "b", "reference": "c", "alignment": alignment},
        {"step": 300, "source": "a", "text": "b", "reference": "c", "alignment": None},
    ]


@given(data=st.data())
def test_samples_killed_at_any_byte_are_completed_on_resume(data, tmp_path_factory):
    folder: Path = tmp_path_factory.mktemp("log")
    train(SampleLog(folder))
    whole = (folder / "samples.jsonl").read_bytes()
    cut = data.draw(st.integers(0, len(whole)))
    (folder / "samples.jsonl").write_bytes(whole[:cut])
    after = 100 * data.draw(st.integers(0, whole[:cut].count(b"\n")))  # the last checkpoint
    train(SampleLog(folder), after)
    assert (folder / "samples.jsonl").read_bytes() == whole


def test_invalid_samples_do_not_stop_a_run(tmp_path):
    strange = b'7\n[]\n{"step": true}\n{"step": "x"}\n\xff\n{"step": 50, "text": "b"}\n{"step": 40'
    (tmp_path / "samples.jsonl").write_bytes(strange)
    SampleLog(tmp_path).on_begin("a model", 100, 1000)
    assert samples(tmp_path) == [{"step": 50, "text": "b"}]


def scalars(folder: Path, name: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder / "tensorboard"))
    found.Reload()
    return [(event.step, event.value) for event in found.Scalars(name)]


def test_tensorboard_contains_the_same_numbers(tmp_path):
    pytest.importorskip("tensorboard")
    log = TensorBoardLog(tmp_path)
    train(log)
    log.on_end("done")
    assert scalars(tmp_path, "train/loss") == [(step, pytest.approx(100 / step)) for step in STEPS]
    assert [step for step, _ in scalars(tmp_path, "dev/bleu")] == list(STEPS)[1::2]


def test_tensorboard_drops_repeated_steps(tmp_path):
    pytest.importorskip("tensorboard")
    for after in (0, 300):  # the first run is killed
        log = TensorBoardLog(tmp_path)
        train(log, after)
        log._writer.flush()
    log.on_end("done")
    assert [step for step, _ in scalars(tmp_path, "train/loss")] == list(STEPS)


def test_a_missing_tensorboard_is_reported(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(logs, "find_spec", lambda name: None)
    log = TensorBoardLog(tmp_path)
    train(log)
    log.on_end("done")
    message = 'No TensorBoard files will be written. To enable them, run: pip install "regard[tensorboard]"\n'
    assert capsys.readouterr() == ("", message)
    assert list(tmp_path.iterdir()) == []


def test_a_failing_tensorboard_does_not_end_training(tmp_path, capsys):
    pytest.importorskip("tensorboard")
    log = TensorBoardLog(f"{tmp_path}/\udcff")  # a name that is not UTF-8
    train(log)
    log.on_end("done")
    assert capsys.readouterr().err.count("TensorBoard failed; no more files will be written") == 1


def test_the_best_row_has_the_best_bleu_and_of_these_the_lowest_loss():
    rows = [LogRow(10, dev_bleu=9, dev_loss=2), LogRow(20, dev_bleu=9, dev_loss=1), LogRow(30)]
    assert logs.best_row(rows) == rows[1]
    assert logs.best_row(rows[2:]) is None

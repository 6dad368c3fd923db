"""The registry of models, and the logs of training runs."""

import json
import os
import shutil
import sys
import threading
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from regard.app.server.registry import Entry, Registry
from regard.app.server.security import RequestError
from regard.app.server.state import AppState
from regard.errors import ArgumentError
from regard.models.encoders.static import StaticEncoder
from regard.models.text_model import load_language_model
from regard.translation.folder_lock import is_training, lock_folder
from regard.translation.training.callbacks import Callback, Report, ValidationResult
from regard.translation.training.logs import CsvLog
from regard.translation.training.train import train
from tests.app.server.client import Client, error
from tests.translation.small import PAIRS, small_config

QUICK = ("training.updates=4", "training.validate_every=2", "training.accumulate=1")

HOSTILE = "<img src=x onerror=alert(1)>"


def training(folder: Path) -> Path:
    """Create the folder of a training run that has started."""
    folder.mkdir(parents=True, exist_ok=True)
    log = CsvLog(folder)
    log.on_begin("A small Transformer", 0, 2000)
    for step in (100, 200):
        log.on_report(Report(step, 2000, 0.5, 4.2, 1e-3, 7800, 60, None))
    log.on_validation(ValidationResult(200, 2.5, 31.4, None, None, True))
    return folder


@pytest.fixture
def asking():
    states = []

    def make(*paths) -> Client:
        states.append(AppState(Registry.load(map(str, paths))))
        return Client(states[-1])

    yield make
    for state in states:
        state.close()


def test_only_named_models_are_reachable(folder, registry):
    with pytest.raises(RequestError, match="Unknown model"):
        registry.entry(str(folder))
    with pytest.raises(ArgumentError, match="does not exist"):
        Registry.load(["no/such/folder"])


def test_examples_come_from_the_validation_set(folder, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    (copy / "data").mkdir()
    (copy / "data" / "dev.tsv").write_text(
        "".join(f"ein Hund bellt {n}\ta dog barks {n}\n" for n in range(99))
    )
    (entry,) = Registry.load([str(copy)], {str(copy): "de-en"}).entries.values()
    assert len(entry.examples) == 8
    assert entry.examples[0] == "ein Hund bellt 0"
    assert entry.languages == "de-en"


def test_word_vectors_are_loaded_from_a_file(tmp_path):
    StaticEncoder(["dogs", "bark"], torch.eye(2)).save(tmp_path / "words.txt")
    (entry,) = Registry.load([str(tmp_path / "words.txt")]).entries.values()
    assert (entry.kind, entry.attends) == ("encoder", False)


def finish(begun: Path, folder: Path) -> None:
    """Copy the files of a trained model."""
    for file in filter(Path.is_file, folder.iterdir()):
        shutil.copy(file, begun / file.name)


def test_a_missing_package_is_one_line_of_the_page(folder, tmp_path, asking, monkeypatch):
    begun = training(tmp_path / "begun")
    client = asking(begun)
    assert client.get("/api/models")["missing"] == ""
    finish(begun, folder)
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    result = client.get("/api/models")
    assert result["missing"].endswith('which is not installed. Run: pip install "regard[translation]"')
    assert (result["models"], result["pending"]) == ([], ["begun"])


def test_a_run_without_parameters_is_listed_and_loaded_later(folder, tmp_path, asking):
    begun = training(tmp_path / HOSTILE)
    client = asking(begun)
    result = client.get("/api/models")
    assert (result["models"], result["folders"]) == ([], [HOSTILE])
    assert client.get("/api/training")["trainings"] == [{"name": HOSTILE, "steps": 200, "state": "stopped"}]
    assert result["pending"] == [HOSTILE]
    finish(begun, folder)
    assert [model["name"] for model in client.get("/api/models")["models"]] == [HOSTILE]
    assert client.post("/api/translate", model=HOSTILE, sentences=["ein Hund"])["translations"]
    assert client.get("/api/models")["pending"] == []


def state(client: Client) -> str:
    """Return the state of the only training run; the list and the log must agree."""
    (item,) = client.get("/api/training")["trainings"]
    rows = client.get(f"/api/training/{item['name']}")
    assert (rows["state"], rows["steps"]) == (item["state"], item["steps"])
    return item["state"]


class Spy(Callback):
    """Calls a function at each report."""

    def __init__(self, look) -> None:
        self.look, self.seen = look, []

    def on_report(self, report) -> None:
        self.seen.append(self.look())


class Killed(BaseException):
    """Raised to simulate a killed process."""


def test_training_state_follows_the_folder(tmp_path, asking):
    path = tmp_path / "run"
    config = small_config("plain", *QUICK)
    train(path, PAIRS, config=config)
    client = asking(path)
    assert state(client) == "finished"
    longer = config.override(["training.updates=8"])
    spy = Spy(lambda: state(client))
    train(path, config=longer, resume=True, callbacks=[spy])
    assert set(spy.seen) == {"running"}
    assert state(client) == "finished"

    def kill():
        assert state(client) == "running"
        raise Killed

    with pytest.raises(Killed):
        train(path, config=config.override(["training.updates=20"]), resume=True, callbacks=[Spy(kill)])
    assert state(client) == "stopped"
    train(path, resume=True)
    assert state(client) == "finished"


def test_early_stopping_is_finished_until_extended(tmp_path, asking):
    path = tmp_path / "run"
    config = small_config(
        "plain", "training.updates=40", "training.validate_every=1", "training.save_every=1"
    )
    config = config.override(["training.patience=1", "training.learning_rate=1e-9", "training.metric=bleu"])
    outcome = train(path, PAIRS, config=config)
    assert outcome.finished
    assert outcome.progress.step < 40
    client = asking(path)
    assert state(client) == "finished"
    spy = Spy(Mock(side_effect=Killed))
    with pytest.raises(Killed):
        train(path, config=config.override(["training.updates=50"]), resume=True, callbacks=[spy])
    assert state(client) == "stopped"


class Readers:
    """Threads that call a function repeatedly and collect its exceptions."""

    def __init__(self, function) -> None:
        self.stop, self.errors, self.function = threading.Event(), [], function
        self.threads = [threading.Thread(target=self.run) for _ in range(3)]

    def run(self) -> None:
        try:
            while not self.stop.is_set():
                self.function()
        except BaseException as error:
            self.errors.append(error)

    def __enter__(self) -> None:
        for thread in self.threads:
            thread.start()

    def __exit__(self, *_) -> None:
        self.stop.set()
        for thread in self.threads:
            thread.join()
        assert not self.errors


def test_reading_the_state_neither_blocks_nor_reports_a_run(tmp_path):
    """Readers hold the lock briefly; a training run that starts meanwhile waits for it."""
    with Readers(lambda: is_training(tmp_path)):
        for _ in range(30):
            with lock_folder(tmp_path):
                assert is_training(tmp_path)
            assert not is_training(tmp_path)


def test_models_can_be_added_while_others_read(registry, monkeypatch):
    """The worker adds models; concurrent readers get either the old or the new list."""
    ours, model = Registry({}), registry.entry("static").model

    def read() -> None:
        before = len(ours.entries)
        assert len([entry.name for entry in ours.entries.values()]) >= before
        list(ours.trainings()), ours.encoders(), ours.pending

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with Readers(read):
            for number in range(300):
                ours._add_entry(Entry.of(f"model {number}", model))
                ours.expect(f"folder {number}", Path("none"), "", lambda: False)
    finally:
        sys.setswitchinterval(before)
    assert len(ours.entries) == 300


def test_an_expected_model_is_loaded_when_ready(folder, tmp_path):
    ready = [False]
    ours = Registry()
    ours.expect("demo", tmp_path / "demo", "de-en", lambda: ready[0])
    assert (ours.pending, ours.can_refresh, ours.trainings()) == (["demo"], False, {})
    shutil.copytree(folder, tmp_path / "demo")
    assert not ours.can_refresh  # its training is still running
    ready[0] = True
    assert ours.can_refresh
    ours.refresh()
    assert ours.entry("demo").languages == "de-en"
    assert (ours.pending, ours.can_refresh) == ([], False)
    ours.expect("failed", tmp_path / "failed", "de-en", lambda: None)
    assert (ours.pending, ours.can_refresh) == ([], False)


class FakeDemo:
    """Counts the requests to train."""

    name = "demo"

    def __init__(self) -> None:
        self.started = 0

    @property
    def available(self) -> bool:
        return not self.started

    def start(self) -> None:
        self.started += 1


def test_the_demo_is_trained_on_request(asking):
    client = asking()
    ours = client.state.registry
    assert not client.get("/api/models")["demo"]
    assert "regard look" in client.refused("/api/demo")
    ours.demo = FakeDemo()
    assert client.get("/api/models")["demo"]
    assert client.post("/api/demo") == {"name": "demo"}
    assert ours.demo.started == 1
    assert not client.get("/api/models")["demo"]


def test_an_encoder_is_loaded_later_and_a_broken_one_is_reported_once(registry, monkeypatch, caplog):
    ours = Registry()
    ours.load_later("minilm")
    ours.load_later("broken")
    assert (ours.pending, ours.can_refresh, ours.encoders()) == (["minilm", "broken"], True, [])

    def load(name: str):
        if name == "broken":
            raise ArgumentError("damaged")
        return registry.entry("bert").model

    monkeypatch.setattr("regard.app.server.registry.load_encoder", load)
    ours.refresh()
    ours.refresh()
    assert (ours.pending, ours.can_refresh, ours.encoders()) == ([], False, ["minilm"])
    assert caplog.text.count("broken cannot be loaded: ") == 1


def test_rows_and_samples_of_a_run(tmp_path, asking):
    begun = training(tmp_path / "begun")
    aligned = {"source_words": ["a"], "target_words": ["b"], "links": "0-0", "weights": [[1.0]]}
    good = {"step": 200, "source": "a", "text": "b", "reference": "c", "alignment": aligned}
    lines = [json.dumps(good), "no json", json.dumps({"step": "x"}), json.dumps({**good, "step": 300})]
    (begun / "samples.jsonl").write_text("\n".join(lines) + "\n" + json.dumps(good)[:20])
    client = asking(begun)
    result = client.get("/api/training/begun")
    assert [row["step"] for row in result["rows"]] == [100, 200]
    assert result["rows"][1]["dev_bleu"] == 31.4
    assert [item["step"] for item in result["samples"]] == [200, 300]
    assert result["samples"][0]["alignment"] == aligned
    later = client.get("/api/training/begun?after=100")
    assert [row["step"] for row in later["rows"]] == [200]
    assert [item["step"] for item in client.get("/api/training/begun?after=200")["samples"]] == [300]


def test_unknown_training_runs_and_damaged_logs_are_reported(asking, tmp_path):
    client = asking(training(tmp_path / "begun"))
    assert "begun" in error(client.send("GET", "/api/training/other"), 404)
    error(client.send("GET", "/api/training/../begun/log.csv"), 404)
    error(client.send("GET", "/api/training/begun?after=x"), 422)
    error(client.send("GET", "/api/training/begun?before=1"), 422)
    (tmp_path / "begun" / "log.csv").write_text("something else\n1,2,3\n")
    assert "log" in error(client.send("GET", "/api/training/begun"), 422)


def test_language_models_are_loaded_by_name_and_from_folders(tmp_path: Path) -> None:
    folder = load_language_model("stories").save(tmp_path / "copy")
    registry = Registry.load(["stories", os.fspath(folder)])
    shipped, copy = registry.entries.values()
    assert (shipped.kind, copy.kind) == ("language", "language")
    assert shipped.traceable
    assert shipped.examples
    assert shipped.attends
    for refused in (registry.translator, registry.encoder):
        with pytest.raises(ArgumentError, match="'stories' is a language model"):
            refused("stories")

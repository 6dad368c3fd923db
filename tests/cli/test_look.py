"""`regard look`: startup, the background demo, errors, and shutdown."""

import os
import re
import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("typer")

import regard
import regard.cli.demo_pipeline
from regard.app.server.run import listen
from regard.app.server.state import AppState
from regard.cli import look as command
from tests.cli.running import error_of, run
from tests.translation.folders import write


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("models") / "small")


def test_a_missing_folder_is_one_line(capsys):
    assert "'no/such/folder' does not exist" in error_of(capsys, "look", "no/such/folder")


def test_a_port_in_use_is_one_line(folder, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        message = error_of(capsys, "look", folder, "--port", port, "--no-browser")
        cure = "Choose another; --port 0 picks a free one."
        assert message == f"regard: Port {port} on 127.0.0.1 is in use. {cure}\n"


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_port_out_of_range_is_one_line(port, folder, capsys):
    assert f"--port is {port}; it must be at " in error_of(capsys, "look", folder, "--port", port)


def test_without_a_port_a_free_one_is_used(monkeypatch):
    with listen("127.0.0.1", 0) as taken:
        monkeypatch.setattr("regard.app.server.run.DEFAULT_PORT", taken.getsockname()[1])
        with listen("127.0.0.1") as other:
            assert other.getsockname()[1] != taken.getsockname()[1]


def test_an_address_of_another_machine_is_rejected(folder, capsys):
    assert "--host 127.0.0.1" in error_of(capsys, "look", folder, "--host", "192.0.2.1", "--no-browser")


def test_an_empty_host_is_rejected(folder, capsys):
    assert "--host is empty" in error_of(capsys, "look", folder, "--host", "", "--no-browser")


@pytest.fixture
def served(monkeypatch):
    """Record what would be served."""
    recorded = {}

    def serve(state, listening, ready, host, origin):
        recorded.update(state=state, ready=ready)
        state.close()

    monkeypatch.setattr("regard.app.server.run.serve", serve)
    return recorded


COPY = "import shutil, sys; shutil.copytree({source!r}, sys.argv[1])"


@pytest.fixture
def fresh(monkeypatch, tmp_path, folder) -> Path:
    """A folder without a demo model; training copies one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "_has_minilm", lambda: False)
    monkeypatch.setattr(command, "_TRAIN", COPY.format(source=os.fspath(folder)))
    return tmp_path / "demo" / "transformer"


def test_the_page_is_available_before_the_demo_is_trained(fresh, monkeypatch, capsys):
    """The translator is added when its training has finished."""
    seen = []

    def serve(state, listening, ready, host, origin):
        registry = state.registry
        seen.append((list(registry.entries), registry.pending))
        ready()
        end = time.monotonic() + 30
        while not registry.can_refresh:
            assert time.monotonic() < end
            time.sleep(0.01)
        registry.refresh()
        (entry,) = registry.entries.values()
        seen.append((entry.name, entry.languages, registry.pending))
        state.close()

    monkeypatch.setattr("regard.app.server.run.serve", serve)
    run("look", "--port", "0", "--no-browser")
    assert seen[0] == ([], ["transformer"])
    assert seen[1] == ("transformer", "en-de, dates, times and numbers in words only", [])
    assert "available now" in capsys.readouterr().out


def test_an_existing_demo_is_not_trained_again(fresh, served, folder, monkeypatch, capsys):
    shutil.copytree(folder, fresh)
    (fresh / ".demo").write_text("de-en")
    monkeypatch.setattr("regard.app.server.routes.training.state_of", lambda _: "finished")
    run("look", "--port", "0", "--no-browser")
    (entry,) = served["state"].registry.entries.values()
    assert (entry.name, entry.languages) == ("transformer", "de-en, dates, times and numbers in words only")
    assert "Training" not in capsys.readouterr().out


def test_an_interrupted_demo_is_trained_again(fresh, folder):
    shutil.copytree(folder, fresh)
    assert regard.cli.demo_pipeline.is_trained(fresh)  # not a demo
    (fresh / ".demo").write_text("en-de")
    assert not regard.cli.demo_pipeline.is_trained(fresh)  # a demo without a complete log


def test_stopping_the_server_stops_the_demo_training(fresh, monkeypatch):
    monkeypatch.setattr(command, "_TRAIN", "import time; time.sleep(1000)")
    processes = []
    popen = subprocess.Popen

    def spy(*arguments, **options):
        processes.append(popen(*arguments, **options))
        return processes[-1]

    monkeypatch.setattr(command.subprocess, "Popen", spy)

    def serve(state, listening, ready, host, origin):
        ready()
        state.close()

    monkeypatch.setattr("regard.app.server.run.serve", serve)
    run("look", "--port", "0", "--no-browser")
    (process,) = processes
    assert process.poll() is not None


def test_a_failed_demo_training_is_reported(fresh, monkeypatch, capfd):
    monkeypatch.setattr(command, "_TRAIN", "import sys; sys.exit('regard: no room on the disk')")
    pending = []

    def serve(state, listening, ready, host, origin):
        ready()
        end = time.monotonic() + 60
        while state.registry.pending:
            assert time.monotonic() < end
            time.sleep(0.05)
        pending.append(state.registry.pending)
        state.close()

    monkeypatch.setattr("regard.app.server.run.serve", serve)
    run("look", "--port", "0", "--no-browser")
    assert pending == [[]]
    assert "no room on the disk" in capfd.readouterr().err


def test_the_browser_opens_when_the_server_is_ready(served, monkeypatch, folder, capsys):
    opened = []
    monkeypatch.setattr(command, "_open", opened.append)
    run("look", folder, "--port", "0")
    assert not opened
    served["ready"]()
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", opened[0])
    run("look", folder, "--port", "0", "--no-browser")
    served["ready"]()
    assert len(opened) == 1


@pytest.fixture
def recording(tmp_path) -> Path:
    layer = regard.models.SelfAttention()
    with regard.watch(layer, tokens=["dogs", "bark", "loudly"]) as seen:
        layer(torch.eye(3))
    return seen.save(tmp_path / "recording")


def test_a_recording_needs_no_model(served, recording, capsys):
    run("look", "--recording", recording, "--port", "0", "--no-browser")
    state = served["state"]
    assert not state.registry.entries
    (number, view) = state.recordings["recording"]
    assert state.views.find(number) is view
    assert view.describe()["inputs"][0]["texts"][0]["tokens"] == ["dogs", "bark", "loudly"]
    served["ready"]()
    assert "/#heads" in capsys.readouterr().out


def test_a_folder_without_a_recording_is_one_line(folder, tmp_path, capsys):
    for wrong, message in ((folder, "is not a recording"), (tmp_path / "none", "is not a folder")):
        assert message in error_of(capsys, "look", "--recording", wrong, "--no-browser")


def test_a_public_address_prints_a_warning(served, folder, capsys):
    run("look", folder, "--port", "0", "--host", "0.0.0.0", "--no-browser")
    assert "no password" in capsys.readouterr().out


@pytest.mark.parametrize(("ended", "status"), [(None, 0), (KeyboardInterrupt(), 130)])
def test_a_thread_that_does_not_end_is_left_behind(ended, status, folder, monkeypatch):
    """Signals to a process are sent in tests/app/server/test_load.py."""
    close, exits = AppState.close, []
    monkeypatch.setattr(AppState, "close", lambda state, *_: not close(state))
    monkeypatch.setattr(command.os, "_exit", exits.append)

    def serve(*_):
        if ended is not None:
            raise ended

    monkeypatch.setattr("regard.app.server.run.serve", serve)
    run("look", folder, "--port", "0", "--no-browser", status=status)
    assert exits == [status]

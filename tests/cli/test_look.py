"""`regard look`: startup, the demo on request, errors, and shutdown."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("typer")

import regard
import regard.cli.demo_pipeline
from regard.app.server.run import listen
from regard.app.server.state import AppState
from regard.cli import look as command
from tests.app.server.live import until
from tests.cli.running import error_of, run


def test_a_port_in_use_is_one_line(model, monkeypatch, capsys):
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        message = error_of(capsys, "look", model, "--port", port, "--no-browser")
        cure = "Choose another; --port 0 picks a free one."
        assert message == f"regard: Port {port} on 127.0.0.1 is in use. {cure}\n"
        monkeypatch.setattr("regard.app.server.run.DEFAULT_PORT", port)
        with listen("127.0.0.1") as other:  # the default is a free port
            assert other.getsockname()[1] != port


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["no/such/folder"], "'no/such/folder' does not exist"),
        (["--port", "-1"], "--port is -1; it must be at least 0"),
        (["--port", "65536"], "--port is 65536; it must be at "),
        (["--host", "192.0.2.1"], "--host 127.0.0.1"),  # another machine's address
        (["--host", ""], "--host is empty"),
        (["--recording", "none"], "--recording 'none' is not a folder"),
        (["--recording", "."], "'.' is not a recording"),
    ],
)
def test_errors_are_one_line(options, message, model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert message in error_of(capsys, "look", model, *options, "--no-browser")


@pytest.fixture
def serving(monkeypatch):
    """Replace the server with a function of the state and `ready`."""

    def replace(function) -> None:
        def serve(state, listening, ready, host, origin):
            function(state, ready)
            state.close()

        monkeypatch.setattr("regard.app.server.run.serve", serve)

    return replace


@pytest.fixture
def served(serving):
    """Record the state that would be served."""
    recorded = {}
    serving(lambda state, ready: recorded.update(state=state, ready=ready))
    return recorded


def look(*options: object) -> None:
    run("look", *options, "--port", "0", "--no-browser")


COPY = "import shutil, sys; shutil.copytree({source!r}, sys.argv[1])"


@pytest.fixture
def fresh(monkeypatch, tmp_path, model) -> Path:
    """A folder without a demo model; training copies one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "_has_minilm", lambda: False)
    monkeypatch.setattr(command, "_SHIPPED", ())
    monkeypatch.setattr(command, "_TRAIN", COPY.format(source=os.fspath(model)))
    return tmp_path / "demo" / "transformer"


def test_the_demo_is_trained_on_request(fresh, serving, capsys):
    """The translator is added when its training finishes; a second request changes nothing."""
    seen = []

    def serve(state, ready):
        registry = state.registry
        ready()
        seen.append((list(registry.entries), registry.pending, registry.demo.available, fresh.exists()))
        registry.demo.start()
        registry.demo.start()
        seen.append((registry.pending, registry.demo.available))
        until(lambda: registry.can_refresh, 60)
        registry.refresh()
        (entry,) = registry.entries.values()
        seen.append((entry.name, entry.languages, registry.pending, registry.demo.available))

    serving(serve)
    look()
    assert seen[0] == ([], [], True, False)
    assert seen[1] == (["transformer"], False)
    assert seen[2] == ("transformer", ", dates, times and numbers in words only", [], False)
    assert capsys.readouterr().out.count("Training the demo model") == 1


def test_without_minilm_one_line_says_how_to_get_it(fresh, served, capsys):
    look()
    assert 'pip install "regard[minilm]"' in capsys.readouterr().out


def test_the_default_model_is_loaded_after_the_page_is_ready(fresh, served, monkeypatch, registry_model):
    monkeypatch.setattr(command, "_has_minilm", lambda: True)
    look()
    registry = served["state"].registry
    assert (list(registry.entries), registry.pending) == ([], ["minilm"])
    served["ready"]()
    until(lambda: "minilm" in registry.entries, 60)
    assert registry.pending == []


def test_the_shipped_models_are_loaded_after_the_page_is_ready(fresh, served, monkeypatch):
    monkeypatch.setattr(command, "_SHIPPED", ("stories", "dates"))
    look()
    registry = served["state"].registry
    served["ready"]()
    until(lambda: len(registry.entries) == 2, 60)
    assert [(name, entry.kind) for name, entry in registry.entries.items()] == [
        ("stories", "language"),
        ("dates", "translator"),
    ]
    assert "numbers" in registry.entries["dates"].languages
    assert registry.demo.available


@pytest.fixture
def registry_model(monkeypatch):
    """A small encoder in place of minilm."""
    encoder = regard.models.StaticEncoder(["dogs", "bark"], torch.eye(2))
    monkeypatch.setattr("regard.app.server.registry.load_encoder", lambda _: encoder)


@pytest.mark.skipif(not command._has_minilm(), reason="minilm is not installed")
def test_loading_the_default_models_does_not_import_the_compiler():
    """Importing torch's compiler would double the time to the first picture. Runs in a new process."""
    program = """if True:
        import sys
        from regard.app.server.registry import Registry
        registry = Registry()
        for name in ("stories", "dates", "minilm"):
            registry.load_later(name)
        registry.refresh()
        print(sorted(registry.entries), {"torch._dynamo", "sympy"} & set(sys.modules))
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "['dates', 'minilm', 'stories'] set()", done.stderr


def test_an_existing_demo_is_not_trained_again(fresh, served, model, monkeypatch, capsys):
    shutil.copytree(model, fresh)
    (fresh / ".demo").write_text("de-en")
    monkeypatch.setattr("regard.app.server.routes.training.state_of", lambda _: "finished")
    look()
    registry = served["state"].registry
    assert not registry.demo.available
    registry.refresh()
    (entry,) = registry.entries.values()
    assert (entry.name, entry.languages) == ("transformer", "de-en, dates, times and numbers in words only")
    assert "Training" not in capsys.readouterr().out


def test_an_interrupted_demo_is_trained_again(fresh, model):
    shutil.copytree(model, fresh)
    assert regard.cli.demo_pipeline.is_trained(fresh)  # not a demo
    (fresh / ".demo").write_text("en-de")
    assert not regard.cli.demo_pipeline.is_trained(fresh)  # a demo without a complete log


def test_stopping_the_server_stops_the_demo_training(fresh, serving, monkeypatch):
    monkeypatch.setattr(command, "_TRAIN", "import time; time.sleep(1000)")
    processes = []
    popen = subprocess.Popen

    def spy(*arguments, **options):
        processes.append(popen(*arguments, **options))
        return processes[-1]

    monkeypatch.setattr(command.subprocess, "Popen", spy)
    serving(lambda state, ready: state.registry.demo.start())
    look()
    (process,) = processes
    assert process.poll() is not None


def test_a_failed_demo_training_is_reported(fresh, serving, monkeypatch, capfd):
    monkeypatch.setattr(command, "_TRAIN", "import sys; sys.exit('regard: no room on the disk')")

    def serve(state, ready):
        state.registry.demo.start()
        until(lambda: not state.registry.pending, 60)
        assert state.registry.demo.available  # training can be requested again

    serving(serve)
    look()
    assert "no room on the disk" in capfd.readouterr().err


def test_the_browser_opens_when_the_server_is_ready(served, monkeypatch, model, capsys):
    opened = []
    monkeypatch.setattr(command, "_open", opened.append)
    run("look", model, "--port", "0")
    assert not opened
    served["ready"]()
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", opened[0])
    look(model)
    served["ready"]()
    assert len(opened) == 1


def test_a_recording_needs_no_model(served, tmp_path, capsys):
    layer = regard.models.SelfAttention()
    with regard.watch(layer, tokens=["dogs", "bark", "loudly"]) as seen:
        layer(torch.eye(3))
    look("--recording", seen.save(tmp_path / "recording"))
    state = served["state"]
    assert not state.registry.entries
    (number, view) = state.recordings["recording"]
    assert state.views.find(number) is view
    assert view.describe()["inputs"][0]["texts"][0]["tokens"] == ["dogs", "bark", "loudly"]


def test_a_public_address_prints_a_warning(served, model, capsys):
    look(model, "--host", "0.0.0.0")
    assert "no password" in capsys.readouterr().out


@pytest.mark.parametrize(("ended", "status"), [(None, 0), (KeyboardInterrupt(), 130)])
def test_a_thread_that_does_not_end_is_left_behind(ended, status, model, monkeypatch):
    """See tests/app/server/test_load.py for signals sent to a process."""
    close, exits = AppState.close, []
    monkeypatch.setattr(AppState, "close", lambda state, *_: not close(state))
    monkeypatch.setattr(command.os, "_exit", exits.append)

    def serve(*_):
        if ended is not None:
            raise ended

    monkeypatch.setattr("regard.app.server.run.serve", serve)
    run("look", model, "--port", "0", "--no-browser", status=status)
    assert exits == [status]

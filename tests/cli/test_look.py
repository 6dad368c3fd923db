"""`regard look`: what it refuses, what it says, and how it ends."""

import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import torch

pytest.importorskip("typer")

import regard
import regard.demo
from regard.cli import look as command
from regard.view.server.serving import listen
from tests.cli.running import run
from tests.translation.folders import write

REGARD = [sys.executable, "-m", "regard"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("models") / "small")


def test_a_folder_that_is_not_there_is_one_line(capsys):
    run("look", "no/such/folder", status=2)
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "'no/such/folder' does not exist" in error


def test_a_port_in_use_is_one_line(folder, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        run("look", folder, "--port", port, "--no-browser", status=2)
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"port {port} of 127.0.0.1 is in use" in error


def test_without_a_port_another_one_serves(monkeypatch):
    with listen("127.0.0.1", 0) as taken:
        monkeypatch.setattr("regard.view.server.serving.FIRST", taken.getsockname()[1])
        with listen("127.0.0.1") as other:
            assert other.getsockname()[1] != taken.getsockname()[1]


def test_an_address_of_another_machine_is_refused(folder, capsys):
    run("look", folder, "--host", "192.0.2.1", "--no-browser", status=2)
    assert "--host 127.0.0.1" in capsys.readouterr().err


def test_an_empty_host_is_not_every_address(folder, capsys):
    run("look", folder, "--host", "", "--no-browser", status=2)
    assert "--host is empty" in capsys.readouterr().err


@pytest.fixture
def served(monkeypatch):
    """What would be served, instead of serving it."""
    found = {}

    def serve(house, listening, ready, host, origin):
        found.update(house=house, ready=ready)
        house.close()

    monkeypatch.setattr("regard.view.server.serving.serve", serve)
    return found


def test_the_demo_is_looked_at_without_a_folder(served, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    trained = []

    def train(folder, plan, corpus, languages):
        trained.append(languages)
        write(folder)
        (folder / ".demo").write_text(languages)

    monkeypatch.setattr(regard.demo, "_train", train)
    monkeypatch.setattr(regard.demo, "embedded", lambda *languages: None)
    monkeypatch.setattr(command, "_has_minilm", lambda: False)
    run("look", "--port", "0")
    assert "two minutes" in capsys.readouterr().out
    (entry,) = served["house"].collection.entries.values()
    assert (entry.name, entry.languages) == ("transformer", "en-de, dates, times and numbers in words only")
    run("look", "--port", "0")
    assert trained == ["en-de"]  # once


def test_the_browser_is_opened_when_it_is_ready(served, monkeypatch, folder, capsys):
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


def test_a_recording_is_looked_at_without_its_model(served, recording, capsys):
    run("look", "--recording", recording, "--port", "0", "--no-browser")
    house = served["house"]
    assert not house.collection.entries
    (number, exhibit) = house.recordings["recording"]
    assert house.exhibits.find(number) is exhibit
    assert exhibit.describe()["inputs"][0]["texts"][0]["tokens"] == ["dogs", "bark", "loudly"]
    served["ready"]()
    assert "/#heads" in capsys.readouterr().out


def test_a_folder_that_holds_no_recording_is_one_line(folder, tmp_path, capsys):
    for wrong, message in ((folder, "holds no recording"), (tmp_path / "none", "no folder")):
        run("look", "--recording", wrong, "--no-browser", status=2)
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert message in error


def test_whoever_opens_it_to_others_is_told(served, folder, capsys):
    run("look", folder, "--port", "0", "--host", "0.0.0.0", "--no-browser")
    assert "no password" in capsys.readouterr().out


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_it_serves_and_ends(number, status, folder):
    process = subprocess.Popen(
        [*REGARD, "look", os.fspath(folder), "--port", "0", "--no-browser"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        lines = []
        while not (lines and "http://" in lines[-1]):
            lines.append(process.stdout.readline())
            assert lines[-1], process.communicate()
        address = re.search(r"http://\S+", lines[-1])
        assert address
        with urllib.request.urlopen(f"{address[0]}api/models") as answer:
            assert b'"small"' in answer.read()
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == status
        assert errors == ("" if status == 0 else "regard: interrupted.\n")
    finally:
        process.kill()
        process.communicate()

"""The models that were named at the start, and what trainings have logged."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from regard.errors import ArgumentError
from regard.models.static import StaticEncoder
from regard.translation.logs import CsvLog
from regard.translation.progress import Judgement, Report
from regard.view.server.collection import Collection, names_of
from regard.view.server.guard import Refused
from regard.view.server.house import House
from tests.view.server.asking import Client, error

HOSTILE = "<img src=x onerror=alert(1)>"


def training(folder: Path) -> Path:
    """A folder in which a training has begun."""
    folder.mkdir(parents=True, exist_ok=True)
    log = CsvLog(folder)
    log.begin("A small Transformer", 0, 2000)
    for step in (100, 200):
        log.report(Report(step, 2000, 0.5, 4.2, 1e-3, 7800, 60, None))
    log.judge(Judgement(200, 2.5, 31.4, None, None, True))
    return folder


@pytest.fixture
def asking():
    houses = []

    def make(*paths) -> Client:
        houses.append(House(Collection.load(map(str, paths))))
        return Client(houses[-1])

    yield make
    for house in houses:
        house.close()


def test_names_are_as_short_as_can_be():
    assert names_of(["a/b/small", "c/large"]) == ["small", "large"]
    with pytest.raises(ArgumentError, match="2 times"):
        names_of(["a", "a"])


def test_only_what_was_named_is_reachable(folder, collection):
    with pytest.raises(Refused, match="there is no model"):
        collection.entry(str(folder))
    with pytest.raises(ArgumentError, match="does not exist"):
        Collection.load(["no/such/folder"])


def test_examples_come_from_the_dev_data(folder, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    (copy / "data").mkdir()
    (copy / "data" / "dev.tsv").write_text(
        "".join(f"ein Hund bellt {n}\ta dog barks {n}\n" for n in range(99))
    )
    (entry,) = Collection.load([str(copy)], {str(copy): "de-en"}).entries.values()
    assert len(entry.examples) == 8
    assert entry.examples[0] == "ein Hund bellt 0"
    assert entry.languages == "de-en"


def test_vectors_of_words_from_a_file(tmp_path):
    StaticEncoder(["dogs", "bark"], torch.eye(2)).save(tmp_path / "words.txt")
    (entry,) = Collection.load([str(tmp_path / "words.txt")]).entries.values()
    assert (entry.kind, entry.attends) == ("encoder", False)


def test_a_training_without_parameters_is_listed_and_its_model_comes_later(folder, tmp_path, asking):
    begun = training(tmp_path / HOSTILE)
    client = asking(begun)
    found = client.get("/api/models")
    assert (found["models"], found["folders"]) == ([], [HOSTILE])
    assert client.get("/api/training")["trainings"] == [{"name": HOSTILE, "steps": 200, "finished": False}]
    for file in folder.iterdir():
        if file.is_file():
            shutil.copy(file, begun / file.name)
    assert [model["name"] for model in client.get("/api/models")["models"]] == [HOSTILE]
    assert client.post("/api/translate", model=HOSTILE, sentences=["ein Hund"])["translations"]
    assert client.get("/api/training")["trainings"][0]["finished"]


def test_rows_and_samples_of_a_training(tmp_path, asking):
    begun = training(tmp_path / "begun")
    aligned = {"source_words": ["a"], "target_words": ["b"], "links": "0-0", "weights": [[1.0]]}
    good = {"step": 200, "source": "a", "text": "b", "reference": "c", "alignment": aligned}
    lines = [json.dumps(good), "no json", json.dumps({"step": "x"}), json.dumps({**good, "step": 300})]
    (begun / "samples.jsonl").write_text("\n".join(lines) + "\n" + json.dumps(good)[:20])
    client = asking(begun)
    found = client.get("/api/training/begun")
    assert [row["step"] for row in found["rows"]] == [100, 200]
    assert found["rows"][1]["dev_bleu"] == 31.4
    assert [one["step"] for one in found["samples"]] == [200, 300]
    assert found["samples"][0]["alignment"] == aligned
    later = client.get("/api/training/begun?after=100")
    assert [row["step"] for row in later["rows"]] == [200]
    assert [one["step"] for one in client.get("/api/training/begun?after=200")["samples"]] == [300]


def test_a_training_that_is_not_there(asking, tmp_path):
    client = asking(training(tmp_path / "begun"))
    assert "begun" in error(client.send("GET", "/api/training/other"), 404)
    error(client.send("GET", "/api/training/../begun/log.csv"), 404)
    error(client.send("GET", "/api/training/begun?after=x"), 422)
    error(client.send("GET", "/api/training/begun?before=1"), 422)


def test_a_damaged_log_is_told(tmp_path, asking):
    begun = training(tmp_path / "begun")
    client = asking(begun)
    (begun / "log.csv").write_text("something else\n1,2,3\n")
    assert "log" in error(client.send("GET", "/api/training/begun"), 422)

"""`regard demo`: the folders that it replaces. `make demo` shows its output."""

import shutil

import pytest

from regard.cli import demo_pipeline
from regard.errors import ArgumentError
from regard.translation.config import TranslationConfig
from regard.translation.data.builtin import embedded_corpus

CONFIG = TranslationConfig.preset("tiny").override(
    ["training.updates=2", "model.width=16", "tokens.size=200"]
)


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo") / "transformer"
    demo_pipeline._train(folder, CONFIG, embedded_corpus(size=60))
    return folder


def test_other_folders_are_not_replaced(tmp_path):
    (tmp_path / "transformer").mkdir()
    (tmp_path / "transformer" / "thesis.txt").write_text("years of work")
    with pytest.raises(ArgumentError, match="was not created by the demo; choose another folder"):
        demo_pipeline._train(tmp_path / "transformer", CONFIG, embedded_corpus(size=60))
    assert (tmp_path / "transformer" / "thesis.txt").read_text() == "years of work"


def test_the_folder_of_an_earlier_demo_is_replaced(demo, tmp_path):
    folder = shutil.copytree(demo, tmp_path / "transformer")
    (folder / "source.model").touch()  # from a model with two vocabularies
    demo_pipeline._train(folder, CONFIG, embedded_corpus(size=60))
    assert (folder / "model.safetensors").exists()
    assert not (folder / "source.model").exists()


@pytest.mark.parametrize("name", ["thesis.txt", "data/thesis.txt", "checkpoints/thesis/1.txt", "link"])
def test_a_demo_folder_with_other_files_is_not_deleted(demo, tmp_path, name):
    folder = shutil.copytree(demo, tmp_path / "transformer")
    before = sorted(folder.rglob("*"))
    kept = folder / name
    kept.parent.mkdir(exist_ok=True)
    if name == "link":
        kept.symlink_to(tmp_path)
    else:
        kept.write_text("years of work")
    with pytest.raises(
        ArgumentError, match=r"was not created by the demo, .*; move the file, or choose another"
    ):
        demo_pipeline._train(folder, CONFIG, embedded_corpus(size=60))
    assert {*before, kept} <= set(folder.rglob("*"))

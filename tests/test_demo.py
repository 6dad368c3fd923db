"""What `regard demo` does with folders; what it shows is seen by `make demo`."""

import pytest

from regard import demo
from regard.errors import ArgumentError
from regard.translation.config import TranslationConfig
from regard.translation.data.builtin import embedded_corpus

PLAN = TranslationConfig.preset("tiny").override(["training.updates=2", "model.width=16", "tokens.size=200"])


def test_a_folder_that_no_demo_made_is_left_alone(tmp_path):
    (tmp_path / "transformer").mkdir()
    (tmp_path / "transformer" / "thesis.txt").write_text("years of work")
    with pytest.raises(ArgumentError, match="was not made by a demo; name another folder"):
        demo._train(tmp_path / "transformer", PLAN, embedded_corpus(size=60))
    assert (tmp_path / "transformer" / "thesis.txt").read_text() == "years of work"


def test_the_folder_of_an_earlier_demo_is_replaced(tmp_path):
    corpus = embedded_corpus(size=60)
    for _ in range(2):
        demo._train(tmp_path / "transformer", PLAN, corpus)
        assert (tmp_path / "transformer" / "model.safetensors").exists()
        (tmp_path / "transformer" / "source.model").touch()  # of one with two vocabularies
    demo._train(tmp_path / "transformer", PLAN, corpus)
    assert not (tmp_path / "transformer" / "source.model").exists()


@pytest.mark.parametrize("name", ["thesis.txt", "data/thesis.txt", "checkpoints/thesis/1.txt", "link"])
def test_what_others_keep_in_the_folder_of_a_demo_is_left_alone(tmp_path, name):
    folder = tmp_path / "transformer"
    demo._train(folder, PLAN, embedded_corpus(size=60))
    before = sorted(folder.rglob("*"))
    kept = folder / name
    kept.parent.mkdir(exist_ok=True)
    if name == "link":
        kept.symlink_to(tmp_path)
    else:
        kept.write_text("years of work")
    with pytest.raises(ArgumentError, match=r"was not made by the demo, .*; move it away, or name another"):
        demo._train(folder, PLAN, embedded_corpus(size=60))
    assert {*before, kept} <= set(folder.rglob("*"))

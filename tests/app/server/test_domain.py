"""Sentences outside the domain of a translator."""

import os
from pathlib import Path

import pytest

from regard.app.server.domain import domain_of
from regard.app.server.registry import Registry
from regard.translation.model_folder import CALIBRATION
from regard.translation.text.domain import Domain
from regard.translation.training.train import train
from regard.translation.translator import Translator, load_translator
from tests.translation.small import PAIRS, small_config

QUICK = ("training.updates=2", "training.validate_every=2", "training.accumulate=1")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("domain") / "model"
    train(folder, PAIRS, config=small_config("plain", *QUICK))
    return folder


def load_uncalibrated(folder: Path) -> Translator:
    """Load a folder in the format of an earlier version."""
    translator = load_translator(folder)
    translator.config = {name: value for name, value in translator.config.items() if name != CALIBRATION}
    return translator


def test_the_calibration_of_training_is_used(trained: Path) -> None:
    translator = load_translator(trained)
    assert domain_of(translator, None, []) == translator.domain
    assert translator.domain.lowest == translator.config[CALIBRATION]["lowest"] < 0
    assert "“weather” does not occur" in translator.domain.warning("weather", 0.0)


def test_words_of_the_training_data_are_known_and_others_are_named(trained: Path) -> None:
    domain = domain_of(load_uncalibrated(trained), trained, [])
    sources = [pair.source for pair in PAIRS]
    unknown = [source for source in sources if domain.warning(source, 0.0)]
    assert len(unknown) < len(sources) / 5  # words that occur only in the validation set
    assert "“weather” does not occur" in domain.warning("weather", 0.0)
    assert "“Weather” does not occur" in domain.warning(f"Weather {sources[0]}", 0.0)


def test_only_scores_far_below_those_of_examples_are_low(trained: Path) -> None:
    translator = load_uncalibrated(trained)
    examples = list(Registry.load([os.fspath(trained)]).entry("model").examples)
    assert examples
    domain = domain_of(translator, None, examples)
    assert domain.words is None
    for translation in translator.translate(examples):
        assert domain.warning(translation.source, translation.score) == ""
    assert "unsure" in domain.warning("anything", 3 * domain.lowest - 1)


@pytest.mark.parametrize("unreadable", ["missing", "damaged"])
def test_unreadable_training_data_gives_no_warning(trained: Path, tmp_path: Path, unreadable: str) -> None:
    if unreadable == "damaged":
        (tmp_path / "data").mkdir()
        (tmp_path / "data" / "train.ids").write_bytes(b"x" * 100)
    assert domain_of(load_uncalibrated(trained), tmp_path, []) == Domain(None, None)

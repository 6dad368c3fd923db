"""The model card contains the data, settings and scores, and a command that reproduces the training run."""

import shlex
from itertools import pairwise

import pytest

from regard.cli.resume import TrainOptions
from regard.translation.config import TranslationConfig
from regard.translation.model_folder import CARD
from regard.translation.training.logs import best_row, read_log
from regard.translation.training.model_card import training_command
from regard.translation.training.train import train
from tests.translation.small import DEV, PAIRS, small_config

ORIGIN = {"corpus": [{"name": "a.de"}, {"name": "b c.en"}], "preset": "tiny", "swap": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("card") / "digits"
    train(path, PAIRS, dev=DEV, config=small_config(), origin=ORIGIN)
    return path


def test_the_card_has_data_scores_settings_and_command(folder):
    card = (folder / CARD).read_text("utf-8")
    config = small_config()
    assert "# digits\n" in card
    assert f"Training pairs: {len(PAIRS)}; validation pairs: {len(DEV)} (held out)" in card
    assert f"BLEU on the validation pairs: {best_row(read_log(folder)).dev_bleu:.1f}" in card
    assert config.to_toml() in card
    assert training_command(config, ORIGIN) in card
    assert "`a.de` and `b c.en`, with source and target swapped" in card
    assert "decoder layer" in card


@pytest.mark.parametrize("model", ["transformer", "recurrent", "plain"])
def test_the_command_repeats_the_settings(model):
    config = TranslationConfig.preset("tiny", model).override(["training.seed=7", "model.dropout=0.25"])
    words = shlex.split(training_command(config, ORIGIN))
    assert words[:4] == ["regard", "train", "a.de", "b c.en"]
    assert "--swap" in words
    settings = [words[i + 1] for i, word in enumerate(words) if word == "--set"]
    options = dict(pairwise(words))
    base = TranslationConfig.preset(options["--preset"], options.get("--model", "transformer"))
    assert base.override(settings) == config
    assert len(settings) == 2


def test_the_origin_is_that_of_the_command(tmp_path):
    (tmp_path / "a.de").write_text("a\n")
    options = TrainOptions(
        None, None, None, [], str(tmp_path / "a.de"), None, ["x.de", "x.en"], False, "en-de"
    )
    command = training_command(TranslationConfig.preset("small"), options.origin())
    assert command == "regard train a.de -o FOLDER --dev x.de x.en"


def test_the_command_of_the_preset_auto_repeats_the_settings_that_were_passed():
    """The other settings are derived from the corpus again."""
    config = TranslationConfig.preset("tiny").override(["training.seed=7", "training.minutes=20"])
    origin = ORIGIN | {"preset": "auto", "settings": ["training.seed=7", "training.minutes=15"]}
    words = shlex.split(training_command(config, origin))
    settings = [words[i + 1] for i, word in enumerate(words) if word == "--set"]
    assert settings == ["training.seed=7", "training.minutes=20.0"]  # extended from 15 to 20
    assert "--preset" not in words


def test_an_edited_card_is_kept(folder):
    card = folder / CARD
    written = card.read_text("utf-8")
    longer = small_config().override(["training.updates=12"])
    train(folder, config=longer, resume=True)
    assert "updates = 12" in card.read_text("utf-8")
    card.write_text("my own words\n")
    train(folder, config=longer.override(["training.updates=14"]), resume=True)
    assert card.read_text("utf-8") == "my own words\n"
    assert written != "my own words\n"

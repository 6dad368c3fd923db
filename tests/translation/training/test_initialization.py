"""Fine-tuning starts from the parameters, the architecture and the vocabulary of a folder."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import regard
from regard.errors import ArgumentError
from regard.translation import Pair, TranslationConfig, train
from regard.translation.data.statistics import CorpusStatistics
from regard.translation.training.initialization import InitialModel
from regard.translation.training.train import _config_choice
from tests.translation.pretrained.folders import make_m2m_100

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]
PAIRS = [Pair(f"ein Hund bellt {i}", f"a dog barks {i}") for i in range(12)]


def tune(folder: Path, initial: InitialModel, updates: int, **options: bool) -> None:
    """Fine-tune for a few updates."""
    config = initial.config(TranslationConfig.preset("tiny")).override(
        [
            f"training.updates={updates}",
            "training.save_every=1",
            "training.validate_every=2",
            "model.dropout=0.2",
        ]
    )
    train(folder, PAIRS, config=config, initial=initial, **options)


def test_a_pretrained_model_is_fine_tuned_and_resumed(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    make_m2m_100(tmp_path / "m2m")
    initial = InitialModel(tmp_path / "m2m", "de", "en")
    tune(tmp_path / "once", initial, 4)
    tune(tmp_path / "twice", initial, 2)
    tune(tmp_path / "twice", initial, 4, resume=True)
    before = regard.load_translator(tmp_path / "m2m", source="de", target="en")
    started = load_file(tmp_path / "once" / "initial.safetensors")
    for name, tensor in before.model.state_dict().items():
        assert torch.equal(tensor, started[name])
    once = regard.load_translator(tmp_path / "once")
    assert once.tokens.special == before.tokens.special
    assert once.model.decoding == before.model.decoding
    assert not torch.equal(once.model.output_weight, before.model.output_weight)
    assert [each.text for each in once.translate(["ein Hund", "eine Frau"], alignment=True)]


def test_a_model_of_regard_is_fine_tuned(tmp_path: Path) -> None:
    config = TranslationConfig.preset("tiny").override(
        ["training.updates=2", "tokens.size=40", "model.width=16", "model.layers=1"]
    )
    train(tmp_path / "first", PAIRS, config=config)
    initial = InitialModel(tmp_path / "first")
    tune(tmp_path / "second", initial, 1)
    first, second = (regard.load_translator(tmp_path / name) for name in ("first", "second"))
    assert first.tokens.source.content == second.tokens.source.content
    assert second.config["settings"]["training"]["learning_rate"] == 1e-4
    difference = (first.model.output_weight - second.model.output_weight).abs().max()
    assert 0 < float(difference) < 1e-3  # one update with a small learning rate
    with pytest.raises(ArgumentError, match=r"model.width=32: it has 16"):
        train(
            tmp_path / "third",
            PAIRS,
            config=initial.config(config).override(["model.width=32"]),
            initial=initial,
        )


def test_the_default_config_suits_the_vocabulary_of_the_folder(tmp_path: Path) -> None:
    config = TranslationConfig.preset("tiny").override(
        ["training.updates=1", "tokens.size=40", "tokens.kind='bpe'", "model.width=16", "model.layers=1"]
    )
    train(tmp_path / "first", PAIRS, config=config)
    choose = _config_choice(None, InitialModel(tmp_path / "first"))
    chosen = choose(CorpusStatistics(pairs=3000, characters=400_000))
    assert (chosen.tokens.kind, chosen.training.subword_sampling) == ("bpe", 0)
    assert chosen.training.guided_alignment_weight == 0  # trained heads keep their roles

"""Training configuration: presets, TOML files and single settings."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from regard.errors import ArgumentError
from regard.models.recurrent import RecurrentSeq2Seq
from regard.models.transformer import Transformer
from regard.translation.config import PRESETS, TranslationConfig

NAMES = [(section, name) for section, values in TranslationConfig().to_dict().items() for name in values]
MODELS = ("transformer", "recurrent", "plain")
OTHER = TranslationConfig().replace(
    {
        "model": {"width": 24, "layers": 1, "heads": 3, "key_heads": 1, "ffn_dim": 7, "positions": "rotary"},
        "tokens": {"kind": "characters", "size": 77, "shared": False, "character_coverage": 0.99},
        "corpus": {"max_tokens": 11, "max_length_ratio": 2.5, "dev_size": 13},
        "training": {
            "updates": 5,
            "learning_rate": 3e-7,
            "schedule": "constant",
            "max_grad_norm": 0,
            "metric": "loss",
        },
    }
)

# JSON and TOML values
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(10**300, 10**320)
    | st.floats()
    | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=3,
)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("model", MODELS)
def test_each_preset_builds_a_model(preset, model):
    config = TranslationConfig.preset(preset, model)
    assert config.model.kind == model
    if model != "transformer":
        expected = "none" if model == "plain" else "additive"
        assert config.model.architecture().attention == expected
    with torch.device("meta"):
        built = config.model.build(config.tokens.size)
        apart = config.model.build((1000, 1001))
    assert isinstance(built, Transformer if model == "transformer" else RecurrentSeq2Seq)
    assert len(built.output_weight) == config.tokens.size
    assert len(apart.output_weight) == 1001


@pytest.mark.parametrize(
    "config",
    [
        TranslationConfig(),
        OTHER,
        *(TranslationConfig.preset(name, kind) for name in PRESETS for kind in MODELS),
    ],
)
def test_toml_and_dict_round_trip(config, tmp_path):
    (tmp_path / "config.toml").write_text(config.to_toml(), "utf-8")
    read = TranslationConfig.from_toml(tmp_path / "config.toml")
    assert (read.tokens, read.corpus, read.training) == (config.tokens, config.corpus, config.training)
    assert read.model.architecture() == config.model.architecture()  # ignored settings excluded
    assert read.to_toml() == config.to_toml()
    assert TranslationConfig.from_dict(config.to_dict()) == config
    assert TranslationConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_a_file_changes_only_its_settings(tmp_path):
    (tmp_path / "config.toml").write_text("[training]\nlearning_rate = 1\n[model]\nffn_dim = 99\n", "utf-8")
    config = TranslationConfig.from_toml(tmp_path / "config.toml", OTHER)
    assert config == OTHER.replace({"training": {"learning_rate": 1.0}, "model": {"ffn_dim": 99}})
    (tmp_path / "config.toml").write_text("", "utf-8")
    assert TranslationConfig.from_toml(tmp_path / "config.toml", OTHER) == OTHER


@pytest.mark.parametrize(
    ("setting", "wanted"),
    [
        ("training.learning_rate=1e-3", 1e-3),
        ("training.learning_rate=2", 2.0),
        (" training.learning_rate = 0.5 ", 0.5),
        ("training.batch_tokens=1_000", 1000),
        ("training.updates=none", None),
        ("training.updates=7", 7),
        ("model.kind=plain", "plain"),
        ('model.kind="plain"', "plain"),
        ("model.norm_first=false", False),
        ("model.normalize=entmax15", "entmax15"),
        ("tokens.kind=bpe", "bpe"),
    ],
)
def test_single_settings_are_parsed(setting, wanted):
    section, name = setting.partition("=")[0].strip().split(".")
    earlier = ["training.epochs=3", "training.learning_rate=7", "training.updates=3"]  # the last one wins
    found = TranslationConfig().override([*earlier, setting]).to_dict()[section][name]
    assert found == wanted
    assert type(found) is type(wanted)


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ("training.epoch=3", "Unknown setting training.epoch. Did you mean training.epochs?"),
        ("training.zzz=3", "Unknown setting training.zzz. Choose from epochs, updates"),
        ("trainig.epochs=3", "Unknown section [trainig]. Did you mean training?"),
        ("epochs=3", "Invalid setting 'epochs=3'. Use section.name=value."),
        ("training.epochs", "Invalid setting 'training.epochs'. Use section.name=value."),
        ("", "Invalid setting ''"),
        ("training.epochs=many", "training.epochs must be an integer, got 'many'."),
        ("training.epochs=", "training.epochs must be an integer, got ''."),
        ("training.epochs=1.5", "training.epochs must be an integer, got 1.5."),
        ("training.epochs=true", "training.epochs must be an integer, got True."),
        ("training.updates=0", "training.updates must be at least 1 and at most 1,000,000,000,000, got 0."),
        ("training.learning_rate=fast", "training.learning_rate must be a number, got 'fast'."),
        ("training.learning_rate=0", "training.learning_rate must be above 0, got 0.0."),
        ("training.learning_rate=nan", "training.learning_rate must be finite, got nan."),
        ("training.label_smoothing=1", "training.label_smoothing must be at least 0 and below 1, got 1.0."),
        (
            "training.schedule=linear",
            "training.schedule must be one of cosine, inverse-sqrt, constant, got 'linear'.",
        ),
        ("training.accumulate=[1, 2]", "training.accumulate must be an integer, got [1, 2]."),
        ("model.kind=lstm", "model.kind must be one of transformer, recurrent, plain, got 'lstm'."),
        ("model.heads=7", "256"),  # not a multiple of 7
        ("model.width=0", "model.width must be at least 1 and at most 65,536, got 0."),
        ("model.norm_first=1", "model.norm_first must be true or false, got 1."),
        ("tokens.size=4", "tokens.size must be at least 5 and at most 10,000,000, got 4."),
        (
            "tokens.character_coverage=0.5",
            "tokens.character_coverage must be at least 0.98 and at most 1, got 0.5.",
        ),
        ("corpus.max_length_ratio=0.5", "corpus.max_length_ratio must be at least 1, got 0.5."),
        ("corpus.max_tokens=0", "corpus.max_tokens must be at least 1 and at most 10,000,000, got 0."),
    ],
)
def test_an_invalid_setting_is_rejected_with_its_cure(setting, why):
    with pytest.raises(ArgumentError) as error:
        TranslationConfig().override([setting])
    assert why in str(error.value)
    assert "\n" not in str(error.value)


@given(place=st.sampled_from(NAMES), value=values)
def test_any_value_is_accepted_or_rejected_by_name(place, value):
    section, name = place
    config, error = try_config({section: {name: value}})
    if config is not None:
        assert config.to_dict()[section][name] == value
    else:
        assert name in error or "width" in error  # not a multiple of heads


@given(
    found=st.dictionaries(st.text(max_size=9) | st.sampled_from(["model", "training"]), values, min_size=1)
)
def test_any_config_is_accepted_or_rejected(found):
    config, error = try_config(found)
    assert config is not None or any(section in error for section in found)


def try_config(settings: dict[str, Any]) -> tuple[TranslationConfig | None, str]:
    """Return the config with these settings, or the error message."""
    try:
        return TranslationConfig.from_dict(settings), ""
    except ArgumentError as error:
        return None, str(error)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"[training", "is not a valid TOML file"),
        (b"\xff\xfe", "is not a valid TOML file"),
        (b"training = 3", "training must be a section ([training], then name = value), got 3."),
        (b"[trainings]", "Unknown section [trainings]. Did you mean training?"),
        (b"[training]\nepochs = 2020-01-01", "training.epochs must be an integer, got datetime.date"),
        (b"[training]\nlearning_rate = inf", "training.learning_rate must be finite, got inf."),
        (b"[training]\nepochs = 1\nepochs = 2", "is not a valid TOML file"),
        (b"a = " + b"[" * 100_000, "is not a valid TOML file"),
    ],
)
def test_an_invalid_file_is_rejected(content, why, tmp_path):
    (tmp_path / "config.toml").write_bytes(content)
    with pytest.raises(ArgumentError) as error:
        TranslationConfig.from_toml(tmp_path / "config.toml")
    assert why in str(error.value)


def test_every_setting_has_a_description():
    config = TranslationConfig()
    for item in (
        item for section in config.to_dict() for item in dataclasses.fields(getattr(config, section))
    ):
        assert re.fullmatch(r".{5,}\.", item.metadata["description"])


@pytest.mark.parametrize(
    ("kind", "shown", "hidden"),
    [
        ("transformer", "heads", {"cell", "input_feeding"}),
        ("recurrent", "attention", {"heads", "guided_alignment_weight"}),
        ("plain", "cell", {"attention", "guided_alignment_weight"}),
    ],
)
def test_ignored_settings_are_not_printed(kind, shown, hidden):
    names = {line.split(" = ")[0] for line in TranslationConfig.preset("tiny", kind).to_toml().splitlines()}
    assert shown in names
    assert not hidden & names


@pytest.mark.parametrize(
    "setting",
    [
        *("model.width=1000000000", "model.layers=1000000000", "model.ffn_dim=99999999999"),
        *("model.heads=1000000000", "model.max_positions=99999999999", "tokens.size=99999999999"),
        *("training.accumulate=1000000000", "training.threads=1000000", "training.batch_tokens=99999999999"),
        *("corpus.max_tokens=99999999999", "training.epochs=99999999999999"),
    ],
)
def test_huge_numbers_are_rejected(setting):
    with pytest.raises(ArgumentError, match=r"must be at least [015] and at most [0-9,]+, got [0-9]+\."):
        TranslationConfig().override([setting])


def test_an_unknown_preset_is_rejected():
    with pytest.raises(ArgumentError, match=r"Unknown preset 'huge'\. Choose from tiny, small, base\."):
        TranslationConfig.preset("huge")
    with pytest.raises(ArgumentError, match="must be one of transformer, recurrent, plain, got 'rnn'"):
        TranslationConfig.preset("tiny", "rnn")


def test_learned_positions_must_cover_translations():
    config = TranslationConfig()
    with pytest.raises(
        ArgumentError, match=r"model.max_positions=300 is too small for corpus.max_tokens=256: .* to 524"
    ):
        config.override(["model.positions=learned", "model.max_positions=300"])
    for positions, n in (("learned", 524), ("rotary", 1)):
        settings = [f"model.positions={positions}", f"model.max_positions={n}"]
        assert config.override(settings).model.max_positions == n


@pytest.mark.parametrize(
    "setting",
    [
        "training.learning_rate=" + "1" * 5000,
        "training.learning_rate=" + "[" * 5000,
        "training.epochs=0x" + "f" * 9000,
        "training.seed=0x" + "f" * 9000,
        "model.norm_first=0x" + "f" * 9000,
        "training.epochs=1\nother=2",
        "training.epochs=\ud800",
        "training." + "x" * 5000 + "=1",
        "x" * 5000 + ".epochs=1",
        "x" * 5000,
    ],
    ids=lambda setting: repr(setting[:20]),
)
def test_huge_values_are_rejected_in_one_line(setting, tmp_path):
    with pytest.raises(ArgumentError) as error:
        TranslationConfig().override([setting])
    assert len(str(error.value)) < 500
    path = tmp_path / "config.toml"
    path.write_bytes(f"model.kind = {setting.partition('=')[2]}".encode(errors="replace"))
    with pytest.raises(ArgumentError) as error:
        TranslationConfig.from_toml(path)
    assert len(str(error.value)) < 500


def test_a_byte_order_mark_is_ignored(tmp_path):
    (tmp_path / "config.toml").write_bytes("\ufeff[training]\nepochs = 3\n".encode())
    assert TranslationConfig.from_toml(tmp_path / "config.toml").training.epochs == 3


def test_a_config_must_be_a_regular_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        TranslationConfig.from_toml(tmp_path / "config.toml")
    os.mkfifo(tmp_path / "config.toml")
    with pytest.raises(ArgumentError, match="is a named pipe"):
        TranslationConfig.from_toml(tmp_path / "config.toml")
    (tmp_path / "large.toml").write_bytes(b"#" * 2**21)
    with pytest.raises(ArgumentError, match=r"is 2\.1 MB; the limit is 1\.0 MB"):
        TranslationConfig.from_toml(tmp_path / "large.toml")


def test_settings_and_strategies_import_without_torch():
    """This way the command line reports a wrong setting or option immediately."""
    program = (
        "import sys\n"
        "from regard.translation.config import TranslationConfig\n"
        "from regard.translation.decoding.strategies import Beam, Sample\n"
        "TranslationConfig.preset('tiny').override(['model.width=64']).to_toml(), Beam(2), Sample()\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

"""`regard train`: data, settings, --resume, and errors."""

import errno
import gzip
import json
import os
import shutil
import tomllib
from pathlib import Path
from unittest.mock import Mock

import pytest

pytest.importorskip("typer")

from regard.cli.resume import TrainOptions
from regard.cli.train import _SYNONYMS, _advise, _check_direction, _find_setting
from regard.translation.config import TranslationConfig
from regard.translation.model_folder import read_config
from regard.translation.training.callbacks import ValidationResult
from regard.translation.training.logs import CsvLog
from regard.translation.training.loop import TrainingResult
from regard.translation.training.train import Run
from tests.cli.running import error_of, run
from tests.translation.small import PAIRS

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = ("--preset", "tiny", "--model", "plain", "--updates", "2", "--set", "model.width=16")
SETTINGS = ("--set", "training.threads=1", "--set", "training.warmup=1")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a corpus in two files, dev pairs in one file, and a model trained on them."""
    folder = tmp_path_factory.mktemp("corpus")
    for name, side in (("a.en", 0), ("a.de", 1)):
        (folder / name).write_text("".join(f"{pair[side]}\n" for pair in PAIRS))
    (folder / "dev.tsv").write_text("".join(f"{pair.source}\t{pair.target}\n" for pair in PAIRS[:5]))
    (folder / "config.toml").write_text("[training]\nlearning_rate = 0.01\nupdates = 7\n")
    run("train", *arguments(folder), "-o", folder / "model")
    return folder


def arguments(folder: Path) -> list[object]:
    """The arguments of the training run."""
    names = f"{folder}/a.en {folder}/a.de --dev {folder}/dev.tsv --config {folder}/config.toml"
    return [*names.split(), *SMALL, *SETTINGS]


def test_dev_pairs_in_one_file_and_swapped(corpus, tmp_path):
    data = Run.load(corpus / "model").data
    assert (data.dev, len(data.pairs)) == (PAIRS[:5], len(PAIRS))
    options = [f"--dev={corpus / 'dev.tsv'}", "--swap", *SMALL, *SETTINGS]
    run("train", corpus / "a.de", corpus / "a.en", *options, "-o", tmp_path / "m")
    assert Run.load(tmp_path / "m").data.dev == [pair[::-1] for pair in PAIRS[:5]]


@pytest.mark.parametrize("name", ["dev.ndjson", "dev.json", "dev.jsonl.gz", "dev.tab", "DEV.TSV", "dev.txt"])
@pytest.mark.parametrize("equals", [False, True])
def test_dev_takes_one_file_of_any_format(name, equals, corpus, tmp_path, monkeypatch):
    lines = [f"{pair.source}\t{pair.target}\n" for pair in PAIRS[:5]]
    if "json" in name:
        lines = [f"{json.dumps(pair._asdict())}\n" for pair in PAIRS[:5]]
    text = "".join(lines).encode()
    (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith("gz") else text)
    train = Mock(return_value=TrainingResult(Mock(), finished=True, example="ja"))
    monkeypatch.setattr("regard.translation.training.train.train", train)
    option = [f"--dev={tmp_path / name}"] if equals else ["--dev", tmp_path / name]
    run("train", corpus / "a.en", corpus / "a.de", "-o", tmp_path / "m", *option, *SMALL)
    assert list(train.call_args.kwargs["dev"]) == PAIRS[:5]


@pytest.mark.parametrize(
    "content", [b"\xef\xbb\xbf[training]\nlearning_rate = 0.5\n", b"[training]\r\nlearning_rate = 0.5\r\n"]
)
def test_config_files_with_bom_or_crlf_are_read(content, corpus, tmp_path, capsys):
    (tmp_path / "config.toml").write_bytes(content)
    run("train", "--print-config", "--config", tmp_path / "config.toml")
    assert "learning_rate = 0.5 " in capsys.readouterr().out


def test_suggested_settings_exist():
    known = {
        f"{section}.{name}" for section, values in TranslationConfig().to_dict().items() for name in values
    }
    assert _SYNONYMS.keys() <= known
    assert {_find_setting(path.partition(".")[2].replace("_", "-")) for path in known} <= known
    assert {path: {_find_setting(name) for name in names.split()} for path, names in _SYNONYMS.items()} == {
        path: {path} for path in _SYNONYMS
    }


def test_the_same_command_can_be_resumed(corpus, tmp_path, capsys):
    run("train", *arguments(corpus), "-o", corpus / "model", "--resume")
    printed = capsys.readouterr().out  # prints how to translate a sentence from the validation set
    assert any(f"--model {corpus / 'model'} '{pair.source}'\n" in printed for pair in PAIRS[:5])
    elsewhere = tmp_path / "moved"  # the same contents under other paths
    elsewhere.mkdir()
    for name in ("a.en", "a.de", "dev.tsv", "config.toml"):
        shutil.copy(corpus / name, elsewhere / name)
    run("train", *arguments(elsewhere), "-o", corpus / "model", "--resume")
    assert "Traceback" not in capsys.readouterr().err


CONFLICTS = [
    ("{a.de} {a.en}", "with the corpus 'a.de' and 'a.en': it was started with 'a.en' and 'a.de'"),
    ("{dev.tsv}", "with the corpus 'dev.tsv': it was started with 'a.en' and 'a.de'"),
    ("{more/a.en} {a.de}", "the contents of the corpus 'a.en' and 'a.de' have changed"),
    ("{a.en} {a.de} --swap", "with --swap true: it was started with false"),
    ("--swap", "with --swap true: it was started with false"),
    ("--dev {a.en} {a.de}", "with --dev 'a.en' and 'a.de': it was started with 'dev.tsv'"),
    ("--preset base", "with --preset 'base': it was started with 'tiny'"),
    ("--model recurrent", "with model.kind='recurrent': it was started with 'plain'"),
    ("--set model.width=32", "with model.width=32: it was started with 16"),
    ("--updates 1", "from 2 updates to 1 update. Use a larger value for --updates"),
    ("--config {config.toml}", "with training.updates=7 from --config {config.toml}: it was started with 2"),
]


def in_folder(folder: Path, text: str) -> str:
    return text.replace("{", f"{folder}/").replace("}", "")


@pytest.mark.parametrize(("options", "message"), CONFLICTS)
def test_resume_rejects_options_that_differ_from_the_start(options, message, corpus, capsys):
    (corpus / "more").mkdir(exist_ok=True)
    (corpus / "more" / "a.en").write_text("1\n")
    command = ["train", *in_folder(corpus, options).split(), "-o", corpus / "model", "--resume"]
    error = error_of(capsys, *command)
    assert f"'{corpus / 'model'}'" in error
    assert in_folder(corpus, message) in error
    assert "choose a new --output." in error


def test_a_folder_without_origin_is_resumed(corpus, tmp_path):
    shutil.copytree(corpus / "model", tmp_path / "m")
    folder_config = read_config(tmp_path / "m")
    del folder_config["origin"]
    (tmp_path / "m" / "config.json").write_text(json.dumps(folder_config))
    run("train", corpus / "a.de", corpus / "a.en", "-o", tmp_path / "m", "--resume")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("{no} {a.de}", "no: No such file"),
        ("{.} {a.de}", "is a folder; pass a file name"),
        ("{a.en} {.}", "TARGET '"),
        ("{a.en} {a.de} --dev {.} {a.de}", "--dev '"),
        ("{a.en} {a.de} --dev {a.de} {dev.tsv}", "dev.tsv' is a file of pairs; pass it without a second"),
        ("{a.en} {a.de} --format tsv", "--format tsv applies to one file of pairs, but two files"),
        ("- -", "SOURCE and TARGET are both '-'"),
        ("{a.en} {a.de} --lr 3", "--lr is not an option but a setting: use --set training.learning_rate="),
        ("{a.en} {a.de} --batch_size=3", "not an option but a setting: use --set training.batch_tokens="),
        (
            "{a.en} {a.de} --set training.learning_rate=" + "9" * 5000,
            "learning_rate must be a number, got '9999",
        ),
        (
            "{a.en} {a.de} --set training.learning_rate=" + "[" * 5000,
            "learning_rate must be a number, got '[[[[",
        ),
        ("{a.en} {a.de} --config /dev/zero", "'/dev/zero' is a device; pass a regular file"),
        ("{a.en} {a.de} --set training.accumulate=10000000", "at most 100,000"),
        ("{a.en} {a.de} --set model.width=1000000000", "model.width must be at least 1 and at most 65,536"),
    ],
    ids=range(14),
)
def test_errors_name_the_argument(arguments, message, corpus, tmp_path, capsys):
    options = in_folder(corpus, arguments).split()
    assert message in error_of(capsys, "train", *options, "-o", tmp_path / "m")
    assert not (tmp_path / "m").exists()


def test_a_full_disk_is_reported_with_the_command_to_resume(corpus, tmp_path, monkeypatch, capsys):
    full = Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "m/model.safetensors"))
    monkeypatch.setattr("regard.translation.training.train.train", full)
    error = error_of(capsys, "train", corpus / "dev.tsv", "-o", tmp_path / "m")
    assert "m/model.safetensors: No space left on device. Free some space, then resume" in error
    assert error.endswith(f"regard train --output {tmp_path / 'm'} --resume\n")


def test_print_config_describes_the_settings_and_ignores_the_folder(corpus, tmp_path, capsys):
    run("train", "--print-config", "--preset", "tiny", "--model", "recurrent")
    printed = capsys.readouterr().out
    assert 'kind = "recurrent"' in printed
    assert "heads" not in printed
    for folder in (tmp_path / "new", tmp_path, corpus / "a.en"):
        run("train", "--print-config", "-o", folder)
        assert "# Peak learning rate." in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_damaged_data_is_one_line(corpus, tmp_path, capsys):
    for name, content in {"dev.tsv": b"", "train.ids": b"x"}.items():
        folder = Path(shutil.copytree(corpus / "model", tmp_path / name))
        (folder / "data" / name).write_bytes(content)
        error = error_of(capsys, "train", "-o", folder, "--resume")
        assert f"The training data in '{folder}' is corrupted" in error
        assert "Copy the folder again, or train in a new one" in error


def test_a_folder_name_that_is_not_utf8_is_rejected_early(corpus, tmp_path, capsys):
    folder = tmp_path / os.fsdecode(b"model\xff")
    for command in (["train", corpus / "dev.tsv", "-o", folder], ["translate", "-m", folder, "1 2 3"]):
        assert "is not UTF-8, so safetensors cannot read a model from it. Choose another name" in error_of(
            capsys, *command
        )
    assert not folder.exists()


def test_the_default_preset_is_chosen_from_the_corpus(corpus, capsys):
    run("train", corpus / "a.en", corpus / "a.de", "--print-config", "--set", "model.dropout=0.25")
    shown = capsys.readouterr().out
    assert shown.startswith("# preset auto for ")
    config = tomllib.loads(shown)
    assert config["model"]["width"] == 128
    assert config["model"]["dropout"] == 0.25
    run("train", "--print-config", "--minutes", "15")  # no corpus: the settings for Multi30k
    assert tomllib.loads(capsys.readouterr().out)["training"]["minutes"] == 15


def test_the_speed_is_measured_with_the_settings_of_the_user(tmp_path, monkeypatch, capsys):
    measured = []
    monkeypatch.setattr(
        "regard.translation.training.timing.tokens_per_second",
        lambda config, length: measured.append(config) or 100_000.0,
    )
    (tmp_path / "config.toml").write_text("[model]\nwidth = 64\n")
    options = ["--config", tmp_path / "config.toml", "--model", "recurrent", "--set", "training.threads=1"]
    run("train", "--print-config", "--minutes", "15", *options)
    (config,) = measured
    assert (config.model.kind, config.model.width, config.training.threads) == ("recurrent", 64, 1)
    assert tomllib.loads(capsys.readouterr().out)["training"]["epochs"] > 25


def test_lengths_of_training_exclude_each_other(corpus, capsys):
    for options in (["--epochs", "2", "--minutes", "3"], ["--updates", "2", "--minutes", "3"]):
        error = error_of(capsys, "train", corpus / "a.en", corpus / "a.de", "-o", "x", *options)
        assert "--minutes 3" in error


def test_a_folder_named_after_the_other_direction_gives_a_warning():
    for source, target, swap, folder, warns in [
        ("a.en", "a.de.gz", False, "de-en", True),
        ("a.en", "a.de", True, "de-en", False),
        ("a.de", "a.en", False, "de-en", False),
        ("a.de", "a.en", False, "model", False),
        ("pairs.tsv", None, False, "de-en", False),
        ("a.txt", "b.txt", False, "txt-txt", False),
    ]:
        options = TrainOptions(None, None, None, [], source, target, None, swap, "en-de")
        warning = _check_direction(options, Path("models", folder))
        assert (warning is not None) == warns, (source, target, folder)


@pytest.mark.parametrize(
    ("bleu", "loss", "is_poor"), [(0.0, 4.9, True), (31.4, 2.5, False), (0.0, 0.3, False)]
)
def test_a_poor_model_gives_advice(bleu, loss, is_poor, tmp_path):
    log = CsvLog(tmp_path)
    log.on_begin("", 0, 100)
    log.on_validation(ValidationResult(50, loss, bleu, None, None, True))
    log.on_end("")
    advice = _advise(tmp_path)
    assert bool(advice) == is_poor
    assert not advice or ("only 0.0" in advice and "--resume" in advice)

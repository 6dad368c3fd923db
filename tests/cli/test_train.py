"""`regard train`: what it goes on with, what it shows, and what it refuses."""

import errno
import gzip
import json
import os
import shutil
from pathlib import Path

import pytest

pytest.importorskip("typer")

from regard.cli.train import _SETTINGS
from regard.cli.train import PAIRS as PAIR_FILES
from regard.translation.config import TranslationConfig
from regard.translation.data.formats import _ENDINGS
from regard.translation.training.checkpoint import read_config
from regard.translation.training.preparation import prepared
from tests.cli.running import run
from tests.translation.small import PAIRS

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = ("--preset", "tiny", "--model", "plain", "--updates", "2", "--set", "model.width=16")
SETTINGS = ("--set", "training.threads=1", "--set", "training.warmup=1")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a corpus in two files, dev pairs in one, and a model that was trained on them."""
    folder = tmp_path_factory.mktemp("corpus")
    for name, side in (("a.en", 0), ("a.de", 1)):
        (folder / name).write_text("".join(f"{pair[side]}\n" for pair in PAIRS))
    (folder / "dev.tsv").write_text("".join(f"{pair.source}\t{pair.target}\n" for pair in PAIRS[:5]))
    (folder / "plan.toml").write_text("[training]\nlearning_rate = 0.01\nupdates = 7\n")
    run("train", *begun(folder), "-o", folder / "model")
    return folder


def begun(folder: Path) -> list[object]:
    """The arguments of the training."""
    files = [folder / "a.en", folder / "a.de", "--dev", folder / "dev.tsv", "--config", folder / "plan.toml"]
    return [*files, *SMALL, *SETTINGS]


def test_dev_pairs_in_one_file(corpus):
    found = prepared(corpus / "model")
    assert found is not None
    assert found.dev == PAIRS[:5]
    assert len(found.pairs) == len(PAIRS)


def test_dev_pairs_after_an_equals_sign_and_swapped(corpus, tmp_path):
    options = [f"--dev={corpus / 'dev.tsv'}", "--swap", *SMALL, *SETTINGS]
    run("train", corpus / "a.de", corpus / "a.en", *options, "-o", tmp_path / "m")
    found = prepared(tmp_path / "m")
    assert found is not None
    assert found.dev == [pair[::-1] for pair in PAIRS[:5]]


@pytest.mark.parametrize("name", ["dev.ndjson", "dev.json", "dev.jsonl.gz", "dev.tab", "DEV.TSV", "dev.txt"])
def test_dev_pairs_in_one_file_of_any_form(name, corpus, tmp_path):
    lines = [f"{pair.source}\t{pair.target}\n" for pair in PAIRS[:5]]
    if "json" in name:
        lines = [f"{json.dumps(pair._asdict())}\n" for pair in PAIRS[:5]]
    text = "".join(lines).encode()
    (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith("gz") else text)
    for arguments in (["--dev", tmp_path / name, *SMALL], [*SMALL, f"--dev={tmp_path / name}"]):
        folder = tmp_path / f"m{len(list(tmp_path.iterdir()))}"
        run("train", corpus / "a.en", corpus / "a.de", "-o", folder, *SETTINGS, *arguments)
        found = prepared(folder)
        assert found is not None
        assert found.dev == PAIRS[:5]


def test_the_command_knows_the_forms_that_are_read():
    assert {*PAIR_FILES, ".txt"} == set(_ENDINGS)


@pytest.mark.parametrize(
    "content", [b"\xef\xbb\xbf[training]\nrate = 0.5\n", b"[training]\r\nrate = 0.5\r\n"]
)
def test_plans_of_other_systems_are_read(content, corpus, tmp_path, capsys):
    (tmp_path / "plan.toml").write_bytes(content)
    run("train", "--print-config", "--config", tmp_path / "plan.toml")
    assert "rate = 0.5 " in capsys.readouterr().out


def test_settings_that_look_like_options_are_settings():
    known = {
        f"{section}.{name}" for section, values in TranslationConfig().to_dict().items() for name in values
    }
    assert {setting.partition("=")[0] for setting in _SETTINGS.values()} <= known
    TranslationConfig().override(list(_SETTINGS.values()))


def test_the_end_shows_how_to_translate_a_sentence_of_the_dev_data(corpus, capsys):
    run("train", "-o", corpus / "model", "--resume")
    shown = capsys.readouterr().out
    assert any(f"--model {corpus / 'model'} '{pair.source}'\n" in shown for pair in PAIRS[:5])


def test_the_same_command_goes_on(corpus, tmp_path, capsys):
    run("train", *begun(corpus), "-o", corpus / "model", "--resume")
    elsewhere = tmp_path / "moved"  # the same files are known again
    elsewhere.mkdir()
    for name in ("a.en", "a.de", "dev.tsv", "plan.toml"):
        shutil.copy(corpus / name, elsewhere / name)
    run("train", *begun(elsewhere), "-o", corpus / "model", "--resume")
    assert "Traceback" not in capsys.readouterr().err


OTHER = {
    "corpus": (["{a.de}", "{a.en}"], "was begun with the corpus 'a.en' and 'a.de', and now it is 'a.de' and"),
    "one file": (["{dev.tsv}"], "was begun with the corpus 'a.en' and 'a.de', and now it is 'dev.tsv'"),
    "changed": (
        ["{more/a.en}", "{a.de}"],
        "was begun with the corpus 'a.en' and 'a.de', and the contents have changed since then",
    ),
    "direction": (["{a.en}", "{a.de}", "--swap"], "was begun with --swap false, and now it is true"),
    "direction alone": (["--swap"], "was begun with --swap false, and now it is true"),
    "dev": (["--dev", "{a.en}", "{a.de}"], "with --dev 'dev.tsv', and now it is 'a.en' and 'a.de'"),
    "preset": (["--preset", "base"], "was begun with --preset 'tiny', and now it is 'base'"),
    "model": (["--model", "recurrent"], "begun with model.kind='plain', and now it is 'recurrent'"),
    "setting": (["--set", "model.width=32"], "begun with model.width=16, and now it is 32"),
    "updates": (["--updates", "1"], "was planned for 2 updates, and now it is 1 update;"),
    "file": (["--config", "{plan.toml}"], "begun with training.updates=2, and --config {plan.toml} says 7"),
}


@pytest.mark.parametrize("case", OTHER)
def test_what_a_training_was_not_begun_with_is_refused(case, corpus, capsys):
    (corpus / "more").mkdir(exist_ok=True)
    (corpus / "more" / "a.en").write_text("1\n")
    arguments, message = (
        [one.replace("{", f"{corpus}/").replace("}", "") for one in part]
        for part in (OTHER[case][0], [OTHER[case][1]])
    )
    run("train", *arguments, "-o", corpus / "model", "--resume", status=2)
    shown = capsys.readouterr().err
    assert message[0] in shown
    assert ("a training can be made longer" if case == "updates" else "leave it out") in shown
    assert shown.count("\n") == 1


def test_a_folder_that_does_not_say_what_it_was_made_of_goes_on(corpus, tmp_path):
    shutil.copytree(corpus / "model", tmp_path / "m")
    folder_config = read_config(tmp_path / "m")
    del folder_config["origin"]
    (tmp_path / "m" / "config.json").write_text(json.dumps(folder_config))
    run("train", corpus / "a.de", corpus / "a.en", "-o", tmp_path / "m", "--resume")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{no}", "{a.de}"], "no: No such file"),
        (["{.}", "{a.de}"], "SOURCE is"),
        (["{a.en}", "{.}"], "TARGET is"),
        (["{a.en}", "{a.de}", "--dev", "{.}", "{a.de}"], "--dev is"),
        (["{a.en}", "{a.de}", "--dev", "{a.de}", "{dev.tsv}"], "give it alone"),
        (["{a.en}", "{a.de}", "--format", "tsv"], "--format tsv is about one file"),
        (["-", "-"], "SOURCE and TARGET are both '-'"),
        (
            ["{a.en}", "{a.de}", "--lr", "3"],
            "there is no option --lr; it is a setting: --set training.learning_rate=0.001",
        ),
        (
            ["{a.en}", "{a.de}", "--batch_size=3"],
            "no option --batch_size; it is a setting: --set training.tok",
        ),
        (["{a.en}", "{a.de}", "--set", "training.learning_rate=" + "9" * 5000], "training.learning_rate is '9999"),
        (["{a.en}", "{a.de}", "--set", "training.learning_rate=" + "[" * 5000], "training.learning_rate is '[[[["),
        (["{a.en}", "{a.de}", "--config", "/dev/zero"], "'/dev/zero' is a device; pass a regular file"),
        (["{a.en}", "{a.de}", "--set", "training.accumulate=10000000"], "at most 100,000"),
        (["{a.en}", "{a.de}", "--set", "model.width=1000000000"], "width=1,000,000,000; it must be at most"),
    ],
)
def test_refusals_name_the_argument(arguments, message, corpus, tmp_path, capsys):
    given = [one.replace("{", f"{corpus}/").replace("}", "") for one in arguments]
    run("train", *given, "-o", tmp_path / "m", status=2)
    shown = capsys.readouterr().err
    assert message in shown
    assert shown.count("\n") == 1
    assert not (tmp_path / "m").exists()


def test_a_full_disk_is_told_with_how_to_go_on(corpus, tmp_path, monkeypatch, capsys):
    def full(*given: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "m/model.safetensors")

    monkeypatch.setattr("regard.translation.training.train.train", full)
    run("train", corpus / "dev.tsv", "-o", tmp_path / "m", status=2)
    shown = capsys.readouterr().err
    assert shown.startswith("regard: m/model.safetensors: No space left on device; free some space, then go")
    assert shown.endswith(f"regard train --output {tmp_path / 'm'} --resume\n")


def test_settings_are_explained(capsys):
    run("train", "--print-config", "--preset", "tiny", "--model", "recurrent")
    shown = capsys.readouterr().out
    assert 'kind = "recurrent"' in shown
    assert "# the highest learning rate" in shown
    assert "heads" not in shown


def test_settings_are_shown_whatever_the_folder(corpus, tmp_path, capsys):
    for folder in (tmp_path / "new", tmp_path, corpus / "a.en"):
        run("train", "--print-config", "-o", folder)
        assert "# the highest learning rate" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_damaged_data_is_one_line(corpus, tmp_path, capsys):
    for name, content in {"dev.tsv": b"", "train.ids": b"x"}.items():
        folder = Path(shutil.copytree(corpus / "model", tmp_path / name))
        (folder / "data" / name).write_bytes(content)
        run("train", "-o", folder, "--resume", status=2)
        shown = capsys.readouterr().err
        assert f"the data of '{folder}' are damaged" in shown
        assert "copy the folder again, or train in a new one" in shown
        assert shown.count("\n") == 1


def test_a_folder_whose_name_is_no_text_is_refused_before_the_work(corpus, tmp_path, capsys):
    folder = tmp_path / os.fsdecode(b"model\xff")
    for command in (["train", corpus / "dev.tsv", "-o", folder], ["translate", "-m", folder, "1 2 3"]):
        run(*command, status=2)
        shown = capsys.readouterr().err
        assert "is no UTF-8 text, so that a model in it could not be read again; give it another" in shown
        assert shown.count("\n") == 1
    assert not folder.exists()

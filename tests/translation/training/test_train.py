"""From files to a translator: training, errors and resuming."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from regard.errors import ArgumentError, DTypeError
from regard.translation import load_translator
from regard.translation.alignment.alignment_head import AlignmentHead
from regard.translation.config import TranslationConfig
from regard.translation.data.pairs import Pair
from regard.translation.model_folder import CONFIG, MODEL, read_config
from regard.translation.training.callbacks import Callback
from regard.translation.training.checkpoint import Checkpoint, load_model, write_parameters
from regard.translation.training.train import load_alignment_head, train
from tests.cli.running import run
from tests.fresh import run_fresh
from tests.translation.folders import content
from tests.translation.small import PAIRS, PATIENT, Interrupts, Recorder, bits, small_config

pytestmark = pytest.mark.usefixtures("one_thread")
QUICK = ("updates=4", "validate_every=2", "accumulate=1")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished training run."""
    folder = tmp_path_factory.mktemp("trained") / "model"
    assert train(folder, PAIRS, config=small_config("transformer", *QUICK)).finished
    return folder


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    """A copy that tests may change."""
    return Path(shutil.copytree(trained, tmp_path / "model"))


def same(folder: Path, other: Path) -> bool:
    """Return whether two runs wrote the same files, except for logs, file names and the model card."""
    varying = ("log", "tensorboard", "README.md")
    first, second = (
        {name: file for name, file in bits(path).items() if not name.startswith(varying)}
        | {CONFIG: read_config(path) | {"origin": None}}
        for path in (folder, other)
    )
    return first == second


@pytest.mark.parametrize("model", ["transformer", "recurrent", "plain"])
def test_pairs_become_a_translator(tmp_path, model):
    recorder, folder, dev = Recorder(), tmp_path / "new" / "model", [Pair("9 9 9 9", "9 9 9 9")]
    config = small_config(model, *QUICK)
    assert train(folder, iter(PAIRS), dev=dev, config=config, callbacks=[recorder]).finished
    (translation,) = load_translator(folder).translate(["1 2 3"])
    assert isinstance(translation.text, str)
    names = {path.name for path in folder.iterdir()}
    assert {CONFIG, MODEL, "tokens.model", "log.csv", "data", "checkpoints"} <= names
    assert ("alignment" in read_config(folder)) == (model != "plain")
    assert recorder.begun == [(0, 4)]
    assert any("1 dev pair" in text for text in recorder.texts)
    assert "update 4" not in recorder.texts[0]
    assert (folder / "log.csv").read_text().count("\n") == 3  # a header and two validations
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text("utf-8").splitlines()]
    assert [sample["step"] for sample in samples] == [2, 4]
    assert all((sample["alignment"] is None) == (model == "plain") for sample in samples)
    assert {sample["source"] for sample in samples} == {"9 9 9 9"}


def test_a_nonempty_folder_is_not_changed(folder, tmp_path):
    before = content(folder)
    with pytest.raises(ArgumentError, match=r"is not empty\. Resume training with --resume"):
        train(folder, PAIRS, config=small_config())
    assert content(folder) == before
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_bytes(b"cat")
    for resume, why in ((False, "is not empty"), (True, "is not a model folder: it has no config.json")):
        with pytest.raises(ArgumentError, match=why):
            train(tmp_path / "photos", PAIRS, config=small_config(), resume=resume)
    assert content(tmp_path / "photos") == {"cat.jpg": b"cat"}


@pytest.mark.parametrize("resume", [True, False])
def test_a_rejected_run_deletes_nothing(tmp_path, resume):
    for name in (".video.part", ".regard-0123456789abcdef.part", "film.part", "notes.txt"):
        (tmp_path / name).write_text("mine")
    before = content(tmp_path)
    for folder_config in (None, "{}", '{"format": "regard translator 3"}'):
        if folder_config is not None:
            (tmp_path / CONFIG).write_text(folder_config)
            before[CONFIG] = folder_config.encode()
        with pytest.raises(ArgumentError):
            train(tmp_path, PAIRS, config=small_config("plain", *QUICK), resume=resume)
        assert content(tmp_path) == before


def test_a_run_deletes_only_its_own_files(folder):
    for name in (".video.part", ".regard-0123456789abcdef.part", "film.part"):
        (folder / name).write_text("mine")
    (folder / ".regard-fedcba9876543210.part").symlink_to(folder / "film.part")
    train(folder, resume=True)
    assert {path.name for path in folder.glob("*.part")} | {path.name for path in folder.glob(".*.part")} == {
        ".video.part",
        "film.part",
        ".regard-fedcba9876543210.part",
    }


class Harms(Callback):
    """Corrupts the folder of a training run at an event."""

    def __init__(self, event: str, harm: Callable[[], object]) -> None:
        def happens(*given: object) -> None:
            setattr(self, event, lambda *given: None)
            harm()

        setattr(self, event, happens)
        self.ends: list[str] = []

    def on_end(self, text: str) -> None:
        self.ends.append(text)


@pytest.mark.parametrize("event", ["on_begin", "on_validation", "on_report", "on_save"])
@pytest.mark.parametrize("how", ["removed", "moved", "replaced"])
@pytest.mark.sampled(3)
def test_a_lost_folder_ends_training(tmp_path, event, how):
    folder = tmp_path / "model"

    def harm() -> None:
        if how == "moved":
            folder.rename(tmp_path / "other")
        else:
            shutil.rmtree(folder)
        if how == "replaced":
            folder.mkdir()

    callback = Harms(event, harm)
    with pytest.raises((ArgumentError, FileNotFoundError)) as refused:
        train(folder, PAIRS, config=small_config("transformer", *QUICK), callbacks=[callback])
    assert str(folder) in str(refused.value)
    assert not callback.ends
    assert folder.exists() == (how == "replaced")
    if how == "moved":
        assert train(tmp_path / "other", resume=True).finished


@pytest.mark.parametrize("name", [CONFIG, "data/dev.links", "tokens.model", "data/dev.tsv", "data/train.ids"])
@pytest.mark.sampled(4)
def test_a_lost_file_ends_training(tmp_path, name):
    folder, copy = tmp_path / "model", tmp_path / "copy"

    def harm() -> None:
        shutil.copy(folder / name, copy)
        (folder / name).unlink()

    callback = Harms("on_save", harm)
    config = small_config("transformer", *QUICK)
    with pytest.raises(
        ArgumentError, match=rf"{name}' was removed .* after update 3: .*the last one was saved at update 2"
    ):
        train(folder, PAIRS, config=config, callbacks=[callback])
    assert not callback.ends
    shutil.copy(copy, folder / name)
    assert train(folder, resume=True).finished


def test_resuming_a_finished_run_changes_nothing(folder, trained):
    assert train(folder, resume=True).finished
    assert train(
        folder, PAIRS[:3], config=small_config("plain"), resume=True
    ).finished  # the folder's config is used
    assert same(folder, trained)


def test_an_interrupted_run_resumes_without_pairs(tmp_path, trained):
    config, folder = small_config("transformer", *QUICK), tmp_path / "model"
    result = train(folder, PAIRS, config=config, callbacks=[Interrupts("on_save", 2)])
    assert (result.finished, result.progress.step) == (False, 3)
    assert "alignment" not in read_config(folder)
    load_model(folder)  # the model can already be loaded
    assert train(folder, resume=True).finished
    assert same(folder, trained)


def test_resuming_requires_data(tmp_path):
    with pytest.raises(ArgumentError, match=r"Nothing to resume in .*\. Pass the training pairs\."):
        train(tmp_path / "new", resume=True)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("resume", [True, False])
def test_a_failed_preparation_can_be_repeated(tmp_path, trained, resume):
    config = small_config("transformer", *QUICK)
    with pytest.raises(ArgumentError, match="5 distinct source sentences; at least 10"):
        train(tmp_path / "model", PAIRS[:5], config=config)
    assert train(tmp_path / "model", PAIRS, config=config, resume=resume).finished
    assert same(tmp_path / "model", trained)


@pytest.mark.parametrize("resume", [True, False])
@pytest.mark.parametrize("missing", [["data"], ["data", "checkpoints"]])
def test_a_model_without_data_is_not_overwritten(folder, resume, missing):
    for name in missing:
        shutil.rmtree(folder / name)
    before = content(folder)
    with pytest.raises(ArgumentError, match="but no training data" if resume else "is not empty"):
        train(folder, PAIRS, config=small_config(), resume=resume)
    assert content(folder) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pairs": "a.tsv"}, r"train got pairs='a.tsv'; pass sentence pairs.* or read_pairs\(file\)"),
        ({"pairs": PAIRS, "dev": "a.tsv"}, "train got dev='a.tsv'"),
        ({"pairs": 7}, r"Expected a list of pairs, .*, got an int"),
        ({"pairs": ["ab", "cd"]}, r"Pair 0 must be \(source, target\), two strings, got 'ab'"),
        ({"pairs": [*PAIRS, ("a", "b", "c")]}, r"Pair 60 must be .*, got \('a', 'b', 'c'\)"),
        ({"pairs": PAIRS, "config": {}}, "train got a config of type dict; pass a TranslationConfig"),
    ],
)
def test_invalid_arguments_are_rejected(options, message, tmp_path):
    with pytest.raises(DTypeError, match=message):
        train(tmp_path / "model", **options)


# the command


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """A corpus in two files."""
    for name, side in (("a.en", 0), ("a.de", 1)):
        (tmp_path / name).write_text("".join(f"{pair[side]}\n" for pair in PAIRS))
    return tmp_path / "a.en", tmp_path / "a.de"


def settings(config: TranslationConfig) -> list[str]:
    """Return a config as command-line options."""
    return [
        part
        for section, values in config.to_dict().items()
        for name, value in values.items()
        for part in ("--set", f"{section}.{name}={'none' if value is None else json.dumps(value)}")
    ]


SMALL = ("--set", "model.width=16", "--set", "model.heads=2", "--set", "training.threads=1")


def test_the_command_trains_the_same_model_as_python(tmp_path, files, trained, capsys):
    run("train", *files, "-o", tmp_path / "model", *settings(small_config("transformer", *QUICK)))
    assert same(tmp_path / "model", trained)
    shown = capsys.readouterr().out
    assert "dev pairs" in shown
    assert "dev BLEU" in shown
    assert f"regard translate --model {tmp_path / 'model'}" in shown
    run("translate", "--model", tmp_path / "model", "1 2 3")
    assert capsys.readouterr().out.count("\n") == 1


def test_swap_trains_the_other_direction(tmp_path, files):
    options = settings(small_config("plain", *QUICK))
    run("train", *files, "-o", tmp_path / "there", *options, "--dev", *files)
    run("train", *files[::-1], "-o", tmp_path / "back", *options, "--dev", *files[::-1])
    run("train", *files, "-o", tmp_path / "swapped", *options, "--swap", "--dev", *files)
    assert same(tmp_path / "back", tmp_path / "swapped")
    assert not same(tmp_path / "there", tmp_path / "swapped")


BOTH, MODEL_ = ["{a.en}", "{a.de}"], ["-o", "{m}"]
REFUSED = {
    "no folder": (BOTH, "train needs a folder for the model: --output FOLDER"),
    "missing file": (["{no.en}", "{a.de}", *MODEL_], "No such file"),
    "unequal files": (["{a.en}", "{short.de}", *MODEL_], "60 lines, but"),
    "bad UTF-8": (["{a.en}", "{latin.de}", *MODEL_], ": not UTF-8"),
    "a folder": (["{a.en}", "{photos}", *MODEL_], "a folder"),
    "empty files": (["{empty}", "{empty.de}", *MODEL_], "No training pairs are left"),
    "the same file twice": (["{a.en}", "{a.en}", *MODEL_], "SOURCE and TARGET are both"),
    "pairs and a target": (
        ["{a.tsv.gz}", "{a.de}", *MODEL_],
        "but a second file was also passed",
    ),
    "two ends": ([*BOTH, *MODEL_, "--epochs", "2", "--updates", "9"], "one of them"),
    "one file without tabs": (["{a.en}", *MODEL_], ": no tab"),
    "folder with something": ([*BOTH, "-o", "{photos}"], "is not empty"),
    "no model to go on with": (["-o", "{photos}", "--resume"], "no config.json"),
    "nothing to go on with": ([*MODEL_, "--resume"], "Nothing to resume"),
    "no pairs": (MODEL_, "train needs sentence pairs"),
    "file as folder": ([*BOTH, "-o", "{a.en}"], "a.en"),
    "folder below a file": ([*BOTH, "-o", "{a.en}/model"], "a.en"),
    "unwritable": ([*BOTH, "-o", "/proc/model"], "/proc/model"),
    "preset": ([*BOTH, *MODEL_, "--preset", "huge"], "'huge'"),
    "model": ([*BOTH, *MODEL_, "--model", "rnn"], "'rnn'"),
    "setting": ([*BOTH, *MODEL_, "--set", "training.epoch=3"], "Did you mean --epochs?"),
    "value": ([*BOTH, *MODEL_, "--set", "model.heads=7"], "heads"),
    "epochs": ([*BOTH, *MODEL_, "--epochs", "0"], "--epochs"),
    "missing TOML": ([*BOTH, *MODEL_, "--config", "{no.toml}"], "no.toml"),
    "wrong TOML": ([*BOTH, *MODEL_, "--config", "{a.en}"], "is not a valid TOML file"),
    "vocabulary": ([*BOTH, *MODEL_, "--set", "tokens.size=5"], "is too small"),
    "languages": (["embedded", *MODEL_, "--languages", "german"], "en-de"),
    "shard alone": ([*BOTH, *MODEL_, "--shard"], "torchrun"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_user_errors_are_one_line(tmp_path, files, case, capfd):
    (tmp_path / "short.de").write_text("1\n2\n")
    (tmp_path / "latin.de").write_bytes(b"f\xfcnf\n" * 60)
    (tmp_path / "empty").write_text("")
    (tmp_path / "empty.de").write_text("")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_bytes(b"cat")
    arguments, why = REFUSED[case]
    given = [argument.replace("{", f"{tmp_path}/").replace("}", "") for argument in arguments]
    run("train", *given, status=2)
    shown = capfd.readouterr().err
    assert why in shown
    assert shown.startswith("regard: ")
    assert shown.count("\n") == 1
    assert content(tmp_path / "photos") == {"cat.jpg": b"cat"}
    assert files[0].read_text().count("\n") == len(PAIRS)


@pytest.mark.parametrize("folder", ["model", "some/where/model", "."])
def test_a_rejected_run_leaves_no_files(tmp_path, folder):
    (tmp_path / ".mine").write_text("mine")
    before = content(tmp_path)
    few = [Pair("ein Hund", "a dog")]
    for pairs, config in (
        (few, None),
        (PAIRS, small_config("transformer", "tokens.size=5", "tokens.kind=bpe")),
    ):
        with pytest.raises(ArgumentError):
            train(tmp_path / folder, pairs, config=config)
        assert content(tmp_path) == before
        assert [path.name for path in tmp_path.iterdir()] == [".mine"]


@pytest.mark.parametrize(
    "settings", [("tokens.shared=true",), ("tokens.shared=false", "guided_alignment_weight=0.1")]
)
def test_a_failed_preparation_removes_only_its_own_files(tmp_path, settings, monkeypatch):
    config, model = small_config("transformer", *settings), tmp_path / "model"
    mine = [model / "notes.txt", model / "data" / "notes.txt"]

    def refuse(path: Path, names: list[str]) -> None:
        path.write_bytes(b"")  # the last file
        for path in mine * notes:
            path.write_text("mine")
        raise ArgumentError("no")

    monkeypatch.setattr("regard.translation.training.preparation.write_checksums", refuse)
    for notes in (0, 1):
        with pytest.raises(ArgumentError, match="no"):
            train(model, PAIRS, config=config)
        left = {path for path in tmp_path.rglob("*") if path.is_file()}
        assert left == {*mine * notes}
        assert model.exists() == bool(notes)


def test_a_run_that_fails_before_its_first_checkpoint_keeps_all_files(tmp_path):
    model = tmp_path / "model"

    class Notes(Callback):
        def on_begin(self, about: str, step: int, steps: int) -> None:
            (model / "notes.txt").write_text("mine")

    config = small_config("transformer", "learning_rate=1e38", "max_grad_norm=0")
    with pytest.raises(
        ArgumentError, match=r"not finite\. There is no checkpoint yet\. .* and train in a new folder\."
    ):
        train(model, PAIRS, config=config, callbacks=[Notes()])
    assert {CONFIG, "tokens.model", "notes.txt", "data/ready", "data/train.ids"} <= content(model).keys()
    assert not Checkpoint.all(model)


def test_extending_a_run_resets_patience(tmp_path):
    config = small_config("transformer", *PATIENT, "accumulate=1")
    longer = config.override(["training.updates=60"])
    first = train(tmp_path / "model", PAIRS, config=config)
    assert first.progress.step < 40
    for name in ("cut", "killed"):
        shutil.copytree(tmp_path / "model", tmp_path / name)
    recorder = Recorder()
    second = train(tmp_path / "model", config=longer, resume=True, callbacks=[recorder])
    assert "patience is reset" in recorder.texts[0]
    assert second.finished
    assert second.progress.step > first.progress.step
    folder_config = read_config(tmp_path / "model")
    assert folder_config["extended"] == [first.progress.step]
    assert "alignment" in folder_config

    press = Interrupts("on_validation", first.progress.step + 4)
    assert not train(tmp_path / "cut", config=longer, resume=True, callbacks=[press]).finished
    assert train(tmp_path / "cut", resume=True).progress.step == second.progress.step
    assert same(tmp_path / "cut", tmp_path / "model")

    with pytest.raises(RuntimeError, match="killed"):  # before the next update
        train(tmp_path / "killed", config=longer, resume=True, callbacks=[Killed()])
    train(tmp_path / "killed", config=longer, resume=True)
    assert same(tmp_path / "killed", tmp_path / "model")
    assert train(tmp_path / "model", resume=True).progress.step == second.progress.step  # still finished
    assert same(tmp_path / "killed", tmp_path / "model")


class Killed(Callback):
    """Ends a training run at its start."""

    def on_begin(self, about: str, step: int, steps: int) -> None:
        raise RuntimeError("killed")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_a_finished_run_can_be_extended(tmp_path, schedule):
    config = small_config("transformer", *QUICK, f"schedule={schedule}", "warmup=1")
    longer = config.override([f"training.updates={2 * (config.training.updates or 0)}"])
    train(tmp_path / "whole", PAIRS, config=longer)
    train(tmp_path / "parts", PAIRS, config=config)
    recorder = Recorder()
    result = train(tmp_path / "parts", config=longer, resume=True, callbacks=[recorder])
    assert result.finished
    assert result.progress.step == longer.training.updates
    assert read_config(tmp_path / "parts")["settings"] == longer.to_dict()
    assert recorder.texts[0].startswith("extended from 4 updates to 8 updates")
    assert ("learning rate rises again" in recorder.texts[0]) == (schedule == "cosine")
    if schedule == "constant":  # does not depend on the end
        last = [Checkpoint.all(tmp_path / name)[-1].path / MODEL for name in ("whole", "parts")]
        assert last[0].read_bytes() == last[1].read_bytes()


def test_the_command_extends_a_run_and_does_not_shorten_it(tmp_path, files, capsys):
    model = tmp_path / "model"
    run("train", *files, "-o", model, "--preset", "tiny", "--epochs", 2, *SMALL)
    run("train", "-o", model, "--resume")  # already finished; the preset's 10 epochs are ignored
    assert read_config(model)["settings"]["training"]["epochs"] == 2
    steps = Checkpoint.all(model)[-1].step
    run("train", "-o", model, "--resume", "--epochs", 4)
    assert "extended from 2 epochs to 4 epochs" in capsys.readouterr().out
    assert Checkpoint.all(model)[-1].step == 2 * steps
    for option in (("--epochs", 1), ("--updates", 9999)):
        run("train", "-o", model, "--resume", *option, status=2)
        shown = capsys.readouterr().err
        length = "1 epoch" if option[0] == "--epochs" else "9,999 updates"
        assert (
            f"shorten the training of {str(model)!r} from 4 epochs to {length}. Use a larger value" in shown
        )
    run("train", "-o", model, "--resume", "--set", "training.learning_rate=3", status=2)
    shown = capsys.readouterr().err
    assert "with training.learning_rate=3.0: it was started with 0.002. Remove the setting" in shown


@pytest.fixture
def interrupted(folder: Path) -> Path:
    """A folder with an interrupted training run, which has no alignment head."""
    folder_config = read_config(folder)
    del folder_config["alignment"]
    (folder / CONFIG).write_text(json.dumps(folder_config))
    return folder


ALIGNING = {
    "align": ("--text", "1 2 3", "3 2 1", "--json"),
    "translate": ("1 2 3", "--alignment", "--json"),
    "draw": ("1 2 3", "-o", "x.svg"),
}


def test_an_interrupted_run_selects_the_same_head(interrupted, trained):
    assert (
        load_alignment_head(interrupted)
        == load_alignment_head(trained)
        == load_translator(trained).alignment_head
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize("command", ALIGNING)
def test_an_interrupted_run_aligns_with_the_selected_head(
    command, interrupted, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    best = AlignmentHead(layer=0, heads=(1,), shift="output")  # different from the default
    done = "has not finished; one was selected now."
    last = "its data is missing or corrupted, so the last layer is used."
    torch.manual_seed(0)  # translations are not empty with this seed
    write_parameters(
        interrupted,
        {name: 0.4 * torch.randn(x.shape) for name, x in load_model(interrupted).model.state_dict().items()},
    )

    def shown(note: str) -> list[str]:
        run(command, "-m", interrupted, *ALIGNING[command])
        out, err = capsys.readouterr()
        notes = [line for line in err.splitlines() if "has no alignment head yet" in line]
        assert len(notes) == bool(note)
        assert all(line.endswith(note) for line in notes)
        return [out, Path("x.svg").read_text("utf-8") if command == "draw" else ""]

    folder_config = (interrupted / CONFIG).read_text()
    found: dict[str, list[str]] = {}
    for name, head in (("other", best), ("default", AlignmentHead())):
        (interrupted / CONFIG).write_text(
            json.dumps(json.loads(folder_config) | {"alignment": head.to_dict()})
        )
        found[name] = shown("")
    assert found["other"] != found["default"]
    (interrupted / CONFIG).write_text(folder_config)
    with monkeypatch.context() as patched:
        patched.setattr("regard.translation.training.train._best_head", lambda *given: best)
        assert shown(done) == found["other"]
    ids = interrupted / "data" / "train.ids"
    for damaged in (ids.read_bytes()[:4096] + b"\xff" * 40 + ids.read_bytes()[4136:], b"x"):
        ids.write_bytes(damaged)
        assert shown(last) == found["default"]
    shutil.rmtree(interrupted / "data")
    assert shown(last) == found["default"]


def test_no_head_is_selected_unless_needed(interrupted, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    all_three = ("--layer", 0, "--heads", "all", "--shift", "output")
    run("align", "-m", interrupted, *ALIGNING["align"], *all_three)
    run("translate", "-m", interrupted, "1 2 3")
    run("draw", "-m", interrupted, *ALIGNING["draw"], "--heads")
    assert "alignment head" not in capsys.readouterr().err


# While the first checkpoint is saved: Ctrl-C, a closed terminal, or a closed terminal under `nohup`.
INTERRUPTED = """
import io, os, pty, signal, sys, time
from regard.cli import main

def saved(event, arguments):
    global how
    if event == "os.rename" and "step-" in str(arguments[1]) and how:
        if how == "hangup":
            reader, writer = os.pipe()
            os.set_blocking(writer, False)
            signal.set_wakeup_fd(writer)
            os.write(1, b"first checkpoint")
            os.read(reader, 1)  # the kernel closes the terminal before it sends SIGHUP
            while os.isatty(1):
                time.sleep(0.01)
        else:
            signal.raise_signal(signal.SIGINT if how == "ctrl-c" else signal.SIGHUP)
        how = ""

how = {how!r}
if how == "hangup":
    child, terminal = pty.fork()
    if child:
        shown = b""
        while b"first checkpoint" not in shown:
            shown += os.read(terminal, 1000)
        os.close(terminal)
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    sys.stdout, sys.stderr = open(1, "w"), open(2, "w")
elif how == "nohup":
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
sys.addaudithook(saved)
main({arguments!r})
"""


@pytest.mark.parametrize(
    ("how", "status"), [("ctrl-c", 130), ("hangup", 129), pytest.param("nohup", 0, marks=pytest.mark.slow)]
)
def test_an_interrupted_command_saves_and_resuming_ends_with_the_same_bits(
    how, status, tmp_path, files, trained
):
    cut = tmp_path / "cut"
    options = settings(small_config("transformer", *QUICK))
    arguments = ["train", *map(str, files), "-o", str(cut), *options]
    done = run_fresh(INTERRUPTED.format(how=how, arguments=arguments), TERM="xterm")
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr
    assert ("checkpoint saved" in done.stdout) == (how == "ctrl-c")
    assert (f"Resume with: regard train --output {cut} --resume" in done.stdout) == (how == "ctrl-c")
    assert Checkpoint.all(cut)[-1].step == (4 if how == "nohup" else 3)
    run("train", "--output", cut, "--resume")
    assert same(cut, trained)

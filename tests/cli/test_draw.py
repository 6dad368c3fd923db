"""`regard draw`: each kind of picture, and one-line errors."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("typer")

import regard
from tests.cli.running import error_of, run
from tests.models.encoders.test_pretrained import LAYERS
from tests.translation import folders

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def weights(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    x = torch.randn(3, 5, 4)
    return regard.attend(x, x, x)[1].save(tmp_path / "weights.safetensors")


def text_of(path: Path) -> str:
    return path.read_text("utf-8")


def test_a_weights_file(weights, capsys):
    Path("tokens.txt").write_text("eins\nzwei\n\nvier\nfünf\n")
    run("draw", weights, "-o", "x.svg", "--queries", "a b c d e", "--keys", "tokens.txt", "--title", "T")
    assert capsys.readouterr().out == "3 × 5 × 5 weights\nPicture: x.svg\n"
    assert all(f">{name}<" in text_of(Path("x.svg")) for name in ("a", "e", "fünf", "∅", "T", "head 2"))
    run("draw", weights, "-o", "y.png", "--head", "1", "--log", "--dark")
    assert capsys.readouterr().out.startswith("5 × 5 weights\n")
    assert Path("y.png").read_bytes().startswith(b"\x89PNG")


def test_a_translator(model, tmp_path, capsys):
    run("draw", "-m", model, "ein Hund bellt", "-o", tmp_path / "x.svg")
    (translation,) = regard.load_translator(model).translate("ein Hund bellt")
    assert capsys.readouterr().out.splitlines()[0] == translation.text
    assert all(f">{word}<" in text_of(tmp_path / "x.svg") for word in ("ein", "Hund", "bellt", "source"))
    run("draw", "-m", model, "ein Hund", "--heads", "-o", tmp_path / "y.svg")
    printed = capsys.readouterr().out.splitlines()
    assert printed[1].startswith("2 layers × 2 heads, ")
    assert all(f">{name}<" in text_of(tmp_path / "y.svg") for name in ("head 1", "decoder 1 to source"))


def test_an_encoder(encoder, tmp_path, capsys):
    run("draw", "-m", encoder, "Dogs may bark.", "-o", tmp_path / "x.svg")
    assert capsys.readouterr().out.startswith(f"{LAYERS} layers × ")
    assert ">[CLS]<" in text_of(tmp_path / "x.svg")
    run("draw", "-m", encoder, "Dogs", "--layer", "-1", "--head", "1", "-o", tmp_path / "y.svg")
    assert f">layer {LAYERS - 1}, head 1<" in text_of(tmp_path / "y.svg")
    run("draw", "-m", encoder, "Dogs", "--head", "1", "-o", tmp_path / "z.svg")
    assert ">head 1<" in text_of(tmp_path / "z.svg")
    assert ">head 0<" not in text_of(tmp_path / "z.svg")


def test_negative_heads_count_from_the_last(weights, encoder, model, monkeypatch):
    drawn = []
    monkeypatch.setattr("regard.plot.heatmaps.draw_weights", lambda x, *_, **__: drawn.append(x))
    for subject in ([weights], *(["-m", folder, "Dogs", "--layer", -1] for folder in (encoder, model))):
        for head in (-2, -1, 2 if subject == [weights] else 1):
            run("draw", *subject, "--head", head)
        first, second, third = (torch.as_tensor(x[..., :, :]) for x in drawn[-3:])
        assert torch.equal(second, third)
        assert not torch.equal(first, second)


def test_masks_and_positions(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run("draw", "--mask", "causal", "--mask", "window:4", "--size", "8x12")
    assert capsys.readouterr().out == "Causal() & Window(4)\nPicture: picture.png\n"
    run("draw", "--mask", "documents:2,3", "--queries", "a b c d e", "-o", "x.svg")
    assert text_of(Path("x.svg")).count(">e<") == 2
    for kind in ("sinusoidal", "learned", "rotary", "alibi", "t5"):
        run("draw", "--positions", kind, "--size", "6", "-o", f"{kind}.svg")
    assert "untrained" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "draw needs a weights file, --model with a sentence, --mask, or --positions"),
        (["--mask", "causal", "--positions", "t5"], "--mask and --positions are mutually exclusive"),
        (["x.safetensors"], "x.safetensors: No such file"),
        (["two words"], "The file 'two words' does not exist. For a sentence, add --model FOLDER."),
        (["."], "'.' is a folder; use --model to draw its model's attention"),
        (["tokens.txt"], "tokens.txt"),
        (["--model", "minilm"], "--model needs a sentence"),
        (["--model", "nothing", "Dogs bark."], "'nothing' does not exist"),
        (["--mask", "causal", "Dogs"], "--mask takes no file or sentence; remove 'Dogs'."),
        (["--mask", "causal", "--log"], "--log does not apply to --mask, which accepts --size, --queries"),
        (["--positions", "t5", "--head", "1"], "--head does not apply to --positions, which accepts --size."),
        (["--mask", "diagonal"], "--mask is 'diagonal'; use causal, window:4"),
        (["--mask", "window"], "--mask is 'window'; use causal"),
        (["--mask", "documents:2,3", "--size", "9"], "Documents has 5 queries in total and the call has 9"),
        (["--mask", "causal", "--size", "0"], "--size is '0'; pass one number"),
        (["--mask", "causal", "--size", "2", "--keys", "a b"], "--size and --queries or --keys are mutually"),
        (["--positions", "t5", "--size", "2x3"], "for positions, pass one number: --size 2."),
        (["--mask", "causal", "--size", "999999"], "--size is 999999; the maximum is 50,000"),
        (["--mask", "documents:0"], "--mask is 'documents:0'; use causal"),
        (["--model", "", "Dogs"], "--model is empty"),
        ([""], "WEIGHTS or SENTENCE is empty"),
        (["--model", "minilm", " "], "WEIGHTS or SENTENCE is empty"),
        (["weights.safetensors", "--head", "3"], "--head 3 is out of range; use 0 to 2, or −1"),
        (["weights.safetensors", "--head", "-4"], "--head -4 is out of range; use 0 to 2"),
        (["weights.safetensors", "--queries", "a b"], "Got 2 tokens for 5 queries"),
        (["weights.safetensors", "-o", "x.txt"], "'x.txt': use the extension .png, .svg or .pdf."),
        (["weights.safetensors", "-o", "folder.png"], "--output 'folder.png' is a folder"),
    ],
)
def test_errors_are_one_line(arguments, message, weights, capsys):
    Path("tokens.txt").write_text("no weights")
    Path("folder.png").mkdir()
    assert message in error_of(capsys, "draw", *arguments)
    assert not Path("picture.png").exists()


def test_layers_and_heads_out_of_range(encoder, model, tmp_path, capsys):
    for folder, option, number, valid in (
        (encoder, "--layer", LAYERS, f"0 to {LAYERS - 1}"),
        (encoder, "--head", 99, "0 to "),
        (model, "--layer", 2, "0 to 1"),
    ):
        assert f"{option} {number} is out of range; use {valid}" in error_of(
            capsys, "draw", "-m", folder, "ein Hund", option, number, "-o", tmp_path / "x.png"
        )
    assert "--log applies only to heads; add --heads, or remove --log" in error_of(
        capsys, "draw", "-m", model, "ein Hund", "--log", "-o", tmp_path / "x.png"
    )
    plain = folders.write(tmp_path / "plain", "plain")
    assert "has no cross-attention" in error_of(
        capsys, "draw", "-m", plain, "ein Hund", "-o", tmp_path / "x.png"
    )

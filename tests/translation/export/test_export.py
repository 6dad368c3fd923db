"""Exported models give the same translations without regard; unsupported features are rejected."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import regard
from regard.errors import ArgumentError
from regard.models import Transformer, TransformerConfig
from regard.translation import Greedy, Tokenizer, TokenizerPair, Translator
from regard.translation.alignment.alignment_head import AlignmentHead
from regard.translation.decoding.search import batch_by_length, search
from regard.translation.export.export import NAMES, _write, export_translator
from regard.translation.export.plan import Plan
from tests.fresh import run_fresh
from tests.translation import folders
from tests.translation.exported import (
    MAX_NEW_TOKENS,
    decode_ctranslate2,
    decode_huggingface,
    decode_onnx,
)
from tests.translation.pretrained.folders import (
    LINES,
    SOURCES,
    make_m2m_100,
    make_marian_separate,
    make_nllb,
    make_t5,
)

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]
FORMATS = ["ctranslate2", "onnx", "huggingface"]


def own_translator(*, tie_output: bool = True, **options: Any) -> Translator:
    """Return a random model with regard's vocabulary."""
    torch.manual_seed(0)
    tokens = Tokenizer.learn(LINES, kind="bpe", size=70)
    config = TransformerConfig(width=16, heads=4, layers=2, ffn_dim=24, **options)
    model = Transformer(len(tokens), config, share=True, tie_output=tie_output).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "embedding" not in name:
                parameter.mul_(2)
    return Translator(model, TokenizerPair(tokens, tokens), alignment_head=AlignmentHead(1, (2,), "input"))


def greedy(translator: Translator, sentences: list[str]) -> tuple[list[list[int]], list[list[int]]]:
    """Return the source ids and the greedy translations."""
    ids = [translator.tokens.source.encode(sentence) for sentence in sentences]
    outputs: list[list[int]] = [[] for _ in ids]
    for indices, packed in batch_by_length(ids, 64, torch.device("cpu"), translator.tokens.special):
        found = search(translator.model, packed, Greedy(), max_new_tokens=MAX_NEW_TOKENS)
        for i, hypotheses in zip(indices, found, strict=True):
            outputs[i] = hypotheses[0].tokens
    return ids, outputs


def decode(translator: Translator, folder: Path, to: str, ids: list[list[int]]) -> list[list[int]]:
    """Decode with the library of a format."""
    special, target = translator.tokens.special, translator.tokens.target
    if to == "onnx":
        return decode_onnx(folder, ids)
    sources = [special.source(sentence) for sentence in ids]
    if to == "ctranslate2":
        pieces = [[translator.tokens.source.piece(i) for i in sentence] for sentence in sources]
        if special.source([]) == [special.end]:
            pieces = [sentence[:-1] for sentence in pieces]  # the library adds the end token
        prefix = [target.piece(i) for i in special.target_prefix]
        numbers = {piece: i for i, piece in enumerate(target.pieces())}
        outputs = decode_ctranslate2(folder, pieces, prefix)
        return [[numbers[piece] for piece in output] for output in outputs]
    options = {"forced_bos_token_id": special.target_prefix[0]} if special.target_prefix else {}
    outputs = decode_huggingface(folder, sources, decoder_start_token_id=special.start, **options)
    return [output[len(special.target_prefix) :] for output in outputs]


def check(translator: Translator, to: str, folder: Path, sentences: list[str]) -> None:
    """Export a model and compare its greedy translations."""
    pytest.importorskip({"onnx": "onnxruntime", "huggingface": "transformers"}.get(to, to))
    folder.mkdir(exist_ok=True)
    origin: Any = translator.tokens.target.origin
    _write(translator, origin, to, folder)  # type: ignore[arg-type]
    ids, expected = greedy(translator, sentences)
    limit = MAX_NEW_TOKENS - 5  # libraries count the start and end tokens differently
    outputs = decode(translator, folder, to, ids)
    assert [output[:limit] for output in outputs] == [output[:limit] for output in expected]


def every_format(name: str, *values: Any) -> pytest.MarkDecorator:
    """Loop over formats, each with one of the values; `make test-slow`: with all."""
    cases = [(i, to, value) for i, to in enumerate(FORMATS) for value in values]
    marks = {False: [pytest.mark.slow], True: []}
    return pytest.mark.parametrize(
        ("to", name),
        [pytest.param(to, value, marks=marks[value == values[i % len(values)]]) for i, to, value in cases],
    )


@every_format("norm_first", True, False)
def test_greedy_translations_are_the_same(to: str, norm_first: bool, tmp_path: Path) -> None:
    check(own_translator(norm_first=norm_first), to, tmp_path, SOURCES)


@pytest.mark.parametrize("norm_first", [True, False])
def test_an_untied_output_matrix_is_exported(norm_first: bool, tmp_path: Path) -> None:
    """transformers then expects a copy of the shared embeddings for each side."""
    check(own_translator(norm_first=norm_first, tie_output=False), "huggingface", tmp_path, SOURCES)


def test_a_pretrained_model_with_an_untied_output_matrix_is_exported(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    model = make_m2m_100(tmp_path / "model", tie_word_embeddings=False)
    for side in (model.model.encoder, model.model.decoder):
        side.embed_tokens.weight.data.copy_(model.model.shared.weight)
    model.save_pretrained(tmp_path / "model")
    translator = regard.load_translator(tmp_path / "model", source="de", target="en")
    check(translator, "huggingface", tmp_path / "export", SOURCES)


def test_an_existing_empty_folder_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be the working directory, a mount point or a symbolic link."""
    pytest.importorskip("transformers")
    make_t5(tmp_path / "model")
    for name in ("folder", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to("other")
    monkeypatch.chdir(tmp_path / "folder")
    for output in (Path(), tmp_path / "link", tmp_path / "new"):
        export_translator(tmp_path / "model", "huggingface", output)
        assert sorted(path.name for path in output.iterdir()) == [
            *("README.md", "config.json", "generation_config.json", "model.safetensors", "spiece.model")
        ]
    assert Path().samefile(tmp_path / "folder")
    assert (tmp_path / "link").is_symlink()
    assert not [*tmp_path.rglob(".regard-*")]


def test_an_interrupted_export_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    make_t5(tmp_path / "model")
    (tmp_path / "old").mkdir()

    def interrupt(path: Path, destination: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "rename", interrupt)
    for name in ("old", "new"):
        with pytest.raises(KeyboardInterrupt):
            export_translator(tmp_path / "model", "huggingface", tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "old"]
    assert not [*(tmp_path / "old").iterdir()]


def test_files_of_another_program_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders.write(tmp_path / "model")
    output = tmp_path / "output"
    output.mkdir()

    def write(*arguments: Any) -> None:
        _write(*arguments)
        (output / "README.md").write_text("foreign")

    monkeypatch.setattr("regard.translation.export.export._write", write)
    with pytest.raises(ArgumentError, match="Another program created"):
        export_translator(tmp_path / "model", "huggingface", output)
    assert [path.name for path in output.iterdir()] == ["README.md"]
    assert (output / "README.md").read_text() == "foreign"


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_leaves_nothing(name: str, tmp_path: Path) -> None:
    """The signal arrives during an import, where regard's other commands exit without cleaning up."""
    pytest.importorskip("typer")
    number = getattr(signal, name)
    folders.write(tmp_path / "model")
    (tmp_path / ".regard-other").mkdir()  # of another process
    (tmp_path / "signal_on_import.py").write_text(f"import os\nos.kill(os.getpid(), {int(number)})\n")
    program = f"""
import signal, sys
from pathlib import Path
from regard.cli import main
from regard.translation.export import export

def move(folder, destination):
    assert [*folder.iterdir()] and [*Path({str(tmp_path)!r}).glob(".regard-*/export")]
    import signal_on_import

signal.signal(signal.{name}, signal.default_int_handler if {name!r} == "SIGINT" else signal.SIG_DFL)
export._move = move
sys.path.append({str(tmp_path)!r})
try:
    main(["export", {str(tmp_path / "model")!r}, "--to", "huggingface", "-o", {str(tmp_path / "new")!r}])
except SystemExit as error:
    print(error.code)
"""
    done = run_fresh(program)
    expected = (0, "130\n") if name == "SIGINT" else (-number, "")
    assert (done.returncode, done.stdout) == expected, done.stderr
    names = sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__")
    assert names == [".regard-other", "model", "signal_on_import.py"]


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("family", ["m2m_100", "t5"])
def test_pretrained_models_are_exported(to: str, family: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    if family == "m2m_100":
        make_m2m_100(tmp_path / "model")
        translator = regard.load_translator(tmp_path / "model", source="de", target="en")
    else:
        make_t5(tmp_path / "model", d_kv=8)
        translator = regard.load_translator(tmp_path / "model")
    check(translator, to, tmp_path / "export", SOURCES)


@every_format("vocabularies", 1, 2)
def test_pretrained_models_with_separate_embeddings_are_exported(
    to: str, vocabularies: int, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    if vocabularies == 1:
        make_m2m_100(tmp_path / "model", tie_word_embeddings=False)
        translator = regard.load_translator(tmp_path / "model", source="de", target="en")
    else:  # the ids of </s> differ, too
        make_marian_separate(tmp_path / "model")
        translator = regard.load_translator(tmp_path / "model")
    check(translator, to, tmp_path / "export", SOURCES)


@every_format("vocabulary", "sentencepiece", "tokenizer.json")
def test_the_code_of_the_readme_runs(
    to: str,
    vocabulary: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip({"onnx": "onnxruntime", "huggingface": "transformers"}.get(to, to))
    translator = own_translator()
    if vocabulary == "tokenizer.json":
        pytest.importorskip("transformers")
        make_nllb(tmp_path / "model")
        translator = regard.load_translator(tmp_path / "model", source="deu_Latn", target="eng_Latn")
    folder = tmp_path / "export"
    folder.mkdir()
    _write(translator, translator.tokens.target.origin, to, folder)  # type: ignore[arg-type]
    code = (folder / "README.md").read_text().split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(folder)
    code = code.replace("num_beams=5", "num_beams=5, max_new_tokens=4")  # a random model may never end
    exec(code.replace("A sentence.", SOURCES[0]), {})
    printed = capsys.readouterr().out
    if to == "onnx":  # ONNX decodes greedily
        _, (output,) = greedy(translator, SOURCES[:1])
        text = translator.tokens.target.decode(output).text
        assert printed.strip().startswith(text[:30])


def test_an_export_to_hugging_face_can_be_loaded_again(tmp_path: Path) -> None:
    translator = own_translator()
    _write(translator, None, "huggingface", tmp_path)
    again = regard.load_translator(tmp_path)
    assert greedy(again, SOURCES) == greedy(translator, SOURCES)
    generation = json.loads((tmp_path / "generation_config.json").read_text())
    assert generation["alignment_heads"] == [[1, 2]]


def test_ctranslate2_reads_the_alignment_head(tmp_path: Path) -> None:
    """CTranslate2's attention equals the weights of the head at the step that predicts a token."""
    ctranslate2 = pytest.importorskip("ctranslate2")
    translator = own_translator()
    translator.alignment_head = AlignmentHead(1, (2,), "output")
    _write(translator, None, "ctranslate2", tmp_path)
    segmentation = translator.tokens.source.segment(SOURCES[1])
    (result,) = ctranslate2.Translator(str(tmp_path)).translate_batch(
        [segmentation.pieces], beam_size=1, return_attention=True, max_decoding_length=8
    )
    from regard.translation.alignment.cross_attention import cross_weights

    ids = {piece: i for i, piece in enumerate(translator.tokens.target.pieces())}
    target = [ids[piece] for piece in result.hypotheses[0]]
    (weights,) = cross_weights(translator.model, [segmentation.ids], [target], translator.alignment_head)
    attention = torch.tensor(result.attention[0])[: len(target), : len(segmentation.ids)]
    assert torch.allclose(attention, weights, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "to", "message"),
    [
        (
            {"positions": "rotary"},
            "huggingface",
            "Hugging Face cannot express positions=rotary; it supports only sinus",
        ),
        ({"positions": "alibi"}, "onnx", "ONNX cannot express positions=alibi"),
        ({"key_heads": 2}, "ctranslate2", "CTranslate2 cannot express key_heads=2; it supports only 4"),
        ({"norm": "rms"}, "huggingface", "cannot express norm=rms; it supports only layer"),
        ({"normalize": regard.Sparsemax()}, "onnx", "cannot express normalize=Sparsemax"),
        ({"activation": "swiglu"}, "huggingface", "cannot express activation=swiglu; it supports only relu"),
    ],
)
def test_what_a_format_cannot_express_is_refused(
    options: dict[str, Any], to: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ArgumentError, match=message):
        _write(own_translator(**options), None, to, tmp_path)  # type: ignore[arg-type]
    assert not list(tmp_path.glob("model*"))


def test_recurrent_models_are_refused() -> None:
    from regard.models.recurrent import RecurrentConfig, RecurrentSeq2Seq

    tokens = Tokenizer.learn(LINES, kind="bpe", size=70)
    model = RecurrentSeq2Seq(len(tokens), RecurrentConfig(width=8))
    with pytest.raises(ArgumentError, match="needs a Transformer, got a RecurrentSeq2Seq"):
        Plan.of(Translator(model, TokenizerPair(tokens, tokens)), NAMES["onnx"])


@pytest.mark.slow
@pytest.mark.parametrize("to", FORMATS)
def test_thousand_sentences(to: str, tmp_path: Path) -> None:
    """Uses the shipped translator of dates."""
    from regard.app.dates import make_corpus
    from regard.app.server.registry import DATES

    sentences = list(dict.fromkeys(pair.source for pair in make_corpus().train))[:1000]
    assert len(sentences) == 1000
    check(regard.load_translator(DATES), to, tmp_path / "export", sentences)

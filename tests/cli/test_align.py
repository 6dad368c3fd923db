"""`regard align`: with the lexical aligner or attention, and the error rate against gold links."""

import gzip
import json
import os
import random
import threading
from functools import cache
from pathlib import Path

import pytest
import torch

pytest.importorskip("typer")

from regard.translation.alignment.aer import error_rate, read_gold
from regard.translation.alignment.alignment_head import AlignmentHead
from regard.translation.alignment.lexical_aligner import LexicalAligner
from regard.translation.alignment.links import reverse_links, symmetrize, to_pharaoh
from regard.translation.data.formats import read_pairs, write_pairs
from regard.translation.training.checkpoint import write_parameters
from regard.translation.translator import load_translator
from tests.cli.running import error_of, run
from tests.translation import folders

pytestmark = pytest.mark.usefixtures("one_thread")

PAIRS = [
    ("ein Hund bellt", "a dog barks"),
    ("zwei Katzen schlafen heute", "today two cats sleep"),
    ("", ""),
    ("eine Frau singt", "a woman sings and laughs"),
]


@pytest.fixture(scope="module")
def reverse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folders.write(tmp_path_factory.mktemp("reverse"), seed=1)


@pytest.fixture
def files(tmp_path) -> list[Path]:
    paths = [tmp_path / "a", tmp_path / "b"]
    for path, side in zip(paths, zip(*PAIRS, strict=True), strict=True):
        path.write_text("".join(f"{line}\n" for line in side))
    return paths


@pytest.fixture
def gold(tmp_path) -> Path:
    path = tmp_path / "gold"
    path.write_text("1-1 2-2 3p3\n1-2 2-3 3-4 4-1\n\n1-1 2-2\n")
    return path


translator = cache(load_translator)


def expected(model: Path, **options) -> list[str]:
    head = AlignmentHead(**options) if options else None
    return [alignment.to_pharaoh() for alignment in translator(model).align(PAIRS, head)]


def test_files_pairs_and_sentences(model, files, tmp_path, monkeypatch, capsys):
    pairs, links = tmp_path / "pairs.tsv", expected(model)
    pairs.write_text("".join(f"{source}\t{target}\n" for source, target in PAIRS))
    for arguments in (files, [pairs], ["--text", *PAIRS[0]]):
        run("align", "-m", model, *arguments)
        shown = links[:1] if "--text" in arguments else links
        assert capsys.readouterr().out.split("\n") == [*shown, ""]
    monkeypatch.setattr(
        "regard.cli.align.aligners._BATCH_CELLS", 10
    )  # long pairs are aligned in smaller batches
    run("align", "-m", model, *files, "-o", tmp_path / "links")
    assert (tmp_path / "links").read_text().split("\n") == [*links, ""]
    assert capsys.readouterr().out == ""


def test_layer_heads_and_shift_can_be_selected(model, files, capsys):
    run("align", "-m", model, *files, "--layer", 1, "--heads", "1", "--shift", "input")
    printed = capsys.readouterr().out.split("\n")
    assert printed == [*expected(model, layer=1, heads=(1,), shift="input"), ""]
    run("align", "-m", model, *files, "--layer", 1)  # all heads: the selected ones are in another layer
    assert capsys.readouterr().out.split("\n") == [*expected(model, layer=1, shift="output"), ""]


def test_negative_heads_count_from_the_last_and_a_threshold(model, files, capsys):
    for heads, positive in (("-1", (1,)), ("-2,1", (0, 1)), ("-2", (0,))):
        run("align", "-m", model, *files, "--layer", -1, "--heads", heads)
        printed = capsys.readouterr().out.split("\n")
        assert printed == [*expected(model, layer=1, heads=positive, shift="output"), ""]
    run("align", "-m", model, *files, "--threshold", 0.2)
    lines = [alignment.to_pharaoh(0.2) for alignment in translator(model).align(PAIRS)]
    assert capsys.readouterr().out.split("\n") == [*lines, ""]


@pytest.mark.parametrize("how", ["intersection", "union", "grow-diag-final-and", None])
def test_both_directions(how, model, reverse, files, capsys):
    option = [] if how is None else ["--symmetrize", how]
    run("align", "-m", model, *files, "--reverse-model", reverse, *option)
    forward = translator(model).align(PAIRS)
    backward = translator(reverse).align([(target, source) for source, target in PAIRS])
    lines = [
        to_pharaoh(symmetrize(first.links(), reverse_links(second.links()), how or "grow-diag-final-and"))
        for first, second in zip(forward, backward, strict=True)
    ]
    assert capsys.readouterr().out.split("\n") == [*lines, ""]


def test_gold(model, files, gold, tmp_path, capsys):
    run("align", "-m", model, *files, "--gold", gold, "--index-base", 1, "-o", tmp_path / "links")
    links = [alignment.links() for alignment in translator(model).align(PAIRS)]
    assert capsys.readouterr().out == f"{error_rate(links, read_gold(gold, 1))}\n"
    assert (tmp_path / "links").read_text().split("\n") == [*expected(model), ""]
    run("align", "-m", model, *files, "--gold", gold, "--index-base", 1)
    assert capsys.readouterr().out.startswith("AER ")


def test_json(model, files, capsys):
    run("align", "-m", model, *files, "--json")
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    for values, alignment in zip(printed, translator(model).align(PAIRS), strict=True):
        assert tuple(values["source_words"]) == alignment.source_words
        assert tuple(values["target_words"]) == alignment.target_words
        assert values["links"] == alignment.to_pharaoh()
        for row, weights in zip(values["weights"], alignment.weights.tolist(), strict=True):
            assert row == pytest.approx(weights, abs=1e-4)


def test_draw(model, capsys):
    run("align", "-m", model, "--text", *PAIRS[0], "--draw")
    printed = capsys.readouterr().out
    assert all(word in printed for word in PAIRS[0][1].split())
    assert "\x1b" not in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ein Hund", "a dog"], "The file 'ein Hund' does not exist. To align two sentences, add --text"),
        (["--text", "ein"], "--text needs two sentences"),
        (["no", "such"], "no: No such file or directory; check the path"),
        (["-", "-"], "SOURCE and TARGET are both -"),
        (["{a}", "{short}"], "has 4 lines, but"),
        (["{a}", "{gold}", "--gold", "{short}"], "has 1 line, but the corpus has 4 sentence pairs"),
        ("--symmetrize union", "--symmetrize union needs a second model: --reverse-model FOLDER"),
        ("--symmetrize onion", "'onion' is not one of"),
        ("--index-base 1", "--index-base 1 requires a gold file; add --gold FILE"),
        ("--json --draw", "--json and --draw are mutually exclusive"),
        ("--json --reverse-model {gold}", "--reverse-model applies only to links; remove it"),
        ("--json --gold {gold}", "--gold prints the error rate; remove it, or remove --json"),
        ("--save x", "--save applies to the lexical aligner; remove it, or remove --model"),
        ("--scores", "--scores applies to the lexical aligner"),
        ("--aligner {a}", "--aligner is combined with two models; add --reverse-model FOLDER"),
        ("--heads 1,x", "--heads is '1,x'; pass numbers separated by commas"),
        ("--heads --1", "-1 is the last head"),
        ("--heads 9", "--heads 9 is out of range; use 0 to 1, or −1 for the last"),
        ("--heads -3", "--heads -3 is out of range; use 0 to 1"),
        ("--threshold 2", "--threshold is 2.0; it must be above 0 and at most 1"),
        ("--layer 9", "Layer 9 is out of range: the model has 2 cross-attention layers"),
        ("--gold {gold}", "separated by whitespace. If the file counts words from 1, use --index-base 1."),
        ("--gold {a}", "'ein' is not a link"),
        ("--gold nowhere", "nowhere: No such file"),
        ("-o no/such/x", "the folder 'no/such' does not exist"),
        ("--reverse-model no/such", "'no/such' does not exist"),
    ],
)
def test_errors_are_one_line(arguments, message, model, files, gold, tmp_path, capsys):
    (tmp_path / "short").write_text("0-0\n")
    names = {"a": files[0], "b": files[1], "gold": gold, "short": tmp_path / "short"}
    options = ["{a}", "{b}", *arguments.split()] if isinstance(arguments, str) else arguments
    assert message in error_of(capsys, "align", "-m", model, *(text.format(**names) for text in options))


def test_a_gold_file_that_counts_from_1_is_detected(model, tmp_path, capsys):
    (tmp_path / "pairs.tsv").write_text("ein Hund bellt laut\ta dog barks loudly\n" * 12)
    (tmp_path / "gold").write_text("1-1 2-2 3p3\n" * 12)
    options = ["align", "-m", model, tmp_path / "pairs.tsv", "--gold", tmp_path / "gold"]
    assert "never links word 0 in 12 pairs, so it seems to count from 1" in error_of(capsys, *options)
    for base in (0, 1):  # an explicit base is accepted
        run(*options, "--index-base", base)
        assert capsys.readouterr().out.startswith("AER")


def test_a_model_without_attention(tmp_path, files, capsys):
    assert "has no cross-attention, so it cannot align words" in error_of(
        capsys, "align", "-m", folders.write(tmp_path / "plain", "plain"), *files
    )


LEXICON = {"ein": "a", "Hund": "dog", "Haus": "house", "und": "and", "sieht": "sees", "rot": "red"}


@pytest.fixture(scope="module")
def directed(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A model that generates the words of the targets in PAIRS, and one for those of the sources."""
    paths = []
    for side in (1, 0):
        paths.append(folders.write(tmp_path_factory.mktemp("directed"), seed=side))
        loaded = load_translator(paths[-1])
        weight, norm = loaded.model.output_weight.data, loaded.model.decoder.norm
        weight[:, 0] = -1
        for pair in PAIRS:
            weight[loaded.tokens.target.encode(pair[side]), 0] = 1
        norm.weight.data.zero_()
        norm.bias.data[:] = 4 * torch.eye(len(norm.bias))[0]
        write_parameters(paths[-1], loaded.model.state_dict())
    return paths


def test_exchanged_models_are_detected(directed, files, corpus, tmp_path, capsys):
    run("align", *corpus, "--save", tmp_path / "aligner", "-o", tmp_path / "links")
    capsys.readouterr()
    for options in ([], ["--aligner", tmp_path / "aligner"]):

        def arguments(model, reverse, options=options):
            return "align", *files, *options, "--model", model, "--reverse-model", reverse

        run(*arguments(*directed))
        assert capsys.readouterr().err == ""
        error = error_of(capsys, *arguments(*reversed(directed)))
        assert "Exchange the two models, or SOURCE and TARGET" in error
        run(*arguments(directed[0], directed[0]))
        assert "--reverse-model seems to translate SOURCE to TARGET" in capsys.readouterr().err
        run(*arguments(directed[1], directed[1]))
        assert "--model seems to translate TARGET to SOURCE" in capsys.readouterr().err
    # a single word says little
    word = PAIRS[0][0].split()[0], PAIRS[0][1].split()[0]
    run("align", "--text", *word, "--model", directed[1], "--reverse-model", directed[0])
    assert capsys.readouterr().err == ""


def test_untrained_models_are_not_reported(model, reverse, files, capsys):
    for models in ([model, reverse], [reverse, model]):
        run("align", *files, "--model", models[0], "--reverse-model", models[1])
        assert capsys.readouterr().err == ""


@pytest.fixture
def corpus(tmp_path) -> list[Path]:
    """Two files of 60 word-by-word translations, and an empty line."""
    rng = random.Random(0)
    sentences = [rng.sample(list(LEXICON), 4) for _ in range(60)]
    paths = [tmp_path / "corpus.de", tmp_path / "corpus.en"]
    paths[0].write_text("".join(f"{' '.join(words)}\n" for words in sentences) + "\n")
    paths[1].write_text("".join(f"{' '.join(map(LEXICON.get, words))}\n" for words in sentences) + "\n")
    return paths


def test_the_lexical_aligner_needs_no_model(corpus, tmp_path, capsys):
    run("align", *corpus)
    captured = capsys.readouterr()
    assert captured.out == "0-0 1-1 2-2 3-3\n" * 60 + "\n"
    assert captured.err == (
        "regard: the aligner learned from only 61 sentence pairs; more text gives better links.\n"
    )
    for method in ("intersection", "union", "grow-diag"):
        run("align", *corpus, "--symmetrize", method)
        assert capsys.readouterr().out == captured.out
    (tmp_path / "gold").write_text("0-0 1-1 2-2 3-3\n" * 60 + "\n")
    run("align", *corpus, "--gold", tmp_path / "gold")
    assert capsys.readouterr().out == "AER 0.0%, precision 100.0%, recall 100.0%\n"


def test_a_saved_aligner_aligns_new_text(corpus, tmp_path, capsys):
    path = tmp_path / "de-en.aligner"
    run("align", *corpus, "--save", path, "-o", tmp_path / "links")
    capsys.readouterr()
    run("align", "--text", "rot Haus", "house red", "--aligner", path)
    assert capsys.readouterr().out == "0-1 1-0\n"
    run("align", "--text", "rot Haus", "house red", "--aligner", path, "--scores")
    score, links = capsys.readouterr().out.rstrip().split("\t")
    assert float(score) < 0
    assert [link.split(":")[0] for link in links.split()] == ["0-1", "1-0"]
    run("align", "--text", "rot Haus", "house red", "--aligner", path, "--json", "--threshold", 0.5)
    values = json.loads(capsys.readouterr().out)
    assert values["links"] == "0-1 1-0"
    assert values["link_scores"] == [values["weights"][1][0], values["weights"][0][1]]
    run("align", *corpus, "--aligner", path)
    assert capsys.readouterr().out == (tmp_path / "links").read_text()
    run("align", "--text", "rot Haus", "house red", "--aligner", path, "--draw")
    assert "house" in capsys.readouterr().out
    swapped = error_of(capsys, "align", *reversed(corpus), "--aligner", path)
    assert "SOURCE and TARGET seem to be in the wrong order" in swapped


def test_a_saved_aligner_is_combined_with_two_models(model, reverse, files, corpus, tmp_path, capsys):
    path = tmp_path / "de-en.aligner"
    run("align", *corpus, "--save", path, "-o", tmp_path / "links")
    options = ["-m", model, "--reverse-model", reverse, "--aligner", path]
    capsys.readouterr()
    combined = [
        lexical.combine(*attention)
        for lexical, *attention in zip(
            LexicalAligner.load(path).align(PAIRS),
            translator(model).align(PAIRS),
            translator(reverse).align([(target, source) for source, target in PAIRS]),
            strict=True,
        )
    ]
    run("align", *files, *options)
    assert capsys.readouterr().out.split("\n") == [*(to_pharaoh(pair.links()) for pair in combined), ""]
    run("align", *files, *options, "--threshold", 0.1)
    lines = [to_pharaoh(pair.links(threshold=0.1)) for pair in combined]
    assert capsys.readouterr().out.split("\n") == [*lines, ""]
    run("align", *files, *options, "--json")
    assert [json.loads(line)["links"] for line in capsys.readouterr().out.splitlines()] == [
        to_pharaoh(pair.links()) for pair in combined
    ]
    for wrong, message in (
        (["--save", "x"], "--save applies to the lexical aligner; remove it"),
        (
            ["--threshold", 0.5, "--symmetrize", "union"],
            "--symmetrize and --threshold are mutually exclusive",
        ),
    ):
        assert message in error_of(capsys, "align", *files, *options, *wrong)


def test_tmx_and_moses(corpus, tmp_path, capsys):
    memory, moses = tmp_path / "memory.tmx", tmp_path / "pairs.src-tgt"
    pairs = list(read_pairs(*corpus))
    write_pairs(memory, pairs, languages=("de", "en"))
    write_pairs(moses, pairs)
    run("align", *corpus)
    links = capsys.readouterr().out
    for arguments in ([memory], [moses], [memory, "--languages", "de-en"]):
        run("align", *arguments)
        assert capsys.readouterr().out == links
    run("align", memory, "--languages", "de-en", "-o", tmp_path / "aligned.tmx")
    assert list(read_pairs(tmp_path / "aligned.tmx")) == pairs
    content = (tmp_path / "aligned.tmx").read_bytes()
    run("align", memory, "-o", tmp_path / "aligned.tmx")  # the languages come from the input
    assert (tmp_path / "aligned.tmx").read_bytes() == content
    assert '<prop type="x-alignment">0-0 1-1 2-2 3-3</prop>' in (tmp_path / "aligned.tmx").read_text()


def test_output_files_can_be_compressed(corpus, model, tmp_path):
    for options, name in (
        ([], "links"),
        (["--scores"], "links.tsv"),
        (["--json"], "links.jsonl"),
        (["--languages", "de-en"], "aligned.tmx"),
    ):
        files = tmp_path / name, tmp_path / f"{name}.gz"
        for file in files:
            run("align", *corpus, *options, "-o", file)
        assert gzip.decompress(files[1].read_bytes()) == files[0].read_bytes()
    assert list(read_pairs(tmp_path / "aligned.tmx.gz")) == list(read_pairs(*corpus))
    for command in (["translate", "--beam", 1, "--file", corpus[0]], ["evaluate", "--beam", 1, *corpus]):
        output = tmp_path / f"{command[0]}.gz"
        run(*command, "-m", model, "-o", output)
        assert gzip.decompress(output.read_bytes()).count(b"\n") == 61


def test_a_tmx_pipe_is_read_once(corpus, tmp_path):
    memory, pipe, output = tmp_path / "memory.tmx", tmp_path / "pipe", tmp_path / "aligned.tmx"
    pairs = list(read_pairs(*corpus))
    write_pairs(memory, pairs, languages=("de", "en"))
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_bytes(memory.read_bytes()), daemon=True)
    writer.start()
    run("align", pipe, "--format", "tmx", "-o", output)
    writer.join()
    assert list(read_pairs(output)) == pairs


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text", "ein", "a"], "--text needs an aligner, because one sentence pair is not enough"),
        ("--layer 1", "--layer applies to the attention of a translation model; add --model FOLDER"),
        ("--save x --aligner {a}", "--save and --aligner are mutually exclusive"),
        ("--symmetrize union --threshold 0.5", "--symmetrize and --threshold are mutually exclusive"),
        ("--aligner {a}", "is not an aligner. Pass a file written by regard align --save"),
        ("--aligner nowhere", "nowhere: No such file"),
        ("--save no/such/x", "--save 'no/such/x': the folder 'no/such' does not exist"),
        ("--save links -o ./links", "--save and --output are the same file"),
        ("-o {b}", "TARGET and --output are the same file"),
        ("--scores -o {a}.TMX.gz", "is a TMX file; remove --json, --draw and --scores"),
        (["{a}", "{binary}"], "line 1: not UTF-8; byte 1 is 0x89"),
        (["{a}", "{short}"], "has 61 lines, but"),
        (["{empty}", "{empty}"], "Got 0 sentence pairs; at least one must have words"),
    ],
)
def test_errors_of_the_lexical_aligner(arguments, message, corpus, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = {"a": corpus[0], "b": corpus[1]}
    for name, content in (("binary", b"\x89PNG\r\n"), ("short", b"one\ntwo\n"), ("empty", b"")):
        names[name] = tmp_path / name
        names[name].write_bytes(content)
    options = ["{a}", "{b}", *arguments.split()] if isinstance(arguments, str) else arguments
    assert message in error_of(capsys, "align", *(text.format(**names) for text in options))


def test_pipes_can_be_aligned(corpus, tmp_path, capsys):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_bytes(corpus[0].read_bytes()))
    writer.start()
    run("align", pipe, corpus[1])
    writer.join()
    assert capsys.readouterr().out == "0-0 1-1 2-2 3-3\n" * 60 + "\n"

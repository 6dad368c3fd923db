"""Evaluation: sacreBLEU's scores, exact match, scores by length; and `regard evaluate`."""

import json
import random
import sys
from functools import partial
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.errors import ArgumentError, DTypeError
from regard.translation.evaluation import (
    MIN_SENTENCES,
    LengthRange,
    by_length,
    check_tokenizer,
    count_words,
    evaluate,
    exact_match,
    length_bins,
)
from regard.translation.model_folder import FORMAT

MULTI30K = Path(__file__).parents[3] / "shared" / "data" / "multi30k"
REFERENCES = [
    "A man in an orange hat stares at something.",
    "Two dogs run across the wide green lawn.",
    "Hello!",
    "People are fixing the roof of a house .",
    "",
]
TRANSLATIONS = [
    "A man in an orange hat is staring at something.",
    "two dogs run across the wide green lawn.",
    "Hello!",
    "people fix the roof of the house.",
    "",
]
PAIR = ("source", "reference")
sentences = st.lists(st.text("ab .", max_size=20), min_size=1, max_size=30)


def test_scores_and_signatures_equal_sacrebleu():
    import sacrebleu

    scores = evaluate(TRANSLATIONS, REFERENCES)
    assert scores.bleu == sacrebleu.corpus_bleu(TRANSLATIONS, [REFERENCES]).score
    assert scores.lowercase_bleu == sacrebleu.corpus_bleu(TRANSLATIONS, [REFERENCES], lowercase=True).score
    assert scores.chrf == sacrebleu.corpus_chrf(TRANSLATIONS, [REFERENCES]).score
    assert scores.bleu_signature.startswith("nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:")
    assert "case:lc" in scores.lowercase_signature
    assert scores.chrf_signature.startswith("nrefs:1|case:mixed|eff:yes|nc:6|nw:0|space:no")
    assert scores.exact == 2 / 5
    assert scores.bleu < scores.lowercase_bleu


@settings(max_examples=25)
@given(sentences, st.randoms(use_true_random=False))
def test_the_order_of_sentences_is_irrelevant(references, rng):
    translations = [text[: rng.randrange(1, 20)] for text in references]
    pairs = list(zip(translations, references, strict=True))
    mixed = random.Random(0).sample(pairs, len(pairs))
    first, second = (evaluate(*map(list, zip(*each, strict=True))) for each in (pairs, mixed))
    assert (first.bleu, first.chrf, first.exact) == pytest.approx((second.bleu, second.chrf, second.exact))
    assert 0 <= first.bleu <= 100.0001


def test_lower_case_changes_scores_and_signatures():
    scores = evaluate(TRANSLATIONS, REFERENCES, lowercase=True)
    assert scores.bleu == scores.lowercase_bleu == evaluate(TRANSLATIONS, REFERENCES).lowercase_bleu
    assert "case:lc" in scores.bleu_signature
    assert "case:lc" in scores.chrf_signature
    assert scores.exact == 3 / 5
    assert str(scores).count("\n") == 2  # lowercase BLEU is not printed twice


def test_scores_print_one_line_each():
    lines = str(evaluate(TRANSLATIONS, REFERENCES, sources=REFERENCES)).splitlines()
    assert [line[:11].strip() for line in lines[:4]] == ["BLEU", "lower case", "chrF", "exact match"]
    assert "|tok:13a|" in lines[0]
    assert "40.00 %  of 5 sentences" in lines[3]
    assert lines[5].split() == ["source", "words", "sentences", "BLEU", "exact"]


def test_exact_match_ignores_white_space_only():
    assert exact_match(["a  b ", "ab", "a"], [" a b", "a b", "A"]) == 1 / 3


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: evaluate(["a", "b"], ["a"]), ArgumentError, "of length 2 and references of length 1"),
        (lambda: by_length(["a"], ["a"], ["a"] * 3), ArgumentError, "of length 1 and sources of length 3"),
        (lambda: evaluate([], []), ArgumentError, "evaluate got no sentences"),
        (lambda: evaluate(["a"], "a"), DTypeError, "one string as references"),
        (
            lambda: evaluate(iter("a"), ["a"]),
            DTypeError,
            r"got a str_.*iterator as translations; pass a list",
        ),
        (lambda: evaluate([7], ["a"]), DTypeError, r"got an int as translations\[0\]; pass strings"),
        (lambda: evaluate(["a"], ["a"], tokenize="spm"), ArgumentError, "'spm' is not supported. Choose"),
        (lambda: by_length(["a"], ["a"], ["a"], bins=[]), ArgumentError, "strictly increasing"),
        (lambda: by_length(["a"], ["a"], ["a"], bins=[3, 3]), ArgumentError, "strictly increasing"),
        (lambda: by_length(["a"], ["a"], ["a"], bins=[5, 2]), ArgumentError, "strictly increasing"),
        (lambda: by_length(["a"], ["a"], ["a"], bins=[2.5]), DTypeError, "must be an integer"),
    ],
)
def test_invalid_arguments(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_a_tokenizer_whose_package_is_missing(monkeypatch):
    def missing(*arguments, **options):
        raise RuntimeError

    monkeypatch.setattr("sacrebleu.metrics.bleu.BLEU.__init__", missing)
    with pytest.raises(ArgumentError, match=r"pip install 'sacrebleu\[ja\]'"):
        check_tokenizer("ja-mecab")


def test_tokenized_text_logs_no_warning(capfd):
    evaluate(["it ends with a period ."] * 200, ["it ends with a period ."] * 200)
    assert capfd.readouterr() == ("", "")


def test_words_are_counted_in_any_script():
    counts = {"": 0, "...": 0, "Dogs bark.": 2, "它叫了。": 3, "e\u0301te\u0301": 1, "don't": 1}
    assert {text: count_words(text) for text in counts} == counts


@given(st.lists(st.integers(0, 80), min_size=1, max_size=200))
def test_bins_hold_every_sentence_once_and_are_large_enough(lengths):
    sources = [" ".join("a" * length) for length in lengths]
    buckets = by_length(sources, sources, sources)
    assert sum(bucket.sentences for bucket in buckets) == len(sources)
    assert len(buckets) <= 8
    assert len(buckets) == 1 or all(bucket.sentences >= MIN_SENTENCES for bucket in buckets)
    assert all(bucket.exact == 1 for bucket in buckets)
    spans = [bucket.lengths for bucket in buckets]
    assert all(span.last < after.first for span, after in pairwise(spans))


def test_explicit_bins():
    sources = [" ".join("a" * length) for length in (1, 2, 3, 5, 8, 13)]
    buckets = by_length(sources, sources, sources, bins=[2, 4, 7])
    counts = [(str(bucket.lengths), bucket.sentences) for bucket in buckets]
    assert counts == [("1–2", 2), ("3–4", 1), ("5–7", 1), ("8+", 2)]
    assert buckets[-1].lengths == LengthRange(8, None)
    assert str(LengthRange(3, 3)) == "3"


def test_a_bin_is_scored_like_a_corpus_but_with_effective_order():
    (bucket,) = by_length(TRANSLATIONS, REFERENCES, REFERENCES, bins=[100])
    assert bucket.bleu == evaluate(TRANSLATIONS, REFERENCES).bleu
    (bucket,) = by_length(["dog"] * 9, ["dog"] * 9, ["Hund"] * 9)  # n-grams longer than one word do not exist
    assert bucket.bleu == pytest.approx(100)


def test_a_long_tail_is_one_bin():
    assert length_bins(["a"] * 100 + ["a b"] * 100 + ["a b c d e f g h"]) == [1, 8]
    assert (length_bins(["a"]), length_bins([])) == ([1], [])


@pytest.mark.skipif(not MULTI30K.exists(), reason="Multi30k is not available")
def test_bins_of_real_sentences():
    german, english = (
        (MULTI30K / f"test_2016_flickr.{name}").read_text("utf-8").splitlines() for name in ("de", "en")
    )
    scores = evaluate(english, english, sources=german)
    assert 4 <= len(scores.by_length) <= 8
    assert (scores.sentences, scores.exact) == (1000, 1)


# The command


class UppercaseTranslator:
    """Translates to upper case and records its calls."""

    calls: ClassVar[list[tuple[str, int, int, int]]] = []

    def __init__(self, folder: Path, **options: object) -> None:
        if not folder.is_dir():
            raise ArgumentError(f"{str(folder)!r} does not exist.")
        self.folder = folder

    def translate(self, texts, *, strategy, batch_size):
        self.calls.append((self.folder.name, len(texts), strategy.size, batch_size))
        change = str.upper if self.folder.name == "loud" else str
        return [SimpleNamespace(text=change(text), tokens=text.split()) for text in texts]


@pytest.fixture
def corpus(tmp_path, monkeypatch) -> Path:
    """Two files, two model folders, and a fake translator."""
    (tmp_path / "source").write_text("".join(f"der Hund {'x ' * (i % 9)}\n" for i in range(300)))
    (tmp_path / "reference").write_text("".join(f"DER HUND {'X ' * (i % 9)}\n" for i in range(300)))
    for name in ("loud", "quiet"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"format": FORMAT, "settings": {}}))
    module = ModuleType("regard.translation.translator")
    module.load_translator = UppercaseTranslator
    monkeypatch.setitem(sys.modules, "regard.translation.translator", module)
    monkeypatch.setattr(UppercaseTranslator, "calls", [])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: str, status: int = 0) -> None:
    from regard.cli import main

    with pytest.raises(SystemExit) as exit:
        main(["evaluate", *arguments])
    assert (exit.value.code or 0) == status


def test_one_model(corpus, capsys):
    run("source", "reference", "--model", "loud", "--beam", "3", "--batch", "7", "--output", "out")
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "loud"
    assert printed[1].split()[:2] == ["BLEU", "100.00"]
    assert "|tok:13a|" in printed[1]
    assert printed[4].split() == ["exact", "match", "100.00", "%", "of", "300", "sentences"]
    assert "sentences/s" in printed[5]
    assert "target tokens/s" in printed[5]
    assert len(printed) == 6
    assert UppercaseTranslator.calls == [("loud", 1, 3, 7), ("loud", 300, 3, 7)]  # the first is a warmup
    assert [line.split() for line in (corpus / "out").read_text().splitlines()] == [
        line.split() for line in (corpus / "reference").read_text().splitlines()
    ]


def test_several_models_are_compared_and_drawn(corpus, capsys):
    run("source", "reference", "-m", "loud", "-m", "quiet", "--picture", "lengths.svg")
    printed = capsys.readouterr().out
    rows = [line.split() for line in printed.splitlines()]
    assert rows[0][:4] == ["BLEU", "lower", "case", "chrF"]
    assert rows[1][:3] == ["loud", "100.00", "100.00"]
    assert rows[2][:3] == ["quiet", "0.00", "100.00"]
    start = rows.index(["words", "sentences", "loud", "quiet"])
    assert sum(int(row[1]) for row in rows[start + 1 :]) == 300
    assert (corpus / "lengths.svg").read_bytes().startswith(b"<?xml")


def test_existing_translations_need_no_model(corpus, capsys):
    lines = (corpus / "reference").read_bytes()
    (corpus / "windows").write_bytes(b"\xef\xbb\xbf" + lines.replace(b"\n", b"\r\n"))
    run("source", "reference", "--translations", "windows", "--by-length")
    printed = capsys.readouterr().out
    assert "100.00 %" in printed
    assert "speed" not in printed
    assert "source words" in printed
    assert UppercaseTranslator.calls == []


def test_json(corpus, capsys):
    run("source", "reference", "-m", "loud", "--translations", "source", "--by-length", "--json")
    printed = json.loads(capsys.readouterr().out)
    assert list(printed) == ["loud", "source"]
    assert printed["loud"]["exact"] == 1
    assert printed["loud"]["sentences_per_second"] > 0
    assert printed["source"]["seconds"] is None
    assert printed["source"]["by_length"][0].keys() == {"first", "last", "bleu", "sentences", "exact"}


def test_lowercase_option(corpus, capsys):
    run("source", "reference", "-m", "quiet", "--lowercase", "--json")
    assert json.loads(capsys.readouterr().out)["quiet"]["bleu"] == pytest.approx(100)


def test_pairs_in_one_file(corpus, capsys):
    (corpus / "pairs.tsv").write_text("der Hund\tDER HUND\neine Katze\tA CAT\n")
    run("pairs.tsv", "--model", "loud")
    assert "50.00 %  of 2 sentences" in capsys.readouterr().out


def test_the_embedded_corpus(corpus, capsys, monkeypatch):
    pytest.importorskip("num2words")
    pytest.importorskip("babel")
    builtin = import_module("regard.translation.data.builtin")
    monkeypatch.setattr(builtin, "embedded_corpus", partial(builtin.embedded_corpus, size=200))
    run("embedded", "--model", "loud", "--json")
    held_out = json.loads(capsys.readouterr().out)["loud"]["sentences"]
    run("embedded-longer", "--model", "loud", "--json")
    assert json.loads(capsys.readouterr().out)["loud"]["sentences"] > held_out > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*PAIR], "evaluate needs a model (--model FOLDER)"),
        ([*PAIR, "-m", "nothing"], "'nothing' does not exist. Use a folder"),
        (["source", "missing", "-m", "loud"], "missing"),
        ([*PAIR, "-m", "loud", "-m", "loud"], "'loud' is given 2 times"),
        (
            [*PAIR, "-m", "loud", "-m", "quiet", "-o", "x"],
            "--output writes the translations of a single model; got 2 --model",
        ),
        ([*PAIR, "-m", "loud", "--output", "no/x"], "the folder 'no' does not exist"),
        ([*PAIR, "-m", "loud", "-o", "./reference"], "REFERENCE and --output are the same file"),
        ([*PAIR, "-m", "loud", "--picture", "x.gif"], "Cannot write 'x.gif': use"),
        ([*PAIR, "-m", "loud", "--tokenize", "13b"], "tokenize='13b' is not supported. Choose from '13a'"),
        ([*PAIR, "-m", "loud", "--beam", "0"], "--beam"),
        ([*PAIR, "--translations", "short"], "'short' has 2 lines, but the test set has 300 sentences"),
        (
            ["embedded", "-m", "loud", "--languages", "german"],
            "--languages is 'german'; pass source and target",
        ),
        (["empty", "empty", "-m", "loud"], "has no sentences"),
    ],
)
def test_errors_are_one_line(arguments, message, corpus, capsys):
    (corpus / "short").write_text("a\nb\n")
    (corpus / "empty").write_text("")
    run(*arguments, status=2)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("regard: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert UppercaseTranslator.calls == []

"""Translator: order, batches, long lines, alternatives, alignments and unknown words."""

import json
import math
import re
import time
from pathlib import Path

import pytest
import torch

import regard
from regard.errors import ArgumentError, DTypeError
from regard.translation import translator as module
from regard.translation.alignment.alignment import Alignment
from regard.translation.alignment.alignment_head import AlignmentHead
from regard.translation.alignment.cross_attention import cross_weights
from regard.translation.decoding.hypothesis import Hypothesis
from regard.translation.decoding.search import search
from regard.translation.decoding.strategies import Beam, Greedy, Sample
from regard.translation.tokens import UNKNOWN
from regard.translation.translation import Translation
from regard.translation.translator import Translator, load_translator
from tests.translation import folders

pytestmark = pytest.mark.usefixtures("one_thread")

SENTENCES = [
    "ein Hund bellt",
    "zwei Katzen schlafen heute",
    "Frau",
    "",
    "eine Frau singt und ein Hund lacht laut",
    "  \t ",
    "heute schlafen zwei Katzen",
]


# functions that `Translator` imports when it calls them
SEARCH = "regard.translation.decoding.search.search"
CROSS_WEIGHTS = "regard.translation.alignment.cross_attention.cross_weights"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folders.write(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def translator(folder: Path) -> Translator:
    translator = load_translator(folder)
    assert translator.model  # built in torch, so that tests can replace `search`; see test_saved_model.py
    return translator


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Translator:
    return load_translator(folders.write(tmp_path_factory.mktemp("plain"), "plain"))


def texts(translations: list[Translation]) -> list[str]:
    return [translation.text for translation in translations]


class TestTranslate:
    def test_batches_keep_the_order(self, translator):
        together = translator.translate(SENTENCES)
        assert [translation.source for translation in together] == SENTENCES
        assert texts(together) == texts(translator.translate(SENTENCES, batch_size=2))
        alone = [translator.translate(sentence)[0] for sentence in SENTENCES]
        assert texts(together) == texts(alone)
        assert [translation.score for translation in together] == pytest.approx(
            [translation.score for translation in alone], abs=1e-4
        )
        assert len({translation.text for translation in together}) > 3  # otherwise the order would not matter

    def test_one_sentence_returns_a_list(self, translator):
        (translation,) = translator.translate("ein Hund")
        assert translation.source == "ein Hund"
        assert str(translation) == translation.text
        assert translator.translate([]) == []

    def test_empty_sentences_do_not_call_the_model(self, translator, monkeypatch):
        monkeypatch.setattr(SEARCH, None)
        for translation in translator.translate(["", " ", "\t\n\u2003"], alignment=True):
            found = translation.text, translation.tokens, translation.score, translation.note
            assert found == ("", [], 0.0, "")
            assert tuple(translation.alignment.weights.shape) == (0, 0)

    def test_tokens_are_the_pieces_of_the_text(self, translator):
        for translation in translator.translate(SENTENCES):
            assert "".join(translation.tokens).replace("▁", " ").split() == translation.text.split()

    def test_a_line_break_is_white_space(self, translator):
        assert texts(translator.translate("ein\nHund\r\n")) == texts(translator.translate("ein Hund"))

    def test_translations_equal_search(self, translator):
        strategy = Beam(4, length_penalty=0.5, n_best=3)
        (translation,) = translator.translate("ein Hund bellt", strategy=strategy)
        ids = translator.tokens.source.encode("ein Hund bellt")
        packed = regard.models.Packed.of([[*ids, 2]])
        expected = search(translator.model, packed, strategy, max_new_tokens=2 * len(ids) + 10)[0]
        decode = translator.tokens.target.decode
        assert texts([translation, *translation.alternatives]) == [
            decode(each.tokens).text for each in expected
        ]
        assert [each.score for each in (translation, *translation.alternatives)] == [
            each.score for each in expected
        ]

    @pytest.mark.parametrize("strategy", [Greedy(), Sample(seed=3), Sample(top_p=0.5, n_samples=2)])
    def test_other_strategies(self, strategy, translator):
        translations = translator.translate(SENTENCES, strategy=strategy)
        assert texts(translations) == texts(translator.translate(SENTENCES, strategy=strategy, batch_size=3))
        count = getattr(strategy, "n_samples", 1)
        assert all(
            len(translation.alternatives) == (count - 1) * bool(translation.source.strip())
            for translation in translations
        )

    def test_an_unfinished_translation_has_a_note(self, translator, monkeypatch):
        endless = [[Hypothesis([9, 9], -1.0, -2.0, finished=False)]]
        monkeypatch.setattr(SEARCH, lambda *arguments, **options: endless)
        assert translator.translate("ein")[0].note == "cut off at the maximum length"

    @pytest.mark.parametrize(
        ("texts", "error", "message"),
        [
            (7, DTypeError, "sentences is an int; pass a string or a list of strings"),
            (["a", None], DTypeError, "Sentence 1 is None; pass strings"),
            (["a", "\ud800"], ArgumentError, "contains the lone surrogate '\\ud800' at character 0"),
        ],
    )
    def test_inputs_that_are_not_text_are_rejected(self, texts, error, message, translator):
        with pytest.raises(error, match=re.escape(message)):
            translator.translate(texts)

    def test_batch_size_is_positive(self, translator):
        for call in (translator.translate, lambda *a, **o: next(translator.stream(*a, **o))):
            with pytest.raises(ArgumentError, match="translate got batch_size=0"):
                call(["ein"], batch_size=0)


class TestLongLines:
    LINE = "ein Hund bellt laut. zwei Katzen schlafen heute gern! " * 9

    def parts(self, translator, line):
        return translator.reader.read(line).parts

    def test_long_lines_are_translated_in_parts(self, translator):
        (translation,) = translator.translate(self.LINE)
        parts = self.parts(translator, self.LINE)
        assert len(parts) > 2
        assert all(part.segmentation.text[-1] in ".!" for part in parts)
        alone = translator.translate([part.segmentation.text for part in parts])
        assert translation.text == " ".join(part.text for part in alone)
        assert translation.tokens == [token for part in alone for token in part.tokens]
        assert min(part.score for part in alone) <= translation.score <= max(part.score for part in alone)
        tokens = len(translator.tokens.source.encode(self.LINE))
        assert re.match(rf"{tokens} tokens, translated in {len(parts)} parts of up to \d+", translation.note)

    def test_an_alignment_stays_within_its_part(self, translator):
        (translation,) = translator.translate(self.LINE)
        first, second, *_ = self.parts(translator, self.LINE)
        (part,) = translator.translate(first.segmentation.text)
        rows = len(part.alignment.target_words)
        assert translation.alignment.source_words == tuple(self.LINE.split())
        assert translation.alignment.target_words == tuple(translation.text.split())
        torch.testing.assert_close(
            translation.alignment.weights[:rows, : second.first_word], part.alignment.weights
        )
        assert not translation.alignment.weights[:rows, second.first_word :].any()

    def test_long_lines_need_no_more_memory_than_their_parts(self, translator, monkeypatch):
        """The weights of a line of several megabytes would not fit into memory; those of its parts do."""
        monkeypatch.setattr(SEARCH, lambda model, packed, *a, **o: [done] * len(packed))
        done = [Hypothesis([UNKNOWN], -1.0, -1.0, True)]
        (translation,) = translator.translate("Ω Hund " * 2000)
        assert translation.text.count("Ω") == 2000
        monkeypatch.setattr("regard.translation.alignment.alignment._MAX_SIZE", 1_000_000)
        with pytest.raises(ArgumentError, match="Split it into sentences"):
            _ = translation.alignment
        with pytest.raises(ArgumentError, match=r"Pair 1 has 8,000 source tokens and 8,000 target tokens"):
            translator.align([("ein", "a"), ("Hund " * 4000, "Hund " * 4000)])

    def test_alternatives_of_all_parts(self, translator):
        (translation,) = translator.translate(self.LINE, strategy=Beam(3, n_best=3))
        assert len(translation.alternatives) == 2
        assert all(alternative.note == translation.note for alternative in translation.alternatives)

    def test_one_very_long_word(self, translator):
        (translation,) = translator.translate("Hund" * 200)
        assert "parts" in translation.note
        assert len(translation.alignment.source_words) == 1

    def test_learned_positions_limit_the_length(self, tmp_path):
        few = ["model.positions=learned", "model.max_positions=20", "corpus.max_tokens=4"]
        translator = load_translator(folders.write(tmp_path / "x", more=few))
        assert translator.max_tokens == 4
        for translation in translator.translate(
            ["Hund " * 30, "ein Hund bellt laut und lacht sehr gern heute"]
        ):
            assert translation.alignment.weights.isfinite().all()

    def test_max_tokens_comes_from_the_config(self, translator):
        assert translator.max_tokens == 40
        assert Translator(translator.model, translator.tokens).max_tokens == module.MAX_TOKENS


class TestAlignment:
    def test_alignment_equals_forced_decoding(self, translator):
        """Forced decoding uses the tokens that the search found."""
        sentence = "zwei Katzen schlafen heute"
        (translation,) = translator.translate(sentence)
        source = translator.tokens.source.segment(sentence)
        ids = [translator.tokens.target._pieces.index(piece) for piece in translation.tokens]
        (weights,) = cross_weights(translator.model, [source.ids], [ids], translator.alignment_head)
        expected = Alignment.of(source, translator.tokens.target.decode(ids), weights)
        assert translation.alignment.source_words == tuple(sentence.split())
        assert translation.alignment.target_words == tuple(translation.text.split())
        torch.testing.assert_close(translation.alignment.weights, expected.weights)
        assert translation.alignment.weights.sum(-1).le(1 + 1e-5).all()
        assert translation.alignment is translation.alignment

    def test_a_copied_word_is_aligned_to_the_word_it_was_copied_from(self, translator):
        sentences = ["um 15:30 zwei Katzen", "Katzen: https://a.example/b und 2,75 heute 19:45"]
        for translation in translator.translate(sentences, alignment=True):
            source, target, weights = (
                translation.alignment.source_words,
                translation.alignment.target_words,
                translation.alignment.weights,
            )
            copies = [word for word in target if any(letter.isdigit() or letter == "/" for letter in word)]
            assert copies
            for word in copies:
                expected = torch.zeros(len(source))
                expected[source.index(word)] = 1
                assert torch.equal(weights[target.index(word)], expected)

    def test_eager_and_lazy_alignments_are_equal(self, translator):
        strategy = Beam(3, n_best=2)
        lazy = translator.translate(SENTENCES, strategy=strategy)
        assert not any("alignment" in vars(translation) for translation in lazy)
        eager = translator.translate(SENTENCES, strategy=strategy, alignment=True)
        for translation, other in zip(lazy, eager, strict=True):
            for a, b in zip(
                [translation, *translation.alternatives], [other, *other.alternatives], strict=True
            ):
                assert "alignment" in vars(b)
                torch.testing.assert_close(a.alignment.weights, b.alignment.weights, rtol=1e-4, atol=1e-5)
                assert a.alignment.to_pharaoh() == b.alignment.to_pharaoh()

    def test_alignments_are_recorded_by_the_search_or_computed_in_one_call(self, translator, monkeypatch):
        calls = []
        monkeypatch.setattr(CROSS_WEIGHTS, lambda *a: calls.append(a) or cross_weights(*a))
        translator.translate(SENTENCES, alignment=True)
        assert not calls
        monkeypatch.setattr("regard.translation.decoding.kernel_search._MAX_RECORDED", 0)
        translator.translate(SENTENCES, alignment=True)
        assert len(calls) == 1

    def test_alignments_are_read_from_the_heads_of_the_folder_or_those_requested(self, translator):
        assert translator.alignment_head == AlignmentHead(layer=0, shift="output")
        pairs = [("ein Hund bellt", "a dog barks"), ("", "")]
        for head in (AlignmentHead(layer=0, shift="input"), AlignmentHead(layer=1)):
            rebuilt = Translator(translator.model, translator.tokens, alignment_head=head)
            requested, empty = translator.align(pairs, head)
            assert torch.equal(requested.weights, rebuilt.align(pairs)[0].weights)
            assert not torch.equal(requested.weights, translator.align(pairs)[0].weights)
            assert tuple(empty.weights.shape) == (0, 0)
        with pytest.raises(DTypeError, match="an alignment_head of type str; pass an AlignmentHead"):
            translator.align(pairs, "output")

    def test_a_model_without_attention_has_no_alignment(self, plain):
        (translation,) = plain.translate("ein Hund")
        with pytest.raises(ArgumentError, match="has no cross-attention, so it cannot align words"):
            _ = translation.alignment
        with pytest.raises(ArgumentError, match="has no cross-attention, so it cannot align words"):
            plain.translate("ein Hund", alignment=True)


class Scripted:
    """A translator with scripted output and attention."""

    def __init__(self, translator, monkeypatch, kind="bpe"):
        sides = translator.tokens if kind == "bpe" else folders.tokens(kind)
        self.translator = Translator(translator.model, sides)
        self.patch = monkeypatch.setattr

    def ids(self, text: str) -> list[int]:
        """Encode a text; `?` is the unknown token."""
        target = self.translator.tokens.target
        ids = []
        for part in re.split(r"(\?)", text):
            ids += [UNKNOWN] if part == "?" else target.encode(part.strip())
        return ids

    def translate(self, source: str, target: str, attended: dict[int, int] | None = None) -> Translation:
        """attended: the source token that each target token attends to, by position; default: the first."""
        ids = self.ids(target)
        pieces = len(self.translator.tokens.source.segment(source).ids)
        weights = torch.zeros(len(ids), pieces)
        for position in range(len(ids)):
            weights[position, (attended or {}).get(position, 0)] = 1
        self.patch(SEARCH, lambda *a, **o: [[Hypothesis(ids, -1.0, -3.0, True)]])
        self.patch(CROSS_WEIGHTS, lambda *a: [weights])
        return self.translator.translate(source)[0]


class TestUnknown:
    @pytest.mark.parametrize(
        ("source", "target", "attended", "expected", "links"),
        [
            ("Λ singt Ω", "? sings ?", {0: 2, 1: 1, 2: 0}, "Ω sings Λ", "0-2 1-1 2-0"),  # the attended word
            ("Λ singt Ω", "? sings ?", {0: 0, 1: 1, 2: 0}, "Λ sings Ω", "0-0 1-1 2-2"),  # each once
            ("Λ singt", "? ?", {0: 0, 1: 1}, "Λ singt", "0-0 1-1"),  # known words last
        ],
    )
    def test_unknown_tokens_are_replaced(
        self, source, target, attended, expected, links, translator, monkeypatch
    ):
        translation = Scripted(translator, monkeypatch, "words").translate(source, target, attended)
        assert (translation.text, translation.note) == (expected, "")
        assert translation.alignment.to_pharaoh() == links

    def test_an_unknown_token_within_a_word(self, translator, monkeypatch):
        translation = Scripted(translator, monkeypatch).translate("Frau Ω", "woman ? and", {1: 2, 2: 2})
        assert "Ω" in translation.text.replace(" ", "")
        assert "⁇" not in translation.text

    def test_untranslated_unknown_words_are_inserted(self, translator, monkeypatch):
        scripted = Scripted(translator, monkeypatch)
        segmentation = scripted.translator.tokens.source.segment("ein 漢字 Hund Ψ.")
        hund = segmentation.word_of.index(2)
        dog = len(scripted.ids("a"))
        translation = scripted.translate("ein 漢字 Hund Ψ.", "a dog", dict.fromkeys(range(dog, 9), hund))
        assert translation.text == "a 漢字 dog Ψ"
        assert translation.note == "unknown words copied: '漢字', 'Ψ'"
        assert translation.alignment.target_words == ("a", "漢字", "dog", "Ψ")
        assert translation.alignment.to_pharaoh() == "0-0 1-1 2-2 3-3"

    def test_the_known_part_of_a_word_is_replaced(self, translator, monkeypatch):
        translation = Scripted(translator, monkeypatch).translate("ein Łhund", "a hund")
        assert translation.text == "a Łhund"
        assert translation.alignment.to_pharaoh() == "0-0 1-1"

    def test_unknown_words_at_the_start_and_alone(self, translator, monkeypatch):
        scripted = Scripted(translator, monkeypatch)
        assert scripted.translate("漢字 Hund", "dog", dict.fromkeys(range(9), 2)).text == "漢字 dog"
        assert scripted.translate("漢字", "").text == "漢字"

    def test_control_characters_are_removed(self, translator):
        (translation,) = translator.translate("ein \x1b[31m漢\x07字 Hund")
        assert not {"\x1b", "\x07"} & set(translation.text)

    @pytest.mark.parametrize("kind", ["translator", "plain"])
    def test_every_model_copies_unknown_characters(self, kind, request):
        translations = request.getfixturevalue(kind).translate(["ein 漢字 Hund", "Ω", "zwei Łódź 🍕!"])
        for translation, letters in zip(translations, ("漢字", "Ω", "Ł🍕"), strict=True):
            assert set(letters) <= set(translation.text)


class TestInput:
    SPANS = (
        "15:30",
        "https://a.de/b?c=1&d=2",
        "x.y@z.org",
        "3,50",
        "{name}",
        "%s",
        "🍕",
        "漢字",
        "Łódź",
        "10–12",
        "/usr/bin/ls",
        "v2.0.1-rc3",
        "IMG_1.JPG",
    )

    @pytest.mark.parametrize("kind", ["translator", "plain"])
    def test_protected_text_survives_once(self, kind, request):
        """The model has random parameters, so it may generate anything."""
        lines = [f"ein Hund {span} bellt laut." for span in self.SPANS]
        lines += [" ".join(self.SPANS), "ein " + " Hund ".join(self.SPANS), *self.SPANS]
        for strategy in (Greedy(), Beam(3, n_best=2)):
            for translation in request.getfixturevalue(kind).translate(lines, strategy=strategy):
                for each in (translation, *translation.alternatives):
                    for span in self.SPANS:
                        assert each.text.count(span) == translation.source.count(span)
                    assert "⁇" not in each.text
                    assert each.words == each.text.split()

    def test_tags_keep_their_order(self, translator):
        for line in ("ein <b>Hund</b> <i class='x y'>bellt <br/>laut</i>.", "<b>ein", "</i> Hund", "<br>"):
            (translation,) = translator.translate(line)
            assert re.findall(r"<[^<>]*>", translation.text) == re.findall(r"<[^<>]*>", line)
            assert not any("<" in word for word in translation.words)

    def test_copied_sentences_keep_their_spacing(self, translator):
        for line in ("漢字。漢字！", "漢字。 漢字！ 漢字！漢字。", "- 漢字。漢字"):
            assert texts(translator.translate(line)) == [line]

    def test_sentences_are_translated_alone(self, translator):
        sentences = ["Ein Hund bellt.", "Zwei Katzen schlafen!", "Eine Frau singt?"]
        joined = "  ".join(sentences)
        (together,) = translator.translate(joined, confidence=True)
        alone = translator.translate(sentences, confidence=True)
        assert together.text == "  ".join(texts(alone))
        assert together.note.startswith("3 sentences, ")
        assert together.word_confidences == pytest.approx(
            [c for each in alone for c in each.word_confidences]
        )
        expected = torch.block_diag(*(each.alignment.weights for each in alone))
        torch.testing.assert_close(together.alignment.weights, expected)

    def test_confidence_is_the_mean_token_probability(self, translator):
        for translation in translator.translate(SENTENCES):
            if translation.tokens:
                assert math.log(translation.confidence) == pytest.approx(translation.score, abs=1e-4)
            assert all(0 <= value <= 1 for value in translation.word_confidences)
            assert len(translation.word_confidences) == len(translation.words)

    @pytest.mark.parametrize("copies", [True, False])
    def test_terms_appear(self, copies, translator):
        translator = translator if copies else Translator(translator.model, translator.tokens)
        terms = {"Hund": "two cats", "eine Frau": "a woman"}
        lines = ["ein Hund bellt", "Eine Frau und ein hund und ein Hund", "zwei Katzen", "Hund! eine Frau"]
        for strategy in (Greedy(), Beam(5)):
            texts = [each.text for each in translator.translate(lines, strategy=strategy, terms=terms)]
            assert "two cats" in texts[0]
            assert "a woman" in texts[1]
            assert texts[1].count("two cats") >= 2
            assert all(target in texts[3] for target in terms.values())
            assert not copies or texts[3] == "two cats! a woman"  # nothing else to translate
            assert texts[2] == translator.translate(lines[2], strategy=strategy)[0].text

    def test_terms_are_whole_words(self, translator):
        translator = Translator(translator.model, translator.tokens)
        terms = {"Hund": "cat", "Frau": "cats"}  # one term begins with the other
        lines = ["ein Hund und eine Frau bellt", "eine Frau und ein Hund", "Hund Hund"]
        for strategy in (Greedy(), Beam(3, n_best=2)):
            for translation in translator.translate(lines, strategy=strategy, terms=terms):
                for candidate in (translation, *translation.alternatives):
                    for source, target in terms.items():
                        words = [word.strip(".,!?") for word in candidate.text.split()]
                        assert words.count(target) >= translation.source.split().count(source)

    def test_any_text_is_translated(self, translator):
        lines = [
            "ein Hund " * 60,
            "a" * 300,
            "שלום",
            "a\u200bb\ufeff",
            "<b",
            "\x00ein\x00",
            "...",
            "\r\n",
            "̈",
        ]
        for translation in translator.translate(lines, strategy=Greedy(), alignment=True):
            assert translation.alignment.target_words == tuple(translation.words)

    def test_matches_need_training_pairs(self, translator):
        with pytest.raises(ArgumentError, match="has no training pairs to search"):
            translator.matches("ein Hund")


class TestStream:
    def test_stream_keeps_the_order(self, translator):
        lines = [f"{sentence}\n" for sentence in SENTENCES]
        translations = list(translator.stream(iter(lines), batch_size=2))
        assert [translation.source for translation in translations] == [line.rstrip("\n") for line in lines]
        assert texts(translations) == texts(translator.translate(SENTENCES))

    def test_a_single_line_is_translated_immediately(self, translator):
        answered = []

        def dialogue():
            for number, line in enumerate(SENTENCES):
                until = time.monotonic() + 30
                while len(answered) < number and time.monotonic() < until:
                    time.sleep(0.005)
                assert len(answered) == number  # the previous line has already been translated
                yield line

        for translation in translator.stream(dialogue()):
            answered.append(translation.text)
        assert answered == texts(translator.translate(SENTENCES))

    def test_an_error_follows_the_lines_before_it(self, translator):
        def broken():
            yield "ein Hund"
            raise OSError("gone")

        stream = translator.stream(broken())
        assert next(stream).source == "ein Hund"
        with pytest.raises(OSError, match="gone"):
            next(stream)


class TestFolders:
    def test_load_translator(self, folder):
        translator = regard.load_translator(folder)
        assert isinstance(translator, regard.Translator)
        (translation,) = translator.translate(["ein Hund"])
        assert isinstance(translation, regard.Translation)
        assert translation.text
        assert repr(translator) == f"Translator(Transformer, {translator.tokens!r})"
        assert "alternatives=[]" in repr(translation)

    def test_a_recurrent_model(self, tmp_path):
        (translation,) = load_translator(folders.write(tmp_path / "x", "recurrent")).translate(
            "ein Hund bellt"
        )
        assert translation.alignment.weights.shape[1] == 3

    def test_a_folder_without_a_model(self, tmp_path):
        with pytest.raises(ArgumentError, match="does not exist"):
            load_translator(tmp_path / "no")
        with pytest.raises(ArgumentError, match=r"is not a model folder: it has no config.json"):
            load_translator(tmp_path)

    def test_an_invalid_alignment_head(self, folder, tmp_path):
        folders.write(tmp_path / "x")
        config = json.loads((tmp_path / "x" / "config.json").read_text())
        del config["sha256"]
        (tmp_path / "x" / "config.json").write_text(json.dumps({**config, "alignment": {"layers": 3}}))
        with pytest.raises(ArgumentError, match="is not an alignment head"):
            load_translator(tmp_path / "x")


def test_a_search_without_results_is_an_error(translator, monkeypatch):
    """Enormous parameters can give every hypothesis zero probability."""
    monkeypatch.setattr(translator, "_search", lambda lines, *options: [[] for _ in lines])
    with pytest.raises(ArgumentError, match="every translation of 'zwei Hunde' zero probability"):
        translator.translate(["zwei Hunde"])

"""Text in, text out: order, lengths, alternatives, alignments, and what a model does not know."""

import json
import re
import time
from pathlib import Path

import pytest
import torch

import regard
from regard.errors import ArgumentError, DTypeError
from regard.translation import translator as module
from regard.translation.alignment.alignment import Alignment
from regard.translation.alignment.cross_attention import AlignmentHead, cross_weights
from regard.translation.decoding.search import Beam, Greedy, Hypothesis, Sample
from regard.translation.tokens import UNKNOWN
from regard.translation.translator import Translation, Translator, load_translator
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folders.write(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def translator(folder: Path) -> Translator:
    return load_translator(folder)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Translator:
    return load_translator(folders.write(tmp_path_factory.mktemp("plain"), "plain"))


def texts(translations: list[Translation]) -> list[str]:
    return [one.text for one in translations]


class TestTranslate:
    def test_order_is_kept_whatever_the_batch(self, translator):
        together = translator.translate(SENTENCES)
        assert [one.source for one in together] == SENTENCES
        assert texts(together) == texts(translator.translate(SENTENCES, batch=2))
        alone = [translator.translate(sentence)[0] for sentence in SENTENCES]
        assert texts(together) == texts(alone)
        assert [one.score for one in together] == pytest.approx([one.score for one in alone], abs=1e-4)
        assert len({one.text for one in together}) > 3  # or else there was no order to be seen

    def test_one_sentence_is_a_list_of_one(self, translator):
        (one,) = translator.translate("ein Hund")
        assert one.source == "ein Hund"
        assert str(one) == one.text
        assert translator.translate([]) == []

    def test_nothing_to_translate_asks_no_model(self, translator, monkeypatch):
        monkeypatch.setattr(module, "search", None)
        for one in translator.translate(["", " ", "\t\n\u2003"], alignment=True):
            assert (one.text, one.tokens, one.score, one.note) == ("", [], 0.0, "")
            assert tuple(one.alignment.weights.shape) == (0, 0)

    def test_tokens_are_the_pieces_of_the_text(self, translator):
        for one in translator.translate(SENTENCES):
            assert "".join(one.tokens).replace("▁", " ").split() == one.text.split()

    def test_a_line_break_is_white_space(self, translator):
        assert texts(translator.translate("ein\nHund\r\n")) == texts(translator.translate("ein Hund"))

    def test_searches_are_what_search_does(self, translator):
        how = Beam(4, length=0.5, best=3)
        (one,) = translator.translate("ein Hund bellt", how=how)
        ids = translator.tokens.source.encode("ein Hund bellt")
        packed = regard.models.Packed.of([[*ids, 2]])
        wanted = module.search(translator.model, packed, how, most=2 * len(ids) + 10)[0]
        join = translator.tokens.target.join
        assert texts([one, *one.alternatives]) == [join(each.tokens).text for each in wanted]
        assert [each.score for each in (one, *one.alternatives)] == [each.score for each in wanted]

    @pytest.mark.parametrize("how", [Greedy(), Sample(seed=3), Sample(top_p=0.5, best=2)])
    def test_other_searches(self, how, translator):
        found = translator.translate(SENTENCES, how=how)
        assert texts(found) == texts(translator.translate(SENTENCES, how=how, batch=3))
        wanted = getattr(how, "best", 1)
        assert all(len(one.alternatives) == (wanted - 1) * bool(one.source.strip()) for one in found)

    def test_no_end_is_noted(self, translator, monkeypatch):
        endless = [[Hypothesis([9, 9], -1.0, -2.0, finished=False)]]
        monkeypatch.setattr(module, "search", lambda *arguments, **options: endless)
        assert translator.translate("ein")[0].note == "cut off, as the model found no end"

    @pytest.mark.parametrize(
        ("given", "error", "message"),
        [
            (7, DTypeError, "the sentences are a int"),
            (["a", None], DTypeError, "sentence 1 is a NoneType"),
            (["a", "\ud800"], ArgumentError, "sentence 1 has '\\ud800'"),
        ],
    )
    def test_what_is_no_text_is_refused(self, given, error, message, translator):
        with pytest.raises(error, match=re.escape(message)):
            translator.translate(given)

    def test_a_batch_has_a_sentence(self, translator):
        with pytest.raises(ArgumentError, match="translate got batch=0"):
            translator.translate("ein", batch=0)
        with pytest.raises(ArgumentError, match="stream got batch=0"):
            next(translator.stream(["ein"], batch=0))


class TestLongLines:
    LINE = "ein Hund bellt laut. zwei Katzen schlafen heute gern! " * 9

    def parts(self, translator, line):
        return module.Line.of(line, translator.tokens.source.segment(line), translator.longest).parts

    def test_sentences_are_translated_one_after_the_other(self, translator):
        (one,) = translator.translate(self.LINE)
        parts = self.parts(translator, self.LINE)
        assert len(parts) > 2
        assert all(part.cut.text[-1] in ".!" for part in parts)
        alone = translator.translate([part.cut.text for part in parts])
        assert one.text == " ".join(part.text for part in alone)
        assert one.tokens == [token for part in alone for token in part.tokens]
        assert min(part.score for part in alone) <= one.score <= max(part.score for part in alone)
        pieces = len(translator.tokens.source.encode(self.LINE))
        noted = rf"translated in {len(parts)} parts of \d+ pieces at most, as it has {pieces}"
        assert re.match(noted, one.note)

    def test_an_alignment_stays_within_its_part(self, translator):
        (one,) = translator.translate(self.LINE)
        first, second, *_ = self.parts(translator, self.LINE)
        (part,) = translator.translate(first.cut.text)
        rows = len(part.alignment.target_words)
        assert one.alignment.source_words == tuple(self.LINE.split())
        assert one.alignment.target_words == tuple(one.text.split())
        torch.testing.assert_close(one.alignment.weights[:rows, : second.word], part.alignment.weights)
        assert not one.alignment.weights[:rows, second.word :].any()

    def test_another_choice_is_read_when_it_is_asked_for(self, translator):
        pairs = [("ein Hund bellt", "a dog barks")]
        choice = AlignmentHead(layer=0, shift="output" if translator.choice.shift == "input" else "input")
        other = Translator(translator.model, translator.tokens, choice=choice)
        (asked,), (own,) = translator.align(pairs, choice), translator.align(pairs)
        (theirs,) = other.align(pairs)
        assert torch.equal(asked.weights, theirs.weights)
        assert not torch.equal(asked.weights, own.weights)
        with pytest.raises(DTypeError, match="a choice of type str; pass a AlignmentHead"):
            translator.align(pairs, "output")

    def test_the_longest_lines_take_no_more_memory_than_their_parts(self, translator, monkeypatch):
        """Of a line of some megabytes, all weights together would not fit; each part's do."""
        monkeypatch.setattr(module, "search", lambda model, packed, *a, **o: [done] * len(packed))
        done = [Hypothesis([UNKNOWN], -1.0, -1.0, True)]
        (one,) = translator.translate("Ω Hund " * 2000)
        assert one.text.count("Ω") == 2000
        monkeypatch.setattr("regard.translation.alignment.alignment._MOST", 1_000_000)
        with pytest.raises(ArgumentError, match="Give it sentence by sentence"):
            _ = one.alignment
        with pytest.raises(ArgumentError, match=r"pair 1 has 8,000 pieces .* and 8,000 in its target"):
            translator.align([("ein", "a"), ("Hund " * 4000, "Hund " * 4000)])

    def test_alternatives_of_all_parts(self, translator):
        (one,) = translator.translate(self.LINE, how=Beam(3, best=3))
        assert len(one.alternatives) == 2
        assert all(other.note == one.note for other in one.alternatives)

    def test_one_endless_word(self, translator):
        (one,) = translator.translate("Hund" * 200)
        assert "parts" in one.note
        assert len(one.alignment.source_words) == 1

    def test_learned_positions_are_few(self, tmp_path):
        few = ["model.positions=learned", "model.max_positions=20", "corpus.max_tokens=4"]
        translator = load_translator(folders.write(tmp_path / "x", more=few))
        assert translator.longest == 4
        for one in translator.translate(["Hund " * 30, "ein Hund bellt laut und lacht sehr gern heute"]):
            assert one.alignment.weights.isfinite().all()

    def test_settings_say_how_long(self, translator):
        assert translator.longest == 40
        assert Translator(translator.model, translator.tokens).longest == module.LONGEST


class TestAlignment:
    def test_it_is_read_off_the_translation_itself(self, translator):
        """By forced decoding of the very pieces that the search found."""
        sentence = "zwei Katzen schlafen heute"
        (one,) = translator.translate(sentence)
        source = translator.tokens.source.segment(sentence)
        ids = [translator.tokens.target._pieces.index(piece) for piece in one.tokens]
        (weights,) = cross_weights(translator.model, [source.ids], [ids], translator.choice)
        wanted = Alignment.of(source, translator.tokens.target.join(ids), weights)
        assert one.alignment.source_words == tuple(sentence.split())
        assert one.alignment.target_words == tuple(one.text.split())
        torch.testing.assert_close(one.alignment.weights, wanted.weights)
        assert one.alignment.weights.sum(-1).le(1 + 1e-5).all()
        assert one.alignment is one.alignment

    def test_all_at_once_are_the_same(self, translator):
        how = Beam(3, best=2)
        lazy = translator.translate(SENTENCES, how=how)
        assert not any("alignment" in vars(one) for one in lazy)
        eager = translator.translate(SENTENCES, how=how, alignment=True)
        for one, other in zip(lazy, eager, strict=True):
            for a, b in zip([one, *one.alternatives], [other, *other.alternatives], strict=True):
                assert "alignment" in vars(b)
                torch.testing.assert_close(a.alignment.weights, b.alignment.weights, rtol=1e-4, atol=1e-5)
                assert a.alignment.pharaoh() == b.alignment.pharaoh()

    def test_all_at_once_is_one_call(self, translator, monkeypatch):
        calls = []
        monkeypatch.setattr(module, "cross_weights", lambda *a: calls.append(a) or cross_weights(*a))
        translator.translate(SENTENCES, alignment=True)
        assert len(calls) == 1

    def test_the_choice_of_the_folder_counts(self, folder, translator):
        assert translator.choice == AlignmentHead(layer=0, shift="output")
        other = Translator(translator.model, translator.tokens, choice=AlignmentHead(layer=1))
        pairs = [("ein Hund bellt", "a dog barks")]
        assert not torch.allclose(translator.align(pairs)[0].weights, other.align(pairs)[0].weights)

    def test_given_pairs(self, translator):
        one, two = translator.align([("ein Hund bellt", "a dog"), ("", "")])
        assert (one.source_words, one.target_words) == (("ein", "Hund", "bellt"), ("a", "dog"))
        assert tuple(two.weights.shape) == (0, 0)

    def test_without_attention_there_is_none(self, plain):
        (one,) = plain.translate("ein Hund")
        with pytest.raises(ArgumentError, match="does not attend to the source"):
            _ = one.alignment
        with pytest.raises(ArgumentError, match="does not attend to the source"):
            plain.translate("ein Hund", alignment=True)


class Scripted:
    """A translator whose model writes and looks as it is told."""

    def __init__(self, translator, monkeypatch, kind="bpe"):
        sides = translator.tokens if kind == "bpe" else folders.tokens(kind)
        self.translator = Translator(translator.model, sides)
        self.patch = monkeypatch.setattr

    def ids(self, text: str) -> list[int]:
        """`?` stands for the unknown mark."""
        target = self.translator.tokens.target
        found = []
        for part in re.split(r"(\?)", text):
            found += [UNKNOWN] if part == "?" else target.encode(part.strip())
        return found

    def says(self, source: str, written: str, looks: dict[int, int] | None = None) -> Translation:
        """`looks`: the source piece that each target piece looks at, by their places; else at the first."""
        ids = self.ids(written)
        pieces = len(self.translator.tokens.source.segment(source).ids)
        weights = torch.zeros(len(ids), pieces)
        for place in range(len(ids)):
            weights[place, (looks or {}).get(place, 0)] = 1
        self.patch(module, "search", lambda *a, **o: [[Hypothesis(ids, -1.0, -3.0, True)]])
        self.patch(module, "cross_weights", lambda *a: [weights])
        return self.translator.translate(source)[0]


class TestUnknown:
    def test_an_unknown_mark_is_what_it_looks_at(self, translator, monkeypatch):
        scripted = Scripted(translator, monkeypatch, "words")
        found = scripted.says("Λ singt Ω", "? sings ?", {0: 2, 1: 1, 2: 0})
        assert found.text == "Ω sings Λ"
        assert found.note == ""
        assert found.alignment.pharaoh() == "0-2 1-1 2-0"

    def test_each_is_used_once(self, translator, monkeypatch):
        scripted = Scripted(translator, monkeypatch, "words")
        assert scripted.says("Λ singt Ω", "? sings ?", {0: 0, 1: 1, 2: 0}).text == "Λ sings Ω"

    def test_more_marks_than_unknown_words(self, translator, monkeypatch):
        """A vocabulary of words copies the word that is looked at, known or not."""
        scripted = Scripted(translator, monkeypatch, "words")
        assert scripted.says("Λ singt", "? ?", {0: 0, 1: 1}).text == "Λ singt"

    def test_a_mark_within_a_word(self, translator, monkeypatch):
        found = Scripted(translator, monkeypatch).says("Frau Ω", "woman ? and", {1: 2, 2: 2})
        assert "Ω" in found.text.replace(" ", "")
        assert "⁇" not in found.text

    def test_what_is_left_out_is_put_where_it_stood(self, translator, monkeypatch):
        scripted = Scripted(translator, monkeypatch)
        cut = scripted.translator.tokens.source.segment("ein 漢字 Hund 🍕.")
        hund = cut.word_of.index(2)
        dog = len(scripted.ids("a"))
        found = scripted.says("ein 漢字 Hund 🍕.", "a dog", dict.fromkeys(range(dog, 9), hund))
        assert found.text == "a 漢字 dog 🍕"
        assert found.note == "copied what the model does not know: '漢字', '🍕'"
        assert found.alignment.target_words == ("a", "漢字", "dog", "🍕")
        assert found.alignment.pharaoh() == "0-0 1-1 2-2 3-3"

    def test_what_the_model_could_read_of_a_word_is_completed(self, translator, monkeypatch):
        found = Scripted(translator, monkeypatch).says("ein Łhund", "a hund")
        assert found.text == "a Łhund"
        assert found.alignment.pharaoh() == "0-0 1-1"

    def test_at_the_beginning_and_alone(self, translator, monkeypatch):
        scripted = Scripted(translator, monkeypatch)
        assert scripted.says("漢字 Hund", "dog", dict.fromkeys(range(9), 2)).text == "漢字 dog"
        assert scripted.says("漢字", "").text == "漢字"

    def test_control_characters_do_not_come_through(self, translator):
        (one,) = translator.translate("ein \x1b[31m漢\x07字 Hund")
        assert not {"\x1b", "\x07"} & set(one.text)

    @pytest.mark.parametrize("kind", ["translator", "plain"])
    def test_unknown_letters_come_through_any_model(self, kind, request):
        found = request.getfixturevalue(kind).translate(["ein 漢字 Hund", "Ω", "zwei Łódź 🍕!"])
        for one, letters in zip(found, ("漢字", "Ω", "Ł🍕"), strict=True):
            assert set(letters) <= set(one.text)


class TestStream:
    def test_order_and_one_for_each(self, translator):
        lines = [f"{sentence}\n" for sentence in SENTENCES]
        found = list(translator.stream(iter(lines), batch=2))
        assert [one.source for one in found] == [line.rstrip("\n") for line in lines]
        assert texts(found) == texts(translator.translate(SENTENCES))

    def test_a_single_line_is_answered_at_once(self, translator):
        answered = []

        def dialogue():
            for number, line in enumerate(SENTENCES):
                until = time.monotonic() + 30
                while len(answered) < number and time.monotonic() < until:
                    time.sleep(0.005)
                assert len(answered) == number  # the line before was answered before this one came
                yield line

        for one in translator.stream(dialogue()):
            answered.append(one.text)
        assert answered == texts(translator.translate(SENTENCES))

    def test_what_fails_comes_after_the_lines_before(self, translator):
        def broken():
            yield "ein Hund"
            raise OSError("gone")

        stream = translator.stream(broken())
        assert next(stream).source == "ein Hund"
        with pytest.raises(OSError, match="gone"):
            next(stream)


class TestFolders:
    def test_regard_loads_it(self, folder):
        translator = regard.load_translator(folder)
        assert isinstance(translator, regard.Translator)
        (one,) = translator.translate(["ein Hund"])
        assert isinstance(one, regard.Translation)
        assert one.text
        assert repr(translator) == f"Translator(Transformer, {translator.tokens!r})"
        assert "alternatives=[]" in repr(one)

    def test_a_recurrent_model(self, tmp_path):
        (one,) = load_translator(folders.write(tmp_path / "x", "recurrent")).translate("ein Hund bellt")
        assert one.alignment.weights.shape[1] == 3

    def test_what_is_no_model_folder(self, tmp_path):
        with pytest.raises(ArgumentError, match="does not exist"):
            load_translator(tmp_path / "no")
        with pytest.raises(ArgumentError, match="is no model folder"):
            load_translator(tmp_path)

    def test_a_wrong_choice_of_attention(self, folder, tmp_path):
        folders.write(tmp_path / "x")
        config = json.loads((tmp_path / "x" / "config.json").read_text())
        del config["sha256"]
        (tmp_path / "x" / "config.json").write_text(json.dumps({**config, "alignment": {"layers": 3}}))
        with pytest.raises(ArgumentError, match="is no choice of attention"):
            load_translator(tmp_path / "x")

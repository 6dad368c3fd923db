"""Tags keep their order and stay around the words they enclosed."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from regard.translation.text.tags import place_tags, strip_tags, write_tags

PIECES = st.lists(
    st.sampled_from(
        [
            *("*", "_ ", "**", "[", "](x.de)"),
            *("<b>", "</b>", "<i class='x'>", "</i>", "<br/>", "<!-- a -->", "&lt;b&gt;", "&lt;/b&gt;"),
            *("Hund ", "zwei. ", " ", "(", ")", '"'),
        ]
    ),
    max_size=12,
)


def translate(text: str, order: list[int]) -> str:
    """Reorder the words of a text with tags."""
    plain, tags = strip_tags(text)
    words = plain.split()
    ranges, at = [], 0
    for word in words:
        at = plain.index(word, at)
        ranges.append((at, at + len(word)))
        at += len(word)
    target = [words[i] for i in order]
    weights = torch.eye(len(words))[order] if words else None
    return " ".join(write_tags(tags, place_tags(tags, ranges, len(target), weights), target))


def test_pairs_enclose_the_aligned_words():
    assert translate("Ein <b>Mann</b> geht.", [0, 1, 2]) == "Ein <b>Mann</b> geht."
    assert translate("<i>heute <b>bellt</b></i> er", [2, 1, 0]) == "er <i><b>bellt</b> heute</i>"
    assert translate("Ein &lt;b&gt;Mann&lt;/b&gt; geht.", [1, 0, 2]) == "&lt;b&gt;Mann&lt;/b&gt; Ein geht."


def test_markdown_encloses_the_aligned_words():
    assert translate("Ein **Mann** geht.", [1, 0, 2]) == "**Mann** Ein geht."
    link = "heute [bellt *er*](https://x.de/_a_)"
    assert translate(link, [2, 1, 0]) == "[*er* bellt](https://x.de/_a_) heute"
    for text in (
        "**zwei *kleine* Hunde** bellen",
        "**[Hund](a.de)** und ~~Katze~~, _bellt_.",
        '![Hund](a.png "Ein Hund"), ***Katze*** __und Hund__!',
        "*Hund* bellt <b>*Katze*</b>",
    ):
        assert strip_tags(text)[1]
        assert translate(text, list(range(len(strip_tags(text)[0].split())))) == text


def test_markdown_is_never_empty():
    for order in ([0, 2], [2, 0], [0], [2]):
        text = translate("Ein *kleiner* Hund", order)
        assert "**" not in text
        assert text.count("*") == 2


def test_brackets_around_an_element_belong_to_its_tags():
    for text, plain in (
        ("Ein (<b>Mann</b>) geht.", "Ein Mann geht."),
        ("[<i>rot</i>], „<b>zwei Hunde</b>“!", "rot, zwei Hunde!"),
        ('("<b>Hund</b>") <p>(<b>Katze</b>)</p>.', "Hund Katze."),
        ("(**Hund**) ([Katze](a.de)) (<code>x</code>)", "Hund Katze "),
        ("«<b>Hund</b>» (&lt;b&gt;Katze&lt;/b&gt;)", "Hund Katze"),
        ("Ein Hund (<b>er</b> bellt) (laut <b>und oft</b>).", "Ein Hund (er bellt) (laut und oft)."),
        ("<i>(Ein <b>Mann</b>)</i>. (Er <i><b>geht.</b></i>)", "Ein Mann. (Er geht.)"),
        ("<b>(Hund)</b> f(x) <b>Katze</b> <i>„x y“</i>", "Hund f(x) Katze x y"),
        ("<b>(a) und (b)</b> <b>[[x]]</b> **(Hund)** <i></i>", "(a) und (b) [[x]] Hund "),
    ):
        assert strip_tags(text)[0] == plain
        assert translate(text, list(range(len(plain.split())))) == text
    assert translate("Ein (<b>kleiner</b>) Hund", [2, 1, 0]) == "Hund (<b>kleiner</b>) Ein"
    assert translate("(<b>heute</b>) bellt er", [1]) == "(<b>bellt</b>)"  # not translated


def test_an_end_tag_without_a_start_tag_follows_its_word():
    for text in ("<b>Ein <i>Mann</b> geht</i>.", "Er geht</b>.", "</i> Hund </b> bellt</b>!"):
        assert translate(text, list(range(len(strip_tags(text)[0].split())))) == text


def test_brackets_inside_a_word_remain_part_of_it():
    for text, plain, result in (
        ("Text<sup>[1]</sup> hier", "Text[1] hier", "<sup>Text[1]</sup> hier"),
        ("Ein Mann<i>(<b>er</b>)</i>.", "Ein Mann(er).", "Ein <i><b>Mann(er)</b></i>."),
        ("f(<i>x</i>) = 3", "f(x) = 3", "<i>f(x)</i> = 3"),
        ("(zwei<b>te</b>) (<b>er</b>)ste", "(zweite) (er)ste", "<b>(zweite)</b> <b>(er)ste</b>"),
    ):
        assert strip_tags(text)[0] == plain
        assert translate(text, list(range(len(plain.split())))) == result


def test_punctuation_may_separate_an_end_tag_from_its_bracket():
    for text in ("“<b>Hund</b>,” (<i>Katze</i>.)", "„*Hund*.“", 'Er lacht <b>laut</b>. "Nein"'):
        assert translate(text, list(range(len(strip_tags(text)[0].split())))) == text


def test_whitespace_and_punctuation_stay_where_they_were():
    for text in (
        "<b> Hund </b> bellt",
        "Hund <br> <br> bellt.",
        "<b> </b> Hund",
        "<p>Hund.</p> <p>Katze</p>.",
        "Hund <unk>",
        "<b> 😀",
        "<s> </s> <pad>",
    ):
        assert translate(text, list(range(len(strip_tags(text)[0].split())))) == text


@given(st.sampled_from(["<br>", "<br/>", "</p><p>", "</td><td>", "</b><br>", "<hr><i>"]))
def test_block_tags_separate_words(tags):
    plain, found = strip_tags(f"Hund{tags}bellt")
    assert plain.split() == ["Hund", "bellt"]
    assert "".join(tag.text for tag in found) == tags
    assert strip_tags("Hu<b>nd</b>")[0] == "Hund"


@given(PIECES, st.randoms(use_true_random=False))
def test_tags_and_words_survive_in_any_order(pieces, random):
    text = "".join(pieces)
    plain, tags = strip_tags(text)
    order = list(range(len(plain.split())))
    random.shuffle(order)
    result_plain, result_tags = strip_tags(translate(text, order))
    assert [tag.text for tag in result_tags] == [tag.text for tag in tags]
    assert sorted(result_plain.split()) == sorted(plain.split())


def test_no_tags():
    for text in (
        "a < b und c > d",
        "<3",
        "x<y",
        "",
        "a &lt; b &gt; c",
        "&lt;3",
        "&lt;b",
        "x &lt;y und z&gt;0",
        "5 * 3 * 2, a_b_c, *args und *kwargs, Freund*innen*, Preis*",
        "`**a**` und https://x.de/*a*/_b_/ __name__ [a] (b)",
    ):
        assert strip_tags(text) == (text, [])


def test_block_elements_keep_their_final_punctuation():
    _, tags = strip_tags("<ul><li>Hund</li><li>Katze</li></ul>")
    assert write_tags(tags, [0, 0, 1, 1, 2, 2], ["dog.", "cat."]) == [
        "<ul><li>dog.</li>",
        "<li>cat.</li></ul>",
    ]
    assert translate("<b>Hund</b>. <p>Ein Hund</p>.", [0, 1, 2]) == "<b>Hund</b>. <p>Ein Hund</p>."


def test_keys_pressed_together_are_one_tag():
    keys = "<kbd>Alt</kbd>+<kbd>F4</kbd>"
    assert [tag.text for tag in strip_tags(f"{keys} und <kbd>C</kbd>")[1]] == [keys, "<kbd>C</kbd>"]
    assert translate(f"Ein {keys} Hund", [1, 0]).count(keys) == 1


def test_double_angle_quotes_are_not_tags():
    assert strip_tags("<<Ein Hund>> bellt") == ("<<Ein Hund>> bellt", [])

"""The story grammar, the check for contradictions, and the shipped model."""

from collections.abc import Callable, Iterator
from random import Random

import pytest
import torch

import regard
from regard.app.stories.consistency import contradictions
from regard.app.stories.grammar import PLOTS, stories
from regard.app.stories.training import CONFIG, consistency, held_out_loss
from regard.app.stories.words import BOYS, COLORS, GIRLS
from regard.models import LanguageModel, Packed, TextModel
from regard.models.text_model import SHIPPED, split_tokens
from tests.cases import looped

HELD_OUT = [story.split() for story in stories(100, seed=987_654)]
PRONOUNS = dict.fromkeys(("she", "her"), GIRLS) | dict.fromkeys(("he", "his", "him"), BOYS)

# texts that the model generates at temperature 0, by their opening
RECORDED = {
    "It was raining.": (
        "Lily had a purple hat, but Ben had no hat. They went to the river. Ben was wet because he had no "
        'hat. So Lily gave him the purple hat. "Thank you, Lily!" said Ben.'
    ),
    "The animal didn't cross the street because it was too tired.": (
        "It lay down and slept. The animal was not tired any more. Then it crossed the street."
    ),
    "The animal didn't cross the street because it was too wide.": (
        '"This street is wide," said the animal. So the animal found a field and went home.'
    ),
}
LOSS = 0.40  # nats per token

Links = Callable[[list[str]], Iterator[tuple[int, set[int]]]]


@pytest.fixture(scope="module")
def model() -> TextModel:
    return regard.load_language_model("stories")


def test_stories_depend_on_the_seed_alone() -> None:
    assert list(stories(50, seed=1)) == list(stories(60, seed=1))[:50]
    assert list(stories(50, seed=1)) != list(stories(50, seed=2))


@looped("plot", PLOTS, ids=lambda plot: plot.__name__)
def test_stories_do_not_contradict_themselves(plot: Callable[[Random], list[str]]) -> None:
    for seed in range(100):
        story = " ".join(plot(Random(seed)))
        assert contradictions(story) == []
        assert split_tokens(story) == story.split()
        assert len(story.split()) < 64


def test_most_changed_words_are_contradictions() -> None:
    random, changed, detected = Random(5), 0, 0
    for words in HELD_OUT:
        places = [i for i in range(len(words) // 2, len(words)) if words[i] in (*COLORS, *GIRLS, *BOYS)]
        if places:
            place = random.choice(places)
            others = COLORS if words[place] in COLORS else GIRLS + BOYS
            word = random.choice([other for other in others if other != words[place]])
            changed += 1
            detected += bool(contradictions(" ".join([*words[:place], word, *words[place + 1 :]])))
    assert detected > 0.8 * changed > 30


# The shipped model


def test_the_shipped_model_is_small() -> None:
    assert sum(path.stat().st_size for path in SHIPPED["stories"].iterdir()) < 2_000_000


def test_the_shipped_model_generates_the_recorded_texts(model: TextModel) -> None:
    for opening, continuation in RECORDED.items():
        assert model.generate(opening) == f"{opening} {continuation}"


def test_the_shipped_model_knows_the_grammar(model: TextModel) -> None:
    assert held_out_loss(model) < LOSS
    assert consistency(model, 10) > 0.6
    assert all(word in model.tokens for story in stories(500, seed=77) for word in story.split())


def pronouns(words: list[str]) -> Iterator[tuple[int, set[int]]]:
    """Yield the position before each pronoun that selects one of two people, and the positions of that name.

    The output at this position predicts the pronoun, so it must encode the person.
    """
    for i, word in enumerate(words):
        people = {name for name in words[:i] if name in (*GIRLS, *BOYS)}
        meant = people & {*PRONOUNS.get(word, ())}
        if len(people) == 2 and len(meant) == 1:
            yield i - 1, {place for place in range(i) if words[place] in meant}


def repeated_things(words: list[str]) -> Iterator[tuple[int, set[int]]]:
    """Yield the position of "red" in "the red ball", and the positions of nouns after an earlier "red"."""
    for i, word in enumerate(words):
        if word in COLORS and words[i - 1] == "the":
            earlier = {place + 1 for place in range(i) if words[place] == word}
            if earlier:
                yield i, earlier


def best_head(model: TextModel, links: Links) -> float:
    """Return the fraction of links that have the largest weight in their row, for the head with the most."""
    packed = Packed.of([model.encode(" ".join(words)) for words in HELD_OUT])
    with torch.no_grad(), regard.watch(model.model) as seen:
        model.model(packed)
    rows, targets, start = [], [], 0
    for words in HELD_OUT:
        for row, places in links(words):
            rows.append(start + 1 + row)  # after the start token
            targets.append({start + 1 + place for place in places})
        start += len(words) + 1
    assert len(rows) >= 20
    fractions = []
    for name in seen:
        keys = seen[name].argmax(-1).reshape(-1, start)[:, rows].tolist()
        fractions += [sum(key in goal for key, goal in zip(head, targets, strict=True)) for head in keys]
    return max(fractions) / len(rows)


@pytest.mark.parametrize("links", [pronouns, repeated_things])
def test_a_head_links_a_later_mention_to_the_first(model: TextModel, links: Links) -> None:
    assert best_head(model, links) > 0.6
    torch.manual_seed(0)
    untrained = TextModel(LanguageModel(len(model.tokens), CONFIG), model.tokens)
    assert best_head(untrained, links) < 0.4

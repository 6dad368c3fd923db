"""A grammar of short English stories with consistent facts.

A story tracks who owns what and where things are. Many words can therefore be predicted only from earlier
sentences: names, colors, places, and the person or thing that a pronoun refers to. Stories consist of
lowercase words and punctuation, separated by spaces.
"""

from collections.abc import Callable, Iterator
from random import Random

from regard._util.text import with_article
from regard.app.stories.words import (
    ANIMALS,
    FOODS,
    GROWN_UPS,
    HIDING_SPOTS,
    SPOTS_INDOORS,
    SPOTS_OUTDOORS,
    THINGS,
    TOYS,
    girl_and_boy,
    outdoors,
    people,
    things,
)

Sentences = list[str]


def stories(count: int, seed: int = 0) -> Iterator[str]:
    """Yield stories. The same seed gives the same stories.

    >>> from regard.app.stories.grammar import stories
    >>> next(stories(1, seed=3))
    'mia , nora and finn were in the park . finn had a red ring . finn gave the red ring to mia . ...'
    """
    random = Random(seed)
    for _ in range(count):
        yield story(random)


def story(random: Random) -> str:
    """Return a story with a random plot.

    >>> from random import Random
    >>> from regard.app.stories.grammar import story
    >>> story(Random(3)).endswith(".")
    True
    """
    return " ".join(random.choice(PLOTS)(random))


def _lost_and_found(random: Random) -> Sentences:
    """A child loses a thing, and another child finds it."""
    (a, b), (first, second) = girl_and_boy(random), things(random, 2)
    where, (place, there) = random.choice(SPOTS_OUTDOORS), outdoors(random)
    loser, finder, thing = random.choice([(a, b, first), (b, a, second)])
    opening = [f"{a.name} had {first.new} .", f"{b.name} had {second.new} ."]
    middle = random.choice(
        [
            [f"they went to the {place} .", f"{loser.name} lost {loser.possessive} {thing.noun} ."],
            [f"{there} , {loser.name} lost {thing.known} ."],
            [f"they played {there} .", f"then {loser.name} could not find {loser.possessive} {thing.noun} ."],
        ]
    )
    search = random.choice(
        [
            [
                f"{loser.subject} looked for it , but it was gone .",
                f"{finder.name} found {thing.known} {where} .",
            ],
            [f"{loser.subject} was sad .", f"{finder.name} looked {where} and found {thing.known} ."],
            [
                f'" where is my {thing.noun} ? " asked {loser.name} .',
                f'" it is {where} , " said {finder.name} .',
            ],
        ]
    )
    ending = random.choice(
        [
            [f"{finder.subject} gave it to {loser.name} .", f"{loser.name} was happy ."],
            [f"{loser.name} was happy because {loser.subject} had {loser.possessive} {thing.noun} again ."],
            [f'" thank you , {finder.name} ! " said {loser.name} .'],
        ]
    )
    return opening + middle + search + ending


def _gift(random: Random) -> Sentences:
    """A child wishes for a thing and gets it from a grown-up."""
    (child,), (thing,) = people(random, 1), things(random, 1)
    giver, (place, there) = random.choice(list(GROWN_UPS)), outdoors(random)
    opening = random.choice(
        [
            [f"{child.name} wanted {thing.new} .", f"{child.subject} asked {child.possessive} {giver} ."],
            [f"it was the birthday of {child.name} .", f"{child.subject} wanted {thing.new} ."],
            [f'" i want {thing.new} , " said {child.name} .'],
        ]
    )
    middle = random.choice(
        [
            [f"{child.possessive} {giver} gave {child.object} {thing.known} ."],
            [f"{child.possessive} {giver} bought {thing.known} and gave it to {child.name} ."],
            [f"{child.possessive} {giver} made {thing.known} for {child.object} ."],
        ]
    )
    ending = random.choice(
        [
            [
                f"{child.name} took it to the {place} .",
                f"{child.subject} showed {thing.known} to everybody {there} .",
            ],
            [
                f'" thank you , {giver} ! " said {child.name} .',
                f"{child.subject} loved the new {thing.noun} .",
            ],
            [f"{child.name} was very happy with {child.possessive} {thing.color} {thing.noun} ."],
        ]
    )
    return opening + middle + ending


def _swap(random: Random) -> Sentences:
    """Two children swap their things; the last sentence says who has what."""
    (a, b), (first, second) = people(random, 2), things(random, 2, TOYS)
    opening = [f"{a.name} had {first.new} and {b.name} had {second.new} ."]
    wish = random.choice(
        [
            [f"{a.name} liked {second.known} .", f"{b.name} liked {first.known} ."],
            [
                f'" i like your {second.noun} , " said {a.name} .',
                f'" i like your {first.noun} , " said {b.name} .',
            ],
        ]
    )
    middle = random.choice(
        [
            [f"so {a.name} gave {first.known} to {b.name} and {b.name} gave {second.known} to {a.name} ."],
            [f"so {a.name} and {b.name} swapped ."],
        ]
    )
    ending = random.choice(
        [
            [f"now {a.name} had {second.known} and {b.name} had {first.known} ."],
            [f"now {b.name} had {first.known} and {a.name} had {second.known} ."],
        ]
    )
    return opening + wish + middle + ending


def _giving(random: Random) -> Sentences:
    """A thing goes from hand to hand; a question at the end asks who has it."""
    (a, b, c), (thing,) = people(random, 3), things(random, 1)
    owner, second, third = random.sample([a, b, c], 3)
    opening = [
        f"{a.name} , {b.name} and {c.name} were {outdoors(random)[1]} .",
        f"{owner.name} had {thing.new} .",
    ]
    gave = [f"{owner.name} gave {thing.known} to {second.name} ."]
    holder = second
    if random.random() < 0.6:
        gave.append(f"then {second.name} gave it to {third.name} .")
        holder = third
    asker = random.choice([p for p in (a, b, c) if p != holder])
    ending = [f'" who has the {thing.noun} ? " asked {asker.name} .', f'" i have it , " said {holder.name} .']
    return opening + gave + ending


def _hide_and_seek(random: Random) -> Sentences:
    """Children hide, and a seeker finds each of them where they hid."""
    seeker, *hidden = people(random, 3)
    first, second = random.sample(HIDING_SPOTS, 2)
    spots = [(hidden[0], first), (hidden[1], second)]
    opening = [f"{seeker.name} , {hidden[0].name} and {hidden[1].name} played a game ."]
    opening += [f"{child.name} hid {where} ." for child, where in spots]
    random.shuffle(spots)
    (near, there), (far, elsewhere) = spots
    search = [f"{seeker.name} looked {there} and found {near.name} ."]
    search.append(f"then {seeker.subject} looked {elsewhere} and found {far.name} .")
    ending = random.choice([[], [f'" you found me ! " said {far.name} .'], ["they all laughed ."]])
    return opening + search + ending


def _hungry_animal(random: Random) -> Sentences:
    """A child feeds a hungry animal, which may follow the child home."""
    (child,), animal = people(random, 1), random.choice(list(FOODS))
    food, there, color = FOODS[animal], outdoors(random)[1], random.choice(("black", "brown", "white"))
    opening = random.choice(
        [
            [f"{child.name} saw a {color} {animal} {there} ."],
            [f"there was a {color} {animal} {there} .", f"{child.name} saw it ."],
        ]
    )
    middle = random.choice(
        [
            [
                f"it was hungry , so {child.name} gave it {with_article(food)} .",
                f"the {animal} ate the {food} .",
            ],
            [
                f"the {animal} was sad because it was hungry .",
                f"{child.name} had {with_article(food)} and gave it to the {animal} .",
            ],
            [
                f"the {animal} looked at {child.name} because it wanted {with_article(food)} .",
                f"{child.subject} gave it the {food} .",
            ],
        ]
    )
    ending = random.choice(
        [
            [f"now the {color} {animal} was not hungry ."],
            [f"then the {animal} went home with {child.name} ."],
            [f'" you are a good {animal} , " said {child.name} .'],
            [f"the {animal} was happy and {child.name} was happy too ."],
        ]
    )
    return opening + middle + ending


_OBSTACLES = {  # obstacle → properties that stop an animal
    "street": ("wide", "full of cars"),
    "river": ("wide", "deep"),
    "bridge": ("old", "long"),
    "field": ("wide", "wet"),
}


def _crossing(random: Random) -> Sentences:
    """An animal does not cross an obstacle; the reason shows which of the two "it" refers to."""
    animal, obstacle = random.choice((*ANIMALS, "animal")), random.choice(list(_OBSTACLES))
    did_not = random.choice(("didn't", "did not"))
    opening = random.choice(
        [
            [f"the {animal} came to a {obstacle} ."],
            [f"there was {with_article(animal)} near a {obstacle} ."],
            [],
        ]
    )
    if random.random() < 0.5:
        state = random.choice(("tired", "scared", "weak"))
        reason = f"because it was too {state} ."
        rest = {
            "tired": "it lay down and slept",
            "scared": "it ran back home",
            "weak": "it sat down and ate",
        }[state]
        ending = [f"{rest} .", f"the {animal} was not {state} any more ."]
        ending.append(f"then it crossed the {obstacle} .")
    else:
        state = random.choice(_OBSTACLES[obstacle])
        reason = f"because it was {'' if ' ' in state else 'too '}{state} ."
        ending = [f'" this {obstacle} is {state} , " said the {animal} .']
        other = random.choice([name for name in _OBSTACLES if name != obstacle])
        ending.append(f"so the {animal} found a {other} and went home .")
    return [*opening, f"the {animal} {did_not} cross the {obstacle} {reason}", *ending]


def _broken(random: Random) -> Sentences:
    """A thing breaks and is repaired."""
    (child,), (thing,) = people(random, 1), things(random, 1, (*TOYS, "cup", "lamp", "box", "bell"))
    helper = random.choice(list(GROWN_UPS))
    place = random.choice(("table", "chair", "shelf", "window"))
    opening = [f"{child.name} had {thing.new} ."]
    accident = random.choice(
        [
            [
                f"one day it fell from the {place} and broke .",
                f"{child.name} was sad because {child.possessive} {thing.noun} was broken .",
            ],
            [f"{child.subject} dropped it , and {thing.known} broke .", f"{child.name} cried ."],
        ]
    )
    repair = random.choice(
        [
            [
                f"{child.possessive} {helper} fixed {thing.known} .",
                f'" thank you , {helper} ! " said {child.name} .',
            ],
            [
                f'" do not cry , {child.name} , " said {child.possessive} {helper} .',
                f"{GROWN_UPS[helper]} fixed the {thing.noun} .",
            ],
        ]
    )
    ending = random.choice(
        [[f"now {thing.known} was as good as new ."], [f"{child.name} put {thing.known} on the {place} ."]]
    )
    return opening + accident + repair + ending


def _where_is_it(random: Random) -> Sentences:
    """Two things are put somewhere; a question asks where one of them is."""
    (a, b), (first, second) = people(random, 2), things(random, 2, THINGS)
    here, there = random.sample(SPOTS_INDOORS, 2)
    opening = [f"{a.name} put {first.new} {here} .", f"{b.name} put {second.new} {there} ."]
    thing, where, owner = random.choice([(first, here, a), (second, there, b)])
    asker = b if owner == a else a
    question = random.choice(
        [
            [
                f'" where is {thing.known} ? " asked {asker.name} .',
                f'" it is {where} , " said {owner.name} .',
            ],
            [f"{asker.name} wanted {thing.known} .", f"{asker.subject} looked {where} and found it ."],
        ]
    )
    return opening + question + [f"{asker.name} took {thing.known} and went home ."]


def _meeting(random: Random) -> Sentences:
    """Two animals meet, become friends and go somewhere together."""
    first, second = random.sample(ANIMALS, 2)
    size, other_size = random.sample(("big", "small", "old", "young"), 2)
    (home, at_home), (place, _) = outdoors(random), outdoors(random)
    while place == home:
        place, _ = outdoors(random)
    opening = [
        f"{with_article(f'{size} {first}')} lived {at_home} .",
        f"one day it went to the {place} and met {with_article(f'{other_size} {second}')} .",
    ]
    talk = random.choice(
        [
            [
                f'" who are you ? " asked the {first} .',
                f'" i am {with_article(second)} , " said the {other_size} {second} .',
            ],
            [
                f'" where do you live ? " asked the {second} .',
                f'" i live {at_home} , " said the {size} {first} .',
            ],
        ]
    )
    ending = random.choice(
        [
            [f"the {first} and the {second} became friends ."],
            [f"the {first} took the {second} to the {home} .", "they were friends ."],
            [f"then the {first} said goodbye and went back to the {home} ."],
        ]
    )
    return opening + talk + ending


_WEATHER = {
    "raining": (("coat", "hat"), "wet"),
    "snowing": (("scarf", "hat", "coat"), "cold"),
}


def _weather(random: Random) -> Sentences:
    """One child has clothing for the weather and gives it to another child, who has none."""
    a, b = girl_and_boy(random)
    weather = random.choice(list(_WEATHER))
    nouns, state = _WEATHER[weather]
    (thing,) = things(random, 1, nouns)
    place, _ = outdoors(random)
    opening = [f"it was {weather} .", f"{a.name} had {thing.new} , but {b.name} had no {thing.noun} ."]
    middle = random.choice(
        [
            [
                f"they went to the {place} .",
                f"{b.name} was {state} because {b.subject} had no {thing.noun} .",
            ],
            [f"{b.name} got {state} , but {a.name} did not ."],
        ]
    )
    ending = random.choice(
        [
            [f"so {a.name} gave {b.object} {thing.known} .", f'" thank you , {a.name} ! " said {b.name} .'],
            [f'" take my {thing.noun} , {b.name} , " said {a.name} .', f"now {b.name} had {thing.known} ."],
        ]
    )
    return opening + middle + ending


def _race(random: Random) -> Sentences:
    """Two children or animals race; the faster one wins."""
    if random.random() < 0.5:
        a, b = (person.name for person in people(random, 2))
    else:
        a, b = (f"the {animal}" for animal in random.sample(ANIMALS, 2))
    fast, slow = random.sample([a, b], 2)
    goal = random.choice(("tree", "bridge", "barn", "river", "lake"))
    opening = [f"{a} and {b} ran a race to the {goal} ."]
    run = random.choice(
        [
            [f"{fast} was fast and {slow} was slow ."],
            [f"{slow} was slow , but {fast} was fast ."],
            [f"{slow} fell down , so {fast} was faster ."],
        ]
    )
    ending = random.choice(
        [
            [f"{fast} came to the {goal} first and won the race ."],
            [f'" i won the race ! " said {fast} .', f"{slow} was sad ."],
            [f"{fast} waited for {slow} at the {goal} .", f'" you won , " said {slow} .'],
        ]
    )
    return opening + run + ending


PLOTS: tuple[Callable[[Random], Sentences], ...] = (
    _lost_and_found,
    _gift,
    _swap,
    _giving,
    _hide_and_seek,
    _hungry_animal,
    _crossing,
    _broken,
    _where_is_it,
    _meeting,
    _weather,
    _race,
)

"""Words of the story grammar, and how they combine into phrases."""

from random import Random
from typing import NamedTuple

from regard._util.text import with_article

GIRLS = ("anna", "emma", "lily", "lucy", "mia", "nora", "sara", "zoe")
BOYS = ("ben", "finn", "jack", "leo", "max", "sam", "tim", "tom")
CAPITALIZED = (*GIRLS, *BOYS, "i")  # words that are always capitalized
GROWN_UPS = {"mom": "she", "dad": "he", "grandma": "she", "grandpa": "he"}
COLORS = ("black", "blue", "brown", "green", "orange", "pink", "purple", "red", "white", "yellow")
TOYS = ("ball", "boat", "car", "doll", "drum", "kite", "puppet", "robot", "train", "truck")
THINGS = (
    "bag",
    "bell",
    "book",
    "box",
    "button",
    "coat",
    "cup",
    "hat",
    "key",
    "lamp",
    "ring",
    "scarf",
    "shell",
)
FOODS = {"dog": "bone", "cat": "fish", "rabbit": "carrot", "horse": "apple", "bird": "seed", "mouse": "nut"}
ANIMALS = ("bear", "bird", "cat", "dog", "duck", "fox", "frog", "horse", "mouse", "owl", "rabbit", "turtle")
OUTDOORS = {  # each place with its preposition
    "beach": "at",
    "farm": "on",
    "field": "in",
    "forest": "in",
    "garden": "in",
    "hill": "on",
    "lake": "at",
    "park": "in",
    "river": "at",
    "zoo": "at",
}
SPOTS_OUTDOORS = ("behind the tree", "in the barn", "in the grass", "under the bench", "under the bridge")
SPOTS_INDOORS = ("behind the door", "in the basket", "on the table", "on the chair", "under the bed")
HIDING_SPOTS = (*SPOTS_OUTDOORS, "behind the door", "in the kitchen", "under the bed", "under the table")


class Person(NamedTuple):
    """A child and the pronouns that refer to them."""

    name: str
    subject: str  # she, he
    object: str  # her, him
    possessive: str  # her, his


class Thing(NamedTuple):
    """An object with its color."""

    color: str
    noun: str

    @property
    def new(self) -> str:
        """The phrase for the first mention: "an orange hat"."""
        return with_article(f"{self.color} {self.noun}")

    @property
    def known(self) -> str:
        """The phrase for a later mention: "the orange hat"."""
        return f"the {self.color} {self.noun}"


def girl(name: str) -> Person:
    return Person(name, "she", "her", "her")


def boy(name: str) -> Person:
    return Person(name, "he", "him", "his")


def people(random: Random, count: int) -> list[Person]:
    """Choose children with different names."""
    names = random.sample(GIRLS + BOYS, count)
    return [girl(name) if name in GIRLS else boy(name) for name in names]


def girl_and_boy(random: Random) -> list[Person]:
    """Choose a girl and a boy, in random order, so that each pronoun refers to only one of them."""
    pair = [girl(random.choice(GIRLS)), boy(random.choice(BOYS))]
    random.shuffle(pair)
    return pair


def outdoors(random: Random) -> tuple[str, str]:
    """Choose a place; return its noun, and the phrase with its preposition: "lake", "at the lake"."""
    place = random.choice(list(OUTDOORS))
    return place, f"{OUTDOORS[place]} the {place}"


def things(random: Random, count: int, nouns: tuple[str, ...] = TOYS + THINGS) -> list[Thing]:
    """Choose objects that differ in noun and in color."""
    colors, chosen = random.sample(COLORS, count), random.sample(nouns, count)
    return [Thing(color, noun) for color, noun in zip(colors, chosen, strict=True)]

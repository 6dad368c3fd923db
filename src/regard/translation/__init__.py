"""From pairs of sentences to a translator: corpus, vocabulary, training, search, word alignments."""

from regard.translation.alignment import Alignment, align, choose
from regard.translation.anchors import Anchors
from regard.translation.cleaning import clean
from regard.translation.corpus import Pair, split
from regard.translation.crossing import Choice
from regard.translation.dates import Embedded, embedded
from regard.translation.evaluation import Scores, by_length, evaluate
from regard.translation.formats import read_pairs, write_pairs
from regard.translation.links import Links, pharaoh, symmetrize
from regard.translation.logs import read_log
from regard.translation.plan import Plan
from regard.translation.quality import Gold, Rates, error_rate, read_gold, read_pharaoh
from regard.translation.search import Beam, Greedy, Hypothesis, Sample
from regard.translation.store import Store
from regard.translation.tokens import Cut, Tokens, TwoSides
from regard.translation.trainer import Outcome
from regard.translation.training import train
from regard.translation.translator import Translation, Translator, load_translator

__all__ = [
    "Alignment",
    "Anchors",
    "Beam",
    "Choice",
    "Cut",
    "Embedded",
    "Gold",
    "Greedy",
    "Hypothesis",
    "Links",
    "Outcome",
    "Pair",
    "Plan",
    "Rates",
    "Sample",
    "Scores",
    "Store",
    "Tokens",
    "Translation",
    "Translator",
    "TwoSides",
    "align",
    "by_length",
    "choose",
    "clean",
    "embedded",
    "error_rate",
    "evaluate",
    "load_translator",
    "pharaoh",
    "read_gold",
    "read_log",
    "read_pairs",
    "read_pharaoh",
    "split",
    "symmetrize",
    "train",
    "write_pairs",
]

"""Simultaneous translation with pretrained translators, whose special tokens differ from regard's."""

import math

import pytest

import regard
from regard.translation import Greedy, translate_simultaneously
from tests.translation.pretrained.conftest import Pretrained
from tests.translation.pretrained.folders import SOURCES

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # from transformers
]


def test_an_infinite_lag_equals_greedy_decoding(folder: Pretrained) -> None:
    translator = regard.load_translator(folder.path, **folder.languages)
    for source in SOURCES[:2]:
        emissions = translate_simultaneously(translator, source.split(), lag=math.inf)
        (offline,) = translator.translate(source, strategy=Greedy())
        assert " ".join(emission.text for emission in emissions) == offline.text

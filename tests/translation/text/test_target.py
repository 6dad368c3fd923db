"""Writing a part: copies are separate words unless they are joined to the same text as in the source."""

import pytest
import torch

from regard.translation import Tokenizer
from regard.translation.decoding.hypothesis import Hypothesis
from regard.translation.text.profile import TextProfile
from regard.translation.text.source import SourceReader
from regard.translation.text.target import DecodedPart, write_part


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        ("7, a-9.", "?.?", "7 9."),  # not 7.9
        ("a-5 b", "b a-?", "b a-5"),
        ("a-5 b", "b a?", "b a 5"),
        ("5-b a", "a ?-b", "a 5-b"),
    ],
)
def test_copies_do_not_merge_with_other_text(source, target, expected):
    """Each ? stands for an unknown token."""
    tokenizer = Tokenizer.learn(["No a-b, a.b"] * 9, kind="characters")
    (part,) = SourceReader(tokenizer, TextProfile(), max_tokens=99).read(source).parts
    ids = [token for piece in target.replace(" ", "▁") for token in tokenizer.token_ids([piece])]
    decoded = DecodedPart(part, Hypothesis(ids, 0.0, 0.0, finished=True))
    weights = torch.full((len(ids), len(part.ids)), 1 / len(part.ids))
    assert " ".join(word.text for word in write_part(decoded, weights, tokenizer).words) == expected

"""The link that a view shows first."""

import pytest
import torch

from regard.app.first_link import first_link
from regard.app.view_model import ViewModel, look_at_text
from regard.models.encoders.pretrained import load_encoder
from tests.browser.visit import needs_encoder

SENTENCE = "The animal didn't cross the street because it was too tired"


@needs_encoder
def test_the_pronoun_is_shown_in_the_head_that_reads_its_antecedent_most() -> None:
    view = look_at_text(load_encoder("minilm"), [SENTENCE]).inputs[0]
    link, tokens = first_link(view), list(view.texts[0].tokens)
    assert link is not None
    assert (tokens[link.query], tokens[link.key]) == ("it", "animal")
    weights = torch.stack([layer.weights.dense().squeeze(0) for layer in view.layers])
    on_animal = weights[:, :, tokens.index("it"), tokens.index("animal")]
    assert link.weight == pytest.approx(float(on_animal.max()))
    assert on_animal[link.layer, link.head] == on_animal.max()


def link_of(tokens: list[str], *links: tuple[int, int, float], heads: int = 3) -> tuple | None:
    """Return layer, head, query and key of the first link; each of `links` is in a head of its own."""
    weights = torch.full((heads, len(tokens), len(tokens)), 0.01)
    for head, (query, key, weight) in enumerate(links):
        weights[head, query, key] = weight
    found = first_link(ViewModel.of(weights, queries=tokens).inputs[0])
    return found and tuple(found)[:4]


def test_the_strongest_allowed_link_is_found() -> None:
    words = ["cats", "hunt", "mice", "near", "barns"]
    assert link_of(words, (0, 1, 0.9), (0, 2, 0.7), (3, 0, 0.5)) == (0, 1, 0, 2)  # 0 and 1 are neighbors
    words = ["cats", "hunt", "because", "they", "starve"]
    assert link_of(words, (3, 4, 0.9), (3, 2, 0.8), (3, 0, 0.2)) == (0, 2, 3, 0)  # an earlier content word
    words = ["lily", "had", "drums", "lost", "her"]
    assert link_of(words, (4, 3, 0.9), (4, 2, 0.3)) == (0, 1, 4, 2)  # not the neighbor


def test_only_the_beginning_of_a_long_text_is_searched() -> None:
    words = ["cats", "hunt", "mice", *["the"] * 200, "barns"]
    assert link_of(words, (203, 0, 0.9), (0, 2, 0.2)) == (0, 1, 0, 2)


def test_no_link_is_shown_if_none_is_allowed() -> None:
    assert link_of(["the", "of"]) is None
    cross = ViewModel.of(torch.eye(3), queries=["a", "b", "c"], keys=["x", "y", "z"])
    assert first_link(cross.inputs[0]) is None

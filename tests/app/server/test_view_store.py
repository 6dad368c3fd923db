"""What is kept to be looked at: the last used, and no more than there is room for."""

import pytest
import torch

from regard.app.server.requests import HeadsAsked, Received, Tile, Top
from regard.app.server.security import Refused
from regard.app.server.view_store import ViewStore, held
from regard.app.view_model import ViewModel


def test_the_one_not_used_longest_goes_first():
    exhibits = ViewStore(count=2)
    first, second = (exhibits.keep(ViewModel.of(torch.eye(3))).id for _ in range(2))
    exhibits.find(first)
    third = exhibits.keep(ViewModel.of(torch.eye(3))).id
    exhibits.find(first)
    exhibits.find(third)
    with pytest.raises(Refused, match="look again"):
        exhibits.find(second)


def test_bytes_count_too():
    large = torch.rand(1000, 1000)  # 4 MB
    exhibits = ViewStore(size=9_000_000)
    names = [exhibits.keep(ViewModel.of(large.clone())).id for _ in range(3)]
    assert len(exhibits) == 2
    with pytest.raises(Refused):
        exhibits.find(names[0])


def test_one_is_kept_whatever_its_size():
    exhibits = ViewStore(size=1)
    name = exhibits.keep(ViewModel.of(torch.rand(100, 100))).id
    exhibits.find(name)


def test_what_was_found_with_effort_counts():
    exhibit = ViewModel.of(torch.rand(2100, 2100))
    before = held(exhibit)
    exhibits = ViewStore()
    exhibits.ask(exhibits.keep(exhibit).id, "tile", Tile(height=2048, width=2048))
    assert held(exhibit) > before + 16_000_000


def test_ids_cannot_be_guessed():
    exhibits = ViewStore()
    names = {exhibits.keep(ViewModel.of(torch.eye(2))).id for _ in range(20)}
    assert len(names) == 20
    assert min(map(len, names)) >= 16


def test_a_question_about_too_many_weights_is_refused_with_the_numbers():
    exhibits = ViewStore(pairs=1000)
    name = exhibits.keep(ViewModel.of(torch.rand(4, 20, 20))).id
    assert exhibits.pairs(name, "tile", Tile(heads=[0, 1])) == 800
    told = r"reads 1,600 weights .* at most 1,000 .* fewer heads, or for a part"
    with pytest.raises(Refused, match=told) as no:
        exhibits.pairs(name, "tile", Tile())
    assert no.value.status == 422
    assert exhibits.pairs(name, "received", Received(heads=[3])) == 400
    with pytest.raises(Refused, match=r"reads 1,600 weights"):
        exhibits.pairs(name, "heads", HeadsAsked(heads=[3]))  # several passes
    assert exhibits.pairs(name, "top", Top(place=3)) == 80

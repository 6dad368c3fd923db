"""The view store: eviction, limits and ids."""

import pytest
import torch

from regard.app.protocol import HeadsQuestion, ReceivedQuestion, TileQuestion, TopkQuestion
from regard.app.server.security import RequestError
from regard.app.server.view_store import ViewStore, view_bytes
from regard.app.view_model import ViewModel


def test_the_least_recently_used_view_is_evicted():
    views = ViewStore(max_views=2)
    first, second = (views.add(ViewModel.of(torch.eye(3))).id for _ in range(2))
    views.find(first)
    third = views.add(ViewModel.of(torch.eye(3))).id
    views.find(first)
    views.find(third)
    with pytest.raises(RequestError, match="expired"):
        views.find(second)


def test_bytes_are_limited():
    large = torch.rand(1000, 1000)  # 4 MB
    views = ViewStore(max_bytes=9_000_000)
    names = [views.add(ViewModel.of(large.clone())).id for _ in range(3)]
    assert len(views) == 2
    with pytest.raises(RequestError):
        views.find(names[0])
    assert views.find(names[2])
    views = ViewStore(max_bytes=1)
    assert views.find(views.add(ViewModel.of(large)).id)  # the last one is kept, regardless of its size


def test_cached_answers_count_as_bytes():
    view = ViewModel.of(torch.rand(2100, 2100))
    before = view_bytes(view)
    views = ViewStore()
    views.prepare(views.add(view).id, TileQuestion(height=2048, width=2048)).answer()
    assert view_bytes(view) > before + 16_000_000


def test_ids_cannot_be_guessed():
    views = ViewStore()
    names = {views.add(ViewModel.of(torch.eye(2))).id for _ in range(20)}
    assert len(names) == 20
    assert min(map(len, names)) >= 16


def test_expensive_questions_are_refused_with_both_numbers():
    views = ViewStore(max_cost=1000)
    name = views.add(ViewModel.of(torch.rand(4, 20, 20))).id
    for question in (TileQuestion(heads=[0, 1]), ReceivedQuestion(heads=[3]), TopkQuestion(position=3)):
        assert views.prepare(name, question).cost in (800, 400, 80)
    with pytest.raises(RequestError, match=r"reads 1,600 weights .* limit is 1,000.*fewer heads") as no:
        views.prepare(name, TileQuestion())
    assert no.value.status == 422
    with pytest.raises(RequestError, match=r"reads 1,200 weights"):
        views.prepare(name, HeadsQuestion(heads=[3]))  # several passes

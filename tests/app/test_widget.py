"""The Python side of the widget: it answers every message and never raises."""

import json

import numpy as np
import pytest
import torch

import regard
from regard.app.view_model import ViewModel
from regard.app.widget import AttentionWidget


@pytest.fixture
def weights() -> regard.Weights:
    x = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0))
    return regard.attend(x, x, x)[1]


@pytest.fixture
def talk(weights, monkeypatch):
    """Send a message as a browser would; return the reply."""
    widget = AttentionWidget(weights, queries=list("abcde"), title="Letters")
    sent = []
    monkeypatch.setattr(widget, "send", lambda content, buffers=None: sent.append((content, buffers)))

    def ask(message, buffers=()):
        sent.clear()
        widget._handle_custom_msg(message, list(buffers))
        (answer,) = sent
        return answer

    return ask


def test_the_widget_state_describes_the_view(weights):
    widget = AttentionWidget(weights, queries=list("abcde"), title="Letters", view="matrix")
    state = widget.get_state()
    assert state["view"] == ViewModel.of(weights, queries=list("abcde"), title="Letters").describe()
    assert state["options"] == {"view": "matrix"}
    assert "render" in state["_esm"]
    assert ".regard-attention" in state["_css"]


def test_a_tile_is_sent_as_a_buffer(talk, weights):
    content, buffers = talk({"id": 7, "question": "tile", "arguments": {"heads": [1], "rows": [1, 3]}})
    assert content == {"id": 7}
    assert np.frombuffer(buffers[0], "<u4", 3).tolist() == [1, 2, 5]
    result = np.frombuffer(buffers[0], "<f4", offset=12).reshape(1, 2, 5)
    np.testing.assert_allclose(result, weights.dense()[[1], 1:3], atol=1e-6)


@pytest.mark.parametrize("question", ["topk", "received", "heads", "numbers"])
def test_other_questions_are_answered_in_json(talk, question):
    content, buffers = talk({"id": 1, "question": question, "arguments": {"input": 0, "layer": 0}})
    assert json.dumps(content["answer"], allow_nan=False)
    assert not buffers


@pytest.mark.parametrize(
    "message",
    [
        {"id": 3, "question": "what", "arguments": {}},
        {"id": 3, "question": "tile", "arguments": {"rows": [0, 9]}},
        {"id": 3, "question": "tile", "arguments": [1]},
        {"id": 3, "question": ["tile"], "arguments": {}},
        {"id": 3, "question": "tile", "arguments": {"heads": {}}},
        {"id": 3},
    ],
)
def test_invalid_questions_get_an_error_message(talk, message):
    content, buffers = talk(message)
    assert content["id"] == 3
    assert len(content["error"]) > 10
    assert not buffers


@pytest.mark.parametrize("message", [None, [], "tile", 3, {}, {"id": [1], "question": "tile"}])
def test_invalid_messages_are_harmless(talk, message):
    content, _ = talk(message)
    assert content["id"] is None


def test_modified_inputs_are_reported(monkeypatch):
    x = torch.randn(1, 3, 4)
    widget = AttentionWidget(regard.attend(x, x, x)[1])
    sent = []
    monkeypatch.setattr(widget, "send", lambda content, buffers=None: sent.append(content))
    x.zero_()
    widget._handle_custom_msg({"id": 1, "question": "tile"}, [])
    assert "modified in place" in sent[0]["error"]

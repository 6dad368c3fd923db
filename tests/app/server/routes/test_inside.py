"""The endpoints of the Inside section."""

import numpy as np
import pytest
import torch

from regard.app.server.routes.inside import _numbers, next_probabilities
from regard.app.trace_text import trace_text
from tests.app.server.client import Client

TEXT = {"model": "small", "text": "1 2 3"}


def test_states_are_those_of_the_model(client: Client) -> None:
    answer = client.post("/api/inside", **TEXT)
    trace = trace_text(client.state.registry.translator("small"), "1 2 3").trace
    assert answer["kind"] == "encoder-decoder"
    assert [stack["name"] for stack in answer["stacks"]] == ["encoder", "decoder"]
    for stack, expected in zip(answer["stacks"], trace.stacks, strict=True):
        assert stack["tokens"] == expected.tokens
        np.testing.assert_allclose(stack["final"], expected.final, rtol=1e-6)
        assert len(stack["layers"]) == trace.config.layers
    assert trace.logits is not None
    for prediction, logits in zip(answer["predictions"], trace.logits, strict=True):
        probabilities = logits.softmax(-1)
        for candidate in prediction["top"]:
            assert candidate["probability"] == pytest.approx(probabilities[candidate["id"]].item(), abs=1e-5)
        assert prediction["top"][0]["id"] == logits.argmax()


def test_a_layer_has_every_step(client: Client) -> None:
    steps = client.post("/api/inside/layer", **TEXT, stack="decoder", layer=0)["steps"]
    kinds = [step["kind"] for step in steps]
    assert kinds == ["norm", "attention", "residual"] * 2 + ["norm", "feed_forward", "residual"]
    attention = steps[4]
    assert attention["name"] == "cross"
    assert set(attention) >= {"query", "key", "value", "scale", "scores", "allowed", "weights", "mixed"}
    np.testing.assert_allclose(np.sum(attention["weights"], -1), 1, atol=1e-5)
    assert "hidden" not in attention
    scores = attention["scale"] * np.array(attention["query"]) @ np.swapaxes(attention["key"], -1, -2)
    np.testing.assert_allclose(attention["scores"], scores, atol=1e-5)


def test_the_next_token_is_sampled_at_a_temperature(client: Client) -> None:
    cold = client.post("/api/inside/next", **TEXT, target="1", temperature=0)
    assert cold["probabilities"][0]["probability"] == 1
    assert cold["id"] == cold["probabilities"][0]["id"]
    hot = [client.post("/api/inside/next", **TEXT, target="1", temperature=50, seed=i) for i in range(5)]
    assert len({answer["id"] for answer in hot}) > 1
    assert hot[0] == client.post("/api/inside/next", **TEXT, target="1", temperature=50, seed=0)
    assert all(answer["text"].startswith("1") for answer in hot)


def test_encoders_have_states_and_no_predictions(client: Client) -> None:
    answer = client.post("/api/inside", model="bert", text="dogs bark")
    assert answer["kind"] == "encoder"
    assert answer["predictions"] is None
    refusal = client.refused("/api/inside/next", model="bert", text="dogs bark")
    assert "does not predict the next token" in refusal


def test_models_say_whether_they_can_be_drawn(client: Client) -> None:
    models = {model["name"]: model["traceable"] for model in client.get("/api/models")["models"]}
    assert models == {"small": True, "plain": False, "recurrent": False, "bert": True, "static": False}


def test_wrong_requests_are_explained(client: Client) -> None:
    refused = client.refused
    assert "Only Transformers can be traced" in refused("/api/inside", model="recurrent", text="1 2")
    assert "Only Transformers can be traced" in refused("/api/inside", model="static", text="dogs")
    assert "tokens; this model reads at most 41" in refused("/api/inside", model="small", text="1 " * 100)
    assert "layers 0 to" in refused("/api/inside/layer", **TEXT, stack="encoder", layer=99)
    no_decoder = refused("/api/inside/layer", model="bert", text="dogs", stack="decoder", layer=0)
    assert "has no decoder" in no_decoder


def test_numbers_keep_the_digits_of_float32() -> None:
    x = torch.randn(7, 11) * 10.0 ** torch.randint(-9, 9, (7, 11))
    x[0, 0] = 0
    assert torch.allclose(torch.tensor(_numbers(x)), x, rtol=6e-7, atol=0)


def test_a_low_temperature_sharpens() -> None:
    logits = torch.tensor([1.0, 2.0, 4.0])
    probabilities = [next_probabilities(logits, temperature)[2] for temperature in (0.0, 0.1, 1.0, 10.0)]
    assert probabilities == sorted(probabilities, reverse=True)
    torch.testing.assert_close(next_probabilities(logits, 1.0), logits.softmax(-1))

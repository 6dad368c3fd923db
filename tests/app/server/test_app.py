"""The API: right answers, and one clear sentence for whatever cannot be answered."""

import base64
import json
import logging

import numpy as np
import pytest
import torch

from regard.app.server.app import STATIC, read_static
from regard.app.server.routes import lessons
from regard.models.encoders.words import split_words
from regard.translation.decoding.search import Beam
from tests.app.server.client import error
from tests.app.server.conftest import WORDS

SENTENCES = ["ein Hund bellt laut", "zwei Katzen schlafen", "eine Frau singt"]
HOSTILE = "</script><img src=x onerror=alert(1)>"
JSON = {"content-type": "application/json"}


def arrays(answer):
    """The arrays of an answer, as a browser would read them."""
    return [
        np.frombuffer(base64.b64decode(one["data"]), "<f4").reshape(one["shape"]) for one in answer["arrays"]
    ]


def test_what_there_is(client):
    found = {one["name"]: one for one in client.get("/api/models")["models"]}
    assert list(found) == ["small", "plain", "recurrent", "bert", "static"]
    assert found["small"]["about"] == "transformer, 2 + 2 layers, 2 heads"
    assert (found["small"]["attends"], found["plain"]["attends"]) == (True, False)
    assert found["small"]["max_tokens"] == 40
    assert found["static"]["about"] == f"one vector for each of {len(WORDS)} words"
    health = client.get("/api/health")
    assert (health["models"], health["waiting"]) == (5, 0)


def test_translations_are_those_of_the_translator(client, registry):
    answer = client.post("/api/translate", model="small", sentences=SENTENCES, beam=3, n_best=2)
    expected = registry.translator("small").translate(SENTENCES, strategy=Beam(3, n_best=2))
    assert [one["text"] for one in answer["translations"]] == [one.text for one in expected]
    for found, one in zip(answer["translations"], expected, strict=True):
        assert found["source"] == one.source
        assert found["alternatives"][0]["text"] == one.alternatives[0].text
        assert found["alignment"] == one.alignment.to_dict()
    assert answer["view"] is None


@pytest.mark.parametrize("model", ["small", "recurrent"])
def test_every_attention_can_be_looked_at(model, client):
    answer = client.post("/api/translate", model=model, sentences=SENTENCES[:2], view=True)
    shown = answer["view"]
    inputs = shown["inputs"]
    assert len(inputs) == 2
    first = inputs[0]["layers"][0]
    assert first["kind"] == "words"
    (tile,) = arrays(client.post(f"/api/views/{shown['id']}/tile", layer=0))
    expected = np.array(answer["translations"][0]["alignment"]["weights"])
    assert np.abs(tile[0] - expected).max() < 1e-3
    for number, layer in enumerate(inputs[1]["layers"]):
        (tile,) = arrays(client.post(f"/api/views/{shown['id']}/tile", input=1, layer=number))
        texts = inputs[1]["texts"]
        sizes = [len(texts[layer[side]]["tokens"]) for side in ("queries", "keys")]
        assert tile.shape == (layer["heads"], *sizes)
        if layer["kind"] != "words":
            assert np.abs(tile.sum(-1) - 1).max() < 1e-4


def test_a_model_without_attention_translates_and_says_why_it_shows_nothing(client):
    answer = client.post("/api/translate", model="plain", sentences=["ein Hund"], view=True)
    assert answer["view"] is None
    (found,) = answer["translations"]
    assert found["alignment"] is None
    assert "no attention" in found["reason"]
    assert "no attention" in client.refused("/api/look", model="plain", texts=["ein Hund"])


def test_alignments_of_given_pairs(client, registry):
    pairs = [["ein Hund bellt", "a dog barks"], ["zwei Katzen", "two cats sleep"]]
    found = client.post("/api/align", model="small", pairs=pairs)["alignments"]
    expected = registry.translator("small").align([tuple(pair) for pair in pairs])
    assert found == [one.to_dict() for one in expected]


def test_vectors_of_words(client, registry):
    found = client.post("/api/embed", model="bert", sentences=["dogs bark", "trees"], layer=1)
    expected = registry.encoder("bert").embed(["dogs bark", "trees"])
    assert found["layer"] == 1
    assert [one["words"] for one in found["sentences"]] == [["dogs", "bark"], ["trees"]]
    assert np.allclose(found["sentences"][0]["vectors"], expected[0].vectors[1].numpy(), atol=1e-6)
    assert "layers 0 to 2" in client.refused("/api/embed", model="bert", sentences=["dogs"], layer=3)


def test_a_word_is_compared_by_all_encoders(client):
    asked = {"first": "dogs bark at trees", "second": "trees shed bark", "word": "bark"}
    bert, static = client.post("/api/compare", **asked)["comparisons"]
    assert static["similarities"] == pytest.approx([1])
    assert bert["similarities"][-1] < 1
    asked["word"] = ["dogs", "shed"]
    two = client.post("/api/compare", models=["static"], **asked)["comparisons"][0]
    assert two["words"] == ["dogs", "shed"]


def test_a_word_that_nobody_knows_is_told(client):
    told = client.refused("/api/compare", first="cats purr", second="cats sleep", word="cats")
    assert "does not know" in told


def test_what_a_word_attends_to(client):
    found = client.post("/api/attention", model="bert", sentence="dogs may bark", word="bark")["attention"]
    assert sum(one["weight"] for one in found) == pytest.approx(1, abs=1e-4)
    assert [one["word"] for one in found if one["word"] in WORDS] == ["dogs", "may", "bark"]
    asked = {"sentence": "dogs may bark", "word": "bark"}
    assert "does not attend" in client.refused("/api/attention", model="static", **asked)
    assert "encoder" in client.refused("/api/attention", model="small", **asked)


def test_texts_through_an_encoder(client):
    shown = client.post("/api/look", model="bert", texts=["dogs may bark", "trees shed bark in winter"])
    assert [len(one["layers"]) for one in shown["inputs"]] == [2, 2]
    assert client.get(f"/api/views/{shown['id']}") == shown
    heads = client.post(f"/api/views/{shown['id']}/heads", input=1, size=8)
    assert len(heads["facts"]["heads"]) == len(arrays(heads)[0]) == 2
    top = client.post(f"/api/views/{shown['id']}/topk", position=1, k=2)["facts"]
    assert len(top["positions"]) == 2
    assert top["weights"] == sorted(top["weights"], reverse=True)
    received = client.post(f"/api/views/{shown['id']}/received", bins=2)
    assert arrays(received)[0].shape == (2,)
    told = client.post(f"/api/views/{shown['id']}/numbers", head=1, query=1, key=2)["facts"]
    (tile,) = arrays(client.post(f"/api/views/{shown['id']}/tile", heads=[1]))
    assert told["weight"] == pytest.approx(float(tile[0, 1, 2]), abs=1e-6)
    score = told["scale"] * np.dot(told["query"], told["key"]) + told["bias"]
    assert np.exp(score - told["tau"]) == pytest.approx(told["weight"], rel=1e-4)


def test_an_expired_view_is_reported(client):
    assert "expired" in client.refused("/api/views/nothing/tile", status=404)
    assert "expired" in error(client.send("GET", "/api/views/nothing"), 404)


def test_questions_out_of_bounds_are_refused(client):
    shown = client.post("/api/look", model="bert", texts=["dogs bark"])
    at = f"/api/views/{shown['id']}"
    for question, asked in (
        ("tile", {"layer": 9}),
        ("tile", {"input": 1}),
        ("tile", {"rows": [0, 99]}),
        ("tile", {"rows": [2, 1]}),
        ("tile", {"heads": [7]}),
        ("tile", {"width": 100_000}),
        ("top", {"position": 99}),
        ("numbers", {"query": 0, "key": 77}),
    ):
        client.refused(f"{at}/{question}", **asked)


def test_a_long_text_needs_no_model(client):
    text = "the dog barks and the cat sleeps while the mouse eats cheese in the state . " * 20
    shown = client.post("/api/long", text=text)
    (one,) = shown["inputs"]
    words = [word.text for word in split_words(text)]
    assert one["texts"][0]["tokens"] == words
    (whole,) = arrays(client.post(f"/api/views/{shown['id']}/tile", height=len(words), width=len(words)))
    assert whole.shape == (1, len(words), len(words)) or whole.shape[1] == 256
    part = {"layer": 1, "rows": [5, 9], "columns": [0, len(words)], "width": 2048}
    (rows,) = arrays(client.post(f"/api/views/{shown['id']}/tile", **part))
    assert rows.shape == (8, 4, len(words))
    assert np.abs(rows.sum(-1) - 1).max() < 1e-4
    same = [place for place, word in enumerate(words) if word == words[5]]
    assert set(rows.mean(0)[0].argsort()[-len(same) :]) == set(same)  # a word is most like itself


def test_a_long_text_has_bounds(client):
    assert "2 to 40,000" in client.refused("/api/long", text="one")
    assert "2 to 40,000" in client.refused("/api/long", text="a b " * 20_001)
    assert "at most 40" in client.refused("/api/long", model="small", text="ein Hund " * 50)
    client.refused("/api/long", model="bert", text="dogs bark " * 50)


def test_pieces_times_beam_have_a_limit(client, monkeypatch):
    monkeypatch.setattr("regard.app.server.routes.views.MAX_TOKENS", 40)
    client.post("/api/translate", model="small", sentences=["ein Hund"], beam=1)
    told = client.refused("/api/translate", model="small", sentences=["ein Hund"] * 5, beam=5)
    assert "× beam 5" in told
    assert "limit is 40" in told


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"\xff\xfe", 400),
        (b'{"model":"small","sentences":["\xed\xa0\x80"]}', 400),
        (b'{"model":"small","sentences":["\\ud800"]}', 400),
        (b'{"model":"small","sentences":["a"],"beam":NaN}', 400),
        (b'{"model":"small","sentences":["a"],"beam":1e999}', 422),
        (b'{"model":"small","sentences":["a"],"beam":' + b"9" * 9999 + b"}", 422),
        (b'{"model":"small","sentences":["a"],"beam":2.5}', 422),
        (b'{"model":"small","sentences":["a"],"beam":0}', 422),
        (b'{"model":"small","sentences":["a"],"beam":2,"n_best":3}', 422),
        (b'{"model":"small","sentences":[]}', 422),
        (b'{"model":"small","sentences":[""]}', 422),
        (b'{"model":"small","sentences":"a"}', 422),
        (b'{"model":"small","sentences":[null]}', 422),
        (b'{"model":"small","sentences":["a"],"other":1}', 422),
        (b'{"model":"small"}', 422),
        (b'{"model":"../small","sentences":["a"]}', 404),
        (b'{"model":"bert","sentences":["a"]}', 422),
        (b"[]", 422),
        (b"[" * 100_000, 422),
        (b'{"a":' * 100_000, 422),
        (b'"' + b"a" * 900_000, 400),
    ],
)
def test_what_cannot_be_right_is_refused_with_a_sentence(body, status, client):
    told = error(client.send("POST", "/api/translate", content=body, headers=JSON), status)
    assert "Traceback" not in told
    assert len(told) < 700
    assert client.get("/api/health")["status"] == "ok"


def test_sixty_four_sentences_and_no_more(client):
    assert len(client.post("/api/translate", model="small", sentences=["a"] * 64)["translations"]) == 64
    client.refused("/api/translate", model="small", sentences=["a"] * 65)


@pytest.mark.parametrize("text", [HOSTILE, "\u202eabc\x00\x1b[31m", "🎉" * 50, "ﷺ", "a\u0301" * 30])
def test_markup_is_only_data(text, client):
    answer = client.send("POST", "/api/translate", json={"model": "small", "sentences": [text], "view": True})
    assert answer.status_code == 200
    assert answer.json()["translations"][0]["source"] == text
    assert answer.headers["content-type"] == "application/json"


def test_names_with_markup_are_only_data(client):
    told = client.refused("/api/translate", status=404, model=HOSTILE, sentences=["a"])
    assert HOSTILE in told
    assert "'small'" in told


def test_a_mistake_of_ours_is_logged_and_survived(client, monkeypatch, caplog):
    def broken(asked):
        raise KeyError("secret path /home")

    monkeypatch.setattr(lessons, "_table", broken)
    with caplog.at_level(logging.CRITICAL):
        told = client.refused("/api/lookup", status=500, query=[[1]], key=[[1]], value=[[1]])
    assert "secret" not in told
    monkeypatch.undo()
    client.post("/api/lookup", query=[[1]], key=[[1]], value=[[1]])


def test_a_mistake_of_ours_shows_where_it_was(client, monkeypatch, caplog):
    monkeypatch.setattr(lessons, "_table", lambda *_: 1 / 0)
    client.refused("/api/lookup", status=500, query=[[1]], key=[[1]], value=[[1]])
    assert "ZeroDivisionError" in caplog.text


def test_methods(client):
    assert client.send("HEAD", "/api/health").status_code == 200
    assert client.send("HEAD", "/api/health").content in (b"", client.send("GET", "/api/health").content)
    response = client.send("GET", "/api/translate")
    assert "Use POST" in error(response, 405)
    assert response.headers["allow"] == "POST"
    error(client.send("OPTIONS", "/api/translate"), 405)
    error(client.send("DELETE", "/api/models"), 405)
    error(client.send("GET", "/api/translate/"), 404)
    error(client.send("GET", "/nowhere"), 404)


def test_files_of_the_page(client):
    page = client.send("GET", "/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.content == (STATIC / "page" / "index.html").read_bytes()
    script = client.send("GET", "/static/attention/view.js")
    assert script.headers["content-type"] == "text/javascript; charset=utf-8"
    style = client.send("GET", "/static/attention/attention.css")
    assert style.headers["content-type"] == "text/css; charset=utf-8"


@pytest.mark.parametrize(
    "path",
    [
        "page/../../server/app.py",
        "../app/server/app.py",
        "page/%2e%2e/%2e%2e/server/app.py",
        "page//etc/passwd",
        "/etc/passwd",
        "page/..\\..\\x.js",
        "export.html",
        "alignments.html",
        "page",
        "page/",
        "",
        "page/.hidden.js",
        "page/index.html\x00.js",
        "page/nothing.js",
        pytest.param("page/" + "a" * 5000 + ".js", id="a long name"),
        pytest.param("page/" + "a/" * 5000 + "a.js", id="a long path"),
    ],
)
def test_no_other_files(path, client):
    assert read_static(path) is None
    assert client.send("GET", f"/static/{path}".replace("\x00", "%00")).status_code in (403, 404)


def test_links_out_of_the_page_are_not_followed(tmp_path, monkeypatch):
    (tmp_path / "static" / "page").mkdir(parents=True)
    (tmp_path / "secret.js").write_text("secret")
    (tmp_path / "static" / "page" / "inside.js").write_text("public")
    (tmp_path / "static" / "page" / "link.js").symlink_to(tmp_path / "secret.js")
    monkeypatch.setattr("regard.app.server.app.STATIC", tmp_path / "static")
    assert read_static("page/inside.js") == b"public"
    assert read_static("page/link.js") is None


def test_numbers_in_json_are_exact_enough(client):
    x = torch.tensor([[0.1, 0.2]], dtype=torch.float64)
    found = client.post("/api/lookup", query=x.tolist(), key=x.tolist(), value=x.tolist(), score="dot")
    assert found["scores"] == [[float(x[0] @ x[0])]]
    assert json.dumps(found)

"""The API: correct answers, and a clear message for every error."""

import numpy as np
import pytest

from regard.app.server.app import STATIC, STATIC_FOLDERS
from regard.app.server.registry import Registry
from regard.app.server.routes import lessons
from regard.app.server.security import CONTENT_SECURITY_POLICY
from regard.app.server.state import AppState
from regard.models.encoders.words import split_words
from regard.translation.decoding.strategies import Beam
from tests.app.server.client import Client, error
from tests.app.server.conftest import WORDS

SENTENCES = ["ein Hund bellt laut", "zwei Katzen schlafen", "eine Frau singt"]
HOSTILE = "</script><img src=x onerror=alert(1)>"
JSON = {"content-type": "application/json"}


def test_models_are_described(client):
    result = {item["name"]: item for item in client.get("/api/models")["models"]}
    assert list(result) == ["small", "plain", "recurrent", "bert", "static"]
    assert result["small"]["about"] == "transformer, 2 + 2 layers, 2 heads"
    assert (result["small"]["attends"], result["plain"]["attends"]) == (True, False)
    assert result["small"]["max_tokens"] == 40
    assert result["static"]["about"] == f"one vector for each of {len(WORDS)} words"
    health = client.get("/api/health")
    assert (health["models"], health["waiting"]) == (5, 0)


def test_translations_equal_the_translators(client, registry):
    answer = client.post("/api/translate", model="small", sentences=SENTENCES, beam=3, n_best=2)
    expected = registry.translator("small").translate(SENTENCES, strategy=Beam(3, n_best=2))
    assert [item["text"] for item in answer["translations"]] == [item.text for item in expected]
    for result, item in zip(answer["translations"], expected, strict=True):
        assert result["source"] == item.source
        assert result["alternatives"][0]["text"] == item.alternatives[0].text
        alignment, wanted = result["alignment"], item.alignment.to_dict()
        # torch's products may round differently at other addresses, and weights are rounded to four digits
        assert np.allclose(alignment.pop("weights"), wanted.pop("weights"), rtol=0, atol=1.5e-4)
        assert alignment == wanted
    assert answer["view"] is None


@pytest.mark.parametrize("model", ["small", "recurrent"])
def test_every_attention_layer_has_a_view(model, client):
    answer = client.post("/api/translate", model=model, sentences=SENTENCES[:2], view=True)
    shown = answer["view"]
    inputs = shown["inputs"]
    assert len(inputs) == 2
    first = inputs[0]["layers"][0]
    assert first["kind"] == "words"
    tile = client.post(f"/api/views/{shown['id']}/tile", layer=0)
    expected = np.array(answer["translations"][0]["alignment"]["weights"])
    assert np.abs(tile[0] - expected).max() < 1e-3
    for number, layer in enumerate(inputs[1]["layers"]):
        tile = client.post(f"/api/views/{shown['id']}/tile", input=1, layer=number)
        texts = inputs[1]["texts"]
        sizes = [len(texts[layer[side]]["tokens"]) for side in ("queries", "keys")]
        assert tile.shape == (layer["heads"], *sizes)
        if layer["kind"] != "words":
            assert np.abs(tile.sum(-1) - 1).max() < 1e-4


def test_a_model_without_attention_gives_a_reason(client):
    answer = client.post("/api/translate", model="plain", sentences=["ein Hund"], view=True)
    assert answer["view"] is None
    (result,) = answer["translations"]
    assert result["alignment"] is None
    assert "no attention" in result["reason"]
    assert "no attention" in client.refused("/api/look", model="plain", texts=["ein Hund"])


def test_the_warning_names_what_is_outside_the_training_data_once(one_thread):
    known = "in three hundred and thirty-five days"
    long = ", and ".join([known] * 8)  # longer than any sentence in the training data
    state = AppState(Registry.load(["dates"]))
    try:
        sentences = ["The weather", long, known]
        answer = Client(state).post("/api/translate", model="dates", sentences=sentences, view=True)
    finally:
        state.close()
    unknown, cut, usual = answer["translations"]
    assert "“weather” does not occur" in unknown["warning"]
    assert unknown["warning"].endswith("translation.")
    assert "weather" not in unknown["note"] + answer["view"]["inputs"][0]["note"]
    assert cut["warning"]
    assert "parts of up to" in cut["note"]
    assert cut["warning"].rstrip(".") not in cut["note"]
    assert usual["warning"] == ""


def test_alignments_and_word_vectors_equal_the_models(client, registry):
    pairs = [["ein Hund bellt", "a dog barks"], ["zwei Katzen", "two cats sleep"]]
    result = client.post("/api/align", model="small", pairs=pairs)["alignments"]
    expected = registry.translator("small").align([tuple(pair) for pair in pairs])
    assert result == [item.to_dict() for item in expected]
    result = client.post("/api/embed", model="bert", sentences=["dogs bark", "trees"], layer=1)
    expected = registry.encoder("bert").embed(["dogs bark", "trees"])
    assert result["layer"] == 1
    assert [item["words"] for item in result["sentences"]] == [["dogs", "bark"], ["trees"]]
    assert np.allclose(result["sentences"][0]["vectors"], expected[0].vectors[1].numpy(), atol=1e-6)
    assert "layers 0 to 2" in client.refused("/api/embed", model="bert", sentences=["dogs"], layer=3)


def test_all_encoders_compare_a_word(client):
    payload = {"first": "dogs bark at trees", "second": "trees shed bark", "word": "bark"}
    bert, static = client.post("/api/compare", **payload)["comparisons"]
    assert static["similarities"] == pytest.approx([1])
    assert bert["similarities"][-1] < 1
    payload["word"] = ["dogs", "shed"]
    (two,) = client.post("/api/compare", models=["static", "static"], **payload)["comparisons"]
    assert two["words"] == ["dogs", "shed"]
    message = client.refused("/api/compare", first="cats purr", second="cats sleep", word="cats")
    assert "does not know" in message


def test_attention_of_a_word(client):
    result = client.post("/api/attention", model="bert", sentence="dogs may bark", word="bark")["attention"]
    assert sum(item["weight"] for item in result) == pytest.approx(1, abs=1e-4)
    assert [item["word"] for item in result if item["word"] in WORDS] == ["dogs", "may", "bark"]
    payload = {"sentence": "dogs may bark", "word": "bark"}
    assert "has no attention" in client.refused("/api/attention", model="static", **payload)
    assert "encoder" in client.refused("/api/attention", model="small", **payload)


def test_views_of_an_encoder(client):
    shown = client.post("/api/look", model="bert", texts=["dogs may bark", "trees shed bark in winter"])
    assert [len(item["layers"]) for item in shown["inputs"]] == [2, 2]
    view = f"/api/views/{shown['id']}"
    assert shown.pop("first")["layer"] in (0, 1)
    assert client.get(view) == shown
    assert len(client.post(f"{view}/heads", input=1)["heads"]) == 2
    top = client.post(f"{view}/topk", position=1, k=2)
    assert len(top["positions"]) == 2
    assert top["weights"] == sorted(top["weights"], reverse=True)
    assert len(client.post(f"{view}/received", bins=2)["bins"]) == 2
    steps = client.post(f"{view}/numbers", head=1, query=1, key=2)
    tile = client.post(f"{view}/tile", heads=[1])
    assert steps["weight"] == pytest.approx(float(tile[0, 1, 2]), abs=1e-6)
    score = steps["scale"] * np.dot(steps["query"], steps["key"]) + steps["bias"]
    assert np.exp(score - steps["tau"]) == pytest.approx(steps["weight"], rel=1e-4)


def test_an_expired_view_is_reported(client):
    assert "expired" in client.refused("/api/views/nothing/tile", status=404)
    assert "expired" in error(client.send("GET", "/api/views/nothing"), 404)


def test_questions_out_of_bounds_are_refused(client):
    view = client.post("/api/look", model="bert", texts=["dogs bark"])["id"]
    for question, payload in (
        ("tile", {"layer": 9}),
        ("tile", {"input": 1}),
        ("tile", {"rows": [0, 99]}),
        ("tile", {"rows": [2, 1]}),
        ("tile", {"heads": [7]}),
        ("tile", {"width": 100_000}),
        ("topk", {"position": 99}),
        ("numbers", {"query": 0, "key": 77}),
    ):
        client.refused(f"/api/views/{view}/{question}", **payload)


def test_a_long_text_needs_no_model(client):
    text = "the dog barks and the cat sleeps while the mouse eats cheese in the state . " * 20
    shown = client.post("/api/long", text=text)
    (item,) = shown["inputs"]
    words = [word.text for word in split_words(text)]
    assert item["texts"][0]["tokens"] == words
    whole = client.post(f"/api/views/{shown['id']}/tile", height=len(words), width=len(words))
    assert whole.shape == (1, len(words), len(words)) or whole.shape[1] == 256
    part = {"layer": 1, "rows": [5, 9], "columns": [0, len(words)], "width": 2048}
    rows = client.post(f"/api/views/{shown['id']}/tile", **part)
    assert rows.shape == (8, 4, len(words))
    assert np.abs(rows.sum(-1) - 1).max() < 1e-4
    same = [place for place, word in enumerate(words) if word == words[5]]
    assert set(rows.mean(0)[0].argsort()[-len(same) :]) == set(same)  # a word is most similar to itself


def test_the_stories_model_reads_a_long_text(client):
    text = client.post("/api/long/sample", words=200)["text"]
    shown = client.post("/api/long", model="stories", text=text)
    (item,) = shown["inputs"]
    assert [layer["label"] for layer in item["layers"]] == ["layer 0", "layer 1", "layer 2"]
    part = {"layer": 1, "rows": [5, 9], "columns": [0, len(item["texts"][0]["tokens"])], "width": 2048}
    rows = client.post(f"/api/views/{shown['id']}/tile", **part)
    assert np.abs(rows.sum(-1) - 1).max() < 1e-4
    layer, head, query, key, weight = (
        shown["first"][name] for name in ("layer", "head", "query", "key", "weight")
    )
    cell = {"layer": layer, "rows": [query, query + 1], "columns": [key, key + 1], "heads": [head]}
    assert client.post(f"/api/views/{shown['id']}/tile", **cell).item() == pytest.approx(weight, abs=1e-4)
    assert "'algebra'" in client.refused("/api/long", model="stories", text="Tom had algebra.")


def test_long_texts_are_limited(client):
    assert "2 to 40,000" in client.refused("/api/long", text="one")
    assert "2 to 40,000" in client.refused("/api/long", text="a b " * 20_001)
    assert "at most 40" in client.refused("/api/long", model="small", text="ein Hund " * 50)
    client.refused("/api/long", model="bert", text="dogs bark " * 50)


def test_sentences_and_tokens_times_beam_are_limited(client, monkeypatch):
    assert len(client.post("/api/translate", model="small", sentences=["a"] * 64)["translations"]) == 64
    client.refused("/api/translate", model="small", sentences=["a"] * 65)
    monkeypatch.setattr("regard.app.server.routes.views.MAX_TOKENS", 40)
    client.post("/api/translate", model="small", sentences=["ein Hund"], beam=1)
    message = client.refused("/api/translate", model="small", sentences=["ein Hund"] * 5, beam=5)
    assert "× beam 5" in message
    assert "limit is 40" in message


def body(sentences='["a"]', more="", model="small") -> bytes:
    return f'{{"model":"{model}","sentences":{sentences}{more}}}'.encode()


@pytest.mark.parametrize(
    ("status", "bodies"),
    [
        (400, [b"", b"{", b"\xff\xfe", b'"' + b"a" * 900_000, body(more=',"beam":NaN'), body('["\\ud800"]')]),
        (400, [body().replace(b'"a"', b'"\xed\xa0\x80"')]),
        (404, [body(model="../small")]),
        (422, [b"[]", b"[" * 100_000, b'{"a":' * 100_000, b'{"model":"small"}', body(model="bert")]),
        (422, [body(text) for text in ("[]", '[""]', '"a"', "[null]")]),
        (422, [body(more=f',"beam":{beam}') for beam in ("1e999", "9" * 9999, "2.5", "0", '2,"n_best":3')]),
        (422, [body(more=',"other":1')]),
    ],
    ids=range(7),
)
def test_invalid_requests_are_refused_with_a_message(status, bodies, client):
    for content in bodies:
        message = error(client.send("POST", "/api/translate", content=content, headers=JSON), status)
        assert "Traceback" not in message
        assert len(message) < 700
    assert client.get("/api/health")["status"] == "ok"


@pytest.mark.parametrize("text", [HOSTILE, "\u202eabc\x00\x1b[31m", "🎉" * 50, "ﷺ", "a\u0301" * 30])
def test_markup_is_returned_as_data(text, client):
    answer = client.send("POST", "/api/translate", json={"model": "small", "sentences": [text], "view": True})
    assert answer.status_code == 200
    assert answer.json()["translations"][0]["source"] == text
    assert answer.headers["content-type"] == "application/json"
    message = client.refused("/api/translate", status=404, model=text, sentences=["a"])
    assert repr(text) in message
    assert "'small'" in message


def test_internal_errors_are_logged_and_not_sent_to_the_client(client, monkeypatch, caplog):
    def broken(*_):
        raise KeyError("secret path /home")

    monkeypatch.setattr(lessons, "_table", broken)
    message = client.refused("/api/lookup", status=500, query=[[1]], key=[[1]], value=[[1]])
    assert "secret" not in message
    assert "Traceback" in caplog.text
    assert "KeyError: 'secret path /home'" in caplog.text
    monkeypatch.undo()
    client.post("/api/lookup", query=[[1]], key=[[1]], value=[[1]])


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


SECRET = [
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
    "page/.hidden.js",
    "page/nothing.js",
    "page/index.html%00.js",
]


@pytest.mark.parametrize(
    "path", ["", *SECRET, "page/" + "a" * 5000 + ".js", "page/" + "a/" * 5000 + "a.js"], ids=str.__len__
)
def test_other_files_are_not_served(path, client):
    assert client.send("GET", f"/static/{path}").status_code in (403, 404)


def test_symlinks_out_of_the_static_folder_are_not_followed(tmp_path, monkeypatch, state):
    for name in STATIC_FOLDERS:
        (tmp_path / "static" / name).mkdir(parents=True)
    (tmp_path / "secret.js").write_text("secret")
    (tmp_path / "static" / "page" / "inside.js").write_text("public")
    (tmp_path / "static" / "page" / "link.js").symlink_to(tmp_path / "secret.js")
    monkeypatch.setattr("regard.app.server.app.STATIC", tmp_path / "static")
    client = Client(state)
    assert client.send("GET", "/static/page/inside.js").text == "public"
    error(client.send("GET", "/static/page/link.js"), 404)


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/", "html"), ("/static/page/page.js", "javascript"), ("/static/attention/attention.css", "css")],
)
def test_static_files_have_their_type_and_are_sent_again_only_if_changed(path, kind, client):
    first = client.send("GET", path)
    assert first.headers["content-type"] == f"text/{kind}; charset=utf-8"
    assert (
        first.content
        == (STATIC / (path.removeprefix("/static/").strip("/") or "page/index.html")).read_bytes()
    )
    assert first.headers["cache-control"] == "no-cache"
    again = client.send("GET", path, headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["content-security-policy"] == CONTENT_SECURITY_POLICY
    changed = client.send("GET", path, headers={"if-none-match": '"another"'})
    assert (changed.status_code, changed.content) == (200, first.content)


@pytest.mark.parametrize(
    ("failure", "status"),
    [(OSError(24, "Too many open files"), 500), (RuntimeError("can't start new thread"), 503)],
)
def test_a_file_that_cannot_be_read_is_an_error_response(failure, status, client, monkeypatch):
    def fail(*_):
        raise failure

    monkeypatch.setattr("starlette.staticfiles.StaticFiles.lookup_path", fail)
    error(client.send("GET", "/static/page/page.js"), status)

"""Requests to the application: every endpoint with random bodies, and hostile paths.

Every response is 2xx or 4xx, or 503 with Retry-After, and arrives within bounded time.
"""

import asyncio
import json
import logging
import os
import warnings
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

import torch

from regard.app.server.app import make_app
from regard.app.server.openapi import document
from regard.app.server.registry import Registry
from regard.app.server.state import AppState
from regard.models import BertEncoder, StaticEncoder, Vocabulary
from tests.fuzz.case import Case, Failure, deadline
from tests.translation.folders import write

SECONDS = 60.0
WORDS = ["dogs", "may", "bark", "at", "strangers", "trees", "shed", "in", "winter", "."]
TEXTS = (
    "dogs bark at trees",
    "ein Hund bellt laut",
    "trees",
    "a",
    "",
    " ",
    "\0",
    "\u202e",
    "é",
    "dogs " * 300,
    "😀",
)
Headers = list[tuple[bytes, bytes]]
_DOCUMENT = document()
_state: dict[str, Any] = {}


class Answer(NamedTuple):
    """The response of the server."""

    status: int
    headers: dict[bytes, bytes]
    body: bytes


def prepare(shared: Path) -> None:
    """Create small models with random weights, and the application."""
    logging.getLogger("regard.look").setLevel(logging.CRITICAL)
    warnings.simplefilter("ignore")
    names = [shared / name for name in ("transformer", "plain", "recurrent")]
    for folder in names:
        if not folder.is_dir():
            write(folder, folder.name)
    registry = Registry.load(map(os.fspath, names))
    torch.manual_seed(0)
    vocabulary = Vocabulary(WORDS, special_tokens=("<unk>", "<s>", "</s>", "<mask>"))
    bert = BertEncoder(vocabulary, 16, 2, heads=2, max_positions=40).eval()
    static = StaticEncoder(WORDS, torch.randn(len(WORDS), 4))
    registry.entries.update(Registry({"bert": bert, "static": static}).entries)
    state = AppState(registry)
    _state.update(app_state=state, app=make_app(state))


def run(case: Case) -> None:
    """Send a few requests; later ones may refer to objects that earlier ones created."""
    ids: list[str] = []
    if case.chance(0.005):
        _long(case, ids)
        return
    for _ in range(case.random.choice((1, 2, 4))):
        _answer(case, ids, *(_hostile(case) if case.chance(0.25) else _request(case, ids)))


def _answer(case: Case, ids: list[str], method: str, path: str, headers: Headers, body: bytes) -> None:
    case.note(f"{method} {path[:100]!r} ({len(path)}) {body[:200]!r} ({len(body)})")
    with deadline(SECONDS, f"the answer to {method} {_pattern(path)}"):
        answer = asyncio.run(ask(method, path, headers, body))
    _check(method, path, answer)
    if answer.status == 200:
        _remember(answer.body, ids)


def _long(case: Case, ids: list[str]) -> None:
    """Send a long text, and request the largest tiles that the schema allows."""
    asked = {"text": " ".join(f"w{i % 500}" for i in range(case.random.choice((1000, 4000))))}
    body = json.dumps(asked).encode()
    _answer(case, ids, "POST", "/api/long", _headers(body), body)
    for name, size in (("tile", {"height": 2048, "width": 2048, "mean": True}), ("heads", {"size": 512})):
        body = json.dumps(size).encode()
        if ids:
            _answer(case, ids, "POST", f"/api/views/{ids[0]}/{name}", _headers(body), body)


def _check(method: str, path: str, answer: Answer) -> None:
    fine = 200 <= answer.status < 500 or (answer.status == 503 and b"retry-after" in answer.headers)
    if not fine:
        raise Failure(f"{method} {_pattern(path)} is answered with {answer.status}", f"{answer.body[:300]!r}")


def _pattern(path: str) -> str:
    """Return the first segments of a path, excluding names and the query string."""
    return "/".join(path.partition("?")[0].split("/")[:3])[:40]


def _remember(body: bytes, ids: list[str]) -> None:
    """Collect all ids in a response."""

    def search(content: Any) -> None:
        if isinstance(content, dict):
            for key, value in content.items():
                if key == "id" and isinstance(value, str):
                    ids.append(value)
                search(value)
        elif isinstance(content, list):
            for value in content[:20]:
                search(value)

    if body[:1] in (b"{", b"["):
        search(json.loads(body))


async def ask(method: str, path: str, headers: Headers, body: bytes) -> Answer:
    """Send a request to the application directly: no client library corrects it."""
    raw, _, query = path.partition("?")
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": unquote(raw),
        "raw_path": raw.encode("utf-8", "replace"),
        "query_string": query.encode("utf-8", "replace"),
        "root_path": "",
        "headers": headers,
        "client": ("127.0.0.1", 50000),
        "server": ("127.0.0.1", 8000),
    }
    chunks = [body[i : i + 65536] for i in range(0, len(body), 65536)] or [b""]
    answer: dict[str, Any] = {"status": 0, "headers": {}, "body": b""}
    finished = asyncio.Event()

    async def receive() -> dict[str, Any]:
        if chunks:
            return {"type": "http.request", "body": chunks.pop(0), "more_body": bool(chunks)}
        await finished.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            answer.update(status=message["status"], headers=dict(message["headers"]))
        else:
            answer["body"] += message.get("body", b"")
            if not message.get("more_body"):
                finished.set()

    try:
        await _state["app"](scope, receive, send)
    except Exception as error:  # a server would answer 500
        return Answer(500, {}, repr(error).encode())
    return Answer(answer["status"], answer["headers"], answer["body"])


# Requests that match the schema


def _request(case: Case, ids: list[str]) -> tuple[str, str, Headers, bytes]:
    paths = _DOCUMENT["paths"]
    path = case.random.choice(list(paths))
    if ids and case.chance(0.7):
        path = case.random.choice([one for one in paths if "views" in one])
    method, operation = case.random.choice(list(paths[path].items()))
    for parameter in operation.get("parameters", ()):
        if parameter["in"] == "path":
            known = ids if parameter["name"] == "id" else ["transformer", "x"]
            text = case.random.choice(known) if known and case.chance(0.9) else _text(case)
            path = path.replace("{" + parameter["name"] + "}", quote(text or "x", safe=""))
        elif case.chance(0.7):
            value = _value(case, parameter["schema"])
            path += ("&" if "?" in path else "?") + f"{parameter['name']}={quote(str(value))}"
    body = b""
    if "requestBody" in operation:
        content = _value(case, operation["requestBody"]["content"]["application/json"]["schema"])
        if isinstance(content, dict) and "text" in content and case.chance(0.1):
            content["text"] = "dogs bark at strangers " * case.random.choice((100, 1000))
        body = json.dumps(content).encode()
    return method.upper(), path, _headers(body), body


def _headers(body: bytes) -> Headers:
    return [
        (b"host", b"127.0.0.1:8000"),
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]


def _value(case: Case, schema: dict[str, Any]) -> Any:
    """Return a value that usually matches a schema."""
    random = case.random
    if case.chance(0.02):
        return random.choice((None, -1, 2**70, 1.5, "x", [], {}, True, [[[]]], "\0"))
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return _value(case, _DOCUMENT["components"]["schemas"][name])
    if "anyOf" in schema:
        return _value(case, random.choice(schema["anyOf"]))
    if "enum" in schema:
        return random.choice(schema["enum"])
    match schema.get("type"):
        case "object":
            required = schema.get("required", ())
            found = {
                name: _name(case) if name in ("model",) else _value(case, field)
                for name, field in schema.get("properties", {}).items()
                if name in required or case.chance(0.5)
            }
            if "models" in found and isinstance(found["models"], list):
                found["models"] = [_name(case)]
            return found
        case "array":
            least, most = schema.get("minItems", 0), schema.get("maxItems", 4)
            return [
                _value(case, schema.get("items", {}))
                for _ in range(random.randint(least, min(most, least + 3)))
            ]
        case "string":
            return _text(case)
        case "integer":
            low, high = schema.get("minimum", -5), schema.get("maximum", 10)
            return random.choice((low, high, *(min(max(n, low), high) for n in (0, 1, 2, 3, 5))))
        case "number":
            return random.choice(
                (0.0, 1.0, -2.5, 1e-3, schema.get("maximum", 1e6), schema.get("minimum", -1.0))
            )
        case "boolean":
            return case.chance(0.5)
    return None


def _name(case: Case) -> str:
    return case.random.choice([*_state["app_state"].registry.entries, "words", "words", "nothing"])


def _text(case: Case) -> str:
    return case.random.choice(TEXTS[:4]) if case.chance(0.8) else case.random.choice(TEXTS)


# Requests outside the schema

PARTS = (
    *("static", "static", "page", "attention", "api", "views", "training", "main.js", "index.html", "etc"),
    *(
        "..",
        "%2e%2e",
        "%2f",
        ".",
        "%00",
        "%ff%fe",
        "x.js%00",
        "é",
        "\\",
        "~",
        "",
        "a" * 5000,
        "a" * 5000 + ".js",
    ),
)
BODIES = (
    *(b"", b"{", b"[" * 100_000, b"null", b"\xff\xfe", b'{"model": NaN}', b'{"a":1e999}', b"1" * 5000),
    *(b'"\\ud800"', b'{"a":' * 5000 + b"1" + b"}" * 5000, b"x" * 5_000_000),
    b'{"model": "words", "text": "' + b"a " * 200_000 + b'"}',
)
METHODS = ("GET", "GET", "GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "TRACE", "X" * 100)
QUERIES = ("after=x", "a" * 5000, "%", "&&&=", "kind=%00", "length=" + "9" * 5000)
HEADERS = (
    *(
        (b"host", b"evil.example"),
        (b"host", b""),
        (b"content-type", b"text/plain"),
        (b"content-length", b"-1"),
    ),
    *((b"content-length", b"9" * 30), (b"origin", b"http://evil.example"), (b"origin", b"\xff")),
    *((b"accept-encoding", b"a" * 5000), (b"if-none-match", b"*"), (b"range", b"bytes=0-" + b"9" * 20)),
)


def _hostile(case: Case) -> tuple[str, str, Headers, bytes]:
    random = case.random
    method = random.choice(METHODS)
    if case.chance(0.3):
        path = random.choice(list(_DOCUMENT["paths"])).replace("{", "%7B").replace("}", "%7D")
    else:
        path = "/" + "/".join(random.choice(PARTS) for _ in range(random.randint(0, 4)))
    if case.chance(0.3):
        path = f"/static/{random.choice(('page', 'attention'))}/" + random.choice(PARTS)
    if case.chance(0.2):
        path += "?" + random.choice(QUERIES)
    body = random.choice(BODIES) if method not in ("GET", "HEAD") or case.chance(0.1) else b""
    headers = _headers(body)
    for _ in range(random.choice((0, 0, 1, 2))):
        name, value = random.choice(HEADERS)
        headers = [*(header for header in headers if header[0] != name), (name, value)]
    return method, path, headers, body

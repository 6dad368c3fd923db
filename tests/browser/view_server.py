"""View models for the browser tests: embedded ones, and a server with 32,768 tokens."""

import base64
import http.server
import json
from pathlib import Path

import numpy as np

import regard
from regard.app.protocol import encode_array

STATIC = Path(regard.__file__).parent / "app" / "static"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src "
    "'self'; base-uri 'none'; form-action 'none'"
)
HTML = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>view</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">
<link rel="stylesheet" href="/attention/attention.css"></head>
<body><main id="view"></main><script type="module" src="/open.js"></script></body></html>"""
SCRIPT = """import { embedded, http } from "/attention/sources.js";
import { mount } from "/attention/view.js";
window.show = async (name, options) => {
  const source = name ? embedded(await (await fetch(`/${name}`)).json()) : http("/long");
  window.shown?.destroy();
  window.shown = mount(document.getElementById("view"), source, options);
};
"""
WIDGET = """import { embedded } from "/attention/sources.js";
import widget from "/attention/widget.js";
const data = await (await fetch("/small")).json();
const source = embedded(data);
let receive = null;
const model = {
  get: (name) => ({ view: data.view, options: { view: "lines", heads: [2] } })[name],
  on: (_, callback) => { receive = callback; },
  off: () => { receive = null; },
  async send({ id, question, arguments: asked }) {
    if (question === "heads") return receive({ id, error: "the kernel is gone" }, []);
    const answer = await source.ask(question, asked);
    if (question !== "tile") return receive({ id, answer }, []);
    const parts = [new Uint8Array(1), new Uint32Array(answer.shape), answer.data];
    const bytes = await new Blob(parts).arrayBuffer();
    return receive({ id }, [new DataView(bytes, 1)]); // not at a multiple of four
  },
};
window.end = widget.render({ model, el: document.getElementById("view") });
"""
EVIL = "</script><img src=x onerror=alert(1)>"
LONG = 32768


def pack(array):
    array = np.ascontiguousarray(array, dtype="<f4")
    return {"shape": list(array.shape), "data": base64.b64encode(array.tobytes()).decode()}


def made(heads, queries, keys, *, causal=False, vectors=True, width=8, seed=0):
    """Return a layer of softmax attention in the form embedded in a page."""
    rng = np.random.default_rng(seed)
    query, key = rng.normal(size=(heads, queries, width)), rng.normal(size=(heads, keys, width))
    scores = query @ key.transpose(0, 2, 1) * width**-0.5
    if causal:
        scores = np.where(np.tril(np.ones((queries, keys), bool)), scores, -np.inf)
    tau = np.log(np.exp(scores).sum(-1))
    labels = [{"head": head, "label": "broad", "measures": {"first": head / heads}} for head in range(heads)]
    return {
        "weights": pack(np.exp(scores - tau[..., None])),
        "pooled": False,
        "heads": labels,
        "query": pack(query) if vectors else None,
        "key": pack(key) if vectors else None,
        "scale": width**-0.5,
        "normalizer": "Softmax",
        "formula": "exp(score − τ)",
        "tau": pack(tau),
    }


def text(*tokens, special=()):
    return {"tokens": list(tokens), "special": list(special)}


def layer_info(label, kind, heads, queries, keys, vectors):
    info = {"name": label, "label": label, "kind": kind, "heads": heads, "vectors": vectors}
    return info | {"queries": queries, "keys": keys}


def view_data(*inputs, title=""):
    """Return data to embed; an input is (title, texts, [(label, kind, heads, queries, keys, options)])."""
    described, stored = [], []
    for name, texts, layers in inputs:
        sizes = [len(item["tokens"]) for item in texts]
        held = [
            made(h, sizes[q], sizes[k], seed=n, **extra) for n, (_, _, h, q, k, extra) in enumerate(layers)
        ]
        message = [layer_info(*layer, vectors=extra.get("vectors", True)) for *layer, extra in layers]
        described.append({"title": name, "note": "", "texts": texts, "layers": message})
        stored.append({"layers": held})
    return {"view": {"title": title, "inputs": described}, "inputs": stored}


CAT = text(
    "[CLS]", "the", "cat", "sat", "on", "the", "mat", "be", "##cause", "it", "was", "[SEP]", special=(0, 11)
)
SMALL = view_data(("The cat", [CAT], [(f"layer {n}", "self", 8, 0, 0, {}) for n in range(4)]))
DOGS = [text("Der", "Hund", "bellt", "."), text("The", "dog", "barks", ".", "now")]
SEVERAL = view_data(
    (
        "Der Hund bellt.",
        DOGS,
        [("words", "words", 1, 1, 0, {"vectors": False}), ("cross 1", "cross", 4, 1, 0, {})],
    ),
    ("Tee", [text("Tee"), text("tea")], [("words", "words", 1, 1, 0, {}), ("cross 1", "cross", 4, 1, 0, {})]),
    (EVIL, [text(EVIL, "\n", "", "שלום", "a" * 70)], [(EVIL, "self", 2, 0, 0, {"causal": True})]),
    ("nothing", [text()], []),
)
DATA = {"small": SMALL, "several": SEVERAL, "none": {"view": {"title": "", "inputs": []}, "inputs": []}}


class Handler(http.server.BaseHTTPRequestHandler):
    def __init__(self, counts, *rest):
        self.counts = counts
        super().__init__(*rest)

    def log_message(self, *_):
        pass

    def send(self, body, kind, cache="no-store"):
        body = body if isinstance(body, bytes) else body.encode()
        self.send_response(200)
        headers = {"Content-Type": kind, "Content-Security-Policy": POLICY, "Cache-Control": cache}
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        name = self.path.partition("?")[0].strip("/")
        if name in DATA:
            return self.send(json.dumps(DATA[name]), "application/json")
        if name == "long":
            layer = layer_info("layer 0", "self", 2, 0, 0, vectors=False)
            tokens = [f"w{place}" for place in range(LONG)]
            given = {"title": "long", "note": "", "texts": [text(*tokens)], "layers": [layer]}
            return self.send(json.dumps({"title": "", "inputs": [given]}), "application/json")
        if name.startswith(("attention/", "shared/")):
            path = STATIC / name
            kind = "text/css" if path.suffix == ".css" else "text/javascript"
            return self.send(path.read_bytes(), kind, "max-age=3600")
        if name in ("open.js", "widget.js"):
            return self.send(SCRIPT if name == "open.js" else WIDGET, "text/javascript")
        return self.send(
            HTML.replace("open.js", "widget.js") if self.path.endswith("?widget") else HTML, "text/html"
        )

    def do_POST(self):
        payload = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        question = self.path.rpartition("/")[2]
        self.counts[question] += 1
        if self.counts["broken"]:
            self.send_error(503)
            return
        result = answer(question, payload)
        if isinstance(result, dict):
            self.send(json.dumps(result), "application/json")
        else:
            self.send(encode_array(result), "application/octet-stream")


def answer(question, payload):
    """Answer requests about a long text in which every token attends to the token 1000 positions back."""
    if question == "tile":
        (top, bottom), (left, right) = payload["rows"], payload["columns"]
        rows = np.linspace(top, bottom, payload["height"], endpoint=False)
        columns = np.linspace(left, right, payload["width"], endpoint=False)
        near = np.abs(rows[:, None] - 1000 - columns[None]) < max((bottom - top) / payload["height"], 1)
        return np.where(near, 0.5, 1e-5)[None].repeat(1 if payload["mean"] else 2, 0)
    if question == "topk":
        step = -1000 if payload["side"] == "query" else 1000
        return {"positions": [payload["position"] + step], "weights": [0.5]}
    return {"positions": [20000, 7], "weights": [800.0, 30.0], "bins": [1.0] * payload["bins"]}

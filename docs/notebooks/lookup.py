import marimo

__generated_with = "0.25.2"
app = marimo.App(width="medium", app_title="From a dictionary to attention")


@app.cell(hide_code=True)
def _():
    import marimo as mo
    import matplotlib.pyplot as plt
    import torch

    import regard

    _style = mo.notebook_dir().parent / "assets" / "guide.mplstyle"
    if _style.exists():  # absent if the notebook was copied elsewhere
        plt.style.use(_style)
    return mo, plt, regard, torch


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    # From a dictionary to attention

    A dictionary answers a query that equals one of its keys. Attention answers any query: it compares the
    query with all keys, turns the scores into weights, and returns the weighted mean of the values.

    Here the keys are five vehicles, each a vector in the plane: left is land, right is water, up is fast. The
    values are their speeds. **Move the query.** The longer its arrow and the lower the temperature, the
    closer the result is to a single key.
    """)
    return


@app.cell(hide_code=True)
def _(mo):
    x = mo.ui.slider(-2, 2, step=0.1, value=1.3, label="query: land ↔ water", show_value=True)
    y = mo.ui.slider(-2, 2, step=0.1, value=0.3, label="query: slow ↔ fast", show_value=True)
    steps = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 100]
    temperature = mo.ui.slider(steps=steps, value=0.5, label="temperature", show_value=True)
    mo.hstack([x, y, temperature], justify="start", gap=2, wrap=True)
    return temperature, x, y


@app.cell
def _(regard, temperature, torch, x, y):
    speeds = {"bicycle": 20, "ship": 40, "car": 100, "train": 200, "plane": 900}  # km/h
    keys = torch.tensor([[-0.9, -0.9], [1.0, -0.5], [-1.0, -0.1], [-0.8, 0.6], [0.2, 1.0]])
    values = torch.tensor([[float(speed)] for speed in speeds.values()])
    query = torch.tensor([[float(x.value), float(y.value)]])

    normalize = regard.Softmax(temperature=temperature.value)
    output, weights = regard.attend(query, keys, values, score=regard.Dot(), normalize=normalize)
    return keys, output, query, speeds, weights


@app.cell(hide_code=True)
def _(keys, mo, output, plt, query, speeds, weights):
    figure, (plane, bars) = plt.subplots(1, 2, figsize=(9, 3.6), width_ratios=[1, 1.15])
    row = weights[0].tolist()
    _arrows = zip(speeds, keys, row, strict=True)
    for _name, _end, _weight in [*_arrows, ("query", query[0], None)]:
        _width = 2 if _weight is None else 1 + 4 * _weight
        _color = "#D55E00" if _weight is None else plt.get_cmap("cividis_r")(0.15 + 0.85 * _weight)
        _arrow = {"arrowstyle": "->", "color": _color, "lw": _width, "shrinkA": 0, "shrinkB": 0}
        plane.annotate("", _end.tolist(), (0, 0), arrowprops=_arrow)
        _beyond = _end + 0.28 * _end / _end.norm().clamp(min=1e-9)
        plane.text(
            *_beyond.tolist(),
            _name,
            ha="center",
            va="center",
            fontsize=9,
            color="#D55E00" if _weight is None else "#1b1f24",
        )
    plane.set(xlim=(-2.4, 2.4), ylim=(-2.4, 2.4), xlabel="land ↔ water", ylabel="slow ↔ fast")
    bars.barh(list(speeds), row)
    for _position, _weight in enumerate(row):
        bars.annotate(f"{_weight:.2f}", (_weight, _position), (4, -3), textcoords="offset points", fontsize=9)
    bars.set(xlim=(0, 1.12), xlabel="weight")
    bars.invert_yaxis()
    bars.grid(axis="y", visible=False)
    _pairs = zip(row, speeds.values(), strict=True)
    mixed = " + ".join(f"{_weight:.2f} · {speed}" for _weight, speed in _pairs)
    plt.close(figure)
    mo.vstack([mo.as_html(figure), mo.md(f"output = {mixed} = **{output.item():.0f} km/h**")])
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## Words as queries

    minilm maps every word to a vector of 384 numbers, and similar words get similar vectors. **Type some
    words** that are not in the dictionary, separated by spaces.
    """)
    return


@app.cell(hide_code=True)
def _(mo):
    word_queries = mo.ui.text("bike boat truck airliner tram banana", label="queries", full_width=True)
    sharpness = mo.ui.slider(
        steps=[0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 10], value=0.1, label="temperature", show_value=True
    )
    mo.hstack([word_queries, sharpness], widths=[2, 1], gap=2)
    return word_queries, sharpness


@app.cell(hide_code=True)
def _(regard, speeds, torch):
    encoder = regard.load_encoder("minilm")

    def vectors(words):
        """Vectors of single words from the last layer."""
        return torch.stack([embedded.vectors[-1].mean(0) for embedded in encoder.embed(list(words))])

    word_keys = vectors(speeds)
    word_values = torch.tensor([[float(speed)] for speed in speeds.values()])
    return vectors, word_keys, word_values


@app.cell
def _(word_queries, mo, regard, sharpness, vectors, word_keys, word_values):
    query_words = word_queries.value.split()[:12]
    mo.stop(not query_words, mo.md("*Type a word.*"))

    answers, word_weights = regard.attend(
        vectors(query_words),
        word_keys,
        word_values,
        score=regard.Cosine(),
        normalize=regard.Softmax(temperature=sharpness.value),
    )
    return answers, query_words, word_weights


@app.cell(hide_code=True)
def _(answers, query_words, mo, plt, regard, speeds, word_weights):
    drawn, _axes = plt.subplots(figsize=(7, 0.8 + 0.36 * len(query_words)))
    _pairs = zip(query_words, answers[:, 0].tolist(), strict=True)
    labels = [f"{word} → {speed:.0f} km/h" for word, speed in _pairs]
    regard.heatmap(_axes, word_weights, queries=labels, keys=list(speeds))
    plt.close(drawn)
    mo.as_html(drawn)
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    At which temperature is every answer the speed of one key, and at which temperature is every answer the
    mean, 252 km/h? What would you answer for *banana*?

    Chapter: `docs/path/from-a-dictionary-to-attention.md`.
    """)
    return


if __name__ == "__main__":
    app.run()

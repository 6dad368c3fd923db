import marimo

__generated_with = "0.25.2"
app = marimo.App(width="medium", app_title="Scores and normalizers")


@app.cell(hide_code=True)
def _():
    import marimo as mo
    import matplotlib.pyplot as plt
    import torch

    import regard

    _style = mo.notebook_dir().parent / "assets" / "guide.mplstyle"
    if _style.exists():  # absent if the notebook was copied elsewhere
        plt.style.use(_style)
    encoder = regard.load_encoder("minilm")
    return encoder, mo, plt, regard, torch


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    # Scores and normalizers

    minilm gives every word of a sentence a vector. A **score** compares the vectors of two words; a
    **normalizer** turns a row of scores into weights. Choose both, and see what a word attends to.

    - The dot product grows with the width d: increase it from 4 to 384, and the softmax puts all its weight
      on one word. The scaled dot product, divided by √d, does not have this problem.
    - Sparsemax and entmax give weights of exactly zero; softmax never does.
    - Softmax1 weights can sum to less than one, and sigmoid weights to more than one: see the sum of the row.
    """)
    return


@app.cell(hide_code=True)
def _(mo, regard):
    sentence = mo.ui.text(
        "The animal did not cross the street because it was too tired", label="sentence", full_width=True
    )
    scores = {
        "dot": regard.Dot(),
        "scaled dot": regard.ScaledDot(),
        "cosine, times 5": regard.Cosine(scale=5),
        "Gaussian, σ = 4": regard.Gaussian(sigma=4),
    }
    normalizers = {
        "hard": regard.Hard(),
        "sparsemax": regard.Sparsemax(),
        "entmax 1.5": regard.Entmax15(),
        "softmax": regard.Softmax(),
        "softmax1 (sink 2)": regard.Softmax1(score=2.0),
        "sigmoid": regard.Sigmoid(),
        "mean (1/n)": regard.Mean(),
    }
    score = mo.ui.dropdown(scores, value="scaled dot", label="score")
    normalize = mo.ui.dropdown(normalizers, value="softmax", label="normalizer")
    width = mo.ui.slider(steps=[4, 16, 64, 128, 256, 384], value=384, label="width d", show_value=True)
    mo.vstack([sentence])
    return normalize, normalizers, score, sentence, width


@app.cell(hide_code=True)
def _(encoder, mo, regard, sentence):
    try:
        (embedded,) = encoder.embed(sentence.value)
    except regard.ArgumentError as _error:  # no words or too many
        mo.stop(True, mo.callout(f"Type another sentence above: {_error}", kind="warn"))
    words = list(embedded.words)[:20]
    positions = {f"{position}: {word}": position for position, word in enumerate(words)}
    first = list(positions)[words.index("it") if "it" in words else 0]
    query_choice = mo.ui.dropdown(positions, value=first, label="query")
    return query_choice, embedded, words


@app.cell(hide_code=True)
def _(query_choice, mo, normalize, score, width):
    mo.hstack([query_choice, score, normalize, width], justify="start", gap=1.5, wrap=True)
    return


@app.cell
def _(query_choice, embedded, normalize, regard, score, width, words):
    x = embedded.vectors[-1, : len(words), : width.value]  # the last layer, its first d features
    _, weights = regard.attend(x, x, x, score=score.value, normalize=normalize.value)
    row, tau = weights[query_choice.value], weights.tau[query_choice.value].item()
    return row, tau, weights, x


@app.cell(hide_code=True)
def _(query_choice, mo, plt, regard, row, tau, weights, words):
    figure, (_bars, _map) = plt.subplots(1, 2, figsize=(10, 4.2), width_ratios=[1, 1.3])
    _colors = ["#D55E00" if position == query_choice.value else "#0072B2" for position in range(len(words))]
    _bars.barh(range(len(words)), row.tolist(), color=_colors)
    _bars.set_yticks(range(len(words)), words)
    _bars.set_xlabel(f"weight for “{words[query_choice.value]}”")
    _bars.set_xlim(min(0, row.min().item()), max(1, row.max().item()))
    _bars.invert_yaxis()
    _bars.grid(axis="y", visible=False)
    regard.heatmap(_map, weights, queries=words, keys=words)
    plt.close(figure)
    mo.vstack(
        [
            mo.as_html(figure),
            mo.hstack(
                [
                    mo.stat(f"{row.max():.2f}", label="largest weight"),
                    mo.stat(f"{row.sum():.2f}", label="sum of the row"),
                    mo.stat(str(int((row == 0).sum())), label="zero weights"),
                    mo.stat(f"{tau:.2f}", label="τ"),
                ],
                justify="start",
            ),
        ]
    )
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## The same row under every normalizer

    This heatmap uses the score, width and query chosen above. Chapter: `docs/path/scores-and-normalizers.md`.
    """)
    return


@app.cell(hide_code=True)
def _(query_choice, mo, normalizers, plt, regard, score, torch, words, x):
    query, kinds = x[[query_choice.value]], normalizers.values()
    rows = [regard.attend(query, x, x, score=score.value, normalize=kind)[1][0] for kind in kinds]
    drawn, _axes = plt.subplots(figsize=(10, 3.2))
    regard.heatmap(_axes, torch.stack(rows), queries=list(normalizers), keys=words)
    plt.close(drawn)
    mo.as_html(drawn)
    return


if __name__ == "__main__":
    app.run()

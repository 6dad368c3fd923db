import marimo

__generated_with = "0.25.2"
app = marimo.App(width="medium", app_title="Order")


@app.cell(hide_code=True)
def _():
    import marimo as mo
    import matplotlib.pyplot as plt
    import torch

    import regard
    from regard.models import Stack, TransformerConfig

    _style = mo.notebook_dir().parent / "assets" / "guide.mplstyle"
    if _style.exists():  # not if the notebook travels alone
        plt.style.use(_style)
    return TransformerConfig, Stack, mo, plt, regard, torch


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    # Order

    Attention reads a set. What it knows of the order of words, a position encoding has told it.

    **Choose an encoding.** All tokens below are the same token, so whatever differs between two weights is
    the work of the encoding alone, and of the mask if there is one.
    """)
    return


@app.cell(hide_code=True)
def _(mo):
    encoding = mo.ui.dropdown(
        ["none", "sinusoidal", "learned", "rotary", "alibi", "t5"], value="rotary", label="encoding"
    )
    length = mo.ui.slider(8, 96, step=4, value=40, label="tokens", show_value=True)
    sharpness = mo.ui.slider(steps=[1, 2, 4, 8, 16], value=4, label="scores times", show_value=True)
    causal = mo.ui.checkbox(value=False, label="causal mask")
    mo.hstack([encoding, length, sharpness, causal], justify="start", gap=2, wrap=True)
    return causal, encoding, length, sharpness


@app.cell
def _(TransformerConfig, causal, encoding, length, regard, sharpness, torch):
    torch.manual_seed(0)
    heads, width = 4, 64
    config = TransformerConfig(width=width, heads=heads, positions=encoding.value, max_positions=96)
    positions = config.make_positions(causal=causal.value)
    places = torch.arange(length.value)

    tokens = torch.ones(heads, length.value, width // heads) * sharpness.value**0.5
    bias = None
    if encoding.value in ("sinusoidal", "learned"):  # added to the embedding, which is left out here
        tokens = positions(places).unflatten(-1, (heads, -1)).transpose(0, 1) * sharpness.value**0.5
    elif encoding.value == "rotary":  # queries and keys are turned
        tokens = positions(places)(tokens)
    elif encoding.value in ("alibi", "t5"):  # added to the scores
        bias = positions
    mask = regard.Causal() if causal.value else None
    _, weights = regard.attend(tokens, tokens, tokens, bias=bias, mask=mask)
    return heads, weights


@app.cell(hide_code=True)
def _(encoding, heads, length, mo, plt, regard, weights):
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.8), width_ratios=[1, 1.2])
    regard.heatmap(left, weights[0], title="weights of head 0")
    query = length.value - 1
    scores = weights.scores()  # before mask; with the bias
    alike = bool((scores == scores[:1]).all())
    for head in range(1 if alike else heads):
        name = "all heads" if alike else f"head {head}"
        right.plot(range(-query, 1), scores[head, query].tolist(), label=name)
    right.set(xlabel="distance: key − query", ylabel="score", title="scores of the last query")
    right.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    plt.close(figure)
    told = {
        "none": "Without an encoding all keys are alike, near or far.",
        "sinusoidal": "Sines and cosines are added. Near positions have similar vectors; each head has "
        "its own wavelengths, so the first falls fast and the last hardly.",
        "learned": "Before training, learned positions are noise: they say nothing yet.",
        "rotary": "Queries and keys are turned. The score depends on the distance alone: every row of the "
        "map is the row above it, moved by one.",
        "alibi": "A straight line is added for each head, steep for the first and flat for the last.",
        "t5": "A number for each bucket of distances is added. Before training it is random, but one sees "
        "the buckets: single distances near the query, more and more of them far away.",
    }
    mo.vstack([mo.as_html(figure), mo.md(told[encoding.value])])
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## Shuffle the words

    The words of a sentence go through one block of a Transformer with the encoding chosen above, then
    the same words in another order. Each row is what came out for a word. **Shuffle**, and compare with
    `none`.
    """)
    return


@app.cell(hide_code=True)
def _(mo):
    text = mo.ui.text("the dog bites the man", label="sentence", full_width=True)
    shuffle = mo.ui.button(value=1, on_click=lambda seed: seed + 1, label="shuffle")
    mo.hstack([text, shuffle], widths=[3, 1], align="center")
    return shuffle, text


@app.cell
def _(TransformerConfig, Stack, encoding, mo, shuffle, text, torch):
    words = text.value.split()[:12]
    mo.stop(len(words) < 2, mo.md("*Type two words or more.*"))
    torch.manual_seed(0)
    table = {word: torch.randn(32) for word in sorted(set(words))}
    block = Stack(
        TransformerConfig(width=32, heads=4, layers=1, positions=encoding.value, dropout=0.0)
    ).eval()

    order = torch.randperm(len(words), generator=torch.Generator().manual_seed(shuffle.value))
    x = torch.stack([table[word] for word in words])
    with torch.no_grad():
        outputs, shuffled = block(x), block(x[order])
    return order, outputs, shuffled, words


@app.cell(hide_code=True)
def _(mo, order, outputs, plt, regard, shuffled, words):
    drawn, panels = plt.subplots(1, 3, figsize=(9, 0.9 + 0.34 * len(words)), sharey=False)
    back = order.argsort()  # where each word went
    difference = (shuffled[back] - outputs).abs()
    other = [words[i] for i in order]
    regard.heatmap(panels[0], outputs, queries=words, title="in order")
    regard.heatmap(panels[1], shuffled, queries=other, title="shuffled")
    panels[2].barh(range(len(words)), difference.mean(-1).tolist())
    panels[2].set(yticks=range(len(words)), yticklabels=words, xlim=(0, 1), title="change of each vector")
    panels[2].invert_yaxis()
    for _panel in panels[:2]:
        _panel.set_xlabel("feature")
    plt.close(drawn)
    same = difference.max() < 1e-4
    verdict = "the same vectors, in the new order" if same else "other vectors: the order counts"
    mo.vstack([mo.as_html(drawn), mo.md(f"After shuffling come out **{verdict}**.")])
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    The chapter *Order* of the guide trains a model with each encoding on short sequences, and asks it about
    long ones.
    """)
    return


if __name__ == "__main__":
    app.run()

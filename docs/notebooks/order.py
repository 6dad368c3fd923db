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
    if _style.exists():  # absent if the notebook was copied elsewhere
        plt.style.use(_style)
    return TransformerConfig, Stack, mo, plt, regard, torch


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    # Order

    Attention treats its input as a set. Word order comes from a position encoding.

    **Choose an encoding.** All tokens below are identical, so any difference between two weights comes from
    the encoding, or from the mask.
    """)
    return


@app.cell(hide_code=True)
def _(mo):
    encoding = mo.ui.dropdown(
        ["none", "sinusoidal", "learned", "rotary", "alibi", "t5"], value="rotary", label="encoding"
    )
    length = mo.ui.slider(8, 96, step=4, value=40, label="tokens", show_value=True)
    sharpness = mo.ui.slider(steps=[1, 2, 4, 8, 16], value=4, label="score scale", show_value=True)
    causal = mo.ui.checkbox(value=False, label="causal mask")
    mo.hstack([encoding, length, sharpness, causal], justify="start", gap=2, wrap=True)
    return causal, encoding, length, sharpness


@app.cell
def _(TransformerConfig, causal, encoding, length, regard, sharpness, torch):
    torch.manual_seed(0)
    heads, width = 4, 64
    config = TransformerConfig(width=width, heads=heads, positions=encoding.value, max_positions=96)
    positions = config.make_positions(causal=causal.value)
    indices = torch.arange(length.value)

    tokens = torch.ones(heads, length.value, width // heads) * sharpness.value**0.5
    bias = None
    if encoding.value in ("sinusoidal", "learned"):  # added to the embedding, which is omitted here
        tokens = positions(indices).unflatten(-1, (heads, -1)).transpose(0, 1) * sharpness.value**0.5
    elif encoding.value == "rotary":  # queries and keys are rotated
        tokens = positions(indices)(tokens)
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
    scores = weights.scores()  # with bias, before the mask
    equal = bool((scores == scores[:1]).all())
    for head in range(1 if equal else heads):
        name = "all heads" if equal else f"head {head}"
        right.plot(range(-query, 1), scores[head, query].tolist(), label=name)
    right.set(xlabel="distance: key − query", ylabel="score", title="scores of the last query")
    right.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    plt.close(figure)
    explanations = {
        "none": "Without an encoding, all keys have the same score, near or far.",
        "sinusoidal": "Adds sines and cosines. Nearby positions have similar vectors; each head has its own "
        "wavelengths, so the first falls quickly and the last slowly.",
        "learned": "Before training, learned positions are noise.",
        "rotary": "Rotates queries and keys. The score depends only on the distance: every row of the map is "
        "the row above it, shifted by one.",
        "alibi": "Adds a straight line per head, steep for the first and flat for the last.",
        "t5": "Adds one number per bucket of distances. Before training, the numbers are random, but the "
        "buckets are visible: single distances near the query, larger buckets far away.",
    }
    mo.vstack([mo.as_html(figure), mo.md(explanations[encoding.value])])
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    ## Shuffle the words

    One Transformer block with the encoding chosen above reads a sentence, then the same words in a different
    order. Each row is the output vector of a word. **Shuffle**, and compare with `none`.
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
    mo.stop(len(words) < 2, mo.md("*Type at least two words.*"))
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
    inverse = order.argsort()
    difference = (shuffled[inverse] - outputs).abs()
    shuffled_words = [words[i] for i in order]
    regard.heatmap(panels[0], outputs, queries=words, title="in order")
    regard.heatmap(panels[1], shuffled, queries=shuffled_words, title="shuffled")
    panels[2].barh(range(len(words)), difference.mean(-1).tolist())
    panels[2].set(yticks=range(len(words)), yticklabels=words, xlim=(0, 1), title="change in each vector")
    panels[2].invert_yaxis()
    for _panel in panels[:2]:
        _panel.set_xlabel("feature")
    plt.close(drawn)
    same = difference.max() < 1e-4
    verdict = "the same vectors in the new order" if same else "different vectors: the order matters"
    mo.vstack([mo.as_html(drawn), mo.md(f"Shuffling gives **{verdict}**.")])
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    The chapter *Order* trains a model with each encoding on short sequences and tests it on long ones.
    """)
    return


if __name__ == "__main__":
    app.run()

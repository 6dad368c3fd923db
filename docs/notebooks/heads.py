import marimo

__generated_with = "0.25.2"
app = marimo.App(width="medium", app_title="Heads")


@app.cell(hide_code=True)
def _():
    import marimo as mo
    import matplotlib.pyplot as plt
    import torch

    import regard
    from regard.app import AttentionWidget

    encoder = regard.load_encoder("minilm")
    return AttentionWidget, encoder, mo, plt, regard, torch


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    # Heads

    minilm is a BERT of 6 layers and 12 heads. Type a sentence, choose a head, and see what each token looks
    at. What the pictures tell, and what they do not, stands in the chapter *Looking inside* of the guide.
    """)
    return


@app.cell(hide_code=True)
def _(mo):
    sentence = mo.ui.text(
        "The animal did not cross the street because it was too tired.", label="Sentence", full_width=True
    )
    layer = mo.ui.slider(0, 5, value=3, label="Layer", show_value=True)
    head = mo.ui.slider(0, 11, value=1, label="Head", show_value=True)
    mo.vstack([sentence, mo.hstack([layer, head], justify="start", gap=2)])
    return head, layer, sentence


@app.cell(hide_code=True)
def _(encoder, mo, regard, sentence, torch):
    # the model reads the sentence once; its weights stay lazy
    try:
        words = encoder.tokens(sentence.value)
        with torch.no_grad(), regard.watch(encoder, tokens=words) as seen:
            encoder.embed(sentence.value)
    except regard.ArgumentError as _error:  # no words, or too many
        mo.stop(True, mo.callout(f"Type another sentence above: {_error}", kind="warn"))
    return seen, words


@app.cell(hide_code=True)
def _(head, layer, mo, plt, regard, seen, words):
    weights = seen[layer.value].heads(head.value)
    side = min(max(3.0, 0.3 * len(words)), 7.0)
    figure, axes = plt.subplots(figsize=(side + 0.6, side), layout="constrained")
    regard.heatmap(axes, weights, queries=words, keys=words, title=f"layer {layer.value}, head {head.value}")
    plt.close(figure)  # it is shown as a value
    best = weights.topk(1)
    strongest = sorted(
        zip(best.values[:, 0].tolist(), words, best.indices[:, 0].tolist(), strict=True), reverse=True
    )
    lines = "\n".join(f"- **{word}** → **{words[key]}** {value:.0%}" for value, word, key in strongest[:8])
    told = mo.vstack([mo.md("The strongest looks of this head:"), mo.md(lines)])
    mo.hstack([figure, told], justify="start", widths=[2, 1], gap=2)
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    ## All of it

    The same view as on regard's page: lines, matrix, all heads, and how a weight comes about, product by
    product.
    """)
    return


@app.cell(hide_code=True)
def _(AttentionWidget, head, layer, mo, seen):
    mo.ui.anywidget(AttentionWidget(seen, view="lines", layer=layer.value, heads=[head.value]))
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    ## A table of heads

    *entropy*: how spread its rows are, in nats. *distance*: how far it looks, in tokens. *first* and
    *previous*: the weight on the first token, and on the one before. Sort by a column, then choose above what
    you found.
    """)
    return


@app.cell(hide_code=True)
def _(mo, seen):
    table = [
        {
            "layer": number // 12,
            **{name: round(row[name], 2) for name in ("head", "entropy", "distance", "first", "previous")},
        }
        for number, row in enumerate(seen.heads(frame=False))
    ]
    mo.ui.table(table, selection=None, page_size=12)
    return


if __name__ == "__main__":
    app.run()

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

    minilm is a BERT with 6 layers of 12 heads. Type a sentence, choose a head, and see what each token
    attends to. The chapter *Looking inside* explains what these pictures show and what they do not show.
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
    except regard.ArgumentError as _error:  # no words or too many
        mo.stop(True, mo.callout(f"Type another sentence above: {_error}", kind="warn"))
    return seen, words


@app.cell(hide_code=True)
def _(head, layer, mo, plt, regard, seen, words):
    weights = seen[layer.value].heads(head.value)
    side = min(max(3.0, 0.3 * len(words)), 7.0)
    figure, axes = plt.subplots(figsize=(side + 0.6, side), layout="constrained")
    regard.heatmap(axes, weights, queries=words, keys=words, title=f"layer {layer.value}, head {head.value}")
    plt.close(figure)  # shown as the cell's value
    best = weights.topk(1)
    strongest = sorted(
        zip(best.values[:, 0].tolist(), words, best.indices[:, 0].tolist(), strict=True), reverse=True
    )
    lines = "\n".join(f"- **{word}** → **{words[key]}** {value:.0%}" for value, word, key in strongest[:8])
    links = mo.vstack([mo.md("Strongest links:"), mo.md(lines)])
    mo.hstack([figure, links], justify="start", widths=[2, 1], gap=2)
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    ## Interactive view

    The same view as on regard's page: lines, matrix, all heads, and the computation of a single weight.
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

    *entropy*: mean entropy of the rows, in nats. *distance*: mean distance between query and key, in tokens.
    *first* and *previous*: weight on the first and on the previous token. Sort by a column, then select a
    head above.
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

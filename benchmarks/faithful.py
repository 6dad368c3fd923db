"""Agreement of attention measures with true ablation.

Each head, token and edge is removed in turn from minilm (measuring the similarity of two sentences) and from
the stories language model (measuring the loss per token on unseen stories). The absolute change is compared
with the prediction of each attention measure. The table shows Spearman's rank correlation (1 means the same
order): its mean and standard error over texts.

    head    its output is set to zero (Michel et al. 2019)
    token   no other token may attend to it, in any layer: Block(keys=token)
    edge    one query may not attend to one key in one layer: Block(query, key) (Geva et al. 2023)

    python -m benchmarks.faithful
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import regard
from regard.app.stories.training import held_out_openings
from regard.inspection import value_zeroing

EDGES = 16  # removed edges per layer and text
PAIRS = (
    ("The cat sat on the mat because it was tired.", "A tired animal rested on a rug."),
    ("He opened a bank account before the journey.", "Before travelling, he went to the bank."),
    ("The river bank was flooded after the storm.", "Heavy rain made the river rise."),
    ("She plays the violin in a small orchestra.", "The musician performs with an ensemble."),
    ("The company raised its prices in the spring.", "Everything became more expensive in April."),
    ("My brother forgot his keys at the office.", "He left something at work."),
    ("The old bridge was closed for repairs.", "Cars could no longer cross the river there."),
    ("They planted an apple tree behind the house.", "There is a garden with fruit."),
)
LEVELS = ("head", "token", "edge")


@dataclass
class Task:
    """A model, one text, and the loss that is compared before and after each removal."""

    model: nn.Module
    batch: dict[str, Tensor] | Tensor
    loss: Callable[[], Tensor]
    tokens: int


def main() -> None:
    torch.set_num_threads(1)
    results: dict[tuple[str, str, str], list[float]] = {}  # measure, model and level: a value per text
    models = {"minilm": minilm, "language model": language_model}
    for model, tasks in models.items():
        for task in tasks():
            for level, measures in compare(task).items():
                for measure, value in measures.items():
                    results.setdefault((measure, model, level), []).append(value)
    columns = [(model, level) for model in models for level in LEVELS]
    print(f"| | {' | '.join(f'{model}: {level}s' for model, level in columns)} |")
    print("|---" * (len(columns) + 1) + "|")
    for measure in dict.fromkeys(measure for measure, *_ in results):
        cells = [_mean(results.get((measure, *column))) for column in columns]
        print(f"| {measure} | {' | '.join(cells)} |")


def _mean(values: list[float] | None) -> str:
    """Format the mean over texts and its standard error."""
    if not values:
        return ""
    x = torch.tensor(values)
    return f"{x.mean():.2f} ± {x.std() / len(values) ** 0.5:.2f}".replace("-", "−")


# Models


def minilm() -> list[Task]:
    encoder = regard.load_encoder("minilm")

    def task(text: str, other: str) -> Task:
        with torch.no_grad():
            ids, target = encoder.ids(text), encoder.states(encoder.ids(other))[-1][0].mean(0)

        def loss() -> Tensor:
            return -F.cosine_similarity(encoder.states(ids)[-1][0].mean(0), target, dim=0)

        return Task(encoder, ids, loss, ids.shape[-1])

    return [task(*pair) for pair in PAIRS]


def language_model() -> list[Task]:
    """Return the loss of the shipped language model on the first two sentences of unseen stories."""
    stories = regard.load_language_model("stories")

    def task(text: str) -> Task:
        ids = torch.tensor([stories.encode(text)])
        # the model reads all tokens but the last, which it predicts
        return Task(stories.model, ids[:, :-1], lambda: stories.model.loss(ids), ids.shape[-1] - 1)

    return [task(text) for text in islice(held_out_openings(100), 0, 80, 10)]


# Removal


def compare(task: Task) -> dict[str, dict[str, float]]:
    """Return the rank correlation of each measure with the change in the loss."""
    with regard.watch(task.model, gradients=True) as seen:
        task.loss().backward()
    task.model.zero_grad()
    with torch.no_grad():
        predicted = measures(task, seen)
        before = float(task.loss())
        removed = {
            "head": heads_removed(task, seen, before),
            "token": tokens_removed(task, before),
        }
        edges, changes = edges_removed(task, seen, before)
    for measure, matrices in predicted["edge"].items():
        predicted["edge"][measure] = torch.tensor([float(matrices[i, j, k]) for i, j, k in edges])
    removed["edge"] = changes
    return {
        level: {name: spearman(value, removed[level]) for name, value in values.items()}
        for level, values in predicted.items()
    }


def change(
    task: Task, layers: str | int | None, heads: list[int] | None, edit: object, before: float
) -> float:
    with regard.edit(task.model, layers, heads, edit):  # type: ignore[arg-type]
        return abs(float(task.loss()) - before)


def heads_removed(task: Task, seen: regard.Seen, before: float) -> Tensor:
    changes = [
        change(task, name, [head], regard.ZeroAblation(), before)
        for name in seen
        for head in range(seen[name].shape[-3])
    ]
    return torch.tensor(changes)


def tokens_removed(task: Task, before: float) -> Tensor:
    changes = []
    for token in range(task.tokens):
        others = [query for query in range(task.tokens) if query != token]
        changes.append(change(task, None, None, regard.Block(others, token), before))
    return torch.tensor(changes)


def edges_removed(task: Task, seen: regard.Seen, before: float) -> tuple[list[tuple[int, int, int]], Tensor]:
    draw = random.Random(0)
    edges, changes = [], []
    for number, name in enumerate(seen):
        causal = seen.causal(name)
        for _ in range(EDGES):
            query = draw.randrange(1, task.tokens)
            key = draw.randrange(query + 1 if causal else task.tokens)
            edges.append((number, query, key))
            changes.append(change(task, name, None, regard.Block(query, key), before))
    return edges, torch.tensor(changes)


# Measures


def measures(task: Task, seen: regard.Seen) -> dict[str, dict[str, Tensor]]:
    """Return the prediction of each measure for all heads, tokens, and edges (layer, query, key)."""
    names = list(seen)
    weights = torch.stack([_heads(seen[name].dense()) for name in names])  # l h q k
    norms = torch.stack([_heads(seen.norms()[name].dense()) for name in names])
    summed = torch.stack([_unbatched(seen.norms()[name].summed(), 2) for name in names])  # l q k
    gradients = seen.gradients()
    products = torch.stack([_heads(gradients[name].times_weights().dense()) for name in names])
    zeroed = torch.stack([_unbatched(change, 2) for change in value_zeroing(task.model, task.batch).values()])
    return {
        "head": {
            "weights (head: largest of each row)": weights.amax(-1).mean(-1).flatten(),
            "norms ‖α f(x)‖": norms.sum(-1).mean(-1).flatten(),
            "gradient × weight": products.sum((-2, -1)).abs().flatten(),
        },
        "token": {
            "weights (head: largest of each row)": _without_diagonal(weights.mean(1)).sum((0, 1)),
            "rollout of weights": _unbatched(seen.rollout(), 1),
            "norms ‖α f(x)‖": _without_diagonal(summed).sum((0, 1)),
            "value zeroing": _without_diagonal(zeroed).sum((0, 1)),
            "gradient × weight": _without_diagonal(products.sum(1)).sum((0, 1)).abs(),
            "relevance (rollout of gradient × weight)": _unbatched(seen.relevance(), 1),
        },
        "edge": {
            "weights (head: largest of each row)": weights.mean(1),
            "norms ‖α f(x)‖": summed,
            "value zeroing": zeroed,
            "gradient × weight": products.sum(1).abs(),
        },
    }


def _heads(x: Tensor) -> Tensor:
    return _unbatched(x, 3)


def _unbatched(x: Tensor, axes: int) -> Tensor:
    """Drop the batch axis of a single text."""
    return x.reshape(x.shape[-axes:])


def _without_diagonal(x: Tensor) -> Tensor:
    return x * (1 - torch.eye(x.shape[-1]))


def spearman(first: Tensor, second: Tensor) -> float:
    """Return Spearman's rank correlation: the correlation of the ranks."""
    ranks = torch.stack([x.argsort().argsort().double() for x in (first, second)])
    return float(torch.corrcoef(ranks)[0, 1])


if __name__ == "__main__":
    main()

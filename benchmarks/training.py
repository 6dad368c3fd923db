"""Training throughput of a Transformer in source + target tokens per second, compared with other libraries.

Each model trains in its own process, because memory settings affect the whole process. The processes
alternate step by step; only one runs at a time. Padding is not counted; all batches have about the same
number of tokens.
"""

import math
import random
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import joeynmt, multi30k, table
from benchmarks.multi30k import VOCABULARY, Batch
from benchmarks.workers import receive, start_workers

WIDTH, HEADS, LAYERS, FFN_DIM = 256, 8, 3, 1024
DROPOUT, LABEL_SMOOTHING = 0.1, 0.1
TOKENS = 6_000  # source and target tokens per batch, excluding padding
BATCHES = 24  # prepared for each model and reused cyclically
ADAM = {"lr": 5e-4, "betas": (0.9, 0.98), "eps": 1e-9}


class Entry(NamedTuple):
    """A model and its kind of batches. tuned: whether it uses a fused Adam and `keep_memory`.

    JoeyNMT builds its own Adam, so its tuned version only adds `keep_memory`.
    """

    model: str
    batches: str
    tuned: bool
    precision: str = "float32"  # of matrix products

    @property
    def name(self) -> str:
        """Label for printing."""
        precision = f", {self.precision}" if self.precision != "float32" else ""
        return f"{NAMES[self.model]}, {self.batches}" + (", tuned" if self.tuned else "") + precision


NAMES = {"regard": "regard", "torch": "nn.Transformer", "joeynmt": "JoeyNMT"}
REGARD = Entry("regard", "packed", True)
JOEYNMT = Entry("joeynmt", "random order", True)  # JoeyNMT does not sort by length
TARGETS = {Entry("torch", "bucketed", False): 1.2, Entry("torch", "random order", False): 2.5, JOEYNMT: 2.5}
OTHERS = (
    Entry("regard", "packed", True, "bfloat16"),
    Entry("torch", "bucketed", True, "bfloat16"),
    Entry("torch", "bucketed", True),
    Entry("torch", "random order", True),
    Entry("regard", "packed", False),
)


class Step(NamedTuple):
    """One training step: its time, tokens, tokens including padding, and loss."""

    seconds: float
    tokens: int
    padded_tokens: int
    loss: float


def main(quick: bool = False) -> list[dict[str, object]]:
    """Compare all models on two threads; return one result per target."""
    data, origin = multi30k.load_pairs(2_000 if quick else 29_000)
    tokens, rounds = (600, 1) if quick else (TOKENS, 12)
    batches = {
        "packed": multi30k.random_batches(data, tokens)[:BATCHES],
        "random order": multi30k.random_batches(data, tokens)[:BATCHES],
        "bucketed": multi30k.bucketed_batches(data, tokens)[:BATCHES],
    }
    mean = statistics.mean(len(pair.source) for pair in data)
    print(
        f"\ntraining steps of about {tokens:,} source + target tokens, 2 threads; {origin},\n"
        f"{mean:.1f} source tokens per sentence; tuned: keep_memory() and, except for JoeyNMT,\n"
        "Adam(fused=True); ×: speedup of regard"
    )
    targets = [entry for entry in TARGETS if entry != JOEYNMT or joeynmt.is_available()]
    entries = (REGARD, *targets, *(() if quick else OTHERS))
    try:
        steps = time_steps({entry: batches[entry.batches] for entry in entries}, rounds, threads=2)
    except Exception as error:  # continue with the other benchmarks
        print(f"  failed: {type(error).__name__}: {error}", flush=True)
        return [_header(entry) | {"error": repr(error), "met": False} for entry in targets]
    for entry in steps:
        _print_row(entry, steps[entry], steps[REGARD])
    return [_result(entry, steps[entry], steps[REGARD]) for entry in targets]


def time_steps(batches: dict[Entry, list[Batch]], rounds: int, threads: int) -> dict[Entry, list[Step]]:
    """Run one step of every model per round, in random order."""
    arguments = {entry: (entry, entry_batches, threads) for entry, entry_batches in batches.items()}
    with start_workers(work, arguments) as pipes:
        sizes = {entry: receive(pipe) for entry, pipe in pipes.items()}
        assert len(set(sizes.values())) == 1, f"the models have different numbers of parameters: {sizes}"
        order, shuffle = list(batches), random.Random(0).shuffle
        steps: dict[Entry, list[Step]] = {entry: [] for entry in order}
        for number in range(-1, rounds):  # round -1 warms up
            shuffle(order)
            for entry in order:
                pipes[entry].send("step")
                step = receive(pipes[entry])
                if number >= 0:
                    steps[entry].append(step)
        return steps


def work(pipe: Connection, entry: Entry, batches: list[Batch], threads: int) -> None:
    """Worker process: run one training step per message."""
    torch.set_num_threads(threads)
    warnings.filterwarnings("ignore")  # nn.Transformer warns about fast paths it skips
    torch.manual_seed(0)
    step, parameters = CREATE[entry.model](batches, entry)
    pipe.send(parameters)
    while True:
        for i in range(len(batches)):
            pipe.recv()
            pipe.send(step(i))


StepFunction = tuple[Callable[[int], Step], int]


def create_regard(batches: Sequence[Batch], entry: Entry) -> StepFunction:
    """Create regard's Transformer on packed batches."""
    from regard.models.layers.allocation import keep_memory
    from regard.models.layers.blocks import TransformerConfig
    from regard.models.packed import Packed
    from regard.models.transformer import Transformer

    if entry.tuned:
        keep_memory()
    config = TransformerConfig(width=WIDTH, heads=HEADS, layers=LAYERS, ffn_dim=FFN_DIM, dropout=DROPOUT)
    model = Transformer(VOCABULARY, config, share=True)
    packed = [
        (Packed.of([pair.source for pair in batch]), Packed.of([pair.target for pair in batch]))
        for batch in batches
    ]
    padded_tokens = [sum(pair.size for pair in batch) for batch in batches]

    def loss(i: int) -> Tensor:
        return model.loss(*packed[i], label_smoothing=LABEL_SMOOTHING)

    return _create_step(model, loss, batches, padded_tokens, _adam(model, entry.tuned), entry.precision)


def create_torch(batches: Sequence[Batch], entry: Entry) -> StepFunction:
    """Create nn.Transformer on padded batches, with the usual cross-entropy loss."""
    from regard.models.layers.allocation import keep_memory

    if entry.tuned:
        keep_memory()
    model = TorchTransformer()
    padded = [
        tuple(
            nn.utils.rnn.pad_sequence([torch.tensor(side) for side in sides], batch_first=True)
            for sides in zip(*batch, strict=True)
        )
        for batch in batches
    ]
    padded_tokens = [source.numel() + target[:, 1:].numel() for source, target in padded]

    def loss(i: int) -> Tensor:
        source, target = padded[i]
        logits = model(source, target[:, :-1])
        return F.cross_entropy(
            logits.flatten(0, 1), target[:, 1:].flatten(), ignore_index=0, label_smoothing=LABEL_SMOOTHING
        )

    return _create_step(model, loss, batches, padded_tokens, _adam(model, entry.tuned), entry.precision)


def create_joeynmt(batches: Sequence[Batch], entry: Entry) -> StepFunction:
    """Create JoeyNMT's Transformer on padded batches, with its own loss and Adam."""
    from regard.models.layers.allocation import keep_memory
    from regard.models.layers.blocks import TransformerConfig

    if entry.tuned:
        keep_memory()
    config = TransformerConfig(width=WIDTH, heads=HEADS, layers=LAYERS, ffn_dim=FFN_DIM, dropout=DROPOUT)
    model = joeynmt.build(VOCABULARY, VOCABULARY, config, share=True, label_smoothing=LABEL_SMOOTHING)
    padded = [joeynmt.make_batch(*zip(*batch, strict=True)) for batch in batches]
    padded_tokens = [batch.src.numel() + batch.trg.numel() for batch in padded]

    def loss(i: int) -> Tensor:
        return joeynmt.loss(model, padded[i])

    return _create_step(
        model,
        loss,
        batches,
        padded_tokens,
        joeynmt.build_adam(model, ADAM["lr"], ADAM["betas"]),
        entry.precision,
    )


CREATE = {"regard": create_regard, "torch": create_torch, "joeynmt": create_joeynmt}


class TorchTransformer(nn.Module):
    """Translation model around nn.Transformer: tied embeddings, sinusoidal positions, padding masks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        nn.init.normal_(self.embedding.weight, std=WIDTH**-0.5)
        self.transformer = nn.Transformer(
            WIDTH, HEADS, LAYERS, LAYERS, FFN_DIM, DROPOUT, batch_first=True, norm_first=True
        )
        self.dropout = nn.Dropout(DROPOUT)
        angles = torch.arange(512.0)[:, None] / 10_000 ** (torch.arange(0, WIDTH, 2) / WIDTH)
        self.register_buffer("positions", torch.stack([angles.sin(), angles.cos()], -1).flatten(-2))

    def embed(self, tokens: Tensor) -> Tensor:
        return self.dropout(self.embedding(tokens) * math.sqrt(WIDTH) + self.positions[: tokens.shape[1]])

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        size = target.shape[1]
        x = self.transformer(
            self.embed(source),
            self.embed(target),
            tgt_mask=torch.ones(size, size, dtype=torch.bool).triu(1),
            src_key_padding_mask=source == 0,
            tgt_key_padding_mask=target == 0,
            memory_key_padding_mask=source == 0,
            tgt_is_causal=True,
        )
        return F.linear(x, self.embedding.weight)


def _adam(model: nn.Module, tuned: bool) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), fused=True if tuned else None, **ADAM)


def _create_step(
    model: nn.Module,
    loss: Callable[[int], Tensor],
    batches: Sequence[Batch],
    padded_tokens: list[int],
    optimizer: torch.optim.Optimizer,
    precision: str,
) -> StepFunction:
    model.train()
    tokens = [sum(pair.size for pair in batch) for batch in batches]

    def step(i: int) -> Step:
        start = time.perf_counter()
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
            value = loss(i)
        value.backward()
        optimizer.step()
        return Step(time.perf_counter() - start, tokens[i], padded_tokens[i], value.item())

    return step, sum(parameter.numel() for parameter in model.parameters())


def tokens_per_second(steps: Sequence[Step]) -> float:
    """Compute the median throughput, excluding padding."""
    return statistics.median(step.tokens / step.seconds for step in steps)


def _print_row(entry: Entry, steps: Sequence[Step], regard_steps: Sequence[Step]) -> None:
    fill = sum(step.tokens for step in steps) / sum(step.padded_tokens for step in steps)
    duration = table.format_duration(statistics.median(step.seconds for step in steps))
    ratio = tokens_per_second(regard_steps) / tokens_per_second(steps)
    target = TARGETS.get(entry)
    status = "" if target is None else f"≥ {target} {'met' if ratio >= target else 'missed'}"
    speed = f"{tokens_per_second(steps):8,.0f} tokens/s{duration:>10} per step"
    cells = f"{speed}{fill:6.0%} not padding{ratio:7.2f} ×   {status}"
    print(f"  {entry.name:38}{cells}", flush=True)


def _header(entry: Entry) -> dict[str, object]:
    """Return the fields that all results in benchmarks.json share."""
    name = f"a step compared with {entry.name}"
    return {"group": "training", "name": name, "threads": 2, "target": TARGETS[entry], "limit": None}


def _result(entry: Entry, steps: Sequence[Step], regard_steps: Sequence[Step]) -> dict[str, object]:
    both = {REGARD.name: regard_steps, entry.name: steps}
    ratio = tokens_per_second(regard_steps) / tokens_per_second(steps)
    return _header(entry) | {
        "implementation": "fused",
        "rates": {name: tokens_per_second(values) for name, values in both.items()},
        "seconds": {
            name: statistics.median(step.seconds for step in values) for name, values in both.items()
        },
        "losses": {name: [values[0].loss, values[-1].loss] for name, values in both.items()},
        "rounds": len(regard_steps),
        "ratios": {entry.name: ratio},
        "wrong": {},
        "met": ratio >= TARGETS[entry],
    }


if __name__ == "__main__":
    import sys

    main("--quick" in sys.argv)

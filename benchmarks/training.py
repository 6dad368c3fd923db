"""A training step of a Transformer, in source + target tokens per second, beside others' Transformers.

Each contender trains in a process of its own, as what one does about memory would help all in its process.
They take turns step by step, the others waiting. Only real tokens count; each batch has equally many.
"""

import math
import multiprocessing
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
from benchmarks.workers import ask, dismiss

WIDTH, HEADS, LAYERS, FFN_DIM = 256, 8, 3, 1024
DROPOUT, SMOOTHING = 0.1, 0.1
TOKENS = 6_000  # real source and target tokens of a batch, together
BATCHES = 24  # prepared for each contender, and used again from the start
ADAM = {"lr": 5e-4, "betas": (0.9, 0.98), "eps": 1e-9}


class Entry(NamedTuple):
    """A contender: which model on which batches, with a fused Adam and `keep_memory` or without.

    JoeyNMT makes its Adam itself: tuned, it has `keep_memory` alone.
    """

    model: str
    batches: str
    tuned: bool

    @property
    def name(self) -> str:
        """As printed."""
        return f"{NAMES[self.model]}, {self.batches}" + (", tuned" if self.tuned else "")


NAMES = {"regard": "regard", "torch": "nn.Transformer", "joeynmt": "JoeyNMT"}
OURS = Entry("regard", "packed", True)
JOEYNMT = Entry("joeynmt", "random order", True)  # it does not sort by length
TARGETS = {Entry("torch", "bucketed", False): 1.2, Entry("torch", "random order", False): 2.5, JOEYNMT: 2.5}
OTHERS = (
    Entry("torch", "bucketed", True),
    Entry("torch", "random order", True),
    Entry("regard", "packed", False),
)


class Step(NamedTuple):
    """One step: the time it took, the tokens read, the places that there were for them, and the loss."""

    seconds: float
    tokens: int
    places: int
    loss: float


def main(quick: bool = False) -> list[dict[str, object]]:
    """Race all contenders on two threads; one line of results for each target."""
    data, origin = multi30k.pairs(2_000 if quick else 29_000)
    tokens, rounds = (600, 1) if quick else (TOKENS, 12)
    batches = {
        "packed": multi30k.in_random_order(data, tokens)[:BATCHES],
        "random order": multi30k.in_random_order(data, tokens)[:BATCHES],
        "bucketed": multi30k.bucketed(data, tokens)[:BATCHES],
    }
    mean = statistics.mean(len(pair.source) for pair in data)
    print(
        f"\ntraining steps of about {tokens:,} source + target tokens, 2 threads; {origin}, {mean:.1f} source"
    )
    print("tokens a sentence; tuned: freed memory kept, and Adam(fused=True) unless the Adam is JoeyNMT's;")
    print("×: how much faster regard is")
    targets = [entry for entry in TARGETS if entry != JOEYNMT or joeynmt.is_here()]
    entries = (OURS, *targets, *(() if quick else OTHERS))
    try:
        found = compete({entry: batches[entry.batches] for entry in entries}, rounds, threads=2)
    except Exception as error:  # the other benchmarks are worth running
        print(f"  failed: {type(error).__name__}: {error}", flush=True)
        return [_about(entry) | {"error": repr(error), "met": False} for entry in targets]
    for entry, steps in found.items():
        _print(entry, steps, found[OURS])
    return [_result(entry, found[entry], found[OURS]) for entry in targets]


def compete(batches: dict[Entry, list[Batch]], rounds: int, threads: int) -> dict[Entry, list[Step]]:
    """The steps of each contender: each round one of each, in an order drawn anew."""
    context = multiprocessing.get_context("spawn")
    pipes: dict[Entry, Connection] = {}
    workers = []
    try:
        for entry, some in batches.items():
            pipes[entry], theirs = context.Pipe()
            workers.append(context.Process(target=work, args=(theirs, entry, some, threads), daemon=True))
            workers[-1].start()
            theirs.close()
        sizes = {entry: ask(pipe) for entry, pipe in pipes.items()}
        assert len(set(sizes.values())) == 1, f"the models differ in their parameters: {sizes}"
        order, shuffle = list(batches), random.Random(0).shuffle
        steps: dict[Entry, list[Step]] = {entry: [] for entry in order}
        for done in range(-1, rounds):  # the first round warms up
            shuffle(order)
            for entry in order:
                pipes[entry].send("step")
                step = ask(pipes[entry])
                if done >= 0:
                    steps[entry].append(step)
        return steps
    finally:
        dismiss(pipes.values(), workers)


def work(pipe: Connection, entry: Entry, batches: list[Batch], threads: int) -> None:
    """A process that trains, one step whenever it is asked."""
    torch.set_num_threads(threads)
    warnings.filterwarnings("ignore")  # nn.Transformer warns of what it does not use
    try:
        torch.manual_seed(0)
        step, parameters = CONTENDERS[entry.model](batches, entry.tuned)
        pipe.send(parameters)
        while True:
            for i in range(len(batches)):
                pipe.recv()
                pipe.send(step(i))
    except EOFError:
        return
    except Exception as error:
        pipe.send(error)


Stepper = tuple[Callable[[int], Step], int]


def regards(batches: Sequence[Batch], tuned: bool) -> Stepper:
    """regard's Transformer on packed batches."""
    from regard.models.layers.allocation import keep_memory
    from regard.models.layers.blocks import TransformerConfig
    from regard.models.packed import Packed
    from regard.models.transformer import Transformer

    if tuned:
        keep_memory()
    config = TransformerConfig(width=WIDTH, heads=HEADS, layers=LAYERS, ffn_dim=FFN_DIM, dropout=DROPOUT)
    model = Transformer(VOCABULARY, config, share=True)
    packed = [
        (Packed.of([pair.source for pair in batch]), Packed.of([pair.target for pair in batch]))
        for batch in batches
    ]
    places = [sum(pair.size for pair in batch) for batch in batches]

    def loss(i: int) -> Tensor:
        return model.loss(*packed[i], label_smoothing=SMOOTHING)

    return _stepper(model, loss, batches, places, _adam(model, tuned))


def torchs(batches: Sequence[Batch], tuned: bool) -> Stepper:
    """nn.Transformer on padded batches, with the loss as it is usually written."""
    from regard.models.layers.allocation import keep_memory

    if tuned:
        keep_memory()
    model = Usual()
    padded = [
        tuple(
            nn.utils.rnn.pad_sequence([torch.tensor(side) for side in sides], batch_first=True)
            for sides in zip(*batch, strict=True)
        )
        for batch in batches
    ]
    places = [source.numel() + target[:, 1:].numel() for source, target in padded]

    def loss(i: int) -> Tensor:
        source, target = padded[i]
        logits = model(source, target[:, :-1])
        return F.cross_entropy(
            logits.flatten(0, 1), target[:, 1:].flatten(), ignore_index=0, label_smoothing=SMOOTHING
        )

    return _stepper(model, loss, batches, places, _adam(model, tuned))


def joeynmts(batches: Sequence[Batch], tuned: bool) -> Stepper:
    """JoeyNMT's Transformer and loss on padded batches, with the Adam that it makes of its settings."""
    from regard.models.layers.allocation import keep_memory
    from regard.models.layers.blocks import TransformerConfig

    if tuned:
        keep_memory()
    config = TransformerConfig(width=WIDTH, heads=HEADS, layers=LAYERS, ffn_dim=FFN_DIM, dropout=DROPOUT)
    model = joeynmt.build(VOCABULARY, VOCABULARY, config, share=True, smoothing=SMOOTHING)
    padded = [joeynmt.make_batch(*zip(*batch, strict=True)) for batch in batches]
    places = [batch.src.numel() + batch.trg.numel() for batch in padded]

    def loss(i: int) -> Tensor:
        return joeynmt.loss(model, padded[i])

    return _stepper(model, loss, batches, places, joeynmt.adam(model, ADAM["lr"], ADAM["betas"]))


CONTENDERS = {"regard": regards, "torch": torchs, "joeynmt": joeynmts}


class Usual(nn.Module):
    """A translation model of torch's parts: one embedding for all, sinusoidal positions, padding masked."""

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


def _stepper(
    model: nn.Module,
    loss: Callable[[int], Tensor],
    batches: Sequence[Batch],
    places: list[int],
    optimizer: torch.optim.Optimizer,
) -> Stepper:
    model.train()
    tokens = [sum(pair.size for pair in batch) for batch in batches]

    def step(i: int) -> Step:
        begun = time.perf_counter()
        optimizer.zero_grad()
        value = loss(i)
        value.backward()
        optimizer.step()
        return Step(time.perf_counter() - begun, tokens[i], places[i], value.item())

    return step, sum(parameter.numel() for parameter in model.parameters())


def rate(steps: Sequence[Step]) -> float:
    """Real tokens per second, in the median step."""
    return statistics.median(step.tokens / step.seconds for step in steps)


def _print(entry: Entry, steps: Sequence[Step], ours: Sequence[Step]) -> None:
    real = sum(step.tokens for step in steps) / sum(step.places for step in steps)
    taken = table.duration(statistics.median(step.seconds for step in steps))
    ratio = rate(ours) / rate(steps)
    target = TARGETS.get(entry)
    goal = "" if target is None else f"≥ {target} {'met' if ratio >= target else 'NOT'}"
    cells = f"{rate(steps):8,.0f} tokens/s{taken:>10} a step{real:6.0%} real{ratio:7.2f} ×   {goal}"
    print(f"  {entry.name:38}{cells}", flush=True)


def _about(entry: Entry) -> dict[str, object]:
    """What a line of benchmarks.json begins with, in the form of the other races."""
    name = f"a step beside {entry.name}"
    return {"group": "training", "name": name, "threads": 2, "target": TARGETS[entry], "limit": None}


def _result(entry: Entry, steps: Sequence[Step], ours: Sequence[Step]) -> dict[str, object]:
    both = {OURS.name: ours, entry.name: steps}
    ratio = rate(ours) / rate(steps)
    return _about(entry) | {
        "implementation": "fused",
        "rates": {name: rate(taken) for name, taken in both.items()},
        "seconds": {name: statistics.median(step.seconds for step in taken) for name, taken in both.items()},
        "losses": {name: [taken[0].loss, taken[-1].loss] for name, taken in both.items()},
        "rounds": len(ours),
        "ratios": {entry.name: ratio},
        "wrong": {},
        "met": ratio >= TARGETS[entry],
    }


if __name__ == "__main__":
    import sys

    main("--quick" in sys.argv)

"""`make demo`: from the dictionary lookup to a model that learns, and to 32,768 tokens, drawn."""

import calendar
import io
import random
import resource
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

import regard
from regard.mechanism.files import write_whole
from regard.models import Packed, RecurrentRecipe, RecurrentSeq2Seq, summary
from regard.view.pictures import heatmap

PICTURE = "demo.png"
TOKENS = 32_768
NORMALIZERS: dict[str, regard.Normalizer] = {
    "Softmax(temperature=3)": regard.Softmax(temperature=3),
    "Softmax()": regard.Softmax(),
    "Entmax(1.5)": regard.Entmax(1.5),
    "Sparsemax()": regard.Sparsemax(),
    "Softmax(temperature=0.1)": regard.Softmax(temperature=0.1),
    "Hard()": regard.Hard(),
}


def main() -> None:
    """Run the demonstration and write its picture."""
    torch.manual_seed(0)
    show("A dictionary is attention that looks at one key")
    lookup()
    show("The worked example: three inputs as queries, keys and values; plain dot products")
    example = worked_example()
    show("One row of scores, six normalizers, from soft to hard")
    rows = normalizers()
    show("A model learns to write dates in a few seconds, and its attention shows how it reads them")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the model is tiny: two threads would wait for each other
    read = Dates().learn()
    torch.set_num_threads(threads)
    show(f"{TOKENS:,} tokens, and every weight can still be looked at")
    draw(example, rows, read, long_text())
    print(f"\nThe picture is in {PICTURE}.")


def show(title: str) -> None:
    print(f"\n\033[1m{title}\033[0m" if sys.stdout.isatty() else f"\n{title}")


def lookup() -> None:
    """Hard attention over one-hot keys is `dict[key]`; softmax at a low temperature comes close."""
    entries = {"Name": "Ada", "Date of birth": "May 5th 2000", "City": "Turin"}
    keys, values = torch.eye(3), torch.eye(3)
    query = keys[list(entries).index("Date of birth")][None]
    for normalize in (regard.Hard(), regard.Softmax(temperature=0.1), regard.Softmax()):
        _, weights = regard.attend(query, keys, values, score=regard.Dot(), normalize=normalize)
        mixed = " + ".join(
            f"{w:.2f} · {value!r}" for w, value in zip(weights[0].tolist(), entries.values(), strict=True)
        )
        print(f"  {normalize!s:26} 'Date of birth' → {mixed}")


def worked_example() -> regard.Weights:
    """The numbers of the first lecture, with plain dot products."""
    x = torch.tensor([[1.0, 0, 1, 0], [0, 2, 0, 2], [1, 1, 1, 1]])
    to_key = torch.tensor([[0.0, 0, 1], [1, 1, 0], [0, 1, 0], [1, 1, 0]])
    to_query = torch.tensor([[1.0, 0, 1], [1, 0, 0], [0, 0, 1], [0, 1, 1]])
    to_value = torch.tensor([[0.0, 2, 0], [0, 3, 0], [1, 0, 3], [1, 1, 0]])
    query, key, value = x @ to_query, x @ to_key, x @ to_value
    output, weights = regard.attend(query, key, value, score=regard.Dot())
    columns = {
        "query": query,
        "key": key,
        "value": value,
        "scores": weights.scores(),
        "weights": weights.dense(),
        "output": output,
    }
    for names in (("query", "key", "value"), ("scores", "weights", "output")):
        print("  " + "".join(f"{name:<25}" for name in names))
        for row in range(len(x)):
            cells = (" ".join(f"{number:5.2f}" for number in columns[name][row]) for name in names)
            print("  " + "".join(f"{cell:<25}" for cell in cells))
    return weights


def normalizers() -> Tensor:
    """The same scores through each normalizer: a row each."""
    scores = torch.tensor([[0.0, 0.5, 1.0, 2.0, 2.2]])
    rows = []
    for name, normalize in NORMALIZERS.items():
        keys = values = torch.eye(5)
        _, weights = regard.attend(scores, keys, values, score=regard.Dot(), normalize=normalize)
        rows.append(weights[0])
        print(f"  {name:26}" + " ".join(f"{weight:6.3f}" for weight in weights[0]))
    return torch.stack(rows)


class Dates:
    """Dates as people write them, to be written as 2031-09-05, letter by letter: Bahdanau's model of 2015."""

    MONTHS = tuple(calendar.month_name)[1:]
    START, END = "<", ">"

    def __init__(self) -> None:
        self.draw = random.Random(0)
        letters = sorted({self.START, self.END, *", -0123456789", *"".join(self.MONTHS)})
        self.numbers = {letter: number for number, letter in enumerate(letters)}
        recipe = RecurrentRecipe(width=96, cell="gru", attention="additive", dropout=0.0)
        self.model = RecurrentSeq2Seq(len(letters), recipe)

    def learn(self, steps: int = 120) -> "Reading":
        """Train, try on dates that were never seen, and look at how one is read."""
        print(f"  {summary(self.model, length=16)}")
        optimizer = torch.optim.Adam(self.model.parameters(), lr=4e-3)
        begun = time.perf_counter()
        for step in range(1, steps + 1):
            source, target = zip(*(self.pair() for _ in range(64)), strict=True)
            loss = self.model.loss(
                self.pack(source), self.pack([self.START + date + self.END for date in target])
            )
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            optimizer.step()
            if step % 40 == 0:
                print(f"  after {step} steps and {time.perf_counter() - begun:.0f} s: loss {loss.item():.4f}")
        asked, right = zip(*(self.pair() for _ in range(200)), strict=True)
        written = self.write(asked)
        good = sum(map(str.__eq__, written, right))
        print(f"  of 200 dates that it has not seen, {good} are right: {asked[0]} → {written[0]}")
        return self.read("September 5, 2031")

    def pair(self) -> tuple[str, str]:
        """A date in one of three forms, and as it should be written."""
        day, month, year = self.draw.randint(1, 28), self.draw.randint(1, 12), self.draw.randint(1900, 2099)
        name = self.MONTHS[month - 1]
        forms = (f"{name} {day}, {year}", f"{day} {name} {year}", f"{name[:3]} {day} {year}")
        return self.draw.choice(forms), f"{year}-{month:02}-{day:02}"

    def pack(self, texts: Sequence[str]) -> Packed:
        return Packed.of([[self.numbers[letter] for letter in text] for text in texts])

    def write(self, asked: Sequence[str]) -> list[str]:
        """The model's own answers."""
        letters = list(self.numbers)
        start, end = self.numbers[self.START], self.numbers[self.END]
        found = self.model.greedy(self.pack(asked), start=start, end=end, most=12)
        return ["".join(letters[number] for number in numbers) for numbers in found]

    def read(self, asked: str) -> "Reading":
        """What each letter that the model writes looks at."""
        (written,) = self.write([asked])
        with torch.no_grad(), regard.watch(self.model) as seen:
            self.model(self.pack([asked]), self.pack([self.START + written[:-1]]))
        return Reading(asked, written, seen.joined("decoder.attention")[0, 0])


class Reading(NamedTuple):
    """A text, what a model made of it, and the weights between their letters."""

    asked: str
    written: str
    weights: Tensor


def long_text() -> regard.Weights:
    """The weights of a long made-up text that keeps coming back to nine subjects."""
    subjects = torch.randn(9, 64)
    lengths = torch.randint(500, 3000, (60,))
    subject = torch.randint(9, (60,)).repeat_interleave(lengths)[:TOKENS]
    x = subjects[subject] + torch.randn(TOKENS, 64)
    print("  (vectors around nine subjects that come and go; a few seconds on two free cores)")
    before, begun = memory(), time.perf_counter()
    _, weights = regard.attend(x, x, x, mask=regard.Causal())
    print(f"  {weights}")
    values, keys = weights.top(3)
    best = ", ".join(f"{key:,} ({weight:.3f})" for key, weight in zip(keys[-1], values[-1], strict=True))
    print(f"  The last token looks most at tokens {best}.")
    print(f"  A row spreads over {weights.entropy().exp().median():,.0f} tokens, ", end="", flush=True)
    print(f"and token {weights.received().argmax():,} is read most.")
    spent, held = time.perf_counter() - begun, memory() - before
    print(f"  That took {spent:.0f} s and {held:.0f} MB.")
    return weights


def memory() -> float:
    """The most memory this process has held, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def draw(example: regard.Weights, rows: Tensor, read: Reading, long_weights: regard.Weights) -> None:
    """The four results."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 8), layout="constrained")
    (left, middle), (lower, right) = figure.subplots(2, 2, width_ratios=[1, 1.3])
    names = ["input 1", "input 2", "input 3"]
    heatmap(left, example, queries=names, keys=names, title="the worked example")
    tokens = [f"key {i + 1}" for i in range(rows.shape[1])]
    heatmap(middle, rows, queries=list(NORMALIZERS), keys=tokens, title="one row of scores, six normalizers")
    title = "a model that learned to write dates: where it looks"
    heatmap(lower, read.weights, queries=list(read.written), keys=list(read.asked), title=title)
    title = f"{TOKENS:,} × {TOKENS:,} weights, a map (log)"
    heatmap(right, long_weights, title=title, log=True)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    write_whole(PICTURE, buffer.getvalue())


if __name__ == "__main__":
    main()

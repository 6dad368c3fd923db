"""A recording: what its heads do, and how it is kept in a folder, without the model."""

import hashlib
import json
import os
import re
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from regard._util.files import write_atomic
from regard.errors import ArgumentError
from regard.inspection.texts import Pair, Texts
from regard.mechanism.call.problem import Tile
from regard.mechanism.weights.matrix import Weights

if TYPE_CHECKING:
    from regard.inspection.watch import Seen

FORMAT = "recording 2"
_ABOUT = "recording.json"
_LARGEST = 2**28  # bytes of the description
_MEASURES = ("distance", "first", "previous", "induction")


# What weights say


def causal(weights: Weights) -> bool:
    """Whether no row sees a key that comes after its query."""
    problem = weights._problem
    queries, keys, terms = problem.queries, problem.keys, problem.terms()
    limit = torch.arange(queries, device=weights.device)[:, None] + keys - queries + 1

    def blind(term: Any) -> bool:
        if term.stop is not None and bool((torch.minimum(term.stop, limit) == term.stop).all()):
            return True
        if term.allowed is None:
            return queries <= 1
        ahead = torch.arange(keys, device=weights.device) >= limit
        return not bool((term.allowed & ahead).any())

    return bool(terms) and all(blind(term) for term in terms)


def stack(seen: "Seen") -> list[Weights]:
    """The self-attentions that stand upon each other, up to the last one."""
    own = [name for name in seen if seen.kind(name) == "self"]
    if not own:
        raise ArgumentError(f"rollout needs self-attention, and of that {seen!r} has none.")

    def place(name: str) -> tuple[str, int]:
        """Encoder or decoder, and the run: a module that layers share is called several times in each."""
        module, call = seen._about[name]
        each = max(len(seen.calls(module)) // max(len(seen._texts.calls), 1), 1)
        return re.split(r"\d", module)[0], call // each

    return [seen[name] for name in own if place(name) == place(own[-1])]


def heads(seen: "Seen", frame: bool | None) -> Any:
    """A row for each head of each layer."""
    rows = []
    for name in seen:
        weights = seen[name]
        measured = measure(weights, seen.ids(name), positions=seen.kind(name) == "self")
        for head in range(len(measured["entropy"])):
            numbers = {measure: float(values[head]) for measure, values in measured.items()}
            rows.append({"layer": name, "head": head, **numbers})
    if frame is False or (frame is None and find_spec("pandas") is None):
        return rows
    return import_module("pandas").DataFrame(rows, columns=["layer", "head", "entropy", *_MEASURES])


def measure(weights: Weights, ids: Tensor | None, *, positions: bool = True) -> dict[str, Tensor]:
    """Averages over the rows that see anything, a number per head; NaN where there is nothing to say.

    >>> import torch, regard
    >>> from regard.inspection.recording import measure
    >>> x = torch.zeros(4, 2)
    >>> weights = regard.attend(x, x, x, mask=regard.Causal())[1]
    >>> {
    ...     name: round(float(value), 2)
    ...     for name, value in measure(weights, torch.tensor([[5, 6, 5, 6]])).items()
    ... }
    {'entropy': 0.79, 'distance': 0.75, 'first': 0.52, 'previous': 0.36, 'induction': 0.29}
    """
    with torch.no_grad():
        lead = weights._inner_lead()
        sums = torch.zeros(*lead, len(_MEASURES), dtype=torch.float64)
        counts = torch.zeros_like(sums)
        entropy, seeing = weights.entropy().double().cpu(), torch.zeros(*lead, weights.shape[-2])
        scene = _Scene(weights, ids)
        for at, block in weights._blocks():
            total, number, sees = scene.measure(at, block, positions)
            index: tuple[Any, ...] = (*at.lead, ...)
            sums[index] += total.cpu()
            counts[index] += number.cpu()
            seeing[(*index, at.rows)] = sees.float().cpu()
    shape = (-1, weights.shape[-3]) if weights.has_heads else (-1, 1)
    seeing = seeing.double().reshape(*shape, weights.shape[-2])
    rows = seeing.sum((0, 2))
    found = {"entropy": (entropy.reshape(seeing.shape) * seeing).sum((0, 2)) / rows}
    mean = sums.reshape(*shape, len(_MEASURES)).sum(0) / counts.reshape(*shape, len(_MEASURES)).sum(0)
    return {**found, **{name: mean[:, i] for i, name in enumerate(_MEASURES)}}


class _Scene(NamedTuple):
    """What a tile must know of the whole."""

    weights: Weights
    ids: Tensor | None

    def measure(self, at: Tile, block: Tensor, positions: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Sums of the measures over a tile's rows, how many rows count in each, and which see anything."""
        device = block.device
        queries, keys = self.weights.shape[-2:]
        row = torch.arange(at.rows.start, at.rows.stop, device=device)[:, None] + keys - queries
        key = torch.arange(at.keys.start, at.keys.stop, device=device)
        sees = block.sum(-1) > 0
        nothing = torch.zeros_like(sees)
        found = [(block.mul(row - key).abs().sum(-1), sees)]
        found.append(((block * (key == self._first(at, device))).sum(-1), sees))
        found.append(((block * (key == row - 1)).sum(-1), sees & (row[:, 0] > 0)))
        repeats = self._repeats(at, row, key)
        if repeats is None:
            found.append((block[..., :0].sum(-1), nothing))
        else:
            found.append(((block * repeats).sum(-1), sees & repeats.any(-1)))
        if not positions:
            found = [(value, counts if i == 1 else nothing) for i, (value, counts) in enumerate(found)]
        sums = [(value * counts).sum(-1).double() for value, counts in found]
        return torch.stack(sums, -1), torch.stack([c.sum(-1).double() for _, c in found], -1), sees

    def _first(self, at: Tile, device: torch.device) -> Tensor:
        """The first key that anybody sees, (…, 1, 1): after padding on the left it is not key 0."""
        starts = []
        for term in self.weights._problem.terms():
            if term.start is None or term.stop is None:
                starts.append(torch.zeros(1, 1, dtype=torch.long, device=device))
                continue
            cut = tuple(i if n > 1 else slice(None) for i, n in zip(at.lead, term.start.shape, strict=False))
            start, stop = torch.broadcast_tensors(term.start, term.stop)
            start = torch.where(start < stop, start, 2**40)[cut if start.shape == term.start.shape else ...]
            starts.append(start.amin(-2, keepdim=True))
        found = starts[0] if starts else torch.zeros(1, 1, dtype=torch.long, device=device)
        for start in starts[1:]:
            found = torch.minimum(found, start)
        return found

    def _repeats(self, at: Tile, row: Tensor, key: Tensor) -> Tensor | None:
        """Where a key follows an earlier occurrence of the query's token: (…, q, k)."""
        lead = self.weights._inner_lead()
        if self.ids is None or self.ids.shape[-1] != self.weights.shape[-1] or len(lead) > 3:
            return None
        ids = self.ids.to(row.device)
        batched = len(lead) == 3 and len(ids) == lead[0]
        if not batched and len(ids) != 1:
            return None
        ids = ids[at.lead[0]] if batched else ids
        same = ids[:, row.clamp(min=0)] == ids[:, None, (key - 1).clamp(min=0)]
        same = same & (key > 0) & (key - 1 < row)  # b q k
        return same[:, None, None] if len(lead) == 3 else same[0]


# In a folder


def save(seen: "Seen", folder: str | os.PathLike[str]) -> Path:
    """Write a recording; its description comes last, so that half a recording is none."""
    home = Path(folder)
    if home.exists() and (not home.is_dir() or (any(home.iterdir()) and not (home / _ABOUT).exists())):
        raise ArgumentError(f"{os.fspath(folder)!r} holds something else already; name a new folder.")
    (home / _ABOUT).unlink(missing_ok=True)
    for old in home.glob("[0-9]*.safetensors"):
        old.unlink()
    for number, weights in enumerate(seen.values()):
        weights.save(home / f"{number}.safetensors")

    about = {
        "format": FORMAT,
        "regard": version("regard"),
        "layers": [{"name": seen._about[name][0], "kind": seen.kind(name)} for name in seen],
        "texts": _describe(seen._texts),
    }
    write_atomic(home / _ABOUT, json.dumps({**about, "checksum": _checksum(about)}).encode())
    return home


def _checksum(about: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()


def _describe(texts: Texts) -> list[dict[str, Any]]:
    found = []
    for call in range(max(len(texts.calls), len(texts.spelled), 1)):
        sides: dict[str, Any] = {}
        for side in ("source", "target"):
            ids = texts.ids(call, side)
            count = 1 if ids is None else len(ids)
            words = [texts.words(call, side, row) for row in range(count)]
            sides[side] = {
                "ids": None if ids is None else ids.tolist(),
                "words": None if None in words else words,
            }
        found.append(sides)
    return found


def load(kind: type["Seen"], folder: str | os.PathLike[str]) -> "Seen":
    """Read a recording, or say that the folder holds none that this version reads."""
    home = Path(folder)
    if not (home / _ABOUT).is_file() or (home / _ABOUT).stat().st_size > _LARGEST:
        raise ArgumentError(f"{os.fspath(folder)!r} holds no recording; one is written by Seen.save.")
    try:
        about = json.loads((home / _ABOUT).read_bytes())
        if not isinstance(about, dict) or not isinstance(about.get("format"), str):
            raise ValueError("its description is another one")
        _check_format(folder, about)
        if about.pop("checksum", None) != _checksum(about):
            raise ValueError(f"{_ABOUT} is damaged: it does not have its checksum")
        seen = kind(_texts(about["texts"]))
        for number, layer in enumerate(about["layers"]):
            name, side = layer["name"], layer["kind"]
            if not isinstance(name, str) or len(name) > 1000 or side not in ("self", "cross"):
                raise ValueError(f"its layer {number} has no name or kind")
            file = home / f"{number}.safetensors"
            if file.is_symlink() or not file.is_file():
                raise ValueError(f"{file.name} is missing")
            seen.add(name, Weights.load(file), side)
    except (
        LookupError, TypeError, ValueError, AttributeError, RecursionError, OverflowError, RuntimeError
    ) as error:  # fmt: skip
        if isinstance(error, ArgumentError):
            raise
        raise ArgumentError(
            f"{os.fspath(folder)!r} holds no recording that can be read ({str(error)[:200]}); "
            "one is written by Seen.save."
        ) from None
    seen._nothing = "nothing: the recording is empty"
    return seen


def _check_format(folder: str | os.PathLike[str], about: dict[str, Any]) -> None:
    if about["format"] != FORMAT:
        raise ArgumentError(
            f"{os.fspath(folder)!r} is a {about['format'][:40]!r}, written by regard "
            f"{str(about.get('regard'))[:20]}; this is regard {version('regard')}, which reads {FORMAT!r}. "
            "Record it again, or use that version."
        )


def _table(ids: Any) -> Tensor:
    """Token numbers (b, n). Negative ones are placeholders in some models."""
    rows: list[Any] = ids if isinstance(ids, list) and ids else [None]
    if not all(isinstance(row, list) and len(row) == len(rows[0]) for row in rows):
        raise ValueError("its token numbers are not a table")
    if not all(type(i) is int and -(2**63) <= i < 2**63 for row in rows for i in row):
        raise ValueError("its token numbers are not whole numbers of 64 bits")
    return torch.tensor(rows, dtype=torch.long)


def _texts(described: Any) -> Texts:
    """The tokens of a recording, in which nothing is taken for granted."""
    texts = Texts()
    for call in described:
        sides: dict[str, Tensor | None] = {}
        spelled: dict[str, list[list[str]]] = {}
        for side in ("source", "target"):
            ids, words = call[side]["ids"], call[side]["words"]
            sides[side] = None if ids is None else _table(ids)
            if words is not None:
                rows: list[Any] = words if isinstance(words, list) else [None]
                if not all(isinstance(row, list) and all(isinstance(w, str) for w in row) for row in rows):
                    raise ValueError("its tokens are not lists of words")
                spelled[side] = rows
        texts.calls.append(Pair(**sides))
        texts.spelled.append(spelled)
    return texts

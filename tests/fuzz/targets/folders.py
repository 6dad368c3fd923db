"""Corrupted files: model folders, training runs to resume, recordings and saved weights.

Loading fails with a one-line error, or returns exactly the saved values. A corrupted text may be read as
another text; a corrupted tensor must not be read as another tensor.
"""

import contextlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import regard
from regard.translation import Pair, TranslationConfig, load_translator, train
from tests.fuzz.case import Case, Failure, deadline, signature
from tests.fuzz.targets.memory import memory

PAIRS = [Pair(f"{word} {i}", f"{i} {word.upper()}") for i in range(8) for word in ("one", "two", "six")]
SETTINGS = ["model.width=16", "model.layers=1", "model.heads=2", "tokens.size=40", "training.updates=2"]
SETTINGS += ["training.guided_alignment_weight=0.3", "training.save_every=1", "training.threads=1"]
LONGER = "training.updates=3"
SECONDS = 20.0
BINARY = (".safetensors", ".ids")  # files in which corruption must be detected


def run(case: Case) -> None:
    originals = case.shared / "originals"
    with tempfile.TemporaryDirectory(dir=case.shared) as temporary, memory(3 * 2**30):
        if case.chance(0.05):
            foreign(case, Path(temporary))
            return
        use = case.random.choice(list(USES))
        kind = use.partition(" ")[0]
        copy = Path(temporary) / kind
        shutil.copytree(originals / kind, copy)
        file, way = _damage(case, copy, use)
        case.note(f"then {use}")
        # swapped files of the same kind are each valid on their own
        exact = file.suffix in BINARY and way is not swap
        _check(use, copy, file, originals / f"{use}.result", exact)


def _check(use: str, copy: Path, file: Path, saved: Path, exact: bool) -> None:
    wanted = torch.load(saved)
    what = file.name if use == "model resumed" else file.suffix
    try:
        with deadline(SECONDS, f"{use} of a damaged {what}"):
            found = USES[use](copy)
    except (regard.RegardError, OSError) as error:
        if len(str(error).strip().splitlines()) != 1:
            raise Failure(
                f"{use} of a damaged {what}: the message has several lines", str(error)[:500]
            ) from None
        return
    except Exception as error:
        text = f"{signature(error)}: {str(error)[:300]}"
        raise Failure(f"{use} of a damaged {what}: {type(error).__name__}", text) from error
    changed = [name for name in wanted if name not in found or not torch.equal(found[name], wanted[name])]
    if changed and exact:
        raise Failure(f"{use} of a damaged {what} gives another result", f"in {changed[:3]}")


# Loading


def load_model(folder: Path) -> dict[str, Tensor]:
    translator = load_translator(folder)
    translations = translator.translate(["one 3", "six 7"])
    text = json.dumps([translation.text for translation in translations]).encode()
    return {**translator.model.state_dict(), "translations": torch.tensor(list(text))}


def resume_model(folder: Path) -> dict[str, Tensor]:
    config = TranslationConfig.preset("tiny").override([*SETTINGS, LONGER])
    train(folder, resume=True, config=config)
    return load_translator(folder).model.state_dict()


def load_recording(folder: Path) -> dict[str, Tensor]:
    seen = regard.Seen.load(folder)
    str(seen), seen.tokens, seen.texts(0)
    return {name: weights.dense() for name, weights in seen.items()}


def load_weights(folder: Path) -> dict[str, Tensor]:
    weights = regard.Weights.load(folder / "weights.safetensors")
    return {"dense": weights.dense(), "top": weights.topk(2).values, "scores": weights.scores()}


USES: dict[str, Callable[[Path], dict[str, Tensor]]] = {
    "model loaded": load_model,
    "model resumed": resume_model,
    "recording loaded": load_recording,
    "weights loaded": load_weights,
}


def prepare(shared: Path) -> None:
    """Create the valid folders and their results, once per run."""
    folder = shared / "originals"
    if folder.is_dir():
        return
    making = Path(tempfile.mkdtemp(dir=shared))
    train(making / "model", PAIRS, config=TranslationConfig.preset("tiny").override(SETTINGS))
    model = regard.models.LanguageModel(9, regard.models.TransformerConfig(width=8, heads=2, layers=2))
    with regard.watch(model, tokenizer=lambda ids: [f"word {i}" for i in ids]) as seen:
        model(torch.tensor([[5, 6, 7]]))
    seen.save(making / "recording")
    (making / "weights").mkdir()
    x = torch.randn(2, 3, 5, 4)
    mask = regard.Padding([5, 3]) & (torch.rand(5, 5) < 0.8)
    bias = [torch.randn(5, 5), regard.ALiBi(3)]
    regard.attend(x, x, x, mask=mask, bias=bias)[1].save(making / "weights" / "weights.safetensors")
    for use, load in USES.items():
        copy = making / "copy"
        shutil.copytree(making / use.partition(" ")[0], copy)
        torch.save(load(copy), making / f"{use}.result")
        shutil.rmtree(copy)
    making.rename(folder)


# Corruption


Damage = Callable[[Case, Path, list[Path]], None]


def _damage(case: Case, folder: Path, use: str) -> tuple[Path, Damage]:
    """Corrupt one file in a folder; return the file and the kind of corruption."""
    logs = {"log.csv", "samples.jsonl"}
    files = sorted(
        p for p in folder.rglob("*") if p.is_file() and p.name not in logs and "event" not in p.name
    )
    if use == "model loaded":
        files = [path for path in files if path.parent == folder]
    file = case.random.choice(files)
    if file.suffix in BINARY or file.suffix == ".model":
        ways: list[Damage] = [flip, flip, flip, truncate, swap, replace, lengthen]
    else:
        ways = [flip, truncate, replace, swap, *([edit, edit, edit, edit] if file.suffix == ".json" else [])]
    if use == "model resumed" and file.suffix == ".json":
        ways = [truncate, replace]  # changed settings could start a long training run
    way = case.random.choice(ways)
    case.note(f"{file.relative_to(folder)}: {way.__name__}")
    way(case, file, files)
    return file, way


def flip(case: Case, file: Path, others: list[Path]) -> None:
    content = bytearray(file.read_bytes())
    if not content:
        return
    at, bit = case.random.randrange(len(content)), case.random.randrange(8)
    content[at] ^= 1 << bit
    case.note(f"bit {bit} of byte {at} of {len(content)}")
    file.write_bytes(content)


def truncate(case: Case, file: Path, others: list[Path]) -> None:
    size = case.random.randrange(file.stat().st_size + 1)
    case.note(f"to {size} bytes")
    os.truncate(file, size)


def lengthen(case: Case, file: Path, others: list[Path]) -> None:
    with file.open("ab") as end:
        end.write(case.random.randbytes(case.random.choice((1, 8, 4096))))


def swap(case: Case, file: Path, others: list[Path]) -> None:
    other = case.random.choice(others)
    case.note(f"with {other.name}")
    content = other.read_bytes()
    other.write_bytes(file.read_bytes())
    file.write_bytes(content)


def replace(case: Case, file: Path, others: list[Path]) -> None:
    """Replace the file with a path that is not a regular file, or with a very large file."""
    content = file.read_bytes()
    file.unlink()
    what = case.random.choice(
        ("fifo", "folder", "link to zeros", "link to itself", "nothing", "empty", "sparse")
    )
    case.note(f"by {what}")
    match what:
        case "fifo":
            os.mkfifo(file)
        case "folder":
            file.mkdir()
        case "link to zeros":
            file.symlink_to("/dev/zero")
        case "link to itself":
            file.symlink_to(file)
        case "empty":
            file.touch()
        case "sparse":
            file.write_bytes(content)
            with contextlib.suppress(OSError):
                os.truncate(file, 2**40)


VALUES: tuple[Any, ...] = (
    math.nan,
    math.inf,
    -1,
    0,
    2**70,
    1e400,
    1.5,
    "x",
    "",
    None,
    True,
    [],
    {},
    [[]],
    {"a": 1},
)


def edit(case: Case, file: Path, others: list[Path]) -> None:
    """Change values in a JSON file."""
    content = json.loads(file.read_text())
    for _ in range(case.random.choice((1, 1, 2))):
        container, key = _place(case, content)
        if container is None:
            content = case.random.choice(VALUES)
            break
        match case.random.choice(("value", "value", "unknown", "missing", "deep", "long")):
            case "value":
                container[key] = case.random.choice(VALUES)
            case "unknown" if isinstance(container, dict):
                container[case.random.choice(("unknown", "", "\0", "a" * 3000))] = case.random.choice(VALUES)
            case "missing" if isinstance(container, dict):
                container.pop(key, None)
            case "deep":
                container[key] = json.loads("[" * 500 + "]" * 500)
            case "long":
                container[key] = "word " * 5000
        case.note(f"{key!r:.30} is now {str(container)[:60]}")
    file.write_text(json.dumps(content))


def _place(case: Case, content: Any) -> tuple[Any, Any]:
    """Return a random position in nested lists and dictionaries."""
    container, key = None, None
    while isinstance(content, dict | list) and content and (container is None or case.chance(0.8)):
        container = content
        key = case.random.choice(list(content) if isinstance(content, dict) else range(len(content)))
        content = container[key]
    return container, key


# Foreign files


def foreign(case: Case, folder: Path) -> None:
    """Check that a rejected training run deletes nothing in a folder that it did not create."""
    names = [
        ".notes.part",
        ".x.part",
        "text.txt",
        "data/.y.part",
        "data/z.part",
        "config.json",
        "data/dev.tsv",
    ]
    chosen = [*case.random.sample(names, case.random.randint(1, 5)), "mine.txt"]
    for name in chosen:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("mine")
    resume = case.chance(0.5)
    case.note(f"train(resume={resume}) in a folder with {chosen}")
    try:
        train(folder, PAIRS, config=TranslationConfig.preset("tiny").override(SETTINGS), resume=resume)
    except regard.RegardError:
        gone = [name for name in chosen if not (folder / name).exists()]
        if gone:
            raise Failure("a refused training deletes other people's files", f"{gone}") from None
        return
    raise Failure("a training begins in a folder with other people's files")

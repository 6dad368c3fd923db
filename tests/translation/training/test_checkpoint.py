"""Model folders and checkpoints: files are complete or absent, and corruption is detected."""

import errno
import json
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as limits
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from regard._util.files import CHECKSUMS
from regard.errors import ArgumentError
from regard.models.packed import Packed
from regard.translation.config import TranslationConfig
from regard.translation.folder_lock import is_training, lock_folder
from regard.translation.model_folder import (
    CONFIG,
    FORMAT,
    MODEL,
    OPTIMIZER,
    SHARED,
    SOURCE,
    STATE,
    TARGET,
    read_config,
    write_config,
)
from regard.translation.tokens import Tokenizer, TokenizerPair
from regard.translation.training.checkpoint import (
    Checkpoint,
    load_model,
    optimizer_tensors,
    restore_optimizer,
    write_parameters,
    write_tokens,
)
from regard.translation.training.distributed.world import World
from tests.translation.folders import check_flipped_bits, content, no_file_larger_than
from tests.translation.small import TOKENS, small_config

FILES = (MODEL, OPTIMIZER, STATE)


def write_folder(
    folder: Path, config: TranslationConfig | None = None, tokens: TokenizerPair = TOKENS
) -> dict[str, Tensor]:
    """Write a model folder; return its weights."""
    config = config or small_config()
    folder.mkdir(exist_ok=True)
    write_config(folder, config)
    write_tokens(folder, tokens)
    weights = config.model.build(tokens.sizes()).state_dict()
    write_parameters(folder, weights)
    return weights


def test_only_one_run_locks_a_folder(tmp_path):
    folder = tmp_path / "new" / "model"
    with lock_folder(folder):
        with pytest.raises(ArgumentError, match="Another training run is using"), lock_folder(folder):
            pytest.fail("two locks")
        assert folder.is_dir()  # the failed lock removes nothing
    assert not folder.parent.exists()
    folder.mkdir(parents=True)
    with lock_folder(folder):
        pass
    assert folder.is_dir()  # it existed before
    with lock_folder(folder):
        (folder / "kept").touch()
    with lock_folder(folder):  # unlocked
        assert [path.name for path in folder.iterdir()] == ["kept"]


def test_a_removed_folder_hides_no_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="mine"), lock_folder(tmp_path / "model"):
        (tmp_path / "model").rename(tmp_path / "other") and os.stat(tmp_path / "mine")
    with lock_folder(tmp_path / "model"):  # no error from the lock itself
        (tmp_path / "model").rmdir()


@pytest.mark.parametrize("model", ["transformer", "recurrent", "plain"])
@pytest.mark.parametrize("shared", [True, False])
def test_write_and_load(tmp_path, model, shared):
    config = small_config(model, f"tokens.shared={str(shared).lower()}")
    target = Tokenizer.learn(["a b c d"], kind="words", size=9)
    weights = write_folder(tmp_path, config, TOKENS if shared else TokenizerPair(TOKENS.source, target))
    assert {path.name for path in tmp_path.glob("*.model")} == ({SHARED} if shared else {SOURCE, TARGET})
    found = load_model(tmp_path)
    assert TranslationConfig.from_dict(found.config["settings"]) == config
    assert found.tokens.shared == shared
    assert len(found.tokens.target) == (len(TOKENS.source) if shared else len(target))
    assert not found.model.training
    loaded = found.model.state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in weights.items())
    assert not any(tensor.is_meta for tensor in [*found.model.parameters(), *found.model.buffers()])


@pytest.mark.parametrize("positions", ["sinusoidal", "learned", "rotary", "alibi", "t5", "none"])
@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_a_loaded_model_computes_the_same(tmp_path, positions, norm):
    config = small_config("transformer", f"model.positions={positions}", f"model.norm={norm}")
    weights = write_folder(tmp_path, config)
    model = config.model.build(TOKENS.sizes()).eval()
    model.load_state_dict(weights)
    source, target = Packed.of([[5, 6, 2], [7, 2]]), Packed.of([[1, 5], [1, 6, 7]])
    assert torch.equal(load_model(tmp_path).model(source, target), model(source, target))


def test_float16_weights_are_computed_with_as_float32(tmp_path):
    weights = {name: tensor.half() for name, tensor in write_folder(tmp_path).items()}
    write_parameters(tmp_path, weights)
    loaded = load_model(tmp_path).model.state_dict()
    assert all(torch.equal(loaded[name], tensor.float()) for name, tensor in weights.items())
    assert {tensor.dtype for tensor in loaded.values()} == {torch.float32}


def test_bfloat16_weights_are_loaded(tmp_path):
    weights = write_folder(tmp_path)
    write_parameters(tmp_path, {name: tensor.bfloat16() for name, tensor in weights.items()})
    assert {parameter.dtype for parameter in load_model(tmp_path).model.parameters()} == {torch.bfloat16}


def changed(folder: Path, **changes: Tensor | None) -> None:
    """Replace some weights in a folder; None removes one."""
    weights: dict[str, Any] = load_file(folder / MODEL)
    name = next(iter(weights))
    weights |= {name if key == "first" else key: value for key, value in changes.items()}
    save_file({key: value for key, value in weights.items() if value is not None}, folder / MODEL)


def settings(folder: Path, section: str, **changes: object) -> None:
    """Change settings in a folder, or keys in its config.json."""
    folder_config = json.loads((folder / CONFIG).read_text())
    del folder_config["sha256"]  # the checksum is optional for edited files
    (folder_config["settings"][section] if section else folder_config).update(changes)
    (folder / CONFIG).write_text(json.dumps(folder_config))


def replace(path: Path, create: Callable[[Path], object] = os.mkfifo) -> None:
    """Replace a file with a pipe or another kind of file."""
    path.unlink()
    create(path)


OTHER = Tokenizer.learn([" ".join(reversed("0123456789"))], kind="words", size=len(TOKENS.source))
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "nothing there": (shutil.rmtree, "does not exist"),
    "a file": (lambda folder: (shutil.rmtree(folder), folder.write_text("")), "is a file"),
    "no config": (lambda folder: (folder / CONFIG).unlink(), "no config.json"),
    "no weights": (lambda folder: (folder / MODEL).unlink(), "has no model yet"),
    "no vocabulary": (lambda folder: (folder / SHARED).unlink(), "tokens.model"),
    "no UTF-8": (lambda folder: (folder / CONFIG).write_bytes(b"\xff\xff"), "does not contain"),
    "unknown setting": (lambda folder: settings(folder, "model", wisth=3), "Did you mean model.width"),
    "wrong type": (lambda folder: settings(folder, "model", width="16"), "must be an integer, got '16'"),
    "wrong width": (lambda folder: settings(folder, "model", width=18), "shape"),
    "wrong layers": (lambda folder: settings(folder, "model", layers=2), "missing or unexpected tensors"),
    "other kind": (lambda folder: settings(folder, "model", kind="plain"), "missing or unexpected"),
    "other vocabulary": (lambda folder: Tokenizer.learn(["a"], kind="words").save(folder / SHARED), "shape"),
    "other vocabulary of the same size": (
        lambda folder: OTHER.save(folder / SHARED),
        "tokens.model is not the vocabulary that the model in model.safetensors was trained with",
    ),
    "weights without a checksum": (changed, "model.safetensors does not match its checksum"),
    "changed config": (
        lambda folder: (folder / CONFIG).write_text((folder / CONFIG).read_text().replace("0.2", "0.3")),
        "corrupted: it does not match its checksum",
    ),
    "unknown name": (lambda folder: settings(folder, "", orign={}), "unknown key 'orign'. .*mean 'origin'"),
    "newer name": (lambda folder: settings(folder, "", quantized=4), "written by a newer version of regard"),
    "damaged vocabulary": (lambda folder: (folder / SHARED).write_bytes(b"x"), "not a SentencePiece model"),
    "NaN": (lambda folder: changed(folder, first=torch.full((48,), torch.nan)), "has NaN or infinite values"),
    "missing tensor": (lambda folder: changed(folder, first=None), "missing or unexpected"),
    "more tensors": (lambda folder: changed(folder, more=torch.ones(1)), "missing or unexpected"),
    "cut off": (lambda folder: os.truncate(folder / MODEL, 1000), "corrupted"),
    "no safetensors": (lambda folder: (folder / MODEL).write_bytes(b"PK\x03\x04" * 99), "corrupted"),
}
for name, text, why in (
    ("empty", "", "does not contain"),
    ("a list", "[]", "does not contain"),
    ("foreign", '{"model_type": "bert"}', "does not contain"),
    ("deep", "[" * 100_000, "does not contain"),
    ("a huge number", "1" * 5000, "does not contain"),
    ("settings that are a list", json.dumps({"format": FORMAT, "settings": []}), "does not contain"),
    ("an unknown section", json.dumps({"format": FORMAT, "settings": {"x": {}}}), r"Unknown section \[x\]"),
    ("format 2", '{"format": "regard translator 2", "plan": {}}', "written by an older version of regard"),
    ("format 1", '{"format": "regard translator 1", "plan": {}}', "written by an older version of regard"),
):
    DAMAGES[f"config: {name}"] = (lambda folder, text=text: (folder / CONFIG).write_text(text), why)
for file, limit in ((CONFIG, "1.0 MB. Check the path"), (SHARED, "268.4 MB"), (MODEL, "")):
    DAMAGES |= {
        f"{file} is a pipe": (lambda folder, file=file: replace(folder / file), "is a named pipe"),
        f"{file} is a folder": (lambda folder, file=file: replace(folder / file, os.mkdir), "is a folder"),
        f"{file} is a device": (
            lambda folder, file=file: replace(folder / file, lambda path: os.symlink("/dev/zero", path)),
            "is a device",
        ),
        f"{file} has no end": (
            lambda folder, file=file: os.truncate(folder / file, 10**13),
            f"is 10000.0 GB; the limit is {limit}",
        ),
    }


@pytest.mark.timeout(30)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder_is_rejected(tmp_path, damage):
    folder = tmp_path / "model"
    write_folder(folder)
    harm, why = DAMAGES[damage]
    harm(folder)
    with pytest.raises(ArgumentError, match=why) as refused:
        load_model(folder)
    assert repr(str(folder))[:-1] in str(refused.value)  # the folder or a file in it
    assert "\n" not in str(refused.value)


HUGE = [
    {"width": 10**6, "heads": 1},
    {"width": 10**30, "heads": 1},
    {"width": 10**15, "heads": 10**15},
    {"layers": 10**12},
    {"heads": 10**8, "width": 10**8, "positions": "alibi"},
    {"heads": 10**8, "width": 10**8, "positions": "t5"},
    {"ffn_dim": 10**12},
    {"ffn_dim": 10**19},
    {"max_positions": 10**12, "positions": "learned"},
    {"max_positions": 10**300, "positions": "learned"},
    {"kind": "recurrent", "width": 10**12},
    {"kind": "plain", "layers": 10**12},
]


@pytest.mark.timeout(30)
@pytest.mark.parametrize("sizes", HUGE, ids=str)
def test_huge_sizes_are_rejected_before_allocation(tmp_path, sizes):
    write_folder(tmp_path)
    settings(tmp_path, "model", **sizes)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ArgumentError, match="corrupted"):
        load_model(tmp_path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + 200_000  # kB


def test_config_stores_other_keys(tmp_path):
    write_config(tmp_path, small_config(), alignment={"layer": -1})
    assert read_config(tmp_path)["alignment"] == {"layer": -1}


def save_one(folder: Path, step: int = 100, width: int = 3) -> Checkpoint:
    """Save a checkpoint of a layer with an optimizer."""
    torch.manual_seed(0)
    layer: Any = nn.Linear(width, 2)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(width)).sum().backward()
    optimizer.step()
    return World().save(folder, step, layer, optimizer, {"step": step})


def test_checkpoints_are_sorted_by_step(tmp_path):
    assert Checkpoint.all(tmp_path) == []
    for step in (20, 100_000_000, 3, 100):
        save_one(tmp_path, step)
    (tmp_path / "checkpoints" / "step-²").mkdir()
    (tmp_path / "checkpoints" / "step-old").mkdir()
    assert [found.step for found in Checkpoint.all(tmp_path)] == [3, 20, 100, 100_000_000]
    last = Checkpoint.all(tmp_path)[-1]
    assert last == Checkpoint.at(tmp_path, 100_000_000)
    assert last.state() == {"step": 100_000_000}
    assert load_file(last.path / MODEL).keys() == {"weight", "bias"}


def test_pruning_removes_other_and_incomplete_checkpoints_and_keeps_foreign_files(tmp_path):
    found = [save_one(tmp_path, step) for step in (1, 2, 3)]
    folder = found[0].path.parent
    for name in (".step-00000004.part", ".best.part", ".average.part"):
        (folder / name).mkdir()
    others = [
        "step-old/notes.txt",
        "step-00000001/notes.txt",
        "x.part",
        "step-7.part/a",
        "step-00000005/mine",
    ]
    for name in others:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("mine")
    Checkpoint.prune(tmp_path, found[1:])
    own = {f"step-0000000{step}/{name}" for step in (2, 3) for name in (*FILES, CHECKSUMS)}
    assert content(folder).keys() == {*others, *own}
    assert not list(folder.glob(".*.part"))
    assert Checkpoint.all(tmp_path) == found[1:]


def test_an_existing_checkpoint_is_not_changed(tmp_path):
    before = content(save_one(tmp_path).path)
    save_one(tmp_path, width=5)
    assert content(tmp_path / "checkpoints" / "step-00000100") == before


@pytest.mark.parametrize("size", [0, 50, 5_000])
def test_a_full_disk_changes_nothing(tmp_path, size):
    save_one(tmp_path)
    write_parameters(tmp_path, {"a": torch.ones(2)})
    before = content(tmp_path)
    with no_file_larger_than(size), pytest.raises(OSError, match="step-00000200") as refused:
        save_one(tmp_path, 200, width=5_000)
    assert refused.value.errno == errno.EFBIG
    with no_file_larger_than(size), pytest.raises(OSError, match=r"model\.safetensors") as refused:
        write_parameters(tmp_path, {"a": torch.zeros(10_000)})
    assert (refused.value.errno, refused.value.filename) == (errno.EFBIG, str(tmp_path / MODEL))
    assert content(tmp_path) == before
    assert [found.step for found in Checkpoint.all(tmp_path)] == [100]


@pytest.mark.parametrize("where", ["checkpoint.write_checksums", "checkpoint._sync", "checkpoint.os.replace"])
def test_a_failed_write_leaves_no_checkpoint(tmp_path, monkeypatch, where):
    def fail(*given: object, **named: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    save_one(tmp_path)
    before = content(tmp_path)
    monkeypatch.setattr(f"regard.translation.training.{where}", fail)
    with pytest.raises(OSError, match=r"No space left on device: .*step-00000200") as refused:
        save_one(tmp_path, 200)
    assert refused.value.errno == errno.ENOSPC
    assert content(tmp_path) == before


def test_a_path_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(OSError, match="step-00000100"):
        save_one(tmp_path)


@pytest.mark.parametrize("name", FILES)
@given(part=st.floats(-0.1, 0.99))
@limits(max_examples=10)  # each example waits for the disk
def test_an_incomplete_checkpoint_is_rejected(name, part, tmp_path_factory):
    """A checkpoint is rejected if it is truncated or lacks a file."""
    found = save_one(tmp_path_factory.mktemp("checkpoint"))
    whole = (found.path / name).read_bytes()
    (found.path / name).unlink()
    if part >= 0:
        (found.path / name).write_bytes(whole[: int(part * len(whole))])
    for read in (found.check, *[found.state] * (name == STATE)):
        with pytest.raises(
            ArgumentError,
            match=r"step-00000100.* is corrupted .*\. Remove it to resume from the previous one",
        ):
            read()


def test_every_flipped_bit_of_a_checkpoint_is_detected(tmp_path):
    found = save_one(tmp_path)
    files = list(found.path.iterdir())
    assert {path.name for path in files} == {*FILES, CHECKSUMS}
    check_flipped_bits(files, found.check, r"step-00000100.* is corrupted", 50)


@pytest.mark.parametrize("shared", ["true", "false"])
def test_every_flipped_bit_of_a_model_folder_is_detected(tmp_path, shared):
    sides = TOKENS if shared == "true" else TokenizerPair(TOKENS.source, OTHER)
    write_folder(tmp_path, small_config("transformer", f"tokens.shared={shared}"), sides)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == (3 if shared == "true" else 4)
    message = "corrupted|does not contain|unknown key|older version"
    check_flipped_bits(files, lambda: load_model(tmp_path), message)


def test_the_checksum_of_the_config_is_optional(tmp_path):
    write_folder(tmp_path)
    folder_config = json.loads((tmp_path / CONFIG).read_text())
    assert len(folder_config.pop("sha256")) == 64
    (tmp_path / CONFIG).write_text(json.dumps(folder_config))
    assert read_config(tmp_path) == folder_config


def test_nothing_is_written_into_a_removed_folder(tmp_path):
    folder = tmp_path / "model"
    with pytest.raises(FileNotFoundError) as refused:
        save_one(folder)
    assert refused.value.filename == str(folder / "checkpoints" / "step-00000100")
    with pytest.raises(FileNotFoundError) as refused:
        write_parameters(folder, {"a": torch.ones(2)})
    assert refused.value.filename == str(folder / MODEL)
    assert not folder.exists()


def test_is_training_detects_an_active_run(tmp_path):
    write_folder(tmp_path)
    (tmp_path / MODEL).unlink()
    with lock_folder(tmp_path):
        assert is_training(tmp_path)
        with pytest.raises(ArgumentError, match=r"Training is still running; try again later\.$"):
            load_model(tmp_path)
    assert not is_training(tmp_path)
    with pytest.raises(ArgumentError, match=r"run: regard train -o .* --resume$"):
        load_model(tmp_path)
    assert not is_training(tmp_path / "none")


def test_a_restored_optimizer_continues_exactly():
    def create() -> tuple[torch.nn.Linear, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 5)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)

    def update(model: torch.nn.Linear, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()

    whole, optimizer = create()
    for _ in range(3):
        update(whole, optimizer)
    names = [name for name, _ in whole.named_parameters()]
    restored, again = create()
    restored.load_state_dict({name: tensor.clone() for name, tensor in whole.state_dict().items()})
    tensors = {name: tensor.clone() for name, tensor in optimizer_tensors(optimizer, names).items()}
    restore_optimizer(again, names, tensors)
    for _ in range(3):
        update(whole, optimizer)
        update(restored, again)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), restored.parameters(), strict=True))
    for kind in ("exp_avg", "exp_avg_sq"):  # the fused optimizer would write past the end
        with pytest.raises(ValueError, match="weight is missing or has a different shape"):
            restore_optimizer(again, names, tensors | {f"{kind}:weight": torch.zeros(2, 3)})


@pytest.mark.parametrize(
    ("size", "message"),
    [(2**40, "1099.5 GB; the limit"), (2**30, "does not have the size stated in its header")],
)
@pytest.mark.parametrize("name", [MODEL, OPTIMIZER])
def test_a_sparse_file_is_rejected_before_hashing(tmp_path, name, size, message):
    saved = save_one(tmp_path, 1)
    os.truncate(saved.path / name, size)
    with pytest.raises(ArgumentError, match=message):
        saved.check()

"""Saved, copied and pickled lazy weights are restored bit for bit; corrupted files are rejected."""

import copy
import json
import math
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import regard
from regard.mechanism.weights.io import checksum
from tests.cases import NORMALIZERS, TABLE, Case, looped
from tests.custom import Squares
from tests.mechanism.weights.calls import Call, D, G, Q, attend, close, randn, same

KEPT = [Call(case, torch.float32) for case in TABLE[::7]]
KEPT += [Call(dtype=dtype) for dtype in (torch.float64, torch.bfloat16, torch.float16)]
KEPT += [
    Call(Case("grouped", normalize="sinks", mask="union", bias="several"), dropout=0.3),
    Call(Case("grouped", "additive", mask="padding"), dropout=0.3),
]


@looped("call", KEPT, ids=str, sampled=2)
def test_saved_and_copied_weights_come_back(call, tmp_path):
    weights = call.attend()[1]
    path = weights.save(tmp_path / "weights.safetensors")
    assert path == tmp_path / "weights.safetensors"
    for again in (regard.Weights.load(path), regard.Weights.load(str(path)), copy.copy(weights)):
        same(again, weights)
    for again in (copy.deepcopy(weights), pickle.loads(pickle.dumps(weights))):
        same(again, weights)


@looped(
    "part",
    [
        lambda weights: weights.mean("heads"),
        lambda weights: weights.heads(4),
        lambda weights: weights.heads([4, 0]),
        lambda weights: weights.heads(slice(1, 5)).mean("heads"),
        lambda weights: weights.detach(),
    ],
    ids=["mean", "head", "heads", "mean of heads", "detached"],
)
@looped("dropout", [0.0, 0.3])
def test_saved_parts_come_back(part, dropout, tmp_path):
    weights = part(Call(Case("grouped", mask="padding", bias="alibi"), dropout=dropout).weights())
    same(regard.Weights.load(weights.save(tmp_path / "part")), weights)
    same(copy.deepcopy(weights), weights)
    same(pickle.loads(pickle.dumps(weights)), weights)


def test_loaded_weights_have_the_same_repr(tmp_path):
    for name in NORMALIZERS:
        weights = Call(Case("grouped", normalize=name), torch.float32).weights()
        again = regard.Weights.load(weights.save(tmp_path / "weights"))
        assert repr(again).split(";")[0] == repr(weights).split(";")[0]


def test_self_attention_with_a_plain_dot_can_be_saved(tmp_path):
    x = randn(Q, D)  # query and key are the same tensor
    weights = regard.attend(x, x, x, score=regard.Dot())[1]
    same(regard.Weights.load(weights.save(tmp_path / "weights")), weights)


def test_a_slice_is_saved_without_the_tensor_it_is_a_view_of(tmp_path):
    large = torch.zeros(1000, 64, D)
    weights = regard.attend(large[0], large[1], large[1], score=regard.Dot())[1]
    assert weights.save(tmp_path / "weights").stat().st_size < 20_000


def test_save_makes_folders_and_respects_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        path = attend().save(tmp_path / "a" / "b" / "weights")
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o640


def test_weights_of_a_custom_normalizer_are_lazy_but_cannot_be_saved(tmp_path):
    query, key, value = Call().inputs()
    weights = regard.attend(query, key, value, normalize=Squares())[1]
    close(weights.dense(), (query @ key.mT / math.sqrt(D)).relu() ** 2)
    with pytest.raises(regard.ArgumentError, match="Squares"):
        weights.save(tmp_path / "weights")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("step", ["replace", "fsync", "chmod"])
@pytest.mark.parametrize(
    "failure", [OSError("the disk is full"), KeyboardInterrupt()], ids=["full", "interrupted"]
)
def test_a_failed_save_keeps_the_old_file(step, failure, tmp_path, monkeypatch):
    path = attend().save(tmp_path / "weights")
    before = path.read_bytes()

    def fail(*args: Any, **options: Any) -> None:
        raise failure

    with monkeypatch.context() as patch:
        patch.setattr(os, step, fail)
        with pytest.raises(type(failure)):
            attend(mask="causal").save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_path_that_cannot_be_written_is_an_os_error(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "file" / "weights", tmp_path / "folder"):
        with pytest.raises(OSError, match=str(tmp_path)):
            attend().save(path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder"]


def test_a_missing_file_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        regard.Weights.load(tmp_path / "nothing")


class Trap:
    """An object whose unpickling runs code."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_no_pickle_is_ever_opened(tmp_path):
    pickle.loads(pickle.dumps(Trap(tmp_path / "proof")))
    assert (tmp_path / "proof").exists()  # the trap works
    (tmp_path / "pickle").write_bytes(pickle.dumps(Trap(tmp_path / "sprung")))
    torch.save(Trap(tmp_path / "sprung"), tmp_path / "torch")
    for name in ("pickle", "torch"):
        with pytest.raises(regard.ArgumentError, match=name):
            regard.Weights.load(tmp_path / name)
    assert not (tmp_path / "sprung").exists()


def test_files_that_hold_no_weights_are_rejected(tmp_path):
    whole = attend().save(tmp_path / "whole").read_bytes()
    contents = {"empty": b"", "text": b"weights", "short": whole[:4], "header": whole[:40], "cut": whole[:-9]}
    contents |= {"longer": whole + b"more", "noise": b"\xff" * 100, "spoilt": b"\xff" + whole[1:]}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(regard.ArgumentError, match=name):
            regard.Weights.load(tmp_path / name)


def test_other_safetensors_files_are_rejected(tmp_path):
    for name, metadata in {"none": None, "other": {"format": "pt"}, "no json": {"regard": "hello"}}.items():
        save_file({"query": torch.ones(2, 3)}, tmp_path / name, metadata)
        with pytest.raises(regard.ArgumentError, match=name):
            regard.Weights.load(tmp_path / name)


def metadata_of(path: Path) -> dict[str, Any]:
    """Return the metadata of a saved file."""
    content = path.read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return json.loads(header["__metadata__"]["regard"])


def sign_and_save(text: Any, tensors: dict[str, Tensor], path: Path) -> None:
    """Write a file with a valid checksum: inconsistent content must still be rejected."""
    if isinstance(text, dict):
        rest = {name: part for name, part in text.items() if name != "checksum"}
        text = {**rest, "checksum": checksum(tensors, tensors.__getitem__, json.dumps(rest))}
    save_file(tensors, path, {"regard": json.dumps(text)})


def with_call(text: dict[str, Any], index: int, field: str) -> dict[str, Any]:
    """Replace a field of the call: normalizer, family, scale, softcap, dropout, terms or names."""
    fields = text["call"].split("|")
    fields[index] = field
    return {**text, "call": "|".join(fields)}


INVALID_METADATA: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a list": lambda text: [text],
    "a number": lambda text: 5,
    "a later format": lambda text: {**text, "format": "weights 9"},
    "an older format": lambda text: {**text, "format": "weights 3"},
    "no lead": lambda text: {name: part for name, part in text.items() if name != "lead"},
    "no rows_per_key_head": lambda text: {n: part for n, part in text.items() if n != "rows_per_key_head"},
    "another lead": lambda text: {**text, "lead": [3, 3]},
    "unknown key": lambda text: {**text, "color": "blue"},
    "no call": lambda text: {name: part for name, part in text.items() if name != "call"},
    "short call": lambda text: {**text, "call": text["call"].partition("|")[2]},
    "no normalizer": lambda text: with_call(text, 0, ""),
    "unknown normalizer": lambda text: with_call(text, 0, "Strange 0x1p+0"),
    "too many numbers": lambda text: with_call(text, 0, "Hard 0x1p+0"),
    "invalid number": lambda text: with_call(text, 0, "Entmax soft"),
    "unknown family": lambda text: with_call(text, 1, "cousin"),
    "invalid terms": lambda text: with_call(text, 5, "many"),
    "other tensors": lambda text: with_call(text, 6, "query,key"),
}


def assert_rejected(metadata: Any, tensors: dict[str, Tensor], path: Path) -> None:
    """Check that the file is rejected for a reason other than its checksum."""
    sign_and_save(metadata, tensors, path)
    with pytest.raises(regard.ArgumentError) as refused:
        regard.Weights.load(path)
    assert "does not match its checksum" not in str(refused.value)


@looped("how", INVALID_METADATA)
def test_inconsistent_metadata_is_rejected(how, tmp_path):
    path = attend(mask="causal").save(tmp_path / "weights")
    assert_rejected(INVALID_METADATA[how](metadata_of(path)), load_file(path), tmp_path / "spoilt")


@pytest.mark.parametrize("missing", ["query", "key", "stop0"])
def test_a_file_with_a_missing_tensor_is_rejected(missing, tmp_path):
    path = attend(mask="causal").save(tmp_path / "weights")
    tensors = {name: tensor for name, tensor in load_file(path).items() if name != missing}
    assert_rejected(metadata_of(path), tensors, tmp_path / "spoilt")


def test_older_formats_are_reported_as_old(tmp_path):
    path = attend(mask="causal").save(tmp_path / "weights")
    for old in ("weights 1", "weights 2", "weights 3"):
        sign_and_save({**metadata_of(path), "format": old}, load_file(path), tmp_path / "old")
        with pytest.raises(
            regard.ArgumentError, match=f"{old}.*older version of regard; save the weights again"
        ):
            regard.Weights.load(tmp_path / "old")


@pytest.mark.parametrize("leaf", [True, False], ids=["leaf", "not a leaf"])
def test_copies_of_weights_that_require_gradients(leaf):
    query, key, value = (t.requires_grad_() for t in Call().inputs())
    sinks = randn(G).requires_grad_()
    if not leaf:
        query, key, sinks = query * 1, key * 1, sinks * 1
    options = {
        "score": regard.Dot(),
        "normalize": regard.Softmax1(sinks),
        "bias": regard.ClippedRelativeBias(randn(G, 7)),
    }
    weights = regard.attend(query, key, value, **options)[1]
    for again in (copy.deepcopy(weights), pickle.loads(pickle.dumps(weights))):
        same(again, weights)
        assert not again.dense().requires_grad


def test_a_copy_outlives_the_tensors_it_was_made_of():
    query, key, value = Call().inputs()
    weights = regard.attend(query, key, value, score=regard.Dot())[1]
    dense, again = weights.dense(), copy.deepcopy(weights)
    key.zero_()
    query.zero_()
    assert torch.equal(again.dense(), dense)


def test_as_numpy():
    weights = Call(Case(mask="causal", bias="dense")).attend()[1]
    dense = weights.dense().detach()
    for array in (weights.numpy(), np.asarray(weights), np.array(weights, copy=True)):
        assert array.dtype == np.float64
        assert np.array_equal(array, dense)
    assert np.asarray(weights, dtype=np.float32).dtype == np.float32
    assert Call(dtype=torch.bfloat16).weights().numpy().dtype == np.float32


def test_to_a_device():
    weights = Call(Case(mask="causal", bias="alibi"), dropout=0.3).weights()
    same(weights.to("cpu"), weights)
    same(weights.to(torch.device("cpu")), weights)
    assert weights.to("meta").device.type == "meta"
    assert weights.to("meta").shape == weights.shape


def test_no_flipped_bit_of_a_file_goes_unnoticed(tmp_path: Path) -> None:
    x = torch.randn(7, 5)
    weights = regard.attend(x, x, x, mask=regard.Causal())[1]
    content = weights.save(tmp_path / "w").read_bytes()
    rng = np.random.default_rng(0)
    for at in rng.choice(len(content) * 8, 300, replace=False).tolist():
        damaged = bytearray(content)
        damaged[at // 8] ^= 1 << at % 8
        (tmp_path / "damaged").write_bytes(damaged)
        try:
            again = regard.Weights.load(tmp_path / "damaged")
        except regard.ArgumentError:
            continue
        assert torch.equal(again.dense(), weights.dense())  # the changed byte is whitespace in the header

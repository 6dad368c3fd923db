"""Files are written atomically, and malicious ones are rejected."""

import hashlib
import json
import os
import socket
import stat

import pytest
import safetensors.torch
import torch

import regard
from regard._util.files import (
    CHECKSUMS,
    check_regular,
    open_atomic,
    open_regular,
    read_regular,
    remove_partial_files,
    short_names,
    verify_checksums,
    write_atomic,
    write_checksums,
)
from regard.mechanism.weights.io import checksum


def test_links_are_followed_and_the_mode_is_kept(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_bytes(b"old")
    target.chmod(0o600)
    link.symlink_to(target)
    write_atomic(link, b"new")
    assert link.is_symlink()
    assert target.read_bytes() == b"new"
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    assert sorted(os.listdir(tmp_path)) == ["link", "target"]


def test_only_regular_files_are_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(regard.ArgumentError, match="not a regular file"):
        write_atomic(tmp_path / "pipe", b"new")
    with pytest.raises(IsADirectoryError, match="folder"):
        write_atomic(tmp_path, b"new")


def test_errors_name_the_requested_file(tmp_path, monkeypatch):
    path = tmp_path / "x.json"
    for name in ("open", "fsync", "replace"):  # missing folder, no space left, no permission

        def refuse(*arguments, name=name, **options):
            raise PermissionError(13, "Permission denied", None if name == "fsync" else arguments[0])

        with monkeypatch.context() as patch:
            patch.setattr(os, name, refuse)
            with pytest.raises(PermissionError) as caught:
                write_atomic(path, b"new")
        assert caught.value.filename == str(path)
        assert os.listdir(tmp_path) == []


def test_errors_of_other_files_are_unchanged(tmp_path):
    with pytest.raises(FileNotFoundError) as caught, open_atomic(tmp_path / "new"):
        (tmp_path / "missing").read_bytes()
    assert os.fspath(caught.value.filename) == str(tmp_path / "missing")
    with pytest.raises(OSError, match=r"^the server is gone$"), open_atomic(tmp_path / "new"):
        raise OSError("the server is gone")
    assert os.listdir(tmp_path) == []


def test_a_file_is_replaced_only_when_complete(tmp_path):
    path = tmp_path / "new" / "notes"
    with open_atomic(path) as file:
        file.write(b"one")
        assert not path.exists()
    assert path.read_bytes() == b"one"
    with pytest.raises(TypeError), open_atomic(path) as file:
        file.writelines([b"two", "no bytes"])
    assert path.read_bytes() == b"one"
    assert os.listdir(path.parent) == ["notes"]


def test_a_private_file_stays_private_while_written(tmp_path):
    path = tmp_path / ("x" * 255)  # the maximum length of a file name
    path.write_bytes(b"old")
    path.chmod(0o600)
    with open_atomic(path):
        assert {stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()} == {0o600}
    assert path.read_bytes() == b""


def test_names_are_the_last_parts_of_paths():
    assert short_names(["a/b/small", "c/large", "a/x", "c/x"]) == ["small", "large", "a/x", "c/x"]
    with pytest.raises(regard.ArgumentError, match="2 times"):
        short_names(["a", "a"])


def special_files(folder):
    """Create one special file of each kind; return their names and descriptions."""
    os.mkfifo(folder / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(folder / "socket"))
    (folder / "folder").mkdir()
    (folder / "zero").symlink_to("/dev/zero")
    (folder / "to a pipe").symlink_to(folder / "pipe")
    return {
        "pipe": r"a named pipe \(FIFO\)",
        "socket": "a socket",
        "folder": "a folder",
        "zero": "a device",
        "to a pipe": r"a named pipe \(FIFO\)",
    }


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    "read", [check_regular, open_regular, lambda path: read_regular(path, 9), regard.Weights.load]
)
def test_only_regular_files_are_opened(read, tmp_path):
    for name, kind in special_files(tmp_path).items():
        with pytest.raises(regard.ArgumentError, match=f"{name}' is {kind}; pass a regular file"):
            read(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "none")


def test_files_are_read_up_to_a_limit(tmp_path):
    (tmp_path / "file").write_bytes(b"123456789")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert read_regular(tmp_path / "link", 9) == b"123456789"
    with pytest.raises(
        regard.ArgumentError, match=r"'.*file' is 0\.0 kB; the limit is 0\.0 kB\. Check the path"
    ):
        read_regular(tmp_path / "file", 8)
    with pytest.raises(regard.ArgumentError, match="/proc/self/maps"):
        read_regular("/proc/self/maps", 8)  # reports size 0
    os.truncate(tmp_path / "file", 10**13)
    with pytest.raises(regard.ArgumentError, match=r"is 10000\.0 GB; the limit is .*\. Check the path"):
        regard.Weights.load(tmp_path / "file")


def test_a_pipe_that_replaces_a_file_does_not_block(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setattr("regard._util.files.check_regular", lambda path, max_bytes: None)
    with pytest.raises(regard.ArgumentError, match="is a named pipe"):
        open_regular(tmp_path / "pipe")


def test_only_partial_files_are_removed(tmp_path):
    partial = ".regard-0123456789abcdef.part"
    for name in (partial, ".regard-0123.part", "regard.part", ".video.part", "notes"):
        (tmp_path / name).write_text("mine")
    (tmp_path / ".regard-00000000000000ff.part").mkdir()
    with open_atomic(tmp_path / "new"):
        written = {path.name for path in tmp_path.glob(".regard-*")}
    (name,) = written - {path.name for path in tmp_path.glob(".regard-*")}
    (tmp_path / name).write_text("left by a killed process")
    remove_partial_files(tmp_path)
    remaining = {path.name for path in tmp_path.iterdir()}
    assert remaining == {
        *(".regard-0123.part", "regard.part", ".video.part", "notes", "new", ".regard-00000000000000ff.part")
    }


def test_checksums_match_sha256sum(tmp_path):
    (tmp_path / "a").write_bytes(b"one")
    (tmp_path / "b").write_bytes(b"two")
    write_checksums(tmp_path / "SHA256SUMS", ["b", "a"])
    lines = [f"{hashlib.sha256(text).hexdigest()}  {name}\n" for name, text in (("a", b"one"), ("b", b"two"))]
    assert (tmp_path / "SHA256SUMS").read_text() == "".join(lines)
    verify_checksums(tmp_path / "SHA256SUMS", ["a", "b"])
    with pytest.raises(ValueError, match="has no checksum for c"):
        verify_checksums(tmp_path / "SHA256SUMS", ["c"])
    for content in ("", "x", "".join(lines)[:-1], "\xff", lines[0] + "\n"):
        (tmp_path / "SHA256SUMS").write_bytes(content.encode("latin1"))
        with pytest.raises(ValueError, match="SHA256SUMS"):
            verify_checksums(tmp_path / "SHA256SUMS", ["b"])


def assert_rejected(path, change):
    """Change a weights file, sign it with a valid checksum, and load it."""
    x = torch.randn(8, 5, 4)
    regard.attend(x, x, x, mask=regard.Causal())[1].save(path)
    with safetensors.safe_open(path, "pt") as file:
        metadata = json.loads(file.metadata()["regard"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    change(metadata, tensors)
    del metadata["checksum"]
    metadata["checksum"] = checksum(tensors, tensors.__getitem__, json.dumps(metadata))
    safetensors.torch.save_file(tensors, path, {"regard": json.dumps(metadata)})
    with pytest.raises(regard.ArgumentError, match=r"Weights\.save") as caught:
        regard.Weights.load(path)
    assert "checksum" not in str(caught.value)


FIELDS = ("normalize", "family", "scale", "softcap", "dropout", "terms", "names")  # in order


@pytest.mark.parametrize(
    "changes",
    [
        {"terms": str(10**9)},
        {"terms": "-1"},
        {"terms": "0"},
        {"terms": "True"},
        {"queries": -5},
        {"queries": 1.5},
        {"dropout": "nan"},
        {"dropout": "0x1p+1"},
        {"softcap": "0x0p+0"},
        {"lead": [8.0]},
        {"lead": [-2, -4]},
        {"lead": [True, 8]},
        {"lead": 8},
        {"call": None},
        {"normalize": "5"},
        {"normalize": "None"},
        {"normalize": "Softmax " + "1" * 10**6},
        {"normalize": "Softmax1"},
        {"score": 3},
        {"nan_safe": False},
    ],
    ids=lambda changes: f"{next(iter(changes.items()))!r:.40}",
)
def test_inconsistent_metadata_is_rejected(changes, tmp_path):
    def change(metadata, tensors):
        fields = dict(zip(FIELDS, metadata["call"].split("|"), strict=True))
        fields |= {name: value for name, value in changes.items() if name in FIELDS}
        metadata |= {"call": "|".join(fields.values())}
        metadata |= {name: value for name, value in changes.items() if name not in FIELDS}

    assert_rejected(tmp_path / "weights", change)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("tau", torch.zeros(8, 1, 5, 1)),
        ("tau", torch.zeros(8, 1, 4, 2)),
        ("query", torch.zeros(8, 1, 5, 4, dtype=torch.int64)),
        ("query", torch.zeros(8, 1, 5, 4, dtype=torch.float64)),
        ("key", torch.zeros(3, 1, 5, 4)),
        ("key", torch.zeros(8, 1, 5, 3)),
        ("stop0", torch.zeros(1, 1, 5, 1)),
        ("stop0", torch.zeros(1, 1, 3, 1, dtype=torch.int64)),
        ("allowed7", torch.ones(1, 1, 5, 5, dtype=torch.bool)),
        ("value", torch.zeros(8, 1, 5, 4)),
    ],
    ids=lambda x: x if isinstance(x, str) else str(tuple(x.shape)),
)
def test_invalid_tensors_are_rejected(name, tensor, tmp_path):
    def change(metadata, tensors):
        tensors[name] = tensor
        metadata["call"] = "|".join([*metadata["call"].split("|")[:-1], ",".join(sorted(tensors))])

    assert_rejected(tmp_path / "weights", change)


def test_huge_sparse_files_are_not_hashed(tmp_path):
    (tmp_path / "notes.txt").write_text("complete")
    write_checksums(tmp_path / CHECKSUMS, ["notes.txt"])
    os.truncate(tmp_path / "notes.txt", 2**42)
    with pytest.raises(regard.ArgumentError, match=r"is 4398\.0 GB; the limit is .*\. Check the path"):
        verify_checksums(tmp_path / CHECKSUMS, ["notes.txt"])

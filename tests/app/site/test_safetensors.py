"""The safetensors reader of the static site reads every supported dtype exactly and reports clear errors."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from tests.app.site.backend import RUNTIMES, needs_deno, run_script

pytestmark = needs_deno
# zeros of both signs, the smallest and largest float16 numbers, numbers that float16 rounds
VALUES = torch.tensor(
    [[0.0, -0.0, 1.0], [2**-24, -(2**-14), 65504.0], [0.1, -1 / 3, 1e-5], [6e-8, 1000.5, -7.0]]
)


def read(folder: Path, files: list[bytes], runtime: str = "deno") -> list[dict[str, Any]]:
    for number, content in enumerate(files):
        (folder / f"{number}.safetensors").write_bytes(content)
    (folder / "count.json").write_text(str(len(files)))
    run_script("read.js", folder, runtime)
    return json.loads((folder / "read.json").read_text())


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_values_are_exact(runtime: str, tmp_path: Path) -> None:
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    tensors = {str(dtype): VALUES.to(dtype) for dtype in dtypes} | {"empty": torch.zeros(0, 5)}
    (found,) = read(tmp_path, [save(tensors, {"made": "here"})], runtime)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name]["shape"] == list(tensor.shape)
        assert [float(x) for x in found[name]["data"]] == tensor.double().flatten().tolist()


def file_of(header: dict[str, Any], data: bytes = b"\0" * 8) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def tensor(dtype: str, shape: list[int], start: int, stop: int) -> dict[str, Any]:
    return {"x": {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}}


def test_damaged_files_are_errors(tmp_path: Path) -> None:
    files = {
        "A safetensors file has at least 8 bytes; this one has 3": b"abc",
        "The header has 1000 bytes, but the file has only 11": struct.pack("<Q", 1000) + b"abc",
        "x has dtype I64; the supported dtypes are F32, F16, BF16": file_of(tensor("I64", [1], 0, 8)),
        "x has shape 3 and dtype F32, but 8 bytes": file_of(tensor("F32", [3], 0, 8)),
        "x ends at byte 16, but the file has 8": file_of(tensor("F32", [2], 8, 16)),
    }
    for message, found in zip(files, read(tmp_path, list(files.values())), strict=True):
        assert found["error"].startswith(message)

"""Reading parameters from untrusted files."""

from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from regard.models.parameters import check_shapes, check_values, meta_device, read_parameters


def model(device: str = "cpu") -> nn.Module:
    with torch.device(device):
        return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 5, bias=False))


def written(path: Path, **changed: Tensor | None) -> Path:
    """Save the model's parameters with some changes; parameters set to None are omitted."""
    tensors = model().state_dict() | {name.replace("_", "."): one for name, one in changed.items()}
    save_file(
        {name: tensor for name, tensor in tensors.items() if tensor is not None}, path / "x.safetensors"
    )
    return path / "x.safetensors"


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_saved_parameters_are_read(tmp_path: Path, device: str, dtype: torch.dtype) -> None:
    tensors = {name: tensor.to(dtype) for name, tensor in model().state_dict().items()}
    save_file(tensors, tmp_path / "x.safetensors")
    actual = read_parameters(tmp_path / "x.safetensors", model(device))
    assert actual.keys() == tensors.keys()
    assert all(torch.equal(actual[name], tensor) for name, tensor in tensors.items())


def test_tensors_are_independent_of_the_file(tmp_path: Path) -> None:
    path = written(tmp_path)
    actual = read_parameters(path, model())
    before = {name: tensor.clone() for name, tensor in actual.items()}
    path.write_bytes(bytes(path.stat().st_size))
    assert all(torch.equal(actual[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"0_weight": None}, "missing or unexpected tensors: .*0.weight"),
        ({"2_weight": torch.ones(2)}, "missing or unexpected tensors: .*2.weight"),
        ({"0_weight": torch.ones(2, 3)}, r"0.weight has shape \[2, 3\]; the settings require \[3, 2\]"),
        ({"0_weight": torch.full((3, 2), torch.nan)}, "0.weight has NaN or infinite values"),
        ({"0_bias": torch.tensor([1, torch.inf, 1])}, "0.bias has NaN or infinite values"),
        ({"0_bias": torch.ones(3, dtype=torch.float64)}, "must have the same floating-point dtype"),
        ({"0_bias": torch.ones(3, dtype=torch.int64)}, "0.bias has dtype torch.int64"),
        ({"0_bias": torch.ones(3, dtype=torch.bool)}, "0.bias has dtype torch.bool"),
        ({"0_bias": torch.ones(3, dtype=torch.complex64)}, "0.bias has dtype torch.complex64"),
        ({"0_bias": torch.ones(3).to(torch.float8_e4m3fn)}, "must have the same floating-point dtype"),
    ],
)
def test_mismatched_tensors_are_rejected(tmp_path: Path, changed: dict[str, Tensor | None], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        read_parameters(written(tmp_path, **changed), model("meta"))


def test_other_dtypes_are_rejected() -> None:
    tensors = {"weight": torch.ones(3).to(torch.float8_e4m3fn)}
    with pytest.raises(ValueError, match=r"weight has dtype torch\.float8_e4m3fn"):
        check_values(tensors)


@pytest.mark.parametrize("size", [0, 7, 100])
def test_truncated_file_is_rejected(tmp_path: Path, size: int) -> None:
    path = written(tmp_path)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(SafetensorError):
        read_parameters(path, model())


def test_shapes_can_be_checked_separately() -> None:
    check_shapes(model(), {"0.weight": [3, 2], "0.bias": [3], "1.weight": [5, 3]})
    with pytest.raises(ValueError, match=r"1\.weight has shape"):
        check_shapes(model(), {"0.weight": [3, 2], "0.bias": [3], "1.weight": [3, 5]})


def test_the_meta_device_skips_initial_values() -> None:
    """Random values on the meta device would import torch's compiler, which takes seconds."""
    with meta_device():
        modules = nn.ModuleList([nn.Embedding(5, 3), nn.Linear(3, 7), nn.LayerNorm(7)])
        outside = torch.zeros(3, device="cpu")
        nn.init.constant_(outside, 1.0)
    assert all(parameter.is_meta for parameter in modules.parameters())
    assert not outside.any()
    nn.init.constant_(outside, 1.0)
    assert outside.all()

"""Recordings: head statistics, rollout, and untrusted folders."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import regard
from regard.inspection import head_statistics

pytestmark = pytest.mark.usefixtures("one_thread")


class Model(nn.Module):
    """Two attention layers over embedded tokens."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(9, 8)
        self.layers = nn.ModuleList(nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        hidden = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)
        for layer in self.layers:
            x = x + layer(x, x, x, attn_mask=hidden, need_weights=False)[0]
        return x


IDS = torch.tensor([[5, 6, 7, 5, 6, 7], [1, 2, 3, 4, 1, 2]])


def watched(**options: Any) -> regard.Seen:
    model = Model().eval()
    with (
        torch.no_grad(),
        regard.watch(model, tokenizer=lambda ids: [f"w{i}" for i in ids], **options) as seen,
    ):
        model(IDS)
    return seen


def dense_measures(weights: Tensor, ids: Tensor) -> dict[str, Tensor]:
    """Compute the measures from dense weights (b, h, n, n)."""
    n = weights.shape[-1]
    row, key = torch.arange(n)[:, None], torch.arange(n)
    repeats = torch.stack(
        [(row_ids[row] == row_ids[(key - 1).clamp(min=0)]) & (key > 0) & (key - 1 < row) for row_ids in ids]
    )
    counted = repeats.any(-1)
    induced = (weights * repeats[:, None]).sum(-1)
    return {
        "entropy": torch.special.entr(weights).sum(-1).mean((0, 2)),
        "distance": (weights * (row - key).abs()).sum(-1).mean((0, 2)),
        "first": weights[..., 0].mean((0, 2)),
        "previous": weights.diagonal(-1, -2, -1).mean((0, 2)),
        "induction": induced.movedim(1, 0).flatten(1)[:, counted.flatten()].mean(1),
    }


def test_measures_equal_those_of_the_dense_matrix() -> None:
    seen = watched()
    table = seen.heads(frame=False)
    for layer, name in enumerate(seen):
        expected = dense_measures(seen[name].dense().double(), IDS)
        for head in range(2):
            row = table[2 * layer + head]
            assert (row["layer"], row["head"]) == (name, head)
            for column, values in expected.items():
                assert row[column] == pytest.approx(float(values[head]), abs=1e-6), column


def test_measures_of_many_tiles() -> None:
    x = torch.randn(1, 2, 700, 4)
    weights = regard.attend(x, x, x, mask=regard.Causal())[1]
    ids = torch.randint(0, 50, (1, 700))
    heads, expected = head_statistics(weights, ids=ids), dense_measures(weights.dense().double(), ids)
    for name, values in expected.items():
        measured = torch.tensor([head.measures[name] for head in heads], dtype=torch.float64)
        torch.testing.assert_close(measured, values, rtol=1e-4, atol=1e-5)


def test_the_first_key_follows_left_padding() -> None:
    x = torch.randn(1, 2, 5, 4)
    mask = regard.Causal() & regard.Padding([3], side="left")
    weights = regard.attend(x, x, x, mask=mask)[1]
    heads = head_statistics(weights)
    first = torch.tensor([head.measures["first"] for head in heads])
    torch.testing.assert_close(first, weights.dense()[0, :, 2:, 2].mean(-1))
    assert all("induction" not in head.measures for head in heads)


def test_measures_that_do_not_apply_are_nan() -> None:
    layer = regard.models.SelfAttention()
    with regard.watch(layer) as seen:
        layer(torch.eye(3))
    assert math.isnan(seen.heads(frame=False)[0]["induction"])  # no token ids


def test_heads_as_a_pandas_frame() -> None:
    pandas = pytest.importorskip("pandas")
    frame = watched().heads()
    assert isinstance(frame, pandas.DataFrame)
    assert len(frame) == 4
    assert frame.groupby("layer")["entropy"].mean().between(0, 2).all()


def test_rollout_uses_all_layers() -> None:
    seen = watched()
    assert torch.equal(seen.rollout(-1), regard.rollout([seen[0], seen[1]], -1))
    torch.testing.assert_close(seen.rollout().sum(-1), torch.ones(2))


def test_save_and_load(tmp_path: Path) -> None:
    seen = watched()
    again = regard.Seen.load(seen.save(tmp_path / "recording"))
    assert list(again) == list(seen)
    assert repr(again) == repr(seen)
    for name in seen:
        assert torch.equal(again[name].dense(), seen[name].dense())
        assert again.kind(name) == seen.kind(name)
        assert again.texts(name, row=1) == seen.texts(name, row=1) == ([f"w{i}" for i in IDS[1]],) * 2
    assert again.heads(frame=False) == seen.heads(frame=False)
    assert again.tokens == seen.tokens
    assert sorted(path.name for path in (tmp_path / "recording").iterdir()) == [
        "0.safetensors",
        "1.safetensors",
        "recording.json",
    ]
    once_more = regard.Seen.load(again.save(tmp_path / "recording"))
    assert once_more.texts(0) == seen.texts(0)


def test_save_and_load_several_calls(tmp_path: Path) -> None:
    model = Model().eval()
    with torch.no_grad(), regard.watch(model) as seen:
        model(IDS)
        model(IDS[:, :3])
    again = regard.Seen.load(seen.save(tmp_path))
    assert list(again) == list(seen) == ["layers.0", "layers.1", "layers.0@2", "layers.1@2"]
    assert again["layers.1@2"].shape == (2, 2, 3, 3)
    assert [tuple(seen.ids(name).shape) for name in seen] == [(2, 6), (2, 6), (2, 3), (2, 3)]  # type: ignore[union-attr]


def test_to_another_device() -> None:
    seen = watched()
    there = seen.to("cpu")
    assert list(there) == list(seen)
    assert torch.equal(there[1].dense(), seen[1].dense())
    assert there.texts(0) == seen.texts(0)


# Invalid folders


def test_another_format_version_raises(tmp_path: Path) -> None:
    watched().save(tmp_path)
    about = json.loads((tmp_path / "recording.json").read_text())
    (tmp_path / "recording.json").write_text(json.dumps({**about, "format": "recording 9", "regard": "7.5"}))
    with pytest.raises(
        regard.ArgumentError,
        match=r"has the format 'recording 9' of regard 7.5; regard .* reads 'recording 2'",
    ):
        regard.Seen.load(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"layers": [{"name": 5, "kind": "self"}]},
        {"layers": [{"name": "a", "kind": "other"}]},
        {"layers": [{"name": "a", "kind": "self"}] * 5},
        {"layers": None},
        {"layers": [{"name": "../../../etc/passwd\x00", "kind": "self"}] * 9},
        {"texts": [{"source": {"ids": ["x"], "words": None}, "target": {"ids": None, "words": None}}]},
        {"texts": [{"source": {"ids": None, "words": [[5]]}, "target": {"ids": None, "words": None}}]},
        *(
            {"texts": [{"source": {"ids": ids, "words": None}, "target": {"ids": None, "words": None}}]}
            for ids in (
                float("nan"),
                [[float("nan")]],
                [[1.5]],
                [[True]],
                [[2**63]],
                [[10**30]],
                [[[1]]],
                [[1], [1, 2]],
                [],
                5,
                "12",
                {"0": [1]},
                [None],
                [[None]],
            )
        ),
        *(
            {"texts": [{"source": {"ids": None, "words": words}, "target": {"ids": None, "words": None}}]}
            for words in (float("nan"), 5, "ab", ["ab"], [["a"], 5], {"a": ["b"]}, [[["a"]]])
        ),
        {"texts": float("nan")},
        {"texts": [float("nan")]},
        {"texts": [{"source": 5, "target": 5}]},
        {"layers": float("nan")},
        {"layers": [[]]},
        {"texts": 5},
        {"format": 5},
    ],
)
def test_malformed_descriptions_raise(tmp_path: Path, change: dict[str, Any]) -> None:
    watched().save(tmp_path)
    about = json.loads((tmp_path / "recording.json").read_text())
    (tmp_path / "recording.json").write_text(json.dumps({**about, **change}))
    with pytest.raises(regard.ArgumentError, match="Cannot read the recording"):
        regard.Seen.load(tmp_path)


def test_symlinks_and_other_files_raise(tmp_path: Path) -> None:
    home = watched().save(tmp_path / "recording")
    (home / "0.safetensors").rename(tmp_path / "elsewhere")
    (home / "0.safetensors").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(regard.ArgumentError, match=r"0.safetensors is missing"):
        regard.Seen.load(home)
    (home / "0.safetensors").unlink()
    (home / "0.safetensors").write_bytes(b"\x80\x04pickle")
    with pytest.raises(regard.ArgumentError, match="Cannot load lazy weights from"):
        regard.Seen.load(home)
    (home / "recording.json").write_text("[" * 100_000)
    with pytest.raises(regard.ArgumentError, match="Cannot read the recording"):
        regard.Seen.load(home)
    with pytest.raises(regard.ArgumentError, match=r"not a recording\. Pass a folder written by Seen\.save"):
        regard.Seen.load(tmp_path / "nowhere")


def test_other_folders_are_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(regard.ArgumentError, match="exists and is not a recording"):
        watched().save(tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_half_precision_can_be_saved(tmp_path: Path) -> None:
    class Half(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x)

    model, x = Half(), torch.randn(1, 2, 3, 4, dtype=torch.bfloat16)
    with regard.watch(model) as seen:
        model(x)
    again = regard.Seen.load(seen.save(tmp_path))
    torch.testing.assert_close(again[0].dense(), seen[0].dense())

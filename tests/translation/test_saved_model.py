"""Translation without torch: the same results, and the same errors, as with the model in torch."""

import copy
import gc
import json
import pickle
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy
import pytest
import torch
from safetensors.torch import load_file, save_file

from regard.errors import ArgumentError
from regard.mechanism import fused
from regard.models import Transformer, TransformerConfig, quantize
from regard.models.configs import TransformerSettings
from regard.models.inference import saved_transformer
from regard.models.inference.saved_transformer import SavedTransformer, expected_shapes
from regard.models.layers.int8_packing import pack_int8
from regard.models.layers.linear import Int8Linear
from regard.translation import Beam, Greedy, Sample, load_translator
from regard.translation.alignment.alignment_head import AlignmentHead
from regard.translation.model_folder import MODEL
from regard.translation.saved_model import TENSOR_CHECKSUMS, read_saved_model
from tests.translation import folders

pytestmark = pytest.mark.skipif(not fused.available(), reason="needs the kernels")

SENTENCES = [
    "ein Hund bellt laut. und?",
    "",
    "eine Frau um 15:30",
    "zwei <b>Katzen</b> schlafen",
    "Ω Frau " * 9,
]
SETTINGS = {
    "default": [],
    "post-norm": ["model.norm_first=false"],
    "grouped heads": ["model.heads=4", "model.key_heads=2", "model.head_width=8"],
    "learned positions": ["model.positions=learned", "model.max_positions=256"],
    "no positions": ["model.positions=none"],
    "two vocabularies": ["tokens.shared=false"],
}


def write(tmp_path: Path, name: str) -> Path:
    return folders.write(tmp_path / "model", more=SETTINGS[name])


def in_torch(folder: Path, **options):
    """Load a translator whose model is built in torch."""
    translator = load_translator(folder, **options)
    assert translator.model
    return translator


def assert_equal(translations, expected):
    for translation, other in zip(translations, expected, strict=True):
        assert translation.text == other.text
        assert translation.score == pytest.approx(other.score, abs=1e-5)
        assert translation.note == other.note
        torch.testing.assert_close(
            translation.alignment.weights, other.alignment.weights, atol=1e-5, rtol=1e-4
        )
        assert_equal(translation.alternatives, other.alternatives)


@pytest.mark.parametrize("dtype", [None, "int8"])
@pytest.mark.parametrize("name", SETTINGS)
def test_translations_equal_those_of_the_model_in_torch(name, dtype, tmp_path):
    folder = write(tmp_path, name)
    translator, expected = load_translator(folder, dtype=dtype), in_torch(folder, dtype=dtype)
    assert translator.max_tokens == expected.max_tokens
    for strategy in (Greedy(), Beam(4, n_best=2)):
        options = {"strategy": strategy, "alignment": True, "batch_size": 2}
        results = translator.translate(SENTENCES, **options)
        assert translator._model is None  # no torch until here
        assert_equal(results, expected.translate(SENTENCES, **options))


def test_no_torch_is_imported(tmp_path):
    folder = folders.write(tmp_path / "model")
    code = (
        "import sys, regard\n"
        "from regard.translation.translator import load_translator\n"
        "for dtype in (None, 'int8'):\n"
        f"    translator = load_translator({str(folder)!r}, dtype=dtype)\n"
        "    (translation,) = translator.translate(['ein Hund um 15:30'], alignment=True)\n"
        "    translation.alignment.to_dict()\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
        "print(translation.alignment.weights.shape)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    assert done.stdout.startswith("torch.Size(")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("first", ["torch", "regard.mechanism.kernels.library"])
def test_the_kernels_and_torch_share_one_openmp_library(first):
    code = (
        f"import {first}\nimport torch, regard.mechanism.kernels.library\n"
        "print(len({line.split()[-1] for line in open('/proc/self/maps') if 'gomp' in line}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "1\n", done.stderr


@pytest.mark.parametrize("strategy", [Sample(seed=3), Beam(3, early_stopping=True)])
def test_other_strategies_use_torch(strategy, tmp_path):
    folder = folders.write(tmp_path / "model")
    translator = load_translator(folder)
    results = translator.translate(SENTENCES, strategy=strategy)
    assert translator._model is not None
    assert_equal(results, in_torch(folder).translate(SENTENCES, strategy=strategy))


def test_terms_and_confidences_use_torch(tmp_path):
    folder = folders.write(tmp_path / "model")
    expected, options = in_torch(folder), {"terms": {"Hund": "cats"}}
    assert_equal(
        load_translator(folder).translate(SENTENCES, **options), expected.translate(SENTENCES, **options)
    )
    results = load_translator(folder).translate(SENTENCES, confidence=True)
    assert [x.word_confidences for x in results] == [
        pytest.approx(x.word_confidences, abs=1e-5) for x in expected.translate(SENTENCES, confidence=True)
    ]


def test_a_changed_model_is_used(tmp_path):
    translator = load_translator(folders.write(tmp_path / "model"))
    before = translator.translate(SENTENCES[0])[0].score
    with torch.no_grad():
        translator.model.embedding.weight.mul_(-0.5)
    assert translator.translate(SENTENCES[0])[0].score != pytest.approx(before)


@pytest.mark.parametrize("dtype", [None, "int8"])
def test_a_model_that_is_assigned_is_used(dtype, tmp_path):
    translator = load_translator(folders.write(tmp_path / "model"), dtype=dtype)
    other = load_translator(folders.write(tmp_path / "other", seed=1))
    translator.model = other.model
    assert translator.model is other.model
    assert_equal(translator.translate(SENTENCES), other.translate(SENTENCES))


def test_the_saved_parameters_are_freed_when_the_model_is_built(tmp_path):
    translator = load_translator(folders.write(tmp_path / "model"), dtype="int8")
    transformer = weakref.ref(translator._saved.transformer)
    translator.translate(SENTENCES)
    assert translator.model
    gc.collect()
    assert transformer() is None


def test_a_model_built_in_inference_mode_can_be_trained(tmp_path):
    translator = load_translator(folders.write(tmp_path / "model"))
    with torch.inference_mode():
        translator.translate(SENTENCES, confidence=True)
        model = translator.model
    assert not any(parameter.is_inference() for parameter in model.parameters())
    model.hidden(torch.tensor([[5, 2]]), torch.tensor([[1, 6]])).sum().backward()
    assert model.embedding.weight.grad is not None


@pytest.mark.parametrize(
    "more",
    [
        ["model.norm=rms"],
        ["model.activation=swiglu"],
        ["model.positions=rotary"],
        ["model.normalize=entmax15"],
    ],
)
def test_models_that_the_kernels_do_not_support_are_loaded_in_torch(more, tmp_path):
    folder = folders.write(tmp_path / "model", more=more)
    assert read_saved_model(folder, None) is None
    assert len(load_translator(folder).translate(SENTENCES)) == len(SENTENCES)


def test_other_models_and_dtypes_are_loaded_in_torch(tmp_path):
    folder = folders.write(tmp_path / "model")
    assert read_saved_model(folder, "bfloat16") is None
    assert read_saved_model(folders.write(tmp_path / "recurrent", "recurrent"), None) is None
    # 24 queries end inside a block of 16 columns
    narrow = folders.write(tmp_path / "narrow", more=["model.width=24", "model.heads=3"])
    assert read_saved_model(narrow, None) is not None
    assert read_saved_model(narrow, "int8") is None


def corrupt(folder: Path, change) -> None:
    """Change the tensors of a model, and keep the metadata."""
    from safetensors import safe_open

    with safe_open(folder / MODEL, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(folder / MODEL)
    change(tensors)
    save_file(tensors, folder / MODEL, metadata)


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: tensors.pop("encoder.norm.bias"),
        lambda tensors: tensors.update(more=torch.zeros(3)),
        lambda tensors: tensors["embedding.weight"].neg_(),
        lambda tensors: tensors["encoder.norm.bias"].fill_(float("nan")),
        lambda tensors: tensors.update({"encoder.norm.bias": torch.zeros(17)}),
        lambda tensors: tensors.update({"encoder.norm.bias": torch.zeros(16, dtype=torch.int32)}),
    ],
)
def test_corrupted_parameters_are_an_error(change, tmp_path):
    folder = folders.write(tmp_path / "model")
    corrupt(folder, change)
    assert read_saved_model(folder, None) is None
    with pytest.raises(ArgumentError, match="is corrupted"):
        load_translator(folder)


def test_corrupted_files_are_an_error(tmp_path):
    folder = folders.write(tmp_path / "model")
    files = [folder / MODEL, folder / "tokens.model"]
    folders.check_flipped_bits(files, lambda: load_translator(folder), "corrupted|not")


def test_missing_files_are_an_error(tmp_path):
    folder = folders.write(tmp_path / "model")
    (folder / MODEL).unlink()
    with pytest.raises(ArgumentError, match="has no model yet"):
        load_translator(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"format": "regard translator 1"}))
    with pytest.raises(ArgumentError, match="older version"):
        load_translator(folder)


@pytest.mark.parametrize("checksums", ["[]", "5", "null"])
def test_invalid_checksums_are_an_error(checksums, tmp_path):
    folder = folders.write(tmp_path / "model")
    save_file(load_file(folder / MODEL), folder / MODEL, {TENSOR_CHECKSUMS: checksums})
    with pytest.raises(ArgumentError, match=r"is corrupted .*has no valid 'checksums'"):
        load_translator(folder)


def test_an_unknown_dtype_is_an_error(tmp_path):
    folder = folders.write(tmp_path / "model")
    for dtype in ("int4", "", torch.float32):
        with pytest.raises(ArgumentError, match="choose one of float32, bfloat16, int8"):
            load_translator(folder, dtype=dtype)


@pytest.mark.parametrize("heads", [(9,), (0, 9)])
@pytest.mark.parametrize("shift", ["input", "output"])
def test_an_alignment_head_that_does_not_exist_is_an_error(heads, shift, tmp_path):
    translator = load_translator(folders.write(tmp_path / "model"))
    translator.alignment_head = AlignmentHead(0, heads, shift)
    with pytest.raises(ArgumentError, match="Head 9 is out of range: the layer has 2 heads"):
        translator.translate(SENTENCES, alignment=True)


def test_threads_use_the_same_int8_weights(tmp_path, monkeypatch):
    transformer = load_translator(folders.write(tmp_path / "model"), dtype="int8")._saved.transformer
    start = threading.Barrier(4)

    def slow(weight):
        time.sleep(0.001)
        return pack_int8(weight)

    def read(_):
        start.wait(60)
        return transformer.read_parameters(9, 9)

    monkeypatch.setattr(saved_transformer, "pack_int8", slow)
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(read, range(4)))
    for parameters in results:
        assert parameters.kept[1] is transformer._packed
        assert parameters.numbers[:20] == results[0].numbers[:20]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_have_their_own_parameters(copied, tmp_path):
    translator = load_translator(folders.write(tmp_path / "model"), dtype="int8")
    expected = translator.translate(SENTENCES)
    saved = translator._saved
    copy_of = copied(saved.transformer)
    numbers = saved.transformer.read_parameters(9, 9).numbers
    assert copy_of.read_parameters(9, 9).numbers != numbers
    translator._saved = saved._replace(transformer=copy_of)
    del saved
    assert_equal(translator.translate(SENTENCES), expected)


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize(
    "options",
    [{}, {"norm_first": False, "positions": "learned"}, {"linear_bias": False, "embedding_norm": True}],
)
def test_expected_shapes_are_those_of_the_model(options, share):
    settings = TransformerSettings(width=12, heads=3, layers=2, ffn_dim=7, **options)
    sizes = 11 if share else (11, 13)
    model = Transformer(sizes, TransformerConfig(**vars(settings)), share=share)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert expected_shapes(settings, sizes) == shapes


def test_int8_weights_equal_those_of_quantize():
    model = Transformer(29, TransformerConfig(width=16, heads=2, layers=1, ffn_dim=21), share=True)
    small = quantize(model.eval(), "int8")
    for name, layer in small.named_modules():
        if isinstance(layer, Int8Linear) and not name.startswith("int8"):
            packed, scales = pack_int8(model.get_submodule(name).weight.detach().numpy())
            assert numpy.array_equal(packed, layer.packed.numpy())
            assert numpy.array_equal(scales, layer.scales[: len(scales)].numpy())


def test_sentences_longer_than_the_learned_positions_have_no_parameters():
    settings = TransformerSettings(width=8, heads=2, layers=1, positions="learned", max_positions=5)
    arrays = {n: numpy.zeros(s, numpy.float32) for n, s in expected_shapes(settings, 9).items()}
    transformer = SavedTransformer(settings, 9, arrays)
    assert transformer.max_length == 5
    assert transformer.read_parameters(5, 5) is not None
    assert transformer.read_parameters(6, 5) is None

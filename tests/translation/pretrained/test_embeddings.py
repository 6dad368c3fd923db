"""Untied embeddings and output matrices, separate vocabularies, generation settings, and weight files."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

import regard
from regard.errors import ArgumentError
from regard.translation import Beam, Pair, TranslationConfig, train
from regard.translation.export.export import export_translator
from regard.translation.training.initialization import InitialModel
from tests.translation.pretrained.folders import (
    LINES,
    make_m2m_100,
    make_marian,
    make_marian_separate,
    make_mbart,
    make_t5,
    make_t5_untied,
    write_json,
)
from tests.translation.pretrained.test_loader import change_generation, compare_logits, pad

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]


class Kind(NamedTuple):
    """A folder, the languages to choose, and whether regard's model shares or ties its matrices."""

    make: Callable[..., Any]
    options: dict[str, Any] = {}  # noqa: RUF012 (never changed)
    languages: dict[str, str] = {}  # noqa: RUF012
    share: bool = False
    tie_output: bool = False


_UNTIED = {"tie_word_embeddings": False}
_M2M, _MBART = {"source": "de", "target": "en"}, {"source": "de_DE", "target": "en_XX"}
KINDS = {
    "m2m_100": Kind(make_m2m_100, _UNTIED, _M2M),
    "mbart-50": Kind(make_mbart, _UNTIED, _MBART),
    "mbart-25": Kind(make_mbart, {**_UNTIED, "fifty": False}, _MBART),
    "marian": Kind(make_marian, _UNTIED),
    "marian-unshared": Kind(make_marian, {"share_encoder_decoder_embeddings": False}, tie_output=True),
    "marian-separate": Kind(make_marian_separate, tie_output=True),
    "marian-separate-untied": Kind(make_marian_separate, _UNTIED),
    "t5-1.1": Kind(make_t5_untied, share=True),
    "t5-1.1 of version 4": Kind(make_t5_untied, {"version": 4}, share=True),
    "mt5": Kind(make_t5_untied, {"kind": "mt5"}, share=True),
    "mt5 of version 4": Kind(make_t5_untied, {"kind": "mt5", "version": 4}, share=True),
}
_QUICK = ("m2m_100", "marian-separate", "t5-1.1")  # `make test-slow` runs all
_WORDS = sorted({word for line in LINES for word in line.split()})
_RANDOM = random.Random(0)
TEXTS = [" ".join(_RANDOM.choices(_WORDS, k=_RANDOM.randint(1, 9))) for _ in range(20)]
GENERATION: list[dict[str, Any]] = [
    {"early_stopping": True, "length_penalty": 0.6, "num_beams": 5, "max_length": 24},
    {"early_stopping": "never", "length_penalty": 2.0, "num_beams": 3, "max_length": 20},
    {"early_stopping": False, "num_beams": 8, "max_new_tokens": 10, "bad_words_ids": [[6], [9]]},
]


def every_kind(*quick: str) -> pytest.MarkDecorator:
    """Run these kinds in `make test`, and all kinds in `make test-slow`."""
    return pytest.mark.parametrize(
        "kind", [pytest.param(name, marks=[] if name in quick else [pytest.mark.slow]) for name in KINDS]
    )


def read_model(folder: Path) -> Any:
    """Return the model that transformers reads from a folder."""
    return pytest.importorskip("transformers").AutoModelForSeq2SeqLM.from_pretrained(folder).eval()


def make(kind: str, folder: Path) -> tuple[Path, dict[str, str]]:
    """Write a folder; return it and its languages."""
    pytest.importorskip("transformers")
    KINDS[kind].make(folder, **KINDS[kind].options)
    return folder, KINDS[kind].languages


@every_kind(*KINDS)
def test_logits_equal_those_of_transformers(kind: str, tmp_path: Path) -> None:
    folder, languages = make(kind, tmp_path / "model")
    assert compare_logits(folder, read_model(folder), **languages) < 1e-4
    model: Any = regard.load_translator(folder, **languages).model
    assert (model.source_embedding is None, model.matrix is None) == KINDS[kind][-2:]


@every_kind(*_QUICK)
def test_beam_search_with_the_settings_of_the_folder_equals_generate(kind: str, tmp_path: Path) -> None:
    folder, languages = make(kind, tmp_path / "model")
    model = read_model(folder)
    for settings in GENERATION:
        change_generation(**settings)(folder)
        model.generation_config = type(model.generation_config).from_pretrained(folder)
        translator = regard.load_translator(folder, **languages)
        special, tokens = translator.tokens.special, translator.tokens
        ids, mask = pad([special.source(tokens.source.encode(text)) for text in TEXTS], special.padding)
        forced = {"forced_bos_token_id": special.target_prefix[0]} if special.target_prefix else {}
        outputs = model.generate(
            ids, attention_mask=mask, decoder_start_token_id=special.start, **forced
        ).tolist()
        ours = translator.translate(TEXTS, strategy=Beam(settings["num_beams"]), alignment=True)
        for output, translation in zip(outputs, ours, strict=True):
            theirs = output[len(special.target_start) :]
            theirs = theirs[: theirs.index(special.end)] if special.end in theirs else theirs
            assert translation.token_ids == theirs
            assert translation.alignment is not None
    assert regard.load_translator(folder, dtype="int8", **languages).translate(TEXTS[:2])


@every_kind(*_QUICK)
def test_fine_tuned_models_are_exported(kind: str, tmp_path: Path) -> None:
    """The exported folder has the same parameters, for regard and for transformers."""
    folder, languages = make(kind, tmp_path / "model")
    initial = InitialModel(folder, **languages)
    settings = ["training.updates=2", "training.save_every=1", "training.validate_every=2"]
    pairs = [Pair(f"ein Hund bellt {i}", f"a dog barks {i}") for i in range(12)]
    config = initial.config(TranslationConfig.preset("tiny")).override(settings)
    train(tmp_path / "tuned", pairs, config=config, initial=initial)
    tuned = regard.load_translator(tmp_path / "tuned").model.state_dict()
    before = regard.load_translator(folder, **languages).model.state_dict()
    for name in {"embedding.weight", "source_embedding.weight", "matrix"} & before.keys():
        assert not torch.equal(tuned[name], before[name])
    export_translator(tmp_path / "tuned", "huggingface", tmp_path / "export")
    again = regard.load_translator(tmp_path / "export", **languages).model.state_dict()
    assert tuned.keys() == before.keys() == again.keys()
    assert all(torch.equal(tensor, again[name]) for name, tensor in tuned.items())
    assert compare_logits(tmp_path / "export", read_model(tmp_path / "export"), **languages) < 1e-4
    settings = json.loads((tmp_path / "export" / "config.json").read_text())
    assert settings["tie_word_embeddings"] is (kind in ("marian-unshared", "marian-separate"))


def test_an_output_matrix_that_differs_is_separate(tmp_path: Path) -> None:
    """Equal copies stay shared, whatever their names; config.json ties all of them."""
    model = make_m2m_100(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    shared = tensors["model.shared.weight"]
    names = ["lm_head.weight", "model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"]
    tensors |= {name: shared.clone() for name in names}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert compare_logits(tmp_path, model, **_M2M) < 1e-4
    built: Any = regard.load_translator(tmp_path, **_M2M).model
    assert built.source_embedding is None
    assert built.matrix is None
    del tensors["model.shared.weight"], tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert compare_logits(tmp_path, model, **_M2M) < 1e-4
    for name in ("lm_head.weight", "model.encoder.embed_tokens.weight"):
        changed = {**tensors, "model.shared.weight": shared, name: shared.flip(0).clone()}
        save_file(changed, tmp_path / "model.safetensors", {"format": "pt"})
        assert compare_logits(tmp_path, read_model(tmp_path), **_M2M) < 1e-4
        export_translator(tmp_path, "huggingface", tmp_path / name, **_M2M)
        assert compare_logits(tmp_path / name, read_model(tmp_path), **_M2M) < 1e-4
        assert compare_logits(tmp_path, read_model(tmp_path / name), **_M2M) < 1e-4


def test_mt5_does_not_scale_the_decoder_output(tmp_path: Path) -> None:
    """With tie_word_embeddings=true, T5 scales."""
    make_t5(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    del settings["scale_decoder_outputs"]
    for kind in ("t5", "mt5"):
        write_json(tmp_path / "config.json", {**settings, "model_type": kind})
        assert compare_logits(tmp_path, read_model(tmp_path)) < 1e-4


def test_a_missing_output_matrix_is_refused(tmp_path: Path) -> None:
    make_m2m_100(tmp_path, **_UNTIED)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ArgumentError, match=r"lack 'lm_head\.weight'; copy the whole folder"):
        regard.load_translator(tmp_path, **_M2M)


def test_separate_vocabularies_equal_those_of_transformers(tmp_path: Path) -> None:
    """The ids of </s> and <unk> differ between the two sides."""
    transformers = pytest.importorskip("transformers")
    make_marian_separate(tmp_path)
    tokenizer = transformers.MarianTokenizer.from_pretrained(tmp_path)
    tokens = regard.load_translator(tmp_path).tokens
    assert len(tokens.source) != len(tokens.target)
    for text in (*TEXTS, "ein 漢字 Hund"):
        assert tokens.special.source(tokens.source.encode(text)) == tokenizer(text).input_ids
        target = tokenizer(text_target=text).input_ids
        assert tokens.target.encode(text) == target[:-1]  # transformers ends it with the source's </s>


def test_generation_settings(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    make_m2m_100(folder)
    special = regard.load_translator(folder, **_M2M).tokens.special
    change_generation(forced_bos_token_id=special.target_prefix[0], bad_words_ids=[[2], [7]])(folder)
    forced = regard.load_translator(folder, source="de").tokens.special
    assert forced.target_prefix == special.target_prefix
    assert forced.suppressed == (7,)  # transformers never suppresses the end token
    change_generation(no_repeat_ngram_size=2)(folder)
    with pytest.raises(ArgumentError, match=r"no_repeat_ngram_size=2; .* only 0\. .*, remove no_repeat_"):
        regard.load_translator(folder, **_M2M)


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """A folder of which transformers has split the weights."""
    pytest.importorskip("transformers")
    make_m2m_100(tmp_path / "whole", **_UNTIED)
    shutil.copytree(tmp_path / "whole", tmp_path / "shards")
    (tmp_path / "shards" / "model.safetensors").unlink()
    read_model(tmp_path / "whole").save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    return tmp_path / "shards"


def test_shards_written_by_transformers_are_read(shards: Path) -> None:
    assert len([*shards.glob("model-*.safetensors")]) > 2
    assert compare_logits(shards, read_model(shards.parent / "whole"), **_M2M) < 1e-4


def test_damaged_shards_are_refused(shards: Path) -> None:
    first, second, *_ = sorted(shards.glob("model-*.safetensors"))
    content = second.read_bytes()
    for damaged in (content[:-100], content[:6], b""):
        second.write_bytes(damaged)
        with pytest.raises(ArgumentError, match=f"{second.name} is not a complete safetensors file"):
            regard.load_translator(shards, **_M2M)
    second.write_bytes(content)
    path = shards / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    name = next(iter(index["weight_map"]))
    whole = shards.parent / "whole" / "model.safetensors"
    for outside in ("../whole/model.safetensors", str(whole), "..", "whole\\model.safetensors"):
        index["weight_map"][name] = outside
        write_json(path, index)
        with pytest.raises(ArgumentError, match="only safetensors files in the same folder are allowed"):
            regard.load_translator(shards, **_M2M)
    first.unlink()
    index["weight_map"][name] = first.name
    write_json(path, index)
    with pytest.raises(ArgumentError, match="which does not exist; copy the whole folder"):
        regard.load_translator(shards, **_M2M)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_in_half_precision_are_read(dtype: torch.dtype, tmp_path: Path) -> None:
    make_t5_untied(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    rounded = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    save_file(rounded, tmp_path / "model.safetensors", {"format": "pt"})
    model = pytest.importorskip("transformers").AutoModelForSeq2SeqLM.from_pretrained(
        tmp_path, dtype=torch.float32
    )
    assert compare_logits(tmp_path, model.eval()) < 1e-4

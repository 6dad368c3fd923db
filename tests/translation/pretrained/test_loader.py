"""Pretrained translators agree with transformers, and reject invalid folders."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import regard
from regard.app.view_model import look_at_translations
from regard.errors import ArgumentError
from regard.models.layers.positions.sinusoidal import SinusoidalPositions
from regard.translation import Beam, Greedy
from regard.translation.decoding.strategies import Strategy
from tests.translation.pretrained.conftest import Pretrained
from tests.translation.pretrained.folders import SOURCES, make_m2m_100, make_mbart, make_nllb, make_t5

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # from transformers
]


def pad(sentences: list[list[int]], padding: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return padded ids and their mask."""
    length = max(map(len, sentences))
    ids = [ids + [padding] * (length - len(ids)) for ids in sentences]
    mask = [[1] * len(ids) + [0] * (length - len(ids)) for ids in sentences]
    return torch.tensor(ids), torch.tensor(mask)


def compare_logits(folder: Path, model: Any, **languages: str) -> float:
    """Return the largest difference between logits, over a padded batch."""
    translator = regard.load_translator(folder, **languages)
    special = translator.tokens.special
    sources = [special.source(translator.tokens.source.encode(text)) for text in SOURCES]
    ids, mask = pad(sources, special.padding)
    targets = torch.tensor([special.target_inputs([5, 9, 11, 20])] * len(SOURCES))
    with torch.no_grad():
        ours = translator.model(ids, targets, source_lengths=mask.sum(1))
        theirs = model(input_ids=ids, attention_mask=mask, decoder_input_ids=targets).logits
    return float((ours - theirs).abs().max())


def test_logits_equal_those_of_transformers(folder: Pretrained) -> None:
    assert compare_logits(folder.path, folder.model, **folder.languages) < 1e-4


@pytest.mark.parametrize(
    ("make", "options", "languages"),
    [
        (make_mbart, {"fifty": False}, {"source": "de", "target": "en_XX"}),
        (make_t5, {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}, {}),
    ],
    ids=["mbart-25", "t5-1.1"],
)
def test_variants(
    make: Callable[..., Any], options: dict[str, Any], languages: dict[str, str], tmp_path: Path
) -> None:
    assert compare_logits(tmp_path / "model", make(tmp_path / "model", **options), **languages) < 1e-4


@pytest.mark.parametrize("early_stopping", [True, False, pytest.param("never", marks=pytest.mark.slow)])
def test_beam_search_equals_generate(folder: Pretrained, early_stopping: Any) -> None:
    compare_outputs(
        folder, Beam(5, early_stopping=early_stopping), num_beams=5, early_stopping=early_stopping
    )


def test_greedy_decoding_equals_generate(folder: Pretrained) -> None:
    compare_outputs(folder, Greedy(), num_beams=1)  # random models generate up to the limit


def compare_outputs(folder: Pretrained, strategy: Strategy, **options: Any) -> None:
    """Compare the tokens of translations with the tokens of `generate`."""
    translator = regard.load_translator(folder.path, **folder.languages)
    special = translator.tokens.special
    ids, mask = pad(
        [special.source(translator.tokens.source.encode(text)) for text in SOURCES], special.padding
    )
    options["decoder_start_token_id"] = special.start
    if special.target_prefix:
        options["forced_bos_token_id"] = special.target_prefix[0]
    theirs = folder.model.generate(ids, attention_mask=mask, do_sample=False, **options)
    ours = translator.translate(SOURCES, strategy=strategy)
    first = len(special.target_start)
    for output, translation in zip(theirs.tolist(), ours, strict=True):
        tokens = output[first:]
        assert translation.token_ids == (
            tokens[: tokens.index(special.end)] if special.end in tokens else tokens
        )


def test_alignment_view_and_watch(folder: Pretrained) -> None:
    translator = regard.load_translator(folder.path, **folder.languages)
    (translation,) = translator.translate(SOURCES[1], alignment=True)
    assert translation.alignment.weights.shape[1] == len(SOURCES[1].split())
    (aligned,) = translator.align([("ein Hund bellt", "a dog barks")])
    assert aligned.weights.shape == (3, 3)
    assert bool((aligned.weights.sum(-1) <= 1 + 1e-5).all())
    (view,) = look_at_translations(translator, [translation]).inputs
    special = translator.tokens.special
    tokens = translator.tokens.source.segment(SOURCES[1]).pieces
    assert len(view.texts[-2].tokens) == len(special.source([])) + len(tokens)
    with regard.watch(translator.model) as seen:
        translator.translate(SOURCES[0])
    assert any("cross" in name for name in seen)


def test_special_tokens_are_dropped_from_alignments(m2m_100: Pretrained) -> None:
    """The columns of an alignment are the words, without the language token before them."""
    translator = regard.load_translator(m2m_100.path, **m2m_100.languages)
    from regard.translation.alignment.alignment_head import AlignmentHead
    from regard.translation.alignment.cross_attention import cross_weights, layer_name

    head, special = AlignmentHead(-1, (0,), "output"), translator.tokens.special
    source, target = translator.tokens.source.encode(SOURCES[0]), [5, 6]
    (weights,) = cross_weights(translator.model, [source], [target], head)
    with regard.watch(translator.model) as seen, torch.no_grad():
        translator.model(
            torch.tensor([special.source(source)]), torch.tensor([special.target_inputs(target)])
        )
    dense = seen[layer_name(translator.model, head)].dense()[..., 0, :, :].reshape(3 + 1, -1)
    assert torch.allclose(weights, dense[1:3, 1 : 1 + len(source)], atol=1e-6)


def test_languages(m2m_100: Pretrained, marian: Pretrained) -> None:
    with pytest.raises(ArgumentError, match="100 languages; choose source from ar, cs, de, "):
        regard.load_translator(m2m_100.path)
    with pytest.raises(
        ArgumentError, match=r"no language .deu.; choose target from de … \(100 languages\)\.$"
    ):
        regard.load_translator(m2m_100.path, source="de", target="deu")
    with pytest.raises(ArgumentError, match="its target language is 'en'"):
        regard.load_translator(marian.path, target="fr")
    assert regard.load_translator(marian.path, source="de", target="en").model is not None


def test_language_codes_are_those_of_transformers() -> None:
    pytest.importorskip("transformers")
    from transformers.models.m2m_100.tokenization_m2m_100 import FAIRSEQ_LANGUAGE_CODES as m2m
    from transformers.models.mbart.tokenization_mbart import FAIRSEQ_LANGUAGE_CODES as mbart_25
    from transformers.models.mbart50.tokenization_mbart50 import FAIRSEQ_LANGUAGE_CODES as mbart_50

    from regard.translation.pretrained.languages import M2M_100, MBART_25, MBART_50, WMT_21

    assert [m2m["m2m100"], m2m["wmt21"], mbart_25, mbart_50] == [M2M_100, WMT_21, MBART_25, MBART_50]


def test_token_ids_equal_those_of_transformers(marian: Pretrained, m2m_100: Pretrained) -> None:
    from transformers import M2M100Tokenizer, MarianTokenizer

    texts = [*SOURCES, "  zwei   Kinder! ½ ﬁn", "ein 漢字 Hund", "a\u00a0dog ´x"]
    for folder, tokenizer in (
        (marian, MarianTokenizer.from_pretrained(marian.path)),
        (m2m_100, M2M100Tokenizer.from_pretrained(m2m_100.path, src_lang="de", tgt_lang="en")),
    ):
        tokens = regard.load_translator(folder.path, **folder.languages).tokens
        for text in texts:
            segmentation = tokens.source.segment(text)
            assert tokens.special.source(segmentation.ids) == tokenizer(text).input_ids
            assert segmentation.ids == tokens.source.encode(text)
            assert all(0 <= word < len(segmentation.words) for word in segmentation.word_of)


@pytest.mark.parametrize(
    ("make", "pairs"),
    [
        (make_m2m_100, [("en", "fr"), ("zh", "de")]),
        (make_nllb, [("deu_Latn", "eng_Latn"), ("fra_Latn", "zho_Hans")]),
    ],
)
def test_language_pairs(make: Callable[..., Any], pairs: list[tuple[str, str]], tmp_path: Path) -> None:
    """Tokens, logits, forced language tokens and translations equal transformers'."""
    transformers = pytest.importorskip("transformers")
    model = make(tmp_path)
    for source, target in pairs:
        languages = {"source": source, "target": target}
        assert compare_logits(tmp_path, model, **languages) < 1e-4
        tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path, src_lang=source, tgt_lang=target)
        tokens = regard.load_translator(tmp_path, **languages).tokens
        for text in (*SOURCES, "ein 漢字 Hund", "a\u00a0dog ´x"):
            assert tokens.special.source(tokens.source.encode(text)) == tokenizer(text).input_ids
        named = target if "_" in target else f"__{target}__"
        assert tokens.special.target_prefix == (tokenizer.convert_tokens_to_ids(named),)
        for strategy, beams in ((Beam(5), 5), (Greedy(), 1)):
            compare_outputs(Pretrained(tmp_path, model, languages), strategy, num_beams=beams)


def test_shards_are_read(marian: Pretrained, tmp_path: Path) -> None:
    shutil.copytree(marian.path, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"a.safetensors": names[:20], "b.safetensors": names[20:]}
    for file, own in parts.items():
        save_file({name: tensors[name] for name in own}, tmp_path / file)
    index = {"weight_map": {name: file for file, own in parts.items() for name in own}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert compare_logits(tmp_path, marian.model) < 1e-4


def change_config(**values: Any) -> Callable[[Path], None]:
    """Return a function that changes config.json in a folder."""

    def change(folder: Path) -> None:
        settings = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**settings, **values}))

    return change


def change_tensors(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    """Return a function that changes model.safetensors in a folder."""

    def apply(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return apply


def only_pickle(folder: Path) -> None:
    """Leave only pickled weights."""
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def named_pipe(folder: Path) -> None:
    """Replace the vocabulary with a named pipe."""
    (folder / "source.spm").unlink()
    os.mkfifo(folder / "source.spm")


def bad_vocabulary(folder: Path) -> None:
    """Give a piece an id outside the vocabulary."""
    ids = json.loads((folder / "vocab.json").read_text())
    (folder / "vocab.json").write_text(json.dumps({**ids, "x": 10**9}))


def change_generation(**values: Any) -> Callable[[Path], None]:
    """Return a function that changes generation_config.json in a folder."""

    def change(folder: Path) -> None:
        settings = json.loads((folder / "generation_config.json").read_text())
        (folder / "generation_config.json").write_text(json.dumps({**settings, **values}))

    return change


FC1 = "model.encoder.layers.1.fc1.weight"
POSITIONS = "model.encoder.embed_positions.weight"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_stored_positions_may_be_rounded(marian: Pretrained, tmp_path: Path, dtype: torch.dtype) -> None:
    shutil.copytree(marian.path, tmp_path, dirs_exist_ok=True)
    table = SinusoidalPositions(16, layout="concatenated")(torch.arange(64)).to(dtype)
    change_tensors(lambda tensors: tensors.update({POSITIONS: table}))(tmp_path)
    assert compare_logits(tmp_path, marian.model) < 1e-4


def test_a_folder_without_languages_is_refused(m2m_100: Pretrained, tmp_path: Path) -> None:
    shutil.copytree(m2m_100.path, tmp_path, dirs_exist_ok=True)
    (tmp_path / "vocab.json").unlink()
    with pytest.raises(ArgumentError, match=r"lists no languages. Copy the whole folder, including vocab"):
        regard.load_translator(tmp_path, **m2m_100.languages)


def test_a_t5_activation_must_be_a_name(tmp_path: Path) -> None:
    make_t5(tmp_path)
    change_config(feed_forward_proj=["relu"])(tmp_path)
    with pytest.raises(ArgumentError, match=r"feed_forward_proj=\['relu'\]; regard supports only relu"):
        regard.load_translator(tmp_path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (change_config(model_type="bart"), "model_type='bart'; load_translator supports only marian"),
        (change_config(encoder_layers=10**9), "must be an integer from 1 to 1024"),
        (change_config(encoder_layers=3), "has 3 layers, but the weights have 2"),
        (change_config(d_model=32), r"has shape \(\d+, 16\); config.json requires \(\d+, 32\)"),
        (change_config(normalize_before=True), "normalize_before=True; regard supports only False"),
        (change_config(moe_experts=8), "moe_experts=8, which regard does not support"),
        (change_config(activation_function="tanh"), "activation_function='tanh'; regard supports only relu"),
        (change_generation(bad_words_ids=5), "bad_words_ids=5; it must be a list"),
        (change_generation(suppress_tokens=[10**6]), "but 1000000 is used as the id of a special or suppr"),
        (change_generation(decoder_start_token_id=10**6), "but 1000000 is used as the id of a special"),
        (change_generation(forced_bos_token_id=5), "forced_bos_token_id=5; regard supports it only in M2M"),
        (change_tensors(lambda tensors: tensors.update({POSITIONS: torch.ones(())})), r"has shape \(\)"),
        (change_tensors(lambda tensors: tensors.update({POSITIONS: torch.ones(8, 16)})), "is not a table of"),
        (change_tensors(lambda tensors: tensors.pop(FC1)), f"lack '{FC1}'"),  # type: ignore[arg-type,return-value]
        (change_tensors(lambda tensors: tensors.update(extra=torch.ones(2))), "have 'extra', which regard"),
        (change_tensors(lambda tensors: tensors.update({FC1: tensors[FC1] * torch.nan})), "NaN or infinite"),
        (only_pickle, "convert it: python -c .*AutoModelForSeq2SeqLM"),
        (named_pipe, "is a named pipe"),
        (bad_vocabulary, "the id 1000000000"),
    ],
)
def test_invalid_folders_are_refused(
    marian: Pretrained, tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    shutil.copytree(marian.path, tmp_path, dirs_exist_ok=True)
    damage(tmp_path)
    with pytest.raises(ArgumentError, match=message):
        regard.load_translator(tmp_path)

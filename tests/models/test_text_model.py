"""Language models for text: tokens, folders, training."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import regard
from regard.errors import ArgumentError, DTypeError
from regard.models import LanguageModel, TextModel, TransformerConfig
from regard.models.text_model import CONFIG, MODEL, split_tokens

SMALL = TransformerConfig(width=6, heads=2, layers=1, ffn_dim=10, dropout=0.0)
TOKENS = ["<s>", "</s>", '"', ",", ".", "!", "ran", "said", "the", "tom", "dog", "i"]
BIAS = "decoder.norm.bias"
PLAIN = [token for token in TOKENS[2:] if token != '"']


def small(config: TransformerConfig = SMALL) -> TextModel:
    torch.manual_seed(3)
    return TextModel(LanguageModel(len(TOKENS), config), TOKENS, ["tom", "i"])


@given(st.lists(st.sampled_from(PLAIN), max_size=30))
def test_encode_inverts_decode(words: list[str]) -> None:
    model = small()
    ids = [0, *map(TOKENS.index, words)]
    assert model.encode(model.decode(ids)) == ids


def test_decode_writes_capitals_and_quotes() -> None:
    model = small()
    text = '"I ran, Tom!" said the dog. "The dog ran." Tom ran.'
    assert model.decode(model.encode(text)) == text
    assert model.decode(model.encode("“i RAN , tom ! ” said the dog .")) == '"I ran, Tom!" said the dog.'


def test_unknown_words_are_named() -> None:
    with pytest.raises(ArgumentError, match=r"'dig'\. Did you mean 'dog'"):
        small().encode("the dig ran")
    with pytest.raises(ArgumentError, match=r"'<'"):  # special tokens cannot be typed
        small().encode("the dog </s>")
    with pytest.raises(DTypeError, match="a list"):
        small().encode(["the"])  # type: ignore[arg-type]


@pytest.mark.parametrize("positions", ["sinusoidal", "learned", "rotary"])
def test_a_folder_keeps_the_model(tmp_path: Path, positions: Any) -> None:
    config = TransformerConfig(
        width=12, heads=2, layers=2, positions=positions, norm="rms", activation="swiglu"
    )
    model = small(config)
    loaded = regard.load_language_model(model.save(tmp_path / "new" / "folder"))
    assert (loaded.tokens, loaded.capitalized) == (model.tokens, model.capitalized)
    assert loaded.model.decoder.config == config
    for name, value in loaded.model.state_dict().items():
        assert value.dtype is torch.float32
        assert torch.equal(value, model.model.state_dict()[name].half().float())
    again = regard.load_language_model(loaded.save(tmp_path / "again"))
    assert again.generate("the dog", max_new_tokens=5) == loaded.generate("the dog", max_new_tokens=5)
    assert (tmp_path / "again" / MODEL).read_bytes() == (tmp_path / "new" / "folder" / MODEL).read_bytes()


Damage = Callable[[Path], object]


def edit(change: Callable[[dict[str, Any]], object]) -> Damage:
    """Change config.json."""

    def damage(folder: Path) -> None:
        about = json.loads((folder / CONFIG).read_text())
        change(about)
        (folder / CONFIG).write_text(json.dumps(about))

    return damage


def edit_tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Damage:
    """Change the parameters and update their checksum."""

    def damage(folder: Path) -> None:
        tensors = load_file(folder / MODEL)
        change(tensors)
        save_file(tensors, folder / MODEL)
        digest = hashlib.sha256((folder / MODEL).read_bytes()).hexdigest()
        edit(lambda about: about.update(sha256=digest))(folder)

    return damage


def replace(name: str, content: bytes | None) -> Damage:
    """Write or remove a file."""
    return lambda folder: (
        (folder / name).unlink() if content is None else (folder / name).write_bytes(content)
    )


def link(name: str, target: str) -> Damage:
    return lambda folder: ((folder / name).unlink(), (folder / name).symlink_to(target))


HOSTILE: dict[str, tuple[Damage, str]] = {
    "no config": (replace(CONFIG, None), "has no config.json"),
    "no parameters": (replace(MODEL, None), "corrupted"),
    "not JSON": (replace(CONFIG, b"{"), "cannot be read"),
    "deep JSON": (replace(CONFIG, b"[" * 100_000), "cannot be read"),
    "not UTF-8": (replace(CONFIG, b'"\xff"'), "cannot be read"),
    "a list": (replace(CONFIG, b"[]"), "has format 'list'"),
    "too large": (replace(CONFIG, b" " * 2_000_000), "2.0 MB"),
    "other bytes": (replace(MODEL, b"x" * 99), "checksum"),
    "truncated": (lambda folder: os.truncate(folder / MODEL, 200), "checksum"),
    "config is a device": (link(CONFIG, "/dev/zero"), "device"),
    "parameters are a device": (link(MODEL, "/dev/zero"), "device"),
    "parameters are a folder": (link(MODEL, ".."), "folder"),
    "link to itself": (link(CONFIG, CONFIG), "cannot be read"),
    "other format": (edit(lambda about: about.update(format="x")), "has format 'x'"),
    "unknown key": (edit(lambda about: about.update(code="x")), "with the keys"),
    "path instead of settings": (edit(lambda about: about.update(model="../x")), "corrupted"),
    "unknown setting": (edit(lambda about: about["model"].update(code="x")), "corrupted.*code"),
    "other width": (edit(lambda about: about["model"].update(width=8)), "has shape"),
    "huge width": (edit(lambda about: about["model"].update(width=2**20)), "has shape"),
    "width beyond 64 bits": (edit(lambda about: about["model"].update(width=2**40)), "overflow"),
    "many layers": (edit(lambda about: about["model"].update(layers=10**9)), "has 1,000,000,000 layers"),
    "type of a setting": (edit(lambda about: about["model"].update(heads="2")), "heads='2'"),
    "fewer tokens": (edit(lambda about: about["tokens"].remove("dog")), "has shape"),
    "token twice": (edit(lambda about: about["tokens"].append("tom")), "'tom' occurs twice"),
    "two words": (edit(lambda about: about["tokens"].append("a b")), "not a valid token"),
    "number for a token": (edit(lambda about: about["tokens"].append(5)), "not a valid token"),
    "no start token": (edit(lambda about: about["tokens"].reverse()), "starts with"),
    "unknown capital": (edit(lambda about: about.update(capitalized=["x"])), "'x'"),
    "NaN": (edit_tensors(lambda tensors: tensors["embedding.weight"].fill_(torch.nan)), "NaN"),
    "extra tensor": (edit_tensors(lambda tensors: tensors.update(x=torch.ones(1))), "unexpected"),
    "integers": (edit_tensors(lambda tensors: tensors.update({BIAS: tensors[BIAS].int()})), "dtype"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_damaged_folders_are_refused(tmp_path: Path, name: str) -> None:
    damage, message = HOSTILE[name]
    small().save(tmp_path)
    regard.load_language_model(tmp_path)
    damage(tmp_path)
    with pytest.raises(ArgumentError, match=message):
        regard.load_language_model(tmp_path)


def test_other_paths_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"does not exist.*'stories'"):
        regard.load_language_model(tmp_path / "nothing")
    (tmp_path / "file").write_text("")
    with pytest.raises(ArgumentError, match="is a file"):
        regard.load_language_model(tmp_path / "file")


def test_a_custom_normalizer_cannot_be_saved(tmp_path: Path) -> None:
    config = TransformerConfig(width=6, heads=2, layers=1, normalize=regard.Sparsemax())
    with pytest.raises(ArgumentError, match="Sparsemax"):
        small(config).save(tmp_path)


def test_training_is_reproducible_and_keeps_the_random_state() -> None:
    texts = ["the dog ran .", "tom ran !"]
    before = torch.random.get_rng_state()
    losses: list[float] = []
    models = [
        TextModel.learn(
            texts, SMALL, updates=3, batch_size=2, seed=seed, report=lambda _, x: losses.append(x)
        )
        for seed in (5, 5, 6)
    ]
    assert torch.equal(before, torch.random.get_rng_state())
    assert losses[:3] == losses[3:6] != losses[6:]
    weights = [model.model.embedding.weight for model in models]
    assert torch.equal(weights[0], weights[1])
    assert split_tokens(texts[0]) == ["the", "dog", "ran", "."]
    with pytest.raises(ArgumentError, match="1 text, but no words"):
        TextModel.learn([" "], SMALL)


def test_the_vocabulary_fits_the_model() -> None:
    with pytest.raises(ArgumentError, match="vocabulary of 5, but `tokens` has 12"):
        TextModel(LanguageModel(5, SMALL), TOKENS)

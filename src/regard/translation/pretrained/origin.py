"""Files of the pretrained model used for fine-tuning: FOLDER/pretrained/."""

import hashlib
import json
from pathlib import Path

from regard._util.files import MAX_TEXT_BYTES, read_regular, write_atomic
from regard.models.seq2seq import Seq2Seq
from regard.translation.config import ModelConfig
from regard.translation.model_folder import PRETRAINED
from regard.translation.pretrained.loader import PretrainedFolder, read_pretrained
from regard.translation.tokens import TokenizerPair

_LANGUAGES = "languages.json"
_EMBEDDINGS = ("share", "tie_output")  # fields of the layout that depend on the parameters
_MAX_FILE_BYTES = 1 << 28


def write_origin(folder: Path, origin: PretrainedFolder) -> None:
    """Copy the config and tokenizer files of a pretrained model to FOLDER/pretrained/.

    languages.json contains its languages, and which embedding matrices its parameters share.
    """
    path = folder / PRETRAINED
    path.mkdir(exist_ok=True)
    for file in origin.files():
        write_atomic(path / file.name, read_regular(file, _MAX_FILE_BYTES))
    languages = {"source": origin.choice.source, "target": origin.choice.target}
    embeddings = {name: getattr(origin.layout, name) for name in _EMBEDDINGS}
    write_atomic(path / _LANGUAGES, json.dumps(languages | embeddings).encode())


def read_origin(folder: Path) -> PretrainedFolder | None:
    """Return the pretrained model that a folder was fine-tuned from, or None."""
    path = folder / PRETRAINED
    if not path.is_dir():
        return None
    languages = json.loads(read_regular(path / _LANGUAGES, MAX_TEXT_BYTES))
    embeddings = {name: bool(languages[name]) for name in _EMBEDDINGS if name in languages}
    return read_pretrained(path, languages.get("source"), languages.get("target"), embeddings=embeddings)


def build_model(config: ModelConfig, tokens: TokenizerPair) -> Seq2Seq:
    """Build a new model with regard's architecture, or with a pretrained model's."""
    origin = tokens.target.origin
    if isinstance(origin, PretrainedFolder):
        return origin.build(config.dropout)
    return config.build(tokens.sizes())


def origin_checksums(folder: Path) -> dict[str, str]:
    """Return the checksum of each file in FOLDER/pretrained/, by name."""
    path = folder / PRETRAINED
    names = sorted(file.name for file in path.iterdir()) if path.is_dir() else []
    return {
        f"{PRETRAINED}/{name}": hashlib.sha256(read_regular(path / name, _MAX_FILE_BYTES)).hexdigest()
        for name in names
    }

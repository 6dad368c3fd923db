"""Model folders, shared by the tests of all commands."""

import json
from pathlib import Path

import pytest

from tests.models.encoders.test_pretrained import CONFIG, named, word_pieces
from tests.translation import folders


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small translator."""
    return folders.write(tmp_path_factory.mktemp("models") / "small")


@pytest.fixture(scope="session")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small BERT."""
    pytest.importorskip("tokenizers")
    from safetensors.torch import save_file

    folder: Path = tmp_path_factory.mktemp("encoder")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(named(), folder / "model.safetensors")
    word_pieces(folder)
    return folder

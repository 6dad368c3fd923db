"""Fine-tuning: start from a trained model, with its architecture, vocabularies and parameters.

FOLDER/initial.safetensors   parameters before the first update
FOLDER/pretrained/           config and tokenizer files of a model in Hugging Face format, and its languages
"""

import dataclasses
import os
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import save
from torch import Tensor

from regard._util.files import open_atomic
from regard.errors import ArgumentError
from regard.models.parameters import read_parameters
from regard.models.seq2seq import Seq2Seq
from regard.translation.config import ModelConfig, TokensConfig, TranslationConfig
from regard.translation.model_folder import INITIAL, PRETRAINED, is_pretrained, read_config
from regard.translation.pretrained.loader import PretrainedFolder, check_no_languages, read_pretrained
from regard.translation.pretrained.origin import write_origin
from regard.translation.tokens import TokenizerPair
from regard.translation.training.checkpoint import LoadedModel, load_model

LEARNING_RATE = 1e-4  # peak; a larger value, such as 1e-3, would overwrite what the model has learned
_FREE = {"dropout"}  # model settings that fine-tuning can change


class InitialModel(NamedTuple):
    """The model that training starts from.

    folder: a folder written by `train`, or in Hugging Face format. source, target: languages of a
        multilingual model.

    >>> from pathlib import Path
    >>> from regard.translation import InitialModel
    >>> InitialModel(Path("m2m100_418M"), source="de", target="en").target
    'en'
    """

    folder: Path
    source: str | None = None
    target: str | None = None

    def read(self) -> LoadedModel:
        """Read the model, its vocabularies and its config."""
        if is_pretrained(self.folder):
            contents = read_pretrained(self.folder, self.source, self.target)
            return LoadedModel(contents.load(), contents.tokens, {"settings": _settings(contents)})
        check_no_languages(self.folder, self.source, self.target)
        return load_model(self.folder)

    def config(self, base: TranslationConfig) -> TranslationConfig:
        """Return `base` with the folder's architecture and vocabulary, and settings for fine-tuning."""
        loaded = self._settings()
        config = TranslationConfig.from_dict(loaded)
        # guided alignment would change the role of a trained head
        training = dataclasses.replace(
            base.training, learning_rate=LEARNING_RATE, guided_alignment_weight=0.0
        )
        if is_pretrained(self.folder) or (self.folder / PRETRAINED).is_dir():
            # a pretrained model was trained neither to copy nor with sampled subwords
            training = dataclasses.replace(training, unknown_rate=0.0, subword_sampling=0.0)
        corpus = dataclasses.replace(base.corpus, max_tokens=config.corpus.max_tokens)
        return dataclasses.replace(
            base, model=config.model, tokens=config.tokens, training=training, corpus=corpus
        )

    def _settings(self) -> dict[str, Any]:
        if is_pretrained(self.folder):
            return _settings(read_pretrained(self.folder, self.source, self.target))
        return read_config(self.folder)["settings"]

    def check(self, config: TranslationConfig) -> None:
        """Raise unless the config matches the folder's architecture and vocabulary."""
        initial = TranslationConfig.from_dict(self._settings())
        for section in ("model", "tokens"):
            ours, theirs = (dataclasses.asdict(getattr(part, section)) for part in (config, initial))
            for name, value in theirs.items():
                if ours[name] != value and name not in _FREE:
                    raise ArgumentError(
                        f"Cannot start from {str(self.folder)!r} with {section}.{name}={ours[name]}: it has "
                        f"{value}. Remove the setting; only model.dropout can be changed."
                    )

    def write(self, folder: Path) -> TokenizerPair:
        """Write the initial parameters and the files of a pretrained model; return the vocabularies."""
        model, tokens, _ = self.read()
        tensors = {name: tensor.detach().float() for name, tensor in model.state_dict().items()}
        with open_atomic(folder / INITIAL) as file:
            file.write(save(_unshared(tensors)))
        origin = tokens.target.origin
        if isinstance(origin, PretrainedFolder):
            write_origin(folder, origin)
        return tokens


def _unshared(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.contiguous().clone() for name, tensor in tensors.items()}


def _settings(contents: PretrainedFolder) -> dict[str, Any]:
    """Return the settings of a pretrained model that have an equivalent in regard."""
    config, tokens = contents.layout.encoder, contents.tokens
    names = {item.name for item in dataclasses.fields(ModelConfig)}
    model = {name: value for name, value in vars(config).items() if name in names and name != "normalize"}
    max_tokens = (
        256 if contents.layout.max_length is None else min(256, (contents.layout.max_length - 12) // 2)
    )
    return {
        "model": {**model, "kind": "transformer", "max_positions": config.max_positions},
        "tokens": dataclasses.asdict(TokensConfig(size=len(tokens.target), shared=tokens.shared)),
        "corpus": {"max_tokens": max(max_tokens, 1)},
    }


def load_initial(folder: Path, model: Seq2Seq) -> None:
    """Load the parameters that fine-tuning starts from, if the folder has them."""
    path = folder / INITIAL
    if path.exists():
        try:
            model.load_state_dict(read_parameters(path, model))
        except ValueError as error:
            raise ArgumentError(
                f"{os.fspath(path)!r} does not match the config of its folder ({error}). Copy the folder "
                "again, or train in a new one."
            ) from None

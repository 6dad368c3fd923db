"""Load a model folder for beam search in the kernels, without importing torch.

Only Transformers that the kernels support are loaded in this way. For everything else, and if anything is
wrong with the files, `read_saved_model` returns None, and `training.checkpoint.load_model` loads the folder
with torch or reports the error.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from regard._util.checksums import TensorDigest
from regard._util.files import check_loadable
from regard.errors import RegardError
from regard.mechanism.kernels import beam_search
from regard.models.configs import Precision, TransformerSettings
from regard.models.inference.saved_transformer import SavedTransformer, expected_shapes, is_supported
from regard.models.layers.int8_packing import Array
from regard.translation.config import ModelConfig, TokensConfig, TranslationConfig
from regard.translation.decoding.hypothesis import Hypothesis, rank
from regard.translation.decoding.kernel_search import search_in_kernels
from regard.translation.decoding.strategies import Beam, Greedy, Strategy
from regard.translation.model_folder import (
    CHECKSUM,
    MODEL,
    PRETRAINED,
    SHARED,
    SOURCE,
    TARGET,
    read_config,
)
from regard.translation.tokens import Tokenizer, TokenizerPair

if TYPE_CHECKING:
    from regard.models.seq2seq import Seq2Seq

TENSOR_CHECKSUMS = "checksums"  # key in the metadata of model.safetensors
_FLOAT32 = "torch.float32"


class SavedModel(NamedTuple):
    """A Transformer for the kernels, with its vocabularies and the settings to build it in torch."""

    transformer: SavedTransformer
    config: ModelConfig
    tokens: TokenizerPair

    def search(
        self,
        sources: Sequence[list[int]],
        strategy: Strategy,
        limits: Sequence[int],
        *,
        attention_layer: int | None,
        max_unknown: Sequence[int] | None,
    ) -> list[list[Hypothesis]] | None:
        """Decode each sentence as `decoding.search.search` does; None if the kernels do not support the call.

        sources: token ids with special tokens. The other arguments are those of `search_in_kernels`.
        """
        beam = Beam(1) if isinstance(strategy, Greedy) else strategy
        if not isinstance(beam, Beam) or beam.early_stopping is not None:
            return None
        hypotheses = search_in_kernels(
            self.transformer.read_parameters,
            self.tokens.special,
            sources,
            beam,
            limits,
            attention_layer=attention_layer,
            max_unknown=max_unknown,
        )
        return None if hypotheses is None else rank(hypotheses, beam.n_best)

    def to_torch(self) -> "Seq2Seq":
        """Build the model in torch. It shares the memory of its float32 parameters."""
        import torch

        from regard.models.inference.quantization import quantize
        from regard.models.parameters import meta_device

        with torch.inference_mode(False):  # the caller may be in inference mode; the model can be trained
            with meta_device():
                model = self.config.build(self.tokens.sizes())
            parameters = {name: torch.from_numpy(array) for name, array in self.transformer.arrays.items()}
            model.load_state_dict(parameters, assign=True)
            model.eval()
            return quantize(model, "int8") if self.transformer.int8 else model


class SavedFolder(NamedTuple):
    """The model in a model folder, and the contents of its config.json."""

    model: SavedModel
    config: dict[str, Any]


def read_saved_model(folder: str | os.PathLike[str], dtype: Precision | None) -> SavedFolder | None:
    """Load a model folder without torch; return None if it must be loaded with torch.

    dtype: precision of the computation; see `Translator`.
    """
    path = Path(folder)
    if not beam_search.available() or dtype == "bfloat16" or (path / PRETRAINED).exists():
        return None
    try:
        config = read_config(folder)
        settings = TranslationConfig.from_dict(config["settings"])
        if not _is_supported(settings.model, dtype):
            return None
        tokens = read_vocabularies(path, settings.tokens)
        arrays = _read_arrays(path, settings.model, tokens)
    except (RegardError, LookupError, TypeError, ValueError, OverflowError, RuntimeError, OSError):
        return None
    if arrays is None:
        return None
    architecture = settings.model.architecture()
    assert isinstance(architecture, TransformerSettings)
    transformer = SavedTransformer(architecture, tokens.sizes(), arrays, int8=dtype == "int8")
    return SavedFolder(SavedModel(transformer, settings.model, tokens), config)


def _is_supported(config: ModelConfig, dtype: Precision | None) -> bool:
    architecture = config.architecture()
    return (
        isinstance(architecture, TransformerSettings)
        and config.normalize == "softmax"
        and is_supported(architecture, "int8" if dtype == "int8" else "float32")
    )


def _read_arrays(folder: Path, config: ModelConfig, tokens: TokenizerPair) -> dict[str, Array] | None:
    """Return the parameters; None unless shapes, values and checksums are as expected."""
    import numpy as np
    from safetensors import SafetensorError, safe_open

    architecture = config.architecture()
    assert isinstance(architecture, TransformerSettings)
    check_loadable(folder / MODEL)
    try:
        with safe_open(folder / MODEL, "numpy") as file:
            names = sorted(file.keys())
            if config.layers > len(names):  # checked before the shapes are listed
                return None
            slices = {name: file.get_slice(name) for name in names}
            shapes = {name: tuple(part.get_shape()) for name, part in slices.items()}
            if shapes != expected_shapes(architecture, tokens.sizes()):
                return None
            if any(part.get_dtype() != "F32" for part in slices.values()):
                return None
            arrays = {name: file.get_tensor(name) for name in names}
            sums = read_checksums(file.metadata() or {})
    except SafetensorError:
        return None
    digest = TensorDigest()
    for name, array in arrays.items():
        if not np.isfinite(array).all():
            return None
        digest.add(name, _FLOAT32, array.shape, array.reshape(-1).view(np.uint8).data)
    if sums.get(CHECKSUM) != digest.hexdigest() or mismatched_vocabulary(sums, tokens):
        return None
    return arrays


def read_checksums(metadata: Mapping[str, str]) -> dict[str, str]:
    """Return the checksums in the metadata of model.safetensors; raise ValueError if they are not valid."""
    sums = json.loads(metadata.get(TENSOR_CHECKSUMS, "{}"))
    if not isinstance(sums, dict):
        raise ValueError(f"the metadata of {MODEL} has no valid {TENSOR_CHECKSUMS!r}")
    return sums


def token_files(shared: bool) -> tuple[str, str]:
    """Return the vocabulary files for source and target; the same file if shared."""
    return (SHARED, SHARED) if shared else (SOURCE, TARGET)


def read_vocabularies(folder: Path, config: TokensConfig) -> TokenizerPair:
    """Load the vocabularies that were learned for a model."""
    sides = {name: Tokenizer.load(folder / name, config.kind) for name in set(token_files(config.shared))}
    return TokenizerPair(*(sides[name] for name in token_files(config.shared)))


def mismatched_vocabulary(sums: Mapping[str, str], tokens: TokenizerPair) -> str | None:
    """Return the name of a vocabulary that does not match its checksum, or None."""
    for name, side in zip(token_files(tokens.shared), tokens, strict=True):
        if sums.get(name) != hashlib.sha256(side.content).hexdigest():
            return name
    return None

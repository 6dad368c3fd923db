"""config.json and generation_config.json of a pretrained translator, read key by key."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from regard.errors import ArgumentError
from regard.models.checkpoint_files import read_json, short
from regard.models.configs import Activation
from regard.models.layers.blocks import TransformerConfig

CONFIG, GENERATION = "config.json", "generation_config.json"
_MAX_BYTES = 2**20
# keys in config.json that do not change the model's output
_INERT = frozenset(
    {
        *("_name_or_path", "_num_labels", "architectures", "classif_dropout", "classifier_dropout", "dtype"),
        *("encoder_layerdrop", "decoder_layerdrop", "gradient_checkpointing", "id2label", "init_std"),
        *(
            "initializer_factor",
            "is_decoder",
            "is_encoder_decoder",
            "keys_to_ignore_at_inference",
            "label2id",
        ),
        *("model_type", "output_past", "problem_type", "prefix", "save_step", "task_specific_params"),
        *("tokenizer_class", "torch_dtype", "torchscript", "transformers_version", "use_cache"),
        *("hidden_size", "num_hidden_layers", "num_attention_heads", "n_positions", "output_attentions"),
        *("output_hidden_states", "return_dict", "return_dict_in_generate", "output_scores"),
        *("cross_attention_hidden_size", "chunk_size_feed_forward", "pruned_heads", "tf_legacy_loss"),
        *("bos_token_id", "sep_token_id", "language_pair", "finetuning_task", "eos_token_ids"),
    }
)
# generation settings, and the values that leave beam search unchanged
_NEUTRAL: Mapping[str, Collection[Any]] = {
    "diversity_penalty": (0,),
    "do_sample": (False,),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "guidance_scale": (1,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beam_groups": (1,),
    "repetition_penalty": (1,),
    "temperature": (1,),
    "top_k": (50, 0),
    "top_p": (1,),
    "typical_p": (1,),
}
_GENERATION_INERT = frozenset(
    {
        *("_from_model_config", "transformers_version", "num_beams", "num_return_sequences", "use_cache"),
        *("bos_token_id", "output_attentions", "output_hidden_states", "output_scores", "output_logits"),
        *("return_dict_in_generate", "cache_implementation", "alignment_heads", "trust_remote_code"),
    }
)
_GENERATION_READ = (
    *("bad_words_ids", "suppress_tokens", "decoder_start_token_id", "early_stopping", "eos_token_id"),
    *("forced_bos_token_id", "forced_eos_token_id", "length_penalty", "max_length", "max_new_tokens"),
    *("pad_token_id",),
)
GENERATION_KEYS = frozenset({*_NEUTRAL, *_GENERATION_INERT, *_GENERATION_READ})
_ACTIVATIONS: Mapping[str, Activation] = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
}


class Settings:
    """The settings in a JSON file. `check_rest` raises for settings that were not read.

    path: the file, for error messages. values: its content.

    >>> from pathlib import Path
    >>> from regard.translation.pretrained.settings import Settings
    >>> settings = Settings(Path("config.json"), {"d_model": 512, "sparse": True})
    >>> settings.integer("d_model")
    512
    >>> settings.check_rest()
    Traceback (most recent call last):
    regard.errors.ArgumentError: config.json has sparse=True, which regard does not support; ...
    """

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path, self.values = path, values
        self._read: set[str] = set()

    @classmethod
    def load(cls, path: Path) -> "Settings":
        """Read a JSON file."""
        return cls(path, read_json(path, max_bytes=_MAX_BYTES))

    def get(self, name: str, default: Any = None) -> Any:
        """Return a setting of any type; the default if it is missing or null."""
        self._read.add(name)
        value = self.values.get(name)
        return default if value is None else value

    def integer(self, name: str, default: int | None = None, *, min: int = 1, max: int = 2**31 - 1) -> int:
        """Return an integer within bounds."""
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not min <= value <= max:
            problem = f"has {name}={short(value)}" if name in self.values else f"lacks {name}"
            raise ArgumentError(
                f"{self.path} {problem}; it must be an integer from {min} to {max}. Use the file that "
                "belongs to the weights."
            )
        return value

    def number(self, name: str, default: float, *, below: float = 1.0) -> float:
        """Return a number from 0 up to, but not including, `below`."""
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < below:
            raise ArgumentError(
                f"{self.path} has {name}={short(value)}; it must be at least 0 and less than {below:g}."
            )
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """Return a boolean."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise ArgumentError(f"{self.path} has {name}={short(value)}; it must be true or false.")
        return value

    def activation(self, name: str, default: str) -> Activation:
        """Return regard's name for an activation function."""
        value = self.get(name, default)
        if not isinstance(value, str) or value not in _ACTIVATIONS:
            raise ArgumentError(
                f"{self.path} has {name}={short(value)}; regard supports only {', '.join(_ACTIVATIONS)}."
            )
        return _ACTIVATIONS[value]

    def architecture(self, **options: Any) -> TransformerConfig:
        """Return the config of a stack; raise if the settings contradict each other."""
        try:
            return TransformerConfig(**options)
        except ArgumentError as error:
            raise ArgumentError(f"{self.path} is invalid: {error}") from None

    def require(self, name: str, *allowed: Any, cure: str = "") -> None:
        """Raise unless a setting is missing or has one of the allowed values."""
        value = self.get(name)
        if value is not None and value not in allowed:
            expected = " and ".join(map(repr, allowed))
            raise ArgumentError(
                f"{self.path} has {name}={short(value)}; regard supports only {expected}.{cure}"
            )

    def check_rest(self, inert: Collection[str] = frozenset()) -> None:
        """Raise for a setting that was not read and could change the output, unless it is null or false."""
        if self.values.get("quantization_config"):
            raise ArgumentError(
                f"{self.path} has a quantization_config; regard needs floating-point weights. Save the model "
                "before quantization."
            )
        for name, value in self.values.items():
            if name not in self._read and name not in _INERT and name not in inert and value:
                raise ArgumentError(
                    f"{self.path} has {short(name)[1:-1]}={short(value)}, which regard does not support; the "
                    "translations could be wrong without it."
                )


def read_generation(folder: Path, config: Settings) -> Settings:
    """Return the generation settings: generation_config.json, or config.json in older folders."""
    path = folder / GENERATION
    if not path.exists():
        values = {name: value for name, value in config.values.items() if name in GENERATION_KEYS}
        settings = Settings(config.path, values)
    else:
        settings = Settings.load(path)
    for name, allowed in _NEUTRAL.items():
        settings.require(name, *allowed, cure=f" To translate without it, remove {name} from the file.")
    for name in _GENERATION_READ:
        settings.get(name)
    settings.check_rest(_GENERATION_INERT)
    return settings

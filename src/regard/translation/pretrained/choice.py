"""The settings that determine special tokens and languages, and the caller's choice of languages."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regard.errors import ArgumentError
from regard.models.checkpoint_files import read_json, short
from regard.models.generation import DecodingDefaults
from regard.translation.pretrained.settings import Settings


@dataclass(frozen=True)
class Choice:
    """The languages to translate between, and the settings in a folder.

    source, target: language codes, or None for the folder's default.
    config, generation, tokenizer: config.json, generation_config.json and tokenizer_config.json.
    """

    folder: Path
    source: str | None
    target: str | None
    config: Settings
    generation: Settings
    tokenizer: Settings

    @classmethod
    def load(
        cls, folder: Path, config: Settings, generation: Settings, source: str | None, target: str | None
    ) -> "Choice":
        """Read tokenizer_config.json, if there is one."""
        path = folder / "tokenizer_config.json"
        return cls(
            folder,
            source,
            target,
            config,
            generation,
            Settings(path, read_json(path) if path.exists() else {}),
        )

    def token(self, name: str, default: int | None = None) -> int:
        """Return a token id from generation_config.json or, if it is not there, from config.json."""
        settings = self.generation if self.generation.get(name) is not None else self.config
        value = settings.get(name)
        if isinstance(value, list) and len(value) == 1:
            settings = Settings(settings.path, {name: value[0]})
        return settings.integer(name, default, min=0)

    def suppressed(self) -> tuple[int, ...]:
        """Return the ids of tokens that are never generated."""
        ids = [*self._list("suppress_tokens")]
        for word in self._list("bad_words_ids"):
            if not isinstance(word, list) or len(word) != 1:
                raise ArgumentError(
                    f"{self.generation.path} has bad_words_ids with {short(word)}; regard supports only "
                    "single tokens. Remove it from the file."
                )
            if word != [self.generation.get("eos_token_id", self.config.get("eos_token_id"))]:
                ids += word  # transformers ignores an end token here
        for i in ids:
            if isinstance(i, bool) or not isinstance(i, int) or i < 0:
                raise ArgumentError(
                    f"{self.generation.path} suppresses {short(i)}, which is not a token id. Use the file "
                    "that belongs to the weights."
                )
        return tuple(dict.fromkeys(ids))

    def check_no_forced_token(self) -> None:
        """Raise if the folder forces the first token, which regard supports only for target languages."""
        forced = self.generation.get("forced_bos_token_id")
        if forced is not None:
            raise ArgumentError(
                f"{self.generation.path} has forced_bos_token_id={short(forced)}; regard supports it only in "
                "M2M-100, NLLB and mBART-50, where it is the target language."
            )

    def _list(self, name: str) -> list[Any]:
        """Return a list from generation_config.json."""
        value = self.generation.get(name, [])
        if not isinstance(value, list):
            raise ArgumentError(
                f"{self.generation.path} has {name}={short(value)}; it must be a list. Use the file that "
                "belongs to the weights."
            )
        return value

    def decoding(self) -> DecodingDefaults:
        """Return the decoding defaults that transformers would use for this folder."""
        early = self.generation.get("early_stopping", False)
        if early not in (True, False, "never"):
            raise ArgumentError(
                f"{self.generation.path} has early_stopping={short(early)}; it must be true, false or "
                "'never'."
            )
        max_length = self.generation.get("max_length")
        new = self.generation.get("max_new_tokens")
        forced = self.generation.get("forced_eos_token_id")
        if forced is not None and forced not in (self.token("eos_token_id"), [self.token("eos_token_id")]):
            raise ArgumentError(
                f"{self.generation.path} has forced_eos_token_id={short(forced)} and "
                f"eos_token_id={self.token('eos_token_id')}; regard requires the two ids to be equal."
            )
        if new is not None:
            max_length = self.generation.integer("max_new_tokens") + 1
        elif max_length is not None:
            max_length = self.generation.integer("max_length", min=2)
        return DecodingDefaults(
            early_stopping=early,
            length_penalty=self.generation.number("length_penalty", 1.0, below=100),
            max_length=max_length,
            forced_end=forced is not None,
        )

    def language(self, side: str) -> str | None:
        """Return the caller's language for "source" or "target", or the one in tokenizer_config.json."""
        chosen = self.source if side == "source" else self.target
        default = self.tokenizer.get("src_lang" if side == "source" else "tgt_lang")
        return chosen if chosen is not None else default if isinstance(default, str) else None

    def check_fixed(self, side: str, key: str) -> None:
        """Raise if the caller chose a language other than the one that the folder supports."""
        chosen = self.source if side == "source" else self.target
        language = self.tokenizer.get(key)
        if chosen is not None and chosen != language:
            reason = f"its {side} language is {repr(language) if language else 'not stated'}"
            raise ArgumentError(
                f"{self.folder} translates only one language pair, and {reason}; got {side}={chosen!r}. "
                f"Omit {side}."
            )

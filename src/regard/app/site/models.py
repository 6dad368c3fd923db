"""Export models to a static site: parameters as safetensors; architecture and tokenizer as JSON.

`static/local/backend.js` reads the result. Parameters that float16 stores exactly become float16, so nothing
is rounded here.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from safetensors.torch import save
from torch import Tensor, nn

from regard.errors import ArgumentError
from regard.mechanism.normalizers import Entmax15, Softmax, Softmax1, Sparsemax
from regard.models.encoders.pretrained import PretrainedEncoder
from regard.models.language import LanguageModel
from regard.models.layers.blocks import TransformerConfig
from regard.models.transformer import Transformer
from regard.translation.tokens import Tokenizer, TokenizerPair
from regard.translation.translator import Translator

# the activations and normalizers that static/local/engine implements
_ACTIVATIONS = ("relu", "gelu", "swiglu")
_NORMALIZERS = {
    "softmax": Softmax(),
    "softmax1": Softmax1(),
    "sparsemax": Sparsemax(),
    "entmax15": Entmax15(),
}


class SiteModel(NamedTuple):
    """A model of a site. about: its entry in /api/models, architecture and tokenizer. weights: safetensors.

    >>> from regard.app.site.build import load_models
    >>> stories, dates = load_models()
    >>> stories.about["architecture"], dates.about["architecture"], type(dates.weights).__name__
    ('decoder', 'encoder-decoder', 'bytes')
    """

    about: dict[str, Any]
    weights: bytes


def export_translator(translator: Translator, info: Mapping[str, Any]) -> SiteModel:
    """Export a translator. info: its entry in /api/models.

    >>> from regard.app.site.models import export_translator
    >>> from regard.models import Transformer, TransformerConfig
    >>> from regard.translation import Tokenizer, TokenizerPair, Translator
    >>> tokens = Tokenizer.learn(["ein Hund bellt", "a dog barks"] * 10, kind="words")
    >>> model = Transformer(len(tokens), TransformerConfig(width=16, heads=2, layers=1), share=True)
    >>> exported = export_translator(Translator(model, TokenizerPair(tokens, tokens)), {"name": "dogs"})
    >>> exported.about["architecture"], exported.about["tokenizer"]["source"]["pieces"][4]
    ('encoder-decoder', ['▁Hund', ...])
    """
    model = translator.model
    if not isinstance(model, Transformer):
        raise ArgumentError(
            f"{info['name']!r} is a {type(model).__name__}; a static site runs only Transformers. Train one: "
            "regard train --model transformer."
        )
    if translator.tokens.target.origin is not None:
        raise ArgumentError(
            f"{info['name']!r} is a pretrained model in Hugging Face format; a static site runs only models "
            "that regard trained from scratch. Use regard look instead."
        )
    return _export(
        model,
        model.decoder.config,
        "encoder-decoder",
        info,
        tokenizer=export_tokenizers(translator.tokens),
        alignment=translator.alignment_head.to_dict(),
    )


def export_language_model(
    model: LanguageModel, tokens: Sequence[str], capitalized: Sequence[str], info: Mapping[str, Any]
) -> SiteModel:
    """Export a language model whose tokens are words. info: its entry in /api/models.

    >>> from regard.app.site.models import export_language_model
    >>> from regard.models import LanguageModel, TransformerConfig
    >>> model = LanguageModel(3, TransformerConfig(width=16, heads=2, layers=1))
    >>> export_language_model(model, ["<s>", "</s>", "tom"], ["tom"], {"name": "tiny"}).about["tokenizer"]
    {'tokens': ['<s>', '</s>', 'tom'], 'capitalized': ['tom']}
    """
    tokenizer = {"tokens": list(tokens), "capitalized": sorted(capitalized)}
    return _export(model, model.decoder.config, "decoder", info, tokenizer=tokenizer)


def export_encoder(encoder: Any, info: Mapping[str, Any]) -> SiteModel:
    """Export a pretrained encoder with a WordPiece tokenizer, such as minilm.

    >>> import regard
    >>> from regard.app.site.models import export_encoder
    >>> export_encoder(regard.load_encoder("minilm"), {"name": "minilm"}).about["tokenizer"]["special"]
    {'cls': '[CLS]', 'sep': '[SEP]', 'unknown': '[UNK]'}
    """
    if not isinstance(encoder, PretrainedEncoder):
        raise ArgumentError(
            f"{info['name']!r} is a {type(encoder).__name__}; a static site runs only translators, "
            "language models and BERT encoders such as minilm. Use regard look instead."
        )
    tokenizer = _export_word_piece(encoder, str(info["name"]))
    return _export(encoder, encoder.config, "encoder", info, tokenizer=tokenizer)


def _export(
    model: nn.Module, config: TransformerConfig, architecture: str, info: Mapping[str, Any], **other: Any
) -> SiteModel:
    about = {
        "info": dict(info),
        "architecture": architecture,
        "config": export_config(config, str(info["name"])),
        **other,
    }
    return SiteModel(about, save({name: _compact(tensor) for name, tensor in model.state_dict().items()}))


def export_config(config: TransformerConfig, name: str) -> dict[str, Any]:
    """Return the architecture as JSON-serializable values, with all defaults resolved.

    >>> from regard.app.site.models import export_config
    >>> from regard.models import TransformerConfig
    >>> exported = export_config(TransformerConfig(width=16, heads=2), "tiny")
    >>> exported["ffn_dim"], exported["key_heads"], exported["normalize"]
    (64, 2, 'softmax')
    """
    normalize = next((key for key, value in _NORMALIZERS.items() if value == config.normalize), None)
    if isinstance(config.normalize, Softmax1) and config.normalize.score == 0:
        normalize = "softmax1"
    if normalize is None:
        raise ArgumentError(
            f"{name!r} uses normalize={config.normalize!r}; a static site supports only "
            f"{_join(_NORMALIZERS)}. Use regard look instead."
        )
    if config.activation not in _ACTIVATIONS:
        raise ArgumentError(
            f"{name!r} uses activation={config.activation!r}; a static site supports only "
            f"{_join(_ACTIVATIONS)}. Use regard look instead."
        )
    if config.resolved_head_width * config.heads != config.width:
        raise ArgumentError(
            f"{name!r} has heads={config.heads}, head_width={config.head_width} and width={config.width}; "
            "a static site requires heads * head_width = width. Use regard look instead."
        )
    names = ("width", "heads", "layers", "activation", "norm", "eps", "norm_first", "positions")
    return {
        **{field: getattr(config, field) for field in names},
        "key_heads": config.key_heads or config.heads,
        "ffn_dim": config.resolved_ffn_dim,
        "normalize": normalize,
    }


def _join(names: Iterable[str]) -> str:
    """Return a list of names as text: "relu, gelu and swiglu"."""
    *first, last = names
    return f"{', '.join(first)} and {last}"


def export_tokenizers(tokens: TokenizerPair) -> dict[str, Any]:
    """Return the vocabularies of source and target; target is None if they share one.

    >>> from regard.app.site.models import export_tokenizers
    >>> from regard.translation import Tokenizer, TokenizerPair
    >>> tokens = Tokenizer.learn(["ein Hund bellt", "a dog barks"] * 10, kind="words")
    >>> export_tokenizers(TokenizerPair(tokens, tokens))["target"] is None
    True
    """
    return {
        "source": export_tokenizer(tokens.source),
        "target": None if tokens.shared else export_tokenizer(tokens.target),
    }


def export_tokenizer(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the pieces of a SentencePiece vocabulary with their scores, by id.

    >>> from regard.app.site.models import export_tokenizer
    >>> from regard.translation import Tokenizer
    >>> exported = export_tokenizer(Tokenizer.learn(["a dog barks"] * 10, kind="words"))
    >>> exported["kind"], len(exported["pieces"])
    ('words', 7)
    """
    digits = ".9g"  # a float32 survives a round trip through 9 significant digits
    pieces = [[piece, float(f"{score:{digits}}")] for piece, score in tokenizer.scored_pieces()]
    return {"kind": tokenizer.kind, "pieces": pieces}


def _export_word_piece(encoder: PretrainedEncoder, name: str) -> dict[str, Any]:
    settings = json.loads(encoder.tokenizer.tokenizer.to_str())
    model, normalizer = settings["model"], settings.get("normalizer") or {}
    strips = normalizer.get("strip_accents") in (None, normalizer.get("lowercase"))
    if model.get("type") != "WordPiece" or normalizer.get("type") != "BertNormalizer" or not strips:
        raise ArgumentError(
            f"{name!r} has a tokenizer of type {model.get('type')!r}; a static site supports "
            "only BERT's WordPiece tokenizer. Use regard look instead."
        )
    vocabulary = sorted(model["vocab"], key=model["vocab"].__getitem__)
    special = {"cls": "[CLS]", "sep": "[SEP]", "unknown": model["unk_token"]}
    return {"tokens": vocabulary, "special": special, "lowercase": bool(normalizer.get("lowercase"))}


def _compact(tensor: Tensor) -> Tensor:
    """Return a tensor as float16 if that is exact, otherwise as float32."""
    single = tensor.detach().cpu().float().contiguous()
    half = single.half()
    return half if torch.equal(half.float(), single) else single

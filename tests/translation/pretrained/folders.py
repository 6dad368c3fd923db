"""Small folders in Hugging Face format, written by transformers with random parameters."""

import io
import json
import warnings
from pathlib import Path
from typing import Any

import sentencepiece
import torch
from safetensors.torch import load_file, save_file

LINES = [
    "ein Hund bellt laut im Garten .",
    "eine Frau lacht über den kleinen Mann .",
    "der Mann liest ein Buch und eine Zeitung .",
    "a dog barks loudly in the garden .",
    "a woman laughs about the little man .",
    "the man reads a book and a newspaper .",
    "translate English to German: two children play football",
    "zwei Kinder spielen Fußball auf der Straße .",
] * 4
SOURCES = [
    "ein Hund bellt",
    "der Mann liest eine Zeitung .",
    "eine Frau",
    "zwei Kinder spielen laut im Garten .",
]
SIZES: dict[str, Any] = {
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 40,
    "max_position_embeddings": 64,
    "dropout": 0.1,
}


def learn(size: int = 90, **options: Any) -> bytes:
    """Train a SentencePiece model on a few lines."""
    content = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES),
        model_writer=content,
        vocab_size=size,
        hard_vocab_limit=False,
        minloglevel=2,
        num_threads=1,
        **options,
    )
    return content.getvalue()


def pieces(content: bytes) -> list[str]:
    """Return the pieces of a SentencePiece model."""
    processor = sentencepiece.SentencePieceProcessor(model_proto=content)
    return [processor.id_to_piece(i) for i in range(processor.get_piece_size())]


def write_json(path: Path, value: Any) -> None:
    """Write JSON."""
    path.write_text(json.dumps(value))


def randomize(model: torch.nn.Module, seed: int = 0) -> None:
    """Draw parameters for which translations differ and end."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed_positions" in name and not parameter.requires_grad:
                continue
            is_table = parameter.dim() > 1 and ("shared" in name or "embed" in name)
            std = 0.25 if is_table else 1.5 * parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.2
            base = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            parameter.copy_(base + std * torch.randn(parameter.shape, generator=generator))
        if hasattr(model, "final_logits_bias"):
            bias = torch.randn(model.final_logits_bias.shape, generator=generator) * 0.5
            bias[0, model.config.eos_token_id] += 1
            model.final_logits_bias.copy_(bias)


def make_marian(folder: Path, *, seed: int = 0, **options: Any) -> Any:
    """Write a Marian folder: source.spm, target.spm, vocab.json."""
    from transformers import MarianConfig, MarianMTModel

    folder.mkdir(parents=True, exist_ok=True)
    source, target = learn(80), learn(90, model_type="bpe")
    (folder / "source.spm").write_bytes(source)
    (folder / "target.spm").write_bytes(target)
    joint = ["</s>", "<unk>", *dict.fromkeys([*pieces(source)[3:], *pieces(target)[3:]])]
    ids = {piece: i for i, piece in enumerate([*joint, "<pad>"])}
    write_json(folder / "vocab.json", ids)
    write_json(
        folder / "tokenizer_config.json",
        {"tokenizer_class": "MarianTokenizer", "source_lang": "de", "target_lang": "en"},
    )
    pad = ids["<pad>"]
    config = MarianConfig(
        **{
            **SIZES,
            "vocab_size": len(ids),
            "activation_function": "swish",
            "scale_embedding": True,
            "pad_token_id": pad,
            "decoder_start_token_id": pad,
            "eos_token_id": 0,
            "forced_eos_token_id": 0,
            **options,
        }
    )
    model = MarianMTModel(config).eval()
    model.generation_config.update(bad_words_ids=[[pad]], max_length=24, num_beams=5)
    return save(model, folder, seed)


def make_marian_separate(folder: Path, *, seed: int = 0, **options: Any) -> Any:
    """Write a Marian folder with a vocabulary per side; the ids of </s> and the sizes differ."""
    from transformers import MarianConfig, MarianMTModel

    folder.mkdir(parents=True, exist_ok=True)
    sides = {"source": learn(80), "target": learn(90, model_type="bpe")}
    first = {"source": ["<unk>", "<pad>", "</s>"], "target": ["</s>", "<unk>", "<pad>"]}
    ids = {}
    for side, content in sides.items():
        (folder / f"{side}.spm").write_bytes(content)
        ids[side] = {piece: i for i, piece in enumerate([*first[side], *pieces(content)[3:]])}
    write_json(folder / "vocab.json", ids["source"])
    write_json(folder / "target_vocab.json", ids["target"])
    settings = {"tokenizer_class": "MarianTokenizer", "separate_vocabs": True}
    write_json(folder / "tokenizer_config.json", settings)
    config = MarianConfig(
        **{
            **SIZES,
            "vocab_size": len(ids["source"]),
            "decoder_vocab_size": len(ids["target"]),
            "share_encoder_decoder_embeddings": False,
            "scale_embedding": True,
            "pad_token_id": 1,
            "decoder_start_token_id": 2,
            "eos_token_id": 0,
            "forced_eos_token_id": 0,
            **options,
        }
    )
    model = MarianMTModel(config).eval()
    model.generation_config.update(bad_words_ids=[[2]], max_length=24, num_beams=5)
    return save(model, folder, seed)


def make_m2m_100(folder: Path, *, seed: int = 0, **options: Any) -> Any:
    """Write an M2M-100 folder: vocab.json and sentencepiece.bpe.model."""
    from transformers import M2M100Config, M2M100ForConditionalGeneration

    folder.mkdir(parents=True, exist_ok=True)
    content = learn(90, model_type="bpe")
    (folder / "sentencepiece.bpe.model").write_bytes(content)
    words = ["<s>", "<pad>", "</s>", "<unk>", *pieces(content)[3:]]
    write_json(folder / "vocab.json", {piece: i for i, piece in enumerate(words)})
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "M2M100Tokenizer"})
    config = M2M100Config(**{**SIZES, "vocab_size": len(words) + 100 + 8, **options})
    model = M2M100ForConditionalGeneration(config).eval()
    model.generation_config.update(max_length=24, num_beams=5, early_stopping=True)
    return save(model, folder, seed)


def make_nllb(folder: Path, *, seed: int = 0) -> Any:
    """Write an NLLB folder: tokenizer.json, as saved by transformers, which lists the languages."""
    from transformers import AutoTokenizer, M2M100Config, M2M100ForConditionalGeneration
    from transformers.models.nllb.tokenization_nllb import FAIRSEQ_LANGUAGE_CODES as codes

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sentencepiece.bpe.model").write_bytes(learn(90, model_type="bpe"))
    write_json(
        folder / "tokenizer_config.json",
        {"tokenizer_class": "NllbTokenizer", "additional_special_tokens": list(codes)},
    )
    config = M2M100Config(**{**SIZES, "vocab_size": 91 + len(codes) + 2})
    model = M2M100ForConditionalGeneration(config).eval()
    model.generation_config.update(max_length=24, num_beams=5, suppress_tokens=[0, 1, 3])
    write_json(folder / "config.json", config.to_dict())
    AutoTokenizer.from_pretrained(folder).save_pretrained(folder)
    (folder / "sentencepiece.bpe.model").unlink()
    return save(model, folder, seed)


def make_mbart(folder: Path, *, fifty: bool = True, seed: int = 0, **options: Any) -> Any:
    """Write an mBART folder with sentencepiece.bpe.model; fifty: mBART-50."""
    from transformers import MBartConfig, MBartForConditionalGeneration

    folder.mkdir(parents=True, exist_ok=True)
    content = learn(90)
    (folder / "sentencepiece.bpe.model").write_bytes(content)
    name = "MBart50Tokenizer" if fifty else "MBartTokenizer"
    languages = 52 if fifty else 25
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": name})
    config = MBartConfig(
        **{
            **SIZES,
            "vocab_size": len(pieces(content)) + 1 + languages + 1,
            "scale_embedding": True,
            "decoder_start_token_id": 2,
            **options,
        }
    )
    model = MBartForConditionalGeneration(config).eval()
    model.generation_config.update(max_length=24, num_beams=5, forced_eos_token_id=2)
    return save(model, folder, seed)


def make_t5(folder: Path, *, seed: int = 0, **options: Any) -> Any:
    """Write a T5 folder with spiece.model."""
    from transformers import T5Config, T5ForConditionalGeneration

    folder.mkdir(parents=True, exist_ok=True)
    content = learn(90, pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
    (folder / "spiece.model").write_bytes(content)
    config = T5Config(
        **{
            "vocab_size": len(pieces(content)) + 12,
            "d_model": 16,
            "d_kv": 6,
            "d_ff": 24,
            "num_layers": 2,
            "num_decoder_layers": 2,
            "num_heads": 2,
            "relative_attention_num_buckets": 8,
            "relative_attention_max_distance": 12,
            "decoder_start_token_id": 0,
            **options,
        }
    )
    model = T5ForConditionalGeneration(config).eval()
    model.generation_config.update(max_length=24, num_beams=5)
    return save(model, folder, seed)


def make_t5_untied(folder: Path, *, seed: int = 0, kind: str = "t5", version: int = 5) -> Any:
    """Write a T5 1.1 or mT5 folder, whose output matrix is separate, as transformers 4 or 5 writes it.

    Both write lm_head.weight; version 4 writes tie_word_embeddings=false, and version 5 writes true.
    """
    from transformers import AutoModelForSeq2SeqLM

    folder.mkdir(parents=True, exist_ok=True)
    make_t5(folder, seed=seed, feed_forward_proj="gated-gelu")
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(seed + 1)
    tensors["lm_head.weight"] = 0.25 * torch.randn(tensors["shared.weight"].shape, generator=generator)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    del config["scale_decoder_outputs"]
    config |= {"model_type": kind, "tie_word_embeddings": False}
    write_json(folder / "config.json", config)
    model = AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    if version == 5:
        model.save_pretrained(folder)
    return model


def save(model: Any, folder: Path, seed: int) -> Any:
    """Draw the parameters and save the model."""
    randomize(model, seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder)
    return model


MAKERS = {"marian": make_marian, "m2m_100": make_m2m_100, "mbart": make_mbart, "t5": make_t5}
LANGUAGES = {
    "marian": {},
    "m2m_100": {"source": "de", "target": "en"},
    "mbart": {"source": "de_DE", "target": "en_XX"},
    "t5": {},
}

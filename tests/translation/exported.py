"""Greedy decoding of exported folders, without regard."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import torch

MAX_NEW_TOKENS = 60


def decode_ctranslate2(
    folder: Path, sources: Sequence[Sequence[str]], prefix: Sequence[str] = ()
) -> list[list[str]]:
    """Decode token strings with CTranslate2."""
    import ctranslate2

    translator = ctranslate2.Translator(str(folder), inter_threads=1, intra_threads=1)
    results = translator.translate_batch(
        [list(source) for source in sources],
        target_prefix=[list(prefix)] * len(sources) if prefix else None,
        beam_size=1,
        min_decoding_length=0,
        max_decoding_length=MAX_NEW_TOKENS,
        max_batch_size=64,
    )
    return [result.hypotheses[0][len(prefix) :] for result in results]


def decode_onnx(folder: Path, sources: Sequence[Sequence[int]]) -> list[list[int]]:
    """Decode token ids, excluding special tokens, with ONNX Runtime."""
    import onnxruntime

    config = json.loads((folder / "config.json").read_text())
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    encoder, decoder = (
        onnxruntime.InferenceSession(str(folder / f"{name}.onnx"), options) for name in ("encoder", "decoder")
    )
    results: list[list[int]] = []
    for first in range(0, len(sources), 50):
        batch = [
            [*config["source_prefix"], *ids, *config["source_suffix"]] for ids in sources[first : first + 50]
        ]
        results += _decode_batch(encoder, decoder, config, batch)
    return results


def _decode_batch(
    encoder: Any, decoder: Any, config: dict[str, Any], batch: list[list[int]]
) -> list[list[int]]:
    length = max(map(len, batch))
    tokens = numpy.array([ids + [0] * (length - len(ids)) for ids in batch])
    mask = numpy.array([[1] * len(ids) + [0] * (length - len(ids)) for ids in batch])
    names = [output.name for output in encoder.get_outputs()]
    cross = dict(zip(names, encoder.run(None, {"input_ids": tokens, "attention_mask": mask}), strict=True))
    empty = numpy.zeros((len(batch), config["heads"], 0, config["head_width"]), numpy.float32)
    layers = range(config["decoder_layers"])
    past = {f"past_{kind}.{i}": empty for i in layers for kind in ("key", "value")}
    names = [output.name for output in decoder.get_outputs()]
    new = numpy.array([config["target_start"]] * len(batch))
    results: list[list[int]] = [[] for _ in batch]
    open_rows = set(range(len(batch)))
    for _ in range(MAX_NEW_TOKENS - len(config["target_start"]) + 1):
        inputs = {"input_ids": new, "attention_mask": mask, **cross, **past}
        outputs = dict(zip(names, decoder.run(None, inputs), strict=True))
        past = {
            name.replace("present", "past"): x for name, x in outputs.items() if name.startswith("present")
        }
        new = outputs["logits"][:, -1].argmax(-1)[:, None]
        for row in sorted(open_rows):
            if new[row, 0] == config["end"]:
                open_rows.discard(row)
            else:
                results[row].append(int(new[row, 0]))
        if not open_rows:
            break
    return results


def decode_huggingface(folder: Path, sources: Sequence[Sequence[int]], **options: Any) -> list[list[int]]:
    """Decode token ids, including the end token, with transformers; the results have no special tokens."""
    from transformers import AutoModelForSeq2SeqLM

    model = AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    pad, end = model.config.pad_token_id, model.config.eos_token_id
    results = []
    for first in range(0, len(sources), 50):
        batch = [list(ids) for ids in sources[first : first + 50]]
        length = max(map(len, batch))
        tokens = torch.tensor([ids + [pad] * (length - len(ids)) for ids in batch])
        mask = torch.tensor([[1] * len(ids) + [0] * (length - len(ids)) for ids in batch])
        output = model.generate(
            tokens,
            attention_mask=mask,
            num_beams=1,
            do_sample=False,
            max_new_tokens=MAX_NEW_TOKENS,
            **options,
        )
        for ids in output[:, 1:].tolist():
            results.append(ids[: ids.index(end)] if end in ids else ids)
    return results

"""README.md of an exported folder: how to use it without regard."""

from regard.translation.export.plan import Plan

_CTRANSLATE2 = """\
import ctranslate2
import sentencepiece

source = sentencepiece.SentencePieceProcessor(model_file="source.spm")
target = sentencepiece.SentencePieceProcessor(model_file="target.spm")
translator = ctranslate2.Translator(".")
pieces = {before}source.encode("A sentence.", out_type=str){after}
(result,) = translator.translate_batch([pieces]{prefix}, min_decoding_length=0, return_attention=True)
print(target.decode(result.hypotheses[0]{skip}))
"""

_HUGGINGFACE = """\
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(".")
model = AutoModelForSeq2SeqLM.from_pretrained(".")
output = model.generate(**tokenizer("A sentence.", return_tensors="pt"), num_beams=5{prefix})
print(tokenizer.batch_decode(output, skip_special_tokens=True))
"""

_ONNX = """\
import json
import numpy
import onnxruntime
import sentencepiece

config = json.load(open("config.json"))
ids = json.load(open("source_vocabulary.json"))
pieces = {number: piece for piece, number in json.load(open("target_vocabulary.json")).items()}
source = sentencepiece.SentencePieceProcessor(model_file="source.spm")
target = sentencepiece.SentencePieceProcessor(model_file="target.spm")
encoder, decoder = (onnxruntime.InferenceSession(f"{name}.onnx") for name in ("encoder", "decoder"))

tokens = [ids.get(piece, config["unknown"]) for piece in source.encode("A sentence.", out_type=str)]
tokens = numpy.array([config["source_prefix"] + tokens + config["source_suffix"]])
mask = numpy.ones_like(tokens)
names = [output.name for output in encoder.get_outputs()]
cross = dict(zip(names, encoder.run(None, {"input_ids": tokens, "attention_mask": mask})))
empty = numpy.zeros((1, config["heads"], 0, config["head_width"]), numpy.float32)
past = {f"past_{kind}.{i}": empty for i in range(config["decoder_layers"]) for kind in ("key", "value")}
names = [output.name for output in decoder.get_outputs()]
new, result = config["target_start"], []
while len(result) < 256:
    inputs = {"input_ids": numpy.array([new]), "attention_mask": mask, **cross, **past}
    outputs = dict(zip(names, decoder.run(None, inputs)))
    past = {name.replace("present", "past"): x for name, x in outputs.items() if name.startswith("present")}
    new = [int(outputs["logits"][0, -1].argmax())]
    if new == [config["end"]]:
        break
    result += new
print(target.decode([pieces[token] for token in result]))
"""


def describe(plan: Plan, to: str) -> str:
    """Return the text of README.md. to: name of the format."""
    layer, heads = plan.alignment()
    special, source, target = plan.tokens.special, plan.tokens.source, plan.tokens.target
    around = special.source([])
    first = len(special.source_prefix)
    prefix = [target.piece(token) for token in special.target_prefix]
    code = _ONNX
    if to == "ctranslate2":
        before, after = ([source.piece(i) for i in part] for part in (around[:first], around[first:]))
        ends = around == [special.end]
        code = _CTRANSLATE2.format(
            before=f"{before} + " if before else "",
            after="" if ends else f" + {after}",
            prefix=f", target_prefix=[{prefix}]" if prefix else "",
            skip=f"[{len(prefix)}:]" if prefix else "",
        )
    elif to == "huggingface":
        forced = f", forced_bos_token_id={special.target_prefix[0]}" if prefix else ""
        code = _HUGGINGFACE.format(prefix=forced)
    which = "predicts" if plan.head.shift == "output" else "reads"
    return f"""\
# A translation model exported by regard

Run this in the folder:

```python
{code}```

Word alignments: the cross-attention weights of decoder layer {layer}, averaged over the heads {heads}
(counted from 0), at the step that {which} a target token. CTranslate2 and ONNX return them as `attention` and
`alignment`.
"""

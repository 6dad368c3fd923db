"""regard: attention that is fast and can be looked at.

One operator, any score × any normalizer × any mask:

>>> import torch, regard
>>> x = torch.randn(10, 16)
>>> output, weights = regard.attend(x, x, x, mask=regard.Causal(), normalize=regard.Entmax(1.5))
>>> weights.top(3).keys.shape
torch.Size([10, 3])
"""

import os
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regard import models, translation
    from regard.errors import (
        ArgumentError,
        DeviceError,
        DTypeError,
        MaskError,
        RegardError,
        ShapeError,
        StaleError,
    )
    from regard.mechanism.biases import T5, ALiBi, Relative, RelativeBias
    from regard.mechanism.masking import Mask
    from regard.mechanism.masks import Causal, Documents, Padding, Prefix, Rule, Window
    from regard.mechanism.normalizers import (
        Entmax,
        Entmax15,
        Hard,
        Mean,
        Normalizer,
        Relu,
        Sigmoid,
        Sink,
        Softmax,
        Softmax1,
        Sparsemax,
    )
    from regard.mechanism.operator import attend, attention, explain, self_attention
    from regard.mechanism.rollout import rollout
    from regard.mechanism.scores import Additive, Concat, Cosine, Dot, Gaussian, General, ScaledDot, Score
    from regard.mechanism.sdpa import scaled_dot_product_attention
    from regard.mechanism.weights import Top, TransposedWeights, Weights
    from regard.models.pretrained import load_encoder
    from regard.translation.translator import Translation, Translator, load_translator
    from regard.view import huggingface
    from regard.view.editing import (
        Average,
        ReplaceOutput,
        ReplaceWeights,
        Uniform,
        Zero,
        edit,
        importance,
    )
    from regard.view.patching import patch, patched, unpatch
    from regard.view.pictures import heatmap
    from regard.view.watch import Seen, watch

__version__ = "0.1.0"

# Where each name is at home. It is imported when it is first asked for, as torch takes a second to load and
# `regard --help` does not need it.
_HOMES = {
    "regard.errors": (
        "ArgumentError",
        "DeviceError",
        "DTypeError",
        "MaskError",
        "RegardError",
        "ShapeError",
        "StaleError",
    ),
    "regard.mechanism.biases": ("T5", "ALiBi", "Relative", "RelativeBias"),
    "regard.mechanism.masking": ("Mask",),
    "regard.mechanism.masks": ("Causal", "Documents", "Padding", "Prefix", "Rule", "Window"),
    "regard.mechanism.normalizers": (
        "Entmax",
        "Entmax15",
        "Hard",
        "Mean",
        "Normalizer",
        "Relu",
        "Sigmoid",
        "Sink",
        "Softmax",
        "Softmax1",
        "Sparsemax",
    ),
    "regard.mechanism.operator": ("attend", "attention", "explain", "self_attention"),
    "regard.mechanism.rollout": ("rollout",),
    "regard.mechanism.scores": (
        "Additive",
        "Concat",
        "Cosine",
        "Dot",
        "Gaussian",
        "General",
        "ScaledDot",
        "Score",
    ),
    "regard.mechanism.sdpa": ("scaled_dot_product_attention",),
    "regard.mechanism.weights": ("Top", "TransposedWeights", "Weights"),
    "regard.models.pretrained": ("load_encoder",),
    "regard.translation.translator": ("Translation", "Translator", "load_translator"),
    "regard.view": ("huggingface",),
    "regard.view.editing": (
        "Average",
        "ReplaceOutput",
        "ReplaceWeights",
        "Uniform",
        "Zero",
        "edit",
        "importance",
    ),
    "regard.view.patching": ("patch", "patched", "unpatch"),
    "regard.view.pictures": ("heatmap",),
    "regard.view.watch": ("Seen", "watch"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
_ROOMS = ("errors", "mechanism", "models", "translation", "view")
_MODULES = ("huggingface",)  # of the names above

__all__ = [
    "T5",
    "ALiBi",
    "Additive",
    "ArgumentError",
    "Average",
    "Causal",
    "Concat",
    "Cosine",
    "DTypeError",
    "DeviceError",
    "Documents",
    "Dot",
    "Entmax",
    "Entmax15",
    "Gaussian",
    "General",
    "Hard",
    "Mask",
    "MaskError",
    "Mean",
    "Normalizer",
    "Padding",
    "Prefix",
    "RegardError",
    "Relative",
    "RelativeBias",
    "Relu",
    "ReplaceOutput",
    "ReplaceWeights",
    "Rule",
    "ScaledDot",
    "Score",
    "Seen",
    "ShapeError",
    "Sigmoid",
    "Sink",
    "Softmax",
    "Softmax1",
    "Sparsemax",
    "StaleError",
    "Top",
    "Translation",
    "Translator",
    "TransposedWeights",
    "Uniform",
    "Weights",
    "Window",
    "Zero",
    "attend",
    "attention",
    "edit",
    "explain",
    "heatmap",
    "huggingface",
    "importance",
    "load_encoder",
    "load_translator",
    "models",
    "patch",
    "patched",
    "rollout",
    "scaled_dot_product_attention",
    "self_attention",
    "translation",
    "unpatch",
    "watch",
]

if not TYPE_CHECKING:  # a type checker knows the names above, and that there are no others

    def __getattr__(name: str) -> Any:
        if name in _ROOMS:
            found = _room(name)
        elif name in _MODULES:
            found = import_module(f"{_HOME_OF[name]}.{name}")
        elif name in _HOME_OF:
            found = getattr(import_module(_HOME_OF[name]), name)
        else:
            raise _no_such(name)
        globals()[name] = found  # the next time it is simply there
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF, *_ROOMS})


def _room(name: str) -> ModuleType:
    """A package with the modules that regard's names come from, so that they are its attributes."""
    for home in _HOMES:
        if home.startswith(f"regard.{name}"):
            import_module(home)
    return import_module(f"regard.{name}")


def _no_such(name: str) -> AttributeError:
    from difflib import get_close_matches

    alike = [] if name.startswith("_") else get_close_matches(name, [*_HOME_OF, *_ROOMS], n=1)
    hint = f"; did you mean {alike[0]!r}?" if alike else ""
    # `name` without `obj` keeps the interpreter from suggesting the same once more
    return AttributeError(f"module 'regard' has no attribute {name!r}{hint}", name=name)


if os.environ.get("REGARD_ISA") or os.environ.get("REGARD_IMPLEMENTATION"):
    import_module("regard.mechanism.operator")  # refuses wrong values: now, and not in the middle of the work

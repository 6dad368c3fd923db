"""regard: attention that is fast and can be looked at.

One operator, any score × any normalizer × any mask:

>>> import torch, regard
>>> x = torch.randn(10, 16)
>>> output, weights = regard.attend(x, x, x, mask=regard.Causal(), normalize=regard.Entmax(1.5))
>>> weights.top(3).keys.shape
torch.Size([10, 3])
"""

from regard import models
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
from regard.view.pictures import heatmap
from regard.view.watch import Seen, watch

__version__ = "0.1.0"

__all__ = [
    "T5",
    "ALiBi",
    "Additive",
    "ArgumentError",
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
    "TransposedWeights",
    "Weights",
    "Window",
    "attend",
    "attention",
    "explain",
    "heatmap",
    "load_encoder",
    "models",
    "rollout",
    "scaled_dot_product_attention",
    "self_attention",
    "watch",
]

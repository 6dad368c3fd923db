"""regard: fast attention whose weights can be inspected.

One operator, any score × any normalizer × any mask:

>>> import torch, regard
>>> x = torch.randn(10, 16)
>>> output, weights = regard.attend(x, x, x, mask=regard.Causal(), normalize=regard.Entmax(1.5))
>>> weights.topk(3).indices.shape
torch.Size([10, 3])
"""

import os

from regard._util.lazy import attach

__version__ = "0.1.0"
__getattr__, __dir__, __all__ = attach(__name__, __file__)

if os.environ.get("REGARD_ISA") or os.environ.get("REGARD_IMPLEMENTATION"):
    import regard.mechanism.operator  # noqa: F401  rejects invalid values at import, not on first use

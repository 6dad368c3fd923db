"""Position encodings, one per module; the module's name is the value of the setting `positions`.

This file does not import torch, so the command line can check settings quickly.
"""

from pkgutil import iter_modules
from typing import TYPE_CHECKING, Literal

KINDS = tuple(module.name for module in iter_modules(__path__))

if TYPE_CHECKING:
    PositionKind = str
    Positions = str
else:
    PositionKind = Literal[KINDS]
    Positions = Literal[(*KINDS, "none")]

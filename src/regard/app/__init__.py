"""The interactive view: notebook widget, standalone page, and the server of `regard look`."""

from regard._util.extras import require
from regard._util.lazy import attach

require("msgspec", "The interactive view")
__getattr__, __dir__, __all__ = attach(__name__, __file__)

"""Looking at attention: pictures, pages, and other people's models.

>>> import tempfile, regard
>>> from regard.view import draw_mask
>>> draw_mask(regard.Causal(), tempfile.mkdtemp() + "/causal.png").name
'causal.png'
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regard.view.curves import draw_by_distance, draw_by_length, draw_comparison, draw_curves
    from regard.view.exhibit import (
        Exhibit,
        exhibit_of_translations,
        look_at_text,
        look_at_translation,
        look_at_translations,
    )
    from regard.view.page import make_page, show, write_page
    from regard.view.pictures import draw_alignments, draw_heads, draw_mask, draw_positions, draw_weights
    from regard.view.terminal import alignment_lines, draw_alignment
    from regard.view.widget import AttentionWidget

# Where each name is at home: it is imported when it is first asked for, as a picture needs no widgets.
_HOMES = {
    "curves": ("draw_by_distance", "draw_by_length", "draw_comparison", "draw_curves"),
    "exhibit": (
        "Exhibit",
        "exhibit_of_translations",
        "look_at_text",
        "look_at_translation",
        "look_at_translations",
    ),
    "page": ("make_page", "show", "write_page"),
    "pictures": ("draw_alignments", "draw_heads", "draw_mask", "draw_positions", "draw_weights"),
    "terminal": ("alignment_lines", "draw_alignment"),
    "widget": ("AttentionWidget",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "AttentionWidget",
    "Exhibit",
    "alignment_lines",
    "draw_alignment",
    "draw_alignments",
    "draw_by_distance",
    "draw_by_length",
    "draw_comparison",
    "draw_curves",
    "draw_heads",
    "draw_mask",
    "draw_positions",
    "draw_weights",
    "exhibit_of_translations",
    "look_at_text",
    "look_at_translation",
    "look_at_translations",
    "make_page",
    "show",
    "write_page",
]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _HOME_OF:
            raise AttributeError(f"module 'regard.view' has no attribute {name!r}")
        return getattr(import_module(f"regard.view.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF})

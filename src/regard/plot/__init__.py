"""Plots of attention: heatmaps, grids of heads, curves and alignments, as files or in the terminal.

>>> import tempfile, regard
>>> from regard.plot import draw_mask
>>> draw_mask(regard.Causal(), tempfile.mkdtemp() + "/causal.png").name
'causal.png'
"""

from regard._util.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)

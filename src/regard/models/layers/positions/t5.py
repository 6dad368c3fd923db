"""T5's relative positions: `regard.T5Bias`, a bias added to the scores."""

from regard.mechanism.biases import T5Bias
from regard.models.layers.position_encoding import PositionSizes


def make(sizes: PositionSizes) -> T5Bias:
    return T5Bias(sizes.heads, bidirectional=not sizes.causal)

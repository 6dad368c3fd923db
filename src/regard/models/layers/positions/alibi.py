"""ALiBi positions: `regard.ALiBi`, a bias added to the scores."""

from regard.mechanism.biases import ALiBi
from regard.models.layers.position_encoding import PositionSizes


def make(sizes: PositionSizes) -> ALiBi:
    return ALiBi(sizes.heads)

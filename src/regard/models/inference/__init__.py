"""Inference: int8 weights, and the parameters that the kernels of the beam search read."""

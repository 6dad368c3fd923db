"""Imports that every worker needs, loaded once by the server that forks them."""

import warnings

import torch

import regard

warnings.simplefilter("ignore")
torch.broadcast_shapes((1,), (1,))  # the first call imports the symbolic shapes, which takes a second
__all__ = ["regard", "torch"]

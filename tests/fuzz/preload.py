"""What every worker needs, imported once by the server that they are forked from."""

import warnings

import torch

import regard

warnings.simplefilter("ignore")
torch.broadcast_shapes((1,), (1,))  # its first call imports the symbolic shapes, which takes a second
__all__ = ["regard", "torch"]

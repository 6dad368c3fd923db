"""What every worker needs, imported once by the server that they are forked from."""

import warnings

import torch

import regard

warnings.simplefilter("ignore")
__all__ = ["regard", "torch"]

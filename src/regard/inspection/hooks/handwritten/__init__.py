"""Trace attention in plain tensor operations, from query · keyᵀ to the product of weights and values."""

"""Follow attention written by hand, from query · keyᵀ to the product of weights and values."""

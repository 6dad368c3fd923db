"""Short English stories from a grammar, and the language model trained on them."""

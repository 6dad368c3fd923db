"""Measures of what attention contributes: norms, gradients, spans, scores of keys, value zeroing."""

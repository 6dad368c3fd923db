"""Measures of attention: head statistics, norms, gradients, spans, key scores and value zeroing."""

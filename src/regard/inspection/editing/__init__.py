"""Interventions for `edit`: replacements of outputs and weights, knockout of edges, activation patching."""

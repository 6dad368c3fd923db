"""`edit` and its interventions: ablation, replacement of outputs and weights, blocked edges, patching."""

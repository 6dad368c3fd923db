"""The mechanism: one operator for every attention, and its weights as a lazy matrix."""

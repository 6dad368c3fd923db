"""Captured attention calls: their masks, their windows, and the steps of a generation."""

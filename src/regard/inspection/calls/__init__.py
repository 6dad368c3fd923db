"""Captured attention calls, their masks and windows, and the steps of `generate`."""

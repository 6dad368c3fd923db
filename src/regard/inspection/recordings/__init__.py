"""Recordings made by `watch`: layers, texts and files."""

"""Recordings of `watch`, their layers, their texts and their files."""

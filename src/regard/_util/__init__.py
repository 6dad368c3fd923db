"""Helpers without attention in them: argument checks, files, text, lazy imports."""

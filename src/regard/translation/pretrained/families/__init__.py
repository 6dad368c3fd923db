"""Families of pretrained translators, one per module: architecture, tensor names, vocabularies.

Import from the submodules; this package exports nothing.
"""

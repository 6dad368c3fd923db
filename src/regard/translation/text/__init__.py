"""Text processing around the model: sentences, protected spans, letter case, tags, documents and terms.

Import from the submodules; this package exports nothing.
"""

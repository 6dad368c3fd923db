"""Text processing around the model: sentences, protected spans, letter case, tags, documents and terms.

Each module is imported by its full name.
"""

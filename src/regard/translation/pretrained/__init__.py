"""Translators in Hugging Face format: Marian (OPUS-MT), M2M-100 and NLLB, mBART, T5.

Import from the submodules; this package exports nothing.
"""

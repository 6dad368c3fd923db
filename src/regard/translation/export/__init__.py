"""Export translators to CTranslate2, ONNX and Hugging Face format.

Import from the submodules; this package exports nothing.
"""

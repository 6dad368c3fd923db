"""Check `regard.watch` and the regard backend on every Hugging Face architecture."""

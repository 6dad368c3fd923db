"""General helpers: argument checks, files, text, lazy imports."""

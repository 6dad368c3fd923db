"""`regard translate`. Import from the submodules; this package exports nothing."""

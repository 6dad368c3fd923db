"""`regard align`. Import from the submodules; this package exports nothing."""

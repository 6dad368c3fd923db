"""The guide's pages: run, checked and kept up to date, and built into a site."""

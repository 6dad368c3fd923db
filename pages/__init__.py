"""Tools for the guide: run and check its pages, update their outputs, and build the site."""

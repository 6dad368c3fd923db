"""Fuzz targets, one per module."""

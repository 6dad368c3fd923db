"""Handlers of the endpoints, by topic."""

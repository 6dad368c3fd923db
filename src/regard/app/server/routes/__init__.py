"""Handlers of the endpoints, by topic. Each registers itself in ENDPOINTS when imported."""

from regard.app.server.endpoints import ENDPOINTS
from regard.app.server.routes import inside, lessons, long_text, models, text, training, translation, views

__all__ = [
    "ENDPOINTS",
    "inside",
    "lessons",
    "long_text",
    "models",
    "text",
    "training",
    "translation",
    "views",
]

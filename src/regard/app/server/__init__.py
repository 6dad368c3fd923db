"""The server of `regard look`: the page, and a JSON API on localhost.

schema.py                 base classes and shared types of requests and responses
endpoints.py, openapi.py  the table of endpoints, and its OpenAPI document
app.py                    the ASGI application
security.py               origin checks, limits and response headers
worker.py                 bounded queues with worker threads
registry.py               models and training runs specified at startup
view_store.py             open views
routes/                   the endpoints: their requests, responses and handlers
run.py                    socket, server and shutdown
"""

from regard._util.extras import require

for _package in ("starlette", "uvicorn"):
    require(_package, "The page of regard look")

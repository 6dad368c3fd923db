"""The server of `regard look`: the page, and a JSON API on localhost.

requests.py, schema.py    request and response bodies, as msgspec Structs
endpoints.py, openapi.py  the table of endpoints, and its OpenAPI document
app.py                    the ASGI application
security.py               origin checks, limits and response headers
worker.py                 bounded queues with worker threads
registry.py               models and training runs given at startup
view_store.py             open views
routes/                   the answers
run.py                    socket, server and shutdown
"""

"""The server behind the page of `regard look`: a small JSON API on localhost, and the page's own files.

requests.py, schema.py    what is asked and answered, as msgspec Structs
endpoints.py, openapi.py  the table of endpoints, and the document that describes it
app.py                    the ASGI application
security.py               origin checks, limits and response headers
worker.py                 one thread for the models, with a queue; a small pool for quick work
registry.py               the models given at the start, and their trainings
view_store.py             open views, kept for a while
routes/                   what the endpoints answer
run.py                    socket, server and shutdown
"""

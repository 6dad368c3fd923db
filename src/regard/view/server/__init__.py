"""The server behind the page of `regard look`: a small JSON API on localhost, and the page's own files.

requests.py, answers.py   what is asked and answered, as msgspec's Structs
endpoints.py, openapi.py  the table of what there is, and the document that describes it
app.py                    requests in, answers out: an ASGI application
guard.py                  who may ask, how much, and what every answer says of safety
work.py                   one thread for the models, with a queue; a small pool for all that is quick
collection.py             the models that were named at the start, and their trainings
exhibits.py, seeing.py    what is looked at: kept for a while, and made of models and texts
rooms.py, trainings.py    lookup, order, positions; logs of trainings
serving.py                a socket, a server, and its end
"""

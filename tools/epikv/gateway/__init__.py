"""OpenAI's HTTP dialect in front of daemons: `epikv gateway`.

A stateless ASGI application (app.py). What a client sends is read (reading.py, requests.py) and becomes a
request of a daemon (upstream.py) by what its path means (routes.py). What daemons send becomes an answer,
whole or a stream (answers.py, events.py), in OpenAI's bodies (responses.py), and their errors become
OpenAI's (errors.py). What a client shows, its token, trace and deadline, goes on to the daemon as it is.
"""

"""OpenAI's HTTP dialect in front of daemons: `epikv gateway`.

A stateless ASGI application. A body becomes a request of the daemon (requests.py), what the daemon sends
becomes a body or server-sent events (responses.py), and its errors become OpenAI's (errors.py). What a
client shows, its token, trace and deadline, goes on to the daemon as it is.
"""

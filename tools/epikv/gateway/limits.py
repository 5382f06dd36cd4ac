"""Around the application: what a client may send, how much at once, and what is counted of it."""

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse

from epikv.gateway.errors import ApiError
from epikv.gateway.events import DONE, MEDIA_TYPE, event
from epikv.gateway.metrics import Metrics
from epikv.gateway.settings import Settings

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]

GONE = 499  # the status of who did not wait for one
_BUSY_SECONDS = 1.0
_ALWAYS = ("/health", "/metrics")  # answered however busy it is
_ONCE = (b"authorization", b"host", b"timeout", b"traceparent", b"tracestate", b"x-request-id")
_LONGEST_HEADER = 4096  # bytes, of these
_log = logging.getLogger("uvicorn.error")
_ADDRESS = re.compile(
    r"(?:localhost|[\d.]+|\[[\da-fA-F:.]+\])(?::\d+)?"
)  # no name that can be moved
_ID = re.compile(r"[\x21-\x7e]{1,128}")


class Limits:
    """ASGI middleware. Bodies have a size and a time, requests at once a number; each has an id, which
    its answer tells: the client's x-request-id, or a new one. Scripts of pages may ask that come from
    `origins`, or from a machine's own address: a page elsewhere could else have its reader's browser ask
    a gateway that only that browser reaches, also by a name that it lets point there."""

    def __init__(self, app: Application, *, settings: Settings, metrics: Metrics) -> None:
        self._app = app
        self._settings = settings
        self._metrics = metrics
        self._in_flight = 0

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        begin = time.monotonic()
        request_id = _request_id(scope)
        scope.setdefault("state", {})["request_id"] = request_id
        status = GONE
        streams = False  # an answer of events has begun

        async def told(message: Message) -> None:
            nonlocal status, streams
            if message["type"] == "http.response.start":
                status = message["status"]
                streams = any(
                    value.startswith(MEDIA_TYPE.encode()) for _, value in message["headers"]
                )
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
                if not body.whole:  # what is left of it is not read
                    message["headers"].append((b"connection", b"close"))
                self._metrics.first_byte.labels(_route(scope)).observe(time.monotonic() - begin)
            await send(message)

        async def answer(error: ApiError) -> None:
            response = JSONResponse(error.body(), error.status, error.headers())
            await response(scope, receive, told)

        body = _Body(
            scope, receive, begin + self._settings.body_seconds, self._settings.max_body_bytes
        )
        self._in_flight += 1
        self._metrics.in_flight.inc()
        try:
            if refusal := self._refusal(scope):
                await answer(refusal)
            else:
                await self._app(scope, body.receive, told)
        except ClientDisconnect:
            pass  # before its body was whole
        except asyncio.CancelledError:  # the gateway ends, and what still runs has had its time
            error = ApiError(
                "the gateway has been told to end, and this request had not ended in time",
                status=503,
                code="draining",
                retry_after=_BUSY_SECONDS,
            )
            if status == GONE:  # nothing was sent
                await answer(error)
            elif streams:
                await told({"type": "http.response.body", "body": event(error.body()) + DONE})
        except Exception:
            _log.exception("request %s", request_id)
            if status == GONE:  # nothing was sent
                await answer(
                    ApiError(
                        "the gateway has failed; its log says how", status=500, code="internal"
                    )
                )
        finally:
            self._in_flight -= 1
            self._metrics.in_flight.dec()
            self._metrics.requests.labels(_route(scope), str(status)).inc()

    def _refusal(self, scope: Message) -> ApiError | None:
        most, origins = self._settings.max_requests, self._settings.origins
        if self._in_flight > most and scope["path"] not in _ALWAYS:
            return ApiError(
                f"this gateway has {most} requests at once, and takes no more",
                status=429,
                code="queue_full",
                retry_after=_BUSY_SECONDS,
            )
        headers: dict[bytes, bytes] = {}
        for name, value in scope["headers"]:
            if name in _ONCE and (name in headers or len(value) > _LONGEST_HEADER):
                return ApiError(
                    f"header {name.decode()}: give one, of at most {_LONGEST_HEADER} bytes"
                )
            headers[name] = value
        host = headers.get(b"host", b"").decode("latin-1")
        if self._settings.local and not origins and not _ADDRESS.fullmatch(host):
            return ApiError(f"{host:.200} is no name of this machine", status=403, code="host")
        origin = headers.get(b"origin", b"").decode("latin-1")
        if not origin or "*" in origins or origin in origins:
            return None
        page = origin.partition("://")[2]
        if page == host and _ADDRESS.fullmatch(page):
            return None
        return ApiError(
            f"pages of {origin:.200} may not ask here (--cors-origin)", status=403, code="origin"
        )


class _Body:
    """What a client sends, up to a size and a time. Raises ApiError beyond."""

    def __init__(self, scope: Message, receive: Receive, deadline: float, most: int) -> None:
        self._receive = receive
        self._deadline = deadline
        self._most = most
        self._size = 0
        names = {name for name, _ in scope["headers"]}
        self.whole = not names & {b"content-length", b"transfer-encoding"}  # there is none

    async def receive(self) -> Message:
        if self.whole:
            return await self._receive()  # until the client goes
        left = self._deadline - time.monotonic()
        try:
            message = await asyncio.wait_for(self._receive(), max(0, left))
        except TimeoutError:
            raise ApiError("the body took too long", status=408) from None
        self._size += len(message.get("body", b""))
        if self._size > self._most:
            raise ApiError(f"the body has more than {self._most} bytes", status=413)
        self.whole = not message.get("more_body", False)
        return message


def _request_id(scope: Message) -> str:
    """The client's own, or a new one."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _ID.fullmatch(given := value.decode("latin-1")):
            return given
    return uuid.uuid4().hex


def _route(scope: Message) -> str:
    route = scope.get("route")
    return getattr(route, "path", "other")

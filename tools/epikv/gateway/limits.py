"""Around the application: what a client may send, how much at once, and what is counted of it."""

import asyncio
import re
import time
import uuid
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

from starlette.responses import JSONResponse

from epikv.gateway.errors import ApiError
from epikv.gateway.metrics import Metrics

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]

GONE = 499  # the status of who did not wait for one
_BUSY_SECONDS = 1.0
_ADDRESS = re.compile(
    r"(?:localhost|[\d.]+|\[[\da-fA-F:.]+\])(?::\d+)?"
)  # no name that can be moved
_ID = re.compile(r"[\x21-\x7e]{1,128}")


class Limits:
    """ASGI middleware. Bodies have a size and a time, requests at once a number; each has an id, which
    its answer tells: the client's x-request-id, or a new one. Scripts of pages may ask that come from
    `origins`, or from a machine's own address: a page elsewhere could else have its reader's browser ask
    a gateway that only that browser reaches, also by a name that it lets point there."""

    def __init__(
        self,
        app: Application,
        *,
        metrics: Metrics,
        body_bytes: int,
        body_seconds: float,
        at_once: int,
        origins: Sequence[str],
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._body_bytes = body_bytes
        self._body_seconds = body_seconds
        self._at_once = at_once
        self._origins = frozenset(origins)
        self._in_flight = 0

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        begin = time.monotonic()
        request_id = _request_id(scope)
        scope.setdefault("state", {})["request_id"] = request_id
        status = GONE

        async def told(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
                self._metrics.first_byte.labels(_route(scope)).observe(time.monotonic() - begin)
            await send(message)

        self._in_flight += 1
        self._metrics.in_flight.inc()
        try:
            if refusal := self._refusal(scope):
                response = JSONResponse(refusal.body(), refusal.status, refusal.headers())
                await response(scope, receive, told)
            else:
                await self._app(scope, self._bounded(receive, begin), told)
        finally:
            self._in_flight -= 1
            self._metrics.in_flight.dec()
            self._metrics.requests.labels(_route(scope), str(status)).inc()

    def _refusal(self, scope: Message) -> ApiError | None:
        if self._in_flight > self._at_once:
            return ApiError(
                f"this gateway has {self._at_once} requests at once, and takes no more",
                status=429,
                code="queue_full",
                retry_after=_BUSY_SECONDS,
            )
        headers = dict(scope["headers"])
        origin = headers.get(b"origin", b"").decode("latin-1")
        if not origin or "*" in self._origins or origin in self._origins:
            return None
        page = origin.partition("://")[2]
        if page == headers.get(b"host", b"").decode("latin-1") and _ADDRESS.fullmatch(page):
            return None
        return ApiError(
            f"pages of {origin:.200} may not ask here (--cors-origin)", status=403, code="origin"
        )

    def _bounded(self, receive: Receive, begin: float) -> Receive:
        size = 0
        whole = False

        async def bounded() -> Message:
            nonlocal size, whole
            if whole:
                return await receive()  # until the client goes
            left = begin + self._body_seconds - time.monotonic()
            try:
                message = await asyncio.wait_for(receive(), max(0, left))
            except TimeoutError:
                raise ApiError(
                    f"the body did not come within {self._body_seconds:g} s", status=408
                ) from None
            size += len(message.get("body", b""))
            if size > self._body_bytes:
                raise ApiError(f"the body has more than {self._body_bytes} bytes", status=413)
            whole = not message.get("more_body", False)
            return message

        return bounded


def _request_id(scope: Message) -> str:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _ID.fullmatch(given := value.decode("latin-1")):
            return given
    return uuid.uuid4().hex


def _route(scope: Message) -> str:
    route = scope.get("route")
    return getattr(route, "path", "other")

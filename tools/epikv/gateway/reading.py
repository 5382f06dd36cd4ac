"""What a client has sent: its body, and what of its headers goes on to the daemon."""

import math
import re
import time
import uuid
from collections.abc import Callable
from typing import TypeVar

from pydantic import ValidationError
from pydantic_core import from_json
from starlette.requests import Request

from epikv.gateway import requests as bodies
from epikv.gateway.errors import ApiError
from epikv.gateway.upstream import Caller

Result = TypeVar("Result")
Body = TypeVar("Body", bound=bodies.Body)

_PASSED_ON = ("authorization", "traceparent", "tracestate")
_MOST_FAULTS = 8  # told of one body
_LONGEST_TIMEOUT = 1e6  # seconds
_LONGEST_NAME = 200  # characters, of a field that is told
_LONGEST_ID = 100
_IS_TYPE = re.compile(r"^(str$|list\[|dict\[|function-|constrained)")


async def read(request: Request, kind: type[Body]) -> Body:
    """Raises ApiError that names a field at fault, and tells of some. What is wrong with a body is not
    looked for longer than what is right."""
    try:
        given = from_json(await request.body(), allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(f"Invalid JSON: {error}") from None
    if not isinstance(given, dict):
        raise ApiError("the body must be an object")
    for name in given:
        if name not in kind.model_fields:
            shown = name[:_LONGEST_NAME]
            raise ApiError(f"{shown}: is not known here", param=shown)
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_context=False, include_input=False)
        told = [": ".join(filter(None, (_path(fault["loc"]), fault["msg"]))) for fault in faults]
        # Of a union's members, the one that was meant.
        deepest = max(faults, key=lambda fault: len(fault["loc"]))
        raise ApiError(
            "; ".join(told[:_MOST_FAULTS]), param=_path(deepest["loc"]) or None
        ) from None


def caller_of(request: Request) -> Caller:
    """Raises ApiError for what gRPC cannot carry."""
    metadata = []
    for name in _PASSED_ON:
        value = request.headers.get(name)
        if value is None:
            continue
        if not (value.isascii() and value.isprintable()):
            raise ApiError(f"header {name}: must be printable ASCII")
        metadata.append((name, value))
    deadline = None
    if (text := request.headers.get("timeout")) is not None:
        try:
            timeout = float(text)
        except ValueError:
            timeout = math.nan
        if not 0 < timeout <= _LONGEST_TIMEOUT:
            raise ApiError(f"header timeout: must be seconds above 0, is {text!r:.40}")
        deadline = time.monotonic() + timeout
    return Caller(tuple(metadata), deadline)


def id_of(request: Request) -> str:
    """What the daemon is to call a request. A client's own name is followed by one of ours: a mesh gives
    several requests the same."""
    given = str(request.state.request_id)
    if "x-request-id" not in request.headers:
        return given
    return f"{given[:_LONGEST_ID]}-{uuid.uuid4().hex[:8]}"


def fitting(make: Callable[[], Result]) -> Result:
    """Raises ApiError for what a message cannot hold."""
    try:
        return make()
    except bodies.UNFIT as error:
        raise ApiError(str(error) or "a value is out of range") from None


def _path(location: tuple[int | str, ...]) -> str:
    """Of a union's members pydantic names the type, which is no field."""
    parts = (str(part) for part in location if not _IS_TYPE.search(str(part)))
    return ".".join(parts)[:_LONGEST_NAME]

"""Errors as OpenAI's clients read them: a status, and {"error": {message, type, param, code}}."""

from typing import Any

import grpc

from epikv.errors import RpcError

_STATUS = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.OUT_OF_RANGE: 400,
    grpc.StatusCode.FAILED_PRECONDITION: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.ALREADY_EXISTS: 409,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.CANCELLED: 499,
    grpc.StatusCode.UNIMPLEMENTED: 501,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
}
# The dialect's own words, which clients look for.
_CODES = {"CONTEXT_LENGTH": "context_length_exceeded", "UNAUTHENTICATED": "invalid_api_key"}
# The daemon's fields by the names that clients gave them; the longest that begins a field counts.
_PARAMS = {
    "sampling": "",
    "sampling.constraint": "structured_outputs",
    "sampling.constraint.json_schema": "response_format",
    "stop": "",
    "stop.max_output_tokens": "max_tokens",
    "stop.stop_strings": "stop",
    "stop.min_output_tokens": "min_tokens",
    "output": "",
    "scheduling": "",
    "text": "prompt",
    "token_ids": "prompt",
    "chat": "",
}
_AWAY_SECONDS = 1.0  # after which one that could not be reached is tried again
_LONGEST = 2000  # characters of a message, which may hold what was sent


class ApiError(Exception):
    """What is wrong with a request, by the gateway's own judgement."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message[:_LONGEST]
        self.status = status
        self.param = param
        self.code = code
        self.retry_after = retry_after

    @classmethod
    def from_rpc(cls, error: RpcError) -> "ApiError":
        """What the daemon, or the way to it, has said."""
        status = _STATUS.get(error.code, 500)
        message, retry_after = error.message, error.retry_delay
        if error.reason == "ANSWER_TOO_LARGE":
            status = 400
        elif error.code is grpc.StatusCode.RESOURCE_EXHAUSTED and not error.reason:
            status, message = 413, "the request is larger than the daemon takes"  # gRPC's own words
        elif error.code is grpc.StatusCode.UNAVAILABLE and not error.reason:
            message = "no daemon can be reached"  # where they are is nobody's business
            retry_after = _AWAY_SECONDS
        reason = error.reason or error.code.name
        code = _CODES.get(reason, reason.lower())
        if error.code is grpc.StatusCode.NOT_FOUND and error.resource_type == "model":
            code = "model_not_found"
        violations = [
            f"{_param(each.field)}: {each.description}" for each in error.field_violations
        ]
        told = [each for each in violations if message not in each]
        return cls(
            "; ".join([message, *told]) if told and len(violations) > 1 else message,
            status=status,
            param=_param(error.field_violations[0].field) if error.field_violations else None,
            code=code,
            retry_after=retry_after,
        )

    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status)
        if kind is None:
            kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }

    def headers(self) -> dict[str, str]:
        """Whole seconds, as HTTP has them, and the milliseconds that OpenAI's clients prefer."""
        if self.retry_after is None:
            return {}
        seconds = -(-self.retry_after // 1)
        return {
            "retry-after": f"{max(1, seconds):.0f}",
            "retry-after-ms": f"{1000 * self.retry_after:.0f}",
        }


def _param(field: str) -> str:
    parts = field.split(".")
    for length in range(len(parts), 0, -1):
        name = _PARAMS.get(".".join(parts[:length]))
        if name is not None:
            return ".".join(filter(None, (name, *parts[length:]))) or "messages"
    return field

"""What a failed call says."""

import re
from dataclasses import dataclass
from typing import Any, Self

import grpc
from google.protobuf.message import DecodeError

from epikv.v1 import errors_pb2

DETAILS = "grpc-status-details-bin"  # the trailer with a serialized google.rpc.Status
# INTERNAL of a proxy, where a stream has lost its daemon: in gRPC's words, as of what has begun Envoy can send no status;
# in Ray's.
_CUT = re.compile(
    "RST_STREAM with error code 2"
    "|^The actor [0-9a-f]+ is unavailable"
    "|^The actor (died unexpectedly|experienced an error) before finishing this task"
)


@dataclass(frozen=True)
class FieldViolation:
    field: str  # path in the request: "kv.policy_params.layer_a"
    description: str


class RpcError(Exception):
    """A call that the server, or the way to it, refused or ended.

    `reason` is the server's own word ("KV_BUDGET"), empty where it gave none; `metadata` holds
    limits and given values; `field_violations` all that is wrong with the request; `retry_delay`
    seconds to wait before trying again, where the server gave a hint; `resource_type` what there is
    not, or is already ("model"), where the server says so.

    One whose code has a subclass is of that subclass: InvalidRequest, QueueFull, NotFound,
    DeadlineExceeded, Unavailable.
    """

    def __new__(cls, code: grpc.StatusCode, message: str, *, reason: str = "", **_: Any) -> Self:
        kind: Any = _kind(code, reason) if cls is RpcError else cls
        return super().__new__(kind)

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        *,
        reason: str = "",
        metadata: dict[str, str] | None = None,
        field_violations: tuple[FieldViolation, ...] = (),
        retry_delay: float | None = None,
        resource_type: str = "",
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.reason = reason
        self.metadata = metadata or {}
        self.field_violations = field_violations
        self.retry_delay = retry_delay
        self.resource_type = resource_type

    def __str__(self) -> str:
        name = self.code.name
        if self.reason not in ("", name):
            name += f" ({self.reason})"
        violations = [f"{v.field}: {v.description}" for v in self.field_violations]
        told = [v for v in violations if v != self.message]  # of one fault the message is all
        return "\n  ".join([f"{name}: {self.message}", *told])

    @property
    def advice(self) -> str:
        """What the user of a command can do, where the message does not say it."""
        if self.code is grpc.StatusCode.UNAVAILABLE and not self.reason:
            return "Start a daemon (epikvd), or name one with --server; TLS needs $EPIKV_TLS_CA."
        if self.code is grpc.StatusCode.UNIMPLEMENTED and not self.reason:
            return (
                "This port does not serve that call. `epikv admin` asks a daemon's admin_listen"
                " (--server, $EPIKV_ADMIN_SERVER), every other command its listen ($EPIKV_SERVER)."
            )
        if any(
            "needs max_tokens or keep_ratio" in each.description for each in self.field_violations
        ):
            return "Give --budget: a number of tokens (256), or a share of prompt and answer (50%)."
        if self.code is grpc.StatusCode.UNAUTHENTICATED:
            return "Set $EPIKV_TOKEN to a token that `epikv token` made for this daemon."
        return ""

    @classmethod
    def from_grpc(cls, error: grpc.RpcError) -> "RpcError":
        """Decodes a call's status and its typed details; details it cannot read are left out."""
        details = _details(error)
        code, message = error.code(), error.details() or ""
        if code is grpc.StatusCode.INTERNAL and not details and _CUT.search(message):
            code = grpc.StatusCode.UNAVAILABLE
        info = details.get("ErrorInfo", errors_pb2.ErrorInfo())
        request = details.get("BadRequest", errors_pb2.BadRequest())
        retry = details.get("RetryInfo")
        return cls(
            code,
            message,
            reason=info.reason,
            metadata=dict(info.metadata),
            field_violations=tuple(
                FieldViolation(v.field, v.description) for v in request.field_violations
            ),
            resource_type=details.get("ResourceInfo", errors_pb2.ResourceInfo()).resource_type,
            retry_delay=retry and retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9,
        )


class InvalidRequest(RpcError):
    """INVALID_ARGUMENT: `field_violations` name the fields at fault."""


class QueueFull(RpcError):
    """RESOURCE_EXHAUSTED (QUEUE_FULL): too many wait. `retry_delay` says when there may be room."""


class NotFound(RpcError):
    """NOT_FOUND: no model, policy, experiment or request has this name."""


class DeadlineExceeded(RpcError):
    """DEADLINE_EXCEEDED: `timeout` has passed, or the server says that it would."""


class Unavailable(RpcError):
    """UNAVAILABLE: no server answers, or it starts or drains."""


_QUEUE_FULL = (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
_KINDS = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
}


def _kind(code: grpc.StatusCode, reason: str) -> type[RpcError]:
    return QueueFull if (code, reason) == _QUEUE_FULL else _KINDS.get(code, RpcError)


_CODES = {code.value[0]: code for code in grpc.StatusCode}


def status_code(number: int) -> grpc.StatusCode:
    """As it stands in a message; UNKNOWN for a number that gRPC does not know."""
    return _CODES.get(number, grpc.StatusCode.UNKNOWN)


_KNOWN = ("BadRequest", "ErrorInfo", "ResourceInfo", "RetryInfo")


def _details(error: grpc.RpcError) -> dict[str, Any]:
    """The known details, messages of errors_pb2, by their name; the last of each kind."""
    found: dict[str, Any] = {}
    for key, value in error.trailing_metadata() or ():
        if key != DETAILS:
            continue
        try:
            for detail in errors_pb2.Status.FromString(value).details:
                _, _, name = detail.type_url.rpartition(
                    "."
                )  # of type.googleapis.com/google.rpc.NAME
                if name in _KNOWN:
                    found[name] = getattr(errors_pb2, name).FromString(detail.value)
        except DecodeError:
            continue
    return found

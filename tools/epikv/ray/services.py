"""The daemon's services as Ray's gRPC proxies serve them: each call goes to a replica, and from there to its daemon.

Ray Serve 2.60 gives a replica the request, its metadata and no deadline. It ends the call in the replica when the
client is gone, or its deadline has passed.
"""

from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2

from epikv.prefix import HEADER
from epikv.v1 import (
    experiment_pb2,
    generation_pb2,
    model_pb2,
    packet_pb2,
    policy_pb2,
    tokenization_pb2,
)

_FILES = (
    generation_pb2,
    model_pb2,
    tokenization_pb2,
    policy_pb2,
    packet_pb2,
    experiment_pb2,
    health_pb2,
)
# For `grpc_servicer_functions` of Ray Serve.
SERVICER_FUNCTIONS = [
    f"{file.__name__}_grpc.add_{service}Servicer_to_server"
    for file in _FILES
    for service in file.DESCRIPTOR.services_by_name
]
_PASSED_ON = ("authorization", "traceparent", HEADER)
_OK, _NOT_FOUND = grpc.StatusCode.OK, grpc.StatusCode.NOT_FOUND

Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Method:
    name: str
    path: str
    request: type[Message]
    streams: bool


def methods() -> Iterator[Method]:
    for file in _FILES:
        for service in file.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                yield Method(
                    method.name,
                    f"/{service.full_name}/{method.name}",
                    GetMessageClass(method.input_type),
                    method.server_streaming,
                )


@dataclass(frozen=True)
class Answer:
    """How a call has ended."""

    code: grpc.StatusCode
    details: str
    trailers: tuple[tuple[str, str | bytes], ...]
    reply: bytes = b""  # of a call that has one

    @classmethod
    def of_error(cls, error: grpc.aio.AioRpcError) -> "Answer":
        return cls(error.code(), error.details() or "", _pairs(error.trailing_metadata()))

    def tell(self, context: Any) -> None:
        """So that the proxy tells the client."""
        if self.code is not _OK:
            context.set_code(self.code)
            context.set_details(self.details)
        context.set_trailing_metadata(list(self.trailers))


class Calls:
    """To the daemon of one replica; in the event loop that it is made in."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stubs: dict[str, Callable[..., Any]] = {}
        for method in methods():
            of_kind = channel.unary_stream if method.streams else channel.unary_unary
            serialize = method.request.SerializeToString
            self._stubs[method.path] = of_kind(method.path, request_serializer=serialize)

    def start(self, path: str, request: Message, metadata: Metadata) -> Any:
        """The running call, whose replies are bytes."""
        return self._stubs[path](request, metadata=metadata)

    async def ask(self, path: str, request: Message, metadata: Metadata) -> Answer:
        running = self.start(path, request, metadata)
        try:
            reply = await running
            return Answer(_OK, "", _pairs(await running.trailing_metadata()), reply)
        except grpc.aio.AioRpcError as error:
            return Answer.of_error(error)
        finally:
            running.cancel()


class _Bytes:
    """A message that is serialized already, as Ray wants one."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def SerializeToString(self) -> bytes:
        return self._data


class _End:
    """The end of a stream. Ray takes trailers and typed details from a message alone, not from an error, and sends each
    message to the client; but not what is its own word for a status."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    def SerializeToString(self) -> Any:
        from ray.serve._private.proxy_request_response import ResponseStatus

        code = self._answer.code
        return ResponseStatus(code, is_error=code is not _OK, message=self._answer.details)


def passed_on(context: Any) -> Metadata:
    """Of a client's metadata what the daemon reads."""
    return tuple(each for each in context.invocation_metadata() if each[0] in _PASSED_ON)


def _pairs(metadata: Any) -> tuple[tuple[str, str | bytes], ...]:
    return tuple((key, value) for key, value in metadata or ())


def _unary(method: Method) -> Callable[..., Any]:
    async def call(self: Any, request: Message, grpc_context: Any) -> _Bytes:
        answer = await self.calls.ask(method.path, request, passed_on(grpc_context))
        answer.tell(grpc_context)
        return _Bytes(answer.reply)

    return call


def _stream(method: Method) -> Callable[..., Any]:
    async def call(self: Any, request: Message, grpc_context: Any) -> AsyncIterator[Any]:
        running = self.calls.start(method.path, request, passed_on(grpc_context))
        try:
            async for reply in running:
                yield _Bytes(reply)
            answer = Answer(_OK, "", _pairs(await running.trailing_metadata()))
        except grpc.aio.AioRpcError as error:
            answer = Answer.of_error(error)
        finally:
            running.cancel()
        answer.tell(grpc_context)
        yield _End(answer)

    return call


def _on_all(method: Method) -> Callable[..., Any]:
    """Of a call that is about one replica, of which nobody knows which."""

    async def call(self: Any, request: Message, grpc_context: Any) -> _Bytes:
        answers = await self.on_all(method.path, request, passed_on(grpc_context))
        answer = min(answers, key=lambda each: (each.code is not _OK, each.code is _NOT_FOUND))
        answer.tell(grpc_context)
        return _Bytes(answer.reply)

    return call


def served(replica: type) -> type:
    """With a method for each of the services'. It has `calls`, of Calls, and `on_all`, which is `calls.ask` of every
    replica."""
    for method in methods():
        make = _stream if method.streams else _unary
        make = _on_all if method.name == "CancelRequest" else make
        made = make(method)
        made.__name__ = method.name
        setattr(replica, method.name, made)
    return replica

"""The daemons behind a gateway, and which of them answers."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from epikv.calls import Connection
from epikv.connection import CLIENT_OPTIONS, Tls, connect_async
from epikv.errors import RpcError
from epikv.messages import Model, from_proto
from epikv.prefix import prefix_metadata
from epikv.v1 import generation_pb2, model_pb2

Reply = TypeVar("Reply")

LOOKUP_SECONDS = 2.0  # within which a daemon says what it serves, or is away
AWAY_SECONDS = 1.0  # that a daemon is not asked which could not be reached, while others can
MODEL_SECONDS = 30.0  # that what a daemon said of its models is taken for true
_HEALTH_SECONDS = 2.0
_UNREACHED = "failed to connect"  # gRPC's words where no connection could be made
# The daemon takes nothing of the sort, now: another may.
_ELSEWHERE = {"DRAINING", "QUEUE_FULL", "STARTING"}
# What a connection is asked that nothing comes from, and how long it may take to answer.
_KEEPALIVE = [("grpc.keepalive_time_ms", 20_000), ("grpc.keepalive_timeout_ms", 10_000)]


@dataclass(frozen=True)
class Caller:
    """What of a client's request goes on to the daemon."""

    metadata: tuple[tuple[str, str], ...] = ()  # its token and trace
    deadline: float | None = None  # of time.monotonic()
    prefix_key: str = ""  # its own word for what begins alike

    @property
    def timeout(self) -> float | None:
        """Seconds that are left, of all that is asked in its name."""
        return None if self.deadline is None else max(0.001, self.deadline - time.monotonic())

    def metadata_of(self, request: Message) -> tuple[tuple[str, str], ...]:
        """Of a call with this request."""
        return (*self.metadata, *prefix_metadata(request, self.prefix_key))


class _Stubs(Connection):
    """The daemon's services; each call brings a client's own metadata."""

    async def ask(self, *_: Any) -> Any:
        raise NotImplementedError

    async def ask_for_parts(self, *_: Any) -> list[Any]:
        raise NotImplementedError

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


@dataclass
class Daemon:
    address: str
    channel: grpc.aio.Channel
    stubs: _Stubs
    in_flight: int = 0
    away_until: float = 0.0


class Generation:
    """A completion that has begun: iterate over its messages; `close` ends what is left of it."""

    def __init__(self, daemon: Daemon, call: Any, first: generation_pb2.GenerateResponse) -> None:
        self.accepted = first.accepted
        self._daemon = daemon
        self._call = call
        self._open = True
        daemon.in_flight += 1

    def __aiter__(self) -> "Generation":
        return self

    async def __anext__(self) -> generation_pb2.GenerateResponse:
        try:
            message: Any = await self._call.read()
        except grpc.RpcError as error:
            raise RpcError.from_grpc(error) from None
        if message is grpc.aio.EOF:
            raise StopAsyncIteration
        return message

    def close(self) -> None:
        self._call.cancel()
        if self._open:
            self._daemon.in_flight -= 1
        self._open = False


class Upstream:
    """Of those that can be reached, the one with the fewest of this gateway's requests is asked.

    The next one is asked where one cannot be reached, takes nothing now (it drains, its queue is full),
    or does not have the model: it has begun nothing. What may have begun is not asked for again.
    """

    def __init__(self, addresses: Sequence[str], tls: Tls | None = None) -> None:
        options = [*CLIENT_OPTIONS, ("grpc.max_send_message_length", -1), *_KEEPALIVE]
        self.daemons = []
        for address in addresses:
            channel = connect_async(address, options, tls=tls)
            self.daemons.append(Daemon(address, channel, _Stubs(address, channel, "")))
        self._turn = 0
        self._models: dict[str, Model] = {}
        self._all_asked = True  # when models were last asked for
        self._models_until = 0.0

    async def close(self) -> None:
        await asyncio.gather(*(daemon.channel.close() for daemon in self.daemons))

    async def generate(self, request: generation_pb2.GenerateRequest, caller: Caller) -> Generation:
        """Once the daemon has taken it. Raises RpcError."""

        async def begin(daemon: Daemon) -> Generation:
            call = daemon.stubs.generation.Generate(
                request, timeout=caller.timeout, metadata=caller.metadata_of(request)
            )
            try:
                first = await call.read()
            except BaseException:
                call.cancel()
                raise
            return Generation(daemon, call, first)

        return await self._ask(begin)

    async def ask(
        self,
        method: Callable[[Connection], Callable[..., Awaitable[Reply]]],
        request: Message,
        caller: Caller,
    ) -> Reply:
        """The reply to a call that has one message. method: of the services. Raises RpcError."""

        async def once(daemon: Daemon) -> Reply:
            daemon.in_flight += 1
            try:
                return await method(daemon.stubs)(
                    request, timeout=caller.timeout, metadata=caller.metadata_of(request)
                )
            finally:
                daemon.in_flight -= 1

        return await self._ask(once)

    async def tokenizer(self, request: model_pb2.GetTokenizerRequest, caller: Caller) -> bytes:
        """A model's tokenizer.json. Raises RpcError."""

        async def read(daemon: Daemon) -> bytes:
            call = daemon.stubs.models.GetTokenizer(
                request, timeout=_lookup(caller), metadata=caller.metadata
            )
            return b"".join([part.json async for part in call])

        return await self._ask(read)

    async def models(self, caller: Caller) -> list[Model]:
        """Of all daemons that can be reached, by name. Raises RpcError if none can."""
        found = await asyncio.gather(
            *(self._models_of(daemon, caller) for daemon in self.daemons), return_exceptions=True
        )
        models: dict[str, Model] = {}
        wrong = [each for each in found if isinstance(each, BaseException)]
        for of_daemon in found:
            if not isinstance(of_daemon, BaseException):
                models = {model.name: model for model in of_daemon} | models
        if len(wrong) == len(found):
            raise wrong[0]
        if wrong:  # what those have said before may still be so
            models = self._models | models
        self._all_asked = not any(_is_away(error) for error in wrong)
        self._models, self._models_until = models, time.monotonic() + MODEL_SECONDS
        return [models[name] for name in sorted(models)]

    async def model(self, name: str, caller: Caller) -> Model:
        """As the daemons told of it some seconds ago; no name: the only one. Raises RpcError."""
        known = name in self._models or (not name and self._models)
        if time.monotonic() > self._models_until or not known:
            await self.models(caller)
        if not name and len(self._models) == 1:
            return next(iter(self._models.values()))
        if name not in self._models:
            missing = RpcError(
                grpc.StatusCode.NOT_FOUND,
                f"model '{name}' is not served here; known: {', '.join(self._models) or 'none'}",
                reason="NOT_FOUND",
                resource_type="model",
            )
            raise missing if self._all_asked else _perhaps(missing)
        return self._models[name]

    async def healthy(self) -> list[bool]:
        """Of each daemon, whether it serves."""

        async def check(daemon: Daemon) -> bool:
            try:
                reply = await daemon.stubs.health.Check(
                    health_pb2.HealthCheckRequest(), timeout=_HEALTH_SECONDS
                )
            except grpc.RpcError:
                return False
            return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)

        return await asyncio.gather(*map(check, self.daemons))

    async def _models_of(self, daemon: Daemon, caller: Caller) -> list[Model]:
        if daemon.away_until > time.monotonic() and len(self.daemons) > 1:
            raise RpcError(grpc.StatusCode.UNAVAILABLE, "away")
        try:
            reply = await daemon.stubs.models.ListModels(
                model_pb2.ListModelsRequest(), timeout=_lookup(caller), metadata=caller.metadata
            )
        except grpc.RpcError as error:
            told = RpcError.from_grpc(error)
            if told.code is grpc.StatusCode.DEADLINE_EXCEEDED and not told.reason:
                daemon.away_until = time.monotonic() + AWAY_SECONDS
                told = RpcError(grpc.StatusCode.UNAVAILABLE, "it says nothing")
            raise told from None
        return [from_proto(model) for model in reply.models]

    async def _ask(self, once: Callable[[Daemon], Awaitable[Reply]]) -> Reply:
        told: RpcError | None = None
        missing: RpcError | None = None
        for daemon in self._in_order():
            try:
                return await once(daemon)
            except grpc.RpcError as error:
                last = RpcError.from_grpc(error)
            except RpcError as error:
                last = error
            if last.code is grpc.StatusCode.UNAVAILABLE:
                daemon.away_until = time.monotonic() + AWAY_SECONDS
            elsewhere = last.reason in _ELSEWHERE or _UNREACHED in last.message
            if last.code is grpc.StatusCode.NOT_FOUND:
                missing = missing or last
            elif elsewhere:
                told = told or last
            else:
                raise last
        if missing and told and _is_away(told):
            raise _perhaps(missing)
        failed = told or missing
        assert failed is not None
        raise failed

    def _in_order(self) -> list[Daemon]:
        """Those that are away come last."""
        self._turn += 1
        first = self._turn % len(self.daemons)
        turned = self.daemons[first:] + self.daemons[:first]
        now = time.monotonic()
        return sorted(turned, key=lambda daemon: (daemon.away_until > now, daemon.in_flight))


def _is_away(error: BaseException) -> bool:
    """Whether who says so was not asked."""
    return (
        isinstance(error, RpcError)
        and error.code is grpc.StatusCode.UNAVAILABLE
        and not error.reason
    )


def _perhaps(missing: RpcError) -> RpcError:
    """What some do not have, one that could not be asked may have."""
    return RpcError(
        grpc.StatusCode.UNAVAILABLE,
        f"{missing.message}; a daemon that could not be asked may have it",
        reason="UNAVAILABLE",
        retry_delay=AWAY_SECONDS,
    )


def _lookup(caller: Caller) -> float:
    """Seconds for what a daemon answers at once."""
    left = caller.timeout
    return LOOKUP_SECONDS if left is None else min(LOOKUP_SECONDS, left)

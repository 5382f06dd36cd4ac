"""A thin, typed client of epikvd."""

import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import grpc
from google.protobuf.message import Message

from epikv import calls
from epikv.connection import CLIENT_OPTIONS, DEFAULT_SERVER, Tls, connect
from epikv.errors import RpcError
from epikv.messages import Event

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class Stream:
    """A running completion: iterate over its events; leaving a `with` block cancels what is left.

    Iterating raises RpcError when the call fails, CANCELLED after `cancel()` included.
    """

    def __init__(self, call: grpc.Call) -> None:
        self._call = call

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        try:
            message = next(self._call)
        except grpc.RpcError as error:
            raise RpcError.from_grpc(error) from None
        return calls.event_of(message)

    def text(self) -> Iterator[str]:
        """The text alone, in pieces as they come. Raises ValueError where `Sampling.n` > 1."""
        for event in self:
            if piece := calls.text_of(event):
                yield piece

    def cancel(self) -> None:
        """Ends the request, from any thread; the server frees its KV cache within one step."""
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()


class _Blocking(calls.Connection):
    """Its coroutines block, and so never wait for an event loop."""

    async def ask(
        self, method: Callable[..., Any], request: Message, timeout: float | None = None
    ) -> Any:
        try:
            return self.start(method, request, timeout)
        except grpc.RpcError as error:
            raise RpcError.from_grpc(error) from None

    async def ask_for_parts(self, method: Callable[..., Any], request: Message) -> list[Any]:
        try:
            return list(self.start(method, request))
        except grpc.RpcError as error:
            raise RpcError.from_grpc(error) from None

    async def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


def _method(
    call: Callable[Concatenate[calls.Connection, Parameters], Coroutine[Any, Any, Result]],
) -> Callable[Concatenate["Client", Parameters], Result]:
    """`call` as a method that returns its result."""

    def method(client: "Client", /, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        try:
            call(client._connection, *args, **kwargs).send(None)
        except StopIteration as ended:
            result: Result = ended.value
            return result
        raise AssertionError("a call that blocks has ended")

    calls.as_method(call, method)
    return method


def _starting(
    call: Callable[Concatenate[calls.Connection, Parameters], Any],
) -> Callable[Concatenate["Client", Parameters], Stream]:
    """`call` as a method that returns its Stream."""

    def method(client: "Client", /, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Stream:
        return Stream(call(client._connection, *args, **kwargs))

    calls.as_method(call, method, Stream)
    return method


class Client:
    """One connection to a server, for any number of threads. Every call raises RpcError.

    `timeout`, where a method has it, is the call's deadline in seconds; `model` may be left empty
    where one model is served. A call after `close()` raises ValueError. AsyncClient has the same
    methods for asyncio. help(Client.generate) says what a method takes and returns; all are
    written in epikv/calls.py.
    """

    def __init__(
        self,
        server: str = DEFAULT_SERVER,
        options: Sequence[tuple[str, Any]] = (),
        *,
        token: str | None = None,
        tls: Tls | None = None,
    ) -> None:
        """`options` are gRPC channel arguments, over this client's own.

        `token` is shown to the server with every call; default: $EPIKV_TOKEN. Without `tls`, and
        where Tls.from_environment finds nothing, all goes in plain text.
        """
        tls = tls or Tls.from_environment()
        self._channel = connect(server, [*CLIENT_OPTIONS, *options], tls=tls)
        self._connection = _Blocking(server, self._channel, token)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancels what is running and closes the connection."""
        self._connection.is_closed = True
        self._channel.close()

    wait_ready = _method(calls.wait_ready)
    generate = _starting(calls.generate)
    generate_once = _method(calls.generate_once)
    score = _method(calls.score)
    create_packet = _method(calls.create_packet)
    packets = _method(calls.packets)
    delete_packet = _method(calls.delete_packet)
    cancel = _method(calls.cancel)
    tokenize = _method(calls.tokenize)
    detokenize = _method(calls.detokenize)
    apply_chat_template = _method(calls.apply_chat_template)
    models = _method(calls.models)
    model = _method(calls.model)
    tokenizer_json = _method(calls.tokenizer_json)
    tokenizer = _method(calls.tokenizer)
    policies = _method(calls.policies)
    policy = _method(calls.policy)
    experiments = _method(calls.experiments)
    experiment = _method(calls.experiment)
    create_experiment = _method(calls.create_experiment)
    update_experiment = _method(calls.update_experiment)
    start_experiment = _method(calls.start_experiment)
    stop_experiment = _method(calls.stop_experiment)
    experiment_report = _method(calls.experiment_report)
    plan_experiment = _method(calls.plan_experiment)
    record_outcome = _method(calls.record_outcome)
    record_outcomes = _method(calls.record_outcomes)


def patiently(call: Callable[[], Result], *, attempts: int = 4, most_seconds: float = 60) -> Result:
    """What `call` returns. While the server refuses it and says when to come back, that is waited for.

    For calls that do their work at once: `patiently(lambda: client.generate_once("..."))`. The last
    refusal is raised, and so is one whose delay is over `most_seconds`.
    """
    while True:
        try:
            return call()
        except RpcError as error:
            attempts -= 1
            delay = error.retry_delay
            if attempts <= 0 or delay is None or delay > most_seconds:
                raise
        time.sleep(delay)

"""The client of epikvd for asyncio."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from epikv import calls
from epikv.connection import CLIENT_OPTIONS, DEFAULT_SERVER, Tls, connect_async
from epikv.errors import RpcError
from epikv.messages import Event

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class AsyncStream:
    """A running completion: iterate over its events; leaving an `async with` block cancels what is
    left.

    Iterating raises RpcError when the call fails, CANCELLED after `cancel()` included. Cancelling
    the task that iterates ends the request as well.
    """

    def __init__(self, call: Any) -> None:
        self._call = call
        self._messages = aiter(call)

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        try:
            message = await anext(self._messages)
        except (grpc.RpcError, asyncio.CancelledError) as error:
            self.cancel()  # gRPC may forget to where the task is cancelled as the call begins
            raise _failure(error) from None
        return calls.event_of(message)

    async def text(self) -> AsyncIterator[str]:
        """The text alone, in pieces as they come. Raises ValueError where `Sampling.n` > 1."""
        async for event in self:
            if piece := calls.text_of(event):
                yield piece

    def cancel(self) -> None:
        """Ends the request; the server frees its KV cache within one step."""
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()


def _failure(error: grpc.RpcError | asyncio.CancelledError) -> BaseException:
    """What a call has failed with. gRPC says of a call that was cancelled here what asyncio says of
    a task that is cancelled."""
    if isinstance(error, grpc.RpcError):
        return RpcError.from_grpc(error)
    task = asyncio.current_task()
    if task is None or task.cancelling() > 0:
        return error
    return RpcError(grpc.StatusCode.CANCELLED, "cancelled by this client")


class _Awaiting(calls.Connection):
    async def ask(
        self, method: Callable[..., Any], request: Message, timeout: float | None = None
    ) -> Any:
        try:
            return await self.start(method, request, timeout)
        except (grpc.RpcError, asyncio.CancelledError) as error:
            raise _failure(error) from None

    async def ask_for_parts(self, method: Callable[..., Any], request: Message) -> list[Any]:
        try:
            return [part async for part in self.start(method, request)]
        except (grpc.RpcError, asyncio.CancelledError) as error:
            raise _failure(error) from None

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def _method(
    call: Callable[Concatenate[calls.Connection, Parameters], Coroutine[Any, Any, Result]],
) -> Callable[Concatenate["AsyncClient", Parameters], Coroutine[Any, Any, Result]]:
    """`call` as a method to be awaited."""

    async def method(
        client: "AsyncClient", /, *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> Result:
        return await call(client._connection, *args, **kwargs)

    calls.as_method(call, method)
    return method


def _starting(
    call: Callable[Concatenate[calls.Connection, Parameters], Any],
) -> Callable[Concatenate["AsyncClient", Parameters], AsyncStream]:
    """`call` as a method that returns its AsyncStream."""

    def method(
        client: "AsyncClient", /, *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> AsyncStream:
        return AsyncStream(call(client._connection, *args, **kwargs))

    calls.as_method(call, method, AsyncStream)
    return method


class AsyncClient:
    """One connection to a server, for any number of tasks of one event loop.

    Methods, arguments, results and errors are those of Client. `generate` starts a completion and
    returns an AsyncStream; all other calls are awaited. Cancelling the task that awaits a call ends
    the call.
    """

    def __init__(
        self,
        server: str = DEFAULT_SERVER,
        options: Sequence[tuple[str, Any]] = (),
        *,
        token: str | None = None,
        tls: Tls | None = None,
    ) -> None:
        """Arguments are those of Client. Raises RuntimeError where no event loop runs."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            raise RuntimeError(
                "no event loop runs: make the AsyncClient in a coroutine of asyncio.run"
            ) from None
        tls = tls or Tls.from_environment()
        self._channel = connect_async(server, [*CLIENT_OPTIONS, *options], tls=tls)
        self._connection = _Awaiting(server, self._channel, token)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancels what is running and closes the connection."""
        self._connection.is_closed = True
        await self._channel.close()

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

"""Streams of AsyncClient, against a stand-in daemon."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import fake_epikvd
import grpc
import pytest
from async_calls import ENDLESS, GENEROUS_SECONDS, connected
from epikv import (
    Accepted,
    AsyncClient,
    Client,
    Delta,
    Output,
    RpcError,
    Sampling,
    Summary,
    calls,
)
from epikv.v1 import generation_pb2, generation_pb2_grpc

STREAMS = 50


@pytest.fixture
def fake() -> Iterator[fake_epikvd.Fake]:
    with fake_epikvd.serve() as running:
        yield running


def test_a_stream_gives_events_as_they_come(fake: fake_epikvd.Fake) -> None:
    async def work(client: AsyncClient) -> None:
        async with client.generate("endless") as stream:
            assert isinstance(await anext(stream), Accepted)
            assert not fake.ended.is_set()
        assert await asyncio.to_thread(fake.ended.wait, 5), "leaving the block cancels"

    connected(fake.address, work)


def test_the_text_of_a_stream(fake: fake_epikvd.Fake) -> None:
    output = Output(kv_trace=True, progress=True)
    with Client(fake.address) as client:
        assert list(client.generate("one two", output=output).text()) == ["one ", "two "]

    async def work(client: AsyncClient) -> list[str]:
        return [piece async for piece in client.generate("one two", output=output).text()]

    assert connected(fake.address, work) == ["one ", "two "]


def test_several_completions_have_no_one_text(fake: fake_epikvd.Fake) -> None:
    several = Sampling(n=2, temperature=1)
    with Client(fake.address) as client:
        assert list(client.generate("one", sampling=Sampling(n=1)).text()) == ["one "]
        with pytest.raises(ValueError, match="text\\(\\) is of one completion"):
            list(client.generate("one", sampling=several).text())

    async def work(client: AsyncClient) -> None:
        with pytest.raises(ValueError, match="text\\(\\) is of one completion"):
            async for _ in client.generate("one", sampling=several).text():
                pass

    connected(fake.address, work)
    later = Delta(1, "text", [], [], [], [])  # where the first events were read before
    with pytest.raises(ValueError, match="each Delta names its own"):
        calls.text_of(later)


def test_a_cancelled_stream_says_so(fake: fake_epikvd.Fake) -> None:
    async def work(client: AsyncClient) -> None:
        stream = client.generate("endless")
        assert isinstance(await anext(stream), Accepted)
        stream.cancel()
        with pytest.raises(RpcError) as caught:
            await anext(stream)
        assert caught.value.code is grpc.StatusCode.CANCELLED

    connected(fake.address, work)
    assert fake.ended.wait(5)


def test_a_stream_is_cancelled_while_another_task_reads_it(fake: fake_epikvd.Fake) -> None:
    async def work(client: AsyncClient) -> None:
        stream = client.generate("endless")
        await anext(stream)
        reader = asyncio.create_task(anext(stream))
        await asyncio.sleep(0.05)
        assert not reader.done()
        stream.cancel()
        with pytest.raises(RpcError, match="CANCELLED: cancelled by this client"):
            await reader

    connected(fake.address, work)


@ENDLESS
def test_a_cancelled_task_is_cancelled(
    fake: fake_epikvd.Fake, endless: Callable[[AsyncClient], Awaitable[None]]
) -> None:
    """As asyncio has it, and the request ends."""

    async def work(client: AsyncClient) -> None:
        task = asyncio.ensure_future(endless(client))
        while not fake.requests:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert task.cancelled()
        assert await asyncio.to_thread(fake.ended.wait, 5)

    connected(fake.address, work)


def test_a_task_cancelled_as_its_call_begins_ends_the_request(fake: fake_epikvd.Fake) -> None:
    """gRPC forgets to cancel a call whose task is cancelled in the turn in which it had begun."""

    async def work(client: AsyncClient) -> None:
        stream = client.generate("endless")
        task = asyncio.ensure_future(anext(stream))
        stream._call._preparation.add_done_callback(lambda _: task.cancel())
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(fake.ended.wait, 5)

    connected(fake.address, work)


@ENDLESS
def test_a_timeout_of_asyncio_ends_a_call(
    fake: fake_epikvd.Fake, endless: Callable[[AsyncClient], Awaitable[None]]
) -> None:
    async def work(client: AsyncClient) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await endless(client)
        assert await asyncio.to_thread(fake.ended.wait, 5)

    connected(fake.address, work)


class _Crowd(generation_pb2_grpc.GenerationServiceServicer):
    """Goes on with a stream once STREAMS of them are there."""

    def __init__(self) -> None:
        self._all = threading.Barrier(STREAMS)

    def Generate(self, request, context):
        yield generation_pb2.GenerateResponse(accepted=fake_epikvd.accepted(request))
        self._all.wait(GENEROUS_SECONDS)
        for number in range(5):
            delta = generation_pb2.Delta(text=f"{request.text}.{number} ")
            yield generation_pb2.GenerateResponse(delta=delta)
        yield generation_pb2.GenerateResponse(summary=fake_epikvd.summary())


def test_many_streams_at_once() -> None:
    async def one(client: AsyncClient, number: int) -> list[Any]:
        return [event async for event in client.generate(f"p{number}", request_id=f"r{number}")]

    async def work(client: AsyncClient) -> list[list[Any]]:
        return await asyncio.gather(*(one(client, number) for number in range(STREAMS)))

    with fake_epikvd.serve(generation=_Crowd(), threads=STREAMS) as fake:
        streams = connected(fake.address, work)
    for number, (first, *deltas, last) in enumerate(streams):
        assert isinstance(first, Accepted) and first.request_id == f"r{number}"
        assert [delta.text for delta in deltas] == [f"p{number}.{i} " for i in range(5)]
        assert isinstance(last, Summary)

"""AsyncClient with the real daemon, beside Client."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import grpc
import pytest
from epikv import (
    Accepted,
    AsyncClient,
    AsyncStream,
    Delta,
    Event,
    InvalidRequest,
    Kv,
    NotFound,
    Output,
    RpcError,
    Stop,
)
from epikv.sample import problem
from epikv.scrape import scrape
from epikv.testing import Daemon

STREAMS = 20
GENEROUS_SECONDS = 120
KV = Kv("sliding", 120)
STOP = Stop(max_output_tokens=60)
OUTPUT = Output(token_ids=True, logprobs=True)
LONG = Stop(max_output_tokens=900, ignore_eos=True)
REQUEST = "the one"


@pytest.fixture(scope="module")
def repeatable(sample_model: Path) -> Iterator[Daemon]:
    """Answers do not depend on who else asks."""
    with Daemon(sample_model, "--threads=1", "--deterministic=true") as running:
        yield running


def said(events: list[Event]) -> list[object]:
    """What does not change from one run to the next."""
    first, *deltas, last = events
    tokens = [token for delta in deltas for token in delta.token_ids]
    logprobs = [logprob for delta in deltas for logprob in delta.logprobs]
    text = "".join(delta.text for delta in deltas)
    return [first.kv, text, tokens, logprobs, last.finish_reason, last.kv]


def test_answers_are_those_of_client(repeatable: Daemon) -> None:
    prompt, given = problem(3).prompt, {"kv": KV, "stop": STOP, "output": OUTPUT}
    with repeatable.client() as client:
        client.wait_ready(GENEROUS_SECONDS)
        streamed = said(list(client.generate(prompt, **given)))
        whole = client.generate_once(prompt, **given)
        scored = client.score(prompt, whole.token_ids, kv=KV)
        listed = [client.models(), client.policies(), client.tokenize(prompt)]
        json = client.tokenizer_json()

    async def work() -> None:
        async with AsyncClient(repeatable.grpc) as client:
            await client.wait_ready(GENEROUS_SECONDS)
            assert said([event async for event in client.generate(prompt, **given)]) == streamed
            other = await client.generate_once(prompt, **given)
            assert (other.text, other.token_ids) == (whole.text, whole.token_ids)
            assert other.logprobs == whole.logprobs and other.summary.kv == whole.summary.kv
            again = await client.score(prompt, whole.token_ids, kv=KV)
            assert again.logprobs == scored.logprobs == whole.logprobs
            models, policies = await client.models(), await client.policies()
            assert [models, policies, await client.tokenize(prompt)] == listed
            assert await client.tokenizer_json() == json
            pieces = [piece async for piece in client.generate(prompt, **given).text()]
            assert "".join(pieces) == whole.text and len(pieces) > 1

    asyncio.run(work())
    assert streamed[1] == whole.text and whole.summary.kv.evicted_tokens > 0


def test_many_streams_at_once(repeatable: Daemon) -> None:
    """Each says what it says alone."""
    prompts = [problem(number).prompt for number in range(STREAMS)]
    with repeatable.client() as client:
        alone = [client.generate_once(prompt, kv=KV, stop=STOP).text for prompt in prompts]
    begun: set[int] = set()
    all_begun = asyncio.Event()

    async def one(client: AsyncClient, number: int) -> str:
        text = ""
        async for event in client.generate(prompts[number], kv=KV, stop=STOP):
            if isinstance(event, Accepted):
                begun.add(number)
                if len(begun) == STREAMS:
                    all_begun.set()
                await all_begun.wait()  # so that none has been read before all are there
            elif isinstance(event, Delta):
                text += event.text
        return text

    async def work() -> list[str]:
        async with AsyncClient(repeatable.grpc) as client, asyncio.timeout(GENEROUS_SECONDS):
            return await asyncio.gather(*(one(client, number) for number in range(STREAMS)))

    assert asyncio.run(work()) == alone
    assert len(set(alone)) > 1


async def leave_block(client: AsyncClient, stream: AsyncStream) -> None:
    async with stream:
        pass


async def cancel_stream(client: AsyncClient, stream: AsyncStream) -> None:
    stream.cancel()
    await expect_cancelled(stream)


async def cancel_by_id(client: AsyncClient, stream: AsyncStream) -> None:
    await client.cancel(REQUEST)
    await expect_cancelled(stream)


async def cancel_task(client: AsyncClient, stream: AsyncStream) -> None:
    reader = asyncio.create_task(read(stream))
    await asyncio.sleep(0)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader


async def close_client(client: AsyncClient, stream: AsyncStream) -> None:
    await client.close()
    await expect_cancelled(stream)


async def read(stream: AsyncStream) -> None:
    async for _ in stream:
        pass


async def expect_cancelled(stream: AsyncStream) -> None:
    """Once what came before the end is read."""
    with pytest.raises(RpcError) as caught:
        await read(stream)
    assert caught.value.code is grpc.StatusCode.CANCELLED


@pytest.mark.parametrize(
    "leave", [leave_block, cancel_stream, cancel_by_id, cancel_task, close_client]
)
def test_a_cancelled_stream_ends(
    repeatable: Daemon, leave: Callable[[AsyncClient, AsyncStream], Awaitable[None]]
) -> None:
    """And the daemon says that it was cancelled."""

    def cancelled() -> float:
        page = scrape(repeatable.metrics)
        return page.total("epikv_requests_finished_total", reason="cancelled")

    before = cancelled()

    async def work() -> None:
        async with AsyncClient(repeatable.grpc) as client, asyncio.timeout(GENEROUS_SECONDS):
            stream = client.generate(problem(3).prompt, stop=LONG, request_id=REQUEST)
            assert isinstance(await anext(stream), Accepted)
            await leave(client, stream)
            while cancelled() == before:
                await asyncio.sleep(0.05)

    asyncio.run(work())
    assert cancelled() == before + 1


def test_a_refusal_names_its_fields(repeatable: Daemon) -> None:
    async def work() -> None:
        async with AsyncClient(repeatable.grpc) as client:
            with pytest.raises(InvalidRequest) as caught:
                await anext(client.generate("x", kv=Kv("nonesuch")))
            assert [each.field for each in caught.value.field_violations] == ["kv.policy"]
            with pytest.raises(NotFound):
                await client.model("nonesuch")

    asyncio.run(work())

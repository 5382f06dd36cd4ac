"""What `epikv gateway` costs, beside gRPC to the same daemon.

One daemon of one thread and a gateway of one worker. First on an idle machine: the time to the first
token of one short request after another, by gRPC and through the gateway in turns, of a model so small
that the way counts. Then streams at once of the 0.5B shape: tokens a second either way, in turns, and the
processor time of the gateway for each token. Last, many clients at once, some of whom read slowly: each
has to get its whole answer, and the gateway's memory must not grow from one crowd to the next.
"""

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import click
from epikv import harness
from epikv.async_client import AsyncClient
from epikv.messages import Delta
from epikv.options import Output, Stop
from epikv.stats import bootstrap
from epikv.testing import Gateway

from epikv_lab.bench.targets import Target, finish

SMALL = harness.Shape(
    hidden=64, layers=2, heads=4, kv_heads=2, ffn=128, vocab=2048, context=4096, dtype="fp32"
)
LARGE = harness.Shape(
    hidden=896, layers=24, heads=14, kv_heads=2, ffn=4864, vocab=32000, context=4096, dtype="bf16"
)
FLAGS = ("--threads=1", "--kv_pool_bytes=1073741824", "--max_running_requests=1024")
PROMPT = [5 + place % 97 for place in range(32)]
SLOW_EVERY = 10  # of the crowd, one in so many reads slowly
SLOW_SECONDS = 0.05  # between its reads
TOKENS_OF_CROWD = 64

# Yields as often as tokens come, with how many: of one request.
Ask = Callable[[int], AsyncIterator[int]]


@click.command("gateway")
@click.option("--requests", default=300, show_default=True, help="Short ones, either way.")
@click.option("--streams", default=16, show_default=True, help="At once.")
@click.option("--tokens", default=128, show_default=True, help="Of each stream.")
@click.option("--rounds", default=5, show_default=True, help="Of streams, either way.")
@click.option("--clients", default=500, show_default=True, help="Of a crowd.")
@click.option("--crowds", default=4, show_default=True, help="One after another.")
@click.option("--shape", type=click.Choice(["0.5B", "small"]), default="0.5B", show_default=True)
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path))
def command(
    requests: int,
    streams: int,
    tokens: int,
    rounds: int,
    clients: int,
    crowds: int,
    shape: str,
    json_file: Path | None,
) -> None:
    """Time to the first token, throughput and processor time through the gateway, over gRPC's."""
    load = [os.getloadavg()[0]]
    with both(SMALL) as (grpc, gateway):
        first = asyncio.run(_first_tokens(grpc, gateway.address, requests))
        crowd = asyncio.run(_crowds(gateway, clients, crowds))
    with both(LARGE if shape == "0.5B" else SMALL) as (grpc, gateway):
        through = asyncio.run(_throughput(grpc, gateway, streams, tokens, rounds))
    load.append(os.getloadavg()[0])

    added = [1e3 * (http - direct) for direct, http in first]
    ratios = [http / direct for direct, http in through["rounds"]]
    per_token = median(through["cpu_seconds_per_token"])
    click.echo(
        f"\nfirst token: gRPC {1e3 * median(direct for direct, _ in first):.2f} ms, gateway"
        f" {1e3 * median(http for _, http in first):.2f} ms\n"
        f"{streams} streams: {median(http for _, http in through['rounds']):.1f} tokens/s of"
        f" {median(direct for direct, _ in through['rounds']):.1f}; processor time of the gateway a"
        f" token {1e6 * per_token:.0f} us\n"
        f"{clients} clients, one in {SLOW_EVERY} slow: resident"
        f" {', '.join(f'{each / 1e6:.1f}' for each in crowd)} MB after each crowd\n"
    )
    targets = [
        Target("added_ms_to_first_token", bootstrap(added), 5),
        Target("throughput", bootstrap(ratios), 0.97, at_least=True),
        Target("memory_growth", bootstrap([crowd[-1] / crowd[1]]), 1.05),
    ]
    details = {
        "load_average": load,
        "first_token_seconds": first,
        "streams": through,
        "crowd_resident_bytes": crowd,
    }
    finish("gateway", targets, details, json_file)


@contextmanager
def both(shape: harness.Shape) -> Any:
    """A daemon's address, and a gateway in front of it."""
    with harness.serving(
        lambda: harness.random_model("gateway", **shape),
        FLAGS,
        server=None,
        metrics=None,
        binary=None,
    ) as served:
        with Gateway(served.address) as gateway:
            yield served.address, gateway


async def _first_tokens(grpc: str, http: str, requests: int) -> list[tuple[float, float]]:
    """Seconds of pairs, gRPC's and the gateway's; which of them comes first is turned round each time."""
    pairs = []
    async with AsyncClient(grpc) as client:
        connection = await Http.open(http)
        ways: list[Ask] = [lambda most: by_grpc(client, most), connection.ask]
        for number in range(requests + 20):
            found = {}
            for way in (0, 1) if number % 2 else (1, 0):
                found[way] = await _to_first(ways[way](4))
            if number >= 20:  # the first ones warm up
                pairs.append((found[0], found[1]))
        await connection.close()
    return pairs


async def _to_first(tokens: AsyncIterator[int]) -> float:
    begin = time.perf_counter()
    seconds = None
    async for _ in tokens:
        if seconds is None:
            seconds = time.perf_counter() - begin
    assert seconds is not None
    return seconds


async def _throughput(
    grpc: str, gateway: Gateway, streams: int, tokens: int, rounds: int
) -> dict[str, Any]:
    found: list[tuple[float, float]] = []
    cpu = []
    async with AsyncClient(grpc) as client:

        async def direct() -> float:
            return await _rate([by_grpc(client, tokens) for _ in range(streams)])

        async def through() -> float:
            # Those of the last round have been closed meanwhile, as nobody used them.
            connections = [await Http.open(gateway.address) for _ in range(streams)]
            before = cpu_seconds(gateway.pid)
            rate = await _rate([each.ask(tokens) for each in connections])
            cpu.append((cpu_seconds(gateway.pid) - before) / (streams * tokens))
            for connection in connections:
                await connection.close()
            return rate

        await through()
        cpu.clear()
        for number in range(rounds):
            order = (direct, through) if number % 2 else (through, direct)
            rates = {way: await way() for way in order}
            found.append((rates[direct], rates[through]))
            harness.say(f"round {number + 1}: gRPC {found[-1][0]:.1f}, gateway {found[-1][1]:.1f}")
    return {"rounds": found, "cpu_seconds_per_token": cpu}


async def _rate(asked: Sequence[AsyncIterator[int]]) -> float:
    """Tokens a second of all."""
    begin = time.perf_counter()
    counts = await asyncio.gather(*map(_count, asked))
    return sum(counts) / (time.perf_counter() - begin)


async def _count(tokens: AsyncIterator[int]) -> int:
    return sum([count async for count in tokens])


async def _crowds(gateway: Gateway, clients: int, crowds: int) -> list[int]:
    """Resident bytes of the gateway after each."""

    async def one(number: int) -> None:
        connection = await Http.open(gateway.address)
        try:
            pause = SLOW_SECONDS if number % SLOW_EVERY == 0 else 0
            count = await _count(connection.ask(TOKENS_OF_CROWD, pause=pause))
            assert count == TOKENS_OF_CROWD, f"client {number} got {count} tokens"
        finally:
            await connection.close()

    resident = []
    for number in range(crowds):
        begin = time.monotonic()
        await asyncio.gather(*map(one, range(clients)))
        resident.append(resident_bytes(gateway.pid))
        seconds = time.monotonic() - begin
        harness.say(f"crowd {number + 1}: {seconds:.1f} s, {resident[-1] / 1e6:.1f} MB resident")
    return resident


async def by_grpc(client: AsyncClient, most: int) -> AsyncIterator[int]:
    stop, output = Stop(most, ignore_eos=True), Output(token_ids=True)
    async for event in client.generate(PROMPT, stop=stop, output=output):
        if isinstance(event, Delta):
            yield len(event.token_ids)


class Http:
    """A connection to a gateway that is kept. It reads events and no more, so that little of the time
    is the client's."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, address: str) -> "Http":
        host, _, port = address.partition(":")
        return cls(*await asyncio.open_connection(host, int(port)))

    async def ask(self, most: int, pause: float = 0) -> AsyncIterator[int]:
        """pause: seconds between reads."""
        body = {
            "prompt": PROMPT,
            "max_tokens": most,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"continuous_usage_stats": True},
        }
        data = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(data)}\r\n\r\n"
        self._writer.write(head.encode() + data)
        status = await self._reader.readline()
        if b" 200 " not in status:
            raise click.ClickException(f"the gateway says {status.decode()}")
        while await self._reader.readline() != b"\r\n":
            pass
        seen = 0
        while size := int(await self._reader.readline(), 16):
            chunk = await self._reader.readexactly(size + 2)
            for line in chunk.splitlines():
                if not line.startswith(b"data: {"):
                    continue
                tokens = json.loads(line[6:])["usage"]["completion_tokens"]
                if tokens > seen:
                    yield tokens - seen
                    seen = tokens
            if pause:
                await asyncio.sleep(pause)
        await self._reader.readline()

    async def close(self) -> None:
        self._writer.close()
        await self._writer.wait_closed()


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")

"""A replica whose steps sleep: so many streams at once, a token each a step, and the others wait.

Three of them need no more than a core, and so show what a balancer leaves of three machines.

    python -m epikv_lab.bench.executor --slots 16 --step 0.05
    python -m epikv_lab.bench.executor --costs costs.json

prints its address and serves until its standard input ends. With --as-daemon it is what Ray's replicas start for an
epikvd (epikv.ray.process): it takes the daemon's flags, and serves until it is killed. With costs (epikv.plan.costs) it has one step
after another, as the daemon has: what decodes has a token in each, prompts are read in chunks in the room
left, requests are admitted by places and by what they may hold, and a step sleeps for what it costs.
"""

import argparse
import asyncio
import json
import sys
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
from epikv.plan.costs import Costs
from epikv.v1 import generation_pb2, generation_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc


class _Health(health_pb2_grpc.HealthServicer):
    async def Check(self, request: Any, context: Any) -> Any:
        return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)


class _Generation(generation_pb2_grpc.GenerationServiceServicer):
    def __init__(self, slots: int, step: float) -> None:
        self._slots = asyncio.Semaphore(slots)
        self._step = step

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        yield generation_pb2.GenerateResponse(accepted=generation_pb2.Accepted())
        async with self._slots:
            for token in range(request.stop.max_output_tokens):
                await asyncio.sleep(self._step)
                delta = generation_pb2.Delta(token_ids=[token])
                yield generation_pb2.GenerateResponse(delta=delta)
        yield generation_pb2.GenerateResponse(summary=generation_pb2.Summary())


@dataclass
class Running:
    prompt: int
    output: int
    cached: int = 0
    told: int = 0  # tokens
    deltas: asyncio.Queue[int] = field(default_factory=asyncio.Queue)

    @property
    def peak(self) -> int:
        return self.prompt + self.output - 1


class Engine(generation_pb2_grpc.GenerationServiceServicer):
    """Requests without a budget; nothing is found cached."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self.waiting: deque[Running] = deque()
        self.running: list[Running] = []
        self._came = asyncio.Event()

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        yield generation_pb2.GenerateResponse(accepted=generation_pb2.Accepted())
        own = Running(len(request.token_ids.ids), request.stop.max_output_tokens)
        self.waiting.append(own)
        self._came.set()
        for _ in range(own.output):
            delta = generation_pb2.Delta(token_ids=[await own.deltas.get()])
            yield generation_pb2.GenerateResponse(delta=delta)
        yield generation_pb2.GenerateResponse(summary=generation_pb2.Summary())

    async def run(self) -> None:
        clock = asyncio.get_running_loop().time
        now = clock()
        while True:
            if not self.running and not self.waiting:
                self._came.clear()
                await self._came.wait()
                now = clock()
            # By the time at which the last step was to end: what a sleep is late, the next one catches up.
            now += self.step()
            await asyncio.sleep(max(now - clock(), 0))
            self.tell()

    def step(self) -> float:
        """Begins one; the seconds that it takes."""
        costs, settings = self._costs, self._costs.settings
        begun = 0
        while self.waiting and len(self.running) < settings.max_running_requests:
            held = sum(each.peak for each in self.running)
            if held + self.waiting[0].peak > settings.kv_capacity_tokens:
                break
            self.running.append(self.waiting.popleft())
            begun += 1
        decoding = [each for each in self.running if each.told]
        seconds = costs.base_seconds(len(decoding)) + begun * costs.request
        seconds += costs.attended * sum(each.cached for each in decoding)
        for each in decoding:
            each.cached += 1
        if decoding and len(decoding) < len(self.running):
            seconds += costs.mixed
        room = max(settings.max_step_tokens - len(decoding), 16)
        for each in self.running:
            if each.told:
                continue
            to_boundary = (
                settings.prefill_chunk_tokens - each.cached % settings.prefill_chunk_tokens
            )
            chunk = min(each.prompt - each.cached, to_boundary, room)
            if chunk == 0:
                break
            room -= chunk
            seconds += chunk * costs.prefill
            seconds += costs.pair * (chunk * each.cached + chunk * (chunk + 1) // 2)
            each.cached += chunk
        return seconds

    def tell(self) -> None:
        """What the step has given."""
        for each in self.running:
            if each.cached >= each.prompt:
                each.deltas.put_nowait(each.told)
                each.told += 1
        self.running = [each for each in self.running if each.told < each.output]


async def _serve(replica: _Generation | Engine, as_daemon: bool) -> None:
    server = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(_Health(), server)
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(replica, server)
    if isinstance(replica, Engine):
        engine = asyncio.create_task(replica.run())
        engine.add_done_callback(lambda done: done.cancelled() or done.result())
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    if as_daemon:
        print(json.dumps({"grpc": f"127.0.0.1:{port}", "metrics": ""}), flush=True)
        await asyncio.Event().wait()
    print(f"127.0.0.1:{port}", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await server.stop(None)


async def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slots", type=int)
    parser.add_argument("--step", type=float, help="seconds")
    parser.add_argument("--costs", type=Path)
    parser.add_argument("--as-daemon", action="store_true")
    given, others = parser.parse_known_args()
    if others and not given.as_daemon:
        parser.error(f"unknown: {' '.join(others)}")
    if given.costs is not None:
        await _serve(Engine(Costs.load(given.costs)), given.as_daemon)
    else:
        await _serve(_Generation(given.slots, given.step), given.as_daemon)


if __name__ == "__main__":
    asyncio.run(_main())

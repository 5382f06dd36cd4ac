"""A replica whose steps sleep: so many streams at once, a token each a step, and the others wait.

Three of them need no more than a core, and so show what a balancer leaves of three machines.

    python -m epikv_lab.bench.executor --slots 16 --step 0.05

prints its address and serves until its standard input ends.
"""

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
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


async def _serve(slots: int, step: float) -> None:
    server = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(_Health(), server)
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(_Generation(slots, step), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"127.0.0.1:{port}", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await server.stop(None)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slots", type=int, required=True)
    parser.add_argument("--step", type=float, required=True, help="seconds")
    given = parser.parse_args()
    asyncio.run(_serve(given.slots, given.step))

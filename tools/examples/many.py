"""Sends many requests at once: python tools/examples/many.py 48

Each has a policy of its own, and the daemon decodes them together. Of the sample model:

    48 requests in 9.2 s
    full     16 of 16 solved
    cur      16 of 16 solved
    sliding   3 of 16 solved
"""

import asyncio
import os
import sys
import time

from epikv import AsyncClient, Kv, Stop
from epikv.sample import problem

SERVER = os.environ.get("EPIKV_SERVER", "127.0.0.1:50051")
ARMS = [Kv("full"), Kv("cur", 400), Kv("sliding", 400)]


async def solves(client: AsyncClient, seed: int, kv: Kv) -> bool:
    task, stop = problem(seed), Stop(max_output_tokens=999)
    return all(task.correct((await client.generate_once(task.prompt, kv=kv, stop=stop)).text))


async def main(count: int) -> None:
    began = time.monotonic()
    async with AsyncClient(SERVER) as client:  # one connection is enough
        asked = [(n // len(ARMS), ARMS[n % len(ARMS)]) for n in range(count)]
        solved = await asyncio.gather(*(solves(client, seed, kv) for seed, kv in asked))
    print(f"{count} requests in {time.monotonic() - began:.1f} s")
    for arm in ARMS:
        its = [right for right, (_, kv) in zip(solved, asked, strict=True) if kv is arm]
        print(f"{arm.policy:<7} {sum(its):>3} of {len(its)} solved")


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))

"""Ten honest clients, in a process of their own: `honest.py` reads a Task from stdin as JSON and writes answers.

Requests are due at moments that are drawn before, whatever becomes of the others. So a server that is slow is not
spared: a time to first token counts from when its request was due.
"""

import asyncio
import json
import os
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from epikv import AsyncClient, Experiment, Kv, RpcError, Stop
from epikv.connection import Tls
from epikv.sample import problem
from figures import Answer

CLIENTS = 10
PROMPTS = 24
OUTPUT_TOKENS = 160
POLICIES = ("epikv_flat", "h2o", "snapkv", "sliding", "full")
GIVE_UP_SECONDS = 60.0


@dataclass(frozen=True)
class Task:
    server: str
    ca: str
    token: str
    seconds: float
    rate: float  # requests a second; 0: as many as ten clients get through
    seed: int
    expected: Mapping[str, str]  # text by kind; none is known yet where it is empty


def request(kind: int) -> dict[str, Any]:
    """Arguments of `generate`. Answers are greedy, and so the same whenever they are asked for."""
    policy = POLICIES[kind % len(POLICIES)]
    return {
        "prompt": problem(kind).prompt,
        "kv": Kv() if policy == "full" else Kv(policy, "90%"),
        "stop": Stop(OUTPUT_TOKENS, ignore_eos=True),
        "experiment": Experiment(opt_out=True),  # or its arm would change the answer
        "timeout": GIVE_UP_SECONDS,
    }


async def ask(client: AsyncClient, kind: int, due: float, start: float, expected: str) -> Answer:
    ttft, text = None, ""
    try:
        async for piece in client.generate(**request(kind)).text():
            if ttft is None:
                ttft = time.monotonic() - start - due
            text += piece
    except RpcError as error:
        return Answer(due, ttft, f"{error.code.name} {error.reason}", expected.startswith(text))
    return Answer(due, ttft, "OK", text == expected)


async def expectations(task: Task) -> dict[str, str]:
    """Each request alone, one after the other."""
    async with AsyncClient(task.server, token=task.token, tls=Tls(task.ca)) as client:
        found = {}
        for kind in range(PROMPTS):
            found[str(kind)] = "".join(
                [piece async for piece in client.generate(**request(kind)).text()]
            )
        return found


async def answers(task: Task) -> Sequence[Answer]:
    draw = random.Random(task.seed)
    clients = [
        AsyncClient(
            task.server,
            [("grpc.use_local_subchannel_pool", 1), ("grpc.client_number", i)],
            token=task.token,
            tls=Tls(task.ca),
        )
        for i in range(CLIENTS)
    ]
    start = time.monotonic()
    try:
        if task.rate == 0:
            return await _as_fast_as_they_can(task, clients, start)
        dues, due = [], draw.expovariate(task.rate)
        while due < task.seconds:
            dues.append(due)
            due += draw.expovariate(task.rate)

        async def one(number: int, due: float) -> Answer:
            await asyncio.sleep(max(0, start + due - time.monotonic()))
            kind = number % PROMPTS
            return await ask(clients[number % CLIENTS], kind, due, start, task.expected[str(kind)])

        return await asyncio.gather(*(one(number, due) for number, due in enumerate(dues)))
    finally:
        for client in clients:
            await client.close()


async def _as_fast_as_they_can(
    task: Task, clients: Sequence[AsyncClient], start: float
) -> Sequence[Answer]:
    async def all_of(i: int) -> list[Answer]:
        made: list[Answer] = []
        while (now := time.monotonic() - start) < task.seconds:
            kind = (i + len(made)) % PROMPTS
            made.append(await ask(clients[i], kind, now, start, task.expected[str(kind)]))
        return made

    return [a for made in await asyncio.gather(*map(all_of, range(CLIENTS))) for a in made]


def main() -> None:
    # They would be on machines of their own: attackers on this one do not hold them up.
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    task = Task(**json.load(sys.stdin))
    if not task.expected:
        print(json.dumps(asyncio.run(expectations(task))))
    else:
        print(json.dumps([asdict(answer) for answer in asyncio.run(answers(task))]))


def program() -> list[str]:
    return [sys.executable, str(Path(__file__).resolve())]


if __name__ == "__main__":
    main()

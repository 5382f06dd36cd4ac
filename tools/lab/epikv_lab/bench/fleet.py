"""What a balancer leaves of three replicas: prefixes that are found again, and goodput.

Prefixes: users talk to daemons of the sample model, turn after turn, several at once. The hit rate is the
share of prompt tokens that a replica had cached: of one replica, and of three behind Envoy (by
x-epikv-prefix), behind HAProxy (leastconn), of Ray Serve, and asked at random. Each of them gets conversations of its
own.

Goodput: replicas whose steps sleep (epikv_lab.bench.executor), since three daemons that compute would share
the cores of this machine. As many users as keep a replica busy, and half as many again, each ask again as soon
as they have their answer; what has its answer within the deadline counts. One replica and the fleets of three take
turns.
"""

import asyncio
import itertools
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import click
from epikv import harness, processes
from epikv.async_client import AsyncClient
from epikv.messages import Summary
from epikv.options import Chat, Stop
from epikv.stats import bootstrap
from epikv.testing import Daemon, find_binary

from epikv_lab.bench import balancers
from epikv_lab.bench.targets import Target, finish

REPLICAS = 3
TURNS = 6
# Of a conversation that the sample model's context holds. Blocks of the prefix cache are as short as turns.
WORDS = 30
FLAGS = ("--threads=1", "--prefill_chunk_tokens=32")
TOKENS = 20  # of an answer whose steps sleep
DEADLINE = 3.0  # times what an answer takes alone

_numbers = itertools.count()


@click.command("fleet")
@click.option("--model", type=click.Path(exists=True), required=True, help="The sample model.")
@click.option("--envoy", default="envoy", show_default=True, help="Its program.")
@click.option("--haproxy", default="haproxy", show_default=True, help="Its program.")
@click.option("--ray", help="A Python that has Ray: build/ray/bin/python. Left out: no Ray.")
@click.option("--conversations", default=40, show_default=True, help="Of a round of hit rates.")
@click.option("--users", default=6, show_default=True, help="Who talk at once.")
@click.option("--slots", default=16, show_default=True, help="Streams at once, of a replica.")
@click.option("--step", default=0.05, show_default=True, help="Seconds that a step sleeps.")
@click.option("--seconds", default=10.0, show_default=True, help="Of a round of goodput.")
@click.option("--rounds", default=5, show_default=True, help="Of each.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path))
def command(
    model: str,
    envoy: str,
    haproxy: str,
    ray: str | None,
    conversations: int,
    users: int,
    slots: int,
    step: float,
    seconds: float,
    rounds: int,
    json_file: Path | None,
) -> None:
    """Prefix hit rate and goodput of three replicas behind a balancer, over one replica's."""
    load = [os.getloadavg()[0]]
    with ExitStack() as stack:
        daemons = [stack.enter_context(Daemon(model, *FLAGS)) for _ in range(REPLICAS)]
        ways = _ways(stack, [daemon.grpc for daemon in daemons], envoy, haproxy)
        ways["random"] = [daemon.grpc for daemon in daemons]
        if ray is not None:
            ways["ray"] = [stack.enter_context(_ray(ray, model, str(find_binary()), FLAGS))]
        hits = _in_turns(ways, rounds, lambda addresses: _hit_rate(addresses, conversations, users))
    with ExitStack() as stack:
        executors = [
            stack.enter_context(executor(f"--slots={slots}", f"--step={step}"))
            for _ in range(REPLICAS)
        ]
        ways = _ways(stack, executors, envoy, haproxy)
        if ray is not None:
            program = stack.enter_context(_program(slots, step))
            ways["ray"] = [stack.enter_context(_ray(ray, model, program))]
        many = {name: slots * 3 // 2 * (1 if name == "one" else REPLICAS) for name in ways}
        goodput = _in_turns(
            {name: [str(many[name]), *addresses] for name, addresses in ways.items()},
            rounds,
            lambda given: _goodput(given[1], int(given[0]), seconds, DEADLINE * TOKENS * step),
        )
    load.append(os.getloadavg()[0])
    for name, found in (("hit rate", hits), ("goodput, answers a second", goodput)):
        for way, values in found.items():
            shown = ", ".join(f"{value:.3f}" for value in values)
            click.echo(f"{name} of {way}: {bootstrap(values).value:.3f} ({shown})")

    def over(found: dict[str, list[float]], way: str, times: int = 1) -> Any:
        pairs = zip(found[way], found["one"], strict=True)
        return bootstrap([each / (times * one) for each, one in pairs])

    targets = [
        Target("envoy_hit_rate_over_one", over(hits, "envoy"), 0.9, at_least=True),
        Target("envoy_goodput_over_three", over(goodput, "envoy", REPLICAS), 0.95, at_least=True),
    ]
    if ray is not None:
        targets += [
            Target("ray_hit_rate_over_one", over(hits, "ray"), 0.9, at_least=True),
            Target("ray_goodput_over_three", over(goodput, "ray", REPLICAS), 0.95, at_least=True),
        ]
    details = {"load_average": load, "hit_rate": hits, "goodput": goodput}
    finish("fleet", targets, details, json_file)


def _ways(
    stack: ExitStack, addresses: Sequence[str], envoy: str, haproxy: str
) -> dict[str, list[str]]:
    """One replica, and the balancers before all."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    return {
        "one": [addresses[0]],
        "envoy": [stack.enter_context(balancers.envoy(folder, addresses, envoy))],
        "leastconn": [stack.enter_context(balancers.haproxy(folder, addresses, haproxy))],
    }


def _ray(
    python: str, model: str, binary: str, flags: Sequence[str] = ()
) -> AbstractContextManager[str]:
    settings = {"model": str(Path(model).absolute()), "binary": binary, "flags": list(flags)}
    return balancers.ray(python, {**settings, "replicas": REPLICAS})


@contextmanager
def _program(slots: int, step: float) -> Iterator[str]:
    """An executor that Ray starts as it starts a daemon."""
    command = (
        f"{sys.executable} -m epikv_lab.bench.executor --slots={slots} --step={step} --as-daemon"
    )
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "executor"
        program.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        program.chmod(0o755)
        yield str(program)


def _in_turns(
    ways: dict[str, list[str]], rounds: int, measure: Callable[[list[str]], Any]
) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        for name in list(ways) if number % 2 else reversed(list(ways)):
            found[name].append(asyncio.run(measure(ways[name])))
            harness.say(f"round {number + 1}, {name}: {found[name][-1]:.3f}")
    return found


def turns(number: int) -> Iterator[Chat]:
    """Of a conversation, each longer than the last."""
    dice = random.Random(number)
    said: list[dict[str, str]] = []
    for place in range(2 * TURNS - 1):
        words = " ".join(str(dice.randrange(10)) for _ in range(WORDS))
        role = "assistant" if place % 2 else "user"
        said.append({"role": role, "content": f"{number} : {words}"})
        if role == "user":
            yield Chat(list(said))


async def _hit_rate(addresses: Sequence[str], conversations: int, users: int) -> float:
    """Of these conversations; more than one address: asked at random."""
    cached = asked = 0
    left = iter(range(conversations))
    stop = Stop(2, min_output_tokens=2, ignore_eos=True)
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(AsyncClient(each)) for each in addresses]
        dice = random.Random(0)

        async def talk() -> None:
            nonlocal cached, asked
            for _ in left:
                for chat in turns(next(_numbers)):
                    answer = await dice.choice(clients).generate_once(chat, stop=stop)
                    assert answer.summary is not None and answer.summary.usage is not None
                    cached += answer.summary.usage.cached_prompt_tokens
                    asked += answer.summary.usage.prompt_tokens

        await asyncio.gather(*(talk() for _ in range(users)))
    return cached / asked


@contextmanager
def executor(*options: str) -> Iterator[str]:
    """The address of one (epikv_lab.bench.executor)."""
    command = [sys.executable, "-m", "epikv_lab.bench.executor", *options]
    process = processes.start(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process.stdout.readline().strip()  # type: ignore[union-attr]
    finally:
        process.kill()
        process.communicate()


async def _goodput(address: str, users: int, seconds: float, deadline: float) -> float:
    """Answers a second that came within `deadline` seconds, once the replicas are busy."""
    stop = Stop(TOKENS, ignore_eos=True)
    begin = time.monotonic() + deadline
    end = begin + seconds
    good = 0
    async with AsyncClient(address) as client:

        async def ask_on() -> None:
            nonlocal good
            while True:
                for chat in turns(next(_numbers)):
                    asked = time.monotonic()
                    if asked > end:
                        return
                    async with client.generate(chat, stop=stop) as stream:
                        whole = [isinstance(event, Summary) async for event in stream][-1]
                    ended = time.monotonic()
                    good += whole and begin <= ended < end and ended - asked <= deadline

        await asyncio.gather(*(ask_on() for _ in range(users)))
    return good / seconds

"""What a step of a daemon costs, from short loads that are sent to it.

A load is waves: so many requests at once, all alike, and the next ones when all have ended. The daemon's
own counters say what it ran and for how long; what a cost was fitted to is a sum over steps, so it does not
matter how a wave fell into steps. The rounds of loads take turns, and of a load its median round counts.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random
from statistics import median

from epikv.async_client import AsyncClient
from epikv.messages import Delta, Summary
from epikv.messages import Policy as Described
from epikv.options import GREEDY, Kv, Output, Stop
from epikv.plan.costs import Costs, Policy, Settings
from epikv.plan.replica import FULL, Arm
from epikv.scrape import Page, scrape

ROUNDS = 3

_SHORT, _OUTPUT = 32, 48  # tokens
_MOST_AT_ONCE = 256
_POLL_SECONDS = 0.002
_SPARE = 0.9  # of the KV pool


@dataclass(frozen=True)
class Shape:
    """Of a wave."""

    at_once: int
    prompt: int
    output: int
    arm: Arm = FULL

    def __str__(self) -> str:
        budget = "" if self.arm.budget is None else f":{self.arm.budget}"
        return f"{self.arm.policy}{budget}, {self.at_once} x {self.prompt} + {self.output}"


@dataclass(frozen=True)
class Timed:
    """One request, in seconds. `prefill` and `decode` are the server's word."""

    first: float
    end: float
    prefill: float
    decode: float


@dataclass(frozen=True)
class Load:
    """What a daemon did while waves of one shape came."""

    shape: Shape
    requests: list[Timed]
    page: Page  # what its counters have added

    @property
    def steps(self) -> float:
        return self.page.total("epikv_step_seconds_count")

    @property
    def seconds(self) -> float:
        """In steps."""
        return self.page.total("epikv_step_seconds_sum")

    @property
    def policy_seconds(self) -> float:
        """Of them, what policies took."""
        name = "epikv_step_seconds_total"
        return sum(self.page.value(name, stage=stage) for stage in ("taps", "observe", "evict"))

    @property
    def decode_tokens(self) -> float:
        return self.page.value("epikv_step_tokens_total", phase="decode")

    @property
    def prefill_tokens(self) -> float:
        return self.page.value("epikv_step_tokens_total", phase="prefill")

    @property
    def prefill_steps(self) -> float:
        """In which nothing decodes."""
        return self.page.value("epikv_step_seconds_count", phase="prefill")

    @property
    def decoding(self) -> float:
        """Sequences that decode in a step in which any does, on average."""
        return self.decode_tokens / max(self.steps - self.prefill_steps, 1)


def measure(
    server: str,
    metrics: str,
    settings: Settings,
    arms: Sequence[Arm],
    longest: int,
    seconds: float,
    described: Sequence[Described],
    say: Callable[[str], None],
) -> Costs:
    """Of a daemon that nobody else asks. longest: prompt, tokens. seconds: about so long it takes."""
    keepers = {policy.name for policy in described if policy.prompt_eviction == "refuses"}
    shapes = _shapes(settings, arms, longest, keepers)
    say(f"measuring steps: {len(shapes)} loads of {ROUNDS} rounds, about {seconds:.0f} s")
    each = seconds / ROUNDS / len(shapes)
    rounds: dict[Shape, list[Load]] = {shape: [] for shape in shapes}
    dice = Random(0)

    async def run() -> None:
        async with AsyncClient(server) as client:
            for shape in shapes:
                await _wave(client, shape, settings, dice)  # warms up
            for number in range(ROUNDS):
                for shape in shapes if number % 2 else reversed(shapes):
                    rounds[shape].append(await _load(client, metrics, shape, settings, dice, each))

    asyncio.run(run())
    loads = [sorted(found, key=_pace)[len(found) // 2] for found in rounds.values()]
    return fit(loads, settings, described)


def _pace(load: Load) -> float:
    return load.seconds / max(load.decode_tokens + load.prefill_tokens, 1)


def _shapes(
    settings: Settings, arms: Sequence[Arm], longest: int, keepers: Collection[str]
) -> list[Shape]:
    """keepers: policies that evict nothing of prompts, so that a budget holds at least the prompt."""
    longest = max(min(longest, settings.context_length - _OUTPUT), 2)
    short = min(_SHORT, longest)
    output = min(_OUTPUT, settings.context_length - short)
    room = int(_SPARE * settings.kv_capacity_tokens)
    shapes, at_once = [], 1
    while at_once <= min(settings.max_running_requests, _MOST_AT_ONCE):
        if at_once == 1 or at_once * (short + output) <= room:
            shapes.append(Shape(at_once, short, output))
        at_once *= 2
    for at_once, prompt, tokens in (
        (1, longest, output),
        (8, longest, output),
        (1, short, 1),
        (1, longest, 1),
        (8, (short + longest) // 2, 1),
        (32, max(short // 4, 1), 1),
        (32, short, 1),
    ):
        if at_once == 1 or at_once * (prompt + tokens) <= room:
            shapes.append(Shape(at_once, prompt, tokens))
    for arm in arms:
        if arm.budget is None:
            continue
        prompt = longest if isinstance(arm.budget, float) else min(longest, 2 * arm.budget)
        if arm.policy in keepers:
            prompt = min(short, arm.budget_of(0, output) or short)
        for at_once, tokens in ((1, output), (8, output), (4, 1)):
            shapes.append(Shape(at_once, prompt, tokens, arm))
    return list(dict.fromkeys(shapes))


async def _load(
    client: AsyncClient,
    metrics: str,
    shape: Shape,
    settings: Settings,
    dice: Random,
    seconds: float,
) -> Load:
    before = settled(metrics)
    begin = time.monotonic()
    requests: list[Timed] = []
    while not requests or time.monotonic() - begin < seconds:
        requests += await _wave(client, shape, settings, dice)
    return Load(shape, requests, settled(metrics) - before)


def settled(metrics: str) -> Page:
    """The page once no request runs: a step is counted after its tokens are told."""
    while scrape(metrics).total("epikv_requests_running") > 0:
        time.sleep(_POLL_SECONDS)
    return scrape(metrics)


async def _wave(client: AsyncClient, shape: Shape, settings: Settings, dice: Random) -> list[Timed]:
    prompts = [
        dice.choices(range(settings.vocabulary), k=shape.prompt) for _ in range(shape.at_once)
    ]
    return list(await asyncio.gather(*(_ask(client, shape, prompt) for prompt in prompts)))


async def _ask(client: AsyncClient, shape: Shape, prompt: list[int]) -> Timed:
    begin, first = time.monotonic(), 0.0
    stream = client.generate(
        prompt,
        kv=Kv(shape.arm.policy, shape.arm.budget),
        sampling=GREEDY,
        stop=Stop(shape.output, ignore_eos=True),
        output=Output(text=False, token_ids=True),
    )
    summary: Summary | None = None
    async with stream:
        async for event in stream:
            if isinstance(event, Delta) and event.token_ids and not first:
                first = time.monotonic()
            if isinstance(event, Summary):
                summary = event
    end = time.monotonic()
    assert summary is not None and summary.timings is not None
    told = summary.timings
    return Timed(first - begin, end - begin, told.prefill or 0.0, told.decode or 0.0)


def fit(loads: Sequence[Load], settings: Settings, described: Sequence[Described]) -> Costs:
    """Costs by which the loads take about what they took: least squares of relative errors, none below
    0, and a step that is never cheaper for more sequences."""
    alone = [load for load in loads if load.shape.at_once == 1 and load.shape.output > 1]
    gap = _gap(alone)
    plain = [load for load in loads if load.shape.arm.budget is None]
    knots = [0, *sorted({load.shape.at_once for load in plain if load.shape.output > 1})]
    took = [load.seconds + gap * load.steps for load in plain]
    found = least_squares([_work(load, knots) for load in plain], took)
    base, total = [], 0.0
    for knot, more in zip(knots, found, strict=False):
        total += more
        base.append((knot, total))
    prefill, pair, attended, request = found[len(knots) :]
    fitted = [_dot(found, _work(load, knots)) for load in plain]
    errors = [abs(had / seconds - 1) for had, seconds in zip(fitted, took, strict=True)]
    policies = {}
    for name in dict.fromkeys(load.shape.arm.policy for load in loads):
        own = [load for load in loads if load.shape.arm.policy == name]
        traits = next(each for each in described if each.name == name)
        policies[name] = Policy(
            traits.prompt_eviction,
            traits.slack_tokens,
            state_bytes_per_token=traits.state_bytes_per_token,
            state_bytes_per_sequence=traits.state_bytes_per_sequence,
        )
        if own[0].shape.arm.budget is None:
            continue
        rows = [[load.decode_tokens, load.prefill_tokens] for load in own]
        took_more = [load.policy_seconds for load in own]
        decode, read = least_squares(rows, took_more, [load.seconds for load in own])
        policies[name] = replace(policies[name], decode_seconds=decode, prefill_seconds=read)
    requests = [request for load in alone for request in load.requests]
    return Costs(
        settings=settings,
        base=tuple(base),
        prefill=prefill,
        pair=pair,
        attended=attended,
        request=request,
        before_first=max(median(r.first - r.prefill for r in requests), 0.0),
        before_end=max(median(r.end - r.prefill - r.decode for r in requests), 0.0),
        policies=policies,
        error=median(errors),
        measured={
            str(load.shape): {"seconds": seconds, "fitted": had, "steps": load.steps}
            for load, seconds, had in zip(plain, took, fitted, strict=True)
        },
    )


def _gap(alone: Sequence[Load]) -> float:
    """Seconds between two steps, which no step counts: of requests that decode alone."""
    decode = sum(request.decode for load in alone for request in load.requests)
    inside = sum(load.page.value("epikv_step_seconds_sum", phase="decode") for load in alone)
    steps = sum(load.page.value("epikv_step_seconds_count", phase="decode") for load in alone)
    return max((decode - inside) / max(steps, 1), 0.0)


def _work(load: Load, knots: Sequence[int]) -> list[float]:
    """What the costs are of: steps by what decodes in them, prompt tokens, pairs, attended, requests."""
    busy = load.steps - load.prefill_steps
    steps = [load.steps]
    for left, right in pairwise(knots):
        steps.append(busy * min(max((load.decoding - left) / (right - left), 0.0), 1.0))
    prompt, decodes, count = load.shape.prompt, load.shape.output - 1, len(load.requests)
    pairs = prompt * (prompt + 1) / 2
    attended = decodes * prompt + decodes * (decodes - 1) / 2
    return [*steps, load.prefill_tokens, pairs * count, attended * count, float(count)]


def _dot(costs: Sequence[float], work: Sequence[float]) -> float:
    return sum(cost * amount for cost, amount in zip(costs, work, strict=True))


def least_squares(
    rows: Sequence[Sequence[float]], wanted: Sequence[float], scale: Sequence[float] | None = None
) -> list[float]:
    """Factors, none below 0, by which the rows come nearest to what is wanted. Each row's error counts
    relative to its scale, which is what is wanted of it if none is given."""
    scale = scale or wanted
    columns = len(rows[0])
    unit = [max(abs(row[i]) for row in rows) or 1.0 for i in range(columns)]
    scaled = [
        [row[i] / unit[i] / size for i in range(columns)]
        for row, size in zip(rows, scale, strict=True)
    ]
    goal = [value / size for value, size in zip(wanted, scale, strict=True)]
    found = [0.0] * columns
    # By coordinates, which comes to the one minimum that there is. The sums are small.
    square = [
        [sum(row[i] * row[j] for row in scaled) for j in range(columns)] for i in range(columns)
    ]
    right = [sum(row[i] * g for row, g in zip(scaled, goal, strict=True)) for i in range(columns)]
    for _ in range(20_000):
        moved = 0.0
        for i in range(columns):
            if square[i][i] == 0:
                continue
            rest = right[i] - sum(square[i][j] * found[j] for j in range(columns) if j != i)
            value = max(rest / square[i][i], 0.0)
            moved = max(moved, abs(value - found[i]))
            found[i] = value
        if moved < 1e-10 * max(found, default=0):
            break
    return [value / size for value, size in zip(found, unit, strict=True)]

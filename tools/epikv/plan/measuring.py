"""What a step of a daemon costs, from short loads that are sent to it.

A load is waves: so many requests at once, all alike, and the next ones when all have ended. Or it is users:
each asks again when it is answered, with lengths of its own, so that prompts are read while others decode. The daemon's
own counters say what it ran and for how long; what a cost was fitted to is a sum over steps, so it does not
matter how a wave fell into steps. The loads take turns in many short rounds, since a machine may be slower
for some seconds, and of a load all rounds count: costs are means, as what a replica can do is. The client
does no more than it must (no epikv.AsyncClient): it may be on the machine that is measured.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, count, pairwise
from random import Random
from statistics import fmean, median

import grpc

from epikv.connection import Tls, bearer, connect_async, token_from_environment
from epikv.errors import RpcError
from epikv.messages import Policy as Described
from epikv.options import GREEDY, Kv, Output, Stop
from epikv.plan.costs import Costs, Policy, Settings
from epikv.plan.replica import FULL, Arm
from epikv.scrape import Page, scrape
from epikv.v1 import generation_pb2, generation_pb2_grpc

Generate = Callable[..., AsyncIterator[generation_pb2.GenerateResponse]]

ROUNDS = 3  # at least

_SHORT, _OUTPUT = 32, 48  # tokens
_MOST_AT_ONCE = 256
_MOST_USERS = 32  # of more, a turn would take too long
_LEAST_TURNS = 2  # of a user
_POLL_SECONDS = 0.002
_TURN_SECONDS = 0.4  # of a load in a round, if a wave is shorter
_SPARE = 0.9  # of the KV pool


@dataclass(frozen=True)
class Shape:
    """Of a load. Of users' requests, prompt and output are the most: they are drawn from 1 on."""

    at_once: int
    prompt: int
    output: int
    arm: Arm = FULL
    users: bool = False

    def __str__(self) -> str:
        budget = "" if self.arm.budget is None else f":{self.arm.budget}"
        of = " users" if self.users else ""
        return f"{self.arm.policy}{budget}, {self.at_once}{of} x {self.prompt} + {self.output}"


@dataclass(frozen=True)
class Timed:
    """One request: tokens, and seconds. `prefill` and `decode` are the server's word."""

    prompt: int
    output: int
    first: float
    end: float
    prefill: float
    decode: float


@dataclass(frozen=True)
class Load:
    """What a daemon did while requests of one shape came."""

    shape: Shape
    requests: list[Timed]
    page: Page  # what its counters have added
    took: float = 0  # seconds, of the load

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
    def tokens(self) -> float:
        return self.decode_tokens + self.prefill_tokens

    def steps_of(self, phase: str) -> float:
        """prefill: nothing decodes in them; decode: no prompt is read in them; mixed: both."""
        return self.page.value("epikv_step_seconds_count", phase=phase)


class Measurement:
    """Of a daemon that nobody else asks while it runs. It may run several times: all turns count."""

    def __init__(
        self,
        server: str,
        metrics: str,
        settings: Settings,
        arms: Sequence[Arm],
        longest: int,
        described: Sequence[Described],
    ) -> None:
        """longest: prompt, tokens."""
        self._server, self._metrics = server, metrics
        self._settings, self._described = settings, described
        keepers = {policy.name for policy in described if policy.prompt_eviction == "refuses"}
        self._shapes = _shapes(settings, arms, longest, keepers)
        self._turns: list[Load] = []
        self._rounds = 0
        self._dice = Random(0)

    @property
    def loads(self) -> int:
        return len(self._shapes)

    def run(self, seconds: float, rounds: int = ROUNDS) -> None:
        """Takes about so many seconds, and for at least so many rounds. Raises RpcError where the daemon
        does not answer."""
        try:
            asyncio.run(self._run(seconds, rounds))
        except grpc.RpcError as error:
            raise RpcError.from_grpc(error) from None

    def costs(self) -> Costs:
        """Requires that it has run."""
        turns = self._turns
        whole = [_all([turn for turn in turns if turn.shape == shape]) for shape in self._shapes]
        costs = fit(whole, self._settings, self._described)
        return replace(costs, paces=paces(turns, costs), pace_seconds=_TURN_SECONDS)

    async def _run(self, seconds: float, rounds: int) -> None:
        each = min(seconds / rounds / len(self._shapes), _TURN_SECONDS)
        async with connect_async(self._server, tls=Tls.from_environment()) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            generate = partial(stub.Generate, metadata=bearer(token_from_environment()))
            if not self._turns:
                for shape in self._shapes:
                    await self._turn(generate, shape, 0)  # warms up
            begin = time.monotonic()
            for number in count():
                if number >= rounds and time.monotonic() - begin > seconds:
                    break
                self._rounds += 1
                for shape in self._shapes if self._rounds % 2 else reversed(self._shapes):
                    self._turns.append(await self._turn(generate, shape, each))

    async def _turn(self, generate: Generate, shape: Shape, seconds: float) -> Load:
        return await _load(generate, self._metrics, shape, self._settings, self._dice, seconds)


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
    """By one run of a Measurement."""
    measurement = Measurement(server, metrics, settings, arms, longest, described)
    say(f"measuring steps: {measurement.loads} loads in turns, about {seconds:.0f} s")
    measurement.run(seconds)
    return measurement.costs()


def _all(turns: Sequence[Load]) -> Load:
    requests = [request for load in turns for request in load.requests]
    return Load(turns[0].shape, requests, sum((load.page for load in turns), Page({})))


def paces(turns: Sequence[Load], costs: Costs) -> tuple[float, ...]:
    """How much longer than on average steps took, by time: a value for each _TURN_SECONDS of these
    turns. What a turn took over what it costs is held against the others of its shape, so that neither
    an error of the fit nor what lengths were drawn looks like a pace. At these paces as many steps are
    taken as at an even one: the mean of their inverses is 1."""
    plain = [turn for turn in turns if turn.shape.arm.budget is None]
    fitted = [fitted_seconds(costs, turn) for turn in plain]
    took, had = defaultdict[Shape, float](float), defaultdict[Shape, float](float)
    for turn, seconds in zip(plain, fitted, strict=True):
        took[turn.shape] += turn.seconds
        had[turn.shape] += seconds
    found: list[float] = []
    passed = 0.0
    for turn, seconds in zip(plain, fitted, strict=True):
        passed += turn.took
        while (len(found) + 0.5) * _TURN_SECONDS < passed:
            found.append(turn.seconds / seconds * had[turn.shape] / took[turn.shape])
    steps = fmean(1 / pace for pace in found)
    return tuple(pace * steps for pace in found)


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
            # Waves end all at once, and their clients then take the processor from the daemon: a
            # twelfth of its steps' time was seen.
            shapes.append(Shape(at_once, short, output, users=1 < at_once <= _MOST_USERS))
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
    for at_once, prompt in ((4, longest), (8, (short + longest) // 2), (16, longest // 2)):
        if at_once <= settings.max_running_requests and at_once * (prompt + output) <= room:
            shapes.append(Shape(at_once, prompt, output, users=True))
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
    generate: Generate,
    metrics: str,
    shape: Shape,
    settings: Settings,
    dice: Random,
    seconds: float,
) -> Load:
    before = settled(metrics)
    begin = time.monotonic()
    requests: list[Timed] = []

    async def ask(prompt: int, output: int) -> None:
        tokens = dice.choices(range(settings.vocabulary), k=prompt)
        requests.append(await _ask(generate, tokens, output, shape.arm))

    async def wave() -> None:
        await asyncio.gather(*(ask(shape.prompt, shape.output) for _ in range(shape.at_once)))

    async def user() -> None:
        for asked in count():
            if asked >= _LEAST_TURNS and time.monotonic() - begin >= seconds:
                break
            await ask(dice.randint(1, shape.prompt), dice.randint(1, shape.output))

    if shape.users:
        await asyncio.gather(*(user() for _ in range(shape.at_once)))
    else:
        while not requests or time.monotonic() - begin < seconds:
            await wave()
    took = time.monotonic() - begin
    return Load(shape, requests, settled(metrics) - before, took)


def settled(metrics: str) -> Page:
    """The page once no request runs: a step is counted after its tokens are told."""
    while scrape(metrics).total("epikv_requests_running") > 0:
        time.sleep(_POLL_SECONDS)
    return scrape(metrics)


async def _ask(generate: Generate, prompt: list[int], output: int, arm: Arm) -> Timed:
    request = generation_pb2.GenerateRequest(
        token_ids=generation_pb2.TokenIds(ids=prompt),
        kv=Kv(arm.policy, arm.budget).to_proto(),
        sampling=GREEDY.to_proto(),
        stop=Stop(output, ignore_eos=True).to_proto(),
        output=Output(text=False, token_ids=True).to_proto(),
    )
    begin, first, message = time.monotonic(), 0.0, None
    async for message in generate(request):
        if not first and message.HasField("delta"):
            first = time.monotonic()
    end = time.monotonic()
    assert message is not None and message.HasField("summary")
    told = message.summary.timings
    prefill, decode = (of.ToNanoseconds() / 1e9 for of in (told.prefill, told.decode))
    return Timed(len(prompt), output, first - begin, end - begin, prefill, decode)


def fit(loads: Sequence[Load], settings: Settings, described: Sequence[Described]) -> Costs:
    """Costs by which the loads take about what they took: least squares of relative errors, none below
    0, and a step that is never cheaper for more sequences that decode."""
    alone = [load for load in loads if load.shape.at_once == 1 and load.shape.output > 1]
    gap = _gap(alone)
    plain = [load for load in loads if load.shape.arm.budget is None]
    knots = sorted({load.shape.at_once for load in plain if load.shape.output > 1})
    took = [load.seconds + gap * load.steps for load in plain]
    found = least_squares([_work(load, knots) for load in plain], took)
    alone_step, *found_base = found[: len(knots) + 1]
    base = list(zip([0, *knots], [alone_step, *accumulate(found_base)], strict=True))
    mixed, prefill, pair, attended, request = found[len(knots) + 1 :]
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
    costs = Costs(
        settings=settings,
        base=tuple(base),
        mixed=mixed,
        prefill=prefill,
        pair=pair,
        attended=attended,
        request=request,
        before_first=max(median(r.first - r.prefill for r in requests), 0.0),
        before_end=max(median(r.end - r.prefill - r.decode for r in requests), 0.0),
        policies=policies,
    )
    fitted = [fitted_seconds(costs, load) for load in plain]
    return replace(
        costs,
        error=median(abs(had / seconds - 1) for had, seconds in zip(fitted, took, strict=True)),
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
    """What the costs are of: steps in which none decodes, in which one does, in which more do up to each
    knot; mixed steps; prompt tokens, their pairs, attended tokens, requests."""
    mixed = load.steps_of("mixed")
    busy = load.steps_of("decode") + mixed
    decoding = load.decode_tokens / max(busy, 1)
    steps = [load.steps_of("prefill"), busy]
    for left, right in pairwise(knots):
        steps.append(busy * min(max((decoding - left) / (right - left), 0.0), 1.0))
    pairs = sum(r.prompt * (r.prompt + 1) / 2 for r in load.requests)
    attended = sum(_attended(r, load.shape.arm) for r in load.requests)
    return [*steps, mixed, load.prefill_tokens, pairs, attended, float(len(load.requests))]


def _attended(request: Timed, arm: Arm) -> float:
    """Cached tokens, by all decoding steps of a request."""
    steps = request.output - 1
    budget = arm.budget_of(request.prompt, request.output)
    if budget is None:
        budget = request.prompt + steps  # which it does not reach
    growing = min(max(budget - request.prompt, 0), steps)
    return growing * (request.prompt + (growing - 1) / 2) + (steps - growing) * budget


def fitted_seconds(costs: Costs, load: Load) -> float:
    """Of the very steps that it took, by these costs."""
    knots = [sequences for sequences, _ in costs.base[1:]]
    base = [seconds for _, seconds in costs.base]
    steps = base[:2] + [right - left for left, right in pairwise(base[1:])]
    each = [*steps, costs.mixed, costs.prefill, costs.pair, costs.attended, costs.request]
    seconds = sum(cost * amount for cost, amount in zip(each, _work(load, knots), strict=True))
    if load.shape.arm.budget is None:
        return seconds
    policy = costs.policies[load.shape.arm.policy]
    seconds += load.decode_tokens * policy.decode_seconds
    return seconds + load.prefill_tokens * policy.prefill_seconds


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

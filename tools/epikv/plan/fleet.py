"""A fleet in a simulation: arrivals, a router and replicas, event by event."""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from random import Random
from typing import Protocol

from epikv.plan.costs import TICKS, Costs, ticks
from epikv.plan.replica import Arm, Call, Model, Replica
from epikv.plan.routing import ROUTINGS


class Arrivals(Protocol):
    """Calls by time. One that ends may bring about another."""

    @property
    def due(self) -> int | None:
        """When the next call comes, in ticks; None: none is known."""

    def take(self) -> Call:
        """It."""

    def ended(self, call: Call, at: int) -> None:
        """Its answer is with the client, `at` ticks."""


class Open:
    """At their times, whatever has become of earlier ones; until `seconds`."""

    def __init__(self, calls: Iterator[Call], seconds: float) -> None:
        self._calls, self._end = calls, ticks(seconds)
        self._next = next(calls, None)

    @property
    def due(self) -> int | None:
        return self._next.at if self._next is not None and self._next.at < self._end else None

    def take(self) -> Call:
        call = self._next
        assert call is not None
        self._next = next(self._calls, None)
        return call

    def ended(self, call: Call, at: int) -> None: ...


class Closed:
    """So many users at once, each of whom asks again as soon as he has his answer; until `seconds`."""

    def __init__(self, calls: Iterator[Call], users: int, seconds: float) -> None:
        self._calls, self._end = calls, ticks(seconds)
        self._due: list[tuple[int, int, Call]] = []
        for user in range(users):
            self._ask(user, 0)

    @property
    def due(self) -> int | None:
        return self._due[0][0] if self._due else None

    def take(self) -> Call:
        return heappop(self._due)[2]

    def ended(self, call: Call, at: int) -> None:
        self._ask(call.user, at)

    def _ask(self, user: int, at: int) -> None:
        call = next(self._calls, None) if at < self._end else None
        if call is not None:
            call.at, call.user = at, user
            heappush(self._due, (at, user, call))


@dataclass
class Result:
    """Of the requests that came in the window, latencies in seconds; tokens and answers that came in it."""

    seconds: float  # of the window
    first_token: "array[float]" = field(default_factory=lambda: array("d"))
    end_to_end: "array[float]" = field(default_factory=lambda: array("d"))
    refused: int = 0
    answers: int = 0
    output_tokens: int = 0
    hit_tokens: int = 0  # from cached prefixes, of the whole run
    prompt_tokens: int = 0  # of the whole run
    busy: float = 0  # share of the replicas' time, of the whole run
    step_seconds: float = 0  # of all replicas, of the whole run
    decode_tokens: int = 0  # of the whole run

    @property
    def requests(self) -> int:
        return len(self.end_to_end) + self.refused

    @property
    def output_tokens_per_second(self) -> float:
        return self.output_tokens / self.seconds

    def late(self, end: float | None, first: float | None) -> float:
        """The share of requests that were refused, or that miss one of these."""
        missed = sum(
            (end is not None and whole > end) or (first is not None and begun > first)
            for whole, begun in zip(self.end_to_end, self.first_token, strict=True)
        )
        return (missed + self.refused) / max(self.requests, 1)


def quantile(values: "array[float]", share: float) -> float:
    """Linear between the closest ranks."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass(frozen=True)
class Window:
    """Seconds of a run that count."""

    begin: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.begin


def simulate(
    costs: Costs,
    arms: list[Arm],
    arrivals: Arrivals,
    window: Window,
    *,
    replicas: int,
    routing: str,
    seed: int = 0,
) -> Result:
    """Ends when all that came has ended. What is kept are two numbers a request."""
    model = Model(costs, arms)
    router = ROUTINGS[routing](replicas, seed)
    begin, end = ticks(window.begin), ticks(window.end)
    before_first, before_end = ticks(costs.before_first), ticks(costs.before_end)
    result = Result(window.seconds)
    events: list[tuple[int, int]] = []  # when the steps of a replica end
    now = 0

    def listener(number: int) -> Replica:
        def ended(call: Call, first: int, at: int) -> None:
            router.ended(number)
            told = at + before_end
            arrivals.ended(call, told)
            if begin <= call.at < end:
                result.first_token.append((first + before_first - call.at) / TICKS)
                result.end_to_end.append((told - call.at) / TICKS)
            if begin <= told < end:
                result.answers += 1
            # The tokens come evenly between the first and the last.
            result.output_tokens += _between(first + before_first, told, call.output, begin, end)

        offset = Random(f"pace/{seed}/{number}").randrange(
            max(len(costs.paces) * model.pace_ticks, 1)
        )
        return Replica(model, ended, offset)

    fleet = [listener(number) for number in range(replicas)]
    expected = [-1] * replicas

    def expect(number: int) -> None:
        at = fleet[number].end
        if at is not None and at != expected[number]:
            expected[number] = at
            heappush(events, (at, number))

    while events or arrivals.due is not None:
        came = arrivals.due
        if events and (came is None or events[0][0] <= came):
            now, number = heappop(events)
            if fleet[number].end == now:  # or its steps were cut short
                fleet[number].advance()
                expect(number)
            continue
        call = arrivals.take()
        now = call.at
        number = router.pick(call)
        result.prompt_tokens += call.prompt
        if fleet[number].submit(call):
            expect(number)
        else:
            router.ended(number)
            arrivals.ended(call, now)
            result.refused += begin <= now < end
    result.hit_tokens = sum(replica.hit_tokens for replica in fleet)
    busy = sum(replica.busy for replica in fleet)
    result.busy = busy / max(now * replicas, 1)
    result.step_seconds = busy / TICKS
    result.decode_tokens = sum(replica.decode_tokens for replica in fleet)
    return result


def _between(first: int, last: int, tokens: int, begin: int, end: int) -> int:
    """Of so many tokens that come evenly from `first` to `last`, those in [begin, end)."""
    if tokens == 1 or last == first:
        return tokens if begin <= last < end else 0
    gap = (last - first) / (tokens - 1)
    low = max(-(-(begin - first) // gap), 0)
    high = min(-(-(end - first) // gap), tokens)
    return max(int(high - low), 0)

"""Requests over gRPC, at given times or a given number at once, and what became of each.

One asyncio loop: a streamed token costs it 10 to 13 us of CPU time, where a thread a stream costs
27 to 30 us. At 67,000 tokens a second it takes three quarters of a core, and two processes of it
read no more from the same daemon.

Latencies count from the moment at which a request was to arrive, not from the one at which it was
sent: a generator or a server that falls behind cannot hide the requests it delays.
"""

import asyncio
import itertools
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

import click
import grpc

from epikv.bench.workload import Workload
from epikv.connection import Tls, bearer, connect_async, token_from_environment
from epikv.errors import RpcError
from epikv.prefix import prefix_metadata
from epikv.v1 import (
    experiment_pb2,
    experiment_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
)

UNFINISHED = "UNFINISHED"  # the generator was told to end first
NO_ARM = "none"
KEPT = "KEPT"
PUSHBACK = "grpc-retry-pushback-ms"

# Ends that need no server.
_OURS = (UNFINISHED, grpc.StatusCode.DEADLINE_EXCEEDED.name, grpc.StatusCode.CANCELLED.name)
# Refused at the door, or accepted and dropped from the queue.
_INFEASIBLE = f"{grpc.StatusCode.DEADLINE_EXCEEDED.name}/DEADLINE_INFEASIBLE"

# An outcome's request may have been another replica's, whose record of it is on its way.
_OUTCOME_TRIES = 8

_AFTER_ERROR_SECONDS = 0.05  # a closed loop's pause where the server gives no delay


@dataclass
class Sample:
    """One request. Times in seconds since the load began."""

    arm: int
    scheduled: float
    sent: float
    attempt: int = 1  # 2: sent again after the delay that the server asked for
    # Those that brought tokens: when, and how many.
    messages: list[tuple[float, int]] = field(default_factory=list)
    accepted: bool = False
    ended: float = 0
    error: str = ""  # CODE or CODE/REASON; empty: it succeeded
    queue: float | None = None  # seconds, as the server tells them
    # The same, since the request has come: until its first token, and until its last.
    told_first_token: float | None = None
    told_end: float | None = None
    retry_delay: float | None = None  # seconds that a refusal asked to wait
    # Refused without a delay, since no wait would help: alone it runs longer than it had left.
    hopeless: bool = False
    experiment_arm: str = NO_ARM  # "experiment/arm", as the server tells it
    right: bool | None = None  # None: nobody knows
    outcome: str = ""  # of what was recorded: KEPT, CODE or CODE/REASON; empty: nothing was

    @property
    def ok(self) -> bool:
        return not self.error

    @property
    def refused(self) -> bool:
        """Whether the server would not run it; not, that its time ran out on the way."""
        return self.error == _INFEASIBLE or (not self.accepted and self.error not in ("", *_OURS))

    @property
    def tokens(self) -> int:
        return sum(tokens for _, tokens in self.messages)

    @property
    def first_token(self) -> float | None:
        """Seconds from its arrival to its first token, if it had one."""
        return self.messages[0][0] - self.scheduled if self.messages else None

    @property
    def end_to_end(self) -> float:
        return self.ended - self.scheduled


@dataclass(frozen=True)
class Load:
    """What a generator did."""

    samples: list[Sample]
    begin: float  # by the monotonic clock
    seconds: float  # from then until the last request ended
    cpu_seconds: float  # of this process meanwhile
    interrupted: bool


class Pattern(Protocol):
    """When requests are sent."""

    async def drive(self, generator: "Generator") -> None: ...


@dataclass
class OpenLoop:
    """At these times, whatever has become of earlier requests. A share of those that are refused
    with a delay is sent again after it, once, where that is before `seconds`."""

    arrivals: Iterable[float]
    seconds: float
    retry_share: float = 0
    # Retries that are due after `seconds`: number of the request, and time of the monotonic clock.
    due: list[tuple[int, float]] = field(default_factory=list, init=False)

    async def drive(self, generator: "Generator") -> None:
        async with asyncio.TaskGroup() as tasks:
            for number, at in enumerate(self.arrivals):
                await asyncio.sleep(max(at - generator.now(), 0))
                tasks.create_task(self._send(generator, number, at))

    async def _send(self, generator: "Generator", number: int, at: float) -> None:
        sample = await generator.send(number, at)
        if sample.retry_delay is None:
            return
        again = sample.ended + sample.retry_delay
        chosen = Random(f"retry/{number}").random() < self.retry_share
        if chosen and again < self.seconds:
            await asyncio.sleep(max(again - generator.now(), 0))
            await generator.send(number, again, attempt=2)
        elif chosen:
            self.due.append((number, generator.begin + again))


@dataclass(frozen=True)
class Retries:
    """Those that an open loop has left."""

    due: Iterable[tuple[int, float]]

    async def drive(self, generator: "Generator") -> None:
        async with asyncio.TaskGroup() as tasks:
            for number, at in sorted(self.due, key=lambda retry: retry[1]):
                scheduled = at - generator.begin
                await asyncio.sleep(max(scheduled - generator.now(), 0))
                tasks.create_task(generator.send(number, scheduled, attempt=2))


@dataclass(frozen=True)
class ClosedLoop:
    """This many at once: each one's end begins the next, until `seconds` are over or there were so
    many `requests`. After a refusal it waits for as long as the server asks."""

    concurrency: int
    seconds: float
    requests: int | None = None

    async def drive(self, generator: "Generator") -> None:
        numbers = iter(itertools.count() if self.requests is None else range(self.requests))
        async with asyncio.TaskGroup() as tasks:
            for _ in range(self.concurrency):
                tasks.create_task(self._client(generator, numbers))

    async def _client(self, generator: "Generator", numbers: Iterable[int]) -> None:
        for number in numbers:
            if generator.now() >= self.seconds:
                return
            sample = await generator.send(number, generator.now())
            if sample.error:
                delay = sample.retry_delay or _AFTER_ERROR_SECONDS
                await asyncio.sleep(min(delay, max(self.seconds - generator.now(), 0)))


@dataclass
class Generator:
    """Sends a workload to a daemon, with the token and TLS of the environment. `deadline` seconds
    after its arrival a request is given up. Of those that take part in an experiment it records, as
    the metric `outcome`, whether the answer was right."""

    server: str
    workload: Workload
    deadline: float | None = None
    connections: int = 1
    outcome: str = ""
    begin: float = field(default=0, init=False)  # of its load, by the monotonic clock

    def run(self, pattern: Pattern) -> Load:
        """Ends when every request has; SIGINT ends those that have not. Raises what a problem's judge
        raises."""
        self._samples: list[Sample] = []
        self.begin, cpu = time.monotonic(), time.process_time()
        try:
            interrupted = asyncio.run(self._run(pattern))
        except ExceptionGroup as group:  # of tasks
            if (told := group.subgroup(click.ClickException)) is not None:
                raise told.exceptions[0] from None
            raise
        return Load(self._samples, self.begin, self.now(), time.process_time() - cpu, interrupted)

    def now(self) -> float:
        return time.monotonic() - self.begin

    async def _run(self, pattern: Pattern) -> bool:
        options = [
            ("grpc.max_receive_message_length", -1),
            ("grpc.enable_retries", 0),  # what the server answers is what is counted
            ("grpc.use_local_subchannel_pool", 1),  # or all would be one connection
        ]
        tls = Tls.from_environment()
        channels = [connect_async(self.server, options, tls=tls) for _ in range(self.connections)]
        stubs = [generation_pb2_grpc.GenerationServiceStub(channel) for channel in channels]
        self._stubs = itertools.cycle(stubs)
        experiments = [experiment_pb2_grpc.ExperimentServiceStub(channel) for channel in channels]
        self._experiments = itertools.cycle(experiments)
        self._metadata = bearer(token_from_environment())
        try:
            await asyncio.gather(*(channel.channel_ready() for channel in channels))
            self.begin = time.monotonic()
            await pattern.drive(self)
            return False
        except asyncio.CancelledError:
            return True
        finally:
            for channel in channels:
                await channel.close()

    async def send(self, number: int, scheduled: float, attempt: int = 1) -> Sample:
        arm, request = self.workload.request(number)
        request_id = ""
        text: list[str] = []
        sample = Sample(arm, scheduled, sent=self.now(), attempt=attempt)
        timeout = None
        if self.deadline is not None:
            timeout = scheduled + self.deadline - sample.sent  # below 0: it has passed
        try:
            generate = next(self._stubs).Generate
            metadata = (*self._metadata, *prefix_metadata(request))
            async for message in generate(request, timeout=timeout, metadata=metadata):
                event = message.WhichOneof("event")
                sample.accepted = True  # the first event says so
                if event == "delta":
                    text.append(message.delta.text)
                    if message.delta.token_ids:
                        sample.messages.append((self.now(), len(message.delta.token_ids)))
                elif event == "accepted":
                    request_id = message.accepted.request_id
                    sample.experiment_arm = message.accepted.arm or NO_ARM
                elif event == "summary":
                    _take_timings(message.summary.timings, sample)
        except grpc.RpcError as error:
            sample.error, sample.retry_delay = _refusal(error)
            sample.hopeless = sample.retry_delay is None and _too_late(error)
        except asyncio.CancelledError:
            sample.error = UNFINISHED
            raise
        finally:
            sample.ended = self.now()
            self._samples.append(sample)
        if sample.ok:
            sample.right = self.workload.judge(number, "".join(text))
        if self.outcome and sample.right is not None and sample.experiment_arm != NO_ARM:
            await self._tell(sample, request_id)
        return sample

    async def _tell(self, sample: Sample, request_id: str) -> None:
        """What its answer was worth, which is known."""
        assert sample.right is not None
        told = experiment_pb2.RecordOutcomeRequest(
            request_id=request_id, metric=self.outcome, value=float(sample.right)
        )
        for _ in range(_OUTCOME_TRIES):
            try:
                await next(self._experiments).RecordOutcome(told, metadata=self._metadata)
                sample.outcome = KEPT
                return
            except grpc.RpcError as error:
                sample.outcome, delay = _refusal(error)
            if delay is None:
                return
            await asyncio.sleep(delay)


def _too_late(error: grpc.RpcError) -> bool:
    """Whether the server tells that the request alone takes longer than it has."""
    told = RpcError.from_grpc(error).metadata
    return "run_seconds" in told and float(told["seconds_left"]) <= float(told["run_seconds"])


def _take_timings(timings: generation_pb2.Timings, sample: Sample) -> None:
    queue, first, decode = (
        of.ToNanoseconds() / 1e9
        for of in (timings.queue, timings.time_to_first_token, timings.decode)
    )
    sample.queue, sample.told_first_token, sample.told_end = queue, first, first + decode


def _refusal(error: grpc.RpcError) -> tuple[str, float | None]:
    """CODE/REASON, and the seconds to wait before another try."""
    told = RpcError.from_grpc(error)
    name = told.code.name
    if told.reason not in ("", name):
        name += f"/{told.reason}"
    if told.retry_delay is not None:
        return name, told.retry_delay
    for key, value in error.trailing_metadata() or ():
        if key == PUSHBACK and value.isdecimal():  # else, as of -1: do not try again
            return name, int(value) / 1e3
    return name, None

"""Clients that leave the real daemon, in every state of a request and in every way.

Whatever they do, their KV is free, the end is counted as what it was, a stream beside them says
what it says alone, and so does the next request.
"""

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from time import monotonic
from typing import Self

import grpc
import pytest
from epikv import Accepted, Client, Delta, Event, Kv, Output, RpcError, Stop, Stream, Summary
from epikv.sample import problem
from epikv.scrape import scrape
from epikv.testing import PACED, Daemon
from epikv.v1 import generation_pb2, generation_pb2_grpc
from relay import Relay

CROWD = 60  # clients that leave together: 18 times, 1,080 in all, 180 in each state
GENEROUS_SECONDS = 60
TASK = problem(9)

# Deterministic, so that a stream's text does not depend on who else is there. Nothing but the
# clients ends a stream: its stall limit and the drain's are far away.
FLAGS = [
    "--threads=1",
    "--deterministic=true",
    "--kv_pool_bytes=400000000",
    "--prefill_chunk_tokens=16",
    "--prefix_cache_share=0",  # a crowd of one prompt, which prefills all the same
    f"--max_step_tokens={16 * (CROWD + 1)}",  # a chunk of everyone's
    "--outbox_messages=8",
    "--stream_stall_seconds=600",
    "--drain_seconds=600",
    "--refuse_infeasible_deadlines=false",  # they pass in the state that the request is in
]
PROMPT = " ".join(TASK.prompt.split(" ")[:60])  # of as many tokens; the model goes on for long
WHOLE = (Kv("full"),)
EVICTING = tuple(Kv(name, 76) for name in ("epikv_flat", "sliding", "h2o", "random"))


class Watch:
    """What a daemon's metrics say, now and since the watch was set."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._start = self._last = self._now = scrape(daemon.metrics)

    def look(self) -> Self:
        self._last, self._now = self._now, scrape(self._daemon.metrics)
        return self

    def until(self, condition: Callable[[Self], bool]) -> None:
        """Looks until it holds; fails when that takes too long."""
        deadline = monotonic() + GENEROUS_SECONDS
        while not condition(self.look()):
            assert monotonic() < deadline, f"{self.held()} bytes held; ended: {self.ends()}"

    def now(self, name: str, **labels: str) -> float:
        return self._now.total(name, **labels)

    def added(self, name: str) -> float:
        """Since the start, whatever the labels."""
        added = (self._now - self._start).values.items()
        return sum(value for (series, _), value in added if series == name)

    def added_lately(self, name: str) -> float:
        """Between the last two looks."""
        return (self._now - self._last).value(name)

    def ends(self) -> Counter[str]:
        """The requests that have ended since the start, by reason."""
        ends: Counter[str] = Counter()
        for (series, labels), value in (self._now - self._start).values.items():
            if series == "epikv_requests_finished_total":
                ends[dict(labels)["reason"]] += int(value)
        return +ends

    def held(self) -> float:
        """Bytes of the pool that are used, reserved or kept as a prefix."""
        states = ("used", "reserved", "cached_prefix")
        return sum(self.now("epikv_kv_bytes", state=state) for state in states)


@dataclass(frozen=True)
class State:
    """Where a request is when its client leaves, and how that shows."""

    entered: Callable[[Watch], bool]  # whether all of the crowd are in it
    first: str = "accepted"  # the event that each client has read by then
    prompt: str = PROMPT
    kv: tuple[Kv, ...] = WHOLE  # the clients take turns
    flags: tuple[str, ...] = ()
    paced: bool = False  # clients receive no more than they read, which is nothing
    holds_kv: bool = True
    has_tokens: bool = True
    draining: bool = False


def all_run(watch: Watch) -> bool:
    """Beside a neighbour."""
    return watch.now("epikv_requests_running") == CROWD + 1


def all_wait(watch: Watch) -> bool:
    """For the only place, which the neighbour holds."""
    return watch.now("epikv_requests_waiting", reason="running") == CROWD


def all_have_chunks(watch: Watch) -> bool:
    """Of their prompts: the latest steps ran them all."""
    steps, sequences = latest_steps(watch)
    return all_run(watch) and sequences >= steps * CROWD > 0


def all_are_paused(watch: Watch) -> bool:
    """The latest steps ran the neighbour alone, which is read."""
    steps, sequences = latest_steps(watch)
    return all_run(watch) and sequences == steps > 0


def latest_steps(watch: Watch) -> tuple[float, float]:
    """Between the last two looks: how many there were, and the sum of their sequences."""
    series = "epikv_step_batch_sequences"
    return watch.added_lately(f"{series}_count"), watch.added_lately(f"{series}_sum")


def all_run_on(watch: Watch) -> bool:
    """While the daemon stops."""
    return all_run(watch) and watch.now("epikv_drain_state") == 1


STATES = {
    "queued": State(
        all_wait, flags=("--max_running_requests=1",), holds_kv=False, has_tokens=False
    ),
    "prefilling": State(all_have_chunks, prompt=TASK.prompt * 8, has_tokens=False),
    "decoding": State(all_run, first="delta"),
    "evicting": State(all_run, first="eviction", kv=EVICTING),
    "outbox_full": State(all_are_paused, kv=EVICTING, paced=True),
    "draining": State(all_run_on, first="delta", kv=WHOLE + EVICTING, draining=True),
}
CODES = {
    "cancel": grpc.StatusCode.CANCELLED,
    "disconnect": grpc.StatusCode.UNAVAILABLE,
    "deadline": grpc.StatusCode.DEADLINE_EXCEEDED,
}
# How they are counted.
REASONS = {"cancel": {"cancelled"}, "disconnect": {"cancelled"}, "deadline": {"deadline"}}


class Crowd:
    """Clients that ask for the same, on one connection."""

    def __init__(self, daemon: Daemon, state: State, deadline: float | None) -> None:
        """`deadline`, in seconds, is the server's alone: the clients' library knows of none."""
        self._relay = Relay(daemon.grpc)
        self._channel = grpc.insecure_channel(self._relay.address, PACED if state.paced else [])
        self._generation = generation_pb2_grpc.GenerationServiceStub(self._channel)
        told = [("grpc-timeout", f"{deadline * 1000:.0f}m")] if deadline else []
        self._calls = [
            self._generation.Generate(request_of(state, i), metadata=told) for i in range(CROWD)
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()
        self._relay.cut()

    def read_until(self, event: str) -> bool:
        """Each until its first event of this kind. False: its deadline came before."""
        try:
            for call in self._calls:
                while next(call).WhichOneof("event") != event:
                    pass
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                raise
            return False
        return True

    def leave(self, way: str, other: Client) -> None:
        """Half of those who cancel ask for it on the connection of `other`."""
        if way == "disconnect":
            self._relay.cut()
        elif way == "cancel":
            for i, call in enumerate(self._calls):
                other.cancel(str(i)) if i % 2 else call.cancel()

    def codes(self) -> Counter[grpc.StatusCode]:
        """How the calls ended, each read to its end."""
        codes: Counter[grpc.StatusCode] = Counter()
        for call in self._calls:
            with suppress(grpc.RpcError):
                for _ in call:
                    pass
            codes[call.code()] += 1
        return codes


def request_of(state: State, i: int) -> generation_pb2.GenerateRequest:
    return generation_pb2.GenerateRequest(
        request_id=str(i),
        text=state.prompt,
        kv=state.kv[i % len(state.kv)].to_proto(),
        output=Output(kv_trace=True).to_proto(),
    )


def start_neighbour(client: Client) -> Stream:
    """With a paced client it goes on only while it is read: its evictions soon fill its outbox."""
    return client.generate(
        TASK.prompt,
        kv=Kv("epikv_flat", 130),
        stop=Stop(max_output_tokens=200),
        output=Output(kv_trace=True),
    )


def text_alone(daemon: Daemon) -> str:
    """What the neighbour says when nobody else is there."""
    with daemon.client() as client, start_neighbour(client) as stream:
        return text_of(list(stream))


def text_of(events: list[Event]) -> str:
    assert isinstance(events[-1], Summary)
    return "".join(event.text for event in events if isinstance(event, Delta))


def expect_empty(watch: Watch) -> None:
    """No requests, and the pool is whole."""
    watch.until(lambda w: w.now("epikv_requests_running") == w.held() == 0)
    for reason in ("kv", "running"):
        assert watch.now("epikv_requests_waiting", reason=reason) == 0
    free = watch.now("epikv_kv_bytes", state="free")
    assert free == watch.now("epikv_kv_capacity_bytes") > 0


@dataclass
class Scene:
    """A daemon with one stream that runs all the while, the neighbour, and a crowd that leaves."""

    daemon: Daemon
    state: State
    way: str
    client: Client  # paced; the neighbour's
    alone: str  # what the neighbour says when nobody else is there

    def play(self, deadline: float) -> bool:
        """False: the crowd left too early or too late to be in the state."""
        neighbour = start_neighbour(self.client)
        heard = list(islice(neighbour, 2))  # accepted, a token: its prefill is over
        watch = Watch(self.daemon)
        with Crowd(self.daemon, self.state, deadline if self.way == "deadline" else None) as crowd:
            in_time = self._enter(crowd, watch, neighbour, heard)
            crowd.leave(self.way, self.client)
            if in_time:
                watch.until(lambda w: w.ends().total() == CROWD)
                in_time = self._left_in_state(watch)
            if in_time:
                assert set(watch.ends()) <= REASONS[self.way]
                assert crowd.codes() == {CODES[self.way]: CROWD}
        reserved = heard[0].kv.reserved_bytes
        watch.until(lambda w: w.now("epikv_requests_running") == 1 and 0 < w.held() <= reserved)
        rest = list(neighbour)
        assert len(rest) > 1  # it was still running
        assert text_of(heard + rest) == self.alone
        self._expect_whole(watch)
        return in_time

    def _enter(self, crowd: Crowd, watch: Watch, neighbour: Stream, heard: list[Event]) -> bool:
        """Until the crowd is in the state, while the neighbour goes on. False: it never was."""
        if not crowd.read_until(self.state.first):
            return False
        if self.state.draining:
            self.daemon.terminate()
        while not self.state.entered(watch.look()):
            if watch.ends():
                return False
            event = next(neighbour, None)
            assert event is not None, "the state is never reached"
            heard.append(event)
        heard += islice(neighbour, 4)
        return not watch.ends()

    def _left_in_state(self, watch: Watch) -> bool:
        """By what the daemon counted of those who left; the neighbour has not ended."""
        held = watch.added("epikv_request_kv_peak_tokens_count")
        began = watch.added("gen_ai_server_time_to_first_token_seconds_count")
        state = self.state
        return held == CROWD * state.holds_kv and began == CROWD * state.has_tokens

    def _expect_whole(self, watch: Watch) -> None:
        """Nothing is left of anyone, and the next request is as good as the first."""
        if self.state.draining:
            assert self.daemon.stop() == 0
            return
        assert text_alone(self.daemon) == self.alone
        expect_empty(watch)


@pytest.mark.parametrize("way", CODES)
@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
def test_nothing_is_left_of_clients_that_leave(sample_model: Path, state: State, way: str) -> None:
    deadline, in_time = 1.0, False
    while not in_time:
        assert deadline < GENEROUS_SECONDS, "the state is never reached in time"
        with Daemon(sample_model, *FLAGS, *state.flags) as daemon:
            with Client(daemon.grpc, PACED) as client:
                in_time = Scene(daemon, state, way, client, text_alone(daemon)).play(deadline)
        deadline *= 1.5  # a busy machine


def test_a_cancel_waits_for_no_more_than_one_step(sample_model: Path) -> None:
    """The one that runs. Seen from outside while steps go on, so the best of many tries counts; those
    of a crowd's prompts take much longer than a look."""

    def steps_until_end(watch: Watch, client: Client, i: int) -> float:
        ended = watch.look().ends().total()
        steps = watch.added("epikv_step_seconds_count")
        client.cancel(str(i))
        watch.until(lambda w: w.ends().total() > ended)
        return watch.added("epikv_step_seconds_count") - steps

    with Daemon(sample_model, *FLAGS) as daemon, daemon.client() as client:
        watch = Watch(daemon)
        state = STATES["prefilling"]
        with Crowd(daemon, state, None) as crowd:
            assert crowd.read_until(state.first)
            watch.until(lambda w: w.now("epikv_requests_running") == CROWD)
            assert any(steps_until_end(watch, client, i) <= 1 for i in range(CROWD))
        expect_empty(watch)


def test_a_stream_that_stops_reading_is_cancelled(sample_model: Path) -> None:
    """It loses its KV after the limit, by its reason; until then its neighbour goes on."""
    limit, begin, completions = 2, monotonic(), 0
    flags = [*FLAGS, f"--stream_stall_seconds={limit}"]
    with Daemon(sample_model, *flags) as daemon, Client(daemon.grpc, PACED) as client:
        alone = text_alone(daemon)
        watch = Watch(daemon)
        stalled = start_neighbour(client)
        next(stalled)
        while not watch.look().ends()["slow_reader"]:
            assert text_alone(daemon) == alone
            completions += 1
            assert monotonic() - begin < GENEROUS_SECONDS
        assert completions > 1 and monotonic() - begin > limit
        assert watch.ends() == {"length": completions, "slow_reader": 1}
        expect_empty(watch)
        with pytest.raises(RpcError) as caught:
            list(stalled)
        # After twice the limit the stream is cut, and the client hears of that alone.
        cut = caught.value.code is grpc.StatusCode.CANCELLED
        assert cut or caught.value.reason == "SLOW_READER"


def test_clients_behind_a_dead_network_lose_their_kv(sample_model: Path) -> None:
    """Nothing ends their connection, and they would read if they could: the stall limit ends them.
    Those that have nothing to read are found by keepalive (tests/soak/ends.py)."""
    flags = [
        "--threads=1",
        "--stream_stall_seconds=1",
        "--prefix_cache_share=0",
        "--outbox_bytes=4096",  # a request waits for its reader with nearly all of its text ahead
    ]
    some, short = 8, Stop(max_output_tokens=20)
    unread = Output(top_logprobs=20)  # more than gRPC takes in ahead of its reader
    with (
        Daemon(sample_model, *flags) as daemon,
        Relay(daemon.grpc) as relay,
        Client(relay.address, PACED) as gone,
        daemon.client() as client,
    ):
        watch = Watch(daemon)
        long = Stop(max_output_tokens=900, ignore_eos=True)
        streams = [gone.generate(PROMPT, stop=long, output=unread) for _ in range(some)]
        for stream in streams:
            assert isinstance(next(stream), Accepted)
            assert isinstance(next(stream), Delta)
        relay.freeze()
        watch.until(lambda w: w.ends()["slow_reader"] == some)
        expect_empty(watch)
        assert client.generate_once(PROMPT, stop=short).summary is not None


def test_a_deadline_is_counted_as_one(sample_model: Path) -> None:
    """Also where the client's clock runs out before the server's.

    It does: the server's begins later, and gRPC rounds a timeout up by as much as a hundredth on
    the wire.
    """
    with Daemon(sample_model, *FLAGS) as daemon, daemon.client() as client:
        watch = Watch(daemon)
        timeout, long = 1.232, Stop(max_output_tokens=900, ignore_eos=True)  # 1.24 on the wire
        streams = [
            client.generate(PROMPT, kv=WHOLE[0], stop=long, timeout=timeout) for _ in range(CROWD)
        ]
        for stream in streams:
            with pytest.raises(RpcError) as caught:
                list(stream)
            assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
        watch.until(lambda w: w.ends().total() == CROWD)
        assert watch.ends() == {"deadline": CROWD}

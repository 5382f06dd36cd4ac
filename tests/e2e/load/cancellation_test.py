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
from epikv import Accepted, Client, Delta, Event, Kv, Output, RpcError, Session, Stop, Stream
from epikv.testing import PACED, Daemon
from epikv.v1 import generation_pb2, generation_pb2_grpc
from leaving import (
    CODES,
    CROWD,
    FLAGS,
    GENEROUS_SECONDS,
    PROMPT,
    REASONS,
    TASK,
    Watch,
    all_have_chunks,
    all_run,
    all_wait,
    expect_empty,
    latest_steps,
    start_neighbour,
    text_alone,
    text_of,
)
from relay import Relay

# CROWD clients leave together three times in each state: 180.
WHOLE = (Kv("full"),)
EVICTING = tuple(Kv(name, 76) for name in ("epikv_flat", "sliding", "h2o", "random"))
TIERED = (
    Kv("h2o", 76, tier_tokens=200, tier_fetch=32, tier_doubt=0.01),
    Kv("sliding", 76, tier_tokens=64, tier_fetch=64, tier_bits=4),
    Kv("h2o", 76, tier_tokens=200, guard=16),
    Kv("sliding", 76, read_tokens=48),
)
TASK_LONG = TASK.prompt * 8
SESSIONS = ("--session_bytes=400000000",)


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
    sessions: bool = False  # of each client one, which chooses the policy
    deadline: float = 1.0  # in seconds: the first that is tried


def all_are_paused(watch: Watch) -> bool:
    """The latest steps ran the neighbour alone, which is read."""
    steps, sequences = latest_steps(watch)
    return all_run(watch) and sequences == steps > 0


def all_run_on(watch: Watch) -> bool:
    """While the daemon stops."""
    return all_run(watch) and watch.now("epikv_drain_state") == 1


STATES = {
    "queued": State(
        all_wait, flags=("--max_running_requests=1",), holds_kv=False, has_tokens=False
    ),
    "prefilling": State(all_have_chunks, prompt=TASK_LONG, has_tokens=False),
    "decoding": State(all_run, first="delta"),
    "evicting": State(all_run, first="eviction", kv=EVICTING),
    "tiered": State(all_run, first="eviction", kv=TIERED, flags=("--kv_tier_bytes=400000000",)),
    "passing": State(all_have_chunks, prompt=TASK_LONG, kv=(Kv("epicache", 76),), has_tokens=False),
    "beginning a session": State(
        all_have_chunks, prompt=TASK_LONG, flags=SESSIONS, has_tokens=False, sessions=True
    ),
    "answering in a session": State(
        all_run,
        prompt=TASK.prompt * 2,
        first="delta",
        flags=SESSIONS,
        sessions=True,
        deadline=4.0,
    ),
    "outbox_full": State(all_are_paused, kv=EVICTING, paced=True),
    "draining": State(all_run_on, first="delta", kv=WHOLE + EVICTING, draining=True),
}


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
    request = generation_pb2.GenerateRequest(
        request_id=str(i), text=state.prompt, output=Output(kv_trace=True).to_proto()
    )
    if state.sessions:
        request.session.CopyFrom(Session(f"of {i}", 76).to_proto())
        request.stop.CopyFrom(Stop(20_000, ignore_eos=True).to_proto())  # it ends by leaving alone
    else:
        request.kv.CopyFrom(state.kv[i % len(state.kv)].to_proto())
    return request


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
        assert watch.now("epikv_sessions") == watch.now("epikv_session_bytes") == 0


@pytest.mark.parametrize("way", CODES)
@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
def test_nothing_is_left_of_clients_that_leave(sample_model: Path, state: State, way: str) -> None:
    deadline, in_time = state.deadline, False
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

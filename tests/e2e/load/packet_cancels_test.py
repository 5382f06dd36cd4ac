"""Clients that leave the real daemon while packets stand before their prompts, or are made for them:
1,080 of them, and as many as are still without an answer while packets are written.

Whatever they do, their KV is free, no room for a packet that never came is held, no file is left that
has no name, a stream beside them says what it says alone, and so does the next request.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Self

import grpc
import pytest
from epikv import Client, Event, Packet, RpcError, Stop, Stream
from epikv.testing import PACED, Daemon
from epikv.v1 import generation_pb2, generation_pb2_grpc, packet_pb2, packet_pb2_grpc
from leaving import (
    CODES,
    CROWD,
    FLAGS,
    GENEROUS_SECONDS,
    REASONS,
    TASK,
    Watch,
    all_have_chunks,
    all_run,
    all_wait,
    expect_empty,
    start_neighbour,
    text_alone,
    text_of,
)
from relay import Relay

OK = grpc.StatusCode.OK
ROOM = 120_000_000  # bytes of packets: most of it is taken while a crowd's are to come
DOCUMENT = 150  # tokens of each of two that stand before prompts
LONG = 1200  # of one from which others are made at once; the model's context is 1280
FIRST = 4  # token, of those by which the others differ


def all_prefill(watch: Watch) -> bool:
    """And none of the crowd decodes."""
    steps = watch.added_lately("epikv_step_batch_sequences_count")
    decoded = watch.added_lately("epikv_step_tokens_total", phase="decode")
    return all_have_chunks(watch) and decoded <= steps


def all_decode(watch: Watch) -> bool:
    """Beside the neighbour, in the latest steps."""
    steps = watch.added_lately("epikv_step_batch_sequences_count")
    decoded = watch.added_lately("epikv_step_tokens_total", phase="decode")
    return all_run(watch) and decoded >= steps * CROWD > 0


@dataclass(frozen=True)
class State:
    """Where a request is when its client leaves, and how that shows."""

    entered: Callable[[Watch], bool]  # whether all of the crowd are in it
    creates: bool  # a packet; else two packets stand before its prompt
    prompt: int = 20  # tokens of its own
    output: int = 300
    flags: tuple[str, ...] = ()
    holds_kv: bool = True
    has_tokens: bool = False


ONE_PLACE = ("--max_running_requests=1",)
STATES = {
    f"{what}, {where}": state
    for what, creates in (("named", False), ("made", True))
    for where, state in {
        "queued": State(all_wait, creates, flags=ONE_PLACE, holds_kv=False),
        "prefilling": State(all_prefill, creates, prompt=500, output=20),
        "decoding": State(all_decode, creates, has_tokens=True),
    }.items()
}


class Crowd:
    """Clients that ask for much the same, on one connection."""

    def __init__(
        self,
        daemon: Daemon,
        requests: Sequence[generation_pb2.GenerateRequest],
        *,
        creates: bool,
        deadline: float | None = None,
    ) -> None:
        """`deadline`, in seconds, is the server's alone: the clients' library knows of none."""
        self._relay = Relay(daemon.grpc)
        self._channel = grpc.insecure_channel(self._relay.address)
        told = [("grpc-timeout", f"{deadline * 1000:.0f}m")] if deadline else []
        self._creates = creates
        self._calls: list[Any]
        if creates:
            create = packet_pb2_grpc.PacketServiceStub(self._channel).CreatePacket.future
            messages = [packet_pb2.CreatePacketRequest(request=each) for each in requests]
            self._calls = [create(message, metadata=told) for message in messages]
        else:
            generate = generation_pb2_grpc.GenerationServiceStub(self._channel).Generate
            self._calls = [generate(request, metadata=told) for request in requests]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()
        self._relay.cut()

    def leave(self, way: str, other: Client | None = None) -> None:
        """Half of those who cancel ask for it on the connection of `other`, if there is one."""
        if way == "disconnect":
            self._relay.cut()
        elif way == "cancel":
            for i, call in enumerate(self._calls):
                other.cancel(str(i)) if other is not None and i % 2 else call.cancel()

    def codes(self) -> Counter[grpc.StatusCode]:
        """How the calls ended, each read to its end if it is a stream."""
        codes: Counter[grpc.StatusCode] = Counter()
        for call in self._calls:
            if not self._creates:
                with suppress(grpc.RpcError):
                    for _ in call:
                        pass
            codes[call.code()] += 1
        return codes

    def made(self) -> set[str]:
        """Ids of the packets that its clients were told of."""
        return {call.result().packet.id for call in self._calls if call.code() is OK}


def tokens(client: Client, count: int) -> list[int]:
    """Of a text that goes on for as long as is needed."""
    text = client.tokenize(f"{TASK.prompt} {TASK.trace}")
    return (text * (count // len(text) + 1))[:count]


def request_of(
    i: int, prompt: Sequence[int], packets: Sequence[Packet], output: int
) -> generation_pb2.GenerateRequest:
    return generation_pb2.GenerateRequest(
        request_id=str(i),
        token_ids=generation_pb2.TokenIds(ids=prompt),
        packets=[packet.id for packet in packets],
        stop=Stop(output, ignore_eos=True).to_proto(),
    )


def create(client: Client, prompt: Sequence[int], packets: Sequence[Packet] = ()) -> Packet:
    made = client.create_packet(prompt, packets=[packet.id for packet in packets]).packet
    assert made is not None
    return made


@dataclass
class Scene:
    """A daemon with one stream that runs all the while, the neighbour, and a crowd that leaves."""

    daemon: Daemon
    state: State
    client: Client  # paced; the neighbour's
    documents: list[Packet]
    alone: str  # what the neighbour says when nobody else is there

    def play(self, way: str, deadline: float) -> bool:
        """False: the crowd left too early or too late to be in the state."""
        state = self.state
        neighbour = start_neighbour(self.client)
        heard = list(islice(neighbour, 2))  # accepted, a token: its prefill is over
        watch = Watch(self.daemon)
        prompt = tokens(self.client, state.prompt)
        named = [] if state.creates else self.documents
        crowd = Crowd(
            self.daemon,
            [request_of(i, prompt, named, state.output) for i in range(CROWD)],
            creates=state.creates,
            deadline=deadline if way == "deadline" else None,
        )
        with crowd:
            in_time = self._enter(watch, neighbour, heard)
            crowd.leave(way, self.client)
            if in_time:
                watch.until(lambda w: w.ends().total() == CROWD)
                in_time = self._left_in_state(watch)
            if in_time:
                assert set(watch.ends()) <= REASONS[way]
                assert crowd.codes() == {CODES[way]: CROWD}
        reserved = heard[0].kv.reserved_bytes
        watch.until(lambda w: w.now("epikv_requests_running") == 1 and 0 < w.held() <= reserved)
        rest = list(neighbour)
        assert len(rest) > 1  # it was still running
        assert text_of(heard + rest) == self.alone
        expect_empty(watch)
        expect_room_of_listed(watch, self.client)
        return in_time

    def _enter(self, watch: Watch, neighbour: Stream, heard: list[Event]) -> bool:
        """Until the crowd is in the state, while the neighbour goes on. False: it never was."""
        while not self.state.entered(watch.look()):
            if watch.ends():
                return False
            event = next(neighbour, None)
            assert event is not None, "the state is never reached"
            heard.append(event)
        for_packets = watch.now("epikv_packet_memory_bytes") - sum(d.bytes for d in self.documents)
        assert (for_packets > 0) == self.state.creates, "room is taken before a request runs"
        heard += islice(neighbour, 4)
        return not watch.ends()

    def _left_in_state(self, watch: Watch) -> bool:
        """By what the daemon counted of those who left; the neighbour has not ended."""
        held = watch.added("epikv_request_kv_peak_tokens_count")
        began = watch.added("gen_ai_server_time_to_first_token_seconds_count")
        state = self.state
        return held == CROWD * state.holds_kv and began == CROWD * state.has_tokens


def expect_room_of_listed(watch: Watch, client: Client) -> list[Packet]:
    """Memory holds the packets that there are, and room for none that never came."""
    listed: list[Packet] = []

    def is_so(watch: Watch) -> bool:
        listed[:] = client.packets()
        taken = watch.now("epikv_packet_memory_bytes")
        return taken == sum(packet.bytes for packet in listed)

    watch.until(is_so)
    return listed


def needed(full: RpcError) -> int:
    """Bytes that a packet can take for which there was no room."""
    assert full.reason == "PACKETS_FULL"
    bytes_ = re.search(r"up to (\d+) bytes", full.message)
    assert bytes_ is not None
    return int(bytes_[1])


def expect_whole_room(daemon: Daemon, client: Client) -> None:
    """Packets can take all of it but less than one more would need."""
    long = create(client, tokens(client, LONG))
    with pytest.raises(RpcError) as full:
        for first in range(FIRST, FIRST + 100):
            create(client, [first], [long])
    listed = expect_room_of_listed(Watch(daemon), client)
    taken = sum(packet.bytes for packet in listed)
    assert taken <= ROOM < taken + needed(full.value)
    for packet in listed:
        client.delete_packet(packet.id)
    assert Watch(daemon).now("epikv_packet_memory_bytes") == 0


@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
def test_nothing_is_left_of_clients_that_leave(sample_model: Path, state: State) -> None:
    flags = [*FLAGS, f"--packet_bytes={ROOM}", *state.flags]
    with Daemon(sample_model, *flags) as daemon, Client(daemon.grpc, PACED) as client:
        alone = text_alone(daemon)
        text = tokens(client, 2 * DOCUMENT)
        documents = [create(client, text[:DOCUMENT]), create(client, text[DOCUMENT:])]
        scene = Scene(daemon, state, client, documents, alone)
        for way in CODES:
            deadline = 0.6
            while not scene.play(way, deadline):
                deadline *= 1.5  # a busy machine
                assert deadline < GENEROUS_SECONDS, "the state is never reached in time"
        expect_whole_room(daemon, client)
        assert text_alone(daemon) == alone
        expect_empty(Watch(daemon))


def test_nothing_is_left_of_clients_that_leave_while_packets_are_written(
    sample_model: Path, tmp_path: Path
) -> None:
    """Made of a long one and a token each, so that all are soon computed, and files take their time.
    Memory has room for no more than a crowd's."""
    with Daemon(sample_model, *FLAGS, "--packet_bytes=6000000") as daemon:
        with daemon.client() as client:
            long = create(client, tokens(client, LONG))
            with pytest.raises(RpcError) as full:
                create(client, [FIRST], [long])
    most = needed(full.value)
    room = f"--packet_bytes={long.bytes + CROWD * most + most // 2}"
    flags = [*FLAGS, room, f"--packet_dir={tmp_path}"]
    with Daemon(sample_model, *flags) as daemon, Client(daemon.grpc, PACED) as client:
        alone = text_alone(daemon)
        long = create(client, tokens(client, LONG))

        def crowd() -> Crowd:
            requests = [request_of(i, [FIRST + i], [long], 1) for i in range(CROWD)]
            return Crowd(daemon, requests, creates=True)

        def expect_files(watch: Watch, told: set[str]) -> None:
            """One of each packet that there is; those whose clients left are kept or not."""
            listed = expect_room_of_listed(watch, client)
            assert told | {long.id} <= {packet.id for packet in listed}
            files = {f"{packet.id.removeprefix('sha256:')}.packet" for packet in listed}
            assert {path.name for path in tmp_path.iterdir()} == files
            for packet in listed:
                if packet != long:
                    client.delete_packet(packet.id)
            assert watch.look().now("epikv_packet_memory_bytes") == long.bytes

        for way in ("cancel", "disconnect"):
            unanswered = 0
            while not unanswered:
                neighbour = start_neighbour(client)
                heard = list(islice(neighbour, 2))
                watch = Watch(daemon)
                with crowd() as leaving:
                    watch.until(lambda w: w.ends().total() == CROWD)
                    watch.until(lambda w: any(path.name[0] == "." for path in tmp_path.iterdir()))
                    leaving.leave(way)
                    codes = leaving.codes()
                    told = leaving.made()
                unanswered = codes[CODES[way]]
                assert unanswered + codes[OK] == CROWD
                assert text_of(heard + list(neighbour)) == alone
                expect_empty(watch)
                expect_files(watch, told)
        watch = Watch(daemon)
        with crowd() as staying:
            assert staying.codes() == {OK: CROWD}, "rooms of those that left are free"
            told = staying.made()
        assert len(told) == CROWD
        expect_files(watch, told)
        assert text_alone(daemon) == alone
        expect_empty(Watch(daemon))

"""Three replicas behind Envoy, as deploy/envoy has it: docs/envoy.md says what holds."""

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest
from credentials import authority, new_token, replace, signed
from envoy_proxy import Envoy, with_tls
from epikv import (
    Accepted,
    Admin,
    Chat,
    Client,
    Delta,
    InvalidRequest,
    QueueFull,
    RpcError,
    Stop,
    Summary,
    Tls,
    Unavailable,
)
from epikv.scrape import scrape
from epikv.testing import PACED, Daemon
from epikv.v1 import generation_pb2, generation_pb2_grpc, model_pb2, model_pb2_grpc
from epikv_lab.bench.balancers import envoy_replicas
from raw_http2 import RawHttp2, message_header
from relay import Relay
from shell import free_ports
from waiting import eventually

LIST_MODELS = "/epikv.v1.ModelService/ListModels"
LONG = Stop(1000, min_output_tokens=1000, ignore_eos=True)
SHORT = Stop(2, min_output_tokens=2, ignore_eos=True)
FLAGS = ("--threads=1", "--prefill_chunk_tokens=32", "--keepalive_floor_seconds=1")
# One place, and one to wait; a request that is not read does not go on.
SMALL = ("--max_running_requests=1", "--max_queued_requests=1", "--outbox_messages=8")
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
TOKEN_BYTES = 3080  # of the sample model


class Replica:
    """A daemon that comes back at the same port."""

    def __init__(self, model: Path, *flags: str) -> None:
        port = free_ports("listen")["listen"]
        self._model, self._flags = model, (*FLAGS, f"--listen=127.0.0.1:{port}", *flags)
        self.address = f"127.0.0.1:{port}"
        self.start()

    def start(self) -> None:
        self.daemon = Daemon(self._model, *self._flags).__enter__()

    def calls(self, method: str, **labels: str) -> float:
        """Of GenerationService, that have ended."""
        page = scrape(self.daemon.metrics)
        method = f"GenerationService/{method}"
        return page.total("epikv_grpc_requests_total", method=method, **labels)

    def refused(self) -> float:
        return scrape(self.daemon.metrics).total("epikv_requests_rejected_total")

    def streams(self) -> int:
        return round(scrape(self.daemon.metrics).total("epikv_requests_running"))


class Fleet:
    def __init__(self, model: Path, stack: ExitStack, *flags: str) -> None:
        with ThreadPoolExecutor() as pool:
            made = [pool.submit(Replica, model, *flags) for _ in range(3)]
        self.replicas = [each.result() for each in made]
        stack.callback(lambda: [replica.daemon.kill() for replica in self.replicas])
        self.addresses = [replica.address for replica in self.replicas]

    def asked_by(self, ask: Callable[[], object], method: str = "GenerateOnce") -> list[float]:
        """Of each replica, how many of these calls have ended there."""
        before = [replica.calls(method) for replica in self.replicas]
        ask()
        after = [replica.calls(method) for replica in self.replicas]
        return [now - then for now, then in zip(after, before, strict=True)]


@pytest.fixture(scope="module")
def fleet(sample_model: Path) -> Iterator[Fleet]:
    with ExitStack() as stack:
        yield Fleet(sample_model, stack)


@pytest.fixture(scope="module")
def envoy(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Envoy]:
    with Envoy(tmp_path_factory.mktemp("envoy"), fleet.addresses) as running:
        with Client(running.address) as client:
            running.await_serving(client)
        yield running


@pytest.fixture
def client(envoy: Envoy) -> Iterator[Client]:
    with Client(envoy.address) as connected:
        yield connected


def conversation(number: int, turns: int = 1) -> Chat:
    """Its first turns, of which each adds the same to it."""
    digits = random.Random(number)
    said = [" ".join(str(digits.randrange(10)) for _ in range(30)) for _ in range(2 * turns - 1)]
    return Chat(
        [
            {"role": "assistant" if place % 2 else "user", "content": f"{number} : {content}"}
            for place, content in enumerate(said)
        ]
    )


class Streams:
    """Of one conversation each, until all have ended."""

    def __init__(self, client: Client, count: int) -> None:
        self._pool = ThreadPoolExecutor(count)
        streams = [client.generate(conversation(number), stop=LONG) for number in range(count)]
        self._ends = [self._pool.submit(self._end, stream) for stream in streams]

    @staticmethod
    def _end(stream: Iterator[object]) -> grpc.StatusCode | None:
        """What it failed with; None: it is whole."""
        tokens = 0
        try:
            for event in stream:
                tokens += len(event.token_ids) if isinstance(event, Delta) else 0
                last = event
        except RpcError as error:
            return error.code
        assert isinstance(last, Summary) and last.usage.output_tokens == LONG.max_output_tokens
        return None

    def failures(self) -> list[grpc.StatusCode]:
        with self._pool:
            return [code for end in self._ends if (code := end.result()) is not None]


def running(fleet: Fleet, count: int) -> list[int]:
    """Of each replica, once there are so many."""
    found: list[int] = []

    def are_there() -> bool:
        found[:] = [replica.streams() for replica in fleet.replicas]
        return sum(found) == count

    eventually(are_there, show=lambda: found)
    return found


# Who gets what


def test_turns_of_a_conversation_meet_one_replica(fleet: Fleet, client: Client) -> None:
    used = set()
    for number in range(90):
        # Which replica a prefix goes to hangs on their ports: 12 may all miss one of them.
        if number >= 12 and len(used) == 3:
            break

        def talk(number: int = number) -> None:
            for turns in (1, 2, 3):
                client.generate_once(conversation(number, turns), stop=SHORT)

        asked = fleet.asked_by(talk)
        assert sorted(asked) == [0, 0, 3]
        used.add(asked.index(3))
    assert used == {0, 1, 2}


def hit_rate(ask: Callable[[Chat], object], first: int) -> float:
    """Of 8 conversations in turns, the share of prompt tokens that a cache had."""
    cached = all_of = 0
    for turns in range(1, 6):
        for number in range(first, first + 8):
            usage = ask(conversation(number, turns)).summary.usage
            cached += usage.cached_prompt_tokens
            all_of += usage.prompt_tokens
    return cached / all_of


def test_prefixes_are_found_as_with_one_replica(fleet: Fleet, client: Client) -> None:
    with ExitStack() as stack:
        alone = [stack.enter_context(Client(address)) for address in fleet.addresses]
        dice = random.Random(0)
        one = hit_rate(lambda chat: alone[0].generate_once(chat, stop=SHORT), 100)
        envoys = hit_rate(lambda chat: client.generate_once(chat, stop=SHORT), 200)
        at_random = hit_rate(lambda chat: dice.choice(alone).generate_once(chat, stop=SHORT), 300)
    assert one > 0.5
    assert envoys >= 0.9 * one
    assert at_random < 0.8 * one, (at_random, one)


def test_a_crowd_of_one_prefix_is_shared(fleet: Fleet, client: Client) -> None:
    with ExitStack() as stack:
        for _ in range(9):
            stream = stack.enter_context(client.generate(conversation(50), stop=LONG))
            next(stream)
        assert max(running(fleet, 9)) <= 6
    running(fleet, 0)


def test_calls_without_a_prefix_go_round(fleet: Fleet, envoy: Envoy) -> None:
    """As those of a client that sends none."""

    def ask() -> None:
        with grpc.insecure_channel(envoy.address) as channel:
            call = generation_pb2_grpc.GenerationServiceStub(channel).GenerateOnce
            for _ in range(9):
                call(generation_pb2.GenerateRequest(text="4", stop=SHORT.to_proto()))

    assert fleet.asked_by(ask) == [3, 3, 3]


def test_calls_without_a_prefix_go_by_load_where_replicas_tell_it(
    sample_model: Path, tmp_path: Path
) -> None:
    def soon(text: str) -> str:
        assert "blackout_period: 10s" in text and "weight_update_period: 1s" in text
        return text.replace("blackout_period: 10s", "blackout_period: 0.1s").replace(
            "weight_update_period: 1s", "weight_update_period: 0.1s"
        )

    pool = f"--kv_pool_bytes={1500 * TOKEN_BYTES}"  # of which a long stream has two thirds
    outbox = ("--outbox_messages=8", "--outbox_bytes=1024", "--stream_stall_seconds=600")
    with ExitStack() as stack:
        fleet = Fleet(sample_model, stack, "--load_reports", pool, *outbox)
        envoy = stack.enter_context(Envoy(tmp_path, fleet.addresses, soon))
        envoy.await_serving(stack.enter_context(Client(envoy.address)))
        alone = stack.enter_context(Client(fleet.addresses[0], PACED))
        held = stack.enter_context(alone.generate(conversation(1), stop=LONG))
        next(held)  # and no more: it goes on holding what it has reserved
        channel = stack.enter_context(grpc.insecure_channel(envoy.address))
        call = generation_pb2_grpc.GenerationServiceStub(channel).GenerateOnce

        def ask() -> None:
            for _ in range(30):
                call(generation_pb2.GenerateRequest(text="4", stop=SHORT.to_proto()))

        def goes_by_load() -> bool:
            busy, *others = fleet.asked_by(ask)
            return 2 * busy < min(others)

        eventually(goes_by_load)


# What is refused


def fill(replica: Replica, stack: ExitStack) -> None:
    """With one that runs, and is not read, and one that waits."""
    client = stack.enter_context(Client(replica.address, PACED))
    for _ in range(2):
        stream = stack.enter_context(client.generate(conversation(0), stop=LONG))
        assert isinstance(next(stream), Accepted)
        eventually(lambda: replica.streams() == 1)


def test_who_is_full_is_passed_over_and_clients_are_told_when_all_are(
    sample_model: Path, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        fleet = Fleet(sample_model, stack, *SMALL)
        envoy = stack.enter_context(Envoy(tmp_path, fleet.addresses))
        client = stack.enter_context(Client(envoy.address))
        envoy.await_serving(client)
        for replica in fleet.replicas[:2]:
            fill(replica, stack)
        for number in range(6):
            client.generate_once(conversation(number), stop=SHORT)
        assert fleet.replicas[2].calls("GenerateOnce", code="OK") == 6
        before = [replica.refused() for replica in fleet.replicas]
        assert sum(before) > 0
        fill(fleet.replicas[2], stack)
        with pytest.raises(QueueFull) as refused:
            client.generate_once(conversation(7), stop=SHORT)
        assert refused.value.retry_delay is not None
        after = [replica.refused() for replica in fleet.replicas]
        assert [now - then for now, then in zip(after, before, strict=True)] == [1, 1, 1]
        with grpc.insecure_channel(envoy.address) as channel:
            call = generation_pb2_grpc.GenerationServiceStub(channel).GenerateOnce
            with pytest.raises(grpc.RpcError) as told:
                call(generation_pb2.GenerateRequest(text="4", stop=SHORT.to_proto()))
        assert int(dict(told.value.trailing_metadata())["grpc-retry-pushback-ms"]) > 0


def test_what_may_not_be_tried_again_is_asked_once(fleet: Fleet, client: Client) -> None:
    def ask() -> None:
        with pytest.raises(InvalidRequest):
            client.generate_once(conversation(0), stop=Stop(10**6))

    assert sorted(fleet.asked_by(ask)) == [0, 0, 1]


def test_headers_that_would_end_a_shared_connection_go_no_further(
    client: Client, envoy: Envoy
) -> None:
    """Clients share Envoy's connections to replicas."""
    streams = Streams(client, 6)
    with grpc.insecure_channel(envoy.address) as channel:
        models = model_pb2_grpc.ModelServiceStub(channel)
        for headers in ([("x-long", "v" * 10_000)], [(f"x-{n}", "v") for n in range(80)]):
            with pytest.raises(grpc.RpcError, match="RST_STREAM with error code 2"):
                models.ListModels(model_pb2.ListModelsRequest(), metadata=headers)
        with pytest.raises(grpc.RpcError, match="RST_STREAM with error code 2"):
            channel.unary_unary("/" + "p" * 10_000)(b"")
    with RawHttp2(envoy.address.replace("localhost", "127.0.0.1")) as raw:
        for _ in range(9):  # to each replica; CVE-2023-32732
            stream = raw.call(LIST_MODELS, ("x-bin", "!"))
            raw.send(stream, message_header(0), end=True)
            assert raw.await_status(stream, 10) == "0"
    assert streams.failures() == []


def test_a_client_cannot_change_how_its_calls_are_balanced(client: Client, envoy: Envoy) -> None:
    told = [
        ("x-envoy-upstream-rq-timeout-ms", "1"),
        ("x-envoy-upstream-rq-per-try-timeout-ms", "1"),
    ]
    with grpc.insecure_channel(envoy.address) as channel:
        call = generation_pb2_grpc.GenerationServiceStub(channel).GenerateOnce
        result = call(generation_pb2.GenerateRequest(text="4", stop=LONG.to_proto()), metadata=told)
    assert result.summary.usage.output_tokens == LONG.max_output_tokens


# A replica that goes


def test_a_killed_replica_loses_its_own_streams_alone(
    fleet: Fleet, client: Client, envoy: Envoy
) -> None:
    streams = Streams(client, 12)
    dying = fleet.replicas[0]
    lost = running(fleet, 12)[0]
    dying.daemon.kill()
    for number in range(12):  # what has not begun goes elsewhere, and nobody is told
        client.generate_once(conversation(number), stop=SHORT)
    assert lost > 0 and streams.failures() == [UNAVAILABLE] * lost
    dying.start()
    eventually(lambda: dying.address in envoy.healthy())


def test_a_replica_that_cannot_be_reached_is_passed_over_at_once(
    fleet: Fleet, client: Client, envoy: Envoy
) -> None:
    """With nothing of its that has failed before."""
    gone = fleet.replicas[0]
    gone.daemon.kill()
    for number in range(12):
        client.generate_once(conversation(number), stop=SHORT)
    gone.start()
    eventually(lambda: gone.address in envoy.healthy())


def test_a_replica_that_drains_ends_its_streams_well(
    fleet: Fleet, client: Client, envoy: Envoy
) -> None:
    streams = Streams(client, 12)
    leaving = fleet.replicas[1]
    assert running(fleet, 12)[1] > 0

    def ask() -> None:
        for number in range(12):
            client.generate_once(conversation(number), stop=SHORT)

    with Admin(leaving.daemon.admin) as admin:
        admin.drain()
        ask()  # before Envoy has looked
        eventually(lambda: fleet.asked_by(ask)[1] == 0)
        assert leaving.address not in envoy.healthy()
        assert streams.failures() == []
        admin.resume()
    eventually(lambda: leaving.address in envoy.healthy())


def test_a_slow_replica_gets_no_more_than_its_share_of_what_is_open(
    fleet: Fleet, tmp_path: Path
) -> None:
    """It does not end anything while the others end all they get."""
    everything = 60
    with ExitStack() as stack:
        relay = stack.enter_context(Relay(fleet.addresses[2]))
        envoy = stack.enter_context(Envoy(tmp_path, [*fleet.addresses[:2], relay.address]))
        client = stack.enter_context(Client(envoy.address))
        envoy.await_serving(client)
        pool = stack.enter_context(ThreadPoolExecutor(6))
        stack.callback(relay.release)

        def ask() -> None:
            relay.hold()
            asked = [
                pool.submit(client.generate_once, conversation(number), stop=SHORT)
                for number in range(everything)
            ]
            most = 4  # of six at once: 1.5 times a third, and one
            eventually(lambda: sum(each.done() for each in asked) >= everything - most)
            relay.release()
            for each in asked:
                each.result()

        shares = fleet.asked_by(ask)
    assert sum(shares) == everything and 0 < shares[2] <= 4


def test_a_replica_behind_a_broken_network_loses_its_own_streams_alone(
    fleet: Fleet, tmp_path: Path
) -> None:
    """Nothing passes, and neither end is told."""

    def impatient(text: str) -> str:
        assert text.count("interval: 15s, timeout: 10s") == 1
        return text.replace("interval: 15s, timeout: 10s", "interval: 1s, timeout: 1s")

    with ExitStack() as stack:
        relay = stack.enter_context(Relay(fleet.addresses[2]))
        addresses = [*fleet.addresses[:2], relay.address]
        envoy = stack.enter_context(Envoy(tmp_path, addresses, impatient))
        client = stack.enter_context(Client(envoy.address))
        envoy.await_serving(client)
        streams = Streams(client, 12)
        lost = running(fleet, 12)[2]
        relay.freeze()
        assert lost > 0 and streams.failures() == [UNAVAILABLE] * lost
        eventually(lambda: relay.address not in envoy.healthy())
        for number in range(12):
            client.generate_once(conversation(number), stop=SHORT)


# How it is set up


def test_replicas_may_come_while_it_runs(fleet: Fleet, tmp_path: Path) -> None:
    with Envoy(tmp_path, fleet.addresses[:1]) as envoy, Client(envoy.address) as client:
        envoy.await_serving(client)
        replace(tmp_path / "replicas.yaml", envoy_replicas(fleet.addresses))
        eventually(lambda: envoy.healthy() == {*fleet.addresses}, show=envoy.tell)


def test_with_tls_replicas_show_their_names_and_clients_their_tokens(
    sample_model: Path, tmp_path: Path
) -> None:
    for name in ("ca", "stranger"):
        authority(tmp_path, name)
    signed(tmp_path, "tls", by="ca")
    token, line = new_token("ann", "user")
    (tmp_path / "tokens").write_text(line)
    ca = Tls(ca=tmp_path / "ca.pem")
    flags = [f"--tls_certificate={tmp_path}/tls.pem", f"--tls_key={tmp_path}/tls.key"]
    flags += [f"--auth_tokens_file={tmp_path}/tokens", "--threads=1"]
    with Daemon(sample_model, *flags, token=token, tls=ca) as daemon:
        with (
            Envoy(tmp_path, [daemon.grpc], with_tls) as envoy,
            Client(envoy.address, token=token, tls=ca) as client,
            Client(envoy.address, token="another", tls=ca) as another,
        ):
            envoy.await_serving(client)
            client.generate_once("4", stop=SHORT)
            with pytest.raises(RpcError, match="UNAUTHENTICATED"):
                another.generate_once("4", stop=SHORT)
        for right, wrong in (
            ("filename: ca.pem", "filename: stranger.pem"),
            ("auto_host_sni: true", "sni: elsewhere"),
        ):
            with misled(tmp_path, daemon, right, wrong) as envoy:
                with Client(envoy.address, token=token, tls=ca) as client:
                    eventually(lambda client=client: "no healthy upstream" in refusal(client))
                assert envoy.healthy() == set()


def misled(folder: Path, daemon: Daemon, right: str, wrong: str) -> Envoy:
    def changed(text: str) -> str:
        assert with_tls(text).count(right) == 1
        return with_tls(text).replace(right, wrong)

    return Envoy(folder, [daemon.grpc], changed)


def refusal(client: Client) -> str:
    with pytest.raises(Unavailable) as refused:
        client.models()
    return str(refused.value)

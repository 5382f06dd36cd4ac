"""What clients are told of calls that fail whatever they ask: the server is full, starting or ends, a
deadline passes, somebody cancels, does not read or may not ask. Rows of the table in docs/errors.md."""

import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest
from click.testing import CliRunner
from epikv.cli import main
from epikv.scrape import scrape
from epikv.testing import PACED, Daemon
from epikv.v1 import admin_pb2, experiment_pb2, generation_pb2
from small_daemon import QUEUE
from sound_experiment import outcome
from told import (
    ADMIN,
    EXPERIMENT,
    GENERATION,
    LONGEST,
    Code,
    Told,
    ask,
    generate,
    kv,
    read_error,
    refusal,
)
from waiting import eventually


def hold(channel: grpc.Channel, request_id: str) -> grpc.Call:
    """A stream that is accepted, and stays where it is: nobody reads on, and its outbox is full."""
    request = kv("epikv_flat", 130)
    request.request_id = request_id
    request.output.kv_trace = True
    call = channel.unary_stream(f"/epikv.v1.{GENERATION}/Generate")(request.SerializeToString())
    next(call)
    return call


def set_queue(daemon: Daemon, limits: dict[str, int]) -> None:
    request = admin_pb2.UpdateConfigRequest(config=limits, update_mask={"paths": [*limits]})
    ask(daemon.admin, f"{ADMIN}/UpdateConfig", request)


@pytest.fixture
def busy(small: Daemon) -> Iterator[Daemon]:
    """Its place is taken by the request "runs", and "waits" and two more fill the queue."""
    with grpc.insecure_channel(small.grpc, PACED) as channel:
        calls = [hold(channel, "runs")]
        eventually(lambda: scrape(small.metrics).total("epikv_requests_running") == 1)
        calls += [hold(channel, name) for name in ("waits", "waits, too", "waits as well")]
        eventually(lambda: scrape(small.metrics).total("epikv_requests_waiting") == 3)
        yield small
        set_queue(small, QUEUE)
        for call in calls:
            call.cancel()
        eventually(lambda: scrape(small.metrics).total("epikv_requests_running") == 0)
        eventually(lambda: scrape(small.metrics).total("epikv_requests_waiting") == 0)


# Limits that three requests are beyond, whose prompts and outputs may fill the context, and what
# is told: the limit, and what is there.
FULL_QUEUES = {
    "requests": ({"max_queued_requests": 2}, {2, 3}),
    "tokens": ({"max_queued_requests": 9, "max_queued_tokens": 3000}, {3000, 3 * LONGEST}),
}


@pytest.mark.parametrize("unit", FULL_QUEUES)
def test_a_full_queue(busy: Daemon, unit: str) -> None:
    """Counted in requests or in tokens; the limit was lowered, so that it is not what is there."""
    limits, numbers = FULL_QUEUES[unit]
    set_queue(busy, limits)
    told = refusal(busy.grpc, f"{GENERATION}/Generate", kv("epikv_flat", 130))
    assert (told.code, told.info.reason) == (Code.RESOURCE_EXHAUSTED, "QUEUE_FULL")
    [quota] = told.details["QuotaFailure"].violations
    assert quota.subject and quota.description
    assert 0 < told.retry_seconds <= 300
    pushback = int(told.trailers["grpc-retry-pushback-ms"])
    assert pushback == pytest.approx(1000 * told.retry_seconds, abs=1)
    assert unit in told.message
    assert numbers <= {int(number) for number in re.findall(r"\d+", told.message)}, told.message


def test_an_id_that_is_taken(busy: Daemon) -> None:
    request = kv("epikv_flat", 130)
    for request.request_id in ("runs", "waits"):
        told = refusal(busy.grpc, f"{GENERATION}/Generate", request)
        assert (told.code, told.info.reason) == (Code.ALREADY_EXISTS, "DUPLICATE_ID")
        resource = told.details["ResourceInfo"]
        assert resource.resource_type == "request"
        assert resource.resource_name == request.request_id


def test_a_request_that_was_cancelled(small: Daemon) -> None:
    with grpc.insecure_channel(small.grpc, PACED) as channel:
        call = hold(channel, "id")
        cancel = generation_pb2.CancelRequestRequest(request_id="id")
        ask(small.grpc, f"{GENERATION}/CancelRequest", cancel)
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
    told_ = read_error(caught.value)
    assert (told_.code, told_.info.reason) == (Code.CANCELLED, "CANCELLED")
    assert "CancelRequest" in told_.message


def pace(daemon: Daemon, request: generation_pb2.GenerateRequest) -> float:
    """Lets the daemon learn its pace, and returns the seconds that the request takes."""
    took = []
    for _ in range(3):  # one that was held up says nothing
        begin = time.monotonic()
        ask(daemon.grpc, f"{GENERATION}/Generate", request)
        took.append(time.monotonic() - begin)
    return min(took)


def test_a_deadline_that_cannot_be_met(plain: Daemon) -> None:
    """One that is too short for the request is refused at once."""
    request = generate(stop={"max_output_tokens": 900, "ignore_eos": True})
    seconds = pace(plain, request)
    # Of the server alone: a client's own clock would speak first.
    timeout = [("grpc-timeout", f"{250 * seconds:.0f}m")]
    told = refusal(plain.grpc, f"{GENERATION}/Generate", request, metadata=timeout, timeout=None)
    assert (told.code, told.info.reason) == (Code.DEADLINE_EXCEEDED, "DEADLINE_INFEASIBLE")
    assert set(told.metadata) == {"seconds_left", "wait_seconds", "run_seconds"}
    assert float(told.metadata["seconds_left"]) < seconds / 3 < float(told.metadata["run_seconds"])
    assert told.metadata["run_seconds"] in told.message
    assert "RetryInfo" not in told.details, "no later try would be any faster"


def test_a_deadline_behind_a_queue(sample_model: Path) -> None:
    """Refused for the wait, and told when it would be in time."""
    flags = ("--threads=1", "--max_running_requests=1")
    request = generate(stop={"max_output_tokens": 900, "ignore_eos": True})
    with Daemon(sample_model, *flags) as daemon, ExitStack() as stack:
        channel = stack.enter_context(grpc.insecure_channel(daemon.grpc))
        seconds = pace(daemon, request)
        method = channel.unary_stream(f"/epikv.v1.{GENERATION}/Generate")
        calls = [method(request.SerializeToString()) for _ in range(50)]
        for call in calls:
            stack.callback(call.cancel)
            next(call)
        timeout = [("grpc-timeout", f"{2000 * seconds:.0f}m")]  # enough, but for those ahead
        told = refusal(
            daemon.grpc, f"{GENERATION}/Generate", request, metadata=timeout, timeout=None
        )
        assert (told.code, told.info.reason) == (Code.DEADLINE_EXCEEDED, "DEADLINE_INFEASIBLE")
        assert float(told.metadata["wait_seconds"]) > 0
        pushback = int(told.trailers["grpc-retry-pushback-ms"])
        assert pushback == pytest.approx(1000 * told.retry_seconds, abs=1) and pushback > 0


def test_a_deadline_that_passes(small: Daemon) -> None:
    """gRPC itself says so, also where the server's clock is first."""
    with grpc.insecure_channel(small.grpc, PACED) as channel:
        request = kv("epikv_flat", 130)
        request.output.kv_trace = True
        call = channel.unary_stream(f"/epikv.v1.{GENERATION}/Generate")(
            request.SerializeToString(), metadata=[("grpc-timeout", "2S")]
        )
        next(call)
        missed = {"reason": "deadline"}
        eventually(
            lambda: scrape(small.metrics).total("epikv_requests_finished_total", **missed) == 1
        )
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
    assert caught.value.code() is Code.DEADLINE_EXCEEDED


def test_a_reader_that_is_too_slow(sample_model: Path) -> None:
    flags = ("--threads=1", "--outbox_messages=8", "--stream_stall_seconds=1")
    with (
        Daemon(sample_model, *flags) as daemon,
        grpc.insecure_channel(daemon.grpc, PACED) as channel,
    ):
        call = hold(channel, "slow")
        slow = {"reason": "slow_reader"}
        eventually(
            lambda: scrape(daemon.metrics).total("epikv_requests_finished_total", **slow) == 1
        )
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
    told_ = read_error(caught.value)
    assert (told_.code, told_.info.reason) == (Code.RESOURCE_EXHAUSTED, "SLOW_READER")


def test_a_server_that_is_starting(sample_model: Path) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as client,
        socket.create_server(("127.0.0.1", 0)) as operator,
    ):
        listen, admin_listen = (f"127.0.0.1:{port.getsockname()[1]}" for port in (client, operator))
    refused: list[Told] = []

    def early() -> None:
        """As soon as the port is there; then the models are being loaded for seconds."""
        eager = [(f"grpc.{which}_reconnect_backoff_ms", 10) for which in ("initial", "min", "max")]
        for address, method, request in (
            (listen, f"{GENERATION}/Generate", generate()),
            (admin_listen, f"{ADMIN}/Drain", admin_pb2.DrainRequest()),
            (admin_listen, f"{ADMIN}/UnloadModel", admin_pb2.UnloadModelRequest(name="sample")),
        ):
            refused.append(refusal(address, method, request, options=eager, wait_for_ready=True))

    client = threading.Thread(target=early)
    client.start()
    more = [
        f"--models=path: '{sample_model}' name: '{i}' kv_pool_bytes: 33554432" for i in range(9)
    ]
    listens = (f"--listen={listen}", f"--admin_listen={admin_listen}")
    with Daemon(sample_model, *listens, "--threads=1", *more):
        client.join()
    assert [(told.code, told.info.reason) for told in refused] == [
        (Code.UNAVAILABLE, "STARTING"),
        (Code.FAILED_PRECONDITION, "STARTING"),
        (Code.FAILED_PRECONDITION, "STARTING"),
    ]
    assert refused[0].retry_seconds > 0


def test_a_server_that_drains_and_stops(sample_model: Path) -> None:
    flags = ("--threads=1", "--max_running_requests=1", "--drain_seconds=6")
    endless = generate(stop={"max_output_tokens": 900, "ignore_eos": True}).SerializeToString()
    with Daemon(sample_model, *flags) as daemon, grpc.insecure_channel(daemon.grpc) as channel:
        method = channel.unary_stream(f"/epikv.v1.{GENERATION}/Generate")
        calls = [method(endless) for _ in range(100)]  # more than the drain has time for
        for call in calls:
            next(call)
        ask(daemon.admin, f"{ADMIN}/Drain", admin_pb2.DrainRequest())
        drained = refusal(daemon.grpc, f"{GENERATION}/Generate", generate())
        daemon.terminate()
        eventually(lambda: "stopping" in daemon.log)
        stopping = []
        for method, request in (
            ("Resume", admin_pb2.ResumeRequest()),
            ("UnloadModel", admin_pb2.UnloadModelRequest(name="sample")),
        ):
            stopping.append(refusal(daemon.admin, f"{ADMIN}/{method}", request))
        with pytest.raises(grpc.RpcError) as caught:
            list(calls[-1])
        ended = read_error(caught.value)
        assert daemon.stop() == 0
    for unavailable in (drained, ended):
        assert unavailable.code is Code.UNAVAILABLE
        assert unavailable.info.reason == "DRAINING"
        assert unavailable.retry_seconds > 0
    for refused in stopping:
        assert (refused.code, refused.info.reason) == (Code.FAILED_PRECONDITION, "STOPPING")


def test_who_may_not(sample_model: Path, tmp_path: Path) -> None:
    made = CliRunner().invoke(main, ["token", "ann", "user"])
    token = made.stderr.split()[-1]
    (tmp_path / "tokens").write_text(made.stdout)
    ann = [("authorization", f"Bearer {token}")]
    flag = f"--auth_tokens_file={tmp_path / 'tokens'}"
    status = admin_pb2.GetServerStatusRequest()
    others = generate(scheduling={"tenant": "bob"})
    store = f"--experiment_store={tmp_path / 'store.db'}"
    with Daemon(sample_model, "--threads=1", flag, store, token=token) as daemon:
        nobody = refusal(daemon.grpc, f"{GENERATION}/Generate", generate())
        stranger = refusal(
            daemon.grpc,
            f"{GENERATION}/Generate",
            generate(),
            metadata=[("authorization", "Bearer 0000000000000000")],
        )
        user = refusal(daemon.admin, f"{ADMIN}/GetServerStatus", status, metadata=ann)
        tenant = refusal(daemon.grpc, f"{GENERATION}/Generate", others, metadata=ann)
        theirs = refusal(
            daemon.grpc, f"{EXPERIMENT}/RecordOutcome", outcome(tenant="bob"), metadata=ann
        )
        start = refusal(
            daemon.grpc,
            f"{EXPERIMENT}/StartExperiment",
            experiment_pb2.StartExperimentRequest(name="lean"),
            metadata=ann,
        )
        force = refusal(
            daemon.grpc,
            f"{GENERATION}/Generate",
            generate(experiment={"force_arm": "lean/full"}),
            metadata=ann,
        )
    for told in (nobody, stranger):
        assert (told.code, told.info.reason) == (Code.UNAUTHENTICATED, "UNAUTHENTICATED")
        assert "0000" not in told.message
    for told, role, says in (
        (user, "operator", "GetServerStatus"),
        (tenant, "operator", "'bob'"),
        (theirs, "operator", "'bob'"),
        (start, "experimenter", "StartExperiment"),
        (force, "experimenter", "force_arm"),
    ):
        assert (told.code, told.info.reason) == (Code.PERMISSION_DENIED, "PERMISSION_DENIED")
        assert told.metadata == {"role": role}
        assert says in told.message

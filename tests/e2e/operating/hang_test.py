"""A forward that never ends: operators are told of it, are answered, and can end the daemon."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from epikv import Accepted, RpcError, Stop, Stream
from epikv.connection import connect
from epikv.scrape import scrape
from epikv.testing import Daemon, DaemonError
from epikv.v1 import admin_pb2, admin_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from odd_model import Hangs, save
from waiting import eventually

GOOD, ENDLESS = [1, 2, 3], [1, 7, 3]
ANSWER_SECONDS = 15  # of a call that no engine has to answer
FORCE_SECONDS = 25  # after drain_seconds


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("hangs") / "hangs.pt", module=Hangs())


@contextmanager
def hung(model: Path) -> Iterator[tuple[Daemon, Stream]]:
    """A daemon of two models, and a request in whose step the first one hangs. Each has a core."""
    pool = "kv_pool_bytes: 1000000 threads: 1"
    flags = ("--threads=2", "--watchdog_seconds=2", "--drain_seconds=0", "--kv_pool_bytes=1000000")
    models = [f"--models=path: '{model}' name: '{name}' {pool}" for name in ("stuck", "other")]
    with Daemon(model, "--model=", *flags, *models) as daemon, daemon.client() as client:
        assert client.generate_once(GOOD, model="stuck", stop=Stop(1, ignore_eos=True))
        with client.generate(ENDLESS, model="stuck", request_id="endless") as stream:
            assert isinstance(next(stream), Accepted)
            eventually(lambda: scrape(daemon.metrics).total("epikv_engine_step_age_seconds") > 1)
            yield daemon, stream


@pytest.fixture(scope="module")
def daemon(model: Path) -> Iterator[Daemon]:
    with pytest.raises(DaemonError, match="status -9"), hung(model) as (running, _):
        yield running
        running.kill()


def health(daemon: Daemon, service: str) -> str:
    with connect(daemon.grpc) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        reply = health_pb2_grpc.HealthStub(channel).Check(request, timeout=ANSWER_SECONDS)
    return health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)


def test_a_step_that_hangs_is_told(daemon: Daemon) -> None:
    eventually(lambda: health(daemon, "liveness") == "NOT_SERVING", 20)
    assert health(daemon, "models/stuck") == "NOT_SERVING"
    assert health(daemon, "models/other") == "SERVING"
    assert "a step of model 'stuck' has lasted longer than 2s" in daemon.log
    assert scrape(daemon.metrics).value("epikv_engine_step_age_seconds") > 2


def test_a_step_that_hangs_holds_up_no_other_model(daemon: Daemon) -> None:
    with daemon.client() as client:
        stop = Stop(1, ignore_eos=True)  # of random weights: the token itself might hang it
        answer = client.generate_once(GOOD, model="other", stop=stop, timeout=ANSWER_SECONDS)
        assert answer.summary.usage.output_tokens == 1


def test_operators_are_answered_while_a_step_hangs(daemon: Daemon) -> None:
    """What the engine that hangs would have to say is left out."""
    with connect(daemon.admin) as channel:
        admin = admin_pb2_grpc.AdminServiceStub(channel)
        asked = admin_pb2.ListActiveRequestsRequest()
        calls = (
            admin.ListActiveRequests.future(asked, timeout=ANSWER_SECONDS),
            admin.DumpState.future(admin_pb2.DumpStateRequest(), timeout=ANSWER_SECONDS),
        )
        listed, dump = [call.result() for call in calls]
    assert not listed.requests and not dump.requests
    assert {one.name: one.live_requests for one in dump.status.models} == {"stuck": 1, "other": 0}
    assert "epikv_engine_step_age_seconds" in dump.metrics


def test_sigterm_ends_a_daemon_that_hangs(model: Path) -> None:
    """By force, and not before one in order would have ended."""
    failed = pytest.raises(DaemonError, match="ended with status 1\n")
    with failed, hung(model) as (daemon, stream):
        begin = time.monotonic()
        assert daemon.stop() == 1
        assert FORCE_SECONDS - 1 < time.monotonic() - begin < FORCE_SECONDS + 15
        assert (
            "something hangs and keeps the daemon from its end: it is ended by force" in daemon.log
        )
        with pytest.raises(RpcError) as ended:
            list(stream)
        assert ended.value.code is grpc.StatusCode.UNAVAILABLE

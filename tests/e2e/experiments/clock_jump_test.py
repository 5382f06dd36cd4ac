"""Experiments on a machine whose clock jumps: libfaketime moves the daemon's, and not its monotonic
one."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from clock_jumps import await_jump, faked_clock
from definitions import LEAN, define
from epikv import Client, Experiment, Patience, RpcError, Stop
from epikv.testing import Daemon
from epikv.v1 import experiment_pb2
from waiting import eventually

AT_ONCE = Patience(busy=0, unknown=0)


@pytest.fixture
def jump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[timedelta], None]:
    return faked_clock(tmp_path, monkeypatch)


def ask(client: Client, unit: str) -> str:
    """The id of a request that takes part."""
    accepted = client.generate_once("7", stop=Stop(1), experiment=Experiment(unit)).accepted
    assert accepted is not None and accepted.arm.startswith("lean/")
    return accepted.request_id


def test_what_is_recorded_while_the_clock_jumps_counts_once(
    sample_model: Path, tmp_path: Path, jump: Callable[[timedelta], None]
) -> None:
    requests: list[str] = []

    def both(unit: str) -> None:
        requests.append(ask(client, unit))
        assert not client.record_outcome(requests[-1], "right", 1).duplicate

    log = tmp_path / "access.log"
    flags = (f"--experiment_store={tmp_path / 'store.db'}", f"--access_log={log}")
    with Daemon(sample_model, "--threads=1", *flags) as daemon, daemon.client() as client:
        client.create_experiment(define(LEAN))
        client.start_experiment("lean")
        both("before")
        early = ask(client, "early")

        jump(timedelta(hours=-2))
        await_jump(client, log, timedelta(hours=-2))
        assert not client.record_outcome(early, "right", 1).duplicate
        both("two hours ago")

        jump(timedelta(days=2))
        await_jump(client, log, timedelta(days=2))
        with pytest.raises(RpcError, match="outcome_window") as late:
            client.record_outcome(requests[0], "right", 1, key="late", patience=AT_ONCE)
        assert late.value.reason == "OUTCOME_LATE"
        both("in two days")

        jump(timedelta())
        await_jump(client, log, timedelta())
        both("after")
        for request in (early, *requests):
            assert client.record_outcome(request, "right", 1).duplicate
        found = client.experiment_report("lean")
        assert sum(arm.requests for arm in found.arms) == 5
        [right] = [metric for metric in found.metrics if metric.metric.name == "right"]
        assert sum(value.observations for value in right.all.arms) == 5


def test_experiments_are_judged_and_end_whatever_the_clock_does(
    sample_model: Path, tmp_path: Path, jump: Callable[[timedelta], None]
) -> None:
    def stopped(name: str) -> bool:
        return client.experiment(name).state == experiment_pb2.Experiment.STATE_STOPPED

    guarded, ending = define(LEAN), define(LEAN)
    guarded.guardrails[0].metric = "right"
    ending.name = ending.salt = ending.layer = "ending"
    for arm in ending.arms:  # what another layer's arms may set beside those of the first
        arm.ClearField("kv")
    ending.end_time.FromDatetime(datetime.now(UTC) + timedelta(hours=1))
    log = tmp_path / "access.log"
    flags = (
        f"--experiment_store={tmp_path / 'store.db'}",
        "--experiment_guardrail_seconds=0.5",
        f"--access_log={log}",
    )
    with Daemon(sample_model, "--threads=1", *flags) as daemon, daemon.client() as client:
        for definition in (guarded, ending):
            client.create_experiment(definition)
            client.start_experiment(definition.name)
        jump(timedelta(hours=-2))
        await_jump(client, log, timedelta(hours=-2))
        for number in range(80):
            accepted = client.generate_once(
                "7", stop=Stop(1), experiment=Experiment(str(number))
            ).accepted
            assert accepted is not None
            client.record_outcome(accepted.request_id, "right", float("lean/full" in accepted.arm))
        eventually(lambda: stopped("lean"))
        assert client.experiment("lean").stop_reason == "guardrail/right/lean"
        assert not stopped("ending")
        jump(timedelta(hours=2))
        eventually(lambda: stopped("ending"))
        assert client.experiment("ending").stop_reason == "end_time"

"""What experiments count and do when their store is away, and when requests are refused."""

import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest
from definitions import LEAN, define
from epikv import Experiment, RpcError, Sampling, Steering, Stop
from epikv.connection import connect
from epikv.scrape import scrape
from epikv.testing import Daemon
from epikv.v1 import experiment_pb2, experiment_pb2_grpc
from waiting import eventually


def test_a_breached_guardrail_stops_it_soon_after_an_outage(
    sample_model: Path, tmp_path: Path
) -> None:
    """However long the store was away when it was to be stopped; and it was breached once."""
    store = tmp_path / "store.db"
    definition = define(LEAN)
    definition.guardrails[0].metric = "right"
    flags = (f"--experiment_store={store}", "--experiment_guardrail_seconds=2")
    with Daemon(sample_model, "--threads=1", *flags) as daemon, daemon.client() as client:
        client.create_experiment(definition)
        client.start_experiment("lean")
        outcomes = experiment_pb2.BatchRecordOutcomesRequest()
        for _ in range(80):
            accepted = client.generate_once("7", stop=Stop(1)).accepted
            assert accepted is not None
            right = float(accepted.arm == "lean/full")
            outcomes.outcomes.add(request_id=accepted.request_id, metric="right", value=right)
        with connect(daemon.grpc) as channel, closing(sqlite3.connect(store)) as other:
            experiments = experiment_pb2_grpc.ExperimentServiceStub(channel)
            experiments.BatchRecordOutcomes(outcomes)
            other.execute("BEGIN EXCLUSIVE")
            for _ in range(2):  # each waits for the store, as the guardrail does
                with pytest.raises(RpcError, match="STORE_UNAVAILABLE"):
                    client.stop_experiment("lean")
        eventually(lambda: scrape(daemon.metrics).total("epikv_experiments_running") == 0)
        assert client.experiment("lean").stop_reason == "guardrail/right/lean"
        assert scrape(daemon.metrics).total("epikv_experiment_guardrail_breaches_total") == 1


def test_outcomes_that_nobody_declares_fill_no_spool(sample_model: Path, tmp_path: Path) -> None:
    """While the store is away nobody knows of their requests; of their metric it is known."""
    store = tmp_path / "store.db"
    flag = f"--experiment_store={store}"
    with Daemon(sample_model, "--threads=1", flag) as daemon, daemon.client() as client:
        client.create_experiment(define(LEAN))
        client.start_experiment("lean")
        with closing(sqlite3.connect(store)) as other:
            other.execute("BEGIN EXCLUSIVE")
            assert client.record_outcome("none", "right", 1).spooled
            with pytest.raises(RpcError, match="no experiment declares 'anything'"):
                client.record_outcome("none", "anything", 1)
            assert client.record_outcome("none", "right", 0).spooled


def test_what_is_refused_is_not_counted_as_left_out(sample_model: Path, tmp_path: Path) -> None:
    """As it is not counted under an arm."""
    flag = f"--experiment_store={tmp_path / 'store.db'}"
    with Daemon(sample_model, "--threads=1", flag) as daemon, daemon.client() as client:
        client.create_experiment(define(LEAN))
        client.start_experiment("lean")
        for experiment in (Experiment(), Experiment(opt_out=True)):
            for sampling, says in (
                (Sampling(temperature=-1), "temperature"),
                (Sampling(steering=Steering()), "needs a steering vector"),
            ):
                with pytest.raises(RpcError, match=says):
                    client.generate_once("7", experiment=experiment, sampling=sampling)
        assert scrape(daemon.metrics).total("epikv_experiment_assignments_total") == 0


def test_an_outage_is_as_long_as_the_store_is_away(sample_model: Path, tmp_path: Path) -> None:
    """Also where nothing is left to be written when it is back: here a disk has changed it."""
    store = tmp_path / "store.db"

    def total(name: str) -> float:
        return scrape(daemon.metrics).total(f"epikv_experiment_{name}")

    def records() -> dict[str, float]:
        page = scrape(daemon.metrics)
        return {
            fate: page.value("epikv_experiment_records_total", fate=fate)
            for fate in ("written", "spooled", "replayed", "dropped")
        }

    # A replay is a third record, of one request in a hundred by default.
    flags = (f"--experiment_store={store}", "--experiment_shadow_permille=0")
    with Daemon(sample_model, "--threads=1", *flags) as daemon, daemon.client() as client:
        client.create_experiment(define(LEAN))
        client.start_experiment("lean")
        accepted = client.generate_once("7", stop=Stop(1)).accepted
        assert accepted is not None
        # Its beginning and end: no spool holds them.
        eventually(lambda: (now := records())["written"] + now["replayed"] == 2, show=records)
        before = total("store_outage_seconds_total")  # a busy disk is an outage as well
        with closing(sqlite3.connect(store)) as other:
            other.execute("BEGIN EXCLUSIVE")
            begin = time.monotonic()
            assert client.record_outcome(accepted.request_id, "right", 1).spooled
            [segment] = store.with_name("store.db.spool").glob("*.spool")
            contents = bytearray(segment.read_bytes())
            contents[-1] ^= 1
            with segment.open("r+b") as file:
                file.write(contents)
            eventually(lambda: total("spool_bytes") == 0)
        away = time.monotonic() - begin
        time.sleep(10)  # in which it is there
        client.record_outcome(accepted.request_id, "right", 1, key="later")
        assert total("store_outage_seconds_total") < before + away + 5

"""A daemon that is killed while it records outcomes, a few times: tests/soak.sh crashes does it often."""

import sqlite3
import sys
from pathlib import Path

import pytest
from definitions import LEAN, define
from epikv import Accepted, Client, Experiment, Stop
from epikv.testing import Daemon, DaemonError
from epikv.v1 import experiment_pb2
from waiting import eventually

sys.path.insert(0, str(Path(__file__).parents[2] / "soak"))

import crashes
import recorded
from calls import Wrong
from recorded import Ledger, Sqlite, Traffic

SEED = 5  # of a few rounds in which the daemon dies in its start, and under traffic with its store away
BATCHES = (
    4  # at most: on a slow machine none of the traffic of one may come while the store is away
)


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_nothing_acknowledged_is_lost_or_counted_twice(sample_model: Path, kind: str) -> None:
    found = crashes.Found()
    for batch in range(BATCHES):
        found += crashes.batch(sample_model, kind, 8, SEED + batch)
        assert found.kills == 8 * (batch + 1) and found.lost == found.twice == 0
        if found.in_start and found.outages and found.spooled:
            break
    assert found.in_start > 0 and found.outages > 0
    assert 0 < found.spooled < found.acknowledged <= found.stored


def test_requests_that_die_with_their_daemon_have_failed(
    sample_model: Path, tmp_path: Path
) -> None:
    """The next daemon counts them, in reports and for guardrails, when no end has come in time."""
    store = f"--experiment_store={tmp_path / 'store.db'}"
    definition = define(LEAN)
    definition.guardrails[0].margin = 0.01
    endless = Stop(900, ignore_eos=True)
    killed = pytest.raises(DaemonError, match="status -9")

    def of_lean(client: Client) -> experiment_pb2.ArmReport:
        [arm] = [a for a in client.experiment_report("lean").arms if a.arm == "lean"]
        return arm

    with killed, Daemon(sample_model, "--threads=1", store) as daemon, daemon.client() as client:
        client.create_experiment(definition)
        client.start_experiment("lean")
        lean = []
        for unit in range(80):
            context = Experiment(unit_id=f"unit-{unit}")
            accepted = client.generate_once("7", experiment=context, stop=Stop(1)).accepted
            assert accepted is not None
            if accepted.arm == "lean/lean":
                lean.append(context)
        streams = [client.generate("7", experiment=context, stop=endless) for context in lean]
        assert all(isinstance(next(stream), Accepted) for stream in streams)
        eventually(lambda: of_lean(client).running_requests == len(lean))
        daemon.kill()
    flags = (store, "--experiment_lost_seconds=1", "--experiment_guardrail_seconds=0.5")
    with Daemon(sample_model, "--threads=1", *flags) as daemon, daemon.client() as client:
        eventually(lambda: of_lean(client).lost_requests == len(lean))
        found = client.experiment_report("lean")
        of_arm = {arm.arm: arm for arm in found.arms}
        assert of_arm["full"].lost_requests == 0
        assert all(arm.running_requests == 0 for arm in found.arms)
        assert any(f"{len(lean)} requests have no end" in note for note in found.notes)
        eventually(lambda: client.experiment("lean").stop_reason == "guardrail/failed/lean")


def test_an_interrupted_run_goes_on(
    sample_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "sqlite.jsonl"
    monkeypatch.setattr(crashes, "BATCH", 1)
    first = crashes.run(sample_model, "sqlite", 1, file)
    both = crashes.run(sample_model, "sqlite", 2, file)
    assert (first.kills, both.kills) == (1, 2)
    assert both.stored >= first.stored and len(file.read_text().splitlines()) == 2


def test_what_does_not_hold_is_seen(sample_model: Path, tmp_path: Path) -> None:
    ledger, store = Ledger(), Sqlite(tmp_path / "store.db")
    with (
        Daemon(sample_model, "--threads=1", f"--experiment_store={store.where}") as daemon,
        Client(daemon.grpc) as client,
    ):
        recorded.begin(client)
        with Traffic(daemon.grpc, ledger) as traffic:
            traffic.until_more("written", 10)
    recorded.held(ledger, store).check()
    ledger.written.add(10**6)
    with pytest.raises(Wrong, match="1 are lost"):
        recorded.held(ledger, store).check()
    ledger.written.discard(10**6)
    columns = "tenant, request_id, unit, unit_is_request, model, began_us, prompt_tokens, max_output_tokens"
    with sqlite3.connect(store.where) as connection:
        connection.execute(
            f"INSERT INTO requests (id, {columns}) SELECT 'again', {columns} FROM requests LIMIT 1"
        )
    with pytest.raises(Wrong, match="1 are there twice"):
        recorded.held(ledger, store).check()
    with sqlite3.connect(store.where) as connection:
        connection.execute("UPDATE outcomes SET value = value + 1")
    with pytest.raises(Wrong, match="the request of an outcome"):
        recorded.held(ledger, store)

"""The client's side of experiments: taking part, definitions, arms and outcomes."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from pathlib import Path

import fake_epikvd
import grpc
import pytest
from command_line import run
from epikv import Client, Experiment, Outcome, Patience, RpcError
from epikv.experiment import definition
from epikv.v1 import experiment_pb2


def test_a_request_says_how_it_takes_part(client: Client, fake: fake_epikvd.Fake) -> None:
    experiment = Experiment(unit_id="ann", covariate=0.0)
    list(client.generate("x", experiment=experiment, labels={"tier": "free"}))
    client.generate_once("x", experiment=Experiment(force_arm="e/lean"))
    list(client.generate("x"))
    ann, forced, plain = fake.requests
    assert ann.experiment.unit_id == "ann" and ann.experiment.HasField("covariate")
    assert dict(ann.labels) == {"tier": "free"}
    assert forced.experiment == experiment_pb2.ExperimentContext(force_arm="e/lean")
    assert plain.experiment == experiment_pb2.ExperimentContext() and not plain.labels


def test_generate_has_options_for_it(fake: fake_epikvd.Fake) -> None:
    given = "--unit ann --covariate 0 --arm e/lean --label tier=free --label a=b=c".split()
    assert run("generate", "x", *given, "--server", fake.address).exit_code == 0
    assert run("generate", "x", "--opt-out", "--server", fake.address).exit_code == 0
    taking, out = fake.requests
    assert (taking.experiment.unit_id, taking.experiment.force_arm) == ("ann", "e/lean")
    assert taking.experiment.HasField("covariate") and taking.experiment.covariate == 0
    assert dict(taking.labels) == {"tier": "free", "a": "b=c"}
    assert out.experiment.opt_out and not out.experiment.HasField("covariate")
    assert run("generate", "x", "--label", "tier").exit_code == 2


@contextmanager
def refused(code: str, reason: str = "") -> Iterator[None]:
    with pytest.raises(RpcError) as caught:
        yield
    assert (caught.value.code.name, caught.value.reason) == (code, reason)


def test_a_definition_goes_through_its_states(client: Client, lean: Path) -> None:
    sound = definition.read(lean)
    assert client.create_experiment(sound, validate_only=True).layer == "default"
    assert client.experiments() == []
    made = client.create_experiment(sound)
    assert made == client.experiment("lean-1") == client.experiments()[0]
    with refused("ALREADY_EXISTS"):
        client.create_experiment(sound)
    started = client.start_experiment("lean-1", etag=made.etag)
    assert started.state == experiment_pb2.Experiment.STATE_RUNNING
    with refused("ABORTED", "ETAG"):
        client.stop_experiment("lean-1", etag=made.etag)
    assert client.stop_experiment("lean-1", reason="enough").stop_reason == "enough"
    with refused("NOT_FOUND"):
        client.experiment("lean-2")


def test_what_was_read_may_be_changed_and_sent_back(client: Client, lean: Path) -> None:
    read = client.create_experiment(definition.read(lean))
    read.traffic_permille = 200
    updated = client.update_experiment(read)
    assert updated.traffic_permille == 200
    with refused("ABORTED", "ETAG"):
        client.update_experiment(read)
    updated.traffic_permille, updated.hypothesis = 300, "more"
    assert client.update_experiment(updated, validate_only=True).traffic_permille == 300
    masked = client.update_experiment(updated, mask=["hypothesis"])
    assert (masked.traffic_permille, masked.hypothesis) == (200, "more")


def test_units_move_only_where_that_is_allowed(client: Client, running: fake_epikvd.Fake) -> None:
    read = client.experiment("lean-1")
    read.arms[1].weight_permille = 100
    with refused("INVALID_ARGUMENT"):
        client.update_experiment(read)
    read.arms[0].weight_permille = 900
    with refused("FAILED_PRECONDITION", "REBUCKET"):
        client.update_experiment(read)
    assert client.update_experiment(read, allow_rebucket=True).arms[1].weight_permille == 100


def test_an_outcome_is_recorded_once(client: Client, running: fake_epikvd.Fake) -> None:
    at = datetime(2031, 5, 1, 14, 30, 0, 500_000, timezone(timedelta(hours=2)))
    given = {"time": at, "key": "k", "tenant": "ann"}
    assert not client.record_outcome("r-1", "right", 1, **given).duplicate
    sent = running.requests[-1]
    assert sent.time.ToJsonString() == "2031-05-01T12:30:00.500Z"
    assert (sent.idempotency_key, sent.tenant) == ("k", "ann")
    assert client.record_outcome("r-1", "right", 1, **given).duplicate
    with refused("ALREADY_EXISTS"):
        client.record_outcome("r-1", "right", 0, **given)
    running.experiments.is_store_away = True
    assert client.record_outcome("r-1", "right", 0).spooled
    assert not running.requests[-1].HasField("time")
    with pytest.raises(ValueError, match="has no zone"):
        client.record_outcome("r-1", "right", 1, time=datetime(2031, 5, 1))


def test_a_request_that_just_began_is_waited_for(
    client: Client, running: fake_epikvd.Fake, slept: list[float]
) -> None:
    running.experiments.arriving["r-1"] = 3
    assert not client.record_outcome("r-1", "right", 1).duplicate
    assert slept == [0.1, 0.2, 0.4]


def test_a_request_that_took_no_part_is_not_waited_for_long(
    client: Client, running: fake_epikvd.Fake, slept: list[float]
) -> None:
    with refused("NOT_FOUND"):
        client.record_outcome("r-9", "right", 1)
    assert sum(slept) == pytest.approx(Patience.unknown)
    slept.clear()
    with refused("NOT_FOUND"):
        client.record_outcome("r-9", "right", 1, patience=Patience(unknown=0))
    with refused("INVALID_ARGUMENT", "METRIC"):
        client.record_outcome("r-1", "wrong", 1)
    assert slept == []


BUSY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)


def test_a_busy_server_is_asked_again(
    client: Client, running: fake_epikvd.Fake, slept: list[float]
) -> None:
    running.experiments.refusals = [(BUSY[0], None), (BUSY[1], 1.5), (BUSY[0], 0.0)]
    assert not client.record_outcome("r-1", "right", 1).duplicate
    assert slept == [0.1, 1.5, 0.1]
    running.experiments.refusals = [(BUSY[1], 31)]
    with refused("RESOURCE_EXHAUSTED"):
        client.record_outcome("r-1", "right", 1)
    running.experiments.refusals = [(BUSY[0], None)] * 100
    slept.clear()
    with refused("UNAVAILABLE"):
        client.record_outcome("r-1", "right", 1)
    assert sum(slept) == pytest.approx(Patience.busy) and max(slept) == 2


def test_each_outcome_has_a_result(client: Client, running: fake_epikvd.Fake) -> None:
    client.record_outcome("r-2", "right", 0)
    given = [("r-1", "right", 1), ("r-9", "right", 1), ("r-2", "right", 0), ("r-1", "wrong", 1)]
    results = client.record_outcomes(
        [Outcome(*outcome) for outcome in [*given, ("r-2", "right", 1)]],
        patience=Patience(unknown=0),
    )
    assert [result.error and result.error.code.name for result in results] == [
        None,
        "NOT_FOUND",
        None,
        "INVALID_ARGUMENT",
        "ALREADY_EXISTS",
    ]
    assert [r.response and r.response.duplicate for r in results[:3]] == [False, None, True]
    assert results[3].reason == results[3].error.reason == "METRIC"
    assert client.record_outcomes([]) == []


def test_batches_are_no_longer_than_the_server_takes(
    client: Client, running: fake_epikvd.Fake
) -> None:
    outcomes = [Outcome("r-1", "right", i % 2, key=str(i)) for i in range(2100)]
    assert all(result.error is None for result in client.record_outcomes(outcomes))
    assert running.experiments.batches == [1000, 1000, 100]
    assert len(running.experiments.outcomes) == 2100


def test_of_a_batch_only_what_was_refused_goes_again(
    client: Client, running: fake_epikvd.Fake, slept: list[float]
) -> None:
    running.experiments.arriving["r-2"] = 2
    running.experiments.refusals = [(BUSY[0], None)]
    results = client.record_outcomes([Outcome(r, "right", 1) for r in ("r-1", "r-2", "r-3")])
    assert [result.code for result in results] == [0, 0, grpc.StatusCode.NOT_FOUND.value[0]]
    assert running.experiments.batches[:4] == [3, 2, 2, 1]
    assert not results[0].response.duplicate
    assert sum(slept) == pytest.approx(0.1 + Patience.unknown)


def test_an_outcome_that_is_refused_for_a_while_is_tried_after_it(
    client: Client, running: fake_epikvd.Fake, slept: list[float]
) -> None:
    running.experiments.delays = [0.5, 1.25]
    results = client.record_outcomes([Outcome(r, "right", 1) for r in ("r-1", "r-2")])
    assert [result.code for result in results] == [0, 0] and slept == [1.25]


def test_a_batch_that_nobody_takes_is_an_error(
    client: Client, running: fake_epikvd.Fake, slept: list[float]
) -> None:
    running.experiments.refusals = [(BUSY[0], None)] * 100
    with refused("UNAVAILABLE"):
        client.record_outcomes([Outcome("r-1", "right", 1)])
    running.experiments.refusals = [(grpc.StatusCode.PERMISSION_DENIED, None)]
    slept.clear()
    with refused("PERMISSION_DENIED"):
        client.record_outcomes([Outcome("r-1", "right", 1)])
    assert slept == []

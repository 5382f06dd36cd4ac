"""What clients are told of experiments: rows of the table in docs/errors.md."""

import math
import sqlite3
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from epikv.testing import Daemon
from epikv.v1 import experiment_pb2
from google.protobuf.message import Message
from sound_experiment import ARMS, ELIGIBLE, arms, definition, outcome
from told import EXPERIMENT, GENERATION, Code, Row, ask, check, generate, refusal

NAN = math.nan
UNKNOWN_ENUM = 99


def undefined(fields: dict[str, list[str]], **changes: Any) -> Row:
    """A definition that is refused; fields below `experiment`."""
    request = experiment_pb2.CreateExperimentRequest(
        experiment=definition(**changes), validate_only=True
    )
    full = {f"experiment.{name}": says for name, says in fields.items()}
    return Row(request, full, method=f"{EXPERIMENT}/CreateExperiment")


def unplanned(*says: str, **changes: Any) -> Row:
    request = {"kind": "KIND_PROPORTION", "rate": 0.1, "effect": 0.03, **changes}
    return Row(
        experiment_pb2.PlanExperimentRequest(**request),
        {"plan": [*says]},
        method=f"{EXPERIMENT}/PlanExperiment",
    )


def uncounted(fields: dict[str, list[str]], **changes: Any) -> Row:
    return Row(outcome(**changes), fields, method=f"{EXPERIMENT}/RecordOutcome")


ROWS = {
    # A definition, its parts each by themselves.
    "names of an experiment": undefined(
        {
            "name": ["lower-case", "'Lean'"],
            "layer": ["63 bytes"],
            "salt": ["'s_1'"],
            "hypothesis": ["1025", "1024"],
            "sample_ratio_explanation": ["1025", "1024"],
        },
        name="Lean",
        layer="l" * 64,
        salt="s_1",
        hypothesis="h" * 1025,
        sample_ratio_explanation="e" * 1025,
    ),
    "one arm": undefined({"arms": ["2 to 8", "are 1"]}, arms=ARMS[:1]),
    "weights and controls": undefined(
        {
            "arms[0].weight_permille": ["at least 1"],
            "arms": ["one must be the control", "0 are"],
        },
        arms=arms({"weight_permille": 0, "control": False}, {"weight_permille": 1000}),
    ),
    "names of arms": undefined(
        {"arms[0].name": ["'none'", "cannot be the name"], "arms[1].name": ["lower-case", "'2'"]},
        arms=arms({"name": "none"}, {"name": "2"}),
    ),
    "two arms of one name": undefined(
        {"arms[1].name": ["'full'", "twice"]}, arms=arms({}, {"name": "full"})
    ),
    "an arm's options, as a model sees them": undefined(
        {
            "arms[0].kv.cache_salt": ["request's own"],
            "arms[1].kv.policy": ["'slidng'", "sliding", "(model 'sample')"],
        },
        arms=arms({"kv": {"cache_salt": "mine"}}, {"kv": {"policy": "slidng", "max_tokens": 300}}),
    ),
    "who takes part": undefined(
        {"traffic_permille": ["1 to 1000", "is 1001"], "eligibility.labels": ["has 9", "8"]},
        traffic_permille=1001,
        eligibility={"labels": {str(i): "" for i in range(9)}},
    ),
    "metrics": undefined(
        {
            "metrics[0].name": ["lower-case", "'Right'"],
            "metrics[0].tau": ["nan"],
            "metrics[0].kind": ["99"],
            "metrics[0].direction": ["99"],
            "metrics[0].covariate": ["99"],
            "metrics[1].name": ["'failed'", "measured by the server"],
            "metrics[3].name": ["'score'", "twice"],
            "primary_metric": ["'rigth'", "score", "kv_evicted_tokens"],
        },
        metrics=[
            {
                "name": "Right",
                "tau": NAN,
                "kind": UNKNOWN_ENUM,
                "direction": UNKNOWN_ENUM,
                "covariate": UNKNOWN_ENUM,
            },
            {"name": "failed"},
            {"name": "score"},
            {"name": "score"},
        ],
        primary_metric="rigth",
    ),
    "too many metrics": undefined(
        {"metrics": ["has 9", "8"]}, metrics=[{"name": f"m{i}"} for i in range(9)]
    ),
    "guardrails": undefined(
        {"guardrails[0].metric": ["''", "right"], "guardrails[1].margin": ["-1"]},
        guardrails=[{"margin": 1}, {"metric": "failed", "margin": -1}],
    ),
    "too many guardrails": undefined(
        {"guardrails": ["has 9", "8"]}, guardrails=[{"metric": "failed"}] * 9
    ),
    "alpha and window": undefined(
        {"alpha": ["(0, 0.5)", "is 0.5"], "outcome_window": ["more than 0", "is 0"]},
        alpha=0.5,
        outcome_window={},
    ),
    "an end that no calendar has": undefined(
        {"end_time": ["1 to 9999"]}, end_time={"seconds": 10**15}
    ),
    # ... and whatever else is asked of one.
    "what an update may not set": Row(
        experiment_pb2.UpdateExperimentRequest(
            experiment=definition(), update_mask={"paths": ["state", "alpha"]}
        ),
        {"update_mask": ["'state'", "hypothesis", "outcome_window"]},
        method=f"{EXPERIMENT}/UpdateExperiment",
    ),
    "why it stops": Row(
        experiment_pb2.StopExperimentRequest(name="lean", reason="r" * 1025),
        {"reason": ["1025", "1024"]},
        method=f"{EXPERIMENT}/StopExperiment",
    ),
    "points of a report": Row(
        experiment_pb2.GetExperimentReportRequest(name="lean", points=201),
        {"points": ["200"]},
        method=f"{EXPERIMENT}/GetExperimentReport",
    ),
    "a plan without an aim": unplanned("effect", "units", effect=None),
    "a plan for one arm": unplanned("2 to 8", arms=1),
    "a plan of a certain power": unplanned("power", "is 2", power=2),
    "a plan of a rate that is none": unplanned("rate", "is 1.5", rate=1.5),
    # Requests that take part, and their outcomes.
    "context of an experiment": Row(
        generate(
            experiment={
                "unit_id": "u" * 129,
                "covariate": NAN,
                "force_arm": "lean/full",
                "opt_out": True,
            }
        ),
        {
            "experiment.unit_id": ["129", "128"],
            "experiment.covariate": ["finite"],
            "experiment.force_arm": ["opt_out"],
        },
    ),
    "labels": Row(generate(labels={str(i): "" for i in range(9)}), {"labels": ["has 9", "8"]}),
    "a label": Row(generate(labels={"k": "v" * 65}), {"labels": ["1 to 64 bytes"]}),
    "an arm that does not run": Row(
        generate(experiment={"force_arm": "lean/fat"}),
        {"experiment.force_arm": ["'lean/fat'", "experiment/arm"]},
    ),
    "an arm where there are no experiments": Row(
        generate(experiment={"force_arm": "lean/full"}, stop={"max_output_tokens": 1}),
        {"experiment.force_arm": ["no experiments"]},
    ),
    "an outcome": uncounted(
        {
            "request_id": ["empty"],
            "value": ["finite"],
            "idempotency_key": ["65", "64"],
            "metric": ["65", "64"],
            "time": ["1 to 9999"],
        },
        request_id="",
        value=NAN,
        idempotency_key="k" * 65,
        metric="m" * 65,
        time={"seconds": 2**62},
    ),
    # No request has them, and no index of a database has to.
    "an outcome of what no request is called": uncounted(
        {"request_id": ["129", "128"], "tenant": ["65", "64"]},
        request_id="i" * 129,
        tenant="t" * 65,
    ),
    "an outcome that is no proportion": uncounted(
        {"value": ["0 or 1", "'right'"]}, metric="right", value=0.5
    ),
    "an outcome that nobody declared": uncounted(
        {"metric": ["'took part'", "'wrong'"]}, metric="wrong"
    ),
    "an outcome that no store can hold": uncounted({"outcome": ["store"]}, idempotency_key="a\0b"),
    "no outcomes": Row(
        experiment_pb2.BatchRecordOutcomesRequest(),
        {"outcomes": ["1 to 1000", "are 0"]},
        method=f"{EXPERIMENT}/BatchRecordOutcomes",
    ),
    "too many outcomes": Row(
        experiment_pb2.BatchRecordOutcomesRequest(outcomes=[outcome()] * 1001),
        {"outcomes": ["1 to 1000", "are 1001"]},
        method=f"{EXPERIMENT}/BatchRecordOutcomes",
    ),
}
SMALL = {"an arm where there are no experiments"}  # of the daemon that is called so


@pytest.mark.parametrize("name", ROWS)
def test_what_is_wrong_with_an_experiment(plain: Daemon, small: Daemon, name: str) -> None:
    row = ROWS[name]
    check(row, refusal((small if name in SMALL else plain).grpc, row.method, row.request))


def changed(name: str, path: str, **fields: Any) -> experiment_pb2.UpdateExperimentRequest:
    return experiment_pb2.UpdateExperimentRequest(
        experiment=definition(name, **fields), update_mask={"paths": [path]}
    )


# What an experiment's state forbids: who is asked, the reason, and words.
FORBIDDEN = {
    "a layer without room": (
        "StartExperiment",
        experiment_pb2.StartExperimentRequest(name="draft"),
        "LAYER_FULL",
        ["'default'", "1000 permille", "leave at most 0"],
    ),
    "arms of another layer": (
        "StartExperiment",
        experiment_pb2.StartExperimentRequest(name="elsewhere"),
        "ARMS_CONFLICT",
        ["'lean'", "'default'", "policy and budget"],
    ),
    "a start without a primary metric": (
        "StartExperiment",
        experiment_pb2.StartExperimentRequest(name="undecided"),
        "EXPERIMENT_STATE",
        ["'undecided'", "primary_metric"],
    ),
    "a start after its end": (
        "StartExperiment",
        experiment_pb2.StartExperimentRequest(name="past"),
        "EXPERIMENT_STATE",
        ["'past'", "end_time"],
    ),
    "a second start": (
        "StartExperiment",
        experiment_pb2.StartExperimentRequest(name="over"),
        "EXPERIMENT_STATE",
        ["'over'", "create another"],
    ),
    "a stop of what does not run": (
        "StopExperiment",
        experiment_pb2.StopExperimentRequest(name="draft"),
        "EXPERIMENT_STATE",
        ["'draft'"],
    ),
    "a report of a draft": (
        "GetExperimentReport",
        experiment_pb2.GetExperimentReportRequest(name="draft"),
        "EXPERIMENT_STATE",
        ["'draft'"],
    ),
    "other arms of what is over": (
        "UpdateExperiment",
        changed("over", "traffic_permille", traffic_permille=1),
        "EXPERIMENT_STATE",
        ["'over'"],
    ),
    "units that would move": (
        "UpdateExperiment",
        changed("lean", "traffic_permille", traffic_permille=1),
        "REBUCKET",
        ["'lean'", "allow_rebucket"],
    ),
    "what has been decided": (
        "UpdateExperiment",
        changed("lean", "alpha", alpha=0.1),
        "DECIDED",
        ["'lean'", "alpha"],
    ),
    "an outcome that is late": (
        "RecordOutcome",
        outcome(metric="haste"),
        "OUTCOME_LATE",
        ["'took part'", "outcome_window"],
    ),
}


@pytest.mark.parametrize("name", FORBIDDEN)
def test_what_an_experiment_does_not_allow(plain: Daemon, name: str) -> None:
    method, request, reason, words = FORBIDDEN[name]
    told = refusal(plain.grpc, f"{EXPERIMENT}/{method}", request)
    assert (told.code, told.info.reason) == (Code.FAILED_PRECONDITION, reason)
    for word in words:
        assert word in told.message


STALE: dict[str, Message] = {
    "UpdateExperiment": experiment_pb2.UpdateExperimentRequest(experiment=definition(etag="old")),
    "StartExperiment": experiment_pb2.StartExperimentRequest(name="lean", etag="old"),
    "StopExperiment": experiment_pb2.StopExperimentRequest(name="lean", etag="old"),
}


@pytest.mark.parametrize("method", STALE)
def test_what_has_changed_since_it_was_read(plain: Daemon, method: str) -> None:
    told = refusal(plain.grpc, f"{EXPERIMENT}/{method}", STALE[method])
    assert (told.code, told.info.reason) == (Code.ABORTED, "ETAG")
    assert "'lean'" in told.message and "read it again" in told.message


TAKEN = {
    "experiment": (
        "CreateExperiment",
        experiment_pb2.CreateExperimentRequest(experiment=definition("lean")),
        "DUPLICATE_ID",
        "lean",
    ),
    "outcome": ("RecordOutcome", outcome(metric="right", value=0), "OUTCOME_CONFLICT", "took part"),
}


@pytest.mark.parametrize("kind", TAKEN)
def test_what_is_there_already(plain: Daemon, kind: str) -> None:
    method, request, reason, name = TAKEN[kind]
    told = refusal(plain.grpc, f"{EXPERIMENT}/{method}", request)
    assert (told.code, told.info.reason) == (Code.ALREADY_EXISTS, reason)
    resource = told.details["ResourceInfo"]
    assert (resource.resource_type, resource.resource_name) == (kind, name)
    assert f"'{name}'" in told.message


def test_each_outcome_of_a_batch(plain: Daemon) -> None:
    """Is told what it would be told alone."""
    outcomes = [
        outcome(idempotency_key="batch"),
        outcome("gone"),
        outcome(metric="right", value=0),
        outcome(metric="haste"),
        outcome(value=NAN),
    ]
    batch = experiment_pb2.BatchRecordOutcomesRequest(outcomes=outcomes)
    [answer] = ask(plain.grpc, f"{EXPERIMENT}/BatchRecordOutcomes", batch)
    kept, *others = experiment_pb2.BatchRecordOutcomesResponse.FromString(answer).results
    assert kept.code == 0 and kept.HasField("response")
    for result, alone in zip(others, outcomes[1:], strict=True):
        told = refusal(plain.grpc, f"{EXPERIMENT}/RecordOutcome", alone)
        assert result.code == told.code.value[0] and not result.HasField("response")
        assert (result.reason, result.message) == (told.info.reason, told.message)
        assert result.HasField("retry_delay") == ("RetryInfo" in told.details)
    assert others[0].retry_delay.seconds == 1


@pytest.mark.parametrize(
    "method",
    [
        method.name
        for method in experiment_pb2.DESCRIPTOR.services_by_name[EXPERIMENT].methods
        if method.name != "PlanExperiment"  # which needs none
    ],
)
def test_a_server_without_experiments(small: Daemon, method: str) -> None:
    told = refusal(small.grpc, f"{EXPERIMENT}/{method}", b"")
    assert (told.code, told.info.reason) == (Code.FAILED_PRECONDITION, "EXPERIMENTS_OFF")
    assert "--experiment_store" in told.message


def test_a_store_that_is_away(plain: Daemon, store: Path) -> None:
    """Nobody can write to it: definitions have to wait; outcomes, once the spool is full, and
    requests never."""
    stop = experiment_pb2.StopExperimentRequest(name="lean")
    another = experiment_pb2.CreateExperimentRequest(experiment=definition("another"))

    def record(
        outcomes: list[experiment_pb2.RecordOutcomeRequest],
    ) -> Sequence[experiment_pb2.BatchRecordOutcomesResponse.Result]:
        batch = experiment_pb2.BatchRecordOutcomesRequest(outcomes=outcomes)
        [answer] = ask(plain.grpc, f"{EXPERIMENT}/BatchRecordOutcomes", batch)
        return experiment_pb2.BatchRecordOutcomesResponse.FromString(answer).results

    with (
        closing(sqlite3.connect(store, isolation_level=None)) as other,
        ThreadPoolExecutor(20) as pool,
    ):
        other.execute("BEGIN EXCLUSIVE")
        waiting = [  # 5 s each, meanwhile the spool is filled
            pool.submit(refusal, plain.grpc, f"{EXPERIMENT}/{method}", request)
            for method, request in (("CreateExperiment", another), ("StopExperiment", stop))
        ]
        request = generate(labels=ELIGIBLE, stop={"max_output_tokens": 1})
        ask(plain.grpc, f"{GENERATION}/Generate", request)
        outcomes = [outcome("gone")] * 1000
        # At once, for each answer may wait for another try of the store, which takes 5 s.
        list(pool.map(record, [outcomes] * 18))
        while outcomes:  # until there is no room for one
            if any(result.code for result in record(outcomes)):
                outcomes = outcomes[: len(outcomes) // 10]
        longer = outcome("gone", idempotency_key="k" * 64)
        unavailable = [refusal(plain.grpc, f"{EXPERIMENT}/RecordOutcome", longer)]
        unavailable += [refused.result() for refused in waiting]
    for told in unavailable:
        assert (told.code, told.info.reason) == (Code.UNAVAILABLE, "STORE_UNAVAILABLE")
        assert told.retry_seconds == 1

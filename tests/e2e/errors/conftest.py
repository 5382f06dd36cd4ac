"""The daemons that tests of errors ask."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from epikv.testing import Daemon
from epikv.v1 import experiment_pb2
from google.protobuf.message import Message
from small_daemon import small_daemon
from sound_experiment import ELIGIBLE, arms, definition, outcome
from told import EXPERIMENT, GENERATION, ask, generate


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("experiments") / "store.db"


@pytest.fixture(scope="module")
def plain(sample_model: Path, store: Path) -> Iterator[Daemon]:
    """Without statistics for policies that need them; with experiments, see `define`."""
    flags = (f"--experiment_store={store}", "--experiment_spool_bytes=1048576")
    with Daemon(sample_model, "--threads=1", *flags) as daemon:
        define(daemon)
        yield daemon


def define(daemon: Daemon) -> None:
    """An experiment in every state, and a request that took part in "lean" and in "hasty"."""

    def manage(method: str, request: Message) -> None:
        ask(daemon.grpc, f"{EXPERIMENT}/{method}", request)

    # Their arms set nothing, so that they run beside "lean".
    aside = {"arms": arms({}, {"kv": {}}), "metrics": [{"name": "haste"}]}
    aside["primary_metric"] = "haste"
    definitions = [
        definition("lean"),
        definition("hasty", layer="hasty", outcome_window={"nanos": 1000}, **aside),
        definition("over", layer="over", **aside),
        definition("draft"),
        definition("elsewhere", layer="elsewhere"),
        definition("undecided", primary_metric=""),
        definition("past", end_time={"seconds": 1}),
    ]
    for experiment in definitions:
        create = experiment_pb2.CreateExperimentRequest(experiment=experiment)
        manage("CreateExperiment", create)
    for name in ("lean", "hasty", "over"):
        manage("StartExperiment", experiment_pb2.StartExperimentRequest(name=name))
    manage("StopExperiment", experiment_pb2.StopExperimentRequest(name="over"))
    ask(
        daemon.grpc,
        f"{GENERATION}/Generate",
        generate(request_id="took part", labels=ELIGIBLE, stop={"max_output_tokens": 1}),
    )
    manage("RecordOutcome", outcome(metric="right"))


@pytest.fixture(scope="module")
def small(sample_model: Path) -> Iterator[Daemon]:
    with small_daemon(sample_model) as daemon:
        yield daemon

"""A/B experiments on the real daemon: dealt, recorded, reported, and there again after a crash."""

import itertools
import json
import sqlite3
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from click.testing import CliRunner
from definitions import LEAN, define
from epikv import Client, Experiment, Kv, RpcError, Stop
from epikv.cli import main
from epikv.eval.items import Item
from epikv.eval.tasks import load
from epikv.scrape import fetch
from epikv.testing import Daemon, DaemonError
from epikv.v1 import experiment_pb2
from load_schema import SCHEMA

PROBLEMS = 320
GENEROUS_SECONDS = 60
TASK = "sample:programs@6"
SAME = LEAN.replace('"sliding" keep_ratio: 0.45', '"full"').replace(
    'name: "lean" t', 'name: "same" t'
)


@pytest.fixture(scope="module")
def problems() -> list[Item]:
    return [item for item in load(TASK, "load", PROBLEMS) if isinstance(item, Item)]


@pytest.fixture(scope="module")
def serve(sample_model: Path) -> Callable[[Path], Daemon]:
    def daemon(folder: Path) -> Daemon:
        return Daemon(sample_model, "--threads=1", f"--experiment_store={folder / 'store.db'}")

    return daemon


@pytest.fixture(scope="module")
def server(
    serve: Callable[[Path], Daemon], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Daemon]:
    with serve(tmp_path_factory.mktemp("experiments")) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def client(server: Daemon) -> Iterator[Client]:
    with Client(server.grpc) as client:
        yield client


def solve(
    client: Client, item: Item, experiment: Experiment, kv: Kv | None = None
) -> tuple[str, str, bool]:
    """Its request, its arm, and whether the answer is right."""
    assert item.trace_tokens is not None
    result = client.generate_once(
        item.prompt,
        kv=kv or Kv(),
        experiment=experiment,
        stop=Stop(max_output_tokens=item.trace_tokens + 8),
    )
    assert result.accepted is not None
    return result.accepted.request_id, result.accepted.arm, all(item.judge(result.text))


def run(client: Client, problems: list[Item], units: str) -> dict[str, list[bool]]:
    """All problems, each a unit, their outcomes recorded; right or wrong by arm."""
    by_arm: dict[str, list[bool]] = {}

    def one(number_and_item: tuple[int, Item]) -> tuple[str, bool]:
        number, item = number_and_item
        request, arm, right = solve(client, item, Experiment(unit_id=f"{units}-{number}"))
        client.record_outcome(request, "right", float(right))
        return arm, right

    with ThreadPoolExecutor(8) as pool:
        for arm, right in pool.map(one, enumerate(problems)):
            by_arm.setdefault(arm, []).append(right)
    return by_arm


def report(client: Client, name: str) -> experiment_pb2.ExperimentReport:
    return client.experiment_report(name)


def drive(server: Daemon, folder: Path) -> dict[str, Any]:
    """The load generator's figures by arm of the experiment that runs: each problem asked once, by a
    user of its own, and whether the answer was right recorded."""
    path = folder / "load.json"
    command = [
        *("bench", "load", "--server", server.grpc, "--json", str(path), "--outcome", "right"),
        *("--task", TASK, "--problems", str(PROBLEMS), "--units", str(PROBLEMS)),
        *("--concurrency", "8", "--requests", str(PROBLEMS)),
    ]
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 0, done.output
    told = json.loads(path.read_text())
    jsonschema.validate(told, SCHEMA)
    arms = told["experiment_arms"]
    assert sum(arm["outcomes"] for arm in arms.values()) == told["total"]["ok"] == PROBLEMS
    for name, arm in arms.items():
        assert f"{arm['right']['value']:.3f}" in done.output and name in done.output
    return arms


def test_the_true_difference_is_found(
    server: Daemon, client: Client, problems: list[Item], tmp_path: Path
) -> None:
    # Known from every problem under both arms, outside of any experiment.
    outside = Experiment(opt_out=True)
    lean = Kv(policy="sliding", budget=0.45)
    with ThreadPoolExecutor(8) as pool:
        right = list(pool.map(lambda item: solve(client, item, outside, lean)[2], problems))
    full = [solve(client, item, outside)[2] for item in problems[:40]]
    truth = sum(right) / len(right) - sum(full) / len(full)
    assert truth < -0.3

    client.create_experiment(define(LEAN))
    client.start_experiment("lean")
    by_arm = drive(server, tmp_path)
    assert set(by_arm) == {"lean/full", "lean/lean"}
    found = report(client, "lean")
    assert not found.blocked and not found.sample_ratio.alarm
    assert [arm.units for arm in found.arms] == [by_arm[f"lean/{a}"]["n"] for a in ("full", "lean")]
    assert sum(arm.exposed_requests for arm in found.arms) == PROBLEMS
    primary = found.metrics[0]
    assert primary.metric.name == "right" and primary.primary
    for value, arm in zip(primary.all.arms, ("lean/full", "lean/lean"), strict=True):
        assert value.coverage == 1
        assert value.mean == pytest.approx(by_arm[arm]["right"]["value"])
    effect = primary.all.effects[0]
    assert effect.verdict == experiment_pb2.Effect.VERDICT_WORSE
    assert effect.interval.lower <= truth <= effect.interval.upper
    evicted = next(m for m in found.metrics if m.metric.name == "kv_evicted_tokens")
    assert evicted.all.arms[0].mean == 0 < evicted.all.arms[1].mean
    assert evicted.all.effects[0].verdict == experiment_pb2.Effect.VERDICT_DIFFERS
    client.stop_experiment("lean", reason="known")


def test_the_page_of_a_report_holds_its_figures(
    server: Daemon, client: Client, problems: list[Item], tmp_path: Path
) -> None:
    definition = define(LEAN)
    definition.name = definition.salt = "page"
    client.create_experiment(definition)
    client.start_experiment("page")
    run(client, problems[:24], "page")
    client.stop_experiment("page", reason="known")
    file = tmp_path / "page.html"
    words = ("experiment", "report", "page", "--html", str(file), f"--server={server.grpc}")
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    found = report(client, "page")
    difference = found.metrics[0].all.effects[0].difference
    guarded = found.guardrails[0].difference
    told = file.read_text("utf-8")
    for path, value in (
        ("metric/right/all/lean/difference", difference),
        ("guardrail/failed/lean/difference", guarded),
    ):
        assert f'data-figure="{path}" data-value="{value!r}"' in told


def test_equal_arms_differ_in_nothing(server: Daemon, client: Client, tmp_path: Path) -> None:
    client.create_experiment(define(SAME))
    client.start_experiment("same")
    by_arm = drive(server, tmp_path)
    assert set(by_arm) == {"same/full", "same/lean"}
    found = report(client, "same")
    undecided = (
        experiment_pb2.Effect.VERDICT_UNDECIDED,
        experiment_pb2.Effect.VERDICT_TOO_EARLY,
    )
    for metric in found.metrics:
        assert all(effect.verdict in undecided for effect in metric.all.effects), metric.metric.name
    client.stop_experiment("same", reason="known")


def test_all_is_there_after_a_crash(
    serve: Callable[[Path], Daemon], problems: list[Item], tmp_path: Path
) -> None:
    numbers = itertools.count()
    killed = pytest.raises(DaemonError, match="status -9")
    with killed, serve(tmp_path) as daemon, Client(daemon.grpc) as client:
        client.create_experiment(define(LEAN))
        client.start_experiment("lean")
        before = run(client, problems[:24], "crash")
        arms = {
            n: solve(client, problems[0], Experiment(unit_id=f"crash-{n}"))[1] for n in range(8)
        }
        daemon.kill()
    with serve(tmp_path) as daemon, Client(daemon.grpc) as client:
        for n, arm in arms.items():
            assert (
                solve(client, problems[next(numbers)], Experiment(unit_id=f"crash-{n}"))[1] == arm
            )
        found = report(client, "lean")
        for arm in found.metrics[0].all.arms:
            assert arm.observations == len(before.get(f"lean/{arm.arm}", []))


def test_forcing_and_opting_out_are_told_apart(client: Client, problems: list[Item]) -> None:
    definition = define(LEAN)
    definition.name = definition.salt = "forced"
    client.create_experiment(definition)
    client.start_experiment("forced")
    try:
        for arm in ("forced/lean", "forced/full"):
            assert solve(client, problems[0], Experiment(force_arm=arm))[1] == arm
        assert solve(client, problems[0], Experiment(opt_out=True))[1] == "none"
        with pytest.raises(RpcError, match="no running experiment has the arm 'forced/fat'"):
            solve(client, problems[0], Experiment(force_arm="forced/fat"))
        found = report(client, "forced")
        assert found.forced_requests == 2
        assert sum(arm.requests for arm in found.arms) == 0
    finally:
        client.stop_experiment("forced", reason="done")


def test_what_stopped_long_ago_has_no_series(
    serve: Callable[[Path], Daemon], problems: list[Item], tmp_path: Path
) -> None:
    with serve(tmp_path) as daemon, Client(daemon.grpc) as client:
        for name in ("bygone", "lately"):
            definition = define(LEAN)
            definition.name = definition.salt = name
            definition.traffic_permille = 500
            client.create_experiment(definition)
            client.start_experiment(name)
        arms = {solve(client, problems[0], Experiment(unit_id=f"u-{n}"))[1] for n in range(24)}
        assert {arm.partition("/")[0] for arm in arms} == {"bygone", "lately"}
        for name in ("bygone", "lately"):
            client.stop_experiment(name, reason="done")
        assert all(f'"{arm}"' in fetch(daemon.metrics) for arm in arms)
        # As if it had been eleven minutes ago.
        stopped = client.experiment("bygone")
        stopped.stop_time.seconds -= 11 * 60
        with closing(sqlite3.connect(tmp_path / "store.db")) as store, store:
            store.execute(
                "UPDATE experiments SET definition = ? WHERE name = 'bygone'",
                (stopped.SerializeToString(),),
            )
            store.execute("UPDATE revisions SET revision = revision + 1")
        deadline = time.monotonic() + GENEROUS_SECONDS
        while "bygone" in (page := fetch(daemon.metrics)):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert 'experiment="lately"' in page and '"lately/' in page

"""A switchback experiment on two real replicas with one PostgreSQL: everybody is on one arm at a time."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import cycle
from pathlib import Path

import pytest
from click.testing import CliRunner
from epikv import Client, Experiment, Stop
from epikv.cli import main
from epikv.experiment.assignment import Window, arm_of, window_at
from epikv.testing import Daemon
from epikv.v1 import experiment_pb2
from google.protobuf import text_format
from postgres import Postgres

GENEROUS_SECONDS = 60
CLIENTS, TOKENS = 6, 40
WINDOW_SECONDS, WINDOWS = 1, 14

DEFINITION = """
name: "switch" traffic_permille: 1000
arms { name: "full" weight_permille: 500 control: true kv { policy: "full" } }
arms { name: "lean" weight_permille: 500 kv { policy: "sliding" max_tokens: 32 } }
primary_metric: "output_tokens_per_second"
guardrails { metric: "ttft_seconds" margin: 10 }
switchback { window { seconds: 1 } wash_out { nanos: 200000000 } }
"""


@pytest.fixture(scope="module")
def replicas(sample_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Their addresses."""
    with ExitStack() as stack:
        store = stack.enter_context(Postgres()).url
        daemons = []
        for name in "ab":
            spool = tmp_path_factory.mktemp(f"spool-{name}")
            flags = (f"--experiment_store={store}", f"--experiment_spool={spool}")
            daemons.append(stack.enter_context(Daemon(sample_model, "--threads=1", *flags)))
        yield [daemon.grpc for daemon in daemons]


@dataclass(frozen=True)
class Asked:
    """A request; it began between two times."""

    replica: str
    arm: str
    earliest: datetime
    latest: datetime


def ask(client: Client, unit: str) -> tuple[str, datetime]:
    """Its arm, and when that was told."""
    with client.generate(
        [5] * 20,
        stop=Stop(TOKENS, min_output_tokens=TOKENS, ignore_eos=True),
        experiment=Experiment(unit_id=unit),
    ) as events:
        arm = next(iter(events)).arm
        told = datetime.now(UTC)
        for _ in events:
            pass
    return arm, told


def keep_asking(address: str, unit: str, over: threading.Event) -> list[Asked]:
    asked = []
    with Client(address) as client:
        while not over.is_set():
            earliest = datetime.now(UTC)
            arm, latest = ask(client, unit)
            asked.append(Asked(address, arm, earliest, latest))
    return asked


@pytest.fixture(scope="module")
def begun(replicas: list[str]) -> Iterator[experiment_pb2.Experiment]:
    """It runs, and both have heard of it."""
    with Client(replicas[0]) as client:
        client.create_experiment(text_format.Parse(DEFINITION, experiment_pb2.Experiment()))
        started = client.start_experiment("switch")
        deadline = time.monotonic() + GENEROUS_SECONDS
        for address in replicas:
            with Client(address) as replica:
                while ask(replica, "probe")[0] == "none":
                    assert time.monotonic() < deadline
        yield started


@pytest.fixture(scope="module")
def asked(replicas: list[str], begun: experiment_pb2.Experiment) -> list[Asked]:
    """Of clients that ask both replicas all the while, until the experiment was stopped."""
    over = threading.Event()
    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = [
            pool.submit(keep_asking, address, f"user-{n}", over)
            for n, address in zip(range(CLIENTS), cycle(replicas), strict=False)
        ]
        time.sleep(WINDOWS * WINDOW_SECONDS)
        over.set()
        found = [each for client in clients for each in client.result()]
    with Client(replicas[0]) as client:
        client.stop_experiment("switch", reason="done")
    return found


def window_of(begun: experiment_pb2.Experiment, each: Asked) -> Window | None:
    """None: it began about the end of one."""
    first, last = (window_at(begun.switchback, at) for at in (each.earliest, each.latest))
    return first if first == last else None


def test_everybody_is_on_one_arm_at_a_time(
    replicas: list[str], begun: experiment_pb2.Experiment, asked: list[Asked]
) -> None:
    arms: dict[int, str] = {}
    seen: dict[int, set[str]] = {}
    for each in asked:
        if (window := window_of(begun, each)) is not None:
            assert each.arm == f"switch/{arm_of(begun, window.unit)}"
            assert arms.setdefault(window.number, each.arm) == each.arm
            seen.setdefault(window.number, set()).add(each.replica)
    assert len(arms) >= WINDOWS - 2
    assert {*arms.values()} == {"switch/full", "switch/lean"}
    assert sum(both == set(replicas) for both in seen.values()) >= WINDOWS / 2


def test_the_report_has_throughput_and_confounds_nothing(
    replicas: list[str], begun: experiment_pb2.Experiment, asked: list[Asked]
) -> None:
    time.sleep(2.5 * WINDOW_SECONDS)  # until the last whole window counts
    with Client(replicas[1]) as client:
        report = client.experiment_report("switch")
    assert not any(metric.confounded for metric in report.metrics)
    metrics = {metric.metric.name: metric for metric in report.metrics}
    assert metrics["ttft_seconds"].all.arms[0].mean > 0
    assert any("in windows of 1s" in note for note in report.notes)
    # Each analysed request has put out as many tokens, and the probes have two.
    output = metrics["output_tokens_per_second"]
    assert output.primary
    analysed_seconds = 0.8 * WINDOW_SECONDS
    tokens = sum(arm.mean * arm.units for arm in output.all.arms) * analysed_seconds
    analysed = sum(arm.requests for arm in report.arms)
    assert tokens == pytest.approx(TOKENS * round(tokens / TOKENS))
    assert 0.6 * TOKENS * analysed < tokens < TOKENS * analysed
    ran = report.experiment.stop_time.ToDatetime() - report.experiment.start_time.ToDatetime()
    whole = int(ran.total_seconds() / WINDOW_SECONDS)
    assert whole - 3 <= sum(arm.units for arm in output.all.arms) <= whole
    washed_out = [
        window_of(begun, each) is not None
        and each.latest < window_at(begun.switchback, each.latest).analysed_from
        for each in asked
    ]
    assert sum(washed_out) <= report.washed_out_requests < len(asked) / 2
    assert analysed + report.washed_out_requests >= len(asked)
    assert report.crossed_requests == 0


def test_people_are_told_of_windows(replicas: list[str], asked: list[Asked]) -> None:
    def tell(*words: str) -> str:
        done = CliRunner().invoke(main, (*words, f"--server={replicas[0]}"))
        assert done.exit_code == 0, done.output
        return " ".join(done.output.split())

    told = tell("experiment", "report", "switch")
    assert "windows of 1 s, the first 0.2 s of each not analysed" in told
    assert "output_tokens_per_second, the primary metric" in told and "tokens/s" in told
    assert "windows of 1 s" in tell("experiment", "show", "switch")

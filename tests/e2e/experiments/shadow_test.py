"""Replays of finished requests on the real daemon: what they show, and that nobody notices them."""

import json
import time
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from math import fsum
from pathlib import Path

import pytest
import torch
from divergences import divergence
from epikv import Client, Experiment, Kv, Output, Sampling, Steering, Stop
from epikv.calibrate import artefacts
from epikv.eval.items import Item
from epikv.eval.tasks import load
from epikv.export.archive import read_manifest
from epikv.testing import Daemon
from epikv.v1 import experiment_pb2
from google.protobuf import text_format
from metrics_page import Family, moved, parse

GENEROUS_SECONDS = 60
PROBLEMS = 8
LONG = Stop(max_output_tokens=1100, min_output_tokens=1100, ignore_eos=True)

LEAN = """
name: "lean" traffic_permille: 1000
arms { name: "full" weight_permille: 500 control: true kv { policy: "full" } }
arms { name: "lean" weight_permille: 500 kv { policy: "sliding" keep_ratio: 0.45 } }
metrics { name: "right" kind: KIND_PROPORTION }
primary_metric: "right"
guardrails { metric: "shadow_kl_nats" margin: 100 }
"""
# What replays move, what they hold meanwhile, and what moves by itself.
THEIRS = ("epikv_experiment_shadow_", "epikv_experiment_records_total")
HELD = ("epikv_kv_bytes", "epikv_kv_usage_ratio", "epikv_kv_reserved_ratio")
BY_THEMSELVES = ("process_", "exposer_", "epikv_kv_peak_used_bytes", "epikv_kv_longest_move")


class Watched:
    """A daemon with an experiment that runs, and its page."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self.client = Client(daemon.grpc)

    def page(self) -> dict[str, Family]:
        with urllib.request.urlopen(f"http://{self.daemon.metrics}/metrics", timeout=30) as reply:
            return parse(reply.read().decode())

    def value(self, family: str, **labels: str) -> float:
        """The sum of its series with these labels."""
        values = self.page()[family].values.items()
        return fsum(value for of, value in values if labels.items() <= dict(of).items())

    def compared(self) -> float:
        return self.value("epikv_experiment_shadow_requests_total", outcome="compared")

    def replays(self) -> bool:
        """Something holds KV, and it is no request."""
        page = self.page()
        used = page["epikv_kv_bytes"].values
        running = fsum(page["epikv_requests_running"].values.values())
        held = fsum(value for of, value in used.items() if ("state", "used") in of)
        return held > 0 and running == 0

    def start(self) -> None:
        self.client.create_experiment(text_format.Parse(LEAN, experiment_pb2.Experiment()))
        self.client.start_experiment("lean")


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + GENEROUS_SECONDS
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture(scope="module")
def problems() -> list[Item]:
    found = load("sample:programs@6", "shadow", PROBLEMS)
    return [item for item in found if isinstance(item, Item)]


@pytest.fixture(scope="module")
def access_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log") / "access.log"


@pytest.fixture(scope="module")
def watched(
    sample_model: Path, access_log: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Watched]:
    flags = (
        "--threads=1",
        f"--experiment_store={tmp_path_factory.mktemp('shadow') / 'store.db'}",
        "--experiment_shadow_permille=1000",
        "--experiment_shadow_time_share=1",
        f"--access_log={access_log}",
    )
    with Daemon(sample_model, *flags) as daemon:
        watched = Watched(daemon)
        watched.start()
        yield watched


def test_replays_show_what_a_client_finds_by_scoring(
    watched: Watched, problems: list[Item], access_log: Path
) -> None:
    client = watched.client
    results = []
    for number, item in enumerate(problems):
        result = client.generate_once(
            item.prompt,
            experiment=Experiment(unit_id=f"user-{number}"),
            stop=Stop(max_output_tokens=(item.trace_tokens or 0) + 8),
            output=Output(token_ids=True),
        )
        results.append(result)
        # Before the next one: a replay that requests interrupt is given up after some tries.
        until(lambda: watched.compared() == len(results))

    expected: dict[str, list[tuple[float, float]]] = {"full": [], "lean": []}
    for item, result in zip(problems, results, strict=True):
        arm = result.accepted.arm.removeprefix("lean/")
        budget = result.accepted.kv.budget_tokens
        kv = Kv(policy="sliding", budget=budget) if arm == "lean" else Kv(policy="full")

        ask = partial(client.score, item.prompt, result.token_ids, top_logprobs=20)
        full, as_it_ran = ask(chunked=True), ask(kv=kv)
        expected[arm].append(divergence(full, as_it_ran))
        assert as_it_ran.summary.kv.evicted_tokens == result.summary.kv.evicted_tokens
    assert all(len(of_arm) >= 2 for of_arm in expected.values())

    until(
        lambda: report(client, "shadow_kl_nats").all.arms[1].observations == len(expected["lean"])
    )
    kl, agreement = (report(client, f"shadow_{name}") for name in ("kl_nats", "top1_agreement"))
    for place, arm in enumerate(("full", "lean")):
        means = [fsum(column) / len(expected[arm]) for column in zip(*expected[arm], strict=True)]
        assert kl.all.arms[place].observations == len(expected[arm])
        # A client is told of 20 of the 164 tokens, and so of somewhat less.
        assert means[0] - 1e-6 <= kl.all.arms[place].mean <= 1.1 * means[0] + 1e-6
        assert agreement.all.arms[place].mean == pytest.approx(means[1], abs=1e-9)
    assert 0 <= kl.all.arms[0].mean < 1e-6 and agreement.all.arms[0].mean == 1
    assert kl.all.arms[1].mean > 0.01 and agreement.all.arms[1].mean < 1

    def of(name: str, arm: str) -> float:
        return watched.value(f"epikv_experiment_shadow_{name}_total", arm=arm)

    tokens = {"full": 0, "lean": 0}
    for result in results:
        tokens[result.accepted.arm.removeprefix("lean/")] += len(result.token_ids)
    for arm, count in tokens.items():
        assert of("tokens", arm) == count
    assert of("agreed_tokens", "full") == tokens["full"] and of("kl_nats", "full") < 1e-3
    assert of("agreed_tokens", "lean") < tokens["lean"] and of("kl_nats", "lean") > 1
    assert watched.value("epikv_experiment_shadow_seconds_total") > 0
    assert watched.value("epikv_experiment_shadow_waiting_requests") == 0
    assert watched.value("epikv_kv_bytes", state="used") == 0
    spreads = client.experiment_report("lean").arms[1].distributions
    assert {d.metric for d in spreads if d.count} >= {"shadow_kl_nats", "shadow_top1_agreement"}


def report(client: Client, metric: str) -> experiment_pb2.MetricReport:
    metrics = client.experiment_report("lean").metrics
    return next(each for each in metrics if each.metric.name == metric)


def test_a_replay_is_steered_as_the_request_was(
    sample_model: Path, problems: list[Item], tmp_path: Path
) -> None:
    """Else what steering changed would be taken for what eviction did."""
    manifest = read_manifest(sample_model)
    artefacts.write(
        tmp_path / "artefacts" / "steering.json",
        "steering",
        manifest,
        data={"layer": 1, "at": list(range(manifest.vocab_size)), "ends": [], "marks": []},
        arrays={"vector": torch.linspace(-1, 1, manifest.hidden_size)},
        made_with={"test": "shadow"},
    )
    flags = (
        "--threads=1",
        f"--artefact_dir={tmp_path / 'artefacts'}",
        f"--experiment_store={tmp_path / 'store.db'}",
        "--experiment_shadow_permille=1000",
        "--experiment_shadow_time_share=1",
    )
    with Daemon(sample_model, *flags) as daemon:
        watched = Watched(daemon)
        watched.start()
        arms = []
        for number in range(6):
            result = watched.client.generate_once(
                problems[0].prompt,
                sampling=Sampling(temperature=0, steering=Steering(0.5)),
                experiment=Experiment(unit_id=f"user-{number}"),
                stop=Stop(200, ignore_eos=True),
            )
            arms.append(result.accepted.arm)
            until(lambda: watched.compared() == len(arms))
        assert {"lean/full", "lean/lean"} == set(arms)
        assert watched.value("epikv_experiment_shadow_kl_nats_total", arm="full") < 1e-3
        assert watched.value("epikv_experiment_shadow_kl_nats_total", arm="lean") > 0.01


def page_soon(watched: Watched) -> dict[str, Family]:
    time.sleep(0.1)
    return watched.page()


def others(before: dict[str, Family], page: dict[str, Family]) -> set[str]:
    """The families that moved, but for those that replays may move."""
    ours = (*THEIRS, *HELD, *BY_THEMSELVES)
    families = {series.family for series in moved(before, page)}
    return {family for family in families if not family.startswith(ours)}


def test_nothing_else_tells_of_a_replay(watched: Watched, access_log: Path) -> None:
    compared = watched.compared()
    request = watched.client.generate_once(
        "1 + 1", experiment=Experiment(unit_id="long"), stop=LONG, request_id="long"
    )
    assert request.accepted.arm.startswith("lean/")
    before = watched.page()
    while others(before, now := page_soon(watched)):  # its last step is counted after its answer
        before = now
    lines = access_log.read_text().count("\n")
    until(watched.replays)
    amid = watched.page()
    until(lambda: watched.compared() == compared + 1)
    after = watched.page()
    for page in (amid, after):
        assert not others(before, page)
    until(lambda: access_log.read_text().count("\n") >= lines)
    told = [json.loads(line) for line in access_log.read_text().splitlines()]
    generated = [line for line in told if line["method"].endswith("GenerateOnce")]
    assert sum(line["request_id"] == "long" for line in generated) == 1
    assert not any(line.get("request_id", "") == "" for line in generated)


def test_a_live_request_comes_first(watched: Watched) -> None:
    def interruptions() -> float:
        return watched.value("epikv_experiment_shadow_interruptions_total")

    compared, before = watched.compared(), interruptions()
    watched.client.generate_once("2 + 2", experiment=Experiment(unit_id="long"), stop=LONG)
    until(watched.replays)
    live = watched.client.generate_once("3 + 3", experiment=Experiment(opt_out=True))
    assert live.summary.finish_reason
    until(lambda: interruptions() == before + 1)
    until(lambda: watched.compared() == compared + 1)  # it was tried again
    assert watched.value("epikv_experiment_shadow_waiting_requests") == 0


def test_a_daemon_may_end_amid_a_replay(sample_model: Path, tmp_path: Path) -> None:
    flags = (
        "--threads=1",
        f"--experiment_store={tmp_path / 'store.db'}",
        "--experiment_shadow_permille=1000",
        "--drain_seconds=600",
    )
    with Daemon(sample_model, *flags) as daemon:
        watched = Watched(daemon)
        watched.start()
        watched.client.generate_once("1 + 1", experiment=Experiment(unit_id="u"), stop=LONG)
        until(watched.replays)
        daemon.terminate()  # and status 0 on leaving
    with Daemon(sample_model, *flags[:2], "--experiment_shadow_permille=0") as daemon:
        watched = Watched(daemon)
        assert report(watched.client, "shadow_kl_nats").all.arms[0].observations == 0
        assert report(watched.client, "shadow_kl_nats").all.arms[1].observations == 0
        # Off, nothing is kept and nothing replayed.
        for number in range(4):
            unit = Experiment(unit_id=f"u{number}")
            result = watched.client.generate_once("1 + 1", experiment=unit, stop=Stop(8))
            assert result.accepted.arm.startswith("lean/")
            assert watched.value("epikv_experiment_shadow_waiting_requests") == 0
        assert watched.value("epikv_experiment_shadow_seconds_total") == 0
        assert watched.value("epikv_experiment_shadow_requests_total") == 0

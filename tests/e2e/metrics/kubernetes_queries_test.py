"""PromQL of deploy/kubernetes, on a real Prometheus that scrapes a real daemon as the ServiceMonitor says; and the series
that the picker reads."""

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml
from epikv import Client, Stop
from epikv.sample import problem
from epikv.scrape import fetch
from epikv.testing import PACED, Daemon, Gateway
from kustomized import KUBERNETES, Object, build, one
from metrics_page import parse
from prometheus_server import Prometheus

OBJECTS = build(KUBERNETES / "overlays" / "inference-pool")
TRIGGERS: list[Object] = one(OBJECTS, "ScaledObject", "epikvd")["spec"]["triggers"]
WAITING = 3
PICKER = yaml.safe_load((KUBERNETES / "components/inference-pool/picker-config.yaml").read_text())


def scrape_configs(targets: dict[str, str]) -> list[Object]:
    """What the Prometheus operator makes of the ServiceMonitor: each endpoint's relabelings come after its own labels,
    and here the targets are told, where the operator finds them by the Service."""
    monitor = one(OBJECTS, "ServiceMonitor", "epikvd")
    labels = {"namespace": "epikv", "service": "epikvd-replicas", "pod": "epikvd-0"}
    found = {"__meta_kubernetes_pod_name": "epikvd-0"}
    return [
        {
            "job_name": f"serviceMonitor/epikv/epikvd/{at}",
            "scrape_interval": "1s",
            "static_configs": [{"targets": [targets[each["port"]]], "labels": labels | found}],
            "relabel_configs": [of_prometheus(rule) for rule in each["relabelings"]],
        }
        for at, each in enumerate(monitor["spec"]["endpoints"])
    ]


def of_prometheus(rule: Object) -> Object:
    """A relabeling in Prometheus' own spelling."""
    return {re.sub("[A-Z]", lambda at: f"_{at[0].lower()}", name): of for name, of in rule.items()}


@pytest.fixture(scope="module")
def daemon(sample_model: Path) -> Iterator[Daemon]:
    narrow = ("--outbox_messages=8", "--outbox_bytes=1024", "--stream_stall_seconds=600")
    with Daemon(sample_model, "--threads=1", "--max_running_requests=1", *narrow) as running:
        yield running


@pytest.fixture(scope="module")
def prometheus(daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    folder = tmp_path_factory.mktemp("prometheus")
    rules = folder / "rules.yml"
    rules.write_text(json.dumps(one(OBJECTS, "PrometheusRule", "epikvd")["spec"]))
    with Gateway(daemon.grpc) as gateway:
        targets = {"metrics": daemon.metrics, "http": gateway.address}
        config = {
            "global": {"evaluation_interval": "1s"},
            "rule_files": [str(rules)],
            "scrape_configs": scrape_configs(targets),
        }
        started = Prometheus(folder, json.dumps(config))
        try:
            started.until("count(count_over_time(up[1h]) > 1)", lambda jobs: jobs == 2)
            yield started
        finally:
            started.stop()


def test_jobs_and_instances_are_those_of_the_alerts(prometheus: Prometheus) -> None:
    up = prometheus.query("up")
    assert set(up) == {
        f"__name__=up,instance=epikvd-0,job={job},namespace=epikv,pod=epikvd-0,service=epikvd-replicas"
        for job in ("epikv", "epikv-gateway")
    }


def test_the_rules_are_evaluated_and_none_fires(prometheus: Prometheus) -> None:
    [group] = prometheus.get("rules")["groups"]
    assert len(group["rules"]) > 15
    assert {rule["health"] for rule in group["rules"]} <= {"ok", "unknown"}, group
    assert prometheus.query("ALERTS") == {}


@pytest.mark.parametrize("trigger", TRIGGERS, ids=lambda trigger: str(trigger["name"]))
def test_a_trigger_is_one_number(prometheus: Prometheus, trigger: Object) -> None:
    """KEDA takes no more than one, and with ignoreNullValues no less; also of a replica that has served nobody yet."""
    query = trigger["metadata"]["query"]
    assert trigger["metadata"]["ignoreNullValues"] == "false"
    assert prometheus.query(query) == {"": 0}
    assert prometheus.query(query.replace('"epikv"', '"elsewhere"')) == {}


def test_a_trigger_moves_when_requests_wait(prometheus: Prometheus, daemon: Daemon) -> None:
    """One runs, for which the daemon has room, and does not end while it is not read; others wait for it."""
    waits, wait = (trigger["metadata"]["query"] for trigger in TRIGGERS)
    stop = Stop(900, min_output_tokens=900, ignore_eos=True)
    with Client(daemon.grpc, PACED) as client, ExitStack() as streams:
        for _ in range(1 + WAITING):
            streams.enter_context(client.generate(problem(9).prompt, stop=stop))
        prometheus.until(waits, lambda found: found == WAITING)
        prometheus.until(wait, lambda found: found > 0)


@pytest.mark.parametrize("spec", ["queuedRequestsSpec", "runningRequestsSpec", "kvUsageSpec"])
def test_the_picker_reads_one_value(daemon: Daemon, spec: str) -> None:
    """It takes one of a series' values and no sum."""
    [extractor] = [each for each in PICKER["plugins"] if each["type"] == "core-metrics-extractor"]
    [engine] = extractor["parameters"]["engineConfigs"]
    labels = one(OBJECTS, "StatefulSet", "epikvd")["spec"]["template"]["metadata"]["labels"]
    assert labels["llm-d.ai/engine-type"] == engine["name"]
    page = parse(fetch(daemon.metrics))
    assert engine[spec] in page
    assert len(page[engine[spec]].values) == 1

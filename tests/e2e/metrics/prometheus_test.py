"""A real Prometheus scrapes the real daemon, and its tools have nothing to say against the page."""

import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from epikv import Kv, RpcError, Stop
from epikv.sample import problem
from epikv.testing import Daemon
from metrics_page import parse
from prometheus_server import ALERTS, SHIPPED, Prometheus, shipped
from prometheus_tool import tool

ALERT_TESTS = Path(__file__).parents[3] / "tests" / "prometheus" / "alerts_test.yml"
TASK = problem(9)
REQUESTS, OUTPUT = 5, 40


@pytest.fixture(scope="module")
def daemon(sample_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One that nobody else asks for anything."""
    store = tmp_path_factory.mktemp("experiments") / "store.db"
    with Daemon(sample_model, "--threads=1", f"--experiment_store={store}") as running:
        yield running


@pytest.fixture(scope="module")
def prometheus(daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    started = Prometheus(tmp_path_factory.mktemp("prometheus"), shipped(daemon.metrics))
    try:
        yield started
    finally:
        started.stop()


@pytest.fixture(scope="module")
def asked(daemon: Daemon, prometheus: Prometheus) -> None:
    """Known requests, between two scrapes."""
    prometheus.until("up", lambda up: up == 1)
    scrapes = prometheus.until("count_over_time(up[1h])", lambda count: count >= 1)
    stop = Stop(OUTPUT, min_output_tokens=OUTPUT, ignore_eos=True)
    with daemon.client() as client:
        for _ in range(REQUESTS):
            client.generate_once(TASK.prompt, kv=Kv("sliding", 130), stop=stop)
        with pytest.raises(RpcError):
            client.generate_once("")
    # One that began after they had ended.
    prometheus.until("count_over_time(up[1h])", lambda count: count >= scrapes + 2)


def test_it_is_up_and_scraped_whole(prometheus: Prometheus, daemon: Daemon, asked: None) -> None:
    assert prometheus.value("up") == 1
    samples = prometheus.value("scrape_samples_scraped")
    bound = prometheus.value("epikv_metrics_series")
    assert samples is not None and bound is not None and 300 < samples <= bound


def test_counters_are_what_was_sent(prometheus: Prometheus, asked: None) -> None:
    def total(promql: str) -> float | None:
        return prometheus.value(f"sum({promql})")

    assert total('epikv_requests_finished_total{policy="sliding",reason="length"}') == REQUESTS
    assert total('epikv_tokens_total{kind="output"}') == REQUESTS * OUTPUT
    assert total('epikv_requests_rejected_total{reason="invalid_request"}') == 1
    rpcs = 'epikv_grpc_requests_total{method="GenerationService/GenerateOnce"}'
    assert prometheus.query(f"sum by (code) ({rpcs})") == {
        "code=OK": REQUESTS,
        "code=INVALID_ARGUMENT": 1,
    }
    assert total("epikv_kv_budget_overrun_tokens_total") == 0


def test_histograms_have_quantiles(prometheus: Prometheus, asked: None) -> None:
    for name, most in (
        ("gen_ai_server_request_duration_seconds", 60),
        ("gen_ai_server_time_to_first_token_seconds", 60),
        ("epikv_evicted_attention_mass_ratio", 1),
    ):
        buckets = f"sum by (le) ({name}_bucket)"
        assert prometheus.value(f"sum({name}_count)") == REQUESTS
        p99 = prometheus.value(f"histogram_quantile(0.99, {buckets})")
        assert p99 is not None and 0 < p99 < most, name
        whole = f'sum({name}_bucket{{le="+Inf"}}) == sum({name}_count)'
        assert prometheus.value(whole) == REQUESTS


def test_the_pool_adds_up(prometheus: Prometheus, asked: None) -> None:
    states = "sum without (state) (epikv_kv_bytes)"
    assert prometheus.value(f"{states} == epikv_kv_capacity_bytes") is not None


def test_promtool_has_no_complaint(daemon: Daemon, asked: None) -> None:
    with urllib.request.urlopen(f"http://{daemon.metrics}/metrics", timeout=30) as reply:
        page = reply.read()
        assert reply.headers["Content-Type"].startswith("text/plain")
    checked = subprocess.run(
        [tool("promtool"), "check", "metrics"], input=page, check=False, capture_output=True
    )
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")
    assert len(parse(page.decode())) > 50


def test_promtool_would_complain(daemon: Daemon) -> None:
    """The check above can fail."""
    page = b"# HELP epikv_bad A counter.\n# TYPE epikv_bad counter\nepikv_bad 1\n"
    checked = subprocess.run(
        [tool("promtool"), "check", "metrics"], input=page, check=False, capture_output=True
    )
    assert checked.returncode != 0 and b"_total" in checked.stderr


def promtool(*args: str) -> None:
    done = subprocess.run([tool("promtool"), *args], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_alerts_fire_when_they_should_and_else_not() -> None:
    promtool("check", "config", str(SHIPPED / "prometheus.yml"))
    promtool("test", "rules", str(ALERT_TESTS))
    rules = yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]
    cases = [
        case
        for test in yaml.safe_load(ALERT_TESTS.read_text())["tests"]
        for case in test["alert_rule_test"]
    ]
    fired = {case["alertname"] for case in cases if case.get("exp_alerts")}
    quiet = {case["alertname"] for case in cases if not case.get("exp_alerts")}
    assert {rule["alert"] for rule in rules} == fired == quiet


def test_no_alert_fires_on_a_daemon_that_is_well(prometheus: Prometheus, asked: None) -> None:
    rules = prometheus.get("rules")["groups"][0]["rules"]
    assert {rule["health"] for rule in rules} == {"ok"}, rules
    assert prometheus.query("ALERTS") == {}

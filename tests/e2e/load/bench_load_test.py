"""`epikv bench load` and `epikv bench overload` on the real daemon, shortly."""

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import jsonschema
import pytest
from click.testing import CliRunner
from credentials import authority, new_token, signed
from epikv.bench.generator import Retries
from epikv.cli import main
from epikv.connection import TLS_VARIABLES, Tls
from epikv.scrape import scrape
from epikv.testing import Daemon
from epikv_lab.bench import overload
from load_schema import SCHEMA


def test_a_load_counts_what_the_daemon_counts(daemon: Daemon, tmp_path: Path) -> None:
    """With no warm-up, every request is in the figures."""
    path, before = tmp_path / "load.json", scrape(daemon.metrics)
    arms = {"full": "full::2", "sliding:24": "sliding:24"}
    result = CliRunner().invoke(
        main,
        [
            *("bench", "load", "--server", daemon.grpc, "--metrics", daemon.metrics),
            *("--rate", "20", "--duration", "2", "--warmup", "0", "--json", str(path)),
            *("--prompt", "uniform:8:16", "--output", "lognormal:16:0.5:40"),
            *("--arm", arms["full"], "--arm", arms["sliding:24"]),
        ],
    )
    assert result.exit_code == 0, result.output
    found = json.loads(path.read_text())
    jsonschema.validate(found, SCHEMA)
    added = scrape(daemon.metrics) - before
    for name, figures in found["arms"].items():
        assert figures["n"] == figures["ok"] > 0, figures
        assert figures["time_to_first_token"]["p50"] > figures["queue"]["p50"] > 0
        assert figures["end_to_end"]["p50"] > figures["time_to_first_token"]["p50"]
        policy = ("policy", name.partition(":")[0])
        ended = sum(
            count
            for (series, labels), count in added.values.items()
            if series == "epikv_requests_finished_total" and policy in labels
        )
        # The two that asked whether the daemon takes this arm are counted by it, not by the load.
        assert ended == figures["n"] + 2
    assert found["gauges"] and max(gauge["resident_bytes"] for gauge in found["gauges"]) > 1e6
    assert found["probes"]["scrape"] and not found["probes"]["failures"]
    assert 0 < found["generator"]["share_of_core"] <= 1.1


def test_a_load_is_let_in_by_token_and_tls(
    sample_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority(tmp_path, "ca")
    for name in ("server", "client"):
        signed(tmp_path, name, "ca")
    token, line = new_token("ann", "user")
    (tmp_path / "tokens").write_text(line)
    flags = {
        "tls_certificate": "server.pem",
        "tls_key": "server.key",
        "tls_client_ca": "ca.pem",
        "auth_tokens_file": "tokens",
    }
    tls = Tls(*(tmp_path / name for name in ("ca.pem", "client.pem", "client.key")))
    path, settings = tmp_path / "load.json", [f"--{k}={tmp_path / v}" for k, v in flags.items()]
    with Daemon(sample_model, "--threads=1", *settings, tls=tls) as daemon:
        command = [
            *("bench", "load", "--server", daemon.grpc, "--metrics", daemon.metrics),
            *("--rate", "20", "--duration", "1", "--warmup", "0", "--json", str(path)),
            *("--prompt", "8", "--output", "8"),
        ]
        result = CliRunner().invoke(main, command)
        assert result.exit_code == 2 and "$EPIKV_TLS_CA" in result.output, result.output
        for name, file in zip(TLS_VARIABLES, (tls.ca, tls.certificate, tls.key), strict=True):
            monkeypatch.setenv(name, str(file))
        result = CliRunner().invoke(main, command)
        assert result.exit_code == 2 and not path.exists()
        for said in ("UNAUTHENTICATED", "a token is needed", "Set $EPIKV_TOKEN"):
            assert said in result.output
        monkeypatch.setenv("EPIKV_TOKEN", token)
        result = CliRunner().invoke(main, command)
        assert result.exit_code == 0, result.output
    found = json.loads(path.read_text())
    assert found["total"]["n"] == found["total"]["ok"] > 0
    assert found["probes"]["health"] and not found["probes"]["failures"]


def test_arms_are_refused_as_the_daemon_says(daemon: Daemon) -> None:
    arms = ("--arm", "nonesuch:64", "--arm", "full:4")
    command = ["bench", "load", "--server", daemon.grpc, "--rate", "1", *arms]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 2, result.output
    for said in ("nonesuch:64, 32 + 32 tokens: INVALID_ARGUMENT", "full:4, 96 + 96 tokens"):
        assert said in result.output


def under_load(sample_model: Path, tmp_path: Path) -> tuple[subprocess.Popen[str], str]:
    """A bench whose daemon decodes, and where that one's metrics are."""
    log = tmp_path / "log"
    with log.open("w") as stderr:
        bench = subprocess.Popen(
            [
                *("env", "--default-signal=HUP"),  # which nohup may have had us ignore
                *(sys.executable, "-c", "from epikv.cli import main; main()", "bench", "load"),
                *("--model", str(sample_model), "--concurrency", "2", "--duration", "600"),
                *("--warmup", "0", "--prompt", "8", "--output", "8"),
                *("--json", str(tmp_path / "load.json")),
            ],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            start_new_session=True,
        )
    found = None
    while found is None and bench.poll() is None:
        found = re.search(r"metrics at (\S+)", log.read_text())
        time.sleep(0.02)
    assert found is not None, log.read_text()
    while scrape(found[1]).value("epikv_step_tokens_total", phase="decode") < 100:
        assert bench.poll() is None, log.read_text()
    return bench, found[1]


def test_ctrl_c_tells_what_there_is(sample_model: Path, tmp_path: Path) -> None:
    """As a terminal sends it: to the whole process group. The daemon is ended in order."""
    path, log = tmp_path / "load.json", tmp_path / "log"
    bench, metrics = under_load(sample_model, tmp_path)
    os.killpg(bench.pid, signal.SIGINT)
    out, _ = bench.communicate(timeout=60)
    assert bench.returncode == 130, log.read_text()
    assert "time to first token" in out and "Traceback" not in log.read_text()
    told = json.loads(path.read_text())
    jsonschema.validate(told, SCHEMA)
    assert told["interrupted"] and told["total"]["ok"] > 0
    with pytest.raises(OSError):
        scrape(metrics)


STATUSES = {signal.SIGTERM: 143, signal.SIGHUP: 129, signal.SIGKILL: -9}


@pytest.mark.parametrize("number", STATUSES, ids=lambda number: number.name)
def test_killed_it_leaves_no_daemon(
    number: signal.Signals, sample_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    bench, _ = under_load(sample_model, tmp_path)
    tasks = Path(f"/proc/{bench.pid}/task").iterdir()
    pids = [int(pid) for task in tasks for pid in (task / "children").read_text().split()]
    started = [os.pidfd_open(pid) for pid in pids]
    assert len(started) == 2 and any(temporary.iterdir())  # the daemon, and what watches it
    bench.send_signal(number)
    bench.communicate(timeout=60)
    gone = [bool(select.select([process], [], [], 60)[0]) for process in started]
    for process in started:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(process, signal.SIGKILL)
        os.close(process)
    assert all(gone)
    log = (tmp_path / "log").read_text()
    assert bench.returncode == STATUSES[number], log
    if number != signal.SIGKILL:  # of which nobody can clean up, nor tell the processes that watch
        assert "Traceback" not in log
        assert not any(temporary.iterdir())


def test_an_overload_is_measured(
    sample_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether targets are met in seconds says nothing; that all is measured does."""
    monkeypatch.setattr(overload, "WARMUP_SECONDS", 0.5)
    # Of those that come again after the load the first: on a busy machine the last are told to wait
    # for more than a minute.
    monkeypatch.setattr(
        overload, "Retries", lambda due: Retries(sorted(due, key=lambda retry: retry[1])[:9])
    )
    path = tmp_path / "overload.json"
    result = CliRunner().invoke(
        main,
        [
            *("bench", "overload", "--model", str(sample_model), "--json", str(path)),
            *("--minutes", "0.1", "--measure", "0.5", "--prompt", "8", "--output", "8"),
            *("--", "--threads=1"),
        ],
    )
    assert result.exit_code in (0, 1), result.output
    found = json.loads(path.read_text())
    names = [target["metric"] for target in found["targets"]]
    assert names == [
        "goodput_ratio",
        "refusals_with_delay",
        "retry_success",
        "rss_growth",
        "queue_growth",
        "health_p99_over_idle",
        "scrape_p99_over_idle",
        "probes_unanswered",
    ]
    best = max(step["requests_per_second"] for step in found["capacity"]["steps"])
    assert found["at_capacity"]["total"]["ok"] > 0
    assert found["settings"]["deadline_seconds"] == 3 * found["idle"]["median_seconds"] > 0
    for run, factor in (("at_capacity", 1), ("overloaded", 2)):
        figures = found[run]["total"]
        expected = factor * best * found["settings"]["duration_seconds"]
        assert figures["n"] - figures["retries"] == pytest.approx(expected, rel=0.4)


def test_what_an_experiment_costs_is_measured(sample_model: Path, tmp_path: Path) -> None:
    """Whether targets are met in seconds says nothing; that all is measured does."""
    path = tmp_path / "experiment.json"
    command = [
        *("bench", "experiment", "--model", str(sample_model), "--json", str(path)),
        *("--rounds", "2", "--requests", "6", "--concurrency", "3", "--output", "16"),
    ]
    result = CliRunner().invoke(main, command)
    assert result.exit_code in (0, 1), result.output
    found = json.loads(path.read_text())
    names = [target["metric"] for target in found["targets"]]
    assert names == [
        *("experiment.engine", "outcomes.engine", "experiment.process", "outcomes.process"),
        *("deal.1", "deal.20", "deal.3_layers"),
    ]
    kinds = [[window["kind"] for window in taken] for taken in found["windows"]]
    assert kinds == [
        ["without", "experiment", "outcomes", "without"],
        ["without", "outcomes", "experiment", "without"],
    ]
    for taken in found["windows"]:
        assert all(w["tokens"] == 6 * 16 and w["process"] >= 0 < w["engine"] for w in taken)
    assert all(min(samples) > 0 for samples in found["dealt"].values())

"""`epikv bench load` as it is typed, and the watch over its daemon."""

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fake_epikvd
import jsonschema
import pytest
from click.testing import CliRunner
from epikv.bench import load as load_command
from epikv.bench import plots
from epikv.bench.watch import Watch
from epikv.cli import main
from fake_epikvd import serve
from scripted_load import SECONDS, scripted


def invoke(*arguments: str):
    return CliRunner().invoke(main, ["bench", *arguments])


def test_a_load_is_told_as_its_schema_says(tmp_path: Path) -> None:
    path = tmp_path / "load.json"
    schema = json.loads((Path(load_command.__file__).parent / "load.schema.json").read_text())
    modes = (["--rate-of-capacity", "0.5", "--measure", "0.3"], ["--concurrency", "2"])
    for mode in modes:
        with scripted() as address:
            result = invoke(
                *("load", "--server", address, "--arm", "full", "--arm", "sliding:16", *mode),
                *("--prompt", "4", "--output", "2", "--duration", "1", "--warmup", "0.2"),
                *("--deadline", "20s", "--json", str(path), "--plots", str(tmp_path / "plots")),
            )
        assert result.exit_code == 0, result.output
        found = json.loads(path.read_text())
        jsonschema.validate(found, schema)
        assert found["total"]["ok"] == found["total"]["n"] > 0
        assert found["total"]["n"] == sum(arm["n"] for arm in found["arms"].values())
        assert found["probes"]["health"] is not None and found["gauges"] == []
        assert found["settings"]["deadline_seconds"] == 20
        for word in ("time to first token", "sliding:16", "% of the machine"):
            assert word in result.output
        for picture in ("latency", "timeline"):
            assert (tmp_path / "plots" / f"{picture}.png").read_bytes().startswith(b"\x89PNG")
        (tmp_path / "plots" / "latency.png").unlink()


def test_a_daemon_of_ones_own_is_asked_in_plain_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the environment says of another one."""
    monkeypatch.setenv("EPIKV_TLS_CA", str(tmp_path / "absent.pem"))
    binary, model = tmp_path / "epikvd", tmp_path / "model.pt"
    binary.write_text(f'#!/bin/sh\nexec {sys.executable} {fake_epikvd.__file__} "$@"\n')
    binary.chmod(0o755)
    model.touch()
    mode = ("--concurrency", "1", "--duration", "0.2", "--warmup", "0")
    result = invoke("load", "--binary", str(binary), "--model", str(model), *mode)
    assert result.exit_code == 0, result.output


def test_bad_arguments_of_a_load_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise plots.click.UsageError("no matplotlib")

    for arguments, said in (
        ([], "give one of --rate"),
        (["--rate", "1", "--concurrency", "1"], "give one of --rate"),
        (["--concurrency", "1", "--retry-share", "1"], "--retry-share is of an open loop"),
        (["--rate", "1", "--requests", "9"], "--requests is of a closed loop"),
        (["--rate", "1", "--outcome", "right"], "--outcome needs --task"),
        (["--rate", "1", "--task", "needle@50"], "generates nothing"),
        (["--rate", "0"], "--rate"),
        (["--rate", "1", "--arm", "h2o:x"], "is not a number of tokens (256) or a share"),
        (["--rate", "1", "--prompt", "uniform:9:1"], "no distribution of lengths"),
        (["--rate", "1", "--deadline", "3y"], "neither seconds"),
        (["--rate", "1", "--deadline", "0"], "neither seconds"),
        (["--rate", "1", "--server", "x:1", "--", "--threads=1"], "leave out --model"),
        (["--rate", "1", "--server", "x:1", "--arm", "h2o", "--arm", "h2o"], "given twice"),
    ):
        result = invoke("load", *arguments)
        assert result.exit_code == 2 and said in result.output, result.output
    monkeypatch.setattr(plots, "check", refused)
    assert "no matplotlib" in invoke("load", "--rate", "1", "--plots", "x").output
    assert "--server needs --metrics" in invoke("overload", "--server", "x:1").output


def test_arms_that_the_daemon_refuses_are_told_together() -> None:
    with serve() as fake:
        arms = ("--arm", "nope", "--arm", "full", "--arm", "nope:5")
        result = invoke("load", "--server", fake.address, "--rate", "1", *arms)
        unknown = invoke("load", "--server", fake.address, "--rate", "1", "--model-name", "other")
    assert result.exit_code == 2
    assert result.output.count("kv.policy: unknown") == 4  # two arms, shortest and longest
    assert "nope:5, 96 + 96 tokens: INVALID_ARGUMENT (KV_BUDGET)" in result.output
    assert "'other'; the daemon serves fake" in unknown.output
    assert invoke("load", "--server", "127.0.0.1:1", "--rate", "1").exit_code == 2


PAGE = b"""\
process_resident_memory_bytes 5e+06
epikv_requests_waiting{model="m",reason="kv"} 3
epikv_requests_waiting{model="m",reason="running"} 4
epikv_requests_running{model="m"} 2
epikv_requests_running{model="other"} 1
epikv_requests_running_total{model="m"} 99
"""


def test_a_watch_that_fails_says_so() -> None:
    with Watch("127.0.0.1:1", "not an address", period=0.01) as watch:
        watch._process.kill()
    assert watch.readings.failures == ["the watch ended with status -9"]


def test_a_watch_reads_gauges_and_tells_what_goes_unanswered() -> None:
    asked, enough = iter(range(1_000_000)), threading.Event()

    class Metrics(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            number = next(asked)
            self.send_response(500 if number == 1 else 200)
            self.end_headers()
            self.wfile.write(PAGE)
            if number == 5:
                enough.set()

        def log_message(self, *_: object) -> None:
            pass

    with serve() as fake, ThreadingHTTPServer(("127.0.0.1", 0), Metrics) as metrics:
        threading.Thread(target=metrics.serve_forever, daemon=True).start()
        with Watch(fake.address, f"127.0.0.1:{metrics.server_port}", period=0.01) as watch:
            assert enough.wait(SECONDS)
        metrics.shutdown()
    found = watch.readings
    assert found.health and len(found.scrapes) == len(found.gauges) >= 4
    assert len(found.failures) == 1 and "500" in found.failures[0]
    (due, gauges), (next_due, _) = found.gauges[1], found.gauges[2]
    assert gauges == {"resident_bytes": 5e6, "waiting": 7, "running": 3}
    assert next_due - due == pytest.approx(0.01), "due by the clock, not by the last answer"
    assert found.cpu_seconds > 0

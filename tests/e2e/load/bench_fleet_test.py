"""`epikv bench fleet`, shortly."""

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from envoy_proxy import program
from epikv.testing import find_binary
from epikv_lab.bench import fleet


def test_what_a_balancer_leaves_of_three_replicas_is_measured(
    sample_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EPIKVD", str(find_binary()))  # or it would be built while others run
    out = tmp_path / "fleet.json"
    haproxy = shutil.which("haproxy") or "/usr/sbin/haproxy"
    command = ["--model", str(sample_model), "--envoy", str(program()), "--haproxy", haproxy]
    command += "--conversations 12 --rounds 1 --step 0.01 --slots 4 --seconds 1".split()
    result = CliRunner().invoke(fleet.command, [*command, "--json", str(out)])
    found = json.loads(out.read_text())  # written whether targets are met or not
    rates = {way: value for way, [value] in found["hit_rate"].items()}
    assert rates.keys() == {"one", "envoy", "leastconn", "random"}
    assert 0 < rates["random"] < 0.8 * rates["one"] and rates["one"] < 1
    goodput = {way: value for way, [value] in found["goodput"].items()}
    assert goodput.keys() == {"one", "envoy", "leastconn"}
    assert 0 < goodput["one"] <= 4 / (fleet.TOKENS * 0.01) * 1.1
    assert goodput["envoy"] > 1.5 * goodput["one"]
    metrics = [target["metric"] for target in found["targets"]]
    assert metrics == ["envoy_hit_rate_over_one", "envoy_goodput_over_three"]
    assert "hit rate of envoy" in result.output

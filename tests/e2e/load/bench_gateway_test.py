"""`epikv bench gateway`, shortly."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from epikv.testing import find_binary
from epikv_lab.bench import gateway


def test_what_a_gateway_costs_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPIKVD", str(find_binary()))  # or it would be built while others run
    out = tmp_path / "gateway.json"
    short = "--shape small --requests 10 --rounds 2 --streams 4 --tokens 16 --clients 20 --crowds 3"
    result = CliRunner().invoke(gateway.command, [*short.split(), "--json", str(out)])
    found = json.loads(out.read_text())  # written whether targets are met or not
    assert len(found["first_token_seconds"]) == 10
    assert len(found["streams"]["rounds"]) == len(found["streams"]["cpu_seconds_per_token"]) == 2
    assert len(found["crowd_resident_bytes"]) == 3
    metrics = [target["metric"] for target in found["targets"]]
    assert metrics == ["added_ms_to_first_token", "throughput", "memory_growth"]
    assert "processor time of the gateway a token" in result.output

"""`epikv bench capacity` of a replica that computes, shortly."""

import json
import math
from pathlib import Path

import pytest
from click.testing import CliRunner
from epikv.testing import find_binary
from epikv_lab.bench import capacity


@pytest.mark.nightly
def test_what_a_plan_predicts_is_held_against_a_daemon(
    sample_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EPIKVD", str(find_binary()))  # or it would be built while others run
    out = tmp_path / "capacity.json"
    command = (
        f"--model {sample_model} --only computing --measure 1 --seconds 2 --rounds 1 --json {out}"
    )
    result = CliRunner().invoke(capacity.command, command.split())
    cases = json.loads(out.read_text())["cases"]  # written whether targets are met or not
    assert cases.keys() == {
        *(f"computing_at_{share:g}" for share in capacity.SHARES),
        "computing_closed",
        "computing_closed_budget",
    }
    for case in cases.values():
        measured, predicted = case["measured"], case["predicted"]
        assert all(math.isfinite(predicted[name]) for name in capacity.FIGURES)
        assert 0 < measured["first_p50"] <= measured["first_p99"] < measured["end_p99"]
        assert len(measured["rounds"]) == 1
        assert measured["requests"] == sum(each["requests"] for each in measured["rounds"])
        # How far apart they are is the bench's to say, on a machine that runs nothing else.
        assert 0.1 < predicted["tokens_per_second"] / measured["tokens_per_second"] < 10
    at = [cases[f"computing_at_{share:g}"]["measured"]["requests"] for share in capacity.SHARES]
    assert at[0] < at[1] < at[2]
    assert "pace" in result.output and "computing_closed_first_p99_error" in result.output

"""`epikv bench sessions` on the sample model, shortly."""

import json
from pathlib import Path

from click.testing import CliRunner
from epikv.testing import Daemon
from epikv_lab.bench import sessions


def test_turns_of_a_session_stand_beside_those_of_a_whole_cache(
    sample_model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "sessions.json"
    short = ["--turns", "8", "--tokens", "100", "--budget", "96", "--anew", "2"]
    with Daemon(sample_model, *sessions.FLAGS, "--prefill_chunk_tokens=64") as daemon:
        where = ["--server", daemon.grpc, "--metrics", daemon.metrics]
        result = CliRunner().invoke(sessions.command, [*short, "--json", str(out), *where])
    assert result.exit_code == 0, result.output
    found = json.loads(out.read_text())
    assert [figure["turns"] for figure in found["figures"]] == [2, 4, 6, 8]
    assert "| to 8 |" in result.output
    for number, turn in enumerate(found["turns"], start=1):
        assert ("anew" in turn) == (number % 2 == 0)
        assert all(arm["seconds"] > 0 for arm in turn.values())
    last = found["turns"][-1]
    assert last["anew"]["computed"] == 800
    assert last["cached"]["computed"] < 250 and last["session"]["computed"] <= 256 + 100 + 64
    assert last["session"]["peak_bytes"] < last["cached"]["peak_bytes"] / 1.5
    assert len(found["update_seconds"]) >= 2

"""`epikv bench packets` on the sample model, shortly."""

import json
from pathlib import Path

from click.testing import CliRunner
from epikv.testing import Daemon
from epikv_lab.bench import packets

SHORT = ["--documents", "1,3", "--tokens", "100"]


def test_questions_behind_packets_and_behind_prefill_are_timed(
    sample_model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "packets.json"
    with Daemon(sample_model, *packets.FLAGS) as daemon:
        options = [*SHORT, "--rounds", "2", "--json", str(out), "--server", daemon.grpc]
        result = CliRunner().invoke(packets.command, options)
        assert result.exit_code == 0, result.output
        with daemon.client() as client:
            assert client.packets() == [], "none is left on somebody else's daemon"
    found = json.loads(out.read_text())
    assert len(found["made"]) == 3
    for count, figures in found["figures"].items():
        assert f"| {count} |" in result.output
        assert figures["bytes"] == sum(each["bytes"] for each in found["made"][: int(count)]) > 0
        assert figures["create_seconds"] > 0
        taken = found["samples"][count]
        assert len(taken) == 2
        for each in taken:
            assert list(each) == list(packets.ARMS)
            for first in each.values():
                assert 0 < first["daemon"] < first["client"]


def test_a_prompt_that_was_cached_is_not_timed(sample_model: Path) -> None:
    flags = [*packets.FLAGS, "--prefix_cache_share=0.5"]
    with Daemon(sample_model, *flags) as daemon:
        options = [*SHORT, "--server", daemon.grpc]
        result = CliRunner().invoke(packets.command, options)
        assert result.exit_code == 1 and "were cached" in result.stderr
        with daemon.client() as client:
            assert client.packets() == []

"""`epikv bench passes` on the sample model, shortly."""

import json
from pathlib import Path

from click.testing import CliRunner
from epikv.testing import Daemon
from epikv_lab.bench import passes


def test_every_policys_pass_is_timed(daemon: Daemon, tmp_path: Path) -> None:
    out = tmp_path / "passes.json"
    where = ["--server", daemon.grpc, "--metrics", daemon.metrics]
    options = ["--prompt", "200", "--rounds", "2", "--json", str(out)]
    result = CliRunner().invoke(passes.command, [*where, *options])
    assert result.exit_code == 0, result.output
    found = json.loads(out.read_text())["pass_over_prefill"]
    assert list(found) == list(passes.PASSES)
    for name, ratios in found.items():
        assert len(ratios) == 2 and min(ratios) > 0, name
        assert f"| `{name}`" in result.output

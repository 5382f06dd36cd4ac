"""`python -m epikv_lab.export.large`: its stages on a small shape, and that peaks are peaks."""

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from epikv_lab.export.large import watched


@pytest.mark.nightly
def test_writes_exports_and_serves_and_leaves_nothing(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "epikv_lab.export.large",
        "--shape=tiny",
        f"--folder={tmp_path}",
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    for stage in ("write", "export", "serve"):
        told = re.search(
            rf"^{stage}: \d+ s, (\S+) GiB .* of which (\S+) its own", result.stdout, re.MULTILINE
        )
        assert told is not None and 0 < float(told[2]) <= float(told[1]), result.stdout
    assert "against transformers" in result.stdout
    assert "full: 16 tokens after 32" in result.stdout
    assert re.search(r"snapkv: 16 tokens .* [1-9]\d* entries evicted", result.stdout)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.nightly
def test_a_stage_that_fails_is_told(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from epikv_lab.export.large import run; run('odd', '1 / 0')"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 1 and "ZeroDivisionError" in result.stderr


def test_a_peak_counts_what_was_given_back() -> None:
    code = "x = bytearray(300 << 20); print(flush=True); input(); del x; print(flush=True); input()"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None and process.stdout is not None
    process.stdout.readline()
    with watched(process.pid) as peak:
        while peak.own < 300 << 20:
            time.sleep(0.01)
        process.stdin.write("\n")
        process.stdin.flush()
        process.stdout.readline()
        process.communicate("\n")
    assert peak.resident >= peak.own >= 300 << 20

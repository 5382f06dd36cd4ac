"""`epikv eval` spread over several daemons: it finds what one finds, and goes on when one is lost."""

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from epikv.cli import main
from epikv.eval.results import read
from epikv.scrape import scrape
from epikv.testing import Daemon, DaemonError

TOTAL = 12 * 7


def command(out: Path, *servers: Daemon) -> list[str]:
    return [
        *("eval", "--out", str(out), "--task", "sample:programs@6", "--problems", "12"),
        *("--policy", "h2o", "--at-once", "2", "--budget", "0.5", "--budget", "90"),
        *(word for each in servers for word in ("--server", each.grpc)),
    ]


def start(arguments: list[str], log: Path) -> subprocess.Popen[bytes]:
    program = [sys.executable, "-c", "from epikv.cli import main; main()", *arguments]
    with log.open("wb") as file:
        return subprocess.Popen(program, stdout=file, stderr=file)


def found(out: Path) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Each completion by its key; how long it took is no finding."""
    records = read(out)[1]
    assert len(records) == len({record.key for record in records}) == TOTAL
    return {tuple(each.key): {**asdict(each), "decode_seconds": 0} for each in records}


def wait_for(count: int, out: Path, process: subprocess.Popen[bytes], log: Path) -> None:
    file = out / "results.jsonl"
    while not file.exists() or file.read_bytes().count(b"\n") < count:
        assert process.poll() is None, log.read_text()
        time.sleep(0.005)


def served(daemon: Daemon) -> float:
    return scrape(daemon.metrics).total("epikv_requests_finished_total")


@pytest.fixture
def daemons(sample_model: Path) -> Iterator[list[Daemon]]:
    """Whose bits do not depend on what runs beside."""
    flags = ("--threads=1", "--deterministic")
    stack = ExitStack()
    try:
        yield [stack.enter_context(Daemon(sample_model, *flags)) for _ in range(3)]
    finally:
        try:
            stack.close()
        except DaemonError as error:  # one that a test has killed
            assert "ended with status -9" in str(error)


@pytest.fixture(scope="module")
def by_one(sample_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("one")
    with Daemon(sample_model, "--threads=1", "--deterministic") as daemon:
        result = CliRunner().invoke(main, command(out, daemon))
    assert result.exit_code == 0, result.output
    return out


def test_three_find_what_one_finds(by_one: Path, daemons: list[Daemon], tmp_path: Path) -> None:
    result = CliRunner().invoke(main, command(tmp_path, *daemons))
    assert result.exit_code == 0, result.output
    assert found(tmp_path) == found(by_one)
    summaries = [json.loads((each / "summary.json").read_text()) for each in (tmp_path, by_one)]
    assert summaries[0] == summaries[1]
    shares = [served(daemon) for daemon in daemons]
    assert sum(shares) == TOTAL and min(shares) > TOTAL / 6, shares


def test_those_that_it_starts_find_the_same(
    by_one: Path, sample_model: Path, tmp_path: Path
) -> None:
    of_its_own = ("--model", str(sample_model), "--daemons", "2")
    flags = ("--daemon-flag=threads=1", "--daemon-flag=deterministic")
    result = CliRunner().invoke(main, [*command(tmp_path), *of_its_own, *flags])
    assert result.exit_code == 0, result.output
    assert len(re.findall("serving at (.*), metrics", result.output)) == 2
    assert found(tmp_path) == found(by_one)


def test_what_a_lost_one_had_is_run_by_the_others(
    by_one: Path, daemons: list[Daemon], tmp_path: Path
) -> None:
    out, log = tmp_path / "out", tmp_path / "log"
    process = start(command(out, *daemons), log)
    wait_for(TOTAL // 4, out, process, log)
    daemons[1].kill()
    assert process.wait(60) == 0, log.read_text()
    assert f"{daemons[1].grpc} went away, the others go on" in log.read_text()
    assert found(out) == found(by_one)


def test_it_goes_on_elsewhere(by_one: Path, daemons: list[Daemon], tmp_path: Path) -> None:
    out, log = tmp_path / "out", tmp_path / "log"
    process = start(command(out, *daemons[:2]), log)
    wait_for(TOTAL // 4, out, process, log)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130, log.read_text()
    result = CliRunner().invoke(main, command(out, daemons[2]))
    assert result.exit_code == 0, result.output
    assert found(out) == found(by_one)


def test_when_all_are_lost_it_says_so(daemons: list[Daemon], tmp_path: Path) -> None:
    out, log = tmp_path / "out", tmp_path / "log"
    process = start(command(out, *daemons[:2]), log)
    wait_for(TOTAL // 4, out, process, log)
    for daemon in daemons[:2]:
        daemon.kill()
    assert process.wait(60) == 1
    assert "went away" in log.read_text() and "the same command goes on" in log.read_text()

"""`epikv bench profile` around a perf that answers as the real one does."""

import io
import tarfile
import time
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from epikv import harness
from epikv_lab.bench import profile
from epikv_lab.bench.profile import Function

REPORT = """
    80.46%\tepikvd           \t[.] epikv::(anonymous namespace)::MultiplyWide
     2.72%\tlibgomp.so.1     \t[.] 0x000000000001e02a
     0.10%\t[kernel.kallsyms]\t[k] irqentry_exit_to_user_mode

"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """Puts a shell script on PATH, which notes its arguments in the file that is given back."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")

    def make(name: str, script: str) -> Path:
        path, log = tmp_path / "bin" / name, tmp_path / f"{name}.log"
        path.write_text(f'#!/bin/sh\necho "$@" >> {log}\n{script}\n')
        path.chmod(0o755)
        return log

    return make


def test_functions_are_what_perf_reports(
    program: Callable[[str, str], Path], tmp_path: Path
) -> None:
    (tmp_path / "report").write_text(REPORT)
    log = program("perf", f"cat {tmp_path}/report")
    found = profile.functions(tmp_path / "samples")
    assert found == [
        Function(0.8046, "epikvd", "epikv::(anonymous namespace)::MultiplyWide"),
        Function(pytest.approx(0.0272), "libgomp.so.1", "0x000000000001e02a"),
        Function(0.001, "[kernel.kallsyms]", "irqentry_exit_to_user_mode"),
    ]
    assert f"report -i {tmp_path}/samples" in log.read_text()
    assert profile.table(found, 0.005).splitlines()[2:] == [
        "| 80.5% | `epikv::(anonymous namespace)::MultiplyWide` | epikvd |",
        "| 2.7% | `0x000000000001e02a` | libgomp.so.1 |",
        "| 0.1% | 1 others | |",
    ]


def test_what_perf_refuses_is_told(program: Callable[[str, str], Path], tmp_path: Path) -> None:
    program("perf", "echo 'Permission denied: perf_event_paranoid is 4' >&2; exit 255")
    with pytest.raises(click.ClickException, match=r"^perf record: .*perf_event_paranoid is 4$"):
        profile.record(1, 1, tmp_path / "samples")


def test_the_page_of_flame_graphs_is_fetched_once(
    program: Callable[[str, str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "folder", lambda: tmp_path)
    page = b"<html>/** @flamegraph_json **/</html>"
    with tarfile.open(tmp_path / "packed", "w:gz") as packed:
        info = tarfile.TarInfo("package/dist/templates/d3-flamegraph-base.html")
        info.size = len(page)
        packed.addfile(info, io.BytesIO(page))
    name = f"d3-flame-graph-{profile.D3_FLAME_GRAPH}"
    fetched = program("npm", f"cp {tmp_path}/packed {tmp_path}/{name}.tgz")
    drawn = program("perf", "")
    for _ in range(2):
        profile.draw(tmp_path / "samples", tmp_path / "flame.html")
    assert (tmp_path / f"{name}.html").read_bytes() == page
    assert len(fetched.read_text().splitlines()) == 1
    assert drawn.read_text().count("script -i samples --no-inline -s") == 2
    assert f"--template={tmp_path}/{name}.html" in drawn.read_text()


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["--engine", "llama"], "no engine of streams16 is called 'llama'; there are epikv fp32,"),
        (["--engine", "epikv int8", "--cell", "16x2048"], "no engine of 16x2048 is called"),
        (["--cell", "decode1,streams4"], "'decode1,streams4' is 2 cells; one is looked at"),
        (["--cell", "walk"], "'walk' is no cell; known: "),
    ],
)
def test_what_cannot_be_run_is_refused(
    program: Callable[[str, str], Path], asked: list[str], said: str
) -> None:
    program("perf", "")
    done = CliRunner().invoke(profile.command, asked)
    assert done.exit_code == 2 and said in " ".join(done.output.split())


def test_the_process_is_recorded_while_jobs_run(program: Callable[[str, str], Path]) -> None:
    log = program("perf", "")
    ran = []
    with profile._busy(ran.append):
        assert ran[0] == 0
        while len(ran) < 3:
            time.sleep(0.001)
        profile.record(77, 2, Path("samples"))
    assert ran == list(range(len(ran)))
    assert "-p 77 -o samples -- sleep 2" in log.read_text()


def test_a_job_that_fails_meanwhile_ends_it() -> None:
    def job(seed: int) -> None:
        if seed > 0:
            raise RuntimeError("it ended")

    with pytest.raises(RuntimeError, match="it ended"), profile._busy(job):
        pass

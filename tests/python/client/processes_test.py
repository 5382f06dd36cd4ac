"""What is killed leaves nothing running that it has started."""

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TypeVar

import fake_epikvd
import pytest
from epikv import processes
from epikv.testing import Daemon

Found = TypeVar("Found")

GENEROUS_SECONDS = 120.0
HANGUP = ["env", "--default-signal=HUP"]  # nohup may have had these tests ignore it

# Takes a completion, says so by a file, and never answers.
LLAMA_SERVER = """#!{python}
import http.server, os, pathlib, sys, time
if "--version" in sys.argv:
    sys.exit("version: 1")
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def do_POST(self):
        pathlib.Path({asked!r}).touch()
        time.sleep(600)
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
PEERS = """
import sys
from pathlib import Path
from epikv_lab.bench.peers import convert, engines, venvs
from epikv_lab.bench.peers.process import Job
venvs.llama = lambda *_: Path(sys.argv[1])
venvs.python = lambda *_: Path(sys.executable)
convert.gguf = lambda *_: Path("model.gguf")
place = engines.Place(None, Path("checkpoint"), 1, 0)
[arm] = [arm for arm in engines.arms() if arm.name == "llama.cpp server bf16"]
arm.start(place).run(Job([[1]], 1), 600)
"""


def until(found: Callable[[], Found | None]) -> Found:
    deadline = time.monotonic() + GENEROUS_SECONDS
    while not (result := found()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return result


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def children(pid: int) -> list[int]:
    """Of all its threads."""
    with suppress(OSError):  # a thread has ended
        tasks = Path(f"/proc/{pid}/task").iterdir()
        return [int(c) for task in tasks for c in (task / "children").read_text().split()]
    return []


@pytest.fixture
def epikvd(tmp_path: Path) -> Path:
    """The stand-in as a program."""
    text = f'#!/bin/sh\nexec {sys.executable} {fake_epikvd.__file__} "$@"\n'
    return program(tmp_path / "epikvd", text)


@pytest.fixture
def watch() -> Iterator[Callable[[int], int]]:
    """Gives a process's pidfd; in the end kills it, if it still runs."""
    with ExitStack() as stack:

        def opened(pid: int) -> int:
            handle = os.pidfd_open(pid)
            stack.callback(os.close, handle)
            stack.callback(kill, handle)
            return handle

        yield opened


def kill(handle: int) -> None:
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(handle, signal.SIGKILL)


def has_ended(handle: int) -> bool:
    return bool(select.select([handle], [], [], GENEROUS_SECONDS)[0])


STATUSES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129, signal.SIGKILL: -9}


@pytest.mark.parametrize("number", STATUSES, ids=lambda number: number.name)
def test_a_killed_bench_leaves_no_daemon(
    number: signal.Signals, epikvd: Path, tmp_path: Path, watch: Callable[[int], int]
) -> None:
    log, temporary = tmp_path / "log", tmp_path / "temporary"
    temporary.mkdir()
    command = [*HANGUP, sys.executable, "-c", "from epikv.cli import main; main()", "bench", "load"]
    command += ["--binary", str(epikvd), "--model", str(epikvd)]
    command += ["--concurrency", "1", "--duration", "600"]
    with log.open("w") as file:
        environment = {**os.environ, "TMPDIR": str(temporary)}
        bench = subprocess.Popen(command, stdout=file, stderr=file, env=environment)
    watch(bench.pid)

    def both() -> list[int]:
        """The daemon, and what watches it under load."""
        assert bench.poll() is None, log.read_text()
        return found if len(found := children(bench.pid)) == 2 else []

    started = [watch(pid) for pid in until(both)]
    assert any(temporary.iterdir())
    bench.send_signal(number)
    status = bench.wait(GENEROUS_SECONDS)
    assert all(has_ended(handle) for handle in started)
    assert status == STATUSES[number], log.read_text()
    assert number == signal.SIGKILL or not any(temporary.iterdir())


def test_killed_amid_a_job_a_bench_leaves_no_server_of_a_peer(
    tmp_path: Path, watch: Callable[[int], int]
) -> None:
    asked = tmp_path / "asked"
    text = LLAMA_SERVER.format(python=sys.executable, asked=str(asked))
    program(tmp_path / "build" / "bin" / "llama-server", text)
    bench = subprocess.Popen([sys.executable, "-c", PEERS, str(tmp_path)])
    watch(bench.pid)

    def busy() -> bool:
        assert bench.poll() is None
        return asked.exists()

    until(busy)
    [runner] = children(bench.pid)
    [server] = children(runner)
    started = [watch(runner), watch(server)]
    bench.kill()
    assert all(has_ended(handle) for handle in started)


def test_a_daemon_outlives_the_thread_that_started_it(epikvd: Path) -> None:
    daemon = Daemon("m.pt", binary=epikvd)
    thread = threading.Thread(target=daemon.__enter__)
    thread.start()
    thread.join()
    until(lambda: not Path(f"/proc/self/task/{thread.native_id}").exists())
    daemon.__exit__(None, None, None)  # raises unless SIGTERM has ended it


def test_nothing_starts_whose_parent_has_ended(tmp_path: Path) -> None:
    parent = subprocess.Popen(["true"])
    parent.wait()
    made = tmp_path / "made"
    for pid, started in ((parent.pid, False), (os.getpid(), True)):
        subprocess.run([*processes.tether(), str(pid), "touch", str(made)], check=False)
        assert made.exists() == started


STARTED_AS = """
import sys, time
from epikv import processes
print(processes.start(["sleep", "600"], user="nobody").pid, flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may be another user")
def test_another_user_s_process_ends_too(watch: Callable[[int], int]) -> None:
    command = [sys.executable, "-c", STARTED_AS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        handle = watch(pid)
        until(lambda: Path(f"/proc/{pid}/comm").read_text() == "sleep\n")
        assert Path(f"/proc/{pid}").owner() == "nobody"
        parent.kill()
    assert has_ended(handle)


# Sends itself the first signal, and the others while it tidies up.
ENDED = """
import os, sys
from epikv import processes
first, *others = map(int, sys.argv[1:])
with processes.ending_in_order():
    try:
        os.kill(os.getpid(), first)
        print("went on")
    finally:
        for number in others:
            os.kill(os.getpid(), number)
        print("tidied up")
"""


def ended(*numbers: signal.Signals, by: Sequence[str] = HANGUP) -> tuple[int, str]:
    command = [*by, sys.executable, "-c", ENDED, *(str(int(number)) for number in numbers)]
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True)
    return done.returncode, done.stdout


def test_signals_that_follow_change_nothing() -> None:
    assert ended(signal.SIGTERM, signal.SIGHUP, signal.SIGTERM) == (143, "tidied up\n")
    assert ended(signal.SIGHUP, signal.SIGHUP) == (129, "tidied up\n")


def test_what_nohup_ignores_stays_ignored() -> None:
    assert ended(signal.SIGHUP, by=["nohup"]) == (0, "went on\ntidied up\n")

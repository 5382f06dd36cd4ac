"""`epikv serve`: the daemon in the command's place, of a file or of a directory."""

import json
import os
import shutil
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE, Popen

from epikv import Client, Stop, processes
from epikv.testing import find_binary
from openai import OpenAI
from waiting import eventually

PORTS = [f"--{port}=127.0.0.1:0" for port in ("listen", "admin_listen", "metrics_listen")]


@contextmanager
def serving(*arguments: str, cache: Path) -> Iterator[tuple["Popen[str]", str]]:
    """The process, and what it has printed when it serves."""
    process = processes.start(
        [sys.executable, "-c", "from epikv.cli import main; main()", "serve", *arguments],
        stdout=PIPE,
        stderr=PIPE,
        text=True,
        env={**os.environ, "XDG_CACHE_HOME": str(cache)},
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        yield process, line
    finally:
        process.kill()
        process.communicate()


def failed(*arguments: str, cache: Path) -> str:
    """What is said by one that must not serve."""
    with serving(*arguments, cache=cache) as (process, line):
        said = process.communicate()[1]
        assert line == "" and process.returncode not in (0, None)
        return said


def test_a_file_is_served_until_a_signal_ends_it(sample_model: Path, tmp_path: Path) -> None:
    flags = [*PORTS, "--threads=1", "--model_name=mine"]
    with serving(str(sample_model), *flags, cache=tmp_path) as (process, line):
        assert Path(f"/proc/{process.pid}/exe").resolve() == find_binary().resolve()
        served = json.loads(line)
        assert [model["name"] for model in served["models"]] == ["mine"]
        with Client(served["grpc"]) as client:
            answer = client.generate_once("a b", stop=Stop(max_output_tokens=4, ignore_eos=True))
            assert answer.summary.usage.output_tokens == 4
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    assert not list(tmp_path.iterdir())  # nothing was exported


def test_a_directory_is_exported_once(sample_directory: Path, tmp_path: Path) -> None:
    directory, cache = tmp_path / "small", tmp_path / "cache"
    shutil.copytree(sample_directory, directory)
    flags = ["--dtype=fp32", str(directory), *PORTS, "--threads=1"]
    for again in (False, True):
        with serving(*flags, cache=cache) as (process, line):
            assert json.loads(line)["models"][0]["name"] == "small"
            process.send_signal(signal.SIGTERM)
            said = process.communicate()[1]
            assert process.returncode == 0
        [made] = (cache / "epikv").iterdir()
        assert (str(made) in said) != again

    (directory / "README.md").write_text("another")
    with serving(*flags, cache=cache):
        assert len(list((cache / "epikv").iterdir())) == 2


def test_what_cannot_be_served_is_said(sample_model: Path, tmp_path: Path) -> None:
    assert "does not exist" in failed(str(tmp_path / "nothing.pt"), cache=tmp_path)
    assert "config.json" in failed(str(tmp_path), cache=tmp_path / "cache")
    assert "--dtype and --quantize are for a directory" in failed(
        "--dtype=bf16", str(sample_model), cache=tmp_path
    )
    assert "nonsense" in failed(str(sample_model), "--nonsense=1", cache=tmp_path)


def test_openais_api_is_served_beside_it(sample_model: Path, tmp_path: Path) -> None:
    """Both end in order with a signal, or when the daemon does."""
    flags = [str(sample_model), *PORTS, "--threads=1", "--http", "0"]
    for ending in ("signal", "daemon"):
        with serving(*flags, cache=tmp_path) as (process, line):
            assert process.stdout is not None
            http = json.loads(process.stdout.readline())
            assert http["servers"] == [json.loads(line)["grpc"]]
            with OpenAI(base_url=f"http://{http['http']}/v1", api_key="none") as client:
                answer = client.completions.create(
                    model="sample", prompt="a b", max_tokens=4, extra_body={"ignore_eos": True}
                )
            assert answer.usage.completion_tokens == 4
            if ending == "signal":
                process.send_signal(signal.SIGTERM)
                assert process.wait(60) == 0
            else:
                [daemon] = children(process.pid)
                os.kill(daemon, signal.SIGKILL)
                assert process.wait(60) != 0
        eventually(lambda: not children(process.pid))


def test_an_address_that_is_none_is_refused_before_anything_begins(
    sample_model: Path, tmp_path: Path
) -> None:
    for http in ("--http=x", "--http=1.2.3.4:x"):
        assert "is not HOST:PORT" in failed(str(sample_model), http, cache=tmp_path)
    assert "--http needs" in failed(str(sample_model), "--http", cache=tmp_path)


def test_a_port_that_is_taken_is_told_before_anything_begins(
    sample_model: Path, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        said = failed(str(sample_model), *PORTS, f"--http={port}", cache=tmp_path)
    assert f"cannot listen at 127.0.0.1:{port}" in said and "epikvd" not in said


def test_what_a_daemon_only_tells_is_told_with_a_gateway_too(
    sample_model: Path, tmp_path: Path
) -> None:
    for flag, begin in (
        ("--help", "epikvd serves"),
        ("--version", "epikvd "),
        ("--print_config", ""),
    ):
        with serving(str(sample_model), "--http=0", flag, cache=tmp_path) as (process, line):
            said, wrong = process.communicate()
            assert process.returncode == 0, wrong
            assert line.startswith(begin) and not (line + said).startswith("{")


def children(pid: int) -> list[int]:
    try:
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []

"""tools/examples, each run as its docstring says, against a real daemon: it does what one is told that
one sees."""

import ast
import functools
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from epikv.testing import Daemon

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "tools" / "examples"
OF_THE_SAMPLE = ("stream", "compare", "many", "perplexity")
MOST_LINES = 40
GENEROUS_SECONDS = 300


def promise(name: str) -> tuple[list[str], list[str]]:
    """The arguments of its docstring's command, and the lines that one is told one sees."""
    text = ast.get_docstring(ast.parse((EXAMPLES / f"{name}.py").read_text())) or ""
    (command,) = re.findall(rf"python tools/examples/{name}\.py .*", text)
    shown = [line.strip() for line in text.splitlines() if line.startswith("    ")]
    return shlex.split(command, comments=True)[2:], [line for line in shown if command not in line]


@functools.cache
def run(name: str, daemon: Daemon, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """With the arguments that its docstring gives it, unless there are others."""
    return subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py", *(arguments or promise(name)[0])],
        env={**os.environ, "EPIKV_SERVER": daemon.grpc},
        capture_output=True,
        text=True,
        check=False,
        timeout=GENEROUS_SECONDS,
    )


def shape(line: str) -> str:
    """Without what differs between two machines."""
    return re.sub(r"\d+(\.\d+)?", "N", " ".join(line.split()))


def test_each_has_its_test_and_is_short() -> None:
    names = {path.stem for path in EXAMPLES.glob("*.py")} - {"own_model"}
    assert names == {*OF_THE_SAMPLE, "json_answer"}
    for name in names:
        assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= MOST_LINES, name


@pytest.mark.parametrize("name", OF_THE_SAMPLE)
def test_one_sees_what_one_is_told(name: str, daemon: Daemon) -> None:
    done = run(name, daemon)
    assert done.returncode == 0, done.stderr
    expected = promise(name)[1]
    assert expected
    seen = "\n".join(shape(line) for line in done.stdout.splitlines())
    for line in expected:
        for part in line.split(" ... "):
            assert shape(part) in seen, done.stdout


def test_the_stream_is_right_though_half_is_dropped(daemon: Daemon) -> None:
    text, _, facts = run("stream", daemon).stdout.rpartition("\n" + "cur: ")
    assert text.endswith("answer $l 1 $y 8 $p 1")
    tokens, _, held, dropped = map(int, re.findall(r"\d+", facts))
    assert held < tokens and dropped > 300


def test_the_policies_that_are_compared_differ(daemon: Daemon) -> None:
    full, cur, sliding = run("compare", daemon).stdout.splitlines()
    assert "$l 1 $y 8 $p 1" in full and "$l 1 $y 8 $p 1" in cur
    assert "$l 1 $y 8 $p 1" not in sliding and sliding.endswith("another text")


def test_many_at_once_are_solved_by_policies_that_keep_what_is_needed(daemon: Daemon) -> None:
    _, *arms = run("many", daemon).stdout.splitlines()
    solved = {line.split()[0]: [int(n) for n in re.findall(r"\d+", line)] for line in arms}
    assert solved["full"][0] >= 15 and solved["cur"][0] >= 12 and solved["sliding"][0] <= 6
    assert all(count == 16 for _, count in solved.values())


def test_eviction_costs_perplexity(daemon: Daemon) -> None:
    lines = run("perplexity", daemon).stdout.splitlines()
    found = [float(re.findall(r"perplexity +(\S+)", line)[0]) for line in lines]
    assert 1 <= found[0] < 1.01 and found[0] <= found[1] < found[-1] < 2


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """Over the model that own_model.py makes, whose tokens can spell JSON."""
    path = tmp_path_factory.mktemp("own") / "own.pt"
    subprocess.run([sys.executable, EXAMPLES / "own_model.py", path], check=True)
    with Daemon(path, "--threads=1", "--kv_pool_bytes=33554432") as daemon:
        yield daemon


def test_an_answer_is_json_of_the_schema(own: Daemon) -> None:
    """Whatever it is asked. Its weights are random, so some are lost in whitespace, and cut off."""
    whole = 0
    for question in ("who", "when", "where", "why"):
        done = run("json_answer", own, question)
        if done.returncode != 0:
            assert "cut off after 200 tokens" in done.stderr
            continue
        answer = ast.literal_eval(done.stdout)
        assert list(answer) == ["name", "year"]
        assert re.fullmatch("[A-Za-z ]{1,20}", answer["name"]) and 0 <= answer["year"] <= 2100
        whole += 1
    assert whole >= 1


def test_the_sample_model_cannot_spell_json(daemon: Daemon) -> None:
    refused = run("json_answer", daemon)
    assert refused.returncode != 0 and "json_schema: allows no text" in refused.stderr

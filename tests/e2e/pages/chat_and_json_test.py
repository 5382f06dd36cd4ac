"""What a new user can try of chat and JSON: the sample model's conversations, and the commands of
docs/getting-started.md that make a model which can spell JSON."""

import json
import os
import pty
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import jsonschema
import pytest
from epikv import Chat, Client, RpcError, Sampling, Stop
from epikv.sample import problem
from epikv.sample.problem import parse_answers
from epikv.sample.programs import program
from epikv.testing import Daemon
from page_blocks import ROOT, blocks, commands, printed

PAGE = ROOT / "docs/getting-started.md"
GENEROUS_SECONDS = 300
EPIKV = [sys.executable, "-c", "from epikv.cli import main; main()"]
SHORT = "#0 $a = 3 + 4 #1 $b = $a + 5 ask $a $b"


def bare(prompt: str) -> str:
    return prompt.removeprefix("<bos> ").removesuffix(" <think>")


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


@pytest.fixture(scope="module")
def own_daemon(sample_model: Path) -> Iterator[Daemon]:
    """Blocks load a second model into it."""
    with Daemon(sample_model, "--threads=1") as running:
        yield running


@pytest.mark.parametrize("lines", [2, 6, 18])
def test_a_problem_sent_as_a_message_is_solved(client: Client, lines: int) -> None:
    tasks = [program(f"chat/{seed}", lines) for seed in range(4)]
    for task in tasks:
        chat = Chat([user(bare(task.prompt))])
        assert client.apply_chat_template(chat).text == task.prompt
        answer = client.generate_once(chat, stop=Stop(max_output_tokens=800))
        assert all(task.correct(answer.text)), answer.text


def test_a_problem_is_also_taken_with_its_marks(client: Client) -> None:
    """As `python -m epikv.sample problem` prints it."""
    task = problem(0)
    chat = Chat([user(task.prompt)], special_tokens_in_contents=True)  # its marks are such
    answer = client.generate_once(chat, stop=Stop(max_output_tokens=800))
    assert all(task.correct(answer.text)), answer.text


def test_what_it_cannot_do_is_refused(client: Client) -> None:
    answered = client.generate_once(Chat([user(SHORT)])).text
    assert parse_answers(answered) == {"$a": 7, "$b": 2}
    turns = [user(SHORT), {"role": "assistant", "content": answered}, user(SHORT)]
    for messages, words in (
        (turns, "'done #'"),
        ([{"role": "system", "content": "Be brief."}, user(SHORT)], "follows no instructions"),
    ):
        with pytest.raises(RpcError, match=words) as refused:
            client.generate_once(Chat(messages))
        assert refused.value.code is grpc.StatusCode.FAILED_PRECONDITION
        assert refused.value.reason == "CHAT_FORMAT"


def test_in_the_terminal_a_second_problem_needs_a_clear(daemon: Daemon) -> None:
    ours, theirs = pty.openpty()
    try:
        lines = [SHORT, "#0 $a = 1 + 1 ask $a", "/clear", "#0 $a = 1 + 1 ask $a", "/exit"]
        os.write(ours, "".join(f"{line}\n" for line in lines).encode())
        done = subprocess.run(
            [*EPIKV, "chat", "--server", daemon.grpc],
            stdin=theirs,
            capture_output=True,
            text=True,
            check=True,
            timeout=GENEROUS_SECONDS,
        )
    finally:
        os.close(ours)
        os.close(theirs)
    first, second = re.findall(r"answer .*", done.stdout)
    assert parse_answers(first) == {"$a": 7, "$b": 2} and parse_answers(second)["$a"] == 2
    told = " ".join(done.stderr.split())
    assert told.count("'done #'") == 1 and "/clear begins another conversation" in told


def test_the_commands_of_the_page_write_json_of_the_schema(
    own_daemon: Daemon, tmp_path: Path
) -> None:
    (block,) = (b for b in blocks(PAGE) if "chat_and_json_test.py" in b.note)
    (tmp_path / "tools").symlink_to(ROOT / "tools")
    (tmp_path / "bin").mkdir()
    for name, start in (
        ("python", sys.executable),
        ("epikv", " ".join(EPIKV[:2]) + f" '{EPIKV[2]}'"),
    ):
        file = tmp_path / "bin" / name
        file.write_text(f'#!/bin/sh\nexec {start} "$@"\n')
        file.chmod(0o755)
    done = subprocess.run(
        [shutil.which("bash") or "bash", "-e", "-c", commands(block)],
        cwd=tmp_path,
        env={
            **os.environ,
            "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
            "EPIKV_SERVER": own_daemon.grpc,
            "EPIKV_ADMIN_SERVER": own_daemon.admin,
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=GENEROUS_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    written = re.findall(r"^\{.*?^\}", done.stdout, re.DOTALL | re.MULTILINE)
    shown = re.findall(r"^\{.*?^\}", "\n".join(printed(block)), re.DOTALL | re.MULTILINE)
    schema = json.loads((tmp_path / "book.json").read_text())
    assert len(written) == len(shown) == 1
    for text in (*written, *shown):
        book = json.loads(text)
        jsonschema.validate(book, schema)
        assert list(book) == ["title", "year"]
    assert "own serves" in done.stdout and "own is out of service" in done.stdout


def test_the_sample_model_writes_a_number_of_a_schema(client: Client) -> None:
    """It is the right one, behind what leads to it."""
    prompt = f"<bos> {SHORT} <think> #0 $a = 3 + 4 : 3 4 so $a"
    answer = client.generate_once(prompt, sampling=Sampling(json_schema={"type": "integer"}))
    assert json.loads(answer.text) == 7
    assert answer.summary is not None and answer.summary.finish_reason == "end"

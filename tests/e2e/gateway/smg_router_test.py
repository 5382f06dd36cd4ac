"""SMG, SGLang's router, unmodified, in front of two daemons that speak the dialect of vLLM: the blocks of
docs/clients.md that it is started with, and OpenAI's client through it."""

import os
import random
import re
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Self

import openai as sdk
import pytest
from epikv import Chat, Output, Sampling, Stop, processes
from epikv.sample import problem
from epikv.scrape import scrape
from epikv.testing import Daemon
from openai import OpenAI
from page_blocks import ROOT, blocks, commands
from waiting import eventually

PAGE = ROOT / "docs" / "clients.md"
CLIENTS = ROOT / "build" / "clients"
TASK = problem(9)
LONG = {"max_tokens": 700, "extra_body": {"ignore_eos": True}}


def lines(program: str) -> list[str]:
    """Of the page's block, those that start this program."""
    [block] = [each for each in blocks(PAGE) if "smg_router_test" in each.note]
    return [line for line in commands(block).splitlines() if line.startswith(program)]


def flags() -> list[str]:
    """Of the page's daemons, but for model and addresses, which tests choose."""
    told = [
        {word for word in line.split()[1:-1] if not re.match("--(model|[a-z_]*listen)=", word)}
        for line in lines("epikvd ")
    ]
    assert len(told) == 2 and told[0] == told[1] == {"--vllm_dialect"}
    return ["--threads=1", *told[0]]


def free_port() -> int:
    """SMG takes no port on which a connection ended a minute ago: connections have those from 32768 on."""
    while True:
        with socket.socket() as tried, suppress(OSError):
            tried.bind(("", random.randrange(20000, 32000)))
            return int(tried.getsockname()[1])


class Router:
    """The page's command for SMG, in front of these daemons."""

    def __init__(self, folder: Path, *servers: str) -> None:
        http, metrics = free_port(), free_port()
        [command] = lines("smg launch ")
        for asked, given in zip(re.findall(r"grpc://\S+", command), servers, strict=True):
            command = command.replace(asked, f"grpc://{given}")
        command = command.replace("--port 30000", f"--port {http}")
        # Who waits for a minute until a daemon that was killed is passed over is not a test.
        self._command = (
            f"exec {command.strip()} --prometheus-port {metrics} "
            "--health-check-interval-secs 1 --health-failure-threshold 1"
        )
        self.url = f"http://127.0.0.1:{http}"
        self._folder = folder

    def __enter__(self) -> Self:
        self.log = self._folder / "smg.log"
        with self.log.open("wb") as log:
            self._process = processes.start(
                ["bash", "-ec", self._command],
                stdout=log,
                stderr=log,
                cwd=self._folder,
                env={
                    **os.environ,
                    "PATH": f"{CLIENTS / 'bin'}:{os.environ['PATH']}",
                    "HOME": str(self._folder),
                    "HF_HUB_OFFLINE": "1",
                },
            )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def tell(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]

    @contextmanager
    def client(self) -> Iterator[OpenAI]:
        with OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0) as client:
            yield client

    def await_workers(self) -> None:
        """Until it has found its workers and has their tokenizer."""

        def answers() -> bool:
            with suppress(sdk.APIError), self.client() as client:
                client.completions.create(model="sample", prompt="#0", max_tokens=1)
                return True
            assert self._process.poll() is None, self.tell()
            time.sleep(0.2)
            return False

        eventually(answers, show=self.tell)


@pytest.fixture(scope="module")
def daemons(sample_model: Path) -> Iterator[list[Daemon]]:
    with Daemon(sample_model, *flags()) as one, Daemon(sample_model, *flags()) as other:
        yield [one, other]


@pytest.fixture(scope="module")
def router(daemons: list[Daemon], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    assert (CLIENTS / "stamp").exists(), "run tests/clients/python/install.sh first"
    folder = tmp_path_factory.mktemp("smg")
    with Router(folder, *(daemon.grpc for daemon in daemons)) as running:
        running.await_workers()
        yield running


@pytest.fixture(scope="module")
def openai(router: Router) -> Iterator[OpenAI]:
    with router.client() as client:
        yield client


def asked(daemon: Daemon, method: str = "Generate", **labels: str) -> float:
    page = scrape(daemon.metrics)
    return page.total("epikv_grpc_requests_total", method=f"VllmEngine/{method}", **labels)


def plain(daemon: Daemon, prompt: str, tokens: int) -> Any:
    with daemon.client() as client:
        return client.generate_once(
            prompt,
            sampling=Sampling(temperature=0),
            stop=Stop(tokens),
            output=Output(token_ids=True),
        )


def test_the_model_is_found(openai: OpenAI, daemons: list[Daemon]) -> None:
    assert [model.id for model in openai.models.list()] == ["sample"]
    for method in ("HealthCheck", "GetModelInfo", "GetServerInfo"):
        assert all(asked(daemon, method, code="OK") > 0 for daemon in daemons), method
    assert sum(asked(daemon, "GetTokenizer", code="OK") for daemon in daemons) > 0


def test_a_completion_is_the_daemons(openai: OpenAI, daemons: list[Daemon]) -> None:
    """Text to tokens and back by the router, with the tokenizer that the daemon gave it."""
    expected = plain(daemons[0], TASK.prompt, 60)
    before = [asked(daemon) for daemon in daemons]
    for _ in daemons:
        told = openai.completions.create(
            model="sample", prompt=TASK.prompt, max_tokens=60, temperature=0
        )
        assert told.choices[0].text.strip() == expected.text.strip()
        assert told.usage.prompt_tokens == expected.summary.usage.prompt_tokens
        assert told.usage.completion_tokens == expected.summary.usage.output_tokens
    assert [asked(daemon) for daemon in daemons] == [times + 1 for times in before], "in turns"


def test_a_stream_is_the_same(openai: OpenAI, daemons: list[Daemon]) -> None:
    expected = plain(daemons[0], TASK.prompt, 60)
    stream = openai.completions.create(
        model="sample",
        prompt=TASK.prompt,
        max_tokens=60,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    parts = list(stream)
    text = "".join(choice.text for part in parts for choice in part.choices)
    assert text.strip() == expected.text.strip()
    reasons = [choice.finish_reason for part in parts for choice in part.choices]
    assert reasons[-1] == "length" and len(parts) > 5
    assert parts[-1].usage.completion_tokens == expected.summary.usage.output_tokens


def test_a_conversation_is_written_as_the_checkpoints_template_does(
    openai: OpenAI, daemons: list[Daemon]
) -> None:
    with daemons[0].client() as client:
        chat = Chat([{"role": "user", "content": "#0 $h = 4 + 6"}])
        expected = client.apply_chat_template(chat).token_ids
    told = openai.chat.completions.create(
        model="sample",
        messages=[{"role": "user", "content": "#0 $h = 4 + 6"}],
        max_completion_tokens=20,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
    )
    assert told.usage.prompt_tokens == len(expected)
    places = told.choices[0].logprobs.content
    assert places and all(len(place.top_logprobs) == 2 for place in places)


def test_what_the_daemon_refuses_the_client_is_told(openai: OpenAI) -> None:
    with pytest.raises(sdk.BadRequestError, match="temperature"):
        openai.completions.create(
            model="sample",
            prompt="#0",
            max_tokens=4,
            temperature=0,
            extra_body={"n": 2},
        )
    with pytest.raises(sdk.APIStatusError):
        openai.completions.create(model="sample", prompt="#0 " * 2000, max_tokens=4)


def test_who_leaves_is_aborted(openai: OpenAI, daemons: list[Daemon]) -> None:
    def cancelled() -> float:
        pages = [scrape(daemon.metrics) for daemon in daemons]
        return sum(
            page.total("epikv_requests_finished_total", reason="cancelled") for page in pages
        )

    before = cancelled()
    stream = openai.completions.create(model="sample", prompt=TASK.prompt, stream=True, **LONG)
    next(iter(stream))
    stream.close()
    eventually(lambda: cancelled() > before)


def test_one_daemon_is_killed_and_the_other_answers(
    sample_model: Path, daemons: list[Daemon], tmp_path: Path
) -> None:
    with ExitStack() as stack:
        doomed = Daemon(sample_model, *flags()).__enter__()
        stack.callback(doomed.kill)
        router = stack.enter_context(Router(tmp_path, daemons[0].grpc, doomed.grpc))
        client = stack.enter_context(router.client())
        router.await_workers()
        ask = partial(client.completions.create, model="sample", prompt="#0", max_tokens=2)
        eventually(lambda: bool(ask().choices) and asked(doomed) > 0, show=router.tell)
        doomed.kill()
        for _ in range(10):
            assert ask().choices, router.tell()

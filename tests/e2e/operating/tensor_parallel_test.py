"""One model that several processes serve together (--tensor_parallel): what they say, and their ends."""

import os
import re
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from admin_calls import admin_of
from epikv import Kv, Output, RpcError, Sampling, Speculation, Stop, harness
from epikv.sample import problem
from epikv.testing import Daemon, DaemonError, find_binary
from waiting import eventually

OUTPUT = Output(token_ids=True, logprobs=True)
# 231 MB of weights.
LARGE: harness.Shape = {
    "hidden": 512,
    "layers": 8,
    "heads": 8,
    "kv_heads": 2,
    "ffn": 4096,
    "vocab": 2000,
    "context": 512,
    "dtype": "fp32",
}
TWO = ("--tensor_parallel=2", "--threads=1", "--kv_pool_bytes=50000000")


def others_of(pid: int) -> list[int]:
    """The processes that `pid` has begun."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture(scope="module")
def ranked(sample_model: Path) -> Iterator[Daemon]:
    with Daemon(sample_model, *TWO) as daemon:
        yield daemon


def test_answers_are_those_of_one_process(daemon: Daemon, ranked: Daemon) -> None:
    """Greedy ones; sums are rounded elsewhere, and nothing else differs."""
    with daemon.client() as alone, ranked.client() as together:
        for kv in (Kv(), Kv("epikv_flat", 200), Kv("h2o", 200), Kv("h2o", 200, {"scope": "model"})):
            for number in range(3):

                def answer(client: object, kv: Kv = kv, number: int = number) -> object:
                    return client.generate_once(
                        problem(number).prompt,
                        kv=kv,
                        sampling=Sampling(temperature=0),
                        stop=Stop(max_output_tokens=200),
                        output=OUTPUT,
                        speculation=Speculation(),
                    )

                one, two = answer(alone), answer(together)
                assert two.token_ids == one.token_ids
                assert two.logprobs == pytest.approx(one.logprobs, abs=1e-3)
                assert two.summary.kv.rounds == one.summary.kv.rounds


def test_prompts_that_are_asked_about(daemon: Daemon, ranked: Daemon) -> None:
    """Of several steps, under a policy that has the model read them again behind a phrase."""
    prompt = " ".join(problem(number).prompt for number in range(8))
    kv = Kv("kvzip", 300, {"allocator": "uniform", "chunk": 256})
    ask = Stop(max_output_tokens=40, ignore_eos=True)
    with daemon.client() as alone, ranked.client() as together:
        one, two = (
            client.generate_once(prompt, kv=kv, stop=ask, output=OUTPUT)
            for client in (alone, together)
        )
    assert one.summary.usage.prompt_tokens > 600
    assert one.summary.kv.rounds > 0
    assert two.token_ids == one.token_ids


def test_artefacts_of_the_whole_model_are_read(
    sample_model: Path, artefact_dir: Path, daemon: Daemon
) -> None:
    """Those of policies that have statistics of each head, too: requests of theirs are refused."""
    with (
        Daemon(sample_model, *TWO, f"--artefact_dir={artefact_dir}") as ranked,
        ranked.client() as client,
        daemon.client() as alone,
    ):
        one, two = (
            of.generate_once(problem(1).prompt, kv=Kv("epikv_probe", 200), output=OUTPUT)
            for of in (alone, client)
        )
        assert two.token_ids == one.token_ids
        assert two.summary.kv.rounds == one.summary.kv.rounds > 0
        with pytest.raises(RpcError, match="has statistics of each"):
            client.generate_once(problem(0).prompt, kv=Kv("triattention", 64))


def test_the_model_says_how_it_is_served(daemon: Daemon, ranked: Daemon) -> None:
    with daemon.client() as alone, ranked.client() as together:
        one, two = alone.models()[0], together.models()[0]
    assert (one.tensor_parallel, two.tensor_parallel) == (1, 2)
    assert (two.heads, two.kv_heads) == (one.heads, one.kv_heads)
    assert two.kv_bytes_per_token * 2 == one.kv_bytes_per_token  # of each process


def test_what_they_cannot_do_is_refused(ranked: Daemon, sample_model: Path) -> None:
    with ranked.client() as client:
        ask = partial(client.generate_once, problem(0).prompt, stop=Stop(max_output_tokens=5))
        with pytest.raises(RpcError, match="compares KV heads with one another"):
            ask(kv=Kv("snapkv", 64, {"allocator": "head_pool"}))
        with pytest.raises(RpcError, match="there is no tier while several ranks"):
            ask(kv=Kv("h2o", 64, tier_tokens=100))
    refused = admin_of(ranked)("load-model", str(sample_model), "--name=second", status=1)
    assert "several processes serve one model (--tensor_parallel)" in refused["error"]


def test_what_cannot_be_split_stops_the_start(sample_model: Path) -> None:
    for flag, why in (
        ("--tensor_parallel=3", "cannot be split into 3 parts: its 2 KV heads"),
        ("--tensor_parallel=9", "--tensor_parallel must be 1 to 8"),
    ):
        with pytest.raises(DaemonError) as caught, Daemon(sample_model, flag):
            pass
        assert why in str(caught.value)
    for flag, why in (
        (f"--draft_model={sample_model}", "--draft_model must be empty with --tensor_parallel"),
        ("--packet_bytes=1000000", "--packet_bytes must be 0 with --tensor_parallel"),
        ("--session_bytes=1000000", "--session_bytes must be 0 with --tensor_parallel"),
        ("--kv_tier_bytes=1000000", "--kv_tier_bytes must be 0 with --tensor_parallel"),
    ):
        with pytest.raises(DaemonError) as caught, Daemon(sample_model, *TWO, flag):
            pass
        assert why in str(caught.value)


def test_all_end_together(sample_model: Path) -> None:
    with Daemon(sample_model, *TWO) as daemon:
        [other] = others_of(daemon.pid)
        os.kill(other, signal.SIGTERM)  # as a terminal's Ctrl-C, to which rank 0 alone listens
        with daemon.client() as client:
            client.generate_once("1 + 2", stop=Stop(max_output_tokens=3))
    eventually(lambda: not is_running(other))


@pytest.mark.parametrize("busy", [True, False], ids=["in an answer", "idle"])
def test_one_that_is_killed_ends_the_service(sample_model: Path, busy: bool) -> None:
    why = "was ended by signal 9"
    with (
        pytest.raises(DaemonError, match="ended with status 1") as caught,
        Daemon(sample_model, *TWO) as daemon,
        daemon.client() as client,
    ):
        [other] = others_of(daemon.pid)
        if busy:
            answer = iter(
                client.generate("1 + 2", stop=Stop(max_output_tokens=500, ignore_eos=True))
            )
            next(answer)
            os.kill(other, signal.SIGKILL)
            with pytest.raises(RpcError, match=why):
                for _ in answer:
                    pass
        else:
            os.kill(other, signal.SIGKILL)
        eventually(lambda: not is_running(daemon.pid))
    assert f"rank 1 (process {other}) {why}" in str(caught.value)


def test_a_rank_dies_with_a_daemon_that_is_killed(sample_model: Path) -> None:
    with pytest.raises(DaemonError), Daemon(sample_model, *TWO) as daemon:
        [other] = others_of(daemon.pid)
        os.kill(daemon.pid, signal.SIGKILL)
        eventually(lambda: not is_running(other))


def test_a_model_that_exceeds_one_process_is_served_by_two(tmp_path: Path) -> None:
    """`ulimit -d` counts what a process has of its own, as a cgroup's limit does."""
    model = harness.random_model("limit", **LARGE)
    alone = ("--threads=1", "--kv_pool_bytes=10000000")
    with Daemon(model, *alone) as daemon:
        [own] = re.findall(r"VmData:\s+(\d+) kB", Path(f"/proc/{daemon.pid}/status").read_text())
    most = int(own) - model.stat().st_size // 4 // 1024
    limited = tmp_path / "limited"
    limited.write_text(f'#!/bin/sh\nulimit -d {most}\nexec {find_binary()} "$@"\n')
    limited.chmod(0o755)
    with pytest.raises(DaemonError) as caught, Daemon(model, *alone, binary=limited):
        pass
    assert "not enough memory to load" in str(caught.value)
    flags = ("--tensor_parallel=2", "--threads=1", "--kv_pool_bytes=5000000")
    with Daemon(model, *flags, binary=limited) as daemon, daemon.client() as client:
        answer = client.generate_once([1, 2, 3], stop=Stop(max_output_tokens=5, ignore_eos=True))
        assert answer.summary.usage.output_tokens == 5

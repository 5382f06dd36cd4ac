"""Policies that have the model run something of their own at the end of a prompt, over the wire."""

import threading
import time

import pytest
from epikv import Client, Kv, Output, RpcError, Sampling, Stop
from epikv.sample import problem
from epikv.scrape import scrape
from epikv.testing import Daemon

STATES = ("used", "reserved")  # of the pool
PASSES = {
    "laq": {},
    "laq_plus": {"draft": "streaming_llm"},
    "kvzip": {"chunk": 64},
    "kvzip_plus": {},
    "snapkv": {"queries": "lookahead", "draft": "whole"},
    "rkv": {"queries": "lookahead"},
    "laprox": {"queries": "lookahead"},
}


def long_prompt() -> str:
    """Several hundred tokens: a problem and most of its solution."""
    task = problem("passes/0")
    words = task.trace.split()
    return " ".join([task.prompt, *words[: len(words) * 3 // 4]])


def kv(policy: str, budget: int) -> Kv:
    return Kv(policy, budget, params={**PASSES[policy], "slack": 7})


@pytest.mark.parametrize("policy", PASSES)
def test_they_run_and_are_timed(client: Client, policy: str) -> None:
    prompt = long_prompt()
    result = client.generate_once(prompt, kv=kv(policy, 200), stop=Stop(40, ignore_eos=True))
    summary = result.summary
    assert summary.usage.prompt_tokens > 300
    assert summary.usage.output_tokens == 40
    assert summary.kv.rounds > 0
    assert summary.timings.scratch_pass > 0
    assert summary.timings.scratch_pass < summary.timings.decode
    # Of a prompt within the budget nothing of the kind runs.
    roomy = client.generate_once(prompt, kv=kv(policy, 1200), stop=Stop(8, ignore_eos=True))
    assert roomy.summary.timings.scratch_pass == 0


def test_others_stream_on_meanwhile(client: Client) -> None:
    """A stream under `full` says the same beside passes as alone."""
    task = problem("passes/1")
    alone = client.generate_once(task.prompt, stop=Stop(120, ignore_eos=True))
    ended: list[str] = []

    def beside(policy: str) -> None:
        client.generate_once(long_prompt(), kv=kv(policy, 200), stop=Stop(20, ignore_eos=True))
        ended.append(policy)

    threads = [threading.Thread(target=beside, args=(policy,)) for policy in PASSES]
    for thread in threads:
        thread.start()
    together = client.generate_once(task.prompt, stop=Stop(120, ignore_eos=True))
    for thread in threads:
        thread.join()
    assert sorted(ended) == sorted(PASSES)
    assert together.text == alone.text


def test_completions_share_one_pass(client: Client) -> None:
    result = client.generate_once(
        long_prompt(),
        kv=kv("kvzip", 200),
        stop=Stop(20, ignore_eos=True),
        sampling=Sampling(temperature=1.0, seed=3, n=3),
        output=Output(token_ids=True),
    )
    assert [len(completion.token_ids) for completion in result.completions] == [20, 20, 20]
    assert result.summary.timings.scratch_pass > 0


def test_who_leaves_meanwhile_leaves_nothing(sample_model: object) -> None:
    with Daemon(sample_model, "--threads=1") as daemon, daemon.client() as client:  # type: ignore[arg-type]
        for policy in PASSES:
            for after in (0.0, 0.002, 0.01, 0.03):
                stream = client.generate(
                    long_prompt(), kv=kv(policy, 200), stop=Stop(200, ignore_eos=True)
                )
                next(iter(stream))
                time.sleep(after)
                stream.cancel()
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            page = scrape(daemon.metrics)
            held = {state: page.total("epikv_kv_bytes", state=state) for state in STATES}
            if not any(held.values()):
                break
            time.sleep(0.1)
        assert held == dict.fromkeys(STATES, 0)


def test_skipkv_ends_sentences_where_the_tokenizer_does(client: Client) -> None:
    result = client.generate_once(
        problem("passes/2").prompt, kv=Kv("skipkv", 160, params={"slack": 7}), stop=Stop(200)
    )
    assert result.summary.kv.rounds > 0
    ends = result.accepted.kv.policy_params["ends"]
    assert len(ends) == 1  # its words have no lines, and one full stop
    with pytest.raises(RpcError, match="between 0"):
        client.generate_once("ask", kv=Kv("skipkv", 160, params={"ends": [-1]}), stop=Stop(8))

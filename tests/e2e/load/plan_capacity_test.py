"""`epikv plan capacity`: its model has the steps that a daemon has, and the command measures one."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from epikv import Client, Kv, Output, Stop
from epikv.messages import Accepted
from epikv.plan.costs import Costs, Policy, Settings
from epikv.plan.measuring import settled
from epikv.plan.replica import FULL, Arm, Call, Model, Replica
from epikv.scrape import scrape
from epikv.testing import Daemon
from page_blocks import ROOT, blocks

PAGE = ROOT / "docs" / "capacity.md"
FLAGS = ("--threads=1", "--max_step_tokens=64", "--prefill_chunk_tokens=32")
POOL_TOKENS = 1100
# Prompt and output. While the first runs, no other one has room beside it.
FIRST = (400, 600)
LENGTHS = [(150, 30), (40, 1), (33, 90), (200, 12), (64, 64), (100, 50), (31, 2), (250, 40)]


def steps_of_model(settings: Settings, requests: list[tuple[int, int]]) -> Replica:
    costs = Costs(settings, base=((0, 1.0),), prefill=0.0)
    replica = Replica(Model(costs, [FULL]), lambda *_: None)
    for number, (prompt, output) in enumerate(requests):
        replica.submit(Call(number, prompt, output, output))
    while replica.end is not None:
        replica.advance()
    return replica


@pytest.mark.parametrize("places", [3, 64])
def test_the_model_has_as_many_steps_as_the_daemon(sample_model: Path, places: int) -> None:
    """All requests wait when the first ends, so that the daemon's steps do not depend on time."""
    flags = (*FLAGS, f"--max_running_requests={places}", f"--kv_pool_bytes={POOL_TOKENS * 3072}")
    with Daemon(sample_model, *flags) as daemon, daemon.client() as client:
        [facts] = client.models()
        settings = Settings(
            facts.kv_capacity_tokens,
            facts.context_length,
            facts.vocab_size,
            max_step_tokens=64,
            prefill_chunk_tokens=32,
            max_running_requests=places,
        )
        before = scrape(daemon.metrics)
        streams = []
        for prompt, output in [FIRST, *LENGTHS]:
            ids = [len(streams) + 4] * prompt
            stop = Stop(output, ignore_eos=True)
            kv = Kv(bypass_prefix_cache=True)
            asked = client.generate(ids, kv=kv, stop=stop, output=Output(text=False))
            assert isinstance(next(asked), Accepted)
            streams.append(asked)
        ran = scrape(daemon.metrics).total("epikv_requests_finished_total")
        assert ran == before.total("epikv_requests_finished_total"), "the first ended too soon"
        for stream in streams:
            list(stream)
        page = settled(daemon.metrics) - before
    model = steps_of_model(settings, [FIRST, *LENGTHS])
    assert page.total("epikv_step_seconds_count") == model.steps
    assert page.value("epikv_step_tokens_total", phase="prefill") == model.prefill_tokens
    assert page.value("epikv_step_tokens_total", phase="decode") == model.decode_tokens


@pytest.mark.parametrize(
    ("policy", "budget", "prompt", "output"),
    [
        ("full", None, 100, 60),
        ("sliding", 24, 100, 60),
        ("sliding", 24, 600, 60),
        ("sliding", 0.5, 10, 20),
        ("h2o", 40, 70, 90),
        ("snapkv", 30, 20, 80),
        ("snapkv", 90, 200, 80),
        ("epikv_flat", 40, 20, 80),
        ("epikv_flat", 99, 20, 80),  # which holds all
    ],
)
def test_a_plan_reserves_what_the_daemon_reserves(
    client: Client, policy: str, budget: int | float | None, prompt: int, output: int
) -> None:
    [model] = client.models()
    policies = {}
    for name in ("full", policy):
        told = client.policy(name)
        policies[name] = Policy(
            told.prompt_eviction,
            told.slack_tokens,
            state_bytes_per_token=told.state_bytes_per_token,
            state_bytes_per_sequence=told.state_bytes_per_sequence,
        )
    settings = Settings(10**9, 1280, 100, kv_bytes_per_token=model.kv_bytes_per_token)
    costs = Costs(settings, base=((0, 1.0),), prefill=0.0, policies=policies)
    planned = Model(costs, [Arm(policy, budget)]).demand(Call(0, prompt, output, output))
    stop = Stop(output, ignore_eos=True)
    with client.generate([7] * prompt, kv=Kv(policy, budget), stop=stop) as stream:
        accepted = next(stream)
    assert isinstance(accepted, Accepted) and accepted.kv is not None
    assert planned.peak == accepted.kv.reserved_bytes


def test_the_page_is_run(sample_model: Path, tmp_path: Path) -> None:
    """docs/capacity.md, pasted; the daemon is smaller, and is measured shortly."""
    [workload] = [block for block in blocks(PAGE) if block.language == "toml"]
    few = workload.text.replace("rate = 40 ", "rate = 8 ").replace(":700", ":200")
    (tmp_path / "workload.toml").write_text(few)
    shutil.copy(sample_model, tmp_path / "model.pt")
    program = tmp_path / "bin" / "epikv"
    program.parent.mkdir()
    program.write_text(
        f"#!/bin/sh\nexec {sys.executable} -c 'from epikv.cli import main; main()' \"$@\"\n"
    )
    program.chmod(0o755)
    [pasted] = [block for block in blocks(PAGE) if block.has_commands]
    small = "--model model.pt --measure 0.3 --flag=--threads=1 --flag=--max_running_requests=8"
    small += f" --flag=--access_log={tmp_path}/access.log"
    commands = pasted.text.replace("--model model.pt", small)
    commands = commands.replace("--deadline 1 ", "--deadline 4 ")  # whatever else runs here
    commands += (
        "\nepikv plan capacity --traffic access.log --costs costs.json --deadline 60 --replicas 2"
    )
    done = subprocess.run(
        ["bash", "-ec", commands],
        check=False,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}"},
    )
    assert done.returncode == 0, done.stderr
    costs = Costs.load(tmp_path / "costs.json")
    assert costs.settings.max_running_requests == 8 and costs.settings.context_length == 1280
    assert 0 < costs.base_seconds(1) < 1 and set(costs.policies) == {"full", "sliding"}
    told = json.loads((tmp_path / "plan.json").read_text())
    assert {answer["routing"] for answer in told["answers"]} == {"least-connections", "prefix"}
    assert all(answer["late"] <= 0.01 for answer in told["answers"])
    assert "random: " in done.stdout and "requests/s; of 99 % the answer within 60 s" in done.stdout

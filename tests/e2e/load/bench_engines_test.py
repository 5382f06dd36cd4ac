"""What `epikv bench peers` runs of ours: a daemon over gRPC, and the linears alone."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from epikv.client import Client
from epikv.options import Output, Sampling, Stop
from epikv.testing import find_binary
from epikv_lab.bench.peers import convert
from epikv_lab.bench.peers.process import Epikvd, Job
from epikv_lab.bench.peers.venvs import Refused

PROMPTS = [[5, 6, 7, 8], [9, 10, 11], [12] * 40]


@pytest.fixture(scope="module")
def ours(sample_model: Path) -> Iterator[Epikvd]:
    engine = Epikvd(sample_model, 1, 64 << 20, find_binary())
    yield engine
    engine.close()


def test_streams_are_those_of_the_daemon_and_dated(ours: Epikvd, client: Client) -> None:
    found = ours.run(Job(PROMPTS, 8), 60)
    for prompt, tokens in zip(PROMPTS, found.tokens, strict=True):
        alone = client.generate_once(
            prompt,
            sampling=Sampling(temperature=0),
            stop=Stop(max_output_tokens=8),
            output=Output(text=False, token_ids=True),
        )
        assert tokens == list(alone.token_ids)
    assert all(len(times) == 8 and times[0] > 0 for times in found.times)
    assert all(times == sorted(times) for times in found.times)
    held = ours.settings["bytes"]
    assert found.peak > held["weights"] > held["scratch"] > 0 and ours.cpu() > 0
    assert ours.held_bytes == held["weights"] + held["kv_pool"] + held["scratch"]


def test_a_job_that_the_daemon_refuses_or_that_takes_too_long_is_told(ours: Epikvd) -> None:
    with pytest.raises(Refused, match="no answer within 0.001 s"):
        ours.run(Job([[5] * 1000] * 16, 1), 0.001)  # no machine reads 16,000 tokens in 1 ms
    with pytest.raises(Refused, match="TOKEN_RANGE"):
        ours.run(Job([[5], [-1]], 4), 60)
    assert len(ours.run(Job([[5, 6]], 3), 60).tokens[0]) == 3


@pytest.mark.parametrize("cpu", ["auto", "plain"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_linears_alone_run_as_the_daemon_does(dtype: str, cpu: str) -> None:
    program = find_binary().resolve().parents[1] / "tests" / "linears_alone"
    configuration = {
        "threads": 1, "precision": dtype, "layers": 2, "linears": [(64, 96), (96, 64)],
        "head": (64, 256), "program": str(program), "cpu": cpu,
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, convert.RUNNERS / "linears.py", json.dumps(configuration)],
        input=json.dumps({"prompts": [[1] * 700, [2]], "new": 3}) + "\n",
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    ready, answer = map(json.loads, done.stdout.splitlines())
    assert ready["ready"]["kernels"]
    assert answer["tokens"] == [[-1] * 3] * 2
    assert all(0 < times[0] < times[1] < times[2] for times in answer["times"])


def test_linears_alone_say_what_they_take() -> None:
    program = find_binary().resolve().parents[1] / "tests" / "linears_alone"
    for arguments in ([], ["1", "bfloat16", "2", "64"], ["0", "float32", "2", "64,64"]):
        done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 2 and "IN,OUT" in done.stderr

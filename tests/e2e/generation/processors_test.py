"""--cpu: the same answers on what a lesser processor has."""

from pathlib import Path

import pytest
from epikv import Client, GenerateResult, Kv, Output, Stop
from epikv.sample import problem
from epikv.testing import Daemon, DaemonError

FLAGS = ("--threads=1", "--deterministic=true")
PREPACKED = {"avx512": "prepacked for AVX-512", "avx2": "prepacked for AVX2"}


def solved(client: Client, index: int) -> GenerateResult:
    return client.generate_once(
        problem(index).prompt,
        kv=Kv("epikv_flat", 150),
        stop=Stop(max_output_tokens=120),
        output=Output(token_ids=True, logprobs=True),
    )


@pytest.mark.parametrize("cpu", ["avx512", "avx2", "plain"])
def test_a_lesser_processor_gives_the_same_answers(sample_model: Path, cpu: str) -> None:
    with Daemon(sample_model, *FLAGS) as daemon, daemon.client() as client:
        whole = [solved(client, index) for index in range(3)]
    try:
        with Daemon(sample_model, *FLAGS, f"--cpu={cpu}") as daemon, daemon.client() as client:
            held = [solved(client, index) for index in range(3)]
            assert PREPACKED.get(cpu, "linears prepacked") in daemon.log
    except DaemonError as error:
        if "this processor has no" not in str(error):
            raise
        pytest.skip(str(error))
    for one, other in zip(whole, held, strict=True):
        assert other.token_ids == one.token_ids
        assert other.logprobs == pytest.approx(one.logprobs, abs=2e-4)
        assert other.summary.kv.evicted_entries == one.summary.kv.evicted_entries > 0

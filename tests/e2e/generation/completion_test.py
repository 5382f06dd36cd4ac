"""What a newcomer does first: completions of the sample model under a budget."""

import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from epikv import Client, Kv, Output, Sampling
from epikv.sample import problem
from epikv.testing import Daemon

TASK = problem(9)
EVICTING = [
    Kv("epikv_flat", 300),
    Kv("sliding", 300, {"slack": 7}),
    Kv("h2o", 300),
    Kv("h2o", 300, {"scope": "model"}),
    Kv("knorm", 300),
    Kv("random", 300, equal_protection=True),
    Kv("epikv_flat", 300, positions="compact"),
]


@pytest.fixture(scope="module")
def repeatable(sample_model: Path) -> Iterator[Client]:
    with Daemon(sample_model, "--threads=1", "--deterministic=true") as daemon:
        with daemon.client() as client:
            yield client


def test_the_quickstart_keeps_its_promise(daemon: Daemon) -> None:
    """The right answer with at least 40 % of the generated tokens dropped: else its status is 1."""
    demo = subprocess.run(
        [sys.executable, "-m", "epikv.sample", "demo", "--server", daemon.grpc, "--budget", "400"],
        check=False,
        capture_output=True,
        text=True,
    )
    assert demo.returncode == 0, demo.stdout + demo.stderr
    for fact in ("prompt", "expected", "policy", "budget", "peak", "evicted", "first token"):
        assert fact in demo.stdout


def test_the_sample_model_solves_its_problem(client: Client) -> None:
    result = client.generate_once(TASK.prompt, kv=Kv("full"))
    assert all(TASK.correct(result.text))
    assert result.summary.finish_reason == "end"
    assert result.summary.kv.evicted_entries == 0


def test_the_tokenizer_can_be_had(client: Client, sample_model: Path) -> None:
    """As it is in the model file; its ids are those that the daemon works with."""
    with zipfile.ZipFile(sample_model) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith("extra/tokenizer.json")]
        assert client.tokenizer_json(model="sample") == archive.read(name)
    tokenizer = client.tokenizer()
    ids = client.tokenize(TASK.prompt)
    assert tokenizer.encode(TASK.prompt).ids == ids and len(ids) > 20
    assert tokenizer.decode(ids) == client.detokenize(ids)


def test_streamed_and_whole_completions_are_the_same(repeatable: Client) -> None:
    wanted = {"kv": Kv("epikv_flat", 300), "output": Output(token_ids=True, kept=True)}
    whole = repeatable.generate_once(TASK.prompt, **wanted)
    first, *deltas, last = repeatable.generate(TASK.prompt, **wanted)
    assert "".join(delta.text for delta in deltas) == whole.text
    assert [token for delta in deltas for token in delta.token_ids] == whole.token_ids
    assert last.kv == whole.summary.kv
    assert first.kv == whole.accepted.kv


@pytest.mark.parametrize("kv", EVICTING, ids=lambda kv: f"{kv.policy}-{kv.positions}-{kv.params}")
def test_scoring_a_completion_gives_its_logprobs(repeatable: Client, kv: Kv) -> None:
    """Bit for bit in deterministic mode, evictions included."""
    sampling = Sampling(temperature=0.7, seed=11) if kv.policy != "random" else Sampling(seed=0)
    output = Output(token_ids=True, logprobs=True, kv_trace=True, kept=True)
    generated = repeatable.generate_once(TASK.prompt, kv=kv, sampling=sampling, output=output)
    scored = repeatable.score(TASK.prompt, generated.token_ids, kv=kv, kv_trace=True, kept=True)
    usage = generated.summary.kv
    assert usage.rounds > 0 and usage.evicted_entries > 0
    assert usage.peak_bytes <= generated.accepted.kv.reserved_bytes
    if kv.policy == "random":  # its draws come from the seed, which scoring has none of
        return
    assert scored.logprobs == generated.logprobs
    assert scored.evictions == generated.evictions
    assert scored.summary.kv == usage

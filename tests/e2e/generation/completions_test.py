"""Several completions of one prompt, through the real daemon."""

from pathlib import Path

import pytest
from click.testing import CliRunner
from epikv import Delta, Finished, Kv, Output, RpcError, Sampling, Stop, Summary
from epikv.cli import main
from epikv.scrape import scrape
from epikv.testing import Daemon

PROMPT = [40, 41, 42, 7, 7, 7]  # no problem at all: the model cannot be certain of what follows
FLAGS = ("--threads=1", "--deterministic=true")
STOP = Stop(max_output_tokens=40, ignore_eos=True)
OUTPUT = Output(token_ids=True, logprobs=True, kept=True)


@pytest.mark.parametrize("kv", [Kv(), Kv("epikv_flat", 32)], ids=["full", "epikv_flat"])
def test_each_is_what_its_seed_gives_alone(sample_model: Path, kv: Kv) -> None:
    def sampling(seed: int, n: int | None = None) -> Sampling:
        return Sampling(temperature=3.0, seed=seed, n=n)

    with Daemon(sample_model, *FLAGS) as daemon, daemon.client() as client:
        alone = [
            client.generate_once(PROMPT, kv=kv, sampling=sampling(s), stop=STOP, output=OUTPUT)
            for s in (3, 4, 5)
        ]
        assert len({tuple(result.token_ids) for result in alone}) == 3
        assert all(result.completions == [] for result in alone)

        before = scrape(daemon.metrics)
        events = list(
            client.generate(PROMPT, kv=kv, sampling=sampling(3, 3), stop=STOP, output=OUTPUT)
        )
        moved = scrape(daemon.metrics) - before
        assert moved.total("epikv_requests_finished_total") == 1
        assert moved.total("epikv_tokens_total", kind="output") == 3 * 40
        assert moved.total("epikv_kv_budget_overrun_tokens_total") == 0
        summary = events[-1]
        assert isinstance(summary, Summary) and summary.usage.output_tokens == 3 * 40
        once = client.generate_once(
            PROMPT, kv=kv, sampling=sampling(3, 3), stop=STOP, output=OUTPUT
        )
        assert (once.text, once.token_ids) == ("", [])
        for i, one in enumerate(alone):
            deltas = [e for e in events if isinstance(e, Delta) and e.completion == i]
            (ended,) = [e for e in events if isinstance(e, Finished) and e.completion == i]
            assert "".join(delta.text for delta in deltas) == one.text
            assert [t for delta in deltas for t in delta.token_ids] == one.token_ids
            assert [p for delta in deltas for p in delta.logprobs] == one.logprobs
            assert ended.finish_reason == "length" and ended.output_tokens == 40
            assert ended.kv == one.summary.kv
            completion = once.completions[i]
            assert completion.token_ids == one.token_ids and completion.finished == ended


def test_long_ones_are_cached_in_whole_blocks(sample_model: Path) -> None:
    """By the settings a daemon has by itself: blocks of 256 tokens, some the prompt's in part."""
    prompt = [40 + i % 30 for i in range(100)]
    with Daemon(sample_model) as daemon, daemon.client() as client:
        stop = Stop(max_output_tokens=400, ignore_eos=True)
        sampling = Sampling(temperature=1.0, seed=1, n=2)
        result = client.generate_once(prompt, sampling=sampling, stop=stop, output=OUTPUT)
        for completion in result.completions:
            turn = client.generate_once(
                [*prompt, *completion.token_ids], stop=Stop(max_output_tokens=1)
            )
            assert turn.summary.usage.cached_prompt_tokens == 256


@pytest.mark.parametrize(
    "sampling", [Sampling(n=2), Sampling(temperature=1, n=17), Sampling(temperature=1, n=0)]
)
def test_what_makes_no_sense_is_refused(client, sampling: Sampling) -> None:
    with pytest.raises(RpcError) as refused:
        client.generate_once(PROMPT, sampling=sampling)
    assert [violation.field for violation in refused.value.field_violations] == ["sampling.n"]


def test_the_command_prints_each(daemon: Daemon) -> None:
    command = [
        "generate",
        "--ids",
        " ".join(map(str, PROMPT)),
        f"--server={daemon.grpc}",
        "--completions=3",
    ]
    command += ["--temperature=1", "--max-output-tokens=8", "--seed=1"]
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 0, done.output
    assert all(f"completion {i}:" in done.stderr for i in range(3)), done.stderr

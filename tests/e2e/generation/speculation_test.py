"""Guesses that run ahead, through the real daemon: the same answers, sooner."""

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from epikv import Kv, Output, RpcError, Sampling, Speculation, Stop
from epikv.cli import main
from epikv.sample import problem
from epikv.scrape import scrape
from epikv.testing import Daemon
from waiting import eventually

OUTPUT = Output(token_ids=True, logprobs=True, kept=True, kv_trace=True)


@pytest.mark.parametrize(
    "kv",
    [Kv(), Kv("sliding", 200, {"slack": 32}), Kv("h2o", 200, {"slack": 32})],
    ids=["full", "sliding", "h2o"],
)
def test_answers_are_those_without_guesses(sample_model: Path, kv: Kv) -> None:
    task = problem("speculation")
    with (
        Daemon(sample_model, "--threads=1", "--deterministic=true") as daemon,
        daemon.client() as client,
    ):

        def answer(speculation: Speculation | None, temperature: float) -> object:
            return client.generate_once(
                task.prompt,
                kv=kv,
                sampling=Sampling(temperature=temperature, seed=7),
                stop=Stop(max_output_tokens=400),
                output=OUTPUT,
                speculation=speculation,
            )

        accepted = 0
        for temperature in (0.0, 1.0):
            before = scrape(daemon.metrics)
            plain = answer(None, temperature)
            guessed = answer(Speculation(max_tokens=6), temperature)
            assert guessed.token_ids == plain.token_ids
            assert (guessed.text, guessed.logprobs) == (plain.text, plain.logprobs)
            assert guessed.evictions == plain.evictions
            held = replace(guessed.summary.kv, peak_bytes=plain.summary.kv.peak_bytes)
            assert held == plain.summary.kv
            assert plain.accepted.speculation == Speculation("off", 0)
            assert guessed.accepted.speculation == Speculation("ngram", 6)
            usage = guessed.summary.usage
            assert usage.accepted_tokens <= usage.guessed_tokens
            accepted += usage.accepted_tokens
            assert plain.summary.usage.guessed_tokens == 0
            # Each accepted guess has saved a step. First tokens are the prompts'.
            decoded = plain.summary.usage.output_tokens - 1 + usage.output_tokens - 1

            def moved(name: str, **labels: str) -> float:
                return (scrape(daemon.metrics) - before).value(name, **labels)

            # An answer's last message may be there before its step is counted.
            saved = decoded - usage.accepted_tokens
            eventually(lambda: moved("epikv_step_seconds_count", phase="decode") >= saved)
            assert moved("epikv_step_seconds_count", phase="decode") == saved
            series = "epikv_guessed_tokens_total"
            assert moved(series, result="accepted") == usage.accepted_tokens
            rejected = usage.guessed_tokens - usage.accepted_tokens
            assert moved(series, result="rejected") == rejected
        assert accepted > 0  # how many are guessed is by what steps take beside other work


def test_under_a_constraint_what_it_allows_is_guessed(sample_model: Path) -> None:
    prompt = problem("speculation").prompt
    with (
        Daemon(sample_model, "--threads=1", "--deterministic=true") as daemon,
        daemon.client() as client,
    ):

        def answer(speculation: Speculation | None) -> object:
            return client.generate_once(
                prompt,
                sampling=Sampling(regex=r"[a-z0-9 +*=;.?-]{80,200}"),
                stop=Stop(max_output_tokens=150),
                output=OUTPUT,
                speculation=speculation,
            )

        plain, guessed = answer(None), answer(Speculation())
        assert guessed.accepted.speculation == Speculation("ngram", 8)
        assert (guessed.token_ids, guessed.text) == (plain.token_ids, plain.text)
        assert guessed.logprobs == plain.logprobs
        usage = guessed.summary.usage
        assert 0 < usage.accepted_tokens <= usage.guessed_tokens


def test_where_nothing_can_be_guessed_accepted_says_so(sample_model: Path) -> None:
    with Daemon(sample_model, "--threads=1") as daemon, daemon.client() as client:
        result = client.generate_once(
            [40, 41, 42],
            kv=Kv(positions="cache"),
            stop=Stop(max_output_tokens=5),
            speculation=Speculation(),
        )
        assert result.accepted.speculation == Speculation("off", 0)
        result = client.generate_once(
            [40, 41, 42], stop=Stop(max_output_tokens=5), speculation=Speculation()
        )
        assert result.accepted.speculation == Speculation("ngram", 8)
        with pytest.raises(RpcError, match="must be from 0 to 15"):
            client.generate_once([40], speculation=Speculation(max_tokens=16))
        with pytest.raises(RpcError, match="without a source"):
            client.generate_once([40], speculation=Speculation("off", 3))
        with pytest.raises(ValueError, match="known: off, ngram, draft"):
            client.generate_once([40], speculation=Speculation("guess"))
        done = CliRunner().invoke(
            main, ["generate", "4 + 6", "--speculate", "4", "--server", daemon.grpc, "--json"]
        )
        assert done.exit_code == 0, done.output
        assert '"guessed_tokens"' in done.output

"""Prompts that begin like an earlier one: the next turn of a chat, through the real daemon."""

from pathlib import Path

from click.testing import CliRunner
from epikv import Delta, Kv, Output, Progress, Sampling, Stop, Summary
from epikv.cli import main
from epikv.sample import problem
from epikv.scrape import scrape
from epikv.testing import Daemon

FLAGS = ("--threads=1", "--deterministic=true", "--prefill_chunk_tokens=64")
BLOCK = 16  # of deterministic mode
HISTORY = problem(9).prompt


def _of_deltas(events: list, field: str) -> list:
    return [value for e in events if isinstance(e, Delta) for value in getattr(e, field)]


def test_the_next_turn_copies_the_history_and_says_what_the_whole_prompt_would(
    sample_model: Path,
) -> None:
    output = Output(token_ids=True, logprobs=True, kept=True, progress=True)
    sampling = Sampling(temperature=0.8, seed=3)
    stop = Stop(max_output_tokens=60, ignore_eos=True)
    with Daemon(sample_model, *FLAGS) as daemon, daemon.client() as client:
        history = client.tokenize(HISTORY + " " + problem(9).trace)[:150]
        client.generate_once(history, stop=stop)
        turn = [*history, *client.tokenize(problem(10).prompt)]
        hit = BLOCK * (len(history) // BLOCK)
        for kv in (Kv(), Kv("sliding", len(turn) + 30), Kv("epikv_flat", len(turn) + 30)):
            events = list(client.generate(turn, kv=kv, sampling=sampling, stop=stop, output=output))
            summary = events[-1]
            assert isinstance(summary, Summary) and summary.usage is not None
            assert summary.usage.prompt_tokens == len(turn)
            assert summary.usage.cached_prompt_tokens == hit
            progress = [event for event in events if isinstance(event, Progress)]
            assert {event.cached_prompt_tokens for event in progress} == {hit}
            assert min(event.prompt_tokens_done for event in progress) > hit

            bypass = Kv(kv.policy, kv.budget, bypass_prefix_cache=True)
            computed = list(
                client.generate(turn, kv=bypass, sampling=sampling, stop=stop, output=output)
            )
            assert computed[-1].usage.cached_prompt_tokens == 0
            assert computed[-1].kv == summary.kv
            for field in ("token_ids", "logprobs"):
                assert _of_deltas(computed, field) == _of_deltas(events, field)
            hit = BLOCK * ((len(turn) - 1) // BLOCK)  # its own prompt is known from now on

        page = scrape(daemon.metrics)
        queried = page.total("epikv_prefix_cache_queried_tokens_total")
        hits = page.total("epikv_prefix_cache_hit_tokens_total")
        assert queried == len(history) + 3 * len(turn)
        assert hits == BLOCK * (len(history) // BLOCK) + 2 * hit
        assert hits == sum(
            page.total("epikv_tokens_total", kind="prompt_cached", policy=policy)
            for policy in ("full", "sliding", "epikv_flat")
        )
        assert page.total("epikv_kv_bytes", state="cached_prefix") > 0
        assert page.total("epikv_kv_bytes", state="used") == 0


def test_salt_separates_and_flushing_forgets(sample_model: Path) -> None:
    with Daemon(sample_model, *FLAGS) as daemon, daemon.client() as client:

        def hit(**kv: str) -> int:
            result = client.generate_once(HISTORY, kv=Kv(**kv), stop=Stop(max_output_tokens=1))
            assert result.summary is not None and result.summary.usage is not None
            return result.summary.usage.cached_prompt_tokens

        assert hit() == 0
        known = hit()
        assert known > 0
        assert hit(cache_salt="a user's own") == 0
        assert hit(cache_salt="a user's own") == known
        flushed = CliRunner().invoke(
            main, ["admin", f"--server={daemon.admin}", "flush-prefix-cache"]
        )
        assert flushed.exit_code == 0, flushed.output
        assert hit() == 0
        assert scrape(daemon.metrics).total("epikv_kv_bytes", state="cached_prefix") > 0


def test_none_is_kept_where_the_share_is_zero(sample_model: Path) -> None:
    with (
        Daemon(sample_model, *FLAGS, "--prefix_cache_share=0") as daemon,
        daemon.client() as client,
    ):
        for _ in range(2):
            result = client.generate_once(HISTORY, stop=Stop(max_output_tokens=1))
            assert result.summary.usage.cached_prompt_tokens == 0
        assert scrape(daemon.metrics).total("epikv_kv_bytes", state="cached_prefix") == 0

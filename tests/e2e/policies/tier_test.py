"""The tier below the KV pool, on the real daemon: what it is for, and what its faults do."""

import math
import resource
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from epikv import Client, Delta, Kv, Output, RpcError, Stop, Summary
from epikv.sample import Problem, problem
from epikv.scrape import scrape
from epikv.testing import Daemon, DaemonError

TIER = 100_000_000
PROBLEMS = [problem(seed) for seed in range(8)]


@pytest.fixture(scope="module")
def daemon(sample_model: Path) -> Iterator[Daemon]:
    with Daemon(sample_model, "--threads=1", f"--kv_tier_bytes={TIER}") as running:
        yield running


def solved(client: Client, task: Problem, kv: Kv) -> tuple[bool, Summary]:
    result = client.generate_once(task.prompt, kv=kv, stop=Stop(999))
    assert result.summary is not None
    return all(task.correct(result.text)), result.summary


def test_what_was_dropped_is_attended_to(daemon: Daemon) -> None:
    """A window of 96 tokens solves nothing; with 160 more of the tier, as much as the whole cache."""
    with daemon.client() as client:
        full = sum(solved(client, task, Kv("full"))[0] for task in PROBLEMS)
        alone = Kv("streaming_llm", 96, protect_prompt=False)
        tiered = Kv("streaming_llm", 96, protect_prompt=False, tier_tokens=1000, tier_fetch=160)
        without = sum(solved(client, task, alone)[0] for task in PROBLEMS)
        outcomes = [solved(client, task, tiered) for task in PROBLEMS]
    with_tier = sum(right for right, _ in outcomes)
    assert full == len(PROBLEMS)
    assert without <= 1
    assert with_tier >= full - 1
    for _, summary in outcomes:
        assert summary.kv is not None
        assert summary.kv.demoted_entries == summary.kv.evicted_entries > 0
        assert summary.kv.fetched_entries > 0 and not summary.kv.tier_failed
        assert summary.kv.peak_tokens <= 96 + 1 + 256


def test_what_comes_back_is_told(daemon: Daemon) -> None:
    with daemon.client() as client:
        kv = Kv("h2o", 64, protect_prompt=False, tier_tokens=200, guard=16)
        task = PROBLEMS[0]
        result = client.generate_once(
            task.prompt, kv=kv, stop=Stop(200, min_output_tokens=200), output=Output(kv_trace=True)
        )
        accepted, summary = result.accepted, result.summary
        assert accepted is not None and accepted.kv is not None and accepted.kv.tier is not None
        assert accepted.kv.tier.tokens == 200 and accepted.kv.tier_bytes > 0
        assert accepted.kv.tier.guard is not None and accepted.kv.tier.guard.asked == 16
        assert summary is not None and summary.kv is not None
        recalled = sum(len(v.recalled) for e in result.evictions for v in e.victims)
        assert recalled == summary.kv.recalled_entries > 0


def test_a_server_without_a_tier_says_so(sample_model: Path) -> None:
    with Daemon(sample_model, "--threads=1") as daemon, daemon.client() as client:
        with pytest.raises(RpcError, match="this server has no tier") as caught:
            client.generate_once([5] * 40, kv=Kv("sliding", 32, tier_tokens=10), stop=Stop(1))
        assert caught.value.reason == "KV_TIER_TOO_SMALL"


def test_files_go_with_the_daemon_however_it_ends(sample_model: Path, tmp_path: Path) -> None:
    flags = ("--threads=1", f"--kv_tier_bytes={TIER}", f"--kv_tier_dir={tmp_path}")
    kv = Kv("sliding", 48, protect_prompt=False, tier_tokens=500, tier_fetch=32)
    killed = pytest.raises(DaemonError, match="status -9")
    with killed, Daemon(sample_model, *flags) as daemon, daemon.client() as client:
        stream = client.generate(PROBLEMS[0].prompt, kv=kv, stop=Stop(900, min_output_tokens=900))
        while not isinstance(next(stream), Delta):
            pass
        links = [entry.readlink() for entry in Path(f"/proc/{daemon.pid}/fd").iterdir()]
        assert any(str(link).startswith(str(tmp_path)) for link in links), "it lies there"
        assert not list(tmp_path.iterdir()), "without a name"
        daemon.kill()
    assert not list(tmp_path.iterdir())
    with Daemon(sample_model, *flags) as daemon, daemon.client() as client:
        result = client.generate_once(PROBLEMS[0].prompt, kv=kv, stop=Stop(100))
        assert result.summary is not None and result.summary.kv is not None
        assert not result.summary.kv.tier_failed
        assert scrape(daemon.metrics).total("epikv_tier_failures_total") == 0


def test_a_full_disk_is_an_eviction(sample_model: Path, tmp_path: Path) -> None:
    """No file may grow, as where a disk or a quota is full: the request goes on, and says so."""
    flags = ("--threads=1", f"--kv_tier_bytes={TIER}", f"--kv_tier_dir={tmp_path}")
    kv = Kv("sliding", 48, protect_prompt=False, tier_tokens=500, tier_fetch=32)
    task = PROBLEMS[0]
    with Daemon(sample_model, *flags) as daemon, daemon.client() as client:
        alone = client.generate_once(
            task.prompt, kv=Kv("sliding", 48, protect_prompt=False), stop=Stop(100)
        )
        everything = resource.RLIM_INFINITY
        resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE, (0, everything))
        result = client.generate_once(task.prompt, kv=kv, stop=Stop(100))
        assert result.summary.kv.tier_failed
        assert result.summary.kv.evicted_tokens > 0 == result.summary.kv.demoted_entries
        assert result.text == alone.text, "as if it had no tier"
        assert scrape(daemon.metrics).total("epikv_tier_failures_total") == 1
        resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE, (everything, everything))
        result = client.generate_once(task.prompt, kv=kv, stop=Stop(100))
        assert not result.summary.kv.tier_failed and result.summary.kv.fetched_entries > 0


def test_a_rounded_tier_takes_less_and_serves(daemon: Daemon) -> None:
    """With eight bits as many problems are solved as with all; four bits are a measurement."""
    taken = []
    with daemon.client() as client:
        for bits in (0, 8, 4):
            kv = Kv(
                "streaming_llm",
                96,
                protect_prompt=False,
                tier_tokens=1000,
                tier_fetch=160,
                tier_bits=bits,
            )
            accepted = client.generate_once(PROBLEMS[0].prompt, kv=kv, stop=Stop(1)).accepted
            taken.append(accepted.kv.tier_bytes)
            assert accepted.kv.tier.dtype == {0: "unspecified", 8: "int8", 4: "int4"}[bits]
            if bits != 4:
                right = sum(solved(client, task, kv)[0] for task in PROBLEMS)
                assert right >= len(PROBLEMS) - 1
    assert taken[0] > taken[1] > taken[2]


def test_a_folder_that_is_not_there_is_told_at_the_start(sample_model: Path) -> None:
    with pytest.raises(DaemonError, match="the tier: a file in /no/such/folder"):
        with Daemon(sample_model, f"--kv_tier_bytes={TIER}", "--kv_tier_dir=/no/such/folder"):
            pass


def test_in_doubt_a_step_looks_at_what_was_dropped(daemon: Daemon) -> None:
    """A quarter of the cache solves few problems; with another look at few steps, most."""
    doubting = {"tier_tokens": 1000, "tier_fetch": 1000, "tier_doubt": 0.001}
    with daemon.client() as client:
        kept = Kv("expected_attention", 160, {"slack": 15}, equal_protection=True)
        alone = [solved(client, task, kept) for task in PROBLEMS]
        tiered = [solved(client, task, replace(kept, **doubting)) for task in PROBLEMS]
    assert sum(right for right, _ in tiered) >= sum(right for right, _ in alone) + 2
    for _, summary in tiered:
        assert summary.kv is not None and summary.usage is not None
        assert 0 < summary.kv.doubted_steps < summary.usage.output_tokens / 4
        assert summary.kv.fetched_entries > 0


def test_doubt_that_cannot_be_is_refused(daemon: Daemon) -> None:
    with daemon.client() as client:
        for doubt in (-1.0, math.nan, math.inf):
            kv = Kv("sliding", 48, tier_tokens=100, tier_fetch=100, tier_doubt=doubt)
            with pytest.raises(
                RpcError, match="kv.tier.doubt: must be a finite number, at least 0"
            ):
                client.generate_once([5] * 40, kv=kv, stop=Stop(1))
        with pytest.raises(RpcError, match="kv.tier.fetch is 0"):
            client.generate_once([5] * 40, kv=Kv("sliding", 48, tier_doubt=1.0), stop=Stop(1))

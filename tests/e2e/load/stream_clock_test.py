"""Streams on a machine whose clock jumps."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from time import monotonic

import pytest
from clock_jumps import await_jump, faked_clock
from epikv import Client, Output, RpcError, Stop, Summary
from epikv.scrape import scrape
from epikv.testing import PACED, Daemon
from waiting import eventually

HOUR = timedelta(hours=1)
LONG = Stop(1200, ignore_eos=True)


@pytest.fixture
def jump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[timedelta], None]:
    return faked_clock(tmp_path, monkeypatch)


@pytest.mark.parametrize("by", [-HOUR, HOUR], ids=["back", "forward"])
def test_a_stream_goes_on_as_if_nothing_had_happened(
    sample_model: Path, tmp_path: Path, jump: Callable[[timedelta], None], by: timedelta
) -> None:
    """Its deltas wait for others no longer than they were to, and its deadline is where it was."""
    log = tmp_path / "access.log"
    flags = ("--threads=1", "--outbox_messages=2", f"--access_log={log}")
    with (
        Daemon(sample_model, *flags) as daemon,
        daemon.client() as client,
        Client(daemon.grpc, PACED) as paced,
    ):
        # More than lies on the way to a reader: it is not done before the jump.
        options = Output(token_ids=True, logprobs=True, top_logprobs=20, coalesce=0.05)
        with paced.generate("7", stop=LONG, output=options, timeout=120) as stream:
            messages = iter(stream)
            for _ in range(3):
                next(messages)
            begin = monotonic()
            jump(by)
            await_jump(client, log, by)
            held = monotonic() - begin
            rest = list(messages)
        assert isinstance(rest[-1], Summary)
        assert held < rest[-1].timings.decode < 120
        other = client.generate_once("7", stop=Stop(3, ignore_eos=True), timeout=30)
        assert other.summary.usage.output_tokens == 3
        page = scrape(daemon.metrics)
        # Of both requests together, no wait, run or step lasted as long.
        lasted = {
            name: page.total(name) for name, _ in page.values if name.endswith("_seconds_sum")
        }
        assert "gen_ai_server_request_duration_seconds_sum" in lasted
        assert {name: took for name, took in lasted.items() if not 0 <= took < 600} == {}


def test_who_reads_nothing_is_found_when_the_clock_goes_back(
    sample_model: Path, tmp_path: Path, jump: Callable[[timedelta], None]
) -> None:
    log = tmp_path / "access.log"
    flags = (
        "--threads=1",
        "--outbox_messages=2",
        "--stream_stall_seconds=4",  # twice that it is told
        f"--access_log={log}",
    )
    with (
        Daemon(sample_model, *flags) as daemon,
        daemon.client() as client,
        Client(daemon.grpc, PACED) as paced,
    ):
        with paced.generate(
            "7", stop=LONG, output=Output(token_ids=True, logprobs=True)
        ) as stalled:
            next(iter(stalled))
            jump(-HOUR)
            await_jump(client, log, -HOUR)

            def ended() -> float:
                return scrape(daemon.metrics).total(
                    "epikv_requests_finished_total", reason="slow_reader"
                )

            eventually(lambda: ended() == 1, 20)
            with pytest.raises(RpcError, match="read nothing"):
                for _ in stalled:
                    pass

"""Long conversations within a fixed budget, through the real daemon."""

from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic, sleep

import pytest
from epikv import Client, Kv, Output, RpcError, Sampling, Session, Stop
from epikv.sample import problem
from epikv.scrape import Page, scrape
from epikv.testing import Daemon

BUDGET = 96
FLAGS = ("--threads=1", "--prefill_chunk_tokens=32", "--session_bytes=100000000")
STOP = Stop(4, ignore_eos=True)


@pytest.fixture(scope="module")
def server(sample_model: Path) -> Iterator[Daemon]:
    with Daemon(sample_model, *FLAGS) as running:
        yield running


def talk(client: Client, tokens: int) -> list[int]:
    """A conversation of many problems, of so many tokens."""
    said: list[int] = []
    for seed in range(100):
        said += client.tokenize(f"{problem(seed).prompt} {problem(seed).trace}")
        if len(said) >= tokens:
            return said[:tokens]
    raise AssertionError("not enough problems")


def until(daemon: Daemon, condition: Callable[[Page], bool]) -> Page:
    deadline = monotonic() + 60
    while not condition(page := scrape(daemon.metrics)):
        assert monotonic() < deadline
        sleep(0.05)
    return page


def updated(daemon: Daemon, before: float) -> float:
    """Waits for one more update of episodes."""
    page = until(daemon, lambda page: page.total("epikv_session_updates_total") > before)
    return page.total("epikv_session_updates_total")


def test_a_conversation_goes_on_in_a_fixed_peak(server: Daemon) -> None:
    """Far beyond the budget, and beyond the model's context."""
    with server.client() as client:
        context = client.models()[0].context_length
        said = talk(client, context + 600)
        session = Session("one", BUDGET, episodes=3)
        updates = scrape(server.metrics).total("epikv_session_updates_total")
        turn = 300  # more than a request may read beyond the episodes
        for length in range(60, len(said), turn):
            result = client.generate_once(said[:length], session=session, stop=STOP)
            kv, usage = result.summary.kv, result.summary.usage
            assert usage.prompt_tokens == length
            # An episode, what has been said since, and the answer; and a block while it is read.
            assert kv.peak_tokens <= BUDGET + 64 + turn + 32 + 4, length
            if length > 2 * turn:
                assert usage.packet_prompt_tokens >= length - turn - 32, (
                    "it goes on from an episode"
                )
                assert kv.policy == "full", "what is read is kept"
            if length > turn:
                updates = updated(server, updates)
        page = scrape(server.metrics)
        assert page.total("epikv_sessions") == 1
        assert 0 < page.total("epikv_session_bytes") < 100_000_000
        assert page.total("epikv_session_requests_total", start="whole") == 1
        assert page.total("epikv_session_requests_total", start="anew") == 1
        assert page.total("epikv_session_requests_total", start="episode") >= 5


def test_much_that_is_new_is_read_within_the_peak(server: Daemon) -> None:
    with server.client() as client:
        said = talk(client, 1100)
        before = scrape(server.metrics).total("epikv_session_updates_total")
        session = Session("leaps", BUDGET)
        client.generate_once(said[:400], session=session, stop=STOP)
        first = updated(server, before)
        result = client.generate_once(said, session=session, stop=STOP)
        updated(server, first)
        assert result.summary.usage.packet_prompt_tokens > 350, "it goes on from an episode"
        assert result.summary.kv.policy == "epicache"
        assert result.summary.kv.peak_tokens <= BUDGET + 32 + 64 + 32


def test_what_is_forgotten_is_read_anew(server: Daemon) -> None:
    with server.client() as client:
        said = talk(client, 600)
        before = scrape(server.metrics).total("epikv_session_updates_total")
        client.generate_once(said[:500], session=Session("two", BUDGET), stop=STOP)
        updated(server, before)
        result = client.generate_once(said[:520], session=Session("two", BUDGET), stop=STOP)
        assert result.summary.usage.packet_prompt_tokens > 0
        # Another beginning, another budget, another name: nothing is known.
        for prompt, session in (
            ([5, *said[:500]], Session("two", BUDGET)),
            (said[:520], Session("two", BUDGET + 1)),
            (said[:520], Session("three", BUDGET)),
        ):
            result = client.generate_once(prompt, session=session, stop=STOP)
            assert result.summary.usage.packet_prompt_tokens == 0
            assert result.summary.kv.policy == "epicache"
            assert result.summary.kv.evicted_tokens > 0


def test_a_long_forgotten_session_leaves_nothing(sample_model: Path) -> None:
    with Daemon(sample_model, *FLAGS, "--session_ttl_seconds=1") as daemon:
        with daemon.client() as client:
            said = talk(client, 500)
            client.generate_once(said, session=Session("one", BUDGET), stop=STOP)
            updated(daemon, 0)
            sleep(1.1)
            result = client.generate_once([*said, 5, 6], session=Session("one", BUDGET), stop=STOP)
            assert result.summary.kv.policy == "epicache"


def test_the_one_used_last_stays(sample_model: Path) -> None:
    with Daemon(sample_model, *FLAGS) as daemon, daemon.client() as client:
        said = talk(client, 500)
        client.generate_once(said, session=Session("one", BUDGET), stop=STOP)
        updated(daemon, 0)
        size = scrape(daemon.metrics).total("epikv_session_bytes")
    flags = (*FLAGS[:-1], f"--session_bytes={int(1.5 * size)}")
    with Daemon(sample_model, *flags) as daemon, daemon.client() as client:
        for count, name in enumerate(("one", "two")):
            client.generate_once(said, session=Session(name, BUDGET), stop=STOP)
            updated(daemon, count)
        page = scrape(daemon.metrics)
        assert page.total("epikv_sessions") == 1
        assert page.total("epikv_session_bytes") <= 1.5 * size
        for name, known in (("two", True), ("one", False)):
            result = client.generate_once([*said, 5], session=Session(name, BUDGET), stop=STOP)
            assert (result.summary.usage.packet_prompt_tokens > 0) is known


def test_refusals(server: Daemon, sample_model: Path) -> None:
    with server.client() as client:
        for session, more, message in (
            (Session("", BUDGET), {}, "session.id: must have 1 to 128 bytes"),
            (Session("a", 63), {}, "must be at least 64, is 63"),
            (Session("a", BUDGET, 17), {}, "must be at most 16"),
            (Session("a", 10**8), {}, "more than this server can keep"),
            (Session("a", BUDGET), {"kv": Kv("sliding", 80)}, "kv: a session chooses policy"),
            (Session("a", BUDGET), {"packets": ["sha256:" + 64 * "0"]}, "keeps no packets"),
            (
                Session("a", BUDGET),
                {"sampling": Sampling(temperature=1, n=2)},
                "sampling.n: must be 1",
            ),
        ):
            with pytest.raises(RpcError, match=message):
                client.generate_once("1 2 3", session=session, **more)
        # Of a prompt that is at fault, that is said.
        with pytest.raises(RpcError, match="outside the vocabulary"):
            client.generate_once([10**6], session=Session("a", BUDGET))
    with Daemon(sample_model, "--threads=1") as daemon, daemon.client() as client:
        with pytest.raises(RpcError, match="keeps no sessions") as caught:
            client.generate_once("1", session=Session("a", BUDGET))
        assert caught.value.reason == "SESSIONS_OFF"


def test_a_stream_of_a_session_says_what_its_cache_gives(server: Daemon) -> None:
    """Within the budget a session changes nothing."""
    with server.client() as client:
        said = talk(client, BUDGET - 10)
        plain = client.generate_once(said, stop=STOP, output=Output(logprobs=True))
        of_session = client.generate_once(
            said, session=Session("four", BUDGET), stop=STOP, output=Output(logprobs=True)
        )
        assert of_session.text == plain.text and of_session.logprobs == plain.logprobs

"""Long conversations within a fixed budget, through the real daemon."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import monotonic, sleep

import pytest
from admin_calls import admin_of
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
    page = until(
        daemon, lambda page: page.total("epikv_session_updates_total", result="done") > before
    )
    return page.total("epikv_session_updates_total", result="done")


def test_a_conversation_goes_on_in_a_fixed_peak(server: Daemon) -> None:
    """Far beyond the budget, and beyond the model's context."""
    with server.client() as client:
        context = client.models()[0].context_length
        said = talk(client, context + 600)
        session = Session("one", BUDGET, episodes=3)
        updates = scrape(server.metrics).total("epikv_session_updates_total", result="done")
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
        before = scrape(server.metrics).total("epikv_session_updates_total", result="done")
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
        before = scrape(server.metrics).total("epikv_session_updates_total", result="done")
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


def test_many_talk_at_once(server: Daemon) -> None:
    """Two of them in one session, about different things: each gets what his prompt says."""
    before = scrape(server.metrics)
    with server.client() as client:
        said = talk(client, 1200)
        talks = {"one": said, "two": said[::-1], "three": said}

        def ask(session: str, prompt: list[int]) -> None:
            for length in range(200, 1100, 150):
                result = client.generate_once(
                    prompt[:length], session=Session(session, BUDGET, episodes=2), stop=STOP
                )
                usage = result.summary.usage
                assert (usage.prompt_tokens, usage.output_tokens) == (length, 4)
                assert result.summary.kv.peak_tokens <= BUDGET + 64 + 512 + 32 + 4

        with ThreadPoolExecutor() as pool:
            asked = [pool.submit(ask, *of) for of in talks.items()]
            asked.append(pool.submit(ask, "one", said[::-1]))
            for each in asked:
                each.result()
    page = until(server, lambda page: page.total("epikv_requests_running") == 0)
    assert page.total("epikv_sessions") <= before.total("epikv_sessions") + 3
    failed = "epikv_session_updates_total"
    assert page.total(failed, result="failed") == before.total(failed, result="failed")


def test_the_room_of_one_is_never_exceeded(sample_model: Path) -> None:
    """There is none for old episodes and new ones: the conversation is read anew for each."""
    with Daemon(sample_model, *FLAGS) as daemon, daemon.client() as client:
        said = talk(client, 900)
        client.generate_once(said[:500], session=Session("one", BUDGET), stop=STOP)
        updated(daemon, 0)
        size = scrape(daemon.metrics).total("epikv_session_bytes")
    flags = (*FLAGS[:-1], f"--session_bytes={int(1.5 * size)}")
    with Daemon(sample_model, *flags) as daemon, daemon.client() as client:
        for count, length in enumerate((500, 800)):
            client.generate_once(said[:length], session=Session("one", BUDGET), stop=STOP)
            updated(daemon, count)
        result = client.generate_once(said[:820], session=Session("one", BUDGET), stop=STOP)
        assert result.summary.usage.packet_prompt_tokens >= 768
        prompts = scrape(daemon.metrics).total("epikv_packet_prompt_tokens_total")
        assert prompts <= 2 * 800, "two requests went on from episodes, and no update did"


def test_episodes_that_cannot_be_made_are_told(sample_model: Path) -> None:
    """They hold the conversation's tokens too: it has outgrown the server's room."""
    with Daemon(sample_model, *FLAGS) as daemon, daemon.client() as client:
        [model] = client.models()
        said = talk(client, 1100)
    row = model.kv_bytes_per_token + 8 * model.layers * model.kv_heads
    room = 16 * (BUDGET * row + 4 * BUDGET + 4 * model.hidden_size) + 4 * BUDGET
    with Daemon(sample_model, *FLAGS[:-1], f"--session_bytes={room}") as daemon:
        with daemon.client() as client:
            session = Session("one", BUDGET, episodes=16)
            result = client.generate_once(said, session=session, stop=STOP)
            assert result.summary.kv.policy == "epicache"
            until(
                daemon,
                lambda page: page.total("epikv_session_updates_total", result="failed") == 1,
            )
            assert "episodes of a session were not made: they may take" in daemon.log
            with pytest.raises(RpcError, match="more than this server can keep"):
                client.generate_once(said, session=Session("one", BUDGET + 1, 16), stop=STOP)


def test_a_model_that_is_replaced_takes_its_sessions_along(sample_model: Path) -> None:
    """While their episodes are made, and afterwards."""
    with Daemon(sample_model, *FLAGS) as daemon, daemon.client() as client:
        said = talk(client, 1200)
        swap = ("load-model", str(sample_model), "--name=sample", "--kv-pool-bytes=67108864")
        client.generate_once(said[:600], session=Session("one", BUDGET), stop=STOP)
        updated(daemon, 0)
        admin_of(daemon)(*swap, "--replace")
        again = client.generate_once(said[:620], session=Session("one", BUDGET), stop=STOP)
        assert again.summary.kv.policy == "epicache", "another model has other K and V"
        for name in ("two", "three", "four"):
            client.generate_once(said, session=Session(name, BUDGET, episodes=16), stop=STOP)
        admin_of(daemon)(*swap, "--replace")
        result = client.generate_once(said[:600], session=Session("one", BUDGET), stop=STOP)
        assert result.summary.kv.policy == "epicache"
        statuses = client.generate_once("1 2 3", stop=STOP)
        assert statuses.text is not None
    assert daemon.stop() == 0


def test_a_stop_does_not_wait_for_episodes(sample_model: Path) -> None:
    with Daemon(sample_model, *FLAGS, "--drain_seconds=60") as daemon:
        with daemon.client() as client:
            said = talk(client, 1200)
            for name in ("one", "two", "three", "four"):
                client.generate_once(said, session=Session(name, BUDGET, episodes=16), stop=STOP)
            began = monotonic()
        assert daemon.stop() == 0
        assert monotonic() - began < 20, "sixteen readings of four conversations take longer"


def test_refusals(server: Daemon, sample_model: Path) -> None:
    with server.client() as client:
        for session, more, message in (
            (Session("", BUDGET), {}, "session.id: must have 1 to 128 bytes"),
            (Session("a", 63), {}, "must be at least 64, is 63"),
            (Session("a", BUDGET, 17), {}, "must be at most 16"),
            (Session("a", 10**8), {}, "more than this server can keep"),
            *(
                (Session("a", BUDGET), {"kv": kv}, "kv: a session chooses all but")
                for kv in (
                    Kv("sliding", 80),
                    Kv(positions="compact"),
                    Kv(params={"window": 8}),
                    Kv(protect_prompt=True),
                    Kv(tier_tokens=64),
                )
            ),
            (
                Session("a", BUDGET),
                {"output": Output(prompt_logprobs=True)},
                "output.prompt_logprobs: cannot be set together with a session",
            ),
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

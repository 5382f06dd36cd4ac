"""A workload is read from a file, options or an access log, and what is wrong with it is told."""

import json
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from epikv.plan.costs import TICKS, Settings
from epikv.plan.replica import FULL, Arm
from epikv.plan.workload import build, read, read_log

SETTINGS = Settings(10**6, 4096, 100)


def test_arrivals_and_lengths_are_as_they_are_asked_for() -> None:
    workload = build({"rate": 5, "prompt": "10", "output": "uniform:3:5", "max_output": 9}, None)
    calls = list(islice(workload.calls(SETTINGS), 4000))
    assert calls[-1].at / TICKS == pytest.approx(4000 / 5, rel=0.05)
    assert {call.prompt for call in calls} == {10}
    assert {call.output for call in calls} == {3, 4, 5}
    assert {call.most for call in calls} == {9}
    assert calls == list(islice(workload.calls(SETTINGS), 4000))


def test_arms_have_their_shares_of_the_requests() -> None:
    workload = build({"rate": 1, "arms": ["full", "sliding:64:3"]}, None)
    assert list(workload.arms) == [FULL, Arm("sliding", 64)]
    counts = Counter(call.arm for call in islice(workload.calls(SETTINGS), 4000))
    assert counts[1] / 4000 == pytest.approx(0.75, abs=0.03)


def test_each_turn_begins_with_all_that_was_said() -> None:
    talks = {"turns": 3, "seconds": 10.0}
    workload = build({"rate": 6, "prompt": "20", "output": "5", "conversations": talks}, None)
    calls = list(islice(workload.calls(SETTINGS), 3000))
    assert calls == sorted(calls, key=lambda call: call.at)
    assert calls[-1].at / TICKS == pytest.approx(3000 / 6, rel=0.1)
    by_talk: dict[int, list[int]] = {}
    for call in calls:
        by_talk.setdefault(call.talk, []).append(call.prompt)
    assert [20, 45, 70] in by_talk.values()
    # Those under way as it began are in their later turns.
    assert all(prompts == sorted(prompts) for prompts in by_talk.values())


def test_a_conversation_ends_where_the_context_does() -> None:
    talks = {"turns": 50, "seconds": 1.0}
    workload = build({"rate": 50, "prompt": "500", "output": "100", "conversations": talks}, None)
    prompts = {call.prompt for call in islice(workload.calls(SETTINGS), 2000)}
    assert max(prompts) == 500 + 5 * 600


def test_shared_beginnings_are_asked_for_by_rank() -> None:
    shared = {"count": 3, "tokens": 100, "skew": 1}
    workload = build({"rate": 1, "prompt": "20", "prefixes": shared}, None)
    calls = list(islice(workload.calls(SETTINGS), 6000))
    assert {(call.prompt, call.shared) for call in calls} == {(120, 100)}
    counts = Counter(call.group for call in calls)
    shares = [counts[group] / 6000 for group in range(3)]
    assert shares == pytest.approx([6 / 11, 3 / 11, 2 / 11], abs=0.03)


def test_half_budgets() -> None:
    arms = ["full", "h2o:100", "h2o:0.4"]
    halves = build({"rate": 1, "arms": arms}, None).with_half_budgets("sliding").arms
    assert list(halves) == [Arm("sliding", 0.5), Arm("h2o", 50), Arm("h2o", 0.2)]


def test_a_file_is_toml_or_json(tmp_path: Path) -> None:
    toml, as_json = tmp_path / "w.toml", tmp_path / "w.json"
    toml.write_text('rate = 2.5\nprompt = "64"\n[prefixes]\ncount = 2\ntokens = 10\n')
    as_json.write_text(json.dumps(read(toml)))
    assert read(as_json) == read(toml)
    assert build(read(toml), None).prefixes == build(read(as_json), None).prefixes


def entry(**more: Any) -> str:
    told = {
        "time": "2026-11-28T07:00:00.123456789Z",
        "code": "OK",
        "policy": "full",
        "prompt_tokens": 30,
        "output_tokens": 7,
        "budget_tokens": 37,
    }
    return json.dumps({**told, **more}) + "\n"


def test_an_access_log_is_a_workload(tmp_path: Path) -> None:
    log = tmp_path / "access.log"
    log.write_text(
        entry()
        + entry(code="CANCELLED")
        + "no json\n"
        + '{"code": "OK"}\n'
        + entry(time="2026-11-28T07:00:10Z", policy="h2o", budget_tokens=16, prompt_tokens=50)
    )
    recorded, arms = read_log(log)
    assert arms == [FULL, Arm("h2o", 16)]
    assert list(recorded.requests) == [(30, 7, 0), (50, 7, 1)]
    workload = build({}, (recorded, arms))
    assert workload.rate == pytest.approx(1 / 9.876543, rel=1e-4)
    drawn = {(call.prompt, call.arm) for call in islice(workload.calls(SETTINGS), 100)}
    assert drawn == {(30, 0), (50, 1)}


def test_a_log_without_answers_says_so(tmp_path: Path) -> None:
    log = tmp_path / "access.log"
    log.write_text(entry(code="CANCELLED") + "damaged\n")
    with pytest.raises(ValueError, match="no request that ended well: 1 no answer, 1 damaged"):
        read_log(log)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, "no rate"),
        ({"rate": 0}, "rate is 0, not a number above 0"),
        ({"rate": "many"}, "rate is 'many'"),
        ({"rate": 1, "deadline": -1}, "deadline is -1"),
        ({"rate": 1, "prompt": "uniform:9:3"}, "no distribution of lengths"),
        ({"rate": 1, "output": "8", "max_output": 4}, "less than the longest output, 8"),
        ({"rate": 1, "arms": ["h2o:many"]}, "'many' is not"),
        ({"rate": 1, "arms": "full"}, "arms is 'full', not a list"),
        ({"rate": 1, "seed": "x"}, "seed is 'x'"),
        ({"rate": 1, "prefixes": {"count": 0, "tokens": 5}}, "count is 0"),
        ({"rate": 1, "prefixes": {"count": 2}}, r"\[prefixes\].*tokens"),
        ({"rate": 1, "conversations": {"turns": 1.5, "seconds": 1}}, "turns is 1.5"),
    ],
)
def test_what_is_wrong_is_told(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        build(given, None)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("rate 2", "neither TOML nor JSON"),
        ("rates = 2", "there is no rates; known: arms, conversations"),
    ],
)
def test_a_wrong_file_is_told(text: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "w.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=told):
        read(path)

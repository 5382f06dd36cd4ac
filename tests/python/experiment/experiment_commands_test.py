"""`epikv experiment` as it is typed."""

import json
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from math import inf
from pathlib import Path

import fake_epikvd
import grpc
import pytest
from click.testing import Result
from dealt_experiment import SOUND, UNITS, dealt, written
from epikv import Client, Outcome, Patience
from epikv.experiment import definition
from epikv.experiment.assignment import arm_of


def words(result: Result) -> str:
    return " ".join(result.stdout.split())


def test_an_experiment_from_its_template_to_its_end(
    ask: Callable[..., Result], tmp_path: Path
) -> None:
    file = tmp_path / "lean-2.textproto"
    hint = ask("init", file).stderr
    assert f"epikv experiment create {file} --validate-only" in hint
    assert ask("create", file, "--validate-only").stdout == "lean-2: sound\n"
    assert "lean-2" not in ask("list").stdout
    assert ask("create", file).stdout == "lean-2: a draft\n"
    assert "lean-2 │ draft │ 10% │ default │ full 50%, half 50% │ right" in words(ask("list"))
    started = "10% of layer default, its buckets 0 to 999"
    assert ask("start", "lean-2").stdout == f"lean-2: {started}\n"
    assert ask("stop", "lean-2", "--reason", "enough").stdout == "lean-2: stopped\n"
    told = words(ask("show", "lean-2"))
    assert told.startswith("lean-2: stopped With half the cache")
    assert "half │ 50% │ policy sliding, keep_ratio 0.5" in told
    assert "full (control) │ 50% │ the request as it came" in told
    assert "right │ proportion │ higher" in told and "guardrails failed by 0.01" in told
    assert f"traffic {started}" in told and "2031-05-02 12:00:00 UTC, enough" in told


def test_show_tells_of_all_that_is_set(
    ask: Callable[..., Result], client: Client, lean: Path
) -> None:
    sound = definition.read(lean)
    sound.salt, sound.hypothesis = "grain", "half\x1b[2J is \u202eenough"
    sound.eligibility.model = "llama"
    sound.eligibility.min_prompt_tokens = 256
    sound.eligibility.labels["tier"] = "free"
    client.create_experiment(sound)
    told = words(ask("show", "lean-1"))
    assert "model llama, prompts of 256 tokens or more, tier=free" in told
    assert "half\\u001b[2J is \\u202eenough" in told
    assert "version 1, salt grain" in told and "outcomes taken for 1:00:00" in told
    assert 'policy_params {"slack": 16}' in told
    assert "traffic 10% of layer default takes part" in told


def test_json_of_an_experiment_is_its_definition(
    ask: Callable[..., Result], fake: fake_epikvd.Fake, lean: Path, tmp_path: Path
) -> None:
    made = ask("create", lean, "--json").stdout
    assert made == ask("show", "lean-1", "--json").stdout == ask("list", "--json").stdout
    again = definition.read(written(tmp_path / "again.json", made))
    assert again == fake.experiments.definitions["lean-1"]
    assert ask("start", "lean-1", "--json").exit_code == 0
    assert json.loads(ask("stop", "lean-1", "--json").stdout)["state"] == "STATE_STOPPED"


def test_an_update_is_of_what_was_read(
    ask: Callable[..., Result], running: fake_epikvd.Fake, lean: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.textproto"
    ask("show", "lean-1", "-o", out)
    lean.write_text(SOUND.replace("100", "150", 1))
    assert ask("update", lean).stdout == "lean-1: updated; buckets of version 1\n"
    assert running.experiments.definitions["lean-1"].traffic_permille == 150
    stale = ask("update", out)
    assert stale.exit_code == 1 and "ABORTED (ETAG)" in stale.stderr
    moved = written(tmp_path / "m.textproto", SOUND.replace("500", "400", 1).replace("500", "600"))
    assert "REBUCKET" in ask("update", moved).stderr
    assert ask("update", moved, "--validate-only", "--allow-rebucket").stdout == "lean-1: sound\n"
    assert running.experiments.definitions["lean-1"].arms[0].weight_permille == 500
    assert ask("update", moved, "--allow-rebucket").exit_code == 0
    assert running.experiments.definitions["lean-1"].arms[0].weight_permille == 400


def test_failures_of_files_and_names_are_one_message(
    ask: Callable[..., Result], lean: Path, tmp_path: Path
) -> None:
    bad = written(tmp_path / "bad.textproto", 'name: "a"\ntrafic: 3')
    result = ask("create", bad)
    assert result.exit_code == 1 and f'{bad}:2: Message type "epikv.v1.Exp' in result.stderr
    heavy = written(tmp_path / "heavy.textproto", SOUND.replace("500", "700", 1))
    result = ask("create", heavy, "--validate-only")
    assert "experiment.arms: weights must sum to 1000, are 1200" in result.stderr
    assert "NOT_FOUND" in ask("show", "lean-9").stderr
    assert "NOT_FOUND" in ask("update", lean).stderr
    again = ask("init", lean)
    assert again.exit_code == 1 and "exists" in again.stderr and lean.read_text() == SOUND
    assert "must be a lower-case letter" in ask("init", tmp_path / "A b.textproto").stderr
    assert ask("init", tmp_path / "x.json").exit_code == 2


def test_an_outcome_by_hand(ask: Callable[..., Result], running: fake_epikvd.Fake) -> None:
    assert ask("outcome", "r-1", "right", 1).stdout == "recorded\n"
    assert ask("outcome", "r-1", "right", 1).stdout == "it had been recorded before\n"
    more = ("--key", "k", "--tenant", "ann", "--time", "2031-05-01T14:00:00+02:00")
    running.experiments.is_store_away = True
    assert "when the store is back" in ask("outcome", "r-1", "right", "-0.5", *more).stdout
    assert running.experiments.outcomes["ann", "r-1", "right", "k"] == -0.5
    assert running.requests[-1].time.ToJsonString() == "2031-05-01T12:00:00Z"
    told = json.loads(ask("outcome", "r-1", "right", 1, "--json").stdout)
    assert told == {"event": "recorded", "duplicate": True, "spooled": True}
    assert ask("outcome", "r-1", "right", 0).exit_code == 1
    assert ask("outcome", "r-1", "right", 1, "--time", "2031-05-01").exit_code == 2
    assert ask("outcome", "r-1", "right", "yes").exit_code == 2


def as_lines(*outcomes: object) -> str:
    return "\n".join(json.dumps(outcome) for outcome in outcomes)


def an_outcome(i: int, **more: object) -> dict[str, object]:
    return {"request_id": "r-1", "metric": "right", "value": i % 2, "key": f"k-{i}", **more}


def test_outcomes_of_a_file_go_again_without_harm(
    ask: Callable[..., Result], running: fake_epikvd.Fake, tmp_path: Path
) -> None:
    lines = [an_outcome(i, time="2031-05-01T12:00:00Z", tenant="ann") for i in range(1500)]
    file = written(tmp_path / "o.jsonl", as_lines(*lines[:1200]))
    assert ask("outcomes", file).stdout == "1200 recorded\n"
    file.write_text(as_lines(*lines))
    again = ask("outcomes", "-", input=file.read_text())
    assert again.exit_code == 0 and again.stdout == "1500 recorded, 1200 of them before\n"
    assert running.experiments.batches == [1000, 200, 1000, 500]
    assert len(running.experiments.outcomes) == 1500


def test_outcomes_that_are_refused_are_told_by_line_and_reason(
    ask: Callable[..., Result], running: fake_epikvd.Fake, slept: list[float], tmp_path: Path
) -> None:
    late = [an_outcome(i, request_id="r-9") for i in range(7)]
    text = as_lines(an_outcome(1), an_outcome(2, metric="wrong"), *late, an_outcome(3, value=True))
    file = written(tmp_path / "o.jsonl", f"{text}\n\nno json\n")
    result = ask("outcomes", file)
    assert result.exit_code == 1
    assert result.stdout.startswith("2 recorded\n")
    told = words(result)
    assert "7 │ NOT_FOUND │ 3, 4, 5, 6, 7, ... │ 'r-9' took part in" in told
    assert "1 │ INVALID_ARGUMENT (METRIC) │ 2 │ unknown metric" in told
    assert "1 │ INVALID_ARGUMENT (LINE) │ 12 │" in told
    assert sum(slept) == pytest.approx(Patience.unknown, abs=1)
    events = [json.loads(line) for line in ask("outcomes", file, "--json").stdout.splitlines()]
    assert [event["line"] for event in events[:-1]] == [2, *range(3, 10), 12]
    assert events[0]["reason"] == "METRIC" and events[1]["code"] == "NOT_FOUND"
    summary = {"recorded": 2, "duplicates": 2, "spooled": 0, "refused": 9}
    assert events[-1] == {"event": "summary", **summary}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("[1]", "an outcome is a JSON object"),
        ('{"request_id": "r", "metric": "right"}', "value is missing"),
        ('{"request_id": "r", "metric": "right", "value": "1"}', "value must be a number"),
        ('{"request_id": 7, "metric": "right", "value": 1}', "request_id must be a string"),
        ('{"request_id": "r", "metric": "right", "value": 1, "when": 2}', "unknown field 'when'"),
        ('{"request_id": "r", "metric": "m", "value": 1, "time": "2031-05-01"}', "has no zone"),
        ('{"request_id": "r", "metric": "m", "value": 1, "time": "noon"}', "noon"),
        ('{"request_id": "\\ud800", "metric": "m", "value": 1}', "surrogates"),
    ],
)
def test_a_line_that_is_no_outcome_says_why(line: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Outcome.from_json(line)


def test_numbers_beyond_a_double_are_the_servers_to_refuse() -> None:
    text = json.dumps({"request_id": "r", "metric": "m", "value": 10**400})
    assert Outcome.from_json(text).value == inf


def test_an_interruption_says_how_far_it_came(
    ask: Callable[..., Result], running: fake_epikvd.Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_after_one(client: Client, outcomes: list[Outcome], **more: object) -> object:
        monkeypatch.undo()
        results = client.record_outcomes(outcomes)
        running.experiments.refusals = [(grpc.StatusCode.PERMISSION_DENIED, None)]
        return results

    monkeypatch.setattr(Client, "record_outcomes", fail_after_one)
    result = ask("outcomes", "-", input=as_lines(*map(an_outcome, range(1001))))
    assert result.exit_code == 1 and result.stdout == "1000 recorded\n"
    assert "PERMISSION_DENIED" in result.stderr and "stays" in result.stderr


def test_assign_needs_no_server_where_it_has_a_file(
    ask: Callable[..., Result], fake: fake_epikvd.Fake, client: Client, tmp_path: Path
) -> None:
    sound = dealt("e", 300, 700)
    definition.write(sound, tmp_path / "e.json")
    arms = {unit: arm_of(sound, unit) for unit in UNITS[:6]}
    result = ask("assign", tmp_path / "e.json", *arms, "--json", "--server", "127.0.0.1:1")
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert lines == [{"unit": unit, "arm": arm} for unit, arm in arms.items()]
    assert result.stderr == ""
    client.create_experiment(sound)
    counts = Counter(arms.values())
    told = words(ask("assign", "e", *arms))
    assert all(f"│ {unit} │ {arm} │" in told for unit, arm in arms.items())
    assert told.endswith(f"arm-0 {counts['arm-0']}, arm-1 {counts['arm-1']}, none 0")


def test_assign_deals_by_any_version(ask: Callable[..., Result], tmp_path: Path) -> None:
    definition.write(dealt(bucket_version=0), tmp_path / "e.json")
    units = written(tmp_path / "units", "\n".join(UNITS[:50]) + "\r\n\n")
    for words_, version in ((), 1), (("--version", 2), 2):
        result = ask("assign", tmp_path / "e.json", "--units", units, "--json", *words_)
        arms = [json.loads(line)["arm"] for line in result.stdout.splitlines()]
        assert arms == [arm_of(dealt(bucket_version=version), unit) for unit in UNITS[:50]]


SWITCHBACK = """name: "sw" traffic_permille: 1000 bucket_version: 1
arms { name: "full" weight_permille: 500 control: true }
arms { name: "lean" weight_permille: 500 }
switchback { window { seconds: 60 } wash_out { seconds: 6 } }
"""


def test_assign_deals_windows_by_time(ask: Callable[..., Result], tmp_path: Path) -> None:
    file = written(tmp_path / "sw.textproto", SWITCHBACK)
    sound = definition.read(file)
    arms = [arm_of(sound, f"window/{30_000_000 + n}") for n in range(8)]
    assert {*arms} == {"full", "lean"}
    times = [f"2027-01-15T{12 + n // 60}:{n % 60:02}:59.999999+04:00" for n in range(8)]
    result = ask("assign", file, *times, "--json", "--server", "127.0.0.1:1")
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [row["arm"] for row in rows] == arms
    assert rows[1] == {
        "window": 30_000_001,
        "begin": "2027-01-15T08:01:00Z",
        "analysed_from": "2027-01-15T08:01:06Z",
        "end": "2027-01-15T08:02:00Z",
        "arm": arms[1],
    }
    assert "│ 30000000 │ 2027-01-15T08:00:00Z │" in words(ask("assign", file, times[0]))
    refused = ask("assign", file, "2027-01-15T12:00")
    assert refused.exit_code == 2 and "has no zone" in refused.stderr


def test_assign_tells_the_windows_from_now_on(ask: Callable[..., Result], tmp_path: Path) -> None:
    text = SWITCHBACK.replace(" wash_out { seconds: 6 }", "")
    file = written(tmp_path / "sw.textproto", text)
    before = datetime.now(UTC)
    rows = [json.loads(line) for line in ask("assign", file, "--json").stdout.splitlines()]
    assert len(rows) == 10
    begins = [datetime.fromisoformat(row["begin"]) for row in rows]
    assert begins[0] <= datetime.now(UTC) and before < begins[1]
    assert {b - a for a, b in pairwise(begins)} == {timedelta(seconds=60)}
    washed_out = datetime.fromisoformat(rows[0]["analysed_from"]) - begins[0]
    assert washed_out == timedelta(seconds=6)  # a tenth


def test_assign_says_where_a_slice_is_not_known(
    ask: Callable[..., Result], client: Client, lean: Path, tmp_path: Path
) -> None:
    result = ask("assign", lean, "ann")
    assert result.exit_code == 0 and "as if that began at bucket 0" in result.stderr
    client.create_experiment(definition.read(lean))
    assert "not started, as far as lean-1 says" in ask("assign", "lean-1", "ann").stderr
    client.start_experiment("lean-1")
    assert ask("assign", "lean-1", "ann").stderr == ""
    assert ask("assign", "lean-1").exit_code == 2
    absent = ask("assign", tmp_path / "absent.json", "ann")
    assert absent.exit_code == 1 and "absent.json" in absent.stderr
    assert "NOT_FOUND" in ask("assign", "lean-9", "ann").stderr

"""The fewest replicas are found, costs are fitted, and what no fleet can serve is said."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from epikv.plan.capacity import Planner, Unfit, check, check_deadline
from epikv.plan.costs import Costs, Policy, Settings
from epikv.plan.replica import FULL, Arm, Call, Model
from epikv.plan.workload import Workload, build

COSTS = Costs(
    Settings(kv_capacity_tokens=2000, context_length=1000, vocabulary=100, max_running_requests=8),
    base=((0, 0.02), (8, 0.04)),
    prefill=1e-4,
    attended=2e-6,
    before_first=0.01,
    before_end=0.01,
    policies={"sliding": Policy("by_chunk"), "epikv_flat": Policy("refuses")},
)


def workload(**more: Any) -> Workload:
    given = {"rate": 20, "prompt": "uniform:50:200", "output": "20", "deadline": 2.0, **more}
    return build(given, None)


def test_one_replica_fewer_misses_the_deadline() -> None:
    planner = Planner(COSTS, 0.99)
    found = planner.needed(workload(), "least-connections")
    assert found.replicas > 1 and found.late <= 0.01
    fewer = planner.run(workload(), "least-connections", found.replicas - 1)
    assert fewer.late > 0.01


def test_twice_the_rate_needs_about_twice_the_replicas_and_costs_the_same() -> None:
    planner = Planner(COSTS, 0.99)
    once, twice = (planner.needed(workload(rate=rate), "least-connections") for rate in (40, 80))
    assert twice.replicas == pytest.approx(2 * once.replicas, rel=0.15)
    assert twice.cost_per_million(3) == pytest.approx(once.cost_per_million(3), rel=0.15)


def test_half_the_budget_needs_fewer_where_the_pool_is_what_is_short() -> None:
    short = replace(COSTS, settings=replace(COSTS.settings, kv_capacity_tokens=700))
    planner = Planner(short, 0.99)
    whole = planner.needed(workload(), "least-connections")
    half = planner.needed(workload().with_half_budgets("sliding"), "least-connections")
    assert half.replicas < whole.replicas


def test_affinity_saves_replicas_where_prompts_begin_alike() -> None:
    settings = replace(COSTS.settings, prefill_chunk_tokens=32, kv_capacity_tokens=20_000)
    small = replace(COSTS, prefill=1e-3, settings=settings)
    shared = workload(prompt="16", prefixes={"count": 200, "tokens": 320, "skew": 0})
    planner = Planner(small, 0.99)
    found = {name: planner.needed(shared, name) for name in ("least-connections", "prefix")}
    assert found["prefix"].hit_rate > 1.5 * found["least-connections"].hit_rate
    assert found["prefix"].replicas < found["least-connections"].replicas


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"prompt": "990"}, "990 .* 20 tokens is longer than the model's context, 1000"),
        ({"prompt": "900", "max_output": 100}, "may hold 999 bytes.*no replica can ever"),
        ({"arms": ["h2o:0.5"]}, "policy 'h2o' were not measured.*epikv_flat, full, sliding"),
        ({"arms": ["sliding"]}, "needs a budget"),
        (
            {"arms": ["epikv_flat:0.5"]},
            "evicts nothing of prompts.*needs a budget of 216, and has 110",
        ),
    ],
)
def test_what_no_replica_can_run_is_told(more: dict[str, Any], told: str) -> None:
    few = replace(COSTS, settings=replace(COSTS.settings, kv_capacity_tokens=800))
    with pytest.raises(Unfit, match=told):
        check(few if "max_output" in more else COSTS, workload(**more))


@pytest.mark.parametrize("limit", ["deadline", "first_token"])
def test_a_deadline_that_an_idle_replica_misses_is_told(limit: str) -> None:
    with pytest.raises(Unfit, match="idle replica.*no number of replicas helps"):
        check_deadline(COSTS, workload(**{limit: 0.015}), 0.99)


def test_costs_are_read_as_they_were_written(tmp_path: Path) -> None:
    costs = replace(COSTS, paces=(0.9, 1.2), pace_seconds=0.4, mixed=0.001)
    costs.save(tmp_path / "costs.json")
    assert Costs.load(tmp_path / "costs.json") == costs
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ValueError, match="remove it to measure them again"):
        Costs.load(tmp_path / "other.json")


def test_between_and_beyond_what_was_measured_a_step_costs_as_a_line() -> None:
    costs = replace(COSTS, base=((0, 1.0), (2, 3.0), (4, 4.0)))
    found = [costs.base_seconds(n) for n in (0, 1, 2, 3, 4, 6)]
    assert found == [1.0, 2.0, 3.0, 3.5, 4.0, 5.0]


def test_the_command_says_how_uneven_the_machine_was(tmp_path: Path) -> None:
    paces = (0.1, *[0.8] * 9, *[1.25] * 9, 9.0)
    costs = replace(COSTS, paces=paces, pace_seconds=0.4)
    costs.save(tmp_path / "costs.json")
    words = f"--costs {tmp_path}/costs.json --rate 2 --prompt 50 --output 9 --deadline 9".split()
    assert (
        "In nine of ten moments steps took 0.80 to 1.25 times their mean." in epikv(*words).stdout
    )


def test_at_half_the_pace_all_takes_twice_as_long() -> None:
    policies = {"p": Policy("by_chunk", 0, decode_seconds=0.01, prefill_seconds=0.001)}
    costs = replace(COSTS, mixed=0.001, policies=policies)
    calls = [Call(0, 100, 20, 20, arm=arm) for arm in (0, 1)]
    arms = [FULL, Arm("p", 50)]
    for call in calls:
        first, end = Model(costs, arms).idle_ticks(call)
        assert Model(costs.at_pace(2), arms).idle_ticks(call) == (2 * first, 2 * end)


def epikv(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from epikv.cli import main; main()", "plan", "capacity"]
    return subprocess.run([*command, *map(str, words)], check=False, capture_output=True, text=True)


def test_the_command_needs_no_daemon_where_there_are_costs(tmp_path: Path) -> None:
    costs, out = tmp_path / "costs.json", tmp_path / "plan.json"
    COSTS.save(costs)
    words = f"--costs {costs} --rate 20 --prompt uniform:50:200 --output 20 --deadline 2".split()
    done = epikv(*words, "--replica-cost", 2, "--json", out)
    assert done.returncode == 0, done.stderr
    told = json.loads(out.read_text())
    [answer] = told["answers"]
    assert f"least-connections: {answer['replicas']} replicas are needed." in done.stdout
    assert "Half the budgets: " in done.stdout
    again = epikv(*words, "--replica-cost", 2, "--json", out)
    assert again.stdout == done.stdout


def test_the_command_says_what_is_missing(tmp_path: Path) -> None:
    COSTS.save(tmp_path / "costs.json")
    for words, told in (
        (["--costs", tmp_path / "none.json", "--rate", 1, "--deadline", 1], "--model or --server"),
        (["--costs", tmp_path / "costs.json", "--rate", 1], "give --deadline or --first-token"),
    ):
        done = epikv(*words)
        assert done.returncode != 0 and told in done.stderr
        assert "Traceback" not in done.stderr

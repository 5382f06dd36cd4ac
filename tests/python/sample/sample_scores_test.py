"""What the repository keeps of an evaluation."""

from dataclasses import replace
from pathlib import Path

import pytest
from epikv.eval.results import Record, store
from epikv_lab.sample.picture import draw
from epikv_lab.sample.scores import Score, condense, read, write

PLAN = {
    "tasks": [{"name": "a", "problems": 12, "oracle": False}],
    "arms": [
        {"label": "full", "policy": "full", "slack": 0, "params": {}},
        {"label": "h2o", "policy": "h2o", "slack": 0, "params": {"slack": 0}},
    ],
    "budgets": ["50%", "25%"],
    "seeds": 1,
}


def record(number: int, arm: str, budget: str) -> Record:
    found = Record("a", f"test/{number}", arm, budget, 0, prompt_tokens=10, output_tokens=30)
    if budget == "25%":
        return replace(found, fault="INVALID_ARGUMENT: no")
    evicted = 10 if arm == "h2o" else 0
    return replace(found, right=[True, number % 3 == 0], evicted_tokens=evicted)


def test_scores_tell_which_problems_were_solved(tmp_path: Path) -> None:
    cells = [("h2o", "25%"), ("h2o", "50%"), ("full", "")]
    with store(tmp_path, PLAN) as found:
        for arm, budget in cells:
            for number in reversed(range(12)):
                if (number, arm) == (0, "full"):
                    with pytest.raises(ValueError, match="35 of 36 completions"):
                        condense(tmp_path)
                found.append(record(number, arm, budget))
    thirds = "100100100100"
    expected = [
        Score("a", "", "full", thirds, round(2 / 3, 4)),
        Score("a", "50%", "h2o", thirds, round(2 / 3, 4), dropped=0.25),
        Score("a", "25%", "h2o", "", fault="INVALID_ARGUMENT: no"),
    ]
    assert condense(tmp_path) == expected
    write(tmp_path / "scores.jsonl", expected)
    assert read(tmp_path / "scores.jsonl") == expected
    assert sum(expected[0].hits) == 4


def test_scores_tell_parts_and_doubts_where_asked_for(tmp_path: Path) -> None:
    plan = {**PLAN, "budgets": ["50%"]}
    with store(tmp_path, plan) as found:
        for arm, budget in [("h2o", "50%"), ("full", "")]:
            for number in reversed(range(12)):
                steps = 6 if arm == "h2o" else 0
                found.append(replace(record(number, arm, budget), doubted_steps=steps))
    full, h2o = condense(tmp_path, lengths=True, parts=True)
    assert full.parts == h2o.parts == "111010" * 4, "of problem 0 both are right, of 1 the first"
    assert (full.tokens, h2o.tokens) == (30, 30)
    assert (full.doubted, h2o.doubted) == (0, 0.2)


def test_the_tournament_is_drawn(tmp_path: Path) -> None:
    """A task on either axis; an arm that was not run has no line."""
    found = [
        Score(task, "" if arm == "full" else budget, arm, "" if arm == "vase" else "1101" * 10)
        for task in ("sample:programs", "sample:alarms")
        for budget in ("50%", "25%")
        for arm in ("full", "oracle", "random", "random:frozen=true", "h2o", "vase")
    ]
    draw(tmp_path / "all.png", found, seeds=3)
    draw(tmp_path / "few.png", [s for s in found if s.arm in ("full", "random")], seeds=3)
    assert (tmp_path / "all.png").read_bytes() != (tmp_path / "few.png").read_bytes()

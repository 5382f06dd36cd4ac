"""The papers' claims: arithmetic of the page, and that what it names is run and shipped."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner
from epikv.cli.eval_models import SHIPPED
from epikv.eval.plan import FULL, RANDOM
from epikv.stats import Estimate
from epikv_lab.sample import claims
from epikv_lab.sample.claims import Claim
from epikv_lab.sample.commands import evaluate
from epikv_lab.sample.measure import EVALUATIONS, GATES, folders, named
from epikv_lab.sample.scores import Score, joined, read


def scores(arm: str, **solved: str) -> list[Score]:
    return [Score("t", f"{budget[1:]}%", arm, hits) for budget, hits in solved.items()]


def test_a_row_is_of_all_seeds_and_its_verdict_of_each() -> None:
    many, few = "1" * 30 + "0" * 10, "1" * 10 + "0" * 30
    first = [*scores("a", b50=many, b25=many), *scores(RANDOM, b50=few, b25=few)]
    second = [*scores("a", b50=many, b25=few), *scores(RANDOM, b50=few, b25=few)]
    found = {"seed6": first, "seed7": second, "not all": scores("a", b50=many)}
    lines = claims.table(found, [Claim("A over chance", "more", "a", RANDOM)]).splitlines()
    assert lines[0] == "| claim | theirs | 50% | 25% | verdict |"
    cells = lines[2].strip("| ").split(" | ")
    assert cells[:2] == ["A over chance", "more"]
    assert cells[2].startswith("+0.50 [") and cells[3].startswith("+0.25 [")
    assert cells[4] == "not in general: 3 of 4 above, 0 below"
    assert lines[-1] == "Problems a cell: 80 (seed6, seed7)."


@pytest.mark.parametrize(
    ("lows", "expected"),
    [
        ((0.0, -0.05), "holds"),
        ((-0.06, 0.1), "cannot be told"),
        ((-0.3, -0.09, 0.1), "not in general: 1 of 3 below"),
    ],
)
def test_as_good_is_nowhere_far_below(lows: Sequence[float], expected: str) -> None:
    assert claims.as_good([Estimate(low + 0.05, low, low + 0.1) for low in lows]) == expected


def test_steered_outputs_are_told_beside_those_that_are_not() -> None:
    def both(suffix: str, hits: str, tokens: float) -> list[Score]:
        return [
            Score("t", "", f"full{suffix}", hits, tokens=tokens),
            Score("t", "50%", f"skipkv{suffix}", hits, tokens=tokens),
        ]

    found = [Score("t", "50%", RANDOM, "0" * 8), *both("", "1" * 8, 200)]
    for coefficient in EVALUATIONS[claims.STEERING].steering:
        found += both(f" steered {coefficient:g}", "1" * 4 + "0" * 4, 100)
    lines = claims.steering({"seed6": found}).splitlines()
    assert lines[2].startswith("| `full` | 1.00 [") and lines[2].endswith("|  | 200 |  |")
    assert lines[3].startswith("| `full steered 1` | 0.50 [")
    assert "| -0.50 [" in lines[3] and lines[3].endswith("| 100 | 0.50 |")
    assert lines[6].startswith("| `skipkv` |")
    assert len(lines) == 12 and lines[-1] == "Budget 50%. Problems a cell: 8 (seed6)."


def test_claims_name_arms_that_are_run() -> None:
    for name, told in ((claims.PROMPT, claims.PROMPTS), (claims.DECORATING, claims.DECORATIONS)):
        run = {FULL, RANDOM, *EVALUATIONS[name].policies(folders()[0])}
        assert {arm for claim in told for arm in (claim.more, claim.less)} <= run


@pytest.mark.parametrize("seed", folders(), ids=lambda seed: seed.name)
def test_the_gates_of_the_tournament_are_shipped(seed: Path) -> None:
    """As they were trained, on problems of their own, and better than by chance."""
    for policy, settings in GATES.items():
        made = json.loads((seed / SHIPPED / f"{policy}.json").read_text())
        assert made["policy"] == policy
        said = made["made_with"]
        for setting in settings:
            name, _, value = setting.removeprefix("--").partition("=")
            assert str(said[name]) == value or float(said[name]) == float(value)
        if "held_out" in said:
            held = said["held_out"]
            assert held["trained"]["divergence"] < 0.5 * held["shuffled"]["divergence"]
    judged = ("tournament", "aged")  # those that came after the tournament are in the latter
    arms = {score.arm for name in judged for score in read(seed / f"{name}.jsonl")}
    assert GATES.keys() <= arms


def test_what_is_added_stands_where_it_would() -> None:
    def cell(arm: str, solved: str = "10", budget: str = "50%") -> Score:
        return Score("t", "" if arm == FULL else budget, arm, solved)

    before = [
        cell(FULL),
        cell(RANDOM),
        cell("b"),
        cell(RANDOM, budget="25%"),
        cell("b", "00", "25%"),
    ]
    more = [cell(FULL), cell(RANDOM), cell("a"), cell("c"), cell(RANDOM, budget="25%")]
    assert [score.arm for score in joined(before, more)] == [
        *(FULL, RANDOM, "a", "b", "c"),
        *(RANDOM, "b"),
    ]
    with pytest.raises(ValueError, match="no longer what it was"):
        joined(before, [cell(RANDOM, "11")])


def test_an_evaluation_is_named_whole_or_by_its_beginning() -> None:
    assert named("claims-prompt") == ["claims-prompt"]
    assert {"claims-prompt", "claims-far"} < set(named("claims"))
    assert named("clai") == []
    result = CliRunner().invoke(evaluate, ["clai"])
    assert result.exit_code == 2 and "tournament" in result.output

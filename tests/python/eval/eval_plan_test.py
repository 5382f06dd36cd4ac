"""What an evaluation runs, what it keeps of it, and what it makes of that."""

import io
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest
from catalog import CATALOG, filled, ids, model, record, task
from epikv.eval import results
from epikv.eval.plan import Arm, Settings, Task, arms, control, document, keys, total
from epikv.eval.results import Key, Record, store
from epikv.eval.summary import faults, summarise
from epikv.eval.table import COLUMNS, markdown, short


def labels(*wanted: str, slack: int | None = 15, oracle: bool = False) -> list[str]:
    return [arm.label for arm in arms(CATALOG, wanted, slack, oracle)]


def test_the_anchors_are_always_there() -> None:
    assert labels() == ["full", "random", "random:frozen=true"]
    assert labels("h2o", oracle=True) == ["full", "oracle", "random", "random:frozen=true", "h2o"]
    assert labels("all", "h2o:scope=model") == [
        *("full", "random", "random:frozen=true", "h2o", "snapkv", "h2o:scope=model")
    ]


def test_an_arm_is_what_its_label_says() -> None:
    found = arms(CATALOG, ["snapkv:window=8,layers=[1,2]"], 15, False)[-1]
    params = {"window": 8, "layers": [1, 2], "slack": 15}
    assert found == Arm("snapkv:layers=[1,2],window=8", "snapkv", params, 15)
    assert len(labels("h2o", "h2o", "h2o:slack=15")) == 4  # one and the same


def test_every_arm_has_random_in_rounds_of_its_length() -> None:
    found = labels("h2o", "snapkv:slack=3")
    assert "random:slack=3" in found and "random:frozen=true,slack=3" in found
    chosen = arms(CATALOG, ["h2o", "snapkv"], None, True)
    plan = document(model(), [], chosen, ["50%"], Settings())
    assert control(plan, "h2o:slack=0") == "random:slack=0"
    assert control(plan, "snapkv:slack=63") == "random:slack=63"
    assert control(plan, "random:frozen=true,slack=63") == "random:slack=63"
    assert control(plan, "full") is None


def test_full_and_the_wanted_run_steered_beside_themselves() -> None:
    only = task("a", 10)
    chosen = arms(CATALOG, ["h2o"], 15, False, [0.5, 2])
    assert [arm.label for arm in chosen[3:]] == [
        *("h2o", "full steered 0.5", "h2o steered 0.5", "full steered 2", "h2o steered 2")
    ]
    made = document(model(), [only], chosen, ["50%", "25%"], Settings())
    assert [arm.get("steering") for arm in made["arms"]] == [None] * 4 + [0.5, 0.5, 2, 2]
    assert "steering" not in made["arms"][0], "a plan from before there was any is still the same"
    # `full` once and the others at both budgets.
    assert total(made) == 10 * (1 + 3 * 2 + 2 * (1 + 2))
    assert {key.budget for key in keys(made, ids(only)) if key.arm == "full steered 2"} == {""}
    assert control(made, "h2o steered 2") == "random" and control(made, "full steered 2") is None
    by_arm = rows(summarise(made, filled(made, only)))
    assert by_arm["full steered 2"]["against_full"]["n"] == 10
    assert by_arm["h2o steered 2"]["length"] == by_arm["h2o"]["length"]


def test_the_wanted_run_beside_themselves_with_more_fields() -> None:
    chosen = arms(
        CATALOG, ["h2o", "random"], 15, False, kv=[{"tier_tokens": 200, "tier_fetch": 32}]
    )
    assert [arm.label for arm in chosen[3:]] == [
        "h2o",
        "h2o tier_tokens=200 tier_fetch=32",
        "random tier_tokens=200 tier_fetch=32",
    ]
    made = document(model(), [], chosen, ["50%"], Settings())
    assert made["arms"][4]["kv"] == {"tier_tokens": 200, "tier_fetch": 32}
    assert all("kv" not in arm for arm in made["arms"][:4])
    assert control(made, "h2o tier_tokens=200 tier_fetch=32") == "random"


@pytest.mark.parametrize("text", ["nothing", "h2o:window=3", "h2o:scope", "h2o:slack=some"])
def test_what_is_no_policy_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter):
        labels(text)


def plan(*tasks: Task, budgets: tuple[str, ...] = ("50%",), seeds: int = 1) -> dict[str, Any]:
    chosen = arms(CATALOG, ["h2o"], 15, any(t.oracle for t in tasks))
    return document(model(), tasks, chosen, budgets, Settings(seeds=seeds, temperature=0.6))


def test_a_plan_is_every_arm_at_every_budget() -> None:
    both = task("a", 2, oracle=True), task("b", 1)
    made = plan(*both, budgets=("50%", "300"), seeds=3)
    found = list(keys(made, ids(*both)))
    assert len(set(found)) == len(found) == total(made) == 3 * (2 + 1 + 2 * (2 * 4 + 3))
    first = 3 * 3
    assert all((key.arm == "full") == (n < first) for n, key in enumerate(found))
    assert {key.task for key in found if key.arm == "oracle"} == {"a"}


def test_a_plan_knows_its_problems() -> None:
    made = plan(task("a", 2))
    assert plan(task("a", 2)) == made
    changed = task("a", 2)
    items = [changed.items[0], replace(changed.items[1], prompt="other")]
    assert plan(Task("a", "recall", items)) != made
    assert plan(task("a", 2, oracle=True)) != made


def test_what_was_written_is_there_again(tmp_path: Path) -> None:
    made = plan(task("a", 3))
    every = list(keys(made, ids(task("a", 3))))
    with store(tmp_path, made) as found:
        assert not found.records
        for key in every[:4]:
            found.append(record(key, tail="end\u2028\n\x85"))
    with store(tmp_path, json.loads(json.dumps(made))) as found:
        assert list(found.records) == every[:4]
        assert found.records[every[0]].tail == "end\u2028\n\x85"
    assert results.read(tmp_path)[0] == made


def test_a_torn_last_line_is_dropped(tmp_path: Path) -> None:
    made = plan(task("a", 3))
    every = list(keys(made, ids(task("a", 3))))
    with store(tmp_path, made) as found:
        for key in every[:3]:
            found.append(record(key))
    whole = (tmp_path / "results.jsonl").read_bytes()
    last = whole.rstrip(b"\n").rindex(b"\n") + 1
    for cut in (last + 1, last + 40, len(whole) - 1):
        (tmp_path / "results.jsonl").write_bytes(whole[:cut])
        assert len(results.read(tmp_path)[1]) == 2  # and is left alone by who only reads
        assert (tmp_path / "results.jsonl").read_bytes() == whole[:cut]
        with store(tmp_path, made) as found:
            assert list(found.records) == every[:2]
            found.append(record(every[2]))
        assert (tmp_path / "results.jsonl").read_bytes() == whole


def test_other_damage_is_told(tmp_path: Path) -> None:
    made = plan(task("a", 3))
    every = list(keys(made, ids(task("a", 3))))
    with store(tmp_path, made) as found:
        for key in every[:3]:
            found.append(record(key))
    file = tmp_path / "results.jsonl"
    good = file.read_text().splitlines(keepends=True)
    for bad, says in (
        ([good[0], good[1][:30] + "\n", good[2]], "jsonl:2: no result"),
        ([good[0], "{}\n"], "jsonl:2: no result"),
        ([*good, good[0]], "jsonl:4: a second result"),
    ):
        file.write_text("".join(bad))
        with pytest.raises(click.ClickException, match=says), store(tmp_path, made):
            pass


def test_another_plan_is_refused(tmp_path: Path) -> None:
    made = plan(task("a", 3))
    with store(tmp_path, made):
        pass
    weights = made | {"model": made["model"] | {"weights": "sha256:other"}}
    for other, says in ((plan(task("a", 4)), "tasks: there"), (weights, "sha256:other")):
        with pytest.raises(click.ClickException, match=says), store(tmp_path, other):
            pass
    with store(tmp_path, made):
        pass
    (tmp_path / "plan.json").unlink()
    (tmp_path / "results.jsonl").touch()
    with pytest.raises(click.ClickException, match="without their plan"), store(tmp_path, made):
        pass
    with pytest.raises(click.ClickException, match="holds no evaluation"):
        results.read(tmp_path)


def test_a_plan_may_grow(tmp_path: Path) -> None:
    made = plan(task("a", 3))
    with store(tmp_path, made) as found:
        found.append(Record("a", "0", "full", "", 0))
    more = made | {
        "arms": [
            *made["arms"],
            {"label": "h2o:slack=0", "policy": "h2o", "params": {}, "slack": 0},
        ],
        "budgets": ["10%", *made["budgets"]],
    }
    with store(tmp_path, more) as found:
        assert len(found.records) == 1
    assert results.read(tmp_path)[0] == more
    other = [{**more["arms"][0], "slack": 99}, *more["arms"][1:]]
    for less in (made, more | {"arms": other}, more | {"arms": other, "budgets": ["10%"]}):
        with pytest.raises(click.ClickException, match="another plan"), store(tmp_path, less):
            pass
    assert results.read(tmp_path)[0] == more


def test_two_at_once_are_refused(tmp_path: Path) -> None:
    made = plan(task("a", 3))
    with store(tmp_path, made):
        with pytest.raises(click.ClickException, match="another evaluation is running"):
            with store(tmp_path, made):
                pass
        assert results.read(tmp_path) == (made, [])
    with store(tmp_path, made):
        pass


def test_a_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = plan(task("a", 1))
    with store(tmp_path, made) as found:
        whole = os.write
        monkeypatch.setattr(os, "write", lambda fd, line: whole(fd, line[:9]))
        with pytest.raises(OSError, match="disk is full"):
            found.append(record(Key("a", "0", "full", "", 0)))


def rows(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["arm"]: row for row in found["rows"]}


def test_figures_of_a_row() -> None:
    only = task("a", 10)
    made = plan(only)
    by_arm = rows(summarise(made, filled(made, only)))
    row = by_arm["h2o"]
    assert (row["n"], row["pending"], row["refused"]) == (10, 0, 0)
    assert row["solved"]["value"] == 0.5 and row["answers"] == 0.75
    assert row["solved"]["low"] == pytest.approx(0.237, abs=1e-3)
    assert row["against_full"]["value"] == -0.5 and row["against_full"]["n"] == 10
    assert row["against_full"]["p"] == 2 / 2**5
    assert row["against_random"]["value"] == 0.5 and row["random"] == "random"
    assert row["evicting"]["n"] == 6 and row["evicting"]["solved"]["value"] == 0.5
    assert row["length"] == {"value": 1.5, "low": 1.5, "high": 1.5} and row["cap_hits"] == 0.5
    assert "tokens_per_second" not in row, "of one arm alone it says nothing"
    assert row["dropped"] == pytest.approx(6 * 55 / 1600)
    assert (row["peak_tokens"], row["peak_bytes"]) == (59, 9 * 1024)
    assert "against_random" not in by_arm["random"]
    assert by_arm["random:frozen=true"]["against_random"]["p"] == 1
    assert by_arm["full"]["against_full"] is None and by_arm["full"]["length"]["value"] == 1
    assert by_arm["full"]["evicting"] == {"n": 0, "solved": None}


def test_a_terminal_gets_the_best_first_and_what_is_beyond_chance() -> None:
    from rich.console import Console

    only = task("a", 10)
    made = plan(only)
    console = Console(width=80, record=True, file=io.StringIO())
    for table in short(summarise(made, filled(made, only))):
        console.print(table)
    shown = console.export_text()
    rows = [line.split("│")[1:-1] for line in shown.splitlines() if line.startswith("│")]
    cells = [[cell.strip() for cell in row] for row in rows]
    assert [row[0] for row in cells] == ["full", "h2o", "random", "random:frozen=true"]
    assert cells[1][1:] == ["0.50 [0.24, 0.76]", "+0.50 *", "21%", "1.50"]
    assert cells[3][2] == "+0.00", "no star"
    assert "a, budget 50%, 10 problems" in shown


def test_nothing_is_averaged_over_what_is_missing() -> None:
    only = task("a", 10)
    made = plan(only)
    every = [r for r in filled(made, only) if (r.arm, r.item) != ("h2o", "3")]
    row = rows(summarise(made, every))["h2o"]
    assert row["pending"] == 1
    assert not {"n", "solved", "answers", "against_full", "output_tokens"} & set(row)
    assert "1 to run" in markdown(summarise(made, every))
    assert summarise(made, every)["axes"] == [
        {"budget": "50%", "arm": arm, "recall": solved}
        for arm, solved in (("full", 1), ("random", 0), ("random:frozen=true", 0))
    ]


def test_what_was_refused_is_not_compared() -> None:
    only = task("a", 10)
    made = plan(only)
    every = [
        Record(**r.key._asdict(), fault="INVALID_ARGUMENT (KV_BUDGET): too\n  small")
        if (r.arm, r.item) == ("h2o", "0") or r.arm == "random:frozen=true"
        else r
        for r in filled(made, only)
    ]
    found = summarise(made, every)
    row = rows(found)["h2o"]
    assert (row["n"], row["refused"], row["against_full"]["n"]) == (9, 1, 9)
    assert row["solved"]["value"] == pytest.approx(4 / 9)
    assert "solved" not in rows(found)["random:frozen=true"]
    assert faults(found) == {
        "a, h2o at 50%: INVALID_ARGUMENT (KV_BUDGET): too\n  small": 1,
        "a, random:frozen=true at 50%: INVALID_ARGUMENT (KV_BUDGET): too\n  small": 10,
    }
    assert "tokens/s" not in COLUMNS
    assert "9 (1 refused)" in markdown(found) and "not run: INVALID_ARGUMENT" in markdown(found)


def test_the_unit_is_the_problem_not_the_completion() -> None:
    """Three seeds alike tell no more than one."""
    only = task("a", 10)
    one, three = plan(only), plan(only, seeds=3)
    a, b = (rows(summarise(made, filled(made, only)))["h2o"] for made in (one, three))
    for figure in ("n", "solved", "against_full", "against_random", "evicting"):
        assert a[figure] == b[figure]


def test_axes_are_not_mixed() -> None:
    tasks = task("a", 4), task("b", 8), task("c", 2, axis="reasoning")
    made = plan(*tasks)
    h2o = next(r for r in summarise(made, filled(made, *tasks))["axes"] if r["arm"] == "h2o")
    assert h2o == {"budget": "50%", "arm": "h2o", "recall": 0.5, "reasoning": 0.5}


@pytest.mark.parametrize("equal", [True, False])
def test_the_report_stands_alone_and_says_what_is_protected(tmp_path: Path, equal: bool) -> None:
    pytest.importorskip("matplotlib")
    from epikv.eval import report

    tasks = task("<a>", 6), task("b", 6, axis="reasoning")
    made = plan(*tasks, budgets=("50%", "25%")) | {"equal_protection": equal}
    with store(tmp_path, made) as found:
        for each in filled(made, *tasks):
            found.append(each)
    report.write(tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 3
    assert not re.search(r'(src|href)="(?!data:)|url\(|@import|<script', page)
    assert "&lt;a&gt;" in page and "<a>" not in page
    said = "Equal protection" if equal else "Published protection"
    assert page.count(said) == 1 + 2 * 2
    assert said in (tmp_path / "summary.md").read_text()
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert len(summary["rows"]) == 2 * 2 * 4
    for picture in ("accuracy", "length", "recall"):
        assert (tmp_path / f"{picture}.png").stat().st_size > 5000


def test_every_plot_says_what_is_protected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    from epikv.eval import plots
    from matplotlib.figure import Figure

    drawn: list[str] = []
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, *_, **__: drawn.append(figure.get_suptitle())
    )
    tasks = task("a", 4), task("b", 4, axis="reasoning")
    made = plan(*tasks, budgets=("50%", "300"))
    plots.draw(tmp_path, summarise(made, filled(made, *tasks)))
    assert len(drawn) == 3 and all("Equal protection" in title for title in drawn)


def test_a_report_of_nothing_yet(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from epikv.eval import report

    only = task("a", 4)
    with store(tmp_path, plan(only)):
        pass
    summary = report.write(tmp_path)
    assert all(row["pending"] == 4 for row in summary["rows"])

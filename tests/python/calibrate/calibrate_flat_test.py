"""A calibration of epikv_flat: its plan, what confirms it, and its report."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from epikv.calibrate.choose import search
from epikv.calibrate.confirm import RANDOM, Outcome, arms, gain, told
from epikv.calibrate.plan import Plan, Report
from epikv.eval.items import Item
from epikv.export import archive, random_model
from epikv_lab.calibrate.synthetic import World
from tiny_model import TINY


def test_problems_are_used_once() -> None:
    plan = Plan(("sample:programs@4", "sample:alarms@6"), traces=3, trials=2, confirm=4)
    parts = plan.problems()
    assert [[len(task.items) for task in part] for part in parts] == [[3, 3], [2, 2], [4, 4]]
    ids = [(task.name, item.id) for part in parts for task in part for item in task.items]
    assert len({*ids}) == 18
    assert [task.name for task in parts[1]] == [*plan.tasks]
    longer = replace(plan, confirm=9).problems()
    assert [[i.id for i in task.items] for task in longer[0]] == [
        [i.id for i in task.items] for task in parts[0]
    ]


def test_a_task_must_have_enough_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    short = [Item(str(i), "", lambda text: []) for i in range(7)]
    monkeypatch.setattr("epikv.calibrate.plan.load", lambda *_, **__: short)
    with pytest.raises(ValueError, match="file:x has 7 problems.* take 156"):
        Plan(("file:x",)).problems()


@pytest.mark.parametrize(
    ("tasks", "why"),
    [
        (("recall@9",), "recall@9 is forced through the model"),
        (("sample:programs", "sample:programs"), "two tasks have one name"),
    ],
)
def test_tasks_that_give_no_traces_of_their_own(tasks: tuple[str, ...], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Plan(tasks).problems()


def test_depths_of_the_published_pair() -> None:
    """As policies/residual_layers.cc has them."""
    pair = search(World(planted=3, auc=0.7).cases(0)).pairs[0]
    published = {layers: arms(pair, layers, 64)[2].params for layers in (2, 6, 24, 28, 32, 36)}
    assert {n: (p["layer_a"], p["layer_b"]) for n, p in published.items()} == {
        2: (0, 1), 6: (1, 3), 24: (7, 16), 28: (9, 18), 32: (10, 21), 36: (11, 24)
    }  # fmt: skip


def test_arms_evict_in_rounds_of_one_length() -> None:
    pair = search(World(planted=3, auc=0.7).cases(0)).pairs[0]
    over = arms(pair, 8, 64)
    assert over[-1] == RANDOM
    assert {arm.params["slack"] for arm in over} == {0}
    assert Plan(("x",)).settings.equal_protection


def outcome(good: int, count: int = 60, task: str = "x") -> Outcome:
    return Outcome([task] * count, [[True, i < good] for i in range(count)])


def test_a_pair_has_to_beat_by_an_interval() -> None:
    chosen = outcome(30)
    assert gain(chosen, outcome(0)).beats
    assert not gain(chosen, outcome(30)).beats
    assert not gain(chosen, outcome(60)).beats
    one = gain(chosen, outcome(29))
    assert not one.beats
    assert one.parts.value == pytest.approx(1 / 120)


def test_what_is_lost_on_one_task_is_told() -> None:
    chosen, random = outcome(20, 20, "a"), outcome(0, 20, "a")
    worse, better = outcome(0, 20, "b"), outcome(20, 20, "b")
    both = [
        Outcome(a.tasks + b.tasks, a.right + b.right)
        for a, b in ((chosen, worse), (random, better))
    ]
    found = told({"full": both[0], "chosen": both[0], "random": both[1]})
    assert found["gains"]["random"]["parts"]["value"] == 0
    assert {name: part["gains"]["random"]["parts"]["value"] for name, part in found["tasks"].items()} == {
        "a": 0.5, "b": -0.5
    }  # fmt: skip
    assert "tasks" not in told({"full": chosen, "chosen": chosen})
    json.dumps(found)


def test_the_report_is_what_export_reads(tmp_path: Path) -> None:
    from epikv.export.checkpoint import _read_calibration

    found = search(World(planted=1, auc=0.7, layers=2).cases(0))
    random_model(TINY, tmp_path / "model.pt", check=False)
    manifest = archive.read_manifest(tmp_path / "model.pt")
    report = Report(Plan(("sample:programs",)), manifest, {"confirmation": {}}, found)
    report.chosen = found.pairs[0]
    (tmp_path / "report.json").write_text(json.dumps(report.to_json(), allow_nan=False))
    read = _read_calibration(tmp_path / "report.json", 3)
    written = report.calibration()
    assert replace(read, figures={}) == replace(written, figures={})
    assert written.confirmed and read.figures["model"]["weights"] == manifest.weights
    json.dumps(written.figures, allow_nan=False)

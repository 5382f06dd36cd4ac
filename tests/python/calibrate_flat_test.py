"""A calibration of epikv_flat: its plan, what confirms it, and its report."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from epikv.calibrate.choose import search
from epikv.calibrate.confirm import Arm, Outcome, arms, verdicts
from epikv.calibrate.plan import Plan, Report
from epikv.calibrate.synthetic import World
from epikv.eval.tasks import Item
from epikv.export import archive, random_model

TINY = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 61,
    "max_position_embeddings": 256,
}


def test_problems_are_used_once() -> None:
    plan = Plan(("sample:programs@4", "sample:alarms@6"), traces=3, trials=2, confirm=4)
    parts = plan.problems()
    assert [len(part) for part in parts] == [6, 4, 8]
    keys = [problem.key for part in parts for problem in part]
    assert len({*keys}) == 18
    assert {problem.task for problem in parts[1]} == {*plan.tasks}
    longer = replace(plan, confirm=9).problems()
    assert [p.key for p in longer[0]] == [p.key for p in parts[0]]


def test_a_task_must_have_enough_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    short = [Item(str(i), "", lambda text: []) for i in range(7)]
    monkeypatch.setattr("epikv.calibrate.plan.load", lambda *_: short)
    with pytest.raises(ValueError, match="file:x has 7 problems.* take 200"):
        Plan(("file:x",)).problems()


def test_depths_of_the_published_pair() -> None:
    """As policies/residual_layers.cc has them."""
    pair = search(World(planted=3, auc=0.7).cases(0)).pairs[0]
    published = {layers: arms(pair, layers, 64)[3].params for layers in (2, 6, 24, 28, 32, 36)}
    assert {n: (p["layer_a"], p["layer_b"]) for n, p in published.items()} == {
        2: (0, 1), 6: (1, 3), 24: (7, 16), 28: (9, 18), 32: (10, 21), 36: (11, 24)
    }  # fmt: skip


def test_arms_are_protected_alike() -> None:
    for arm in (Arm("random", "random", {}), Arm("chosen", "epikv_flat", {"layer_a": 1})):
        kv = arm.kv(100)
        assert (kv.budget, kv.equal_protection) == (100, True)
    assert Arm("full", "full", {}).kv(0).budget is None


def test_a_pair_has_to_beat_by_an_interval() -> None:
    def outcome(good: int) -> Outcome:
        return Outcome([[True, i < good] for i in range(60)])

    same = {
        "chosen": outcome(30),
        "random": outcome(30),
        "inverse": outcome(0),
        "published": outcome(60),
    }
    better = {v.against: v.better for v in verdicts(same)}
    assert better == {"random": False, "inverse": True, "published": False}
    slightly = same | {"random": outcome(29)}  # one problem of sixty
    assert not verdicts(slightly)[0].better
    assert verdicts(slightly)[0].parts.value == pytest.approx(1 / 120)


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

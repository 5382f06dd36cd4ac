"""The EpiKV paper's claims: arithmetic of the benches and of the page, and the comparators themselves."""

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from epikv import processes
from epikv.eval.plan import RANDOM
from epikv.stats import Estimate
from epikv_lab.bench import attention, context
from epikv_lab.bench.attention import Time
from epikv_lab.bench.context import MIB, Curve, Longest
from epikv_lab.sample import measure, reproduction
from epikv_lab.sample.measure import PUBLISHED, named
from epikv_lab.sample.reproduction import Claim
from epikv_lab.sample.scores import Score

SHAPE = {**context.SHAPE, "layers": 2}


def test_times_are_paired_within_rounds() -> None:
    """A machine that slows down threefold from round to round does not touch a ratio."""
    rounds = [
        {"free": Time(slow, slow), "reads": Time(2.8 * slow, 1.5 * slow)} for slow in (1, 3, 9)
    ]
    found = attention.told(rounds)
    assert found["free"]["wall"] == {"value": 1, "low": 1, "high": 1}
    assert found["reads"]["wall"]["value"] == pytest.approx(2.8)
    assert found["reads"]["wall"]["high"] == pytest.approx(2.8)
    assert found["reads"]["cpu"]["value"] == pytest.approx(1.5)
    assert found["reads"]["milliseconds"] == pytest.approx(8400)
    assert "| `reads` | 8400.0 | 2.80 [2.80, 2.80] | 1.50 [1.50, 1.50] |" in attention.table(
        {"here": found}
    )


def test_the_order_of_a_round_is_turned_round_in_the_next() -> None:
    order: list[str] = []

    def measure(arm: str, number: int) -> Time:
        order.append(f"{arm}{number}")
        return Time(number, number)

    rounds = attention._rounds(2, ["a", "b"], measure)
    assert order == ["a0", "b0", "b1", "a1"]
    assert [list(taken) for taken in rounds] == [["a", "b"]] * 2


def test_the_longest_context_is_where_the_curve_meets_the_memory() -> None:
    parabola = {n: 5e6 + 1e3 * n + 64 * n * n for n in (256, 512, 1024, 2048)}
    curve = Curve.through(parabola, 2)
    assert curve.residual < 1e-9
    longest = curve.longest(2 << 30)
    assert curve.at(longest) <= 2 << 30 < curve.at(longest + 1)
    line = {
        n: value * (1.02 if n == 512 else 1) for n, value in ((256, 300), (512, 556), (1024, 1068))
    }
    assert 0.005 < Curve.through(line, 1).residual < 0.02
    with pytest.raises(ValueError, match="do not grow"):
        Curve.through({1: 30.0, 2: 20.0, 3: 10.0}, 1).longest(100)


def test_lengths_double_until_memory_or_time_is_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Maps fill the memory and are confirmed; without, a run of that length would take too long."""

    def prefill(shape: object, name: str, tokens: int, peaks: dict[int, int]) -> float:
        peaks[tokens] = 50 * MIB + 1000 * tokens
        peaks[tokens] += 100 * tokens**2 if name in context.QUADRATIC else 0
        return 1e-7 * tokens**2

    monkeypatch.setattr(context, "_prefill", prefill)
    found = dict(context._prefills(SHAPE, 2048 * MIB, 10))
    maps, hidden = found["maps"], found["hidden"]
    assert sorted(maps.measured) == [256, 512, 1024, 2048, 4096, maps.tokens]
    assert maps.tokens == pytest.approx(4571, abs=2)
    assert maps.confirmed == pytest.approx(1, abs=1e-3)
    assert sorted(hidden.measured) == [256 << n for n in range(6)]  # 8192: 6.7 s
    assert hidden.tokens == pytest.approx((2048 - 50) * MIB / 1000, abs=2)
    assert hidden.confirmed is None


def test_contexts_are_told_over_the_comparator() -> None:
    found = {
        "maps": Longest("all maps", 2000, {256: 1, 1024: 9}, 0.01, 0.99),
        "hidden": Longest("none", 50000, {256: 1, 8192: 9}, 0.031),
    }
    lines = context.table(found, "maps").splitlines()
    assert lines[2] == "| all maps | 2000 | 1.0 | 1024 | 1.0% | 0.990 |"
    assert lines[3] == "| none | 50000 | 25.0 | 8192 | 3.1% | extrapolated |"


def test_ways_differ_in_what_they_return_and_not_in_what_they_compute() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from epikv_lab.bench import reference
    from transformers import DynamicCache

    model = reference.load(SHAPE)
    ids = torch.arange(64)[None]
    outs = {}
    for name, way in reference.WAYS.items():
        model.set_attn_implementation(way.attention)
        cache = DynamicCache()
        reference.forward(model, way, ids[:, :-1], cache)
        outs[name] = reference.forward(model, way, ids[:, -1:], cache)
    for out in outs.values():
        assert torch.allclose(out.logits.float(), outs["maps"].logits.float(), atol=0.05)
    assert [out.attentions is not None for out in outs.values()] == [n == "maps" for n in outs]
    assert [out.hidden_states is not None for out in outs.values()] == [n == "hidden" for n in outs]
    row = reference.scores(outs["maps"], None)
    assert row.shape == (64,) and float(row.sum()) == pytest.approx(1, abs=0.05)
    assert reference.scores(outs["sdpa"], None) is None
    assert reference.filled(model, 40).get_seq_length() == 40


def test_maps_that_are_returned_are_seen_in_the_peak() -> None:
    pytest.importorskip("transformers")
    tokens, peaks = 768, {}
    for name in ("maps", "sdpa"):
        of: dict[int, int] = {}
        assert context._prefill(SHAPE, name, tokens, of) > 0
        peaks[name] = of[tokens]
    kept = 2 * 8 * tokens * tokens * 2  # bytes: layers, heads, maps in bfloat16
    assert kept < peaks["maps"] < 8 * kept
    assert peaks["sdpa"] < kept


def test_a_bench_that_compares_two_programs_measures_no_other_daemon() -> None:
    from click.testing import CliRunner
    from epikv.cli import main

    for bench in ("attention", "context"):
        result = CliRunner().invoke(main, ["bench", bench, "--server", "127.0.0.1:1"])
        assert result.exit_code == 2 and "leave --server out" in result.output


@pytest.mark.parametrize(
    ("lows", "expected"),
    [
        ((0.1, 0.2), "holds"),
        ((-0.3, -0.3), "the reverse holds"),
        ((-0.05, -0.05), "cannot be told"),
        ((0.1, -0.3, -0.05), "not in general: 1 of 3 above, 1 below"),
        ((0.1, -0.05), "not in general: 1 of 2 above, 0 below"),
        ((), "cannot be told"),
    ],
)
def test_a_claim_holds_if_every_interval_does(lows: Sequence[float], expected: str) -> None:
    gains = [Estimate(low + 0.05, low, low + 0.1) for low in lows]
    assert reproduction.verdict(gains) == expected


def test_a_ratio_is_reached_with_its_whole_interval() -> None:
    assert reproduction.reached(Estimate(3, 2.9, 3.1), 2.8) == "holds"
    assert reproduction.reached(Estimate(3, 2.7, 3.1), 2.8) == "cannot be told"
    assert reproduction.reached(Estimate(1, 0.9, 1.1), 2.8) == "does not"


def test_gains_are_of_the_same_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    def scores(arm: str, *solved: str) -> list[Score]:
        return [Score("t", b, arm, s) for b, s in zip(("50%", "35%"), solved, strict=True)]

    better, worse = "1" * 30 + "0" * 10, "0" * 30 + "1" * 10
    of = {
        "equal-absolute": [*scores("a", better, better), *scores(RANDOM, worse, better)],
        "equal-compact": scores("a", worse, worse),
    }
    monkeypatch.setattr(reproduction, "calibrated", lambda seed: [])
    claims = [
        Claim("a over random", "72", ("equal-absolute", "a"), ("equal-absolute", RANDOM)),
        Claim("positions", "not tested", ("equal-absolute", "a"), ("equal-compact", "a")),
        Claim("pair", "", ("equal-absolute", reproduction.CALIBRATED), ("equal-absolute", RANDOM)),
    ]
    lines = reproduction.accuracy({"seed6": of}, claims).splitlines()[2:]
    assert lines == [
        "| a over random | 72 | seed6 +0.50 / +0.00 | not in general: 1 of 2 above, 0 below |",
        "| positions | not tested | seed6 +0.50 / +0.50 | holds |",
        "| pair |  | seed6 has no pair | cannot be told |",
    ]
    table = reproduction.settings({"seed6": of})
    assert "### seed6, n = 40" in table
    assert "| `a` | 0.75 [0.60, 0.86] | 0.75 [0.60, 0.86] | 0.25 [0.14, 0.40]" in table


def test_systems_are_told_by_comparator() -> None:
    arms = {"maps": 3.0, "hidden": 1.0, "eager": 1.1, "sdpa": 1.0}
    rounds = [{arm: {"wall": 9.0, "cpu": k * t} for arm, t in arms.items()} for k in (1, 7)]
    longest = {
        name: Longest(name, tokens, {1: 1}, 0.0)
        for name, tokens in (
            ("maps", 10), ("eager", 20), ("hidden", 200), ("sdpa", 400), ("epikv_flat", 900),
            ("h2o", 300), ("raas", 890),
        )
    }  # fmt: skip
    lines = reproduction.system({"decode": rounds}, longest).splitlines()[2:]
    assert [line.split(" | ")[-2:] for line in lines] == [
        ["3.00 [3.00, 3.00]", "holds |"],
        ["1.10 [1.10, 1.10]", "does not |"],
        ["20.0", "holds |"],
        ["10.0", "does not |"],
        ["20.0", "holds |"],
        ["3.0", "does not |"],
        ["1.0", "does not |"],
    ]


def test_each_setting_is_an_evaluation_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def start(command: list[str], **_: object) -> SimpleNamespace:
        commands.append(command)
        return SimpleNamespace(wait=lambda: 0)

    monkeypatch.setattr(processes, "start", start)
    monkeypatch.setattr(measure, "condense", lambda out, lengths, parts: [])
    (tmp_path / "calibration.json").write_text(json.dumps({"confirmed": False}))
    found = {}
    for name in named("reproduction"):
        assert measure.measure(name, tmp_path, tmp_path / "out").name == f"{name}.jsonl"
        command = commands.pop()
        assert f"--policy={PUBLISHED}" in command and "--slack=0" in command
        position = next(text for text in command if text.startswith("--positions="))
        found[name] = "--published-protection" in command, position
    assert found == {
        f"reproduction-{protection}-{positions}": (
            protection == "published",
            f"--positions={positions}",
        )
        for protection in ("equal", "published")
        for positions in ("absolute", "compact")
    }
    measure.measure("pair", tmp_path, tmp_path / "out")
    assert {"--slack=15", "--positions=absolute"} < set(commands[0])
    assert named("pair") == ["pair"]


def test_claims_name_arms_and_settings_that_are_run() -> None:
    settings = {name.removeprefix("reproduction-") for name in named("reproduction")}
    arms = {RANDOM, reproduction.CALIBRATED, PUBLISHED, measure.INVERSE, *measure.COMPARED}
    for claim in reproduction.CLAIMS:
        for setting, arm in (claim.more, claim.less):
            assert setting in settings and arm in arms

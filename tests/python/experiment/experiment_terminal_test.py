"""An experiment's report as it is told in the terminal, and its words and figures."""

from collections.abc import Callable
from math import inf, nan

import pytest
from command_line import squeezed
from epikv.cli import experiment_report
from epikv.experiment import charts, figures, page, reading
from epikv.v1 import experiment_pb2
from fake_reports import KINDS, report

Report = experiment_pb2.ExperimentReport


@pytest.mark.parametrize("kind", KINDS)
def test_a_report_fits_100_columns_without_colours(told: Callable[[str], str], kind: str) -> None:
    text = told(kind)
    assert max(map(len, text.splitlines())) <= 100
    assert "\x1b" not in text and "\u202e" not in text


def test_a_report_begins_with_what_matters(told: Callable[[str], str]) -> None:
    text = squeezed(told("clear").partition("Arms")[0])
    assert text == (
        "half-cache: stopped on 2031-05-08 16:00 UTC; it ran for 6 d 4 h, since 2031-05-02 12:00"
        " UTC stopped because: its end time had come Half the cache gives answers that are as often"
        " right, and holds less memory. as of 2031-05-08 16:00 UTC + lean is better than full:"
        " right is 3.4 percentage points higher (95 % interval +0.9 to +5.8 points)."
    )


def test_a_report_tells_of_everyone_and_of_the_exposed(told: Callable[[str], str]) -> None:
    text = squeezed(told("clear"))
    everyone, exposed = (
        "lean 6,211 74.8 % +3.4 points +4.7 % better",
        "lean 3,851 76.4 % +5.2 points",
    )
    assert text.index(everyone) < text.index(exposed) < text.index("rating (mean, higher")
    assert "73.0 to 76.6 % +0.9 to +5.8 points +1.3 to +8.2 %" in text
    assert "p 0.00067: if there were no difference" in text
    assert "95 % intervals that hold at every look" in text


def test_each_report_says_what_is_special_about_it(told: Callable[[str], str]) -> None:
    for kind, texts in {
        "early": ["Too early: 68 units of lean have right so far", "no bound yet", "too early"],
        "blocked": [
            "ALARM: not as the weights say (p < 0.0001)",
            "withheld",
            "Guardrails are not withheld",
            "failed lean 1 point -0.11 points safe -0.63 to +0.41 points",
            'sample_ratio_explanation: "..."',
            "epikv experiment update half-cache.textproto",
        ],
        "breached": [
            "! Guardrail breached: lean is worse than full in failed by more than 1 point",
            "stopped because: arm lean breached the guardrail failed",
            "94.0 % 86.0 % uneven",
            "- right: arms differ in attrition",
        ],
        "three_arms": ["97.5 % interval", "sliding-half is worse than full", "epikv-half 30.0 %"],
        "subgroups": [
            "What lean does to right is not the same in all subgroups by tokens of the prompt"
            " (p < 0.0001).",
            "right, everyone, by tokens of the prompt; 95 % intervals of all subgroups together",
            "lean less full, between these subgroups (p < 0.0001, at every look): not the same",
            "lean less full, between these subgroups (p 0.8, at every look): not seen to differ",
            "paid (units by arm: ALARM",
            "lean, everyone, adjusted by the unit's outcomes from before the start, known of 80.0 %"
            " of the units: it takes 23.7 % out of the variance of the difference, as +31.1 % units"
            " would.",
        ],
        "pairs": [
            "The same prompts; 95 % intervals of both metrics together",
            "shadow_kl_nats 0.019 nats 0.041 nats +0.022 nats worse +0.016 to +0.028 nats",
            "shadow_top1_agreement 0.982 0.979 -0.003 undecided -0.009 to +0.003",
            "shadow_kl_nats: a unit's difference has a standard deviation of 0.039 nats.",
            "Pairs: 206 compared with full shown, 4 lost with full shown, 2 waiting with full shown,"
            " 211 compared with lean shown, 5 lost with lean shown, 2 waiting with lean shown,"
            " 6 left out: not their unit's first",
            "Losses: lost alike whichever arm is shown, but for chance (p 0.76)",
            "and nothing of outcomes",
        ],
        "uneven_pairs": ["withheld", "Losses: ALARM: not lost alike whichever arm is shown"],
        "unexposed": ["Nobody was exposed", "exposed no data yet"],
        "unbounded": ["-8 points or more", "no bound yet", "+10.6 % or less"],
        "lift_outside": ["below -460 % or above +190 %"],
        "shadow": ["shadow_kl_nats (mean, lower is better)", "+0.050 nats"],
        "hostile": [
            'explained: <script>alert("why")</script> \\u202eyhw',
            "\\u001b[31mred\\u0007",
        ],
    }.items():
        text = squeezed(told(kind))
        for each in texts:
            assert each in text, (kind, each)


def test_a_definition_says_which_classes_there_are() -> None:
    assert reading.subgroups_of(report("subgroups").experiment) == (
        "prompts cut at 256, 1024 tokens; label tier: free, paid, other"
    )
    assert reading.subgroups_of(report("clear").experiment) == ""


def test_pairs_are_told_where_there_are_any(told: Callable[[str], str]) -> None:
    made = report("pairs").experiment
    assert reading.pairs_of(made) == "both arms answer the first prompt of 100.0 % of units"
    assert reading.pairs_of(report("clear").experiment) == ""
    assert "The same prompts" not in told("clear")
    assert 'id="pairs"' not in page.html(report("clear"))
    uneven = told("uneven_pairs").partition("The same prompts")[2].partition("Measured by")[0]
    assert "undecided" not in uneven and "worse" not in uneven


def test_a_subgroup_has_no_verdict_where_an_arm_has_had_a_hand_in_it(
    told: Callable[[str], str],
) -> None:
    made = report("subgroups").subgroups[1].subgroups[1]
    assert made.name == "paid" and made.sample_ratio.alarm and not made.analysis.effects
    paid, _, other = squeezed(told("subgroups")).partition("paid (units")[2].partition(" other ")
    assert "withheld" in paid and "undecided" not in paid
    assert "too early" in other.partition("lean less full")[0]


def test_a_guardrail_is_told_at_its_own_level(told: Callable[[str], str]) -> None:
    made = report("three_arms")
    found, effect = made.guardrails[0], made.metrics[0].all.effects[0]
    assert found.guardrail.metric == "right" and found.difference == effect.difference
    assert effect.interval.lower < found.interval.lower < found.interval.upper
    above, _, below = squeezed(told("three_arms")).partition("Guardrails, everyone")
    assert "-8.7 to -3.4 points" in above and "-8.5 to -3.6 points" not in above
    assert "right sliding-half 10 points -6.1 points safe -8.5 to -3.6 points" in below
    assert "primary metric, but for its guardrails" in below
    assert "95 % intervals, which hold" in page.html(made).partition('id="guardrails"')[2]


def test_a_primary_metric_may_only_differ(told: Callable[[str], str]) -> None:
    made = report("clear")
    made.metrics[0].primary = False
    evicted = reading.find(made, "kv_evicted_tokens")
    evicted.primary = True
    (said,) = reading.summary(made)
    assert said == reading.Sentence(
        "neutral",
        "lean differs from full: kv_evicted_tokens is 638 tokens higher (95 % interval +615 to +661"
        " tokens).",
    )
    assert reading.kind(evicted.metric) == "mean"
    assert f"differs: {reading.MEANINGS['differs']}" in squeezed(told("clear"))
    assert reading.MEANINGS["differs"] in page.html(made)


def test_confounded_figures_stand_below_a_warning(told: Callable[[str], str]) -> None:
    above, _, below = squeezed(told("clear")).partition("Measured by the server and confounded")
    assert "ttft_seconds" not in above
    assert below.index("no cause can be told") < below.index("ttft_seconds")
    assert below.count("confounded") == 4 and "better" not in below.partition("Guardrails")[0]


@pytest.mark.parametrize(
    ("value", "decimals", "text"),
    [
        (1234.56, 1, "1,234.6"),
        (-0.04, 1, "-0.04"),
        (0.0, 2, "0.00"),
        (-0.0, 1, "0.0"),
        (1e-9, 3, "1e-09"),
        (inf, 1, "inf"),
        (nan, 1, "nan"),
    ],
)
def test_what_is_not_0_is_not_written_so(value: float, decimals: int, text: str) -> None:
    assert figures.number(value, decimals) == text


def test_a_figure_has_as_many_digits_as_hold() -> None:
    rate = experiment_pb2.MetricReport()
    rate.metric.kind = experiment_pb2.Metric.KIND_PROPORTION
    value = rate.all.arms.add(mean=0.71234)
    for width, text in ((0.2, "71 %"), (0.02, "71.2 %"), (0.0002, "71.234 %")):
        value.interval.lower, value.interval.upper = 0.71234 - width / 2, 0.71234 + width / 2
        assert figures.scale(rate).value(value.mean) == text
    assert figures.scale(rate).difference(0.01) == "+1.000 points"
    time = experiment_pb2.MetricReport()
    time.metric.name = "ttft_seconds"
    time.all.arms.add(mean=0.0312)
    assert figures.scale(time).value(0.0312) == "31.2 ms"
    time.all.arms[0].mean = 3.12
    assert figures.scale(time).value(3.12) == "3.12 s"


def test_a_p_is_never_alone() -> None:
    for p, chance in ((0.04, "4.0 %"), (2e-4, "0.1 %"), (1e-9, "0.01 %")):
        assert f"with a chance of {chance} at most" in reading.p_value(
            experiment_pb2.Effect(p_value=p)
        )
    assert "nothing yet speaks against" in reading.p_value(experiment_pb2.Effect(p_value=1))


def test_attrition_is_uneven_beyond_chance_alone() -> None:
    few, many = report("early"), report("breached")
    for each in (few, many):
        for value, share in zip(each.metrics[0].all.arms, (0.94, 0.86), strict=True):
            value.coverage = share
    assert not reading.attrition(few)[0].is_uneven
    assert reading.attrition(many)[0].is_uneven


def test_distributions_keep_all_counts() -> None:
    for arms in zip(*(arm.distributions for arm in report("three_arms").arms), strict=True):
        found = charts.bins(arms)
        assert len(found) <= 41
        for i, arm in enumerate(arms):
            assert sum(each.counts[i] for each in found) == sum(arm.counts)


def test_a_report_with_nothing_in_it_has_a_page(told: Callable[[str], str]) -> None:
    empty = Report()
    experiment_report.tell(empty)
    assert "What these numbers mean" in page.html(empty)
    for field in ("arms", "metrics", "guardrails"):
        bare = report("three_arms")
        bare.ClearField(field)
        experiment_report.tell(bare)
        page.html(bare)
    odd = report("three_arms")
    odd.metrics[0].all.effects[0].verdict = 99
    odd.metrics[0].all.arms[0].arm = "unheard-of"
    odd.arms[0].distributions[0].ClearField("bounds")
    odd.arms[1].ClearField("points")
    for arm in odd.arms[1:]:
        arm.distributions[1].quantiles.pop()
    experiment_report.tell(odd)
    assert ">99<" in page.html(odd)

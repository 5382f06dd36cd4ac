"""`epikv experiment report` and `plan` as they are typed."""

import json
from collections.abc import Callable
from pathlib import Path

import fake_epikvd
import fake_reports
import grpc
import pytest
from click.testing import Result
from command_line import squeezed
from epikv import Client, RpcError
from epikv.experiment import page
from epikv.messages import as_json
from epikv.v1 import experiment_pb2
from fake_reports import KINDS, report
from google.protobuf.json_format import ParseDict
from google.protobuf.timestamp_pb2 import Timestamp

Report = experiment_pb2.ExperimentReport


def test_the_client_asks_for_reports_and_plans(fake: fake_epikvd.Fake) -> None:
    fake.experiments.reports["e"] = [report("early")]
    fake.experiments.plan.units = 5
    with Client(fake.address) as client:
        assert client.experiment_report("e", points=7) == report("early")
        assert client.plan_experiment(rate=0.3, effect=0.01, looks=3).units == 5
        client.plan_experiment(sd=2, units=900)
        for wrong in ({"rate": 0.3}, {"rate": 0.3, "sd": 1, "units": 2}, {"effect": 1}):
            with pytest.raises(ValueError, match="one of them"):
                client.plan_experiment(**wrong)
        with pytest.raises(RpcError, match="no experiment"):
            client.experiment_report("other")
    asked, rate, mean, _ = fake.requests
    assert (asked.name, asked.points) == ("e", 7)
    assert rate == experiment_pb2.PlanExperimentRequest(
        kind=experiment_pb2.Metric.KIND_PROPORTION, rate=0.3, effect=0.01, looks=3
    )
    assert mean == experiment_pb2.PlanExperimentRequest(
        kind=experiment_pb2.Metric.KIND_MEAN, sd=2, units=900
    )


def test_a_report_in_each_form(
    ask: Callable[..., Result], fake: fake_epikvd.Fake, tmp_path: Path
) -> None:
    fake.experiments.reports["half-cache"] = [report("clear")]
    file = tmp_path / "report.html"
    plain = ask("report", "half-cache", "--html", file)
    assert plain.exit_code == 0 and "lean is better than full" in plain.stdout
    assert file.read_text("utf-8") == page.html(report("clear"))
    assert [each.name for each in tmp_path.iterdir()] == ["report.html"]
    told = json.loads(ask("report", "half-cache", "--json", "--points", 9).stdout)
    assert fake.requests[-1].points == 9
    assert ParseDict(told, Report()) == report("clear")
    assert told["arms"][0]["units"] == 6194 and told["sample_ratio"]["alarm"] is False
    assert ask("report", "half-cache", "--html", tmp_path / "no" / "x.html").exit_code == 1
    missing = ask("report", "other")
    assert missing.exit_code == 1 and "NOT_FOUND" in missing.stderr


def test_watching_ends_when_nothing_can_change(
    ask: Callable[..., Result], fake: fake_epikvd.Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 2:
            fake.experiments.refusals = [(grpc.StatusCode.UNAVAILABLE, None)]

    monkeypatch.setattr("epikv.cli.experiment_report.time.sleep", sleep)
    running, stopped, final = report("early"), report("clear"), report("clear")
    final.as_of.CopyFrom(Timestamp(seconds=final.as_of.seconds + 90_000))
    fake.experiments.reports["half-cache"] = [running, stopped, final]
    result = ask("report", "half-cache", "--watch", 5, "--json")
    assert [json.loads(line)["as_of"] for line in result.stdout.splitlines()] == [
        as_json(each)["as_of"] for each in (running, stopped, final)
    ]
    assert slept == [5, 5, 5] and "asking again" in result.stderr
    fake.experiments.refusals = [(grpc.StatusCode.UNAVAILABLE, None)]
    assert ask("report", "half-cache", "--watch", 5).exit_code == 1


def test_watching_is_ended_by_hand(
    ask: Callable[..., Result], fake: fake_epikvd.Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("epikv.cli.experiment_report.time.sleep", interrupt)
    fake.experiments.reports["half-cache"] = [report("early")]
    assert ask("report", "half-cache", "--watch", 5).exit_code == 0


def test_a_plan_in_words(ask: Callable[..., Result], fake: fake_epikvd.Fake) -> None:
    fake.experiments.plan = experiment_pb2.ExperimentPlan(
        units=21_400, power=0.8004, tau=0.01234567, sample_ratio_units=1_240_000
    )
    told = squeezed(ask("plan", "--rate", 0.7, "--effect", 0.02).stdout)
    assert (
        "+2 percentage points, from 70 % to 72 % (+2.86 % of the rate) takes 21,400 units" in told
    )
    assert "with a chance of 80.0 %" in told and "control 10,700, each other arm 10,700" in told
    assert "tau 0.0123457" in told and "1,240,000 counted units would raise the alarm" in told
    assert "At 20 looks, with a chance of 5 % to find over all looks what is not there." in told
    more = ("--arms", 3, "--control-share", 0.5, "--r2", 0.3, "--metric-kind", "mean", "--json")
    reply = ask("plan", "--sd", 2, "--effect", -0.1, "--alpha", 0.01, "--looks", 7, *more)
    assert json.loads(reply.stdout)["units"] == 21_400
    assert fake.requests[-1] == experiment_pb2.PlanExperimentRequest(
        kind=experiment_pb2.Metric.KIND_MEAN,
        sd=2,
        effect=-0.1,
        power=0.8,
        alpha=0.01,
        looks=7,
        arms=3,
        control_permille=500,
        covariate_r2=0.3,
    )


def test_a_plan_of_windows_says_how_long_they_take(
    ask: Callable[..., Result], fake: fake_epikvd.Fake
) -> None:
    fake.experiments.plan = experiment_pb2.ExperimentPlan(
        units=1_500, power=0.8, sample_ratio_units=1_240_000
    )
    plan = ("plan", "--sd", 60, "--effect", 20)
    told = squeezed(ask(*plan, "--window", 300).stdout)
    assert "takes 1,500 windows" in told and "windows by arm control 750" in told
    assert "time 5 d 5 h, in windows of 5 min, without a break" in told
    assert "units" not in told
    assert "window" not in ask(*plan).stdout
    assert ask(*plan, "--window", 0.5).exit_code == 2


def test_a_plan_of_pairs(ask: Callable[..., Result], fake: fake_epikvd.Fake) -> None:
    fake.experiments.plan = experiment_pb2.ExperimentPlan(units=412, power=0.801)
    told = squeezed(ask("plan", "--sd", 0.031, "--effect", 0.005, "--pairs").stdout)
    assert "takes 412 units" in told and "units by arm" not in told
    assert fake.requests[-1].pairs and fake.requests[-1].sd == 0.031
    for more in (("--window", 300), ("--arms", 3), ("--r2", 0.3), ("--control-share", 0.4)):
        refused = ask("plan", "--sd", 1, "--effect", 1, "--pairs", *more)
        assert refused.exit_code == 2 and "--pairs goes with --sd" in refused.stderr


def test_a_plan_of_so_many_units(ask: Callable[..., Result], fake: fake_epikvd.Fake) -> None:
    fake.experiments.plan = experiment_pb2.ExperimentPlan(units=5000, effect_up=0.041)
    told = squeezed(ask("plan", "--rate", 0.7, "--units", 5000, "--arms", 3).stdout)
    assert "a rise of +4.1 percentage points, from 70 % to 74.1 %" in told
    assert "a fall of nothing" in told and "control 1,667, each other arm 1,667" in told


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--effect 1", "give --rate of a proportion or --sd of a mean"),
        ("--rate 0.5 --sd 1 --effect 1", "give --rate of a proportion or --sd of a mean"),
        ("--rate 0.5", "give --effect to be found or --units"),
        ("--rate 0.5 --effect 0", "must not be 0"),
        ("--rate 0.5 --effect 0.1 --metric-kind mean", "a mean is described by --sd"),
        ("--rate 70 --effect 0.1", "70.0 is not in the range"),
    ],
)
def test_a_plan_needs_to_know_what(ask: Callable[..., Result], words: str, said: str) -> None:
    result = ask("plan", *words.split())
    assert result.exit_code == 2 and said in result.stderr


def test_the_stand_in_holds_what_its_cases_say() -> None:
    made = {kind: report(kind, points=20) for kind in KINDS}
    assert all(len(each.arms[0].points) == 20 for each in made.values())
    assert made["blocked"].blocked and not made["blocked"].metrics[0].all.effects
    assert report("lift_outside").metrics[0].all.effects[0].lift_is_outside
    assert not made["unexposed"].metrics[0].exposed.effects
    assert fake_reports.report("clear") == fake_reports.report("clear")

"""An experiment's report as people see it: in the terminal, and as a page in a real browser."""

import json
import re
from collections.abc import Callable, Iterator
from math import inf, nan
from pathlib import Path
from typing import Any

import fake_epikvd
import fake_reports
import grpc
import pytest
from chromium import Chromium, chromium
from click.testing import CliRunner, Result
from epikv import Client, RpcError
from epikv.cli import experiment_report, main, show
from epikv.experiment import charts, figures, page, reading
from epikv.messages import as_json
from epikv.v1 import experiment_pb2
from fake_reports import KINDS, report
from google.protobuf.json_format import ParseDict
from google.protobuf.timestamp_pb2 import Timestamp

Report = experiment_pb2.ExperimentReport
Interval = experiment_pb2.Interval


# The page.


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    with chromium() as opened:
        yield opened


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    made = {}
    for kind in KINDS:
        made[kind] = folder / f"{kind}.html"
        made[kind].write_text(page.html(report(kind)), "utf-8")
    return made


def shown(browser: Chromium) -> dict[str, dict[str, str]]:
    """The figures of the open page, by path."""
    found = browser.evaluate(
        """[...document.querySelectorAll("[data-figure]")].map(e => ({...e.dataset,
        text: e.textContent.trim()}))"""
    )
    paths = [each["figure"] for each in found]
    assert len(paths) == len(set(paths)), "a path is there twice"
    return {each.pop("figure"): each for each in found}


def expected(of: Report) -> Iterator[tuple[str, dict[str, Any]]]:
    """What a page has to show, the contract read anew: path, and the attributes' values."""
    left_out = ["forced_requests", "other_version_requests", "crossed_requests"]
    if of.experiment.HasField("switchback"):
        left_out.append("washed_out_requests")
    for name in left_out:
        yield name, {"value": getattr(of, name)}
    for name in ("sample_ratio", "exposed_sample_ratio"):
        check = getattr(of, name)
        yield f"{name}/alarm", {"value": "alarm" if check.alarm else "in order"}
        yield f"{name}/p_value", {"value": check.p_value}
        yield f"{name}/statistic", {"value": check.statistic}
    for arm in of.arms:
        for field in arm.DESCRIPTOR.fields:
            if field.name.endswith(("units", "requests", "permille")):
                yield f"arm/{arm.arm}/{field.name}", {"value": getattr(arm, field.name)}
        for i, point in enumerate(arm.points):
            if any(p.exposed_units for each in of.arms for p in each.points):
                path = f"arm/{arm.arm}/points/{i}/exposed_units"
                yield path, {"value": point.exposed_units}
            yield f"arm/{arm.arm}/points/{i}/units", {"value": point.units}
        for each in arm.distributions:
            path = f"distribution/{each.metric}/{arm.arm}"
            yield f"{path}/count", {"value": each.count}
            for share, value in zip((10, 25, 50, 75, 90, 99), each.quantiles, strict=True):
                yield f"{path}/quantiles/{share}", {"value": value}
    for metric in of.metrics:
        for name in ("all", "exposed"):
            path = f"metric/{metric.metric.name}/{name}"
            yield from expected_of_analysis(path, getattr(metric, name), metric.confounded)
    for guardrail in of.guardrails:
        path = f"guardrail/{guardrail.guardrail.metric}/{guardrail.arm}"
        words = ("", "too early", "undecided", "safe", "breached")
        yield f"{path}/margin", {"value": guardrail.guardrail.margin}
        yield f"{path}/verdict", {"value": words[guardrail.verdict]}
        yield f"{path}/difference", {"value": guardrail.difference}
        yield f"{path}/interval", bounds(guardrail.interval)


def expected_of_analysis(
    path: str, analysis: experiment_pb2.Analysis, is_confounded: bool
) -> Iterator[tuple[str, dict[str, Any]]]:
    for value in analysis.arms:
        for name in ("units", "observations", "coverage"):
            yield f"{path}/{value.arm}/{name}", {"value": getattr(value, name)}
        if value.HasField("mean"):
            yield f"{path}/{value.arm}/mean", {"value": value.mean}
            yield f"{path}/{value.arm}/interval", bounds(value.interval)
    words = ("", "too early", "undecided", "better", "worse", "differs")
    for effect in analysis.effects:
        arm = f"{path}/{effect.arm}"
        yield f"{arm}/difference", {"value": effect.difference}
        yield f"{arm}/difference/interval", bounds(effect.interval)
        yield f"{arm}/p_value", {"value": effect.p_value}
        if basis := ("", "", "exact", "asymptotic")[effect.basis]:
            yield f"{arm}/basis", {"value": basis}
        told = "confounded" if is_confounded else words[effect.verdict]
        yield f"{arm}/verdict", {"value": told}
        if effect.HasField("lift"):
            yield f"{arm}/lift", {"value": effect.lift}
            yield f"{arm}/lift/interval", bounds(effect.lift_interval)
        for i, point in enumerate(effect.points):
            yield f"{arm}/points/{i}/difference", {"value": point.difference}
            yield f"{arm}/points/{i}/interval", bounds(point.interval)


def bounds(interval: Interval) -> dict[str, float]:
    return {name: getattr(interval, name) for name in ("lower", "upper") if interval.HasField(name)}


@pytest.mark.parametrize("kind", KINDS)
def test_every_figure_of_a_report_is_on_its_page(
    browser: Chromium, pages: dict[str, Path], kind: str
) -> None:
    browser.open(pages[kind])
    found = shown(browser)
    for path, attributes in expected(report(kind)):
        told = {name: found[path].get(name) for name in ("value", "lower", "upper")}
        wanted = {
            name: value if isinstance(value, str) else repr(value)
            for name, value in attributes.items()
        }
        assert {name: value for name, value in told.items() if value is not None} == wanted, path
        assert found[path]["text"], path


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_loads_nothing_and_its_console_is_silent(
    browser: Chromium, pages: dict[str, Path], kind: str
) -> None:
    browser.open(pages[kind])
    assert browser.addresses() == [pages[kind].as_uri()]
    assert browser.complaints() == []
    text = pages[kind].read_text("utf-8")
    assert not re.search(r"<(script|img|link|iframe|object|embed|base|form)\b", text)
    assert not re.search(r"<[^>]*\s(src|href|on\w+)\s*=\s*[\"'](?!#)", text)
    assert "url(" not in text and "@import" not in text


def test_the_browser_would_tell_of_what_a_page_loads(browser: Chromium, tmp_path: Path) -> None:
    bad = tmp_path / "bad.html"
    bad.write_text('<img src="http://127.0.0.1:9/x.png"><script>console.error("no")</script>')
    browser.open(bad)
    assert "http://127.0.0.1:9/x.png" in browser.addresses()
    assert any('"no"' in complaint for complaint in browser.complaints())


def test_what_a_page_would_load_is_refused(browser: Chromium, tmp_path: Path) -> None:
    """Were some text not escaped, nothing would come of it."""
    bad = tmp_path / "bad.html"
    evil = "<script>document.title = 'evil'</script><img src='http://127.0.0.1:9/x.png'>"
    bad.write_text(page.html(report("early")).replace("<header>", f"{evil}<header>"), "utf-8")
    browser.open(bad)
    assert browser.evaluate("document.title") == "half-cache: experiment report"
    assert any("Content Security Policy" in complaint for complaint in browser.complaints())


@pytest.mark.parametrize("width", [400, 1200])
@pytest.mark.parametrize("kind", ["three_arms", "hostile", "unexposed", "unbounded"])
def test_plots_have_a_size_and_nothing_sticks_out(
    browser: Chromium, pages: dict[str, Path], kind: str, width: int
) -> None:
    browser.open(pages[kind], width=width)
    browser.evaluate("document.querySelectorAll('details').forEach(e => e.open = true)")
    sizes = browser.evaluate(
        """[...document.querySelectorAll("svg.plot")].map(e => {
        const box = e.getBoundingClientRect(); return [box.width, box.height, box.right]})"""
    )
    assert len(sizes) > 20
    for each, height, right in sizes:
        assert each > 150 and height > 15 and right <= width
    assert browser.evaluate("document.documentElement.scrollWidth") == width
    inner = "document.querySelector('#primary figure svg svg').getBoundingClientRect().height"
    assert browser.evaluate(inner) > 50
    letters = browser.evaluate(
        "[...document.querySelectorAll('svg text')].map(e => e.getBoundingClientRect().height)"
    )
    assert min(letters) > 9


def test_a_page_has_a_plot_of_each_comparison(browser: Chromium, pages: dict[str, Path]) -> None:
    browser.open(pages["three_arms"])
    ids = browser.evaluate("[...document.querySelectorAll('[id]')].map(e => e.id)")
    assert len(ids) == len(set(ids))
    for metric in report("three_arms").metrics:
        for arm in ("sliding-half", "epikv-half"):
            for population in ("all", "exposed"):
                assert f"plot-effect-{metric.metric.name}-{population}-{arm}" in ids
    assert {"plot-balance-units", "plot-balance-exposed-units"} <= set(ids)
    assert "plot-distribution-ttft_seconds" in ids and "shadow" not in ids
    links = browser.evaluate("[...document.querySelectorAll('a')].map(e => e.hash.slice(1))")
    assert links and set(links) <= set(ids)
    browser.open(pages["shadow"])
    told = browser.evaluate("document.querySelector('#shadow').innerText")
    assert "shadow_kl_nats" in told and "shadow_top1_agreement" in told


def test_what_replays_have_shown_is_drawn(browser: Chromium, pages: dict[str, Path]) -> None:
    browser.open(pages["shadow"])
    drawn = "document.querySelector('#shadow #plot-{} svg.plot path.{}').getTotalLength()"
    for metric in ("shadow_kl_nats", "shadow_top1_agreement"):
        for population in ("all", "exposed"):
            assert browser.evaluate(drawn.format(f"effect-{metric}-{population}-lean", "line")) > 50
        for arm in ("arm-0", "arm-1"):
            assert browser.evaluate(drawn.format(f"distribution-{metric}", arm)) > 50
    values = (
        "[...document.querySelectorAll('#shadow [data-figure=\"{}\"]')].map(e => e.dataset.value)"
    )
    kl = reading.find(report("shadow"), "shadow_kl_nats")
    for arm in kl.all.arms:
        found = browser.evaluate(values.format(f"metric/shadow_kl_nats/all/{arm.arm}/mean"))
        assert [float(value) for value in found] == [arm.mean]
    found = browser.evaluate(values.format("metric/shadow_kl_nats/all/lean/difference"))
    assert [float(value) for value in found] == [kl.all.effects[0].difference]
    others = "document.querySelectorAll('#distributions [id*=shadow], #attrition').length"
    assert "shadow" not in browser.evaluate("document.querySelector('#attrition').innerText")
    assert browser.evaluate(others) == 1


def test_without_replays_nothing_is_said_of_them(told: Callable[[str], str]) -> None:
    made = report("shadow")
    for metric in made.metrics:
        if metric.metric.name.startswith(reading.SHADOW):
            metric.all.Clear()
            metric.exposed.Clear()
    assert not reading.groups(made).shadow
    assert 'id="shadow"' not in page.html(made)


def test_zero_and_the_margin_are_drawn(browser: Chromium, pages: dict[str, Path]) -> None:
    browser.open(pages["clear"])
    lines = "document.querySelectorAll('#plot-effect-{} svg line.{}').length"
    assert browser.evaluate(lines.format("rating-all-lean", "zero")) == 1
    assert browser.evaluate(lines.format("rating-all-lean", "margin")) == 1
    assert browser.evaluate(lines.format("retries-all-lean", "margin")) == 0


def test_a_page_can_be_read_in_the_dark_and_on_paper(
    browser: Chromium, pages: dict[str, Path]
) -> None:
    paper = "getComputedStyle(document.body).backgroundColor"
    ink = "getComputedStyle(document.body).color"
    found = {}
    for dark in (False, True):
        browser.open(pages["clear"], dark=dark)
        colours = [browser.evaluate(expression) for expression in (paper, ink)]
        found[dark] = [sum(map(int, re.findall(r"\d+", colour))) for colour in colours]
    assert found[False][0] > 700 and found[False][1] < 150
    assert found[True][0] < 150 and found[True][1] > 600
    for kind in ("clear", "three_arms"):
        browser.open(pages[kind], width=700)  # A4 between its margins
        browser.call("Emulation.setEmulatedMedia", media="print")
        assert browser.evaluate("document.documentElement.scrollWidth") == 700
    assert browser.pdf().startswith(b"%PDF")


def test_hostile_texts_are_texts(browser: Chromium, pages: dict[str, Path]) -> None:
    browser.open(pages["hostile"], width=400)
    tags = "script, img, b:not(figcaption b), [onload], [onerror]"
    assert browser.evaluate(f"document.querySelectorAll('{tags}').length") == 0
    told = browser.evaluate("document.body.innerText")
    for text in (
        '<script>alert("hypothesis")</script> "quoted" \'so\' &',
        "</style></title>-->",
        "<img src=http://example.invalid/x.png onerror=alert(1)>",
        "<b>note</b> &amp;",
        '"><svg onload=alert(2)>',
        '<script>alert("why")</script>',
        "\u05e2\u05d1\u05e8\u05d9\u05ea",
        "\\u202eoverride",
        "\\u001b[31mred\\u0007",
    ):
        assert text in told, text
    assert not re.search("[\u202a-\u202e\u2066-\u2069\x1b]", told)
    assert browser.evaluate("document.documentElement.scrollWidth") == 400


def test_a_blocked_page_says_why_and_compares_nothing(
    browser: Chromium, pages: dict[str, Path]
) -> None:
    browser.open(pages["blocked"])
    told = browser.evaluate("document.querySelector('#blocked').innerText")
    assert "4774 and 4226 instead of 4500 each" in told and "sample_ratio_explanation" in told
    assert "is breached stops the experiment all the same" in told
    compared = {path for path in shown(browser) if path.endswith("/difference")}
    assert compared == {"guardrail/failed/lean/difference", "guardrail/rating/lean/difference"}
    assert "withheld" in browser.evaluate("document.querySelector('#primary').innerText")


def test_a_metric_may_be_better_neither_higher_nor_lower(
    browser: Chromium, pages: dict[str, Path]
) -> None:
    browser.open(pages["clear"])
    plot = "document.querySelector('#plot-effect-{}-all-lean svg').textContent"
    assert "worse" in browser.evaluate(plot.format("kv_peak_tokens"))
    assert "worse" not in browser.evaluate(plot.format("kv_evicted_tokens"))
    found = shown(browser)["metric/kv_evicted_tokens/all/lean/verdict"]
    assert found["value"] == found["text"] == "differs"


def test_confounded_figures_have_no_verdict_but_a_warning(
    browser: Chromium, pages: dict[str, Path]
) -> None:
    browser.open(pages["clear"])
    told = browser.evaluate("document.querySelector('#confounded').innerText")
    assert "ttft_seconds" in told and "no cause can be told" in told
    assert "better" not in told.replace("lower is better", "") and "worse" not in told


# The terminal.


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Callable[[str], str]:
    def tell(kind: str) -> str:
        experiment_report.tell(report(kind))
        return capsys.readouterr().out

    return tell


@pytest.mark.parametrize("kind", KINDS)
def test_a_report_fits_100_columns_without_colours(told: Callable[[str], str], kind: str) -> None:
    text = told(kind)
    assert max(map(len, text.splitlines())) <= 100
    assert "\x1b" not in text and "\u202e" not in text


def squeezed(text: str) -> str:
    return " ".join(text.split())


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


def test_a_switchback_counts_windows_and_confounds_nothing(
    browser: Chromium, pages: dict[str, Path], told: Callable[[str], str]
) -> None:
    browser.open(pages["switchback"])
    for text in map(squeezed, (told("switchback"), browser.evaluate("document.body.innerText"))):
        assert "windows of 5 min, the first 30 s of each not analysed (880 requests)" in text
        assert "880 in a wash-out" in text and "869 tokens/s" in text
        assert "under another arm than their window's" in text
        assert "All windows: in order" in text or "all windows: as the weights say" in text
        assert "no cause can be told" not in text
    assert not browser.evaluate("document.querySelectorAll('#confounded').length")
    columns = "document.querySelector('#arms thead').innerText"
    assert "WINDOWS" in browser.evaluate(columns).upper()
    caption = "document.querySelector('#plot-distribution-output_tokens_per_second').innerText"
    assert "windows" in browser.evaluate(caption)
    assert "windows" not in squeezed(told("clear")).replace("switchback windows", "")


# Words and figures.


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


# The commands.


@pytest.fixture(scope="module")
def server() -> Iterator[fake_epikvd.Fake]:
    with fake_epikvd.serve() as fake:
        yield fake


@pytest.fixture
def fake(server: fake_epikvd.Fake) -> fake_epikvd.Fake:
    server.requests.clear()
    server.experiments.__init__()
    return server


@pytest.fixture
def ask(fake: fake_epikvd.Fake, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    monkeypatch.setattr(show.out, "width", 160)
    return lambda *words: CliRunner().invoke(
        main, ("experiment", *map(str, words)), env={"EPIKV_SERVER": fake.address}
    )


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

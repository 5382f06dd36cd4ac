"""An experiment's report as people see it: in the terminal, and as a page in a real browser."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from chromium import Chromium, chromium
from command_line import squeezed
from epikv.experiment import page, reading
from epikv.v1 import experiment_pb2
from fake_reports import KINDS, report

Report = experiment_pb2.ExperimentReport
Interval = experiment_pb2.Interval


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
    for by in of.subgroups:
        for subgroup in by.subgroups:
            path = f"subgroup/{by.by}/{subgroup.name}"
            yield f"{path}/p_value", {"value": subgroup.sample_ratio.p_value}
            if subgroup.sample_ratio.alarm:
                yield f"{path}/alarm", {"value": "alarm"}
            for figure, attributes in expected_of_analysis(path, subgroup.analysis, False):
                if figure.removeprefix(f"{path}/").partition("/")[2] in SUBGROUP_FIGURES:
                    yield figure, attributes
        for found in by.heterogeneity:
            path = f"heterogeneity/{by.by}/{found.arm}"
            yield f"{path}/p_value", {"value": found.p_value}
            words = ("", "too early", "not seen to differ", "not the same")
            yield f"{path}/verdict", {"value": words[found.verdict]}
    if of.HasField("pairs"):
        yield from expected_of_pairs(of.pairs)
    for guardrail in of.guardrails:
        path = f"guardrail/{guardrail.guardrail.metric}/{guardrail.arm}"
        words = ("", "too early", "undecided", "safe", "breached")
        yield f"{path}/margin", {"value": guardrail.guardrail.margin}
        yield f"{path}/verdict", {"value": words[guardrail.verdict]}
        yield f"{path}/difference", {"value": guardrail.difference}
        yield f"{path}/interval", bounds(guardrail.interval)


def expected_of_pairs(pairs: experiment_pb2.PairsReport) -> Iterator[tuple[str, dict[str, Any]]]:
    for shown in pairs.shown:
        for name in ("compared", "lost", "waiting"):
            yield f"pairs/{shown.arm}/{name}", {"value": getattr(shown, name)}
    yield "pairs/later_requests", {"value": pairs.later_requests}
    yield "pairs/losses/alarm", {"value": "alarm" if pairs.losses.alarm else "in order"}
    yield "pairs/losses/p_value", {"value": pairs.losses.p_value}
    yield "pairs/losses/statistic", {"value": pairs.losses.statistic}
    for metric in pairs.metrics:
        path, effect = f"pairs/{metric.metric.name}", metric.effect
        yield f"{path}/control_mean", {"value": metric.control_mean}
        yield f"{path}/arm_mean", {"value": metric.arm_mean}
        yield f"{path}/difference_sd", {"value": metric.difference_sd}
        if not metric.HasField("effect"):
            yield f"{path}/verdict", {"value": "withheld"}
            continue
        words = ("", "too early", "undecided", "better", "worse", "differs")
        yield f"{path}/difference", {"value": effect.difference}
        yield f"{path}/difference/interval", bounds(effect.interval)
        yield f"{path}/verdict", {"value": words[effect.verdict]}
        yield f"{path}/p_value", {"value": effect.p_value}


# Of subgroups neither lifts nor p-values of their own are told.
SUBGROUP_FIGURES = (
    "units",
    "mean",
    "interval",
    "difference",
    "difference/interval",
    "verdict",
)


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
        if effect.HasField("variance_saved"):
            yield f"{arm}/variance_saved", {"value": effect.variance_saved}
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

"""A report of an experiment as one HTML page that needs nothing else: no script, no network.

Each figure of the report is an element with the attribute data-figure, a path such as
"metric/right/all/lean/difference", and the figure as it came in data-value (of an interval in
data-lower and data-upper, absent where it is unbounded).
"""

from collections.abc import Callable, Iterator, Sequence
from importlib import resources

from google.protobuf import text_format

from epikv.experiment import charts, figures, meaning, reading
from epikv.experiment.figures import Scale
from epikv.experiment.markup import Html, element, join
from epikv.experiment.reading import Row, Verdict
from epikv.messages import enum_name
from epikv.v1.experiment_pb2 import (
    ArmPoint,
    Distribution,
    Effect,
    ExperimentReport,
    GuardrailReport,
    Interval,
    MetricReport,
    PairedMetric,
    Subgroup,
    SubgroupAnalysis,
)

# Nothing is loaded and nothing runs, whatever texts the page holds.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def html(report: ExperimentReport) -> str:
    """The whole page."""
    name = report.experiment.name
    sections = list(_sections(report))
    head = [
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="referrer", content="no-referrer"),
        element("title", f"{name}: experiment report"),
        element("style", Html(style())),
    ]
    body = [*_top(report), _contents(sections), *(section for _, _, section in sections)]
    page = element("html", element("head", *head), element("body", *body), lang="en")
    return f"<!doctype html>\n{page}\n"


def style() -> str:
    """The page's style sheet; other reports share it."""
    return resources.files(__package__).joinpath("page.css").read_text("utf-8")


Section = tuple[str, str, Html]  # id, title, all of it


def _sections(report: ExperimentReport) -> Iterator[Section]:
    groups = reading.groups(report)
    if report.blocked:
        yield _section("blocked", "Why comparisons are withheld, and what to do", *_blocked(report))
    for metric in groups.primary:
        title = f"Primary metric: {metric.metric.name}"
        yield _section("primary", title, *_metric(report, metric, heading=False))
        if report.subgroups:
            title = f"{metric.metric.name} by subgroups"
            yield _section("subgroups", title, *_subgroups(report, metric))
    if report.guardrails:
        yield _section("guardrails", "Guardrails", *_guardrails(report))
    yield _section("arms", "Arms and exposure", *_arms(report))
    if groups.declared:
        parts = [part for each in groups.declared for part in _metric(report, each)]
        yield _section("declared", "Other declared metrics", *parts)
    if groups.shadow:
        yield _section("shadow", "Shadow quality", *_shadow(report, groups.shadow))
    if report.HasField("pairs"):
        yield _section("pairs", "The same prompts", *_pairs(report))
    if groups.measured:
        yield _section("measured", "Measured by the server", *_own(report, groups.measured))
    if groups.confounded:
        warning = element("div", element("p", reading.CONFOUNDED), class_="box open")
        yield _section(
            "confounded",
            "Measured by the server, and confounded",
            warning,
            *_own(report, groups.confounded),
        )
    if names := [n for n in _distributed(report) if not n.startswith(reading.SHADOW)]:
        title = "Latencies and KV by arm"
        yield _section("distributions", title, *_distributions(report, names))
    if found := reading.attrition(report):
        yield _section("attrition", "Attrition", *_attrition(report, found))
    if report.notes:
        notes = (element("li", _people(note)) for note in report.notes)
        yield _section("notes", "Notes of the server", element("ul", *notes))
    yield _section("definition", "The definition", *_definition(report))
    yield _section(
        "meaning",
        "What these numbers mean, and what they do not",
        *(join(element("h3", title), element("p", text)) for title, text in meaning.of(report)),
    )


def _section(name: str, title: str, *content: str) -> Section:
    return name, title, element("section", element("h2", title), *content, id=name)


def _contents(sections: Sequence[Section]) -> Html:
    links = (element("a", title, href=f"#{name}") for name, title, _ in sections)
    return element("nav", *links, aria_label="Contents")


def _top(report: ExperimentReport) -> Iterator[Html]:
    experiment = report.experiment
    word = reading.state(report).partition(" ")[0]
    chip = element("span", word, class_="chip", data_figure="state", data_value=word)
    yield element("header", element("h1", experiment.name), chip)
    if experiment.hypothesis:
        yield element("p", _people(experiment.hypothesis), class_="hypothesis")
    told = [_sentence(f"{reading.state(report)}.")]
    if reason := reading.stop_reason(experiment):
        told.append(join(" Stopped because: ", _people(reason), "."))
    told.append(f" Figures as of {reading.moment(report.as_of)}.")
    yield element("p", *told, class_="soft")
    yield element(
        "ul",
        *(
            element("li", _people(charts.minus(sentence.text)), class_=sentence.tone)
            for sentence in reading.summary(report)
        ),
        class_="said",
        id="summary",
    )
    yield _glance(report)


def _glance(report: ExperimentReport) -> Html:
    units = sum(arm.units for arm in report.arms)
    exposed = sum(arm.exposed_units for arm in report.arms)
    requests = sum(arm.requests for arm in report.arms)
    cards = [
        (reading.units(report), figures.count(units), f"{figures.count(requests)} requests"),
        (
            reading.units(report, "exposed units"),
            figures.percent(exposed / units, 0) if units else "none",
            "whose cache outgrew its budget",
        ),
    ]
    if report.sample_ratio.alarm:
        told = reading.units(report, "units are not split as the weights say")
        cards.append(("sample ratio", "alarm", told))
    else:
        told = reading.units(report, "units are split as the weights say")
        cards.append(("sample ratio", "in order", told))
    if report.guardrails:
        verdicts = [reading.verdict(guardrail).word for guardrail in report.guardrails]
        counts = {word: verdicts.count(word) for word in dict.fromkeys(verdicts)}
        told = ", ".join(f"{n} {word}" for word, n in counts.items())
        safe = f"{counts.get('safe', 0)} of {len(verdicts)} safe"
        cards.append(("guardrails", "breached" if "breached" in counts else safe, told))
    return element(
        "dl",
        *(
            element("div", element("dt", name), element("dd", value, element("small", more)))
            for name, value, more in cards
        ),
        class_="cards",
    )


def _blocked(report: ExperimentReport) -> Iterator[Html]:
    why = element("p", _people(report.blocked), data_figure="blocked")
    steps = element("ol", *(element("li", step) for step in reading.unblocking(report.experiment)))
    guarded = [element("p", reading.GUARDED)] if report.guardrails else []
    ratio = element("p", reading.units(report, reading.SAMPLE_RATIO))
    yield element("div", why, ratio, steps, *guarded, class_="box bad")


def _arms(report: ExperimentReport) -> Iterator[Html]:
    rows, units = [], reading.units(report)
    if reading.is_switchback(report):
        yield element("p", reading.switchback(report), id="switchback")
    sets = {arm.name: reading.sets(arm) for arm in report.experiment.arms}
    for arm in report.arms:
        path = f"arm/{arm.arm}"
        share = f"{figures.percent(arm.exposed_units / arm.units, 0)} of its" if arm.units else ""
        rows.append(
            [
                _arm(report, arm.arm),
                element("td", sets.get(arm.arm, ""), class_="text long"),
                _cell(
                    f"{path}/weight_permille",
                    arm.weight_permille,
                    figures.percent(arm.weight_permille / 1000),
                ),
                _count(f"{path}/units", arm.units, reading.units_share(arm, report.arms)),
                _count(f"{path}/requests", arm.requests),
                _count(f"{path}/exposed_units", arm.exposed_units, share),
                _count(f"{path}/exposed_requests", arm.exposed_requests),
                _count(f"{path}/running_requests", arm.running_requests),
                _count(f"{path}/lost_requests", arm.lost_requests),
            ]
        )
    yield _table(
        "arm",
        _text_column("sets"),
        "weight",
        units,
        "requests",
        f"exposed {units}",
        "exposed requests",
        "no end yet",
        "lost",
        rows=rows,
        look="wide stack arms",
    )
    for name, what, check in (
        ("sample_ratio", f"All {units}", report.sample_ratio),
        ("exposed_sample_ratio", f"Exposed {units}", report.exposed_sample_ratio),
    ):
        chip = Verdict("alarm", "bad") if check.alarm else Verdict("in order", "good")
        yield element(
            "p",
            f"{what}: ",
            _chip(f"{name}/alarm", chip),
            f" {reading.sample_ratio(check).partition(' (')[0].removeprefix('ALARM: ')}; ",
            _span(f"{name}/p_value", check.p_value, f"p {figures.probability(check.p_value)}"),
            ", ",
            _span(f"{name}/statistic", check.statistic, f"chi-squared {check.statistic:.3g}"),
        )
    if explained := report.experiment.sample_ratio_explanation:
        told = join("Explained: ", _people(explained))
        yield element("p", told, data_figure="sample_ratio_explanation")
    yield element("p", reading.units(report, reading.SAMPLE_RATIO), class_="soft")
    if all(arm.points for arm in report.arms) and report.arms:
        yield element("h3", "Exposure balance over time")
        yield element(
            "p",
            f"Each arm's share of the {units} so far, less its weight. Grey: where chance alone keeps"
            " 999 shares of 1000, at one look.",
            class_="soft",
        )
        yield _legend(report)
        plots = (
            _balance(report, "units", f"all {units}"),
            _balance(report, "exposed_units", f"exposed {units}"),
        )
        yield element("div", *plots, class_="plots")
    items = [
        element("li", _span(name, count, figures.count(count)), f" {what}")
        for name, what, count in reading.left_out(report)
    ]
    yield element("h3", "Requests left out of every analysis")
    yield element("ul", *items)


def _balance(report: ExperimentReport, field: str, what: str) -> Html:
    def count(point: ArmPoint) -> int:
        return getattr(point, field)

    names = [arm.arm for arm in report.arms]
    title = f"Share of {what} by arm less its weight, over time"
    if not any(count(point) for arm in report.arms for point in arm.points):
        return element("figure", element("figcaption", _sentence(f"{what}: none yet")))
    rows = []
    for i, points in enumerate(zip(*(arm.points for arm in report.arms), strict=False)):
        total = sum(count(point) for point in points)
        cells = [element("th", reading.moment(points[0].time), scope="row")]
        for arm, point in zip(report.arms, points, strict=True):
            share = figures.percent(count(point) / total, 2) if total else ""
            cells.append(_count(f"arm/{arm.arm}/points/{i}/{field}", count(point), share))
        rows.append(cells)
    return element(
        "figure",
        element("figcaption", element("b", _sentence(what))),
        charts.balance(title, report.arms, count),
        _details("as a table", _table("up to", *names, rows=rows)),
        id=f"plot-balance-{field.replace('_', '-')}",
    )


def _legend(report: ExperimentReport) -> Html:
    return element("p", *(_swatch(report, arm.arm) for arm in report.arms), class_="legend")


def _metric(report: ExperimentReport, metric: MetricReport, heading: bool = True) -> Iterator[Html]:
    name, how = metric.metric.name, figures.scale(metric)
    if heading:
        yield element("h3", name, id=f"metric-{name}")
    level = f"{figures.level(metric.alpha)} intervals" if metric.alpha else "intervals"
    told = f"{_sentence(reading.kind(metric.metric))}. {level}, which hold at every look."
    yield element("p", told, class_="soft")
    if metric.confounded:
        yield element("div", element("p", reading.CONFOUNDED), class_="box open")
    yield _effects(report, [(metric, how)], with_names=False)
    for row in reading.rows(report, metric.all) if metric.primary else ():
        if row.effect is not None and not metric.confounded:
            yield element("p", f"{row.arm}, everyone, ", reading.p_value(row.effect), ".")
    yield from _adjustments(metric)
    yield _effect_plots(report, metric, how)


def _adjustments(metric: MetricReport) -> Iterator[Html]:
    for field, population in reading.POPULATIONS.items():
        analysis = getattr(metric, field)
        for effect in analysis.effects:
            if told := reading.adjustment(metric, analysis, effect):
                path = f"metric/{metric.metric.name}/{field}/{effect.arm}/variance_saved"
                told = f"{effect.arm}, {population}, {told}."
                yield element("p", _span(path, effect.variance_saved, told), class_="soft")


def _subgroups(report: ExperimentReport, metric: MetricReport) -> Iterator[Html]:
    how = figures.scale(metric)
    yield element("p", reading.SUBGROUPS, class_="soft")
    if metric.confounded:
        yield element("div", element("p", reading.CONFOUNDED), class_="box open")
    for analysis in report.subgroups:
        by, level = reading.by(analysis), figures.level(analysis.alpha)
        yield element("h3", "By ", _people(by), f", {level} intervals of all together")
        yield _subgroup_table(report, metric, how, analysis)
        for found in analysis.heterogeneity:
            path = f"heterogeneity/{analysis.by}/{found.arm}"
            told = reading.heterogeneity_verdict(found)
            told = reading.NO_CAUSE if metric.confounded else told
            said = _span(f"{path}/p_value", found.p_value, reading.heterogeneity(report, found))
            yield element("p", said, ": ", _chip(f"{path}/verdict", told))


def _subgroup_table(
    report: ExperimentReport, metric: MetricReport, how: Scale, analysis: SubgroupAnalysis
) -> Html:
    reach = charts.reach(e for each in analysis.subgroups for e in each.analysis.effects)
    rows = []
    for subgroup in analysis.subgroups:
        path = f"subgroup/{analysis.by}/{subgroup.name}"
        check = subgroup.sample_ratio
        p = _span(f"{path}/p_value", check.p_value, f"p {figures.probability(check.p_value)}")
        ratio = element("small", " units by arm: ", p)
        chip = [" ", _chip(f"{path}/alarm", Verdict("alarm", "bad"))] if check.alarm else []
        title = [_people(subgroup.name), ratio, *chip]
        rows.append([element("th", *title, colspan=6, class_="group", scope="colgroup")])
        for row in reading.rows(report, subgroup.analysis):
            rows.append(_subgroup_row(report, metric, how, subgroup, row, path, reach))
    return _table(
        "arm",
        "units",
        "mean",
        "arm \u2212 control",
        _text_column("lower \u2190 0 \u2192 higher"),
        _text_column("verdict"),
        rows=rows,
        look="wide stack effects",
    )


def _subgroup_row(
    report: ExperimentReport,
    metric: MetricReport,
    how: Scale,
    subgroup: Subgroup,
    row: Row,
    path: str,
    reach: float,
) -> list[Html]:
    path, effect = f"{path}/{row.arm}", row.effect
    cells = [_arm(report, row.arm), _count(f"{path}/units", row.value.units)]
    cells.append(_mean(path, row, how))
    told = reading.subgroup_verdict(report, metric, subgroup, row)
    if effect is None:
        chip = element("span", told.word, class_=f"chip {told.tone}") if told else ""
        return [*cells, _empty(), _empty(), element("td", chip, class_="text")]
    chip = element("td", _chip(f"{path}/verdict", told), class_="text")
    if not effect.HasField("difference"):
        return [*cells, element("td", "no data yet"), _empty(), chip]
    difference = how.difference(effect.difference)
    title = f"{subgroup.name}, {row.arm}: {difference}"
    picture = charts.interval(title, effect.difference, effect.interval, reach)
    return [
        *cells,
        _difference(path, effect, how),
        element("td", picture, class_="guard"),
        chip,
    ]


def _effects(
    report: ExperimentReport, metrics: Sequence[tuple[MetricReport, Scale]], *, with_names: bool
) -> Html:
    rows = []
    for metric, how in metrics:
        for field, population in reading.POPULATIONS.items():
            title = f"{metric.metric.name}, {population}" if with_names else population
            rows.append([element("th", title, colspan=8, class_="group", scope="colgroup")])
            found = reading.rows(report, getattr(metric, field))
            rows += [_effect_row(report, metric, how, field, row) for row in found]
            if not found:
                rows.append([element("td", "no data yet", colspan=8)])
    return _table(
        "arm",
        reading.units(report),
        "observations",
        "mean",
        "arm \u2212 control",
        "relative lift",
        _text_column("verdict"),
        "p, at every look",
        rows=rows,
        look="wide stack effects",
    )


def _effect_row(
    report: ExperimentReport, metric: MetricReport, how: Scale, field: str, row: Row
) -> list[Html]:
    path = f"metric/{metric.metric.name}/{field}/{row.arm}"
    value, effect = row.value, row.effect
    of = f"{'all' if value.coverage == 1 else figures.percent(value.coverage) + ' of'}"
    of += f" {reading.counted(metric.metric.name)}"
    cells = [
        _arm(report, row.arm),
        _count(f"{path}/units", value.units),
        element(
            "td",
            _span(f"{path}/observations", value.observations, figures.count(value.observations)),
            element("small", _span(f"{path}/coverage", value.coverage, of)),
        ),
    ]
    cells.append(_mean(path, row, how))
    told = reading.row_verdict(report, metric, row)
    if effect is None:
        chip = element("span", told.word, class_=f"chip {told.tone}") if told else ""
        return [*cells, _empty(), _empty(), element("td", chip, class_="text"), _empty()]
    if effect.HasField("difference"):
        cells.append(_difference(path, effect, how))
    else:
        cells.append(element("td", "no data yet"))
    cells.append(_lift(path, effect))
    enum = effect.DESCRIPTOR.fields_by_name["basis"].enum_type
    assert enum is not None  # of this field there is one
    basis = enum_name(enum, effect.basis)
    more = element("small", basis, data_figure=f"{path}/basis", data_value=basis)
    chip = _chip(f"{path}/verdict", told)
    cells.append(element("td", chip, "" if basis == "too_early" else more, class_="text"))
    cells.append(_cell(f"{path}/p_value", effect.p_value, figures.probability(effect.p_value)))
    return cells


def _mean(path: str, row: Row, how: Scale) -> Html:
    value = row.value
    if not value.HasField("mean"):
        return element("td", "no data yet")
    mean = _span(f"{path}/mean", value.mean, how.value(value.mean))
    return element("td", mean, _interval(path, value.interval, how.interval))


def _difference(path: str, effect: Effect, how: Scale) -> Html:
    return element(
        "td",
        _span(f"{path}/difference", effect.difference, how.difference(effect.difference)),
        _interval(f"{path}/difference", effect.interval, how.difference_interval),
    )


def _lift(path: str, effect: Effect) -> Html:
    if not effect.HasField("lift"):
        return element("td", "none", element("small", "the control's mean is 0", class_="loose"))
    return element(
        "td",
        _span(f"{path}/lift", effect.lift, figures.lift(effect)),
        _interval(f"{path}/lift", effect.lift_interval, lambda _: figures.lift_interval(effect)),
    )


def _effect_plots(report: ExperimentReport, metric: MetricReport, how: Scale) -> Html:
    """Of each arm, in everyone and in the exposed, to one scale."""
    margin = _margin(report, metric)
    effects = [
        (field, population, effect)
        for field, population in reading.POPULATIONS.items()
        for effect in getattr(metric, field).effects
        if any(point.HasField("difference") for point in effect.points)
    ]
    y = charts.effect_range([effect.points for _, _, effect in effects], margin)
    order = [arm.arm for arm in report.arms]
    effects.sort(key=lambda each: order.index(each[2].arm) if each[2].arm in order else 0)
    plots = []
    for field, population, effect in effects:
        control = reading.control_of(report)
        title = f"{metric.metric.name}, {population}: {effect.arm} less {control}, over time"
        picture = charts.effect(
            title,
            effect.points,
            how,
            y,
            arm=order.index(effect.arm) if effect.arm in order else 0,
            margin=margin,
            is_higher_better=reading.is_higher_better(metric.metric),
        )
        caption = element(
            "figcaption",
            element("b", f"{effect.arm} \u2212 {control}, {population}"),
            f", {how.differences_are()}" if how.differences_are() else "",
        )
        path = f"metric/{metric.metric.name}/{field}/{effect.arm}/points"
        name = f"plot-effect-{metric.metric.name}-{field}-{effect.arm}"
        table = _details("as a table", _points(path, effect, how))
        plots.append(element("figure", caption, picture, table, id=name))
    return element("div", *plots, class_="plots") if plots else Html()


def _margin(report: ExperimentReport, metric: MetricReport) -> float | None:
    """As a difference: on the worse side of 0."""
    margins = [
        guardrail.guardrail.margin
        for guardrail in report.guardrails
        if guardrail.guardrail.metric == metric.metric.name
    ]
    higher = reading.is_higher_better(metric.metric)
    if not margins or higher is None:
        return None
    return -margins[0] if higher else margins[0]


def _points(path: str, effect: Effect, how: Scale) -> Html:
    rows = []
    for i, point in enumerate(effect.points):
        told = element("td", "none yet")
        if point.HasField("difference"):
            text = how.difference(point.difference)
            told = _cell(f"{path}/{i}/difference", point.difference, text)
        bounds = _interval(f"{path}/{i}", point.interval, how.difference_interval, tag="td")
        rows.append([element("th", reading.moment(point.time), scope="row"), told, bounds])
    return _table("up to", "difference", "interval", rows=rows)


def _guardrails(report: ExperimentReport) -> Iterator[Html]:
    alpha = report.experiment.alpha
    level = f"{figures.level(alpha)} intervals" if alpha else "Intervals"
    yield element(
        "p",
        "The experiment stops when an arm is certainly worse than the control by more than the"
        " margin. Safe: certainly not. Everyone counts, exposed or not. "
        f"{level}, which hold at every look.",
        class_="soft",
    )
    rows = []
    for guardrail in report.guardrails:
        name = guardrail.guardrail.metric
        path = f"guardrail/{name}/{guardrail.arm}"
        metric = reading.find(report, name)
        limit = reading.margin(metric, guardrail.guardrail.margin)
        verdict = element("td", _chip(f"{path}/verdict", reading.verdict(guardrail)), class_="text")
        rows.append(
            [
                element("th", name, scope="row"),
                element("td", _swatch(report, guardrail.arm), class_="text"),
                _cell(f"{path}/margin", guardrail.guardrail.margin, limit),
                *_guardrail_figures(path, guardrail, metric),
                verdict,
            ]
        )
    yield _table(
        "metric",
        _text_column("arm"),
        "margin",
        "arm \u2212 control",
        _text_column("better \u2190 0 | margin \u2192 worse"),
        _text_column("verdict"),
        rows=rows,
        look="wide stack guardrails",
    )
    if any(reading.find(report, g.guardrail.metric).confounded for g in report.guardrails):
        yield element("div", element("p", reading.CONFOUNDED), class_="box open")


def _guardrail_figures(path: str, guardrail: GuardrailReport, metric: MetricReport) -> list[Html]:
    if not guardrail.HasField("difference"):
        return [element("td", "no data yet"), _empty()]
    how, higher = figures.scale(metric), reading.is_higher_better(metric.metric)
    difference = how.difference(guardrail.difference)
    interval = _interval(path, guardrail.interval, how.difference_interval)
    told = element("td", _span(f"{path}/difference", guardrail.difference, difference), interval)
    if higher is None:
        return [told, _empty()]
    title = f"{guardrail.guardrail.metric}, {guardrail.arm}: {difference}"
    picture = charts.guardrail(
        f"{title}, {how.difference_interval(guardrail.interval)}",
        guardrail.difference,
        guardrail.interval,
        guardrail.guardrail.margin,
        higher=higher,
    )
    return [told, element("td", picture, class_="guard")]


def _own(report: ExperimentReport, metrics: Sequence[MetricReport]) -> Iterator[Html]:
    yield _effects(report, [(each, figures.scale(each)) for each in metrics], with_names=True)
    plots = []
    for each in metrics:
        plots += [element("h3", each.metric.name), _effect_plots(report, each, figures.scale(each))]
    yield _details("Over time", *plots)


def _shadow(report: ExperimentReport, metrics: Sequence[MetricReport]) -> Iterator[Html]:
    yield element("p", reading.SHADOW_MEANS)
    for each in metrics:
        yield from _metric(report, each)
    if names := [n for n in _distributed(report) if n.startswith(reading.SHADOW)]:
        yield element("h3", "By arm")
        yield from _distributions(report, names)


def _pairs(report: ExperimentReport) -> Iterator[Html]:
    pairs = report.pairs
    yield element("p", reading.PAIRS)
    yield element(
        "p",
        f"{figures.level(pairs.alpha)} intervals of both metrics together, which hold at every look.",
        class_="soft",
    )
    yield _table(
        "metric",
        reading.control_of(report),
        "the other arm",
        "arm \u2212 control",
        "its standard deviation between units",
        _text_column("verdict"),
        "p, at every look",
        rows=[_pair_row(metric) for metric in pairs.metrics],
    )
    items = [
        element("li", _span(f"pairs/{name}", n, figures.count(n)), f" {what}")
        for name, what, n in reading.pair_fates(report)
    ]
    yield element("ul", *items)
    chip = Verdict("alarm", "bad") if pairs.losses.alarm else Verdict("in order", "good")
    p = f"p {figures.probability(pairs.losses.p_value)}"
    statistic = f"chi-squared {pairs.losses.statistic:.3g}"
    yield element(
        "p",
        "Losses by the arm that was shown: ",
        _chip("pairs/losses/alarm", chip),
        " ",
        _span("pairs/losses/p_value", pairs.losses.p_value, p),
        ", ",
        _span("pairs/losses/statistic", pairs.losses.statistic, statistic),
    )


def _pair_row(metric: PairedMetric) -> list[Html]:
    path, how, effect = f"pairs/{metric.metric.name}", reading.paired_scale(metric), metric.effect
    cells = [element("th", f"{metric.metric.name}, {reading.kind(metric.metric)}", scope="row")]
    for name in ("control_mean", "arm_mean", "difference_sd"):
        value = getattr(metric, name)
        known = metric.HasField(name)
        cells.append(
            _cell(f"{path}/{name}", value, how.value(value))
            if known
            else element("td", "no data yet")
        )
    cells.insert(3, _difference(path, effect, how) if effect.HasField("difference") else _empty())
    cells.append(
        element("td", _chip(f"{path}/verdict", reading.paired_verdict(metric)), class_="text")
    )
    p = effect.p_value
    known = metric.HasField("effect")
    return [*cells, _cell(f"{path}/p_value", p, figures.probability(p)) if known else _empty()]


def _distributed(report: ExperimentReport) -> list[str]:
    """The metrics of which there are distributions of something."""
    found = (d for arm in report.arms for d in arm.distributions)
    return list(dict.fromkeys(d.metric for d in found if d.count))


def _distributions(report: ExperimentReport, names: Sequence[str]) -> Iterator[Html]:
    yield element(
        "p",
        "Shares of requests by value; each outline has the same area. Below: from the 10th to the"
        " 90th of 100 requests, thick from the 25th to the 75th, a dot at the median.",
        class_="soft",
    )
    confounded = {metric.metric.name for metric in report.metrics if metric.confounded}
    yield _legend(report)
    plots = (_distribution(report, name, name in confounded) for name in names)
    yield element("div", *plots, class_="plots")
    if confounded.intersection(names):
        yield element("p", reading.CONFOUNDED, class_="soft")


def _distribution(report: ExperimentReport, name: str, confounded: bool) -> Html:
    arms: list[tuple[int, Distribution]] = [
        (place, each)
        for place, arm in enumerate(report.arms)
        for each in arm.distributions
        if each.metric == name
    ]
    unit = "s" if name.endswith("_seconds") else ""
    labels = [report.arms[place].arm for place, _ in arms]
    rows = []
    for (_, each), label in zip(arms, labels, strict=True):
        path = f"distribution/{name}/{label}"
        cells = [_arm(report, label), _count(f"{path}/count", each.count)]
        for share, value in zip(reading.SHARES, each.quantiles, strict=False):
            text = charts.with_measure(float(f"{value:.3g}"), unit)
            cells.append(_cell(f"{path}/quantiles/{share.removesuffix(' %')}", value, text))
        rows.append(cells)
    counted = reading.counted(name)
    quantiles = _table("arm", counted, *reading.SHARES[: len(rows[0]) - 2], rows=rows)
    found = charts.bins([each for _, each in arms]) if all(each.bounds for _, each in arms) else []
    title = f"{name}: shares of {counted} by value, by arm"
    drawn = [charts.distribution(title, arms, found, unit)] if found else []
    steps = []
    for part in found:
        upper = f"up to {charts.with_measure(float(f'{part.high:.4g}'), unit)}"
        below = f"over {charts.with_measure(float(f'{part.low:.4g}'), unit)}"
        cells = [element("th", below if part.high == float("inf") else upper, scope="row")]
        steps.append([*cells, *(element("td", figures.count(n)) for n in part.counts)])
    return element(
        "figure",
        element("figcaption", element("b", name), ", confounded" if confounded else ""),
        *drawn,
        quantiles,
        *([_details("counts", _table(counted, *labels, rows=steps))] if steps else []),
        id=f"plot-distribution-{name}",
    )


def _attrition(report: ExperimentReport, found: Sequence[reading.Attrition]) -> Iterator[Html]:
    yield element(
        "p",
        "Of each arm's requests, the share of which a metric is known. ",
        _sentence(reading.ATTRITION),
        class_="soft",
    )
    rows = []
    for each in found:
        shares = [each.shares.get(arm.arm) for arm in report.arms]
        told = Verdict("uneven", "bad") if each.is_uneven else Verdict("even", "good")
        rows.append(
            [
                element("th", each.metric, scope="row"),
                *(element("td", "" if s is None else figures.percent(s)) for s in shares),
                element("td", _chip(f"attrition/{each.metric}", told), class_="text"),
            ]
        )
    yield _table("metric", *(arm.arm for arm in report.arms), "", rows=rows)


def _definition(report: ExperimentReport) -> Iterator[Html]:
    text = text_format.MessageToString(report.experiment, as_utf8=True)
    lines = "\n".join(reading.printable(line) for line in text.splitlines())
    yield element("pre", element("bdi", lines), id="definition-text")


def _table(first: str, *columns: str, rows: Sequence[Sequence[Html]], look: str = "wide") -> Html:
    """look: "wide stack" sets a row's cells under one another where there is no room beside."""
    head = (
        column if isinstance(column, Html) else element("th", column, scope="col")
        for column in (first, *columns)
    )
    body = element("tbody", *(element("tr", *row) for row in rows))
    table = element("table", element("thead", element("tr", *head)), body)
    return element("div", table, class_=look, tabindex=0)


def _text_column(title: str) -> Html:
    return element("th", title, class_="text", scope="col")


def _details(title: str, *content: Html) -> Html:
    return element("details", element("summary", title), *content)


def _arm(report: ExperimentReport, arm: str) -> Html:
    is_control = arm == reading.control_of(report)
    more = element("small", " control") if is_control else ""
    look = "short" if len(arm) <= 20 else None
    return element("th", _swatch(report, arm), more, scope="row", class_=look)


def _swatch(report: ExperimentReport, arm: str) -> Html:
    place = next((i for i, each in enumerate(report.arms) if each.arm == arm), 0)
    mark = element("span", class_=f"swatch arm-{place}", aria_hidden="true")
    return element("span", mark, arm)


def _chip(path: str, told: Verdict | None) -> Html:
    told = told or reading.NOTHING_YET
    return element(
        "span",
        told.word,
        class_=f"chip {told.tone}",
        title=reading.MEANINGS.get(told.word),
        data_figure=path,
        data_value=told.word,
    )


def _count(path: str, value: int, more: str = "") -> Html:
    told = _span(path, value, figures.count(value))
    return element("td", told, element("small", more) if more else "")


def _cell(path: str, value: float, text: str) -> Html:
    return element("td", charts.minus(text), data_figure=path, data_value=repr(value))


def _span(path: str, value: float, text: str) -> Html:
    return element("span", charts.minus(text), data_figure=path, data_value=repr(value))


def _interval(
    path: str, interval: Interval, write: Callable[[Interval], str], tag: str = "small"
) -> Html:
    text = charts.minus(write(interval))
    return element(
        tag,
        text,
        class_="loose" if tag == "small" and len(text) > 25 else None,
        data_figure=f"{path}/interval",
        data_lower=repr(interval.lower) if interval.HasField("lower") else None,
        data_upper=repr(interval.upper) if interval.HasField("upper") else None,
    )


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


def _empty() -> Html:
    return element("td")


def _people(text: str) -> Html:
    """What people wrote: its own direction, and none for what follows."""
    return element("bdi", reading.plain(text))

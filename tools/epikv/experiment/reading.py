"""How an experiment's report reads: the words that the terminal and the page share."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from math import sqrt
from typing import Any

from google.protobuf.json_format import MessageToDict
from google.protobuf.timestamp_pb2 import Timestamp

from epikv.experiment.assignment import wash_out_of
from epikv.experiment.figures import Scale, count, level, percent, probability, scale, with_unit
from epikv.messages import enum_name, whole
from epikv.v1.experiment_pb2 import (
    Analysis,
    Arm,
    ArmReport,
    ArmValue,
    Effect,
    Experiment,
    ExperimentReport,
    GuardrailReport,
    Heterogeneity,
    Metric,
    MetricReport,
    PairedMetric,
    PairsReport,
    SampleRatio,
    Subgroup,
    SubgroupAnalysis,
)

SHADOW = "shadow_"  # metrics of requests that were replayed under the full cache
SHARES = ("10 %", "25 %", "50 %", "75 %", "90 %", "99 %")  # of a Distribution's quantiles

# Where coverage may differ by chance: as many standard errors as the sample-ratio alarm allows.
_ATTRITION_ERRORS = 3.29

CONFOUNDED = (
    "Confounded: the arms share queue, batch and pool, so that one changes the other's figures."
    " These are what users saw; no cause can be told from their differences, and there are no"
    " verdicts. An experiment of its own can tell, with switchback windows: the whole server on one"
    " arm at a time."
)
OUTPUT = "output_tokens_per_second"  # of a window; all other metrics are of requests
EVERYONE = (
    "everyone: all units that take part, by the arm they were dealt; what switching would do to the"
    " whole of your traffic."
)
EXPOSED = (
    "exposed: those in whom eviction could act, because their cache outgrew its budget (where an arm"
    " steers or rounds: all); what that does to whom it concerns."
)
ATTRITION = (
    "uneven: by more than chance explains. Who is missing is not the same in all arms then, and a"
    " better mean may come from those who are missing."
)
# Of Effect and of GuardrailReport, by name in the contract.
MEANINGS = {
    "better": "The whole interval is on the better side of 0.",
    "worse": "The whole interval is on the worse side of 0.",
    "undecided": "0 is in the interval: there is no difference, or one too small to be seen yet."
    " That is no proof that there is none; what lies outside of the interval is ruled out.",
    "differs": "The whole interval is on one side of 0; which side is better is for you to say.",
    "too early": "Too few units, or outcomes too rare, to say anything.",
    "safe": "Certainly not worse by more than the margin.",
    "breached": "Certainly worse by more than the margin: the experiment stops.",
    "not the same": "The arms' difference is not the same in all of these subgroups.",
    "not seen to differ": "That is no proof that the arms' difference is the same in all of these"
    " subgroups.",
}
GUARDED = (
    "Guardrails are not withheld, though what moves the split may move their figures, too: one that"
    " is breached stops the experiment all the same."
)
_TONES = {
    "better": "good",
    "safe": "good",
    "worse": "bad",
    "breached": "bad",
    "undecided": "open",
    "differs": "neutral",
    "too early": "early",
}


@dataclass(frozen=True)
class Verdict:
    word: str
    tone: str  # good, bad, open, neutral, early


WITHHELD = Verdict("withheld", "bad")
NO_CAUSE = Verdict("confounded", "early")
NOTHING_YET = Verdict("no data yet", "early")


def verdict(message: Effect | GuardrailReport) -> Verdict:
    enum = message.DESCRIPTOR.fields_by_name["verdict"].enum_type
    assert enum is not None  # of this field there is one
    word = enum_name(enum, message.verdict).replace("_", " ")
    return Verdict(word, _TONES.get(word, "early"))


def heterogeneity_verdict(found: Heterogeneity) -> Verdict:
    if found.verdict == Heterogeneity.VERDICT_DIFFERS:
        return Verdict("not the same", "neutral")
    if found.verdict == Heterogeneity.VERDICT_UNDECIDED:
        return Verdict("not seen to differ", "open")
    return Verdict("too early", "early")


@dataclass(frozen=True)
class Row:
    """An arm in a metric."""

    arm: str
    is_control: bool
    value: ArmValue
    effect: Effect | None  # none of the control, and while comparisons are withheld


def is_switchback(report: ExperimentReport) -> bool:
    return report.experiment.HasField("switchback")


def units(report: ExperimentReport, text: str = "units") -> str:
    """A text about units, for experiments that count windows instead."""
    return text.replace("units", "windows") if is_switchback(report) else text


def sets(arm: Arm) -> str:
    """What an arm gives its requests, in words."""
    told: dict[str, Any] = whole(MessageToDict(arm.kv, preserving_proto_field_name=True))
    if arm.HasField("steering"):
        given = MessageToDict(arm.steering, preserving_proto_field_name=True)
        told |= {f"steering {name}": value for name, value in given.items()} or {"steering": "on"}
    named = (f"{k} {v if isinstance(v, str) else json.dumps(v)}" for k, v in told.items())
    return ", ".join(named) or "the request as it came"


def windows_of(experiment: Experiment) -> str:
    """How a switchback experiment cuts time; of others ""."""
    if not experiment.HasField("switchback"):
        return ""
    window = experiment.switchback.window.ToTimedelta()
    wash_out = wash_out_of(experiment.switchback)
    return f"windows of {span(window)}, the first {span(wash_out)} of each not analysed"


def subgroups_of(experiment: Experiment) -> str:
    """The classes of its units; of none ""."""
    told = []
    if edges := experiment.subgroups.prompt_token_edges:
        told.append(f"prompts cut at {', '.join(map(str, edges))} tokens")
    if label := experiment.subgroups.label.key:
        told.append(f"label {label}: {', '.join(experiment.subgroups.label.values)}, other")
    return "; ".join(told)


def switchback(report: ExperimentReport) -> str:
    """What its figures are figures of; the report must be of one."""
    washed_out = count(report.washed_out_requests)
    return (
        f"Switchback: the whole server on one arm at a time, {windows_of(report.experiment)}"
        f" ({washed_out} requests): they met what the window before had left. Windows were dealt, each by"
        " itself, and windows are counted, however many requests they had. So times and throughput"
        " are each arm's own, but for requests that a window's end cuts: these go on beside the next"
        " one's arm, and make differences look smaller than they are."
    )


def counted(metric: str) -> str:
    """What a metric is observed of."""
    return "windows" if metric == OUTPUT else "requests"


def rows(report: ExperimentReport, analysis: Analysis) -> list[Row]:
    control = control_of(report)
    effects = {effect.arm: effect for effect in analysis.effects}
    return [Row(v.arm, v.arm == control, v, effects.get(v.arm)) for v in analysis.arms]


def row_verdict(report: ExperimentReport, metric: MetricReport, row: Row) -> Verdict | None:
    """None: of the control."""
    if row.is_control:
        return None
    if report.blocked:
        return WITHHELD
    if row.effect is None:
        return NOTHING_YET
    return NO_CAUSE if metric.confounded else verdict(row.effect)


def by(analysis: SubgroupAnalysis) -> str:
    """Which classes these are."""
    return f"label {analysis.by}" if analysis.by_label else "tokens of the prompt"


def subgroup_verdict(
    report: ExperimentReport, metric: MetricReport, subgroup: Subgroup, row: Row
) -> Verdict | None:
    """None: of the control."""
    if not row.is_control and row.effect is None and subgroup.sample_ratio.alarm:
        return WITHHELD
    return row_verdict(report, metric, row)


SUBGROUPS = (
    "Classes that were fixed before the start; a unit is in that of its first request. All intervals"
    " here hold together, for all subgroups and arms and at every look, so they are wider than those"
    " above. A verdict in one subgroup and none in another is no difference between the two: whether"
    " the arms' difference is the same in all is told by itself."
)


def heterogeneity(report: ExperimentReport, found: Heterogeneity) -> str:
    """What is told by itself; after it comes the verdict."""
    return (
        f"{found.arm} less {control_of(report)}, between these subgroups"
        f" (p {probability(found.p_value)}, at every look)"
    )


PAIRS = (
    "Both arms answered the same prompts, the first of each of these units. One answer was shown: that"
    " of the unit's arm. The other one was generated while nothing else was to be done, and nobody"
    " saw it. Both were scored under the full cache. Each unit is its own control, so few units"
    " suffice. This tells how near each arm keeps to the full cache, and nothing of outcomes."
)


def pairs_of(experiment: Experiment) -> str:
    """How many units have a pair; of none ""."""
    share = experiment.pairs.permille
    return f"both arms answer the first prompt of {percent(share / 1000)} of units" if share else ""


def pair_fates(report: ExperimentReport) -> list[tuple[str, str, int]]:
    """Of pairs: name, meaning, and how many; by the arm that was shown where it is of one."""
    return [
        (f"{shown.arm}/{name}", f"{name} with {shown.arm} shown", getattr(shown, name))
        for shown in report.pairs.shown
        for name in ("compared", "lost", "waiting")
    ] + [("later_requests", "left out: not their unit's first", report.pairs.later_requests)]


def losses(pairs: PairsReport) -> str:
    p = f"p {probability(pairs.losses.p_value)}"
    if pairs.losses.alarm:
        return f"ALARM: not lost alike whichever arm is shown ({p})"
    return f"lost alike whichever arm is shown, but for chance ({p})"


def paired_scale(metric: PairedMetric) -> Scale:
    means = [ArmValue(mean=mean) for mean in (metric.control_mean, metric.arm_mean) if mean]
    effects = [metric.effect] if metric.HasField("effect") else []
    return scale(MetricReport(metric=metric.metric, all=Analysis(arms=means, effects=effects)))


def paired_verdict(metric: PairedMetric) -> Verdict:
    return verdict(metric.effect) if metric.HasField("effect") else WITHHELD


_COVARIATES = {
    Metric.COVARIATE_PROMPT_TOKENS: "the tokens of the unit's first prompt",
    Metric.COVARIATE_CLIENT: "what the application knew of the unit before",
    Metric.COVARIATE_EARLIER: "the unit's outcomes from before the start",
}


def adjustment(metric: MetricReport, analysis: Analysis, effect: Effect) -> str:
    """What the covariate does to a comparison; of one that is not adjusted ""."""
    if not effect.HasField("variance_saved"):
        return ""
    units = sum(value.units for value in analysis.arms)
    known = sum(value.covariate_units for value in analysis.arms)
    covariate = _COVARIATES.get(metric.metric.covariate, "a covariate")
    saved = effect.variance_saved
    gain = "" if saved >= 1 else f", as {percent(saved / (1 - saved), sign=True)} units would"
    return (
        f"adjusted by {covariate}, known of {percent(known / units if units else 0)} of the units:"
        f" it takes {percent(saved)} out of the variance of the difference{gain}"
    )


POPULATIONS = {"all": "everyone", "exposed": "exposed"}  # by field of MetricReport


def control_of(report: ExperimentReport) -> str:
    return next((arm.arm for arm in report.arms if arm.control), "control")


@dataclass
class Groups:
    """A report's metrics, each once; of replays none before there was one."""

    primary: list[MetricReport] = field(default_factory=list)
    declared: list[MetricReport] = field(default_factory=list)
    shadow: list[MetricReport] = field(default_factory=list)
    measured: list[MetricReport] = field(default_factory=list)
    confounded: list[MetricReport] = field(default_factory=list)


def groups(report: ExperimentReport) -> Groups:
    made = Groups()
    for metric in report.metrics:
        if metric.primary:
            made.primary.append(metric)
        elif metric.metric.name.startswith(SHADOW):
            if any(value.observations for value in metric.all.arms):
                made.shadow.append(metric)
        elif metric.confounded:
            made.confounded.append(metric)
        else:
            (made.measured if metric.measured else made.declared).append(metric)
    return made


def find(report: ExperimentReport, metric: str) -> MetricReport:
    """An empty one if it is not there."""
    found = (each for each in report.metrics if each.metric.name == metric)
    return next(found, MetricReport())


def is_higher_better(metric: Metric) -> bool | None:
    """None: neither higher nor lower is."""
    if metric.direction == Metric.DIRECTION_UNSPECIFIED:
        return None
    return metric.direction != Metric.DIRECTION_LOWER_IS_BETTER


def kind(metric: Metric) -> str:
    what = "share" if metric.kind == Metric.KIND_PROPORTION else "mean"
    higher = is_higher_better(metric)
    return what if higher is None else f"{what}, {'higher' if higher else 'lower'} is better"


def moment(at: Timestamp) -> str:
    return at.ToDatetime().strftime("%Y-%m-%d %H:%M UTC")


def lapse(seconds: float) -> str:
    """In its two greatest units."""
    for size, unit, smaller, part in ((86400, "d", 3600, "h"), (3600, "h", 60, "min")):
        if seconds >= size:
            rest = int(seconds % size // smaller)
            return f"{int(seconds // size)} {unit}" + (f" {rest} {part}" if rest else "")
    return f"{int(seconds // 60)} min" if seconds >= 60 else f"{int(max(seconds, 0))} s"


def span(length: timedelta) -> str:
    """In its greatest unit that makes it whole, or in seconds."""
    seconds = length.total_seconds()
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds and seconds % size == 0:
            return f"{seconds / size:g} {unit}"
    return f"{seconds:g} s"


def state(report: ExperimentReport) -> str:
    """Since when it is what it is."""
    experiment = report.experiment
    word = enum_name(Experiment.State.DESCRIPTOR, experiment.state)
    if not experiment.HasField("start_time"):
        return word
    start = experiment.start_time
    if not experiment.HasField("stop_time"):
        ran = lapse(report.as_of.seconds - start.seconds)
        return f"{word} since {moment(start)}, for {ran}"
    stop = experiment.stop_time
    ran = lapse(stop.seconds - start.seconds)
    return f"{word} on {moment(stop)}; it ran for {ran}, since {moment(start)}"


def stop_reason(experiment: Experiment) -> str:
    reason = experiment.stop_reason
    if reason == "end_time":
        return "its end time had come"
    word, _, rest = reason.partition("/")
    metric, slash, arm = rest.partition("/")
    if word == "guardrail" and slash and any(arm == each.name for each in experiment.arms):
        return f"arm {arm} breached the guardrail {metric}"
    return plain(reason)


def is_final(report: ExperimentReport) -> bool:
    """No outcome is taken any more."""
    experiment = report.experiment
    window = experiment.outcome_window.seconds
    return (
        experiment.state == Experiment.STATE_STOPPED
        and report.as_of.seconds > experiment.stop_time.seconds + window
    )


@dataclass(frozen=True)
class Sentence:
    tone: str
    text: str


def summary(report: ExperimentReport) -> list[Sentence]:
    """What to know if one reads no further."""
    said = []
    if report.blocked:
        said.append(Sentence("bad", f"Comparisons are withheld: {plain(report.blocked)}."))
    for metric in groups(report).primary:
        said += [_decision(report, metric, row) for row in rows(report, metric.all) if row.effect]
    if not report.blocked and not any(metric.all.effects for metric in groups(report).primary):
        said.append(Sentence("early", "Too early: the primary metric has no data of all arms yet."))
    for analysis in report.subgroups:
        for found in analysis.heterogeneity:
            if found.verdict != Heterogeneity.VERDICT_DIFFERS:
                continue
            if not any(metric.confounded for metric in groups(report).primary):
                said.append(Sentence("neutral", _differs_between(report, analysis, found)))
    for guardrail in report.guardrails:
        if guardrail.verdict == GuardrailReport.VERDICT_BREACHED:
            said.append(Sentence("bad", f"Guardrail breached: {breach(report, guardrail)}."))
    if report.exposed_sample_ratio.alarm and not report.blocked:
        said.append(Sentence("bad", EXPOSED_UNEVEN))
    if report.arms and not any(arm.exposed_units for arm in report.arms):
        said.append(Sentence("early", UNEXPOSED))
    for each in attrition(report):
        if each.is_uneven and not each.is_measured:
            said.append(Sentence("open", f"Attrition: {each.sentence}."))
    return said


SHADOW_MEANS = (
    "Of a sample of requests that ended well, replayed while nothing else was to be done: what was"
    " generated is scored once as the request ran and once under the full cache. Per output token:"
    " how far the distribution of the next token has moved (D(full cache || arm), 0: not at all),"
    " and how often both find the same token likeliest. The control's own figures are the noise of"
    " the measurement where it evicts nothing. Both arms are given the same text, which the arm"
    " wrote: one token that would have turned an answer around counts as one token. These figures"
    " are no accuracy."
)
EXPOSED_UNEVEN = (
    "The exposed are not split as the weights say: an arm has a hand in who is exposed, and figures"
    " of the exposed compare different people. Those of everyone do not."
)
UNEXPOSED = (
    "Nobody was exposed: no cache grew over its budget, so eviction did nothing yet, and what"
    " differs differs by chance."
)


def _decision(report: ExperimentReport, metric: MetricReport, row: Row) -> Sentence:
    effect = row.effect
    assert effect is not None  # asked of rows that have one
    found, how = verdict(effect), scale(metric)
    name, control = metric.metric.name, control_of(report)
    if metric.confounded:
        return Sentence("early", f"{row.arm}: {name} is confounded, no cause can be told.")
    if found.word == "too early":
        seen = units(report, f"{count(row.value.units)} units of") + f" {row.arm}"
        return Sentence(found.tone, f"Too early: {seen} have {name} so far, too few to tell.")
    of = f"{level(metric.alpha)} interval {how.difference_interval(effect.interval)}"
    if found.word in ("better", "worse", "differs"):
        way = "higher" if effect.difference > 0 else "lower"
        by = with_unit(how.number(abs(effect.difference)), how.differences_are())
        what = "differs from" if found.word == "differs" else f"is {found.word} than"
        text = f"{row.arm} {what} {control}: {name} is {by} {way} ({of})."
    elif found.word == "undecided":
        text = f"{row.arm} is undecided against {control}: {name}, {of}, which holds 0."
    else:
        text = f"{row.arm}: {found.word} ({of})."
    return Sentence(found.tone, text)


def _differs_between(
    report: ExperimentReport, analysis: SubgroupAnalysis, found: Heterogeneity
) -> str:
    name = groups(report).primary[0].metric.name
    return (
        f"What {found.arm} does to {name} is not the same in all subgroups by {plain(by(analysis))}"
        f" (p {probability(found.p_value)})."
    )


def breach(report: ExperimentReport, guardrail: GuardrailReport) -> str:
    """By how much."""
    name, metric = guardrail.guardrail.metric, find(report, guardrail.guardrail.metric)
    limit = margin(metric, guardrail.guardrail.margin)
    text = f"{guardrail.arm} is worse than {control_of(report)} in {name} by more than {limit}"
    return f"{text} ({scale(metric).difference_interval(guardrail.interval)})"


def margin(metric: MetricReport, value: float) -> str:
    how = scale(metric)
    return with_unit(f"{value * how.factor:,.6g}", how.unit_of_difference)


def sample_ratio(check: SampleRatio) -> str:
    if check.alarm:
        return f"ALARM: not as the weights say (p {probability(check.p_value)})"
    return f"as the weights say (p {probability(check.p_value)})"


SAMPLE_RATIO = (
    "p: how often chance alone would split units at least as unevenly, at one look. Below 0.001 is"
    " an alarm: then something else than chance decides who is counted in which arm."
)


def p_value(effect: Effect) -> str:
    """Never naked."""
    p = effect.p_value
    if p >= 1:
        return "p 1: nothing yet speaks against there being no difference"
    chance = percent(p) if p >= 0.001 else "0.1 %" if p >= 1e-4 else "0.01 %"
    return (
        f"p {probability(p)}: if there were no difference, so much would speak against it at any"
        f" look with a chance of {chance} at most"
    )


def unblocking(experiment: Experiment) -> list[str]:
    """What to do where a report is blocked."""
    name = experiment.name
    return [
        "Find out what loses or adds units of one arm: crashes or timeouts of its requests, clients"
        " that try again or give up, labels or eligibility that depend on the arm, a program that"
        " deals units by itself.",
        "If it is a fault, no figure of this experiment can be trusted: stop it, mend it, and start"
        " a new one under another name.",
        "If you know the cause and know that it is harmless, say so: epikv experiment show"
        f' {name} -o {name}.textproto; put sample_ratio_explanation: "..." into it; epikv'
        f" experiment update {name}.textproto. Reports then show the reason, and the comparisons.",
    ]


@dataclass(frozen=True)
class Attrition:
    """Of one metric: of each arm's requests, which share has an observation."""

    metric: str
    is_measured: bool  # by the server
    shares: dict[str, float]  # by arm
    is_uneven: bool  # by more than chance explains

    @property
    def sentence(self) -> str:
        told = ", ".join(f"{percent(share)} in {arm}" for arm, share in self.shares.items())
        return f"the share of requests of which {self.metric} is known differs: {told}"


def attrition(report: ExperimentReport) -> list[Attrition]:
    """Of metrics that not all requests have; replays are of a sample anyway."""
    seen = {arm.arm: arm.units for arm in report.arms}
    found = []
    for metric in report.metrics:
        if metric.metric.name.startswith(SHADOW):
            continue
        shares = {value.arm: value.coverage for value in metric.all.arms if seen.get(value.arm)}
        if all(share == 1 for share in shares.values()):
            continue
        uneven = _is_uneven([(share, seen[arm]) for arm, share in shares.items()])
        found.append(Attrition(metric.metric.name, metric.measured, shares, uneven))
    return found


def _is_uneven(shares: Sequence[tuple[float, int]]) -> bool:
    """Each with the units it is of, taken as the trials: requests of a unit resemble each other."""
    for low, low_units in shares:
        for high, high_units in shares:
            error = sqrt(low * (1 - low) / low_units + high * (1 - high) / high_units)
            if high - low > _ATTRITION_ERRORS * error:
                return True
    return False


def left_out(report: ExperimentReport) -> list[tuple[str, str, int]]:
    """Name, meaning, and how many requests."""
    crossed = "of units seen in two arms"
    found = [
        ("forced_requests", "forced into an arm", report.forced_requests),
        ("other_version_requests", "of earlier bucket versions", report.other_version_requests),
    ]
    if is_switchback(report):
        found.append(("washed_out_requests", "in a wash-out", report.washed_out_requests))
        crossed = "under another arm than their window's"
    return [*found, ("crossed_requests", crossed, report.crossed_requests)]


def units_share(arm: ArmReport, arms: Iterable[ArmReport]) -> str:
    total = sum(each.units for each in arms)
    return percent(arm.units / total) if total else ""


_TURNING = {*range(0x202A, 0x202F), *range(0x2066, 0x206A)}  # the direction of what follows


def plain(text: str) -> str:
    """In one line, without what could move a terminal's cursor or turn the text that follows."""
    return printable(" ".join(text.split()))


def printable(line: str) -> str:
    return "".join(
        letter if letter.isprintable() and ord(letter) not in _TURNING else f"\\u{ord(letter):04x}"
        for letter in line
    )

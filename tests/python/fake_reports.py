"""Reports of experiments as the daemon would give them: made up, and of one piece as true ones are.

report("clear")   a finished experiment with an effect; for the others see KINDS
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import erf, exp, inf, log, sqrt
from random import Random

from epikv.v1.experiment_pb2 import (
    BASIS_ASYMPTOTIC,
    BASIS_EXACT,
    BASIS_TOO_EARLY,
    Analysis,
    Arm,
    ArmPoint,
    ArmReport,
    ArmValue,
    Distribution,
    Effect,
    EffectPoint,
    Experiment,
    ExperimentReport,
    Guardrail,
    GuardrailReport,
    Metric,
    MetricReport,
    SampleRatio,
)
from google.protobuf.timestamp_pb2 import Timestamp

START = 1_935_489_600  # 2031-05-02 12:00 UTC
HOUR = 3600
ALPHA = 0.05
LEAST_UNITS = 100  # below it is too early, as the daemon has it
SHARES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.99)

MEAN, PROPORTION = Metric.KIND_MEAN, Metric.KIND_PROPORTION
HIGHER, LOWER = Metric.DIRECTION_HIGHER_IS_BETTER, Metric.DIRECTION_LOWER_IS_BETTER
NEITHER = Metric.DIRECTION_UNSPECIFIED


@dataclass(frozen=True)
class Truth:
    """Of one metric."""

    name: str
    mean: float  # of the control
    changes: tuple[float, ...]  # what each other arm adds, in everyone
    sd: float = 0  # of units; 0: of a proportion
    direction: int = HIGHER
    measured: bool = False
    confounded: bool = False
    coverage: tuple[float, ...] = (1.0,)  # of each arm; the last for those that follow

    @property
    def kind(self) -> int:
        return MEAN if self.sd else PROPORTION

    def arm_mean(self, arm: int) -> float:
        return self.mean + (self.changes[min(arm, len(self.changes)) - 1] if arm else 0)

    def deviation(self, arm: int) -> float:
        mean = self.arm_mean(arm)
        return self.sd or sqrt(max(mean * (1 - mean), 1e-6))


@dataclass(frozen=True)
class Case:
    """An experiment, and what is true of it."""

    name: str
    hypothesis: str = "Half the cache gives answers that are as often right, and holds less memory."
    arms: tuple[tuple[str, int], ...] = (("full", 500), ("lean", 500))  # weights in permille
    units: int = 12_400
    hours: int = 148
    exposed: float = 0.62  # of the units
    received: tuple[float, ...] | None = None  # shares of units, if not the weights
    primary: Truth = Truth("right", 0.714, (0.031,), coverage=(0.94,))
    declared: tuple[Truth, ...] = (
        Truth("rating", 3.62, (0.04,), sd=1.1, coverage=(0.31, 0.305)),
        Truth("retries", 0.42, (-0.015,), sd=0.9, direction=LOWER, coverage=(0.94,)),
    )
    guardrails: tuple[tuple[str, float], ...] = (("failed", 0.01), ("rating", 0.15))
    shadow: tuple[Truth, ...] = ()
    is_running: bool = False
    stop_reason: str = "end_time"
    failed: tuple[float, ...] = (0.0004,)  # what each other arm adds
    notes: tuple[str, ...] = ()
    labels: dict[str, str] = field(default_factory=lambda: {"tier": "free"})
    window: int = 0  # seconds of a switchback's; 0: it is none
    seed: int = 7


def measured(case: Case) -> list[Truth]:
    """What the daemon measures itself; the lean arms drop half of what they have."""
    shared = not case.window
    truths = [
        Truth("completed", 0.962, (-0.001,), measured=True),
        Truth("failed", 0.006, case.failed, direction=LOWER, measured=True),
        Truth("cancelled", 0.021, (0.0006,), direction=LOWER, measured=True),
        Truth("deadline_missed", 0.011, (-0.0005,), direction=LOWER, measured=True),
        Truth("output_tokens", 412, (9,), sd=260, direction=NEITHER, measured=True),
        Truth("kv_peak_tokens", 1630, (-695,), sd=720, direction=LOWER, measured=True),
        Truth("kv_evicted_tokens", 0, (640,), sd=410, direction=NEITHER, measured=True),
        *(
            Truth(f"{name}_seconds", mean, (change,), sd, LOWER, True, shared)
            for name, mean, change, sd in (
                ("queue", 0.082, -0.004, 0.13),
                ("ttft", 0.391, -0.011, 0.31),
                ("time_per_output_token", 0.0312, -0.0009, 0.011),
                ("request", 12.9, -0.31, 9.4),
            )
        ),
    ]
    output = Truth("output_tokens_per_second", 812, (61,), sd=190, measured=True)
    return truths if shared else [*truths, output]


CASES = {
    "clear": Case("half-cache"),
    "early": Case("half-cache", units=130, hours=5, is_running=True, seed=3),
    "blocked": Case("half-cache", received=(0.53, 0.47), is_running=True, units=9_000, hours=70),
    "breached": Case(
        "quarter-cache",
        failed=(0.031,),
        primary=Truth("right", 0.714, (-0.012,), coverage=(0.94, 0.86)),
        stop_reason="guardrail/failed/lean",
        units=5_800,
        hours=51,
        notes=(
            "right: arms differ in attrition, full has an outcome of 94.0 % of its requests and"
            " lean of 86.0 %",
        ),
    ),
    "three_arms": Case(
        "which-policy",
        arms=(("full", 400), ("sliding-half", 300), ("epikv-half", 300)),
        primary=Truth("right", 0.714, (-0.058, 0.002), coverage=(0.94,)),
        declared=(Truth("rating", 3.62, (-0.11, 0.01), sd=1.1, coverage=(0.31,)),),
        guardrails=(("right", 0.1), ("failed", 0.01), ("rating", 0.15)),
        failed=(0.0004, 0.0002),
        units=21_000,
        is_running=True,
    ),
    "shadow": Case(
        "half-cache",
        shadow=(
            Truth("shadow_kl_nats", 0.021, (0.046,), 0.05, LOWER, measured=True, coverage=(0.02,)),
            Truth("shadow_top1_agreement", 0.982, (-0.021,), 0.03, measured=True, coverage=(0.02,)),
        ),
    ),
    "switchback": Case("half-cache", units=1_776, labels={}, window=300, is_running=True),
    "unexposed": Case("half-cache", exposed=0, is_running=True, units=2_600, hours=30),
    "unbounded": Case("half-cache", units=600, hours=12, is_running=True),
    "lift_outside": Case(
        "half-cache",
        primary=Truth("saved", 0.4, (11.0,), sd=95),
        units=4_000,
        is_running=True,
    ),
    "hostile": Case(
        "half-cache",
        hypothesis='<script>alert("hypothesis")</script> "quoted" \'so\' & '
        + "longword" * 40
        + " \u05e2\u05d1\u05e8\u05d9\u05ea \u202eoverride \x1b[31mred\x07 </style></title>-->",
        stop_reason="<img src=http://example.invalid/x.png onerror=alert(1)>\n" + "w" * 300,
        notes=(
            '<b>note</b> &amp; \u0645\u0644\u0627\u062d\u0638\u0629 "><svg onload=alert(2)>',
            "x" * 500,
        ),
        labels={"tier": '"><script src="//example.invalid/y.js"></script>'},
    ),
}
KINDS = tuple(CASES)


def report(kind: str, points: int = 0) -> ExperimentReport:
    """points: of each series; 0: 50."""
    made = _report(CASES[kind], points or 50)
    if kind == "blocked":
        made.blocked = (
            "units are not split as the weights say: 4774 and 4226 instead of 4500 each (p < 0.001)"
        )
        made.sample_ratio.alarm = True
        for metric in made.metrics:
            for analysis in (metric.all, metric.exposed):
                del analysis.effects[:]
    if kind == "unbounded":
        _unbind(made)
    if kind == "hostile":
        made.experiment.sample_ratio_explanation = '<script>alert("why")</script> \u202eyhw'
    return made


def _unbind(made: ExperimentReport) -> None:
    """One bound of some, neither of others."""
    for analysis in (made.metrics[0].all, made.metrics[0].exposed):
        for effect in analysis.effects:
            effect.lift_interval.Clear()
            for interval in (effect.interval, *(point.interval for point in effect.points)):
                interval.ClearField("upper")
    for guardrail in made.guardrails:
        guardrail.interval.ClearField("lower")
    for effect in made.metrics[1].all.effects:
        effect.interval.Clear()
        effect.lift_interval.ClearField("lower")


def time_of(seconds: float) -> Timestamp:
    return Timestamp(seconds=START + round(seconds))


def _report(case: Case, points: int) -> ExperimentReport:
    random = Random(case.seed)
    truths = [case.primary, *case.declared, *case.shadow, *measured(case)]
    units = _units(case, random)
    exposed = [round(case.exposed * n) for n in units]
    made = ExperimentReport(
        experiment=_definition(case),
        as_of=time_of(case.hours * HOUR),
        sample_ratio=_sample_ratio(units, case),
        exposed_sample_ratio=_sample_ratio(exposed, case),
        forced_requests=12,
        other_version_requests=0,
        crossed_requests=3,
        washed_out_requests=880 if case.window else 0,
        notes=case.notes,
    )
    for arm, (name, weight) in enumerate(case.arms):
        made.arms.append(
            ArmReport(
                arm=name,
                control=arm == 0,
                weight_permille=weight,
                requests=5 * units[arm],
                units=units[arm],
                exposed_requests=round(4.1 * exposed[arm]),
                exposed_units=exposed[arm],
                running_requests=4 + arm if case.is_running else 0,
                distributions=[
                    _distribution(t, arm, 5 * units[arm]) for t in truths if t.measured and t.sd
                ],
                points=_arm_points(case, units, arm, points, random),
            )
        )
    for truth in truths:
        made.metrics.append(_metric(case, truth, units, exposed, points, random))
    for metric, margin in case.guardrails:
        place = next(i for i, truth in enumerate(truths) if truth.name == metric)
        all_units = made.metrics[place].all
        for arm in range(1, len(case.arms)):
            made.guardrails.append(_guardrail(truths[place], all_units, arm, margin))
    return made


def _definition(case: Case) -> Experiment:
    made = Experiment(
        name=case.name,
        state=Experiment.STATE_RUNNING if case.is_running else Experiment.STATE_STOPPED,
        hypothesis=case.hypothesis,
        layer="default",
        traffic_permille=200,
        salt=case.name,
        bucket_version=1,
        metrics=[
            Metric(name=t.name, kind=t.kind, direction=t.direction)
            for t in (case.primary, *case.declared)
        ],
        primary_metric=case.primary.name,
        guardrails=[Guardrail(metric=m, margin=margin) for m, margin in case.guardrails],
        alpha=ALPHA,
        create_time=time_of(-HOUR),
        start_time=time_of(0),
        etag="7",
    )
    for arm, (name, weight) in enumerate(case.arms):
        kv = {"policy": "sliding" if arm == 1 else "epikv_flat", "keep_ratio": 0.5} if arm else {}
        made.arms.append(Arm(name=name, weight_permille=weight, control=arm == 0, kv=kv))
    if case.window:
        made.traffic_permille = 1000
        made.switchback.window.seconds, made.switchback.wash_out.seconds = case.window, 30
    made.eligibility.model = "llama"
    made.eligibility.labels.update(case.labels)
    made.outcome_window.seconds = 24 * HOUR
    if not case.is_running:
        made.stop_time.CopyFrom(time_of(case.hours * HOUR))
        made.stop_reason = case.stop_reason
    return made


def _units(case: Case, random: Random) -> list[int]:
    if case.received:
        return [round(share * case.units) for share in case.received]
    shares = [weight / 1000 for _, weight in case.arms]
    noise = [random.gauss(0, 0.4) * sqrt(case.units * s * (1 - s)) for s in shares]
    return [round(case.units * s + e) for s, e in zip(shares, noise, strict=True)]


def _sample_ratio(units: Sequence[int], case: Case) -> SampleRatio:
    """Of two or three arms."""
    total = sum(units)
    if total == 0:
        return SampleRatio(p_value=1)
    expected = [total * weight / 1000 for _, weight in case.arms]
    statistic = sum((n - e) ** 2 / e for n, e in zip(units, expected, strict=True))
    p = exp(-statistic / 2) if len(units) == 3 else 1 - erf(sqrt(statistic / 2))
    return SampleRatio(statistic=statistic, p_value=p, alarm=p < 0.001)


def _arm_points(
    case: Case, units: Sequence[int], arm: int, points: int, random: Random
) -> list[ArmPoint]:
    walk = [0.0]
    for _ in range(points):
        walk.append(walk[-1] + random.gauss(0, 1))
    weight = case.arms[arm][1] / 1000
    size = sqrt(sum(units) * weight * (1 - weight) / points)
    made = []
    for i in range(1, points + 1):
        share = i / points
        count = round(units[arm] * share + 0.5 * size * (walk[i] - share * walk[-1]))
        made.append(
            ArmPoint(
                time=time_of(share * case.hours * HOUR),
                units=max(count, 0),
                exposed_units=max(round(case.exposed * count), 0),
            )
        )
    return made


def _metric(
    case: Case,
    truth: Truth,
    units: Sequence[int],
    exposed: Sequence[int],
    points: int,
    random: Random,
) -> MetricReport:
    is_primary = truth is case.primary
    alpha = ALPHA / (len(case.arms) - 1) if is_primary else ALPHA
    made = MetricReport(
        metric=Metric(name=truth.name, kind=truth.kind, direction=truth.direction),
        primary=is_primary,
        measured=truth.measured,
        confounded=truth.confounded,
        alpha=alpha,
    )
    analyses = (
        (made.all, units, 1.0),
        (made.exposed, exposed, 1 / case.exposed if case.exposed else 0),
    )
    for analysis, counts, gain in analyses:
        _analysis(case, truth, alpha, counts, gain, points, random, analysis)
    return made


def _analysis(
    case: Case,
    truth: Truth,
    alpha: float,
    units: Sequence[int],
    gain: float,
    points: int,
    random: Random,
    made: Analysis,
) -> None:
    seen = []  # units with an observation
    for arm, (name, _) in enumerate(case.arms):
        coverage = truth.coverage[min(arm, len(truth.coverage) - 1)]
        counted = (
            round(units[arm] * min(1, 3 * coverage)) if truth.coverage != (1.0,) else units[arm]
        )
        seen.append(counted)
        value = ArmValue(arm=name, units=counted, observations=round(5 * units[arm] * coverage))
        value.coverage = coverage if counted else 0
        value.basis = BASIS_TOO_EARLY
        if counted:
            error = truth.deviation(arm) / sqrt(counted)
            value.mean = truth.arm_mean(0) + (truth.arm_mean(arm) - truth.mean) * gain
            noise = random.gauss(0, 0.5) * error
            value.mean += noise if value.mean else 0
            if truth.kind == PROPORTION:
                value.mean = min(1, max(0, value.mean))
            if counted >= LEAST_UNITS:
                value.basis = BASIS_ASYMPTOTIC
                half = bound(truth.deviation(arm), error, alpha) if value.mean else 0
                value.interval.lower, value.interval.upper = value.mean - half, value.mean + half
                if truth.kind == PROPORTION:
                    value.basis = BASIS_EXACT if truth.mean * counted < 50 else BASIS_ASYMPTOTIC
                    value.interval.lower = max(0, value.interval.lower)
                    value.interval.upper = min(1, value.interval.upper)
        made.arms.append(value)
    if not all(seen):
        return
    for arm in range(1, len(case.arms)):
        made.effects.append(_effect(case, truth, alpha, seen, made, arm, points, random))


def _effect(
    case: Case,
    truth: Truth,
    alpha: float,
    seen: Sequence[int],
    analysis: Analysis,
    arm: int,
    points: int,
    random: Random,
) -> Effect:
    sd = truth.deviation(arm)
    final = sd * sqrt(1 / seen[0] + 1 / seen[arm])
    control, treatment = analysis.arms[0].mean, analysis.arms[arm].mean
    made = Effect(arm=case.arms[arm][0], difference=treatment - control, p_value=1)
    walk = [random.gauss(0, 0.5)]
    for _ in range(points - 1):
        walk.append(walk[-1] + random.gauss(0, 0.5))
    for i in range(1, points + 1):
        # Ends where the difference does.
        drift = (walk[i - 1] - walk[-1] * i / points) / i * final * sqrt(points)
        point = EffectPoint(time=time_of(i / points * case.hours * HOUR))
        point.difference = made.difference + drift
        least = min(seen[0], seen[arm]) * i / points
        if least >= LEAST_UNITS:
            half = bound(sd, final * sqrt(points / i), alpha)
            point.interval.lower = point.difference - half
            point.interval.upper = point.difference + half
        made.points.append(point)
    made.interval.CopyFrom(made.points[-1].interval)
    made.lift = made.difference / control if control else inf
    if not control:
        made.ClearField("lift")
    if not made.interval.HasField("lower"):
        made.basis, made.verdict = BASIS_TOO_EARLY, Effect.VERDICT_TOO_EARLY
        return made
    made.basis = BASIS_ASYMPTOTIC
    spread = (0.1 * sd / final) ** 2
    errors = (made.difference / final) ** 2
    made.p_value = min(1, sqrt(1 + spread) * exp(-errors * spread / (2 * (1 + spread))))
    _lift(made, control, analysis.arms[0])
    higher, lower = made.interval.lower > 0, made.interval.upper < 0
    if not higher and not lower:
        made.verdict = Effect.VERDICT_UNDECIDED
    elif truth.direction == NEITHER:
        made.verdict = Effect.VERDICT_DIFFERS
    elif higher == (truth.direction == HIGHER):
        made.verdict = Effect.VERDICT_BETTER
    else:
        made.verdict = Effect.VERDICT_WORSE
    return made


def _lift(made: Effect, control: float, value: ArmValue) -> None:
    """Roughly: the difference's by the control's mean."""
    if value.interval.lower <= 0 <= value.interval.upper:
        # The control's mean may be 0; what is excluded lies around the estimate's other side.
        if made.interval.lower > 0 or made.interval.upper < 0:
            made.lift_is_outside = True
            made.lift_interval.lower, made.lift_interval.upper = -4.6, 1.9
        return
    made.lift_interval.lower = made.interval.lower / control
    made.lift_interval.upper = made.interval.upper / control


def bound(sd: float, error: float, alpha: float) -> float:
    """Half of an asymptotic confidence sequence's width, its tau a tenth of the deviation."""
    spread = (0.1 * sd / error) ** 2
    return error * sqrt((1 + 1 / spread) * log((1 + spread) / alpha**2))


def _guardrail(truth: Truth, analysis: Analysis, arm: int, margin: float) -> GuardrailReport:
    """At ALPHA, whatever the metric's own is."""
    control, treated = analysis.arms[0], analysis.arms[arm]
    made = GuardrailReport(
        guardrail=Guardrail(metric=truth.name, margin=margin),
        arm=treated.arm,
        verdict=GuardrailReport.VERDICT_TOO_EARLY,
    )
    if not control.units or not treated.units:
        return made
    made.difference = treated.mean - control.mean
    if min(control.units, treated.units) < LEAST_UNITS:
        return made
    sd = truth.deviation(arm)
    half = bound(sd, sd * sqrt(1 / control.units + 1 / treated.units), ALPHA)
    made.interval.lower, made.interval.upper = made.difference - half, made.difference + half
    low, high = made.interval.lower, made.interval.upper
    if truth.direction == HIGHER:
        low, high = -high, -low
    made.verdict = (
        GuardrailReport.VERDICT_BREACHED
        if low > margin
        else GuardrailReport.VERDICT_SAFE
        if high <= margin
        else GuardrailReport.VERDICT_UNDECIDED
    )
    return made


def _distribution(truth: Truth, arm: int, count: int) -> Distribution:
    """Log-normal; of what the control never has, all at 0."""
    made = Distribution(metric=truth.name, count=count)
    mean = truth.arm_mean(arm)
    made.bounds.extend([0.0] + [_first(truth) * 2 ** (i / 4) for i in range(48)])
    if mean <= 0:
        made.quantiles.extend([0.0] * len(SHARES))
        made.counts.extend([count] + [0] * len(made.bounds))
        return made
    variance = log(1 + (truth.sd / mean) ** 2)
    centre, spread = log(mean) - variance / 2, sqrt(variance)
    made.quantiles.extend(exp(centre + spread * _normal_quantile(share)) for share in SHARES)
    below = [0] + [round(count * _normal_cdf((log(b) - centre) / spread)) for b in made.bounds[1:]]
    made.counts.extend(high - low for low, high in zip([0, *below], [*below, count], strict=True))
    return made


def _first(truth: Truth) -> float:
    return max(truth.arm_mean(0), truth.arm_mean(1)) / 2**8


def _normal_cdf(x: float) -> float:
    return (1 + erf(x / sqrt(2))) / 2


def _normal_quantile(share: float) -> float:
    low, high = -6.0, 6.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if _normal_cdf(middle) < share else (low, middle)
    return low

"""Figures of an experiment's report as people read them: with units, no more digits than hold."""

from collections.abc import Callable
from dataclasses import dataclass
from math import floor, isfinite, log10

from epikv.v1.experiment_pb2 import Effect, Interval, Metric, MetricReport

_UNITS = (("tokens", "tokens"), ("tokens_per_second", "tokens/s"), ("nats", "nats"))  # by ending
POINTS = "points"  # how percentage points are called next to a figure


@dataclass(frozen=True)
class Scale:
    """How figures of one metric are written."""

    factor: float  # a figure is written times this
    unit: str
    unit_of_difference: str
    decimals: int

    def number(self, value: float, *, sign: bool = False) -> str:
        return number(value * self.factor, self.decimals, sign=sign)

    def value(self, value: float) -> str:
        return with_unit(self.number(value), self.unit)

    def difference(self, value: float, *, sign: bool = True) -> str:
        return with_unit(self.number(value, sign=sign), self.unit_of_difference)

    def interval(self, interval: Interval) -> str:
        """Of values."""
        return _range(interval, self.number, self.unit)

    def difference_interval(self, interval: Interval) -> str:
        return _range(interval, lambda x: self.number(x, sign=True), self.unit_of_difference)

    def differences_are(self) -> str:
        """The unit in full."""
        points = self.unit_of_difference == POINTS
        return "percentage points" if points else self.unit_of_difference


def scale(report: MetricReport) -> Scale:
    """So many decimals that the narrowest interval has two significant digits."""
    metric = report.metric
    analyses = (report.all, report.exposed)
    means = [abs(v.mean) for a in analyses for v in a.arms if v.HasField("mean")]
    if metric.kind == Metric.KIND_PROPORTION:
        factor, unit, step = 100.0, "%", POINTS
    elif metric.name.endswith("_seconds"):
        short = max(means, default=1.0) < 1
        factor, unit = (1e3, "ms") if short else (1.0, "s")
        step = unit
    else:
        factor, step = 1.0, next((u for n, u in _UNITS if metric.name.endswith(n)), "")
        unit = step
    intervals = [v.interval for a in analyses for v in a.arms]
    intervals += [e.interval for a in analyses for e in a.effects]
    widths = [w * factor for i in intervals if (w := _width(i)) is not None and w > 0]
    if widths:
        decimals = 1 - floor(log10(min(widths)))
    elif any(means):
        decimals = 2 - floor(log10(factor * max(means)))
    else:
        decimals = 2
    return Scale(factor, unit, step, min(max(decimals, 0), 6))


def number(value: float, decimals: int, *, sign: bool = False) -> str:
    """What is not 0 is not written as 0."""
    if not isfinite(value):
        return f"{value:+}" if sign else f"{value}"
    text = f"{value:{'+' if sign else ''},.{decimals}f}"
    if float(text.replace(",", "")) != 0:
        return text
    return f"{value:{'+' if sign else ''}.1g}" if value else text.lstrip("+-")


def percent(share: float, decimals: int = 1, *, sign: bool = False) -> str:
    return f"{number(100 * share, decimals, sign=sign)} %"


def count(value: int) -> str:
    return f"{value:,}"


def probability(p: float) -> str:
    return "< 0.0001" if p < 1e-4 else f"{p:.2g}"


def level(alpha: float) -> str:
    """Of an interval."""
    return f"{100 * (1 - alpha):.4g} %"


def lift(effect: Effect) -> str:
    if not effect.HasField("lift"):
        return ""
    return percent(effect.lift, _lift_decimals(effect), sign=True)


def lift_interval(effect: Effect) -> str:
    interval, decimals = effect.lift_interval, _lift_decimals(effect)
    low, high = (percent(x, decimals, sign=True) for x in (interval.lower, interval.upper))
    if effect.lift_is_outside and interval.HasField("lower") and interval.HasField("upper"):
        return f"below {low} or above {high}"
    return _range(interval, lambda x: number(100 * x, decimals, sign=True), "%")


def _lift_decimals(effect: Effect) -> int:
    width = _width(effect.lift_interval)
    return 1 if not width else min(max(1 - floor(log10(100 * width)), 0), 3)


def _width(interval: Interval) -> float | None:
    if not interval.HasField("lower") or not interval.HasField("upper"):
        return None
    width = interval.upper - interval.lower
    return width if isfinite(width) else None


def _range(interval: Interval, write: Callable[[float], str], unit: str) -> str:
    low = write(interval.lower) if interval.HasField("lower") else ""
    high = write(interval.upper) if interval.HasField("upper") else ""
    if low and high:
        return with_unit(f"{low} to {high}", unit)
    if low:
        return with_unit(f"{low}", unit) + " or more"
    return with_unit(f"{high}", unit) + " or less" if high else "no bound yet"


def with_unit(text: str, unit: str) -> str:
    if unit == POINTS and text.lstrip("+-") == "1":
        unit = "point"
    return f"{text} {unit}" if unit else text

"""A report's plots as SVG, in colours that the page's style sheet gives to their classes."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from math import ceil, floor, inf, isfinite, log10, sqrt

from epikv.experiment import figures
from epikv.experiment.figures import Scale
from epikv.experiment.markup import Html, element
from epikv.v1.experiment_pb2 import (
    ArmPoint,
    ArmReport,
    Distribution,
    Effect,
    EffectPoint,
    Interval,
)

Range = tuple[float, float]

_WIDTH = 460
_DIGIT = 6.8  # width of a letter of an axis
# Of a share that chance alone decides, 999 of 1000 are within so many standard errors at one look.
_ERRORS = 3.29


@dataclass(frozen=True)
class _Frame:
    """Where what is drawn lies, in the units of the picture and of the data."""

    x: Range
    y: Range
    height: float
    left: float
    right: float = 12
    top: float = 20
    bottom: float = 24
    width: float = _WIDTH

    def at_x(self, value: float) -> float:
        low, high = self.x
        inner = self.width - self.left - self.right
        return self.left + inner * (value - low) / ((high - low) or 1)

    def at_y(self, value: float) -> float:
        """Limited to what is somewhat beyond the picture's edge, which is clipped."""
        low, high = self.y
        inner = self.height - self.top - self.bottom
        place = (high - value) / ((high - low) or 1)
        return self.top + inner * min(max(place, -1), 2)


def effect(
    name: str,
    points: Sequence[EffectPoint],
    scale: Scale,
    y: Range,
    *,
    arm: int,
    margin: float | None,
    is_higher_better: bool | None,
) -> Html:
    """A difference over time with its confidence sequence. margin: signed, the guardrail's.

    is_higher_better: None if neither higher nor lower is.
    """
    frame, axes = _time_axes(points, y, scale)
    band = [p for p in points if p.interval.HasField("lower") or p.interval.HasField("upper")]
    upper = [
        _pair(frame, p, p.interval.upper if p.interval.HasField("upper") else inf) for p in band
    ]
    lower = [
        _pair(frame, p, p.interval.lower if p.interval.HasField("lower") else -inf) for p in band
    ]
    middle = [_pair(frame, p, p.difference) for p in points if p.HasField("difference")]
    inside = [_across(frame, 0, "zero")]
    if upper:
        inside.append(_path([*upper, *reversed(lower)], f"band arm-{arm}", is_closed=True))
        inside += [_path(edge, f"edge arm-{arm}") for edge in (upper, lower)]
    if middle:
        inside.append(_path(middle, f"line arm-{arm}"))
    if margin is not None:
        inside.append(_across(frame, margin, "margin"))
    above = []
    if is_higher_better is not None:
        ways = ("better", "worse") if is_higher_better else ("worse", "better")
        above.append(_hint(frame, *ways))
    if middle:
        above.append(_dot(*middle[-1], f"dot arm-{arm}"))
    if margin is not None and y[0] < margin < y[1]:
        above.append(_text(frame.left + 4, frame.at_y(margin) - 4, "margin", "start", "margin"))
    return _svg(name, frame, below=axes, inside=inside, above=above)


def _hint(frame: _Frame, up: str, down: str) -> Html:
    right = frame.width - frame.right
    return _text(right, frame.top - 6, f"\u2191 {up} \u00b7 \u2193 {down}", "end", "hint")


def effect_range(effects: Sequence[Sequence[EffectPoint]], margin: float | None) -> Range:
    """What plots of one metric share: 0, the margin, and intervals from when they are narrow."""
    values = [0.0]
    for points in effects:
        for point in points[len(points) * 2 // 5 :]:
            values += [point.difference] if point.HasField("difference") else []
            values += [bound for bound in bounds(point.interval) if bound is not None]
    low, high = min(values), max(values)
    if margin is not None and abs(margin) < 3 * (high - low):
        low, high = min(low, margin), max(high, margin)
    low, high = (low, high) if high > low else (-1.0, 1.0)
    room = 0.08 * (high - low)
    return low - room, high + room


def bounds(interval: Interval) -> tuple[float | None, float | None]:
    low = interval.lower if interval.HasField("lower") and isfinite(interval.lower) else None
    high = interval.upper if interval.HasField("upper") and isfinite(interval.upper) else None
    return low, high


def balance(name: str, arms: Sequence[ArmReport], count: Callable[[ArmPoint], int]) -> Html:
    """Each arm's share of units less its weight, over time, and how far chance moves it.

    count: of an ArmPoint, the units. Precondition: arms have points, at the same times.
    """
    totals = [
        sum(count(p) for p in points) for points in zip(*(a.points for a in arms), strict=False)
    ]
    lines, funnels = [], []
    for arm in arms:
        weight = arm.weight_permille / 1000
        seen = [(p, n, count(p)) for p, n in zip(arm.points, totals, strict=False) if n]
        lines.append([(p, units / n - weight) for p, n, units in seen])
        funnels.append([(p, _ERRORS * sqrt(weight * (1 - weight) / n)) for p, n, _ in seen])
    late = [w for funnel in funnels for _, w in funnel[len(funnel) // 5 :]]
    off = [abs(d) for line in lines for _, d in line[len(line) // 5 :]]
    most = 1.15 * max([*late, *off, 1e-3])
    scale = Scale(100, "%", figures.POINTS, 1)
    frame, axes = _time_axes(arms[0].points, (-most, most), scale)
    inside, above = [], [_hint(frame, "more than its weight", "less")]
    widest = max(funnels, key=lambda funnel: max((w for _, w in funnel), default=0))
    if widest:
        up = [_pair(frame, p, w) for p, w in widest]
        down = [_pair(frame, p, -w) for p, w in widest]
        inside.append(_path([*up, *reversed(down)], "chance", is_closed=True))
    inside.append(_across(frame, 0, "zero"))
    for place, line in enumerate(lines):
        if line:
            found = [_pair(frame, p, d) for p, d in line]
            inside.append(_path(found, f"line arm-{place}"))
            above.append(_dot(*found[-1], f"dot arm-{place}"))
    return _svg(name, frame, below=axes, inside=inside, above=above)


def guardrail(
    name: str, difference: float, interval: Interval, margin: float, *, higher: bool
) -> Html:
    """A difference against its margin, worse always to the right. higher: is better."""
    low, high = bounds(interval)
    if higher:
        difference = -difference
        low, high = (None if b is None else -b for b in (high, low))
    unit = margin or max((abs(b) for b in (low, high) if b is not None), default=1.0) or 1.0
    furthest = max((abs(b) for b in (low, high) if b is not None), default=0)
    reach = min(max(2.2 * unit, 1.1 * furthest), 6 * unit)
    frame = _Frame((-reach, reach), (0, 1), 30, 4, 4, 1, 1, width=240)
    right, zero, limit = (frame.at_x(v) for v in (reach, 0, margin))
    drawn = [
        element("rect", x=_n(limit), y=1, width=_n(right - limit), height=28, class_="beyond"),
        element("line", x1=_n(zero), x2=_n(zero), y1=1, y2=29, class_="zero"),
        element("line", x1=_n(limit), x2=_n(limit), y1=1, y2=29, class_="margin"),
        *_whisker(frame, reach, difference, low, high),
    ]
    return _svg(name, frame, below=drawn)


def interval(name: str, difference: float, around: Interval, reach: float) -> Html:
    """A difference from 0, which is in the middle of [-reach, reach]."""
    frame = _Frame((-reach, reach), (0, 1), 30, 4, 4, 1, 1, width=240)
    zero = frame.at_x(0)
    drawn = [
        element("line", x1=_n(zero), x2=_n(zero), y1=1, y2=29, class_="zero"),
        *_whisker(frame, reach, difference, *bounds(around)),
    ]
    return _svg(name, frame, below=drawn)


def reach(effects: Iterable[Effect]) -> float:
    """Of `interval`, so that most fit; of nothing 1."""
    furthest = [
        max(
            abs(bound)
            for bound in (*bounds(effect.interval), effect.difference)
            if bound is not None
        )
        for effect in effects
        if effect.HasField("difference") and None not in bounds(effect.interval)
    ]
    return 1.05 * min(max(furthest, default=0), 6 * min(furthest, default=0)) or 1.0


def _whisker(
    frame: _Frame, reach: float, difference: float, low: float | None, high: float | None
) -> list[Html]:
    left, right, middle = frame.at_x(-reach), frame.at_x(reach), frame.height / 2
    drawn = []
    if low is not None or high is not None:
        begin = left if low is None else min(max(frame.at_x(low), left), right)
        end = right if high is None else min(max(frame.at_x(high), left), right)
        drawn.append(
            element("line", x1=_n(begin), x2=_n(end), y1=middle, y2=middle, class_="whisker")
        )
    return [*drawn, _dot(min(max(frame.at_x(difference), left), right), middle, "dot")]


@dataclass(frozen=True)
class Bin:
    low: float  # -inf: all up to `high`
    high: float  # inf: all beyond `low`
    counts: tuple[int, ...]  # of each arm


def bins(arms: Sequence[Distribution]) -> list[Bin]:
    """What is drawn: neighbours put together, and nothing where there is nothing.

    Precondition: bounds are the same, and there are some.
    """
    edges = [-inf, *arms[0].bounds, inf]
    fine = [
        Bin(low, high, tuple(counts))
        for low, high, *counts in zip(edges, edges[1:], *(arm.counts for arm in arms), strict=False)
    ]
    held = [i for i, each in enumerate(fine) if any(each.counts)]
    if not held:
        return []
    zero = [fine[0]] if held[0] == 0 else []
    rest = fine[max(held[0], 1) : held[-1] + 1]
    size = max(1, ceil(len(rest) / 40))
    return [*zero, *(_merge(rest[i : i + size]) for i in range(0, len(rest), size))]


def _merge(parts: Sequence[Bin]) -> Bin:
    counts = tuple(sum(column) for column in zip(*(part.counts for part in parts), strict=True))
    return Bin(parts[0].low, parts[-1].high, counts)


def distribution(
    name: str, arms: Sequence[tuple[int, Distribution]], found: Sequence[Bin], unit: str
) -> Html:
    """Shares of requests by value as outlines, each of area 1, and quantiles below.

    arms: with their places among the report's.
    """
    is_log = all(b.high > 0 for b in found[1:]) and any(b.low > 0 for b in found)
    place = (log10) if is_log else (lambda v: v)
    spans = _spans(found, place, is_log)
    height = 190 + 12 * len(arms)
    bottom = 26 + 12 * len(arms)
    densities = []
    for index in range(len(arms)):
        total = sum(b.counts[index] for b in found) or 1
        densities.append(
            [
                b.counts[index] / total / (right - left)
                for b, (left, right) in zip(found, spans, strict=True)
            ]
        )
    top = max((d for row in densities for d in row), default=1) or 1
    frame = _Frame((spans[0][0], spans[-1][1]), (0, 1.05 * top), height, 10, 10, 8, bottom)
    drawn: list[Html] = []
    outside: list[Html] = []
    base = frame.at_y(0)
    for tick, label in _value_ticks(spans, found, unit, is_log):
        x = frame.at_x(tick)
        drawn.append(element("line", x1=_n(x), x2=_n(x), y1=8, y2=_n(base), class_="grid"))
        outside.append(_text(x, height - 8, label, "middle", "tick"))
    for (arm, _), row in zip(arms, densities, strict=True):
        steps: list[tuple[float, float]] = [(frame.at_x(spans[0][0]), base)]
        for density, (left, right) in zip(row, spans, strict=True):
            y = frame.at_y(density)
            if frame.at_x(left) > steps[-1][0] + 1:  # a gap
                steps += [(steps[-1][0], base), (frame.at_x(left), base)]
            steps += [(frame.at_x(left), y), (frame.at_x(right), y)]
        steps.append((frame.at_x(spans[-1][1]), base))
        drawn.append(_path(steps, f"area arm-{arm}", is_closed=True))
        drawn.append(_path(steps, f"line arm-{arm}"))
    drawn.append(element("line", x1=10, x2=_WIDTH - 10, y1=_n(base), y2=_n(base), class_="axis"))
    for line, (arm, each) in enumerate(arms):
        outside += _quantiles(frame, base + 10 + 12 * line, each, arm, place, is_log, spans)
    return _svg(name, frame, below=drawn, above=outside)


def _quantiles(
    frame: _Frame,
    y: float,
    of: Distribution,
    arm: int,
    place: Callable[[float], float],
    is_log: bool,
    spans: Sequence[Range],
) -> Iterator[Html]:
    if len(of.quantiles) < 5:
        return
    low, high = spans[0][0], spans[-1][1]

    def at(value: float) -> float:
        where = low if is_log and value <= 0 else place(value)
        return frame.at_x(min(max(where, low), high))

    q = [at(value) for value in of.quantiles]
    yield element("line", x1=_n(q[0]), x2=_n(q[4]), y1=_n(y), y2=_n(y), class_=f"thin arm-{arm}")
    yield element("line", x1=_n(q[1]), x2=_n(q[3]), y1=_n(y), y2=_n(y), class_=f"thick arm-{arm}")
    yield _dot(q[2], y, f"dot arm-{arm}")


def _spans(found: Sequence[Bin], place: Callable[[float], float], is_log: bool) -> list[Range]:
    """Where each is drawn; what has no bound, or cannot have one, is as wide as its neighbour."""
    spans: list[Range | None] = []
    for each in found:
        bounded = isfinite(each.low) and isfinite(each.high) and (each.low > 0 or not is_log)
        spans.append((place(each.low), place(each.high)) if bounded else None)
    widths = [right - left for span in spans if span for left, right in [span]]
    width = min(widths) if widths else 1.0
    for i, each in enumerate(found):
        if spans[i] is not None:
            continue
        following = next((s for s in spans[i + 1 :] if s), None)
        if each.high < inf and each.high > (0 if is_log else -inf):
            spans[i] = (place(each.high) - width, place(each.high))
        elif following is not None:
            gap = width if each.high <= 0 and is_log else 0  # 0 has no place: apart
            first = following[0] - width - gap
            spans[i] = (first - width, first) if gap else (first, following[0])
        elif i and (before := spans[i - 1]) is not None:
            spans[i] = (before[1], before[1] + width)
        else:
            spans[i] = (0.0, width)
    return [span or (0.0, width) for span in spans]


def _value_ticks(
    spans: Sequence[Range], found: Sequence[Bin], unit: str, is_log: bool
) -> Iterator[tuple[float, str]]:
    low, high = spans[0][0], spans[-1][1]
    if not is_log:
        for tick in _ticks(low, high, 5):
            yield tick, with_measure(tick, unit)
        return
    if found[0].high <= 0:
        yield sum(spans[0]) / 2, "0"
        low = spans[1][0] if len(spans) > 1 else high
    decades = range(floor(low), ceil(high) + 1)
    steps = (1, 2, 5) if high - low < 2.2 else (1,)
    keep = max(1, ceil((high - low) / 7))
    for k in decades:
        for step in steps:
            where = k + log10(step)
            if low <= where <= high and k % keep == 0:
                yield where, with_measure(step * 10.0**k, unit)


def with_measure(value: float, unit: str) -> str:
    """Of an axis of values of any size."""
    if unit == "s":
        return f"{value * 1e3:,.4g} ms" if abs(value) < 1 and value else f"{value:,.4g} s"
    return f"{value:,.6g}"


def _time_axes(
    points: Sequence[ArmPoint | EffectPoint], y: Range, scale: Scale
) -> tuple[_Frame, list[Html]]:
    times = [seconds(p) for p in points]
    ticks = _ticks(*y, 5)
    told = _labels(ticks, scale)
    left = 10 + _DIGIT * max((len(label) for label in told), default=1)
    frame = _Frame((min(times), max(times)), y, 220, left)
    drawn = []
    for tick, label in zip(ticks, told, strict=True):
        place = frame.at_y(tick)
        drawn.append(
            element(
                "line",
                x1=_n(left),
                x2=_WIDTH - frame.right,
                y1=_n(place),
                y2=_n(place),
                class_="grid",
            )
        )
        drawn.append(_text(left - 6, place + 4, label, "end", "tick"))
    for at, label in _time_ticks(*frame.x):
        place = frame.at_x(at)
        if place > _WIDTH - frame.right - 12:
            continue
        base = frame.height - frame.bottom
        drawn.append(
            element("line", x1=_n(place), x2=_n(place), y1=_n(base), y2=_n(base + 4), class_="axis")
        )
        drawn.append(_text(place, frame.height - 6, label, "middle", "tick"))
    return frame, drawn


def _labels(ticks: Sequence[float], scale: Scale) -> list[str]:
    step = abs(ticks[1] - ticks[0]) * scale.factor if len(ticks) > 1 else 1
    decimals = min(max(-floor(log10(step) + 1e-9), 0), 6) if step else 0
    unit = "" if len(scale.unit_of_difference) > 3 else scale.unit_of_difference
    texts = [figures.number(t * scale.factor, decimals, sign=True) for t in ticks]
    return [minus(f"{text} {unit}".strip()) for text in texts]


def minus(text: str) -> str:
    """Of figures, as printed."""
    return re.sub(r"(?<!\w)-(?=[\d.])", "\u2212", text)


def _ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers."""
    if not high > low:
        return [low]
    raw = (high - low) / about
    size = 10.0 ** floor(log10(raw))
    step = size * next(m for m in (1, 2, 5, 10) if m * size >= raw * 0.999)
    first = ceil(low / step - 1e-9)
    found = []
    while (first * step) <= high + 1e-9 * step:
        found.append(first * step if first else 0.0)
        first += 1
    return found


_TIME_STEPS = (60, 300, 900, 1800, 3600, 10800, 21600, 43200, 86400, 172800, 604800, 1209600)


def _time_ticks(low: float, high: float) -> Iterator[tuple[float, str]]:
    span = max(high - low, 1)
    step = next((s for s in _TIME_STEPS if span / s <= 5), 30 * 86400 * ceil(span / 30 / 86400 / 5))
    at = ceil(low / step) * step
    while at <= high:
        when = datetime.fromtimestamp(at, UTC)
        midnight = at % 86400 == 0
        yield at, f"{when.day} {when:%b}" if step >= 86400 or midnight else f"{when:%H:%M}"
        at += step


def seconds(point: ArmPoint | EffectPoint) -> float:
    """Since 1970."""
    return point.time.seconds + point.time.nanos / 1e9


def _pair(frame: _Frame, point: ArmPoint | EffectPoint, value: float) -> tuple[float, float]:
    return frame.at_x(seconds(point)), frame.at_y(value)


def _path(places: Sequence[tuple[float, float]], look: str, *, is_closed: bool = False) -> Html:
    told = "L".join(f"{_n(x)} {_n(y)}" for x, y in places)
    return element("path", d=f"M{told}{'Z' if is_closed else ''}", class_=look)


def _across(frame: _Frame, value: float, look: str) -> Html:
    y = _n(frame.at_y(value))
    return element("line", x1=_n(frame.left), x2=_WIDTH - frame.right, y1=y, y2=y, class_=look)


def _dot(x: float, y: float, look: str) -> Html:
    return element("circle", cx=_n(x), cy=_n(y), r=3.2, class_=look)


def _text(x: float, y: float, text: str, anchor: str, look: str) -> Html:
    return element("text", text, x=_n(x), y=_n(y), text_anchor=anchor, class_=look)


def _svg(
    name: str,
    frame: _Frame,
    *,
    below: Sequence[Html] = (),
    inside: Sequence[Html] = (),
    above: Sequence[Html] = (),
) -> Html:
    """name: what a reader who does not see it is told. inside: cut off at the frame."""
    width = _n(frame.width - frame.left - frame.right)
    height = _n(frame.height - frame.top - frame.bottom)
    left, top = _n(frame.left), _n(frame.top)
    box = f"{left} {top} {width} {height}"
    cut = element("svg", *inside, x=left, y=top, width=width, height=height, viewBox=box)
    return element(
        "svg",
        element("title", name),
        *below,
        cut,
        *above,
        viewBox=f"0 0 {_n(frame.width)} {_n(frame.height)}",
        role="img",
        class_="plot",
    )


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")

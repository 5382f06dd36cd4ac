"""What the samples of interleaved rounds amount to: medians, spreads, paired ratios, targets."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from epikv.stats import Estimate, bootstrap

from epikv_lab.bench.peers.cells import BUDGET, BYTES, Cell
from epikv_lab.bench.peers.engines import Arm
from epikv_lab.bench.peers.rounds import Results
from epikv_lab.bench.targets import Target

Key = tuple[str, str]  # cell and arm
Stated = tuple[str, Key, Key, float, bool]  # name, ours, the other, bound, whether at least that


def values(results: Results, threads: int, key: Key) -> dict[int, float]:
    """By round."""
    return {
        sample.round: sample.value
        for sample in results.samples
        if (sample.threads, sample.cell, sample.arm) == (threads, *key)
    }


def paired(results: Results, threads: int, ours: Key, other: Key) -> Estimate | None:
    """The ratio of the first to the second in the same round; None: no round has both."""
    above, below = (values(results, threads, key) for key in (ours, other))
    ratios = [above[number] / below[number] for number in above if number in below]
    return bootstrap(ratios) if ratios else None


def best_peer(
    results: Results, threads: int, cell: str, arms: Sequence[Arm], precision: str
) -> str | None:
    """Of those at that precision that keep all tokens, the fastest in the median; where the figure is
    memory, the smallest."""
    measured = {
        arm.name: median(found)
        for arm in arms
        if (arm.kind, arm.precision, arm.budget) == ("peer", precision, None)
        and (found := values(results, threads, (cell, arm.name)).values())
    }
    if not measured:
        return None
    return (min if cell == "memory" else max)(measured, key=measured.__getitem__)


def fastest_linears(
    results: Results, threads: int, cell: str, arms: Sequence[Arm], precision: str
) -> str | None:
    """Of the bounds that are linears alone at that precision, that of the most in the median."""
    measured = {
        arm.name: median(found)
        for arm in arms
        if (arm.kind, arm.precision) == ("linears", precision)
        and (found := values(results, threads, (cell, arm.name)).values())
    }
    return max(measured, key=measured.__getitem__) if measured else None


def table(
    results: Results, cells: Sequence[Cell], arms: Sequence[Arm], threads: Sequence[int]
) -> str:
    """Markdown, a section for each cell and number of threads."""
    lines = []
    for cell in cells:
        for count in threads:
            told = "MB" if cell.unit == BYTES else cell.unit
            lines += [
                f"**{cell.name}, {count} thread{'s' * (count > 1)}**",
                "",
                f"| | {told}, median | least .. most | n | ours over it |",
                "|---|---|---|---|---|",
                *(_row(results, cell, count, arm, arms) for arm in arms if arm.takes_part(cell)),
                "",
            ]
    return "\n".join(lines)


def _row(results: Results, cell: Cell, threads: int, arm: Arm, arms: Sequence[Arm]) -> str:
    found = [*values(results, threads, (cell.name, arm.name)).values()]
    if not found:
        why = results.refused.get((threads, cell.name, arm.name))
        told = f"refused: {why.replace('|', '/')}" if why else "not measured"
        return f"| {arm.name} | {told} | | | |"
    scale = 1e-6 if cell.unit == BYTES else 1
    middle, low, high = (scale * of(found) for of in (median, min, max))
    own = next((a for a in arms if a.kind == "ours" and a.precision == arm.precision), None)
    ratio = None
    if own is not None and own is not arm:
        ratio = paired(results, threads, (cell.name, own.name), (cell.name, arm.name))
    shown = f"{ratio.value:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]" if ratio else ""
    return f"| {arm.name} | {middle:.4g} | {low:.4g} .. {high:.4g} | {len(found)} | {shown} |"


def targets(
    results: Results,
    shape: str,
    arms: Sequence[Arm],
    threads: Sequence[int],
) -> list[Target]:
    """Those of which both sides were measured."""
    found = [
        Target(f"wrong_tokens({arm.name})", Estimate.exact(results.agreed[arm.name].wrong), 0)
        for arm in arms
        if arm.precision == "fp32" and arm.name in results.agreed
    ]
    for count in threads:
        for name, ours, other, bound, at_least in _stated(results, shape, count, arms):
            estimate = paired(results, count, ours, other)
            if estimate is not None:
                name = f"{name}({other[1]}, {count} threads)"
                found.append(Target(name, estimate, bound, at_least))
        if shape != "small":
            found += _memory(results, count, arms)
    return found


def limits(
    results: Results, shape: str, arms: Sequence[Arm], threads: Sequence[int]
) -> Iterator[str]:
    """What bounds allow of the ratios that targets are about, where they were measured beside: the
    lowest bound's own ratio to the other side."""
    of = {arm.name: arm for arm in arms}
    for count in threads:
        for name, ours, other, _, _ in _stated(results, shape, count, arms):
            if ours[1] not in of or other[1] not in of or of[other[1]].is_bound:
                continue
            allowed = {
                bound: ratio
                for bound in _bounds(results, count, arms, ours)
                if (ratio := paired(results, count, (ours[0], bound), other))
            }
            if allowed:
                lowest = min(allowed, key=lambda bound: allowed[bound].value)
                ratio = allowed[lowest]
                yield (
                    f"{name}({other[1]}, {count} threads): {lowest} allows"
                    f" {ratio.value:.3g} [{ratio.low:.3g}, {ratio.high:.3g}]"
                )


def _bounds(results: Results, threads: int, arms: Sequence[Arm], ours: Key) -> Iterator[str]:
    """Arms that bound one of ours in its cell: linears, and reading memory."""
    cell, name = ours
    own = next(arm for arm in arms if arm.name == name)
    if linears := fastest_linears(results, threads, cell, arms, own.precision):
        yield linears
    reading = ("memory", own.precision, own.budget)
    yield from (arm.name for arm in arms if (arm.kind, arm.precision, arm.budget) == reading)


def details(results: Results) -> dict[str, Any]:
    """Everything, for JSON."""
    return {
        "settings": results.settings,
        "agreement": {name: asdict(each) for name, each in results.agreed.items()},
        "idle_share_of_core": results.idle,
        "refused": [
            {"threads": threads, "cell": cell, "arm": arm, "why": why}
            for (threads, cell, arm), why in results.refused.items()
        ],
        "held_bytes": [
            {"threads": threads, "arm": arm, "bytes": held}
            for (threads, arm), held in results.held.items()
        ],
        "samples": [asdict(sample) for sample in results.samples],
    }


def _stated(results: Results, shape: str, threads: int, arms: Sequence[Arm]) -> Iterator[Stated]:
    return _of_small() if shape == "small" else _of_large(results, threads, arms)


def _of_small() -> Iterator[Stated]:
    cell = "streams16"
    yield "streams16_over", (cell, "epikv bf16"), (cell, "OpenVINO GenAI bf16"), 1, True


def _of_large(results: Results, threads: int, arms: Sequence[Arm]) -> Iterator[Stated]:
    over_best = {
        ("decode1", "bf16"): 1,
        ("decode1", "fp32"): 1,
        ("streams16", "bf16"): 1.7,
        ("streams16", "int8"): 1.3,
        ("prefill1024", "bf16"): 1,
        ("prefill4096", "bf16"): 1,
        ("decode4096", "bf16"): 1,
    }
    for (cell, precision), bound in over_best.items():
        if best := best_peer(results, threads, cell, arms, precision):
            yield f"{cell}_over", (cell, f"epikv {precision}"), (cell, best), bound, True
    if linears := fastest_linears(results, threads, "streams16", arms, "bf16"):
        yield "streams16_over", ("streams16", "epikv bf16"), ("streams16", linears), 0.85, True
    full, sliding = "epikv bf16", f"epikv bf16, sliding {BUDGET}"
    flat, evicting = f"epikv bf16, epikv_flat {BUDGET}", f"OpenVINO GenAI bf16, evicts at {BUDGET}"
    for cell, ours, other_cell, other, bound in (
        ("decode1", "epikv int8", "decode1", "CTranslate2 int8", 1),
        ("decode1", full, "decode1", "memory read bf16", 0.85),
        ("decode4096", sliding, "decode512", full, 0.95),
        ("decode4096", sliding, "decode4096", evicting, 1.5),
        ("generated4096", sliding, "decode512", full, 0.95),
        ("generated4096", flat, "decode512", full, 0.95),
        ("generated4096", sliding, "generated4096", evicting, 1.5),
        ("generated4096", flat, "generated4096", evicting, 1.5),
        ("16x2048", sliding, "16x2048", full, 2),
        ("16x8192", sliding, "16x8192", full, 2),
    ):
        yield f"{cell}({ours})_over_{other_cell}", (cell, ours), (other_cell, other), bound, True


def _memory(results: Results, threads: int, arms: Sequence[Arm]) -> Iterator[Target]:
    for arm in arms:
        if arm.kind != "ours" or arm.budget is not None:
            continue
        key = ("memory", arm.name)
        peaks = [*values(results, threads, key).values()]
        if not peaks:
            continue
        held = results.held[threads, arm.name]
        ratio = bootstrap([peak / held for peak in peaks])
        yield Target(f"memory({arm.name}, {threads} threads)_over_held", ratio, 1.15)
        best = best_peer(results, threads, "memory", arms, arm.precision)
        if best and (estimate := paired(results, threads, key, ("memory", best))):
            yield Target(f"memory({arm.name}, {threads} threads)_over({best})", estimate, 1)

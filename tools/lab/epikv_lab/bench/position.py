"""Time per token far into a stream, over that near its beginning: budgeted and not.

A round is a window of 96 tokens around each position, for each policy in turn, and one sample of
its ratio far over near. Windows take turns, not steps: two streams in one daemon are one batch, in
which each token's time is that of both, and two daemons at once would share the processor. What
drifts on the machine within a round meets both positions alike over many rounds, since for `full`
and `sliding` every second round begins with the far one. They are prefilled to just before a
position (a prompt over the budget is evicted chunk by chunk) and decode across it. `epikv_flat`
cannot rank a prompt, so one stream generates past both positions, and another past the near one
again: near is the mean of before and after.

Gaps between tokens are measured at the client; a window's figure is their median. Two that other
programs disturb less are told beside it: the fastest tenth of the gaps, and the CPU time of the
engine's thread.
"""

from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any

import click
from epikv import harness
from epikv.options import Kv
from epikv.stats import Estimate, bootstrap

from epikv_lab.bench.streams import Running, random_prompt, wait_until
from epikv_lab.bench.targets import Target, finish

# Narrow and long: attention over 4096 tokens weighs enough for `full` to show it.
SHAPE: harness.Shape = {
    "hidden": 512,
    "layers": 8,
    "heads": 8,
    "kv_heads": 2,
    "head_dim": 64,
    "ffn": 1024,
    "vocab": 4096,
    "context": 8192,
    "dtype": "bf16",
}
BUDGET, NEAR, FAR = 512, 600, 4096
BOUND, FULL_RISES = 1.05, 1.2
SKIP = 8  # tokens after the prompt that are not measured
HALF = 48  # of a window, in tokens
FLAT_PROMPT = 64


@dataclass(frozen=True)
class Pace:
    """Seconds per token around one position."""

    wall: float  # median
    fast: float  # the fastest tenth
    cpu: float  # mean


@dataclass(frozen=True)
class Reading:
    """The pace at both positions, and the most KV bytes used over those reserved."""

    near: Pace
    far: Pace
    used: float


@click.command("position")
@click.option("--rounds", default=30, show_default=True)
@harness.options
def command(rounds: int, json_file: Path | None, **where: Any) -> None:
    """Time per token at position 4096 over that at 600, with a budget of 512 and with none.

    One stream runs at a time. The two positions take turns by windows of 96 tokens, not by steps:
    two streams in one daemon are one batch, whose steps cost the same for both. Every second round
    of `full` and `sliding` begins with the far position; `epikv_flat`, which cannot rank a prompt,
    generates its way past both, and its near position is measured before and after.
    """
    readings: dict[str, list[Reading]] = {"full": [], "sliding": [], "epikv_flat": []}
    with harness.serving(
        lambda: harness.random_model("position", **SHAPE), ["--threads=1"], **where
    ) as served:
        for number in range(rounds):
            positions = (NEAR, FAR) if number % 2 == 0 else (FAR, NEAR)
            for kv in (Kv("full"), Kv("sliding", BUDGET)):
                readings[kv.policy].append(_prefilled(served, kv, positions, number))
            readings["epikv_flat"].append(_generated(served, number))
            told = ", ".join(
                f"{name} {1e3 * r[-1].near.wall:.2f} -> {1e3 * r[-1].far.wall:.2f} ms"
                for name, r in readings.items()
            )
            harness.say(f"round {number + 1}: {told}")

    ratios = {
        name: bootstrap([r.far.wall / r.near.wall for r in taken])
        for name, taken in readings.items()
    }
    click.echo()
    for name, taken in readings.items():
        for figure, of in {"the fastest tenth": "fast", "CPU time": "cpu"}.items():
            e = bootstrap([getattr(r.far, of) / getattr(r.near, of) for r in taken])
            click.echo(f"  {name}_rise in {figure}: {e.value:.4f} [{e.low:.4f}, {e.high:.4f}]")
    click.echo()
    worst = max(r.used for taken in readings.values() for r in taken)
    targets = [Target("full_rise", ratios["full"], FULL_RISES, at_least=True)]
    if not targets[0].ok:
        click.echo("void: full does not rise enough for the comparison to mean anything")
    for name in ("sliding", "epikv_flat"):
        targets.append(Target(f"{name}_rise", ratios[name], BOUND))
    targets.append(Target("used_over_reserved", Estimate.exact(worst), 1))
    details = {
        "shape": SHAPE,
        "budget": BUDGET,
        "positions": [NEAR, FAR],
        "readings": {name: [asdict(r) for r in taken] for name, taken in readings.items()},
    }
    finish("position", targets, details, json_file)


def _prefilled(served: harness.Served, kv: Kv, positions: Sequence[int], seed: int) -> Reading:
    """Two streams, one after the other, that begin to decode just before each position."""
    paces: dict[int, Pace] = {}
    used = 0.0
    for position in positions:
        prompt = random_prompt(position - HALF - SKIP, SHAPE["vocab"], seed)
        (paces[position],), peak = _run(served, prompt, kv, [position])
        used = max(used, peak)
    return Reading(paces[NEAR], paces[FAR], used)


def _generated(served: harness.Served, seed: int) -> Reading:
    """A stream that decodes past both positions, and then one past the near one: its pace is the
    mean of before and after, so that a steady drift of the machine cancels."""
    prompt = random_prompt(FLAT_PROMPT, SHAPE["vocab"], seed)
    kv = Kv("epikv_flat", BUDGET)
    (before, far), used = _run(served, prompt, kv, [NEAR, FAR])
    (after,), _ = _run(served, prompt, kv, [NEAR])
    near = Pace(*(mean(pair) for pair in zip(astuple(before), astuple(after), strict=True)))
    return Reading(near, far, used)


def _run(
    served: harness.Served, prompt: list[int], kv: Kv, positions: Sequence[int]
) -> tuple[list[Pace], float]:
    """The pace of a stream around each position; its peak over what it had reserved."""
    edges = [(at - HALF - len(prompt), at + HALF - len(prompt)) for at in positions]
    stream = Running(served.client, prompt, kv, edges[-1][1] + 1)
    cpu: list[float] = []
    for begin, end in edges:
        pages = []
        for mark in (begin, end):
            wait_until(
                lambda: stream.tokens >= mark,  # noqa: B023  asked at once
                [stream],
                "a stream",
            )
            pages.append(served.page())
        added = pages[1] - pages[0]
        steps = added.value("epikv_step_seconds_count", phase="decode")
        cpu.append(added.value("epikv_engine_cpu_seconds_total") / steps)
    stream.join()
    if kv.policy != "full" and not stream.usage.rounds:
        raise click.ClickException(f"{kv.policy} has not evicted")
    gaps = [_gaps(stream.arrivals[begin:end]) for begin, end in edges]
    paces = [Pace(median(g), quantiles(g, n=10)[0], c) for g, c in zip(gaps, cpu, strict=True)]
    return paces, stream.usage.peak_bytes / stream.reserved_bytes


def _gaps(arrivals: Sequence[float]) -> list[float]:
    """Seconds per token between messages, whose tokens have come together."""
    moments = sorted(set(arrivals))
    if len(moments) < len(arrivals) // 2:
        raise click.ClickException("tokens come in bunches: this client is too slow to time them")
    return [(b - a) / arrivals.count(b) for a, b in pairwise(moments)]

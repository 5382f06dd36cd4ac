"""Time per token far into a stream, over that near its beginning: budgeted and not.

Streams run one at a time, in short windows that take turns, rather than in one batch, where every
stream would pay for its neighbours: `full` and `sliding` are prefilled to just before a position
(a prompt over the budget is evicted chunk by chunk) and decode across it; `epikv_flat`, which
cannot rank a prompt, generates all the way, past both positions. Gaps between tokens are measured
at the client; a window's figure is their median.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

import click

from epikv.bench import harness
from epikv.bench.load import Running, random_prompt, wait_until
from epikv.bench.targets import Estimate, Target, bootstrap, finish
from epikv.options import Kv

# Narrow and long: attention over 4096 tokens weighs enough for `full` to show it.
SHAPE = {
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
WINDOW = 96
FLAT_PROMPT = 64


@dataclass(frozen=True)
class Reading:
    """Seconds per token at both positions, and the most KV bytes used over those reserved."""

    near: float
    far: float
    used: float

    @property
    def ratio(self) -> float:
        return self.far / self.near


@click.command("position")
@click.option("--rounds", default=12, show_default=True)
@harness.options
def command(rounds: int, json_file: Path | None, **where: object) -> None:
    """Time per token at position 4096 over that at 600, with a budget of 512 and with none."""
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
                f"{name} {1e3 * r[-1].near:.2f} -> {1e3 * r[-1].far:.2f} ms"
                for name, r in readings.items()
            )
            harness.say(f"round {number + 1}: {told}")

    ratios = {name: bootstrap([r.ratio for r in taken]) for name, taken in readings.items()}
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
        "readings": {name: [vars(r) for r in taken] for name, taken in readings.items()},
    }
    finish("position", targets, details, json_file)


def _prefilled(
    served: harness.Served, kv: Kv, positions: Sequence[int], seed: int
) -> Reading:
    """Two streams, one after the other, that begin to decode just before each position."""
    times: dict[int, float] = {}
    used = 0.0
    for position in positions:
        prompt = random_prompt(position - WINDOW // 2 - SKIP, SHAPE["vocab"], seed)
        stream = _finished(served, prompt, kv, SKIP + WINDOW)
        times[position] = _gap(stream.arrivals[SKIP:])
        used = max(used, _used(stream))
    return Reading(times[NEAR], times[FAR], used)


def _generated(served: harness.Served, seed: int) -> Reading:
    """One stream that decodes past both positions."""
    prompt = random_prompt(FLAT_PROMPT, SHAPE["vocab"], seed)
    half = WINDOW // 2
    stream = _finished(served, prompt, Kv("epikv_flat", BUDGET), FAR + half - FLAT_PROMPT)
    near, far = (
        _gap(stream.arrivals[at - half - FLAT_PROMPT : at + half - FLAT_PROMPT])
        for at in (NEAR, FAR)
    )
    return Reading(near, far, _used(stream))


def _finished(served: harness.Served, prompt: list[int], kv: Kv, tokens: int) -> Running:
    stream = Running(served.client, prompt, kv, tokens)
    wait_until(lambda: stream.summary is not None, [stream], "a stream")
    stream.join()
    if kv.policy != "full" and len(prompt) + tokens > kv.budget and not stream.summary.kv.rounds:
        raise click.ClickException(f"{kv.policy} has not evicted")
    return stream


def _gap(arrivals: Sequence[float]) -> float:
    """Seconds per token: the median gap. Tokens of one message have come together."""
    moments = sorted(set(arrivals))
    if len(moments) < len(arrivals) // 2:
        raise click.ClickException("tokens come in bunches: this client is too slow to time them")
    counts = {moment: arrivals.count(moment) for moment in moments}
    return median((b - a) / counts[b] for a, b in pairwise(moments))


def _used(stream: Running) -> float:
    return stream.summary.kv.peak_bytes / stream.accepted.kv.reserved_bytes

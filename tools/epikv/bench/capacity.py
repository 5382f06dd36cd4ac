"""How fast a daemon is when idle, and how much it can do."""

from dataclasses import dataclass, replace
from statistics import median

import click

from epikv import harness
from epikv.bench.generator import ClosedLoop, Generator, Load
from epikv.bench.report import Window, figures

MOST_AT_ONCE = 1024

_GAIN = 1.05  # by which a step must exceed the best one before it
_WARMUP_SHARE = 0.25  # of a step's seconds


@dataclass(frozen=True)
class Step:
    """What a closed loop of this many at once completes a second, within the deadline."""

    concurrency: int
    requests_per_second: float
    output_tokens_per_second: float


@dataclass(frozen=True)
class Capacity:
    steps: list[Step]

    @property
    def best(self) -> Step:
        return max(self.steps, key=lambda step: step.requests_per_second)


def idle_median(generator: Generator, seconds: float) -> float:
    """Seconds from end to end of requests that have the daemon for themselves, in the median."""
    load = run(replace(generator, deadline=None), ClosedLoop(1, seconds))
    took = [sample.end_to_end for sample in load.samples if sample.ok]
    if not took:
        raise click.ClickException(f"idle: no request succeeded: {_errors(load)}")
    found = median(took)
    harness.say(f"idle: {len(took)} requests one at a time, median {1e3 * found:.1f} ms")
    return found


def measure(generator: Generator, seconds: float) -> Capacity:
    """Twice as many at once in every step of `seconds`, until that gains less than 5 %. What
    misses the generator's deadline does not count."""
    steps: list[Step] = []
    concurrency = 1
    while concurrency <= MOST_AT_ONCE:
        load = run(generator, ClosedLoop(concurrency, seconds))
        window = Window(_WARMUP_SHARE * seconds, seconds, generator.deadline)
        ended = [s for s in load.samples if s.ended in window and window.met(s)]
        tokens = sum(sample.tokens for sample in ended) / window.seconds
        steps.append(Step(concurrency, len(ended) / window.seconds, tokens))
        harness.say(
            f"capacity: {concurrency} at once, {steps[-1].requests_per_second:.2f} requests/s"
        )
        if len(steps) > 1 and steps[-1].requests_per_second < _GAIN * max(
            step.requests_per_second for step in steps[:-1]
        ):
            break
        concurrency *= 2
    capacity = Capacity(steps)
    if capacity.best.requests_per_second == 0:
        raise click.ClickException(f"capacity: no request met the deadline: {_errors(load)}")
    return capacity


def run(generator: Generator, pattern: ClosedLoop) -> Load:
    """Of a measurement that means nothing before its end."""
    load = generator.run(pattern)
    if load.interrupted:
        raise click.Abort
    return load


def _errors(load: Load) -> str:
    found = figures(load.samples, Window(0, load.seconds + 1))["errors"]
    return ", ".join(f"{count} x {error}" for error, count in found.items()) or "none was sent"

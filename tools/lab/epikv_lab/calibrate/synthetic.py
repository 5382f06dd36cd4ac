"""Traces of a model that does not exist, of which is known what the search ought to find.

    python -m epikv_lab.calibrate.synthetic       # how many traces it takes to find a planted layer

Steps are positive, smooth over time, alike in neighbouring layers, and drift over a trace; needed
tokens come in runs as windows of occlusion make them, more of them early than late. In a planted
model one layer moves more (or less) at needed tokens; everything else has nothing to do with them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import click
import numpy as np
from epikv.calibrate.choose import search
from epikv.calibrate.findings import CalibrationError, Rule, Search
from epikv.calibrate.separation import Case, aucs
from epikv.calibrate.signals import Bools, Floats, rolling
from scipy.signal import lfilter

RULE = Rule()


@dataclass(frozen=True)
class World:
    """What a made-up model and its traces are like."""

    layers: int = 7  # whose steps are measured: all but the last
    tokens: int = 400  # candidates of a trace
    traces: int = 24
    keep: float = 0.4  # share of candidates that the budget has room for
    needed: float = 0.25  # share of candidates that are needed; from 1.5 to 0.5 of it along a trace
    run: float = 6.0  # mean length of a run of needed tokens
    smooth: float = 0.4  # correlation of a layer's step with its last one
    alike: float = 0.5  # correlation of neighbouring layers
    drift: float = 1.0  # how far the level of steps moves over a trace, in their deviations
    planted: int | None = None  # layer
    sign: int = 1  # of what it does at needed tokens
    auc: float = 0.60  # of its z-score

    def cases(self, seed: int) -> list[Case]:
        draw = np.random.default_rng(seed)
        return [self._case(draw) for _ in range(self.traces)]

    def _case(self, draw: np.random.Generator) -> Case:
        needed = self._needed(draw)
        noise = self._noise(draw)
        if self.planted is not None:
            noise[self.planted] += self.sign * _lift(self) * needed
        place = np.linspace(0, 1, self.tokens)
        drift = self.drift * np.outer(draw.normal(size=self.layers), place)
        steps = np.exp(0.3 * (noise + drift))
        return Case("synthetic", steps, needed, round(self.keep * self.tokens))

    def _needed(self, draw: np.random.Generator) -> Bools:
        """Runs and gaps of geometric length."""
        result = np.zeros(self.tokens, bool)
        at = 0
        while at < self.tokens:
            density = self.needed * (1.5 - at / self.tokens)
            at += draw.geometric(density / (self.run * (1 - density)))
            length = draw.geometric(1 / self.run)
            result[at : at + length] = True
            at += length
        return result

    def _noise(self, draw: np.random.Generator) -> Floats:
        """Of deviation 1. [layers, tokens]"""
        fresh = draw.normal(size=(self.layers, self.tokens + 50))
        for layer in range(1, self.layers):
            fresh[layer] = self.alike * fresh[layer - 1] + np.sqrt(1 - self.alike**2) * fresh[layer]
        scale = np.sqrt(1 - self.smooth**2)
        return lfilter([scale], [1, -self.smooth], fresh, axis=1)[:, 50:]


def _lift(world: World) -> float:
    return _lift_of(replace(world, layers=1, planted=None, sign=1, traces=100))


@cache
def _lift_of(world: World) -> float:
    """How much the planted layer's steps are raised, in their deviations, for its AUC to be that."""
    low, high = 0.0, 3.0
    for _ in range(12):
        lift = (low + high) / 2
        low, high = (lift, high) if _planted_auc(world, lift) < world.auc else (low, lift)
    return (low + high) / 2


def _planted_auc(world: World, lift: float) -> float:
    """Of its one layer, were it raised so much."""
    draw = np.random.default_rng(0)
    found = []
    for _ in range(world.traces):
        needed = world._needed(draw)
        if needed.all() or not needed.any():
            continue
        steps = np.exp(0.3 * (world._noise(draw) + lift * needed))
        found.append(aucs(rolling(steps, RULE.window)[1], needed)[0])
    return float(np.mean(found))


def found(world: World, result: Search | None) -> bool:
    """Whether a search returned what was planted, and nothing if nothing was.

    Planted: the only band is the planted layer's, by its representative and sign, and the best pair
    has that layer on the side on which it raises the score of needed tokens. Its partner may be any:
    none of them has anything to do with the label.
    """
    if world.planted is None:
        return result is None or not (result.bands or result.pairs)
    if result is None or not (result.bands and result.pairs):
        return False
    best = result.pairs[0]
    raised, lowered = (best.a, best.b) if best.sign > 0 else (best.b, best.a)
    return [(band.representative, band.sign) for band in result.bands] == [
        (world.planted, world.sign)
    ] and (raised if world.sign > 0 else lowered) == world.planted


def trial(world: World, seed: int, rule: Rule) -> bool:
    try:
        return found(world, search(world.cases(seed), rule))
    except CalibrationError:
        return found(world, None)


def rate(world: World, trials: int, plant: bool, rule: Rule = RULE) -> float:
    """How often the search is right, over seeds; planted in every layer in turn, with both signs."""
    right = 0
    for seed in range(trials):
        if plant:
            sign = 1 - 2 * (seed // world.layers % 2)
            world = replace(world, planted=seed % world.layers, sign=sign)
        right += trial(world, seed, rule)
    return right / trials


@click.command()
@click.option("--trials", default=100, show_default=True)
@click.option("--auc", default=World.auc, show_default=True, help="Of the planted layer.")
@click.option("--layers", default=World.layers, show_default=True, help="All but the last.")
@click.option("--needed", default=World.needed, show_default=True, help="Share of candidates.")
@click.option("--run", default=World.run, show_default=True, help="Mean length of their runs.")
@click.option("--least", default=RULE.least, show_default=True, help="As of `epikv calibrate`.")
@click.option("--traces", type=int, multiple=True, default=(16, 24, 32, 48, 64), show_default=True)
@click.option("--tokens", type=int, multiple=True, default=(100, 200, 400), show_default=True)
def main(
    trials: int, least: int, traces: Sequence[int], tokens: Sequence[int], **world: Any
) -> None:
    """Print how often a planted layer is found with its sign / nothing is found where nothing is,
    by the number of traces and of candidates for eviction in each."""
    base, rule = World(**world), replace(RULE, least=least)
    click.echo(f"{base}; {trials} trials each: found / rightly nothing")
    click.echo("traces" + "".join(f"{f'{count} tokens':>14}" for count in tokens))
    for number in traces:
        click.echo(f"{number:6d}", nl=False)
        for count in tokens:
            made = replace(base, tokens=count, traces=number)
            planted, null = (rate(made, trials, plant, rule) for plant in (True, False))
            click.echo(f"   {planted:.2f} / {null:.2f}", nl=False)
        click.echo()


if __name__ == "__main__":
    main()

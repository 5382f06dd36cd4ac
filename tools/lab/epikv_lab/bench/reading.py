"""What a decode step takes that reads a part of its cache, beside one that reads all of it.

One daemon of one thread and a model of random weights, with the attention of the 0.5B shape. A
round is a window of decode steps with each number of tokens read, and with all; a sample is the
ratio of their times, below 1 where reading a part is faster. The order of a round is turned round
in the next. Prompts are the same in every round, so that from the second on most of each is copied
from what was cached of it.
"""

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from epikv import harness
from epikv.options import Kv

from epikv_lab.bench.attention import Time, table, told
from epikv_lab.bench.kv_dtype import SHAPE, decode_window
from epikv_lab.bench.targets import finish

POOL = 1 << 30


@click.command("reading")
@click.option("--rounds", default=7, show_default=True)
@click.option(
    "--cell", "cells", type=(int, int), multiple=True, default=((1, 4096), (1, 16384)),
    metavar="STREAMS TOKENS", show_default=True, help="So many at once, of so many cached tokens.",
)  # fmt: skip
@click.option(
    "--read", "reads", type=int, multiple=True, default=(1024, 256), show_default=True,
    help="Tokens that a step reads.",
)  # fmt: skip
@harness.options
def command(
    rounds: int,
    cells: tuple[tuple[int, int], ...],
    reads: tuple[int, ...],
    json_file: Path | None,
    **where: Any,
) -> None:
    """Time of a decode step that reads a part of its cache, over one that reads all."""
    arms = {"all": Kv()} | {f"{tokens} tokens": Kv(read_tokens=tokens) for tokens in reads}
    load = [os.getloadavg()[0]]
    samples: dict[str, list[dict[str, Time]]] = {}
    flags = ["--threads=1", f"--kv_pool_bytes={POOL}"]
    with harness.serving(
        lambda: harness.random_model("kv_dtype", **SHAPE), flags, **where
    ) as served:
        for streams, tokens in cells:
            place = f"{streams} x {tokens} tokens"
            samples[place] = []
            for number in range(-1, rounds):  # the first computes the prompts
                order = list(arms) if number % 2 == 0 else list(arms)[::-1]
                taken = {arm: decode_window(served, arms[arm], streams, tokens) for arm in order}
                if number >= 0:
                    samples[place].append({arm: taken[arm] for arm in arms})
                said = ", ".join(f"{arm} {1e3 * taken[arm].wall:.2f} ms" for arm in arms)
                harness.say(f"{place}, round {number + 1}: {said} a step")
    load.append(os.getloadavg()[0])

    figures = {place: told(taken) for place, taken in samples.items()}
    click.echo(f"\n{table(figures)}\n")
    details = {
        "shape": SHAPE,
        "rounds": rounds,
        "load_average": load,
        "figures": figures,
        "samples": {
            place: [{arm: asdict(time) for arm, time in taken.items()} for taken in of]
            for place, of in samples.items()
        },
    }
    finish("reading", [], details, json_file, untargeted="there is no target")

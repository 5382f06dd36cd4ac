"""What K and V cached as int8 cost and save beside the model's dtype, on one model of random weights.

Two daemons, one of each, which take turns: while one decodes, the other has nothing to do. A round
is a window of decode steps in both, and its sample the ratio of their times, above 1 where int8 is
slower; every second round begins with int8. Prompts are the same in every round, so that from the
second on most of each is copied from what was cached of it.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from epikv import harness
from epikv.options import Kv

from epikv_lab.bench.attention import Time, table, told
from epikv_lab.bench.streams import Running, random_prompt, wait_until
from epikv_lab.bench.targets import finish

# The 0.5B shape's attention, and less of the rest, which costs both the same.
SHAPE: harness.Shape = {
    "hidden": 896,
    "layers": 8,
    "heads": 14,
    "kv_heads": 2,
    "head_dim": 64,
    "ffn": 1024,
    "vocab": 4096,
    "context": 20480,
    "dtype": "bf16",
}
ARMS = ("model", "int8")  # --kv_dtype
WINDOW = 64  # steps
POOL = 1 << 30


@click.command("kv_dtype")
@click.option("--rounds", default=7, show_default=True)
@click.option(
    "--cell", "cells", type=(int, int), multiple=True, default=((8, 512), (1, 4096), (1, 16384)),
    metavar="STREAMS TOKENS", show_default=True, help="So many at once, of so many cached tokens.",
)  # fmt: skip
@harness.options
def command(
    rounds: int, cells: tuple[tuple[int, int], ...], json_file: Path | None, **where: Any
) -> None:
    """Time of a decode step over K and V of int8, over that in the model's dtype."""
    if where["server"] is not None:
        raise click.UsageError("it compares two daemons of its own: leave --server out")
    load = [os.getloadavg()[0]]
    samples: dict[str, list[dict[str, Time]]] = {}
    with ExitStack() as stack:
        daemons = {}
        for arm in ARMS:
            flags = ["--threads=1", f"--kv_pool_bytes={POOL}", f"--kv_dtype={arm}"]
            daemons[arm] = stack.enter_context(
                harness.serving(lambda: harness.random_model("kv_dtype", **SHAPE), flags, **where)
            )
        models = {arm: served.client.models()[0] for arm, served in daemons.items()}
        for streams, tokens in cells:
            place = f"{streams} x {tokens} tokens"
            samples[place] = _rounds(daemons, streams, tokens, rounds)
    load.append(os.getloadavg()[0])

    figures = {place: told(taken) for place, taken in samples.items()}
    click.echo(f"\n{table(figures)}\n")
    held = {arm: model.kv_bytes_per_token for arm, model in models.items()}
    click.echo(f"Bytes a token: {held['model']} and {held['int8']}.")
    details = {
        "shape": SHAPE,
        "rounds": rounds,
        "load_average": load,
        "kv_bytes_per_token": held,
        "figures": figures,
        "samples": {
            place: [{arm: asdict(time) for arm, time in taken.items()} for taken in of]
            for place, of in samples.items()
        },
    }
    finish("kv_dtype", [], details, json_file, untargeted="there is no target")


def _rounds(
    daemons: Mapping[str, harness.Served], streams: int, tokens: int, count: int
) -> list[dict[str, Time]]:
    found = []
    for number in range(-1, count):  # the first computes the prompts
        order: Sequence[str] = ARMS if number % 2 == 0 else ARMS[::-1]
        taken = {arm: decode_window(daemons[arm], Kv(), streams, tokens) for arm in order}
        if number >= 0:
            found.append({arm: taken[arm] for arm in ARMS})
        said = ", ".join(f"{arm} {1e3 * taken[arm].wall:.2f} ms" for arm in ARMS)
        harness.say(f"{streams} x {tokens}, round {number + 1}: {said} a step")
    return found


def decode_window(served: harness.Served, kv: Kv, streams: int, tokens: int) -> Time:
    """Of a step in which `streams` decode, each behind a prompt of so many tokens."""
    vocabulary = served.client.models()[0].vocab_size
    running = [
        Running(served.client, random_prompt(tokens, vocabulary, seed), kv, 4 * WINDOW, seed)
        for seed in range(streams)
    ]
    wait_until(lambda: all(stream.tokens > 0 for stream in running), running, "a stream")
    before = served.page()
    while (added := served.page() - before).value(
        "epikv_step_seconds_count", phase="decode"
    ) < WINDOW:
        for stream in running:
            stream.check()
            if stream.summary is not None:
                raise click.ClickException("a stream ended before its window did")
    for stream in running:
        stream.cancel()
    for stream in running:
        stream.join()
    served.wait_until_idle()
    steps = added.value("epikv_step_seconds_count", phase="decode")
    wall = added.value("epikv_step_seconds_sum", phase="decode")
    return Time(wall / steps, added.value("epikv_engine_cpu_seconds_total") / steps)

"""What two processes that serve one model together take, beside one that has all of it.

Three daemons serve the 0.5B shape's random weights in turns: one of one thread, one of two threads, and one of
two processes with a thread each. Where the weights fit one process, two threads are the one to beat; tensor
parallelism is for weights that do not. `build/dev/tests/rank_sums` says what one exchange takes.
"""

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import click
from epikv import harness
from epikv.stats import bootstrap

from epikv_lab.bench.overhead import SHAPE
from epikv_lab.bench.speeds import cases
from epikv_lab.bench.targets import Target, finish

POOL = 256 << 20
DAEMONS = {
    "one_thread": ("--threads=1", f"--kv_pool_bytes={POOL}"),
    "two_threads": ("--threads=2", f"--kv_pool_bytes={POOL}"),
    "two_processes": ("--tensor_parallel=2", "--threads=1", f"--kv_pool_bytes={POOL // 2}"),
}
FASTER = 1.0  # than one thread that has all of it


@click.command("tensor_parallel")
@click.option("--rounds", default=5, show_default=True)
@click.option("--binary", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path))
def command(rounds: int, binary: Path | None, json_file: Path | None) -> None:
    """Speed of two processes over one of as many threads, and over one of one thread."""
    load = [os.getloadavg()[0]]
    targets: list[Target] = []
    told: dict[str, Any] = {}
    with ExitStack() as stack:
        served = {
            name: stack.enter_context(
                harness.serving(
                    lambda: harness.random_model("speculation", **SHAPE),
                    flags,
                    server=None,
                    metrics=None,
                    binary=binary,
                )
            )
            for name, flags in DAEMONS.items()
        }
        for case, run in cases(SHAPE["vocab"]).items():
            rows: list[dict[str, float]] = []
            for number in range(rounds + 1):
                row = {name: run(of, number) for name, of in served.items()}
                if number > 0:  # the first warms up
                    rows.append(row)
            told[case] = rows
            beside = bootstrap(rows, lambda some: _ratio(some, "two_threads"))
            told[f"{case}_over_two_threads"] = asdict(beside)
            harness.say(
                f"{case} over two threads: {beside.value:.3f} [{beside.low:.3f}, {beside.high:.3f}]"
            )
            ratio = bootstrap(rows, lambda some: _ratio(some, "one_thread"))
            targets.append(Target(f"{case}_over_one_thread", ratio, FASTER, at_least=True))
    load.append(os.getloadavg()[0])
    finish(
        "tensor_parallel", targets, {"shape": SHAPE, "load_average": load, "cases": told}, json_file
    )


def _ratio(rows: Sequence[dict[str, float]], other: str) -> float:
    return median(row["two_processes"] / row[other] for row in rows)

"""What a compiled model takes beside the TorchScript file of the same weights.

Two daemons serve the 0.5B shape's random weights in turns. Their products and attention are the same kernels;
what differs is who calls them: TorchScript's interpreter, or code that AOTInductor compiled.
"""

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import click
from epikv import harness
from epikv.stats import bootstrap

from epikv_lab.bench.overhead import SHAPE
from epikv_lab.bench.speeds import cases, in_turns
from epikv_lab.bench.targets import Target, finish

AS_FAST = 0.98


@click.command("loaders")
@click.option("--rounds", default=5, show_default=True)
@click.option("--threads", default=1, show_default=True)
@click.option("--binary", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path))
def command(rounds: int, threads: int, binary: Path | None, json_file: Path | None) -> None:
    """Speed of a compiled model over that of its TorchScript file."""
    load = [os.getloadavg()[0]]
    small: harness.Shape = {**SHAPE, "hidden": 256, "heads": 4, "ffn": 512, "layers": 8}
    targets: list[Target] = []
    told: dict[str, Any] = {}
    for size, shape in {"0.5b": SHAPE, "small": small}.items():
        with ExitStack() as stack:
            served = [
                stack.enter_context(_serving(shape, compiled, threads, binary))
                for compiled in (False, True)
            ]
            for case, run in cases(SHAPE["vocab"]).items():
                rows = in_turns(served, run, rounds)
                told[f"{size}_{case}"] = rows
                ratio = bootstrap(rows, _ratio)
                targets.append(Target(f"{size}_{case}", ratio, AS_FAST, at_least=True))
    load.append(os.getloadavg()[0])
    finish("loaders", targets, {"shape": SHAPE, "load_average": load, "cases": told}, json_file)


def _serving(shape: harness.Shape, compiled: bool, threads: int, binary: Path | None) -> Any:
    how: dict[str, Any] = {"compile": True} if compiled else {}
    flags = [f"--threads={threads}", "--kv_pool_bytes=268435456", "--trust_compiled_models=true"]
    return harness.serving(
        lambda: harness.random_model("loaders", **shape, **how),
        flags,
        server=None,
        metrics=None,
        binary=binary,
    )


def _ratio(rows: Sequence[Sequence[float]]) -> float:
    """Compiled over TorchScript, of the same round."""
    return median(compiled / script for script, compiled in rows)

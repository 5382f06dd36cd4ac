"""What a change to the daemon makes: the speed of its build over that of another build.

Two daemons serve the 0.5B shape's random weights in turns, with the same settings; one is the build under
test, the other, say, that of the commit before.
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
from epikv_lab.bench.speeds import cases, decoded, in_turns
from epikv_lab.bench.targets import Target, finish

AS_FAST = 0.98
BINARY = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command("builds")
@click.option("--before", required=True, type=BINARY, help="The epikvd to compare with.")
@click.option("--binary", type=BINARY, help="The epikvd under test.  [default: this build's]")
@click.option("--flag", "flags", multiple=True, help="A setting of both, like --cpu=avx2.")
@click.option("--dtype", type=click.Choice(["bf16", "fp32"]), default="bf16", show_default=True)
@click.option("--kv-heads", default=SHAPE["kv_heads"], show_default=True)
@click.option("--cached", default=0, help="Also one stream that has so many tokens cached.")
@click.option("--rounds", default=5, show_default=True)
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path))
def command(
    before: Path,
    binary: Path | None,
    flags: Sequence[str],
    dtype: str,
    kv_heads: int,
    cached: int,
    rounds: int,
    json_file: Path | None,
) -> None:
    """Speed of one build of the daemon over another's."""
    load = [os.getloadavg()[0]]
    shape: harness.Shape = {**SHAPE, "dtype": dtype, "kv_heads": kv_heads}
    shape["context"] = max(shape["context"], cached + 256)
    vocab = shape["vocab"]
    compared = cases(vocab)
    if cached:
        compared[f"decode_behind_{cached}"] = lambda served, seed: decoded(
            served, vocab, 1, seed, cached
        )
    targets: list[Target] = []
    told: dict[str, Any] = {}
    with ExitStack() as stack:
        served = [
            stack.enter_context(
                harness.serving(
                    lambda: harness.random_model("builds", **shape),
                    ["--kv_pool_bytes=268435456", *flags],
                    server=None,
                    metrics=None,
                    binary=each,
                )
            )
            for each in (before, binary)
        ]
        for case, run in compared.items():
            rows = in_turns(served, run, rounds)
            told[case] = rows
            targets.append(Target(case, bootstrap(rows, _ratio), AS_FAST, at_least=True))
    load.append(os.getloadavg()[0])
    details = {"shape": shape, "flags": list(flags), "load_average": load, "cases": told}
    finish("builds", targets, details, json_file)


def _ratio(rows: Sequence[Sequence[float]]) -> float:
    """The build under test over the other, of the same round."""
    return median(after / before for before, after in rows)

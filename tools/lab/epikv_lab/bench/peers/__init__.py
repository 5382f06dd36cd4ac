"""Next to the servers people would pick instead, with the same random weights, in the same rounds.

Each engine is a process of its own, run as its users would: peers by their continuous batching where
they have it and else by their batch API, ours over gRPC through the daemon. They stay loaded, each
round measures each of them once in shuffled order, and ratios are of the same round, so that what
drifts on the machine meets all alike. Two bounds are measured as if they were engines: reading the
bytes that a token cannot do without, and the weight matrices alone.

Peers are installed and converted for at their first use, below build/bench/peers; one that does not
install, convert or run is told with its reason, and the others go on.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click
from epikv import harness
from epikv.bench import plots
from epikv.processes import INTERRUPTED

from epikv_lab.bench.targets import finish

if TYPE_CHECKING:
    from epikv_lab.bench.peers.cells import Cell
    from epikv_lab.bench.peers.engines import Arm, Place
    from epikv_lab.bench.peers.rounds import Results

SPINNING = 0.02  # of a core, that an idle engine may use


@click.command("peers")
@click.option(
    "--shape", default="0.5b", show_default=True,
    type=click.Choice(["small", "0.5b", "shallow", "shallow-mha"]),
    help="0.5b: 896 wide, 24 layers, 14 heads over 2 KV heads; shallow: 6 such layers, and with 14 KV"
    " heads; small: 384 wide, 8 layers.",
)  # fmt: skip
@click.option(
    "--cell", "names", default="targets", show_default=True,
    help="What is measured, with commas: decode1, streamsN, prefillN, decodeN, 16xN,"
    " generated4096, lookup1, memory; or targets, concurrency (1 to 64 streams) and context (256 to 16384"
    " tokens).",
)  # fmt: skip
@click.option(
    "--engine", "wanted", multiple=True,
    help="Only those whose name contains this; may be given again.",
)  # fmt: skip
@click.option(
    "--threads", "counts", type=click.IntRange(1), multiple=True, default=(1, 2),
    show_default=True, help="Of each engine; may be given again.",
)  # fmt: skip
@click.option("--rounds", default=7, show_default=True)
@click.option("--limit", default=600.0, show_default=True, help="Seconds that a job may take.")
@click.option("--check/--no-check", default=True, help="Whether greedy tokens agree.")
@click.option(
    "--plots", "pictures", type=click.Path(file_okay=False, path_type=Path),
    help="Folder for the curves of the cells concurrency and context.",
)  # fmt: skip
@click.option(
    "--cpu", type=click.Choice(["avx2"]),
    help="Hold all engines to a lesser processor; those that nothing holds are left out.",
)  # fmt: skip
@click.option(
    "--binary", type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="The epikvd to measure. Default: as of other benches.",
)  # fmt: skip
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path))
def command(
    shape: str,
    names: str,
    wanted: tuple[str, ...],
    counts: tuple[int, ...],
    rounds: int,
    limit: float,
    check: bool,
    pictures: Path | None,
    cpu: str | None,
    binary: Path | None,
    json_file: Path | None,
) -> None:
    """Speed and memory beside OpenVINO GenAI, CTranslate2, llama.cpp, ONNX Runtime and transformers.

    Ratios are of the same round: above 1, ours is faster (of memory: larger).
    """
    if pictures is not None:
        plots.check()
    from epikv_lab.bench.peers import cells, curves, engines, venvs
    from epikv_lab.bench.peers import results as found_in
    from epikv_lab.bench.peers.checkpoint import SHAPES, checkpoint
    from epikv_lab.bench.peers.process import ENVIRONMENT
    from epikv_lab.bench.peers.rounds import Results

    chosen = cells.parse(names)
    arms = [
        arm
        for arm in engines.arms()
        if not wanted or any(text.lower() in arm.name.lower() for text in wanted)
    ]
    if not arms:
        raise click.UsageError(f"no engine is called {' or '.join(wanted)}")
    harness.forget_tls()
    os.environ.update(ENVIRONMENT)
    model = checkpoint(SHAPES[shape], shape, venvs.folder())
    results = Results()
    interrupted = False
    try:
        for count in dict.fromkeys(counts):
            place = engines.Place(SHAPES[shape], model, count, 0, binary, cpu)
            agree = check and count == counts[0]
            _measure(place, chosen, arms, rounds, limit, results, agree=agree)
    except KeyboardInterrupt:  # hours of measuring are worth telling
        interrupted = True

    click.echo(f"\n{found_in.table(results, chosen, arms, counts)}")
    for name, found in results.agreed.items():
        click.echo(
            f"{name}: {found.wrong} of {found.tokens} greedy tokens are not those of transformers"
            f" fp32; the worst is {found.worst:.2g} below"
        )
    for name, share in results.idle.items():
        if share > SPINNING:
            click.echo(f"warning: {name} used {share:.0%} of a core while idle", err=True)
    click.echo()
    if pictures is not None:
        for count in counts:
            for path in curves.draw(pictures, results, chosen, arms, count):
                harness.say(f"wrote {path}")
    for line in found_in.limits(results, shape, arms, counts):
        click.echo(line)
    targets = found_in.targets(results, shape, arms, counts)
    details = {
        "shape": {"name": shape, **asdict(SHAPES[shape])},
        "rounds": rounds,
        "interrupted": interrupted,
        "cpu": cpu or "auto",
        "environment": ENVIRONMENT,
        "load_average": os.getloadavg(),
        **found_in.details(results),
    }
    none = None if targets else "no pair that a target is about was measured"
    try:
        finish("peers", targets, details, json_file, untargeted=none)
    finally:
        if interrupted:
            sys.exit(INTERRUPTED)


def _measure(
    place: "Place", cells: Sequence["Cell"], arms: Sequence["Arm"], rounds: int, limit: float,
    results: "Results", *, agree: bool,
) -> None:  # fmt: skip
    """With one number of threads, into `results`; first, if asked, whether tokens agree."""
    from epikv_lab.bench.peers import agree as tokens
    from epikv_lab.bench.peers.engines import FULL
    from epikv_lab.bench.peers.rounds import Loaded, measure, pool_tokens, replies

    loaded = Loaded(replace(place, pool_tokens=pool_tokens([*cells, tokens.CELL])), results)
    try:
        if agree:
            whole = [
                arm for arm in arms if not (arm.is_bound or arm.lookup or arm.budget is not None)
            ]
            prompts = loaded.job(tokens.CELL, 0, FULL).prompts
            given = replies(loaded, tokens.CELL, whole, limit)
            results.agreed = tokens.agreements(place.checkpoint, prompts, given)
        measure(loaded, cells, arms, rounds, limit)
    finally:
        loaded.close()

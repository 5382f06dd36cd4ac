"""`epikv calibrate epikv_flat`"""

import json
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from epikv.bench import harness
from epikv.bench.targets import INTERRUPTED
from epikv.client import Client
from epikv.errors import RpcError
from epikv.messages import Model

if TYPE_CHECKING:
    from epikv.calibrate.plan import Plan
    from epikv.export.manifest import Manifest

_file = click.Path(exists=True, dir_okay=False, path_type=Path)
_new_file = click.Path(dir_okay=False, path_type=Path)
_OPTIONS = (
    click.argument("model", type=_file),
    click.option(
        "--task",
        "tasks",
        multiple=True,
        required=True,
        help="Problems to solve: sample:FAMILY, file:PATH, as of `epikv eval`. Again for more; each"
        " counts alike.",
    ),
    click.option("--traces", default=32, show_default=True, help="Problems of a task to label."),
    click.option("--try", "trials", default=24, show_default=True, help="To try pairs on."),
    click.option("--confirm", default=100, show_default=True, help="To confirm the best on."),
    click.option(
        "--fraction",
        "fractions",
        multiple=True,
        type=click.FloatRange(0, 1, min_open=True, max_open=True),
        default=(0.5,),
        show_default=True,
        help="Of the trace that is kept. The first decides; others are run and told.",
    ),
    click.option(
        "--label",
        "labels",
        multiple=True,
        type=click.Choice(["eviction", "occlusion"]),
        default=("eviction",),
        show_default=True,
        help="What makes a token needed: later ones are badly predicted when it is evicted, or the"
        " answer is wrong when a window over it is replaced. Of both, the first decides, and how"
        " they agree is told.",
    ),
    click.option("--runs", default=48, show_default=True, help="Of a trace, evicting at random."),
    click.option(
        "--drop",
        default=0.5,
        show_default=True,
        help="Nats by which a token is badly predicted in such a run.",
    ),
    click.option("--window", default=32, show_default=True, help="Tokens replaced together."),
    click.option("--stride", default=16, show_default=True, help="From window to window."),
    click.option(
        "--filler",
        type=click.Choice(["randmulti", "random", "eos", "pad"]),
        default="randmulti",
        show_default=True,
        help="What they are replaced with.",
    ),
    click.option(
        "--from",
        "start",
        type=click.Choice(["gap", "answer"]),
        default="gap",
        show_default=True,
        help="Where the model goes on: when the window would be evicted, or at the answer.",
    ),
    click.option(
        "--z-window", default=64, show_default=True, help="Tokens of the policy's z-score."
    ),
    click.option(
        "--least",
        type=int,
        help="Needed tokens, and others, that a trace must have to count. Default: 1; with labels by"
        " occlusion, which are of windows, 10.",
    ),
    click.option(
        "--max-output-tokens", type=click.IntRange(min=1), help="Default: 1.25 of a known trace."
    ),
    click.option("--seed", default=0, show_default=True, help="Of fillers, turns and resamples."),
    click.option("--at-once", default=64, show_default=True, help="Requests running together."),
    click.option(
        "-o", "--out", type=_new_file, required=True, help="Of all that was measured, as JSON."
    ),
    click.option(
        "--work",
        type=click.Path(file_okay=False, path_type=Path),
        help="Keeps what was measured, to go on from there. Default: OUT with .work in place of .json.",
    ),
    click.option("--dry-run", is_flag=True, help="Leave MODEL as it is."),
    click.option("--server", metavar="HOST:PORT", help="Ask this one, which serves MODEL; start none."),
    click.option("--binary", type=_file, help="The epikvd to start. Default: as for benches."),
    click.option("--daemon-flag", "flags", multiple=True, help="Of the daemon that is started."),
)  # fmt: skip


def _options(command: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@click.command("epikv_flat")
@_options
def command(
    model: Path, out: Path, work: Path | None, dry_run: bool, at_once: int, **given: Any
) -> None:
    """Find the pair of layers and the sign with which epikv_flat keeps what MODEL needs, and write
    them into MODEL.

    Tokens are labelled by what happens to the answer without them; pairs that tell the needed ones
    from others are tried, and the best is confirmed by running it against its inverse and random
    eviction. Nothing is written, and the exit status is 1, unless it beats both. Interrupted, or
    left by its daemon, the same command goes on where it was.
    """
    try:
        from epikv.calibrate import show
        from epikv.calibrate.epikv_flat import calibrate
        from epikv.calibrate.journal import JournalError
        from epikv.calibrate.runs import Runner
        from epikv.eval.runner import Interrupted
        from epikv.export import ExportError, archive
    except ImportError as error:
        raise click.ClickException(
            f"{error}; install what calibration needs: pip install 'epikv[calibrate,export]'"
        ) from error
    where = {name: given.pop(name) for name in ("server", "binary", "flags")}
    plan = _plan(**given)
    folder = work or out.with_suffix(".work")
    try:
        manifest, tokenizer = archive.read_manifest(model), archive.read_tokenizer(model)
        with _interruptible(), _served(model, manifest, at_once, **where) as (client, served):
            report = calibrate(plan, Runner(client, served, at_once), manifest, tokenizer, folder)
    except (ExportError, JournalError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    except RpcError as error:
        raise click.ClickException(f"{error}; what was measured is in {folder}") from error
    except (Interrupted, KeyboardInterrupt):
        click.echo(f"interrupted; the same command goes on with what is in {folder}", err=True)
        raise SystemExit(INTERRUPTED) from None
    out.write_text(json.dumps(report.to_json(), indent=1) + "\n")
    show.show(report)
    if report.refusal:
        raise SystemExit(1)
    if not dry_run:
        calibrated = replace(manifest, calibration=report.calibration())
        archive.replace_manifest(model, calibrated)
        click.echo(f"written into {model}")


@contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM is as Ctrl-C: how to go on is told."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _served(
    model: Path,
    manifest: "Manifest",
    at_once: int,
    *,
    server: str | None,
    binary: Path | None,
    flags: Sequence[str],
) -> Iterator[tuple[Client, Model]]:
    """The daemon at `server`, if it serves these weights, or one of our own."""
    own = [f"--max_running_requests={at_once}", *(f"--{flag.removeprefix('--')}" for flag in flags)]
    with harness.serving(
        lambda: model, own, server=server, metrics=None, binary=binary, needs_metrics=False
    ) as served:
        found = {each.name: each for each in served.client.models()}
        if manifest.name not in found:
            raise click.ClickException(f"{server} serves {', '.join(found)}, not {manifest.name}")
        if server is not None and found[manifest.name].weights != (manifest.weights or ""):
            raise click.ClickException(f"{server} serves other weights as {manifest.name}")
        yield served.client, found[manifest.name]


def _plan(
    *,
    labels: tuple[str, ...],
    runs: int,
    drop: float,
    window: int,
    stride: int,
    filler: str,
    start: str,
    seed: int,
    z_window: int,
    least: int | None,
    **rest: Any,
) -> "Plan":
    from epikv.calibrate.choose import Rule
    from epikv.calibrate.eviction import Eviction
    from epikv.calibrate.occlusion import Occlusion
    from epikv.calibrate.plan import Plan

    if stride > window:
        raise click.UsageError("--stride beyond --window leaves tokens without a label")
    least = least or (10 if labels[0] == "occlusion" else 1)
    return Plan(
        labels=labels,
        eviction=Eviction(runs, drop),
        occlusion=Occlusion(window, stride, filler, start, seed),
        rule=Rule(window=z_window, least=least, seed=seed),
        **rest,
    )

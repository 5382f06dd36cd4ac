"""`epikv calibrate epikv_flat`"""

import json
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from epikv import harness
from epikv.client import Client
from epikv.errors import RpcError
from epikv.eval import answer_options
from epikv.installing import pip_install
from epikv.messages import Model
from epikv.processes import INTERRUPTED

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
        help="Problems to solve: sample:FAMILY or file:PATH, as in `epikv eval`. May be given several"
        " times; each task counts the same.",
    ),
    answer_options.add,
    click.option("--traces", default=32, show_default=True, help="Problems of each task to label."),
    click.option("--try", "trials", default=24, show_default=True, help="Problems of each task to try pairs on."),
    click.option("--confirm", default=100, show_default=True, help="Problems of each task to confirm the best pair on."),
    click.option(
        "--fraction",
        "fractions",
        multiple=True,
        type=click.FloatRange(0, 1, min_open=True, max_open=True),
        default=(0.5,),
        show_default=True,
        help="Share of the trace that is kept. The first decides; others are run and reported.",
    ),
    click.option(
        "--label",
        "labels",
        multiple=True,
        type=click.Choice(["eviction", "occlusion"]),
        default=("eviction",),
        show_default=True,
        help="When a token is needed. eviction: later tokens are badly predicted once it is evicted."
        " occlusion: the answer is wrong when a window over it is replaced. Given both, the first"
        " decides, and their agreement is reported.",
    ),
    click.option("--runs", default=48, show_default=True, help="Runs of each trace that evict at random."),
    click.option(
        "--drop",
        default=0.5,
        show_default=True,
        help="A token is badly predicted if it is less likely by so many nats.",
    ),
    click.option("--window", default=32, show_default=True, help="Occlusion: tokens replaced together."),
    click.option("--stride", default=16, show_default=True, help="Occlusion: tokens from one window to the next."),
    click.option(
        "--filler",
        type=click.Choice(["randmulti", "random", "eos", "pad"]),
        default="randmulti",
        show_default=True,
        help="Occlusion: what tokens are replaced with.",
    ),
    click.option(
        "--from",
        "start",
        type=click.Choice(["gap", "answer"]),
        default="gap",
        show_default=True,
        help="Occlusion: where the model goes on. gap: where the window would be evicted; answer: at the"
        " answer.",
    ),
    click.option(
        "--z-window", default=64, show_default=True, help="Tokens over which the policy takes its z-score."
    ),
    click.option(
        "--least",
        type=int,
        help="A trace counts if it has so many needed tokens and so many others. Default: 1; with"
        " labels by occlusion, which label windows, 10.",
    ),
    click.option(
        "--max-output-tokens", type=click.IntRange(min=1), help="Default: 1.25 times a known trace."
    ),
    click.option("--seed", default=0, show_default=True, help="Seed of fillers, turned labels and resamples."),
    click.option("--at-once", default=64, show_default=True, help="Requests that run at once."),
    click.option(
        "-o", "--out", type=_new_file, required=True, help="Report of all that was measured, as JSON."
    ),
    click.option(
        "--work",
        type=click.Path(file_okay=False, path_type=Path),
        help="Folder that keeps what was measured, so that an interrupted run can go on. Default: OUT with"
        " .work in place of .json.",
    ),
    click.option("--dry-run", is_flag=True, help="Leave MODEL as it is."),
    click.option("--server", metavar="HOST:PORT", help="Use this daemon, which must serve MODEL; start none."),
    click.option("--binary", type=_file, help=harness.BUILT),
    click.option("--daemon-flag", "flags", multiple=True, help="Flag of the daemon that is started; may be given several times."),
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

    Tokens are labelled by what happens without them. Pairs that tell needed tokens from others are
    tried, and the best is confirmed by running it against its inverse and random eviction. If it
    does not beat both, nothing is written and the exit status is 1. After an interruption, the same
    command goes on where it was.
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
            f"{error}; install what calibration needs: {pip_install('calibrate', 'export')}"
        ) from error
    where = {name: given.pop(name) for name in ("server", "binary", "flags")}
    plan = _plan(reading=answer_options.take(given, given["tasks"]), **given)
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
    """SIGTERM does what Ctrl-C does: how to go on is told."""
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
    binary = binary if server is not None else harness.built_binary(binary)
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

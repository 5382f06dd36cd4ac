"""`epikv calibrate epikv_flat`"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from epikv.bench import harness

if TYPE_CHECKING:
    from epikv.calibrate.plan import Plan

_file = click.Path(exists=True, dir_okay=False, path_type=Path)
_new_file = click.Path(dir_okay=False, path_type=Path)
_OPTIONS = (
    click.argument("model", type=_file),
    click.option(
        "--task",
        "tasks",
        multiple=True,
        required=True,
        help="Of which problems to solve: sample:programs. Give it often; each counts alike.",
    ),
    click.option("--traces", default=60, show_default=True, help="Problems of a task to label."),
    click.option("--try", "trials", default=40, show_default=True, help="To try pairs on."),
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
    click.option("--runs", default=64, show_default=True, help="Of a trace, evicting at random."),
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
        help="Needed tokens, and others, that a trace must have to count. Default: 3; with labels by"
        " occlusion, which are of windows, 10.",
    ),
    click.option(
        "--max-tokens", default=8192, show_default=True, help="Where a task has no trace lengths."
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
    click.option("--binary", type=_file, help="The epikvd to start, as for `epikv bench`."),
)  # fmt: skip


def _options(command: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@click.command("epikv_flat")
@_options
def command(
    model: Path,
    out: Path,
    work: Path | None,
    dry_run: bool,
    server: str | None,
    binary: Path | None,
    at_once: int,
    **plan: Any,
) -> None:
    """Find the pair of layers and the sign with which epikv_flat keeps what MODEL needs, and write
    them into MODEL.

    Tokens are labelled by what happens to the answer without them; pairs that tell the needed ones
    from others are tried, and the best is confirmed by running it against its inverse and random
    eviction. Nothing is written, and the exit status is 1, unless it beats both.
    """
    try:
        from epikv.calibrate.epikv_flat import calibrate
        from epikv.calibrate.journal import JournalError
        from epikv.calibrate.runs import Runner
        from epikv.calibrate.show import show
        from epikv.export import ExportError, archive
    except ImportError as error:
        raise click.ClickException(
            f"{error}; install what calibration needs: pip install 'epikv[calibrate,export]'"
        ) from error
    if plan["stride"] > plan["window"]:
        raise click.UsageError("--stride beyond --window leaves tokens without a label")
    try:
        manifest, tokenizer = archive.read_manifest(model), archive.read_tokenizer(model)
    except ExportError as error:
        raise click.ClickException(str(error)) from error
    flags = ["--threads=1", f"--max_running_requests={at_once}"]
    where = {"server": server, "metrics": None, "binary": binary, "needs_metrics": False}
    with harness.serving(lambda: model, flags, **where) as served:
        names = [served_model.name for served_model in served.client.models()]
        if manifest.name not in names:
            raise click.ClickException(f"{server} serves {', '.join(names)}, not {manifest.name}")
        runner = Runner(served.client, manifest.name, manifest.context_length, at_once)
        try:
            folder = work or out.with_suffix(".work")
            report = calibrate(_plan(**plan), runner, manifest, tokenizer, folder)
        except JournalError as error:
            raise click.ClickException(str(error)) from error
    out.write_text(json.dumps(report.to_json(), indent=1) + "\n")
    show(report)
    if report.refusal:
        raise SystemExit(1)
    if not dry_run:
        calibrated = replace(manifest, calibration=report.calibration())
        archive.replace_manifest(model, calibrated)
        click.echo(f"written into {model}")


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
    max_tokens: int,
    **rest: Any,
) -> "Plan":
    from epikv.calibrate.choose import Rule
    from epikv.calibrate.eviction import Eviction
    from epikv.calibrate.occlusion import Occlusion
    from epikv.calibrate.plan import Plan

    least = least or (10 if labels[0] == "occlusion" else 3)
    return Plan(
        labels=labels,
        eviction=Eviction(runs, drop),
        occlusion=Occlusion(window, stride, filler, start, seed),
        rule=Rule(window=z_window, least=least, seed=seed),
        most=max_tokens,
        **rest,
    )

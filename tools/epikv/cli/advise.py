"""`epikv advise`"""

import sys
from pathlib import Path
from typing import Any

import click

from epikv import harness
from epikv.cli import options, show
from epikv.errors import RpcError
from epikv.eval import answer_options
from epikv.processes import INTERRUPTED

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command("advise")
@click.argument("model", type=click.Path(exists=True, path_type=Path))
@click.option(
    "--task",
    "names",
    multiple=True,
    metavar="NAME",
    help="As of `epikv eval`: sample:FAMILY, file:PATH, needle@WORDS, ... May be given several times.",
)
@click.option(
    "--traffic",
    type=_FILE,
    help="Requests of yours, to which no answers are known: JSON lines with `prompt` or `messages`.",
)
@click.option(
    "--problems",
    type=click.IntRange(min=8),
    default=600,
    show_default=True,
    help="Of each task, at most. A quarter of them, at most 64, choose; the others certify.",
)
@click.option(
    "--max-loss",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    default=0.02,
    show_default=True,
    help="What may be lost of the share of problems solved, in parts of all problems; with --traffic, of the"
    " answers' tokens.",
)
@click.option(
    "--confidence",
    type=click.FloatRange(0.5, 1, max_open=True),
    default=0.95,
    show_default=True,
    help="That what is certified loses no more than that.",
)
@click.option(
    "--policy",
    "wanted",
    multiple=True,
    metavar="NAME[:PARAM=VALUE,...]",
    help="May be given several times. Default: all that can run on the model as it is.",
)
@click.option(
    "--with",
    "variants",
    type=options.KvFields(),
    multiple=True,
    metavar="FIELD=N,...",
    help="Try each policy also with these, as `epikv eval` does, such as a tier that is looked at in doubt. May be given"
    " several times.",
)
@click.option(
    "--budget",
    "budgets",
    type=click.IntRange(min=1),
    multiple=True,
    help="Tokens, the prompt included. May be given several times. Default: 75, 50, 35, 25 and 15 %"
    " of what the full cache holds.",
)
@click.option("--minutes", default=20.0, show_default=True, help="To begin nothing new after.")
@answer_options.add
@click.option("--max-output-tokens", type=click.IntRange(min=1))
@click.option("--at-once", type=click.IntRange(min=1), default=32, show_default=True)
@click.option(
    "--out",
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for results and the page. What it has already is not run again.",
)
@click.option("--binary", type=_FILE, help=harness.BUILT)
@click.option(
    "--daemon-flag",
    "flags",
    multiple=True,
    help="Flag of the daemon that is started; may be given several times.",
)
def command(model: Path, names: tuple[str, ...], traffic: Path | None, **given: Any) -> None:
    """Say which policy at which budget is the cheapest that loses next to nothing.

    MODEL, a model file or a Hugging Face directory, answers problems of yours under every policy at several
    budgets, and under the full cache. The page says which budget is certified to lose at most --max-loss, with
    what policy, and how to ask for it. After an interruption, the same command goes on where it was.
    """
    if (traffic is None) == (not names):
        raise click.UsageError("give --task or --traffic: problems to measure on")
    below = any(
        name.startswith("tier_") or name == "guard" for of in given["variants"] for name in of
    )
    if below and not any("kv_tier_bytes" in flag for flag in given["flags"]):
        raise click.UsageError("a tier needs --daemon-flag kv_tier_bytes=BYTES")
    sys.exit(_advise(model=model, names=names, traffic=traffic, **given))


def _advise(
    *,
    model: Path,
    names: tuple[str, ...],
    traffic: Path | None,
    problems: int,
    max_loss: float,
    confidence: float,
    wanted: tuple[str, ...],
    variants: tuple[dict[str, float], ...],
    budgets: tuple[int, ...],
    minutes: float,
    max_output_tokens: int | None,
    at_once: int,
    out: Path,
    binary: Path | None,
    flags: tuple[str, ...],
    **where: Any,
) -> int:
    """The exit status: 0, or 1 where nothing could be certified."""
    from epikv.advise import page, study
    from epikv.advise import traffic as requests
    from epikv.cli import eval_models as models
    from epikv.eval import plots
    from epikv.eval.plan import FULL, RANDOM, SLACK, Settings, arms, named
    from epikv.eval.runner import Interrupted, Server
    from epikv.eval.tasks import load

    plots.check()
    if traffic is not None:
        tasks = [requests.task(traffic, problems, max_output_tokens)]
    else:
        reading = answer_options.take(where, names)
        tasks = [
            named(name, load(name, "test", problems, reading=reading), reading) for name in names
        ]
        if len({task.name for task in tasks}) < len(tasks):
            raise click.UsageError("two tasks have one name")
    settings = Settings(max_output_tokens=max_output_tokens)
    own = [f"--max_running_requests={at_once}", *(f"--{f.removeprefix('--')}" for f in flags)]
    wish = study.Wish(max_loss, confidence, 60 * minutes, sorted(budgets, reverse=True))
    with harness.serving(
        lambda: models.exported(model) if model.is_dir() else model,
        own,
        server=None,
        metrics=None,
        binary=harness.built_binary(binary),
        needs_metrics=False,
    ) as served:
        [described] = served.client.models()
        catalog = served.client.policies(model=described.name)
        everything = study.runnable(catalog)
        texts = [
            each for text in wanted or ["all"] for each in (everything if text == "all" else [text])
        ]
        chosen = arms(catalog, texts, SLACK, oracle=False, kv=variants)
        if all(arm.policy in (FULL, RANDOM) for arm in chosen):
            raise click.UsageError("name a --policy that evicts, beside full and random")
        servers = [Server(served.client, served.address)]
        try:
            advice = study.study(
                servers,
                described,
                catalog,
                tasks,
                chosen,
                settings,
                wish,
                out,
                at_once,
                harness.say,
            )
        except (Interrupted, KeyboardInterrupt):
            click.echo(f"interrupted; the same command goes on from what is in {out}", err=True)
            return INTERRUPTED
        except RpcError as error:
            raise click.ClickException(f"the daemon went away: {error}") from error
    advice.flags = flags
    page.write(out, described, tasks, chosen, settings, advice)
    for line in page.lines(chosen, settings, advice):
        show.out.print(line)
    click.echo(f"the page: {out / page.PAGE}", err=True)
    return 0 if advice.advised is not None else 1

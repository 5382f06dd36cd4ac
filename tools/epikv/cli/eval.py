"""`epikv eval`"""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from epikv import harness
from epikv.cli import options, show
from epikv.client import Client
from epikv.connection import DEFAULT_SERVER
from epikv.errors import RpcError
from epikv.eval import answer_options
from epikv.installing import pip_install
from epikv.messages import Model
from epikv.options import POSITIONS, show_budget
from epikv.processes import INTERRUPTED
from epikv.testing import DaemonError

if TYPE_CHECKING:
    from epikv.eval.files import Reading
    from epikv.eval.plan import Task
    from epikv.sample.need import Need

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
# A node that is gone says nothing: after half a minute its daemon is lost.
_KEEPALIVE = [("grpc.keepalive_time_ms", 20_000), ("grpc.keepalive_timeout_ms", 10_000)]


class _Slack(click.ParamType):
    name = "tokens|own"

    def convert(self, value: Any, param: Any, ctx: Any) -> int | None:
        if value == "own" or not isinstance(value, str):
            return None if value == "own" else value
        if not value.isdecimal():
            self.fail(f"'{value}' is neither a number of tokens nor 'own'", param, ctx)
        return int(value)


@click.command("eval")
@click.option(
    "--task",
    "names",
    multiple=True,
    metavar="NAME",
    help="sample:FAMILY, sample:FAMILY@LINES, solved:FAMILY, file:PATH (MATH-500, AIME, GSM8K,"
    " MMLU, LongBench, RULER, lm-eval's samples, your own),"
    " needle@WORDS, recall@PAIRS. May be given several times.",
)
@click.option(
    "--problems",
    type=click.IntRange(min=1),
    default=50,
    show_default=True,
    help="Run the first so many problems of each task.",
)
@click.option(
    "--split", default="test", show_default=True, help="Which made problems; splits share none."
)
@answer_options.add
@click.option(
    "--policy",
    "wanted",
    multiple=True,
    metavar="NAME[:PARAM=VALUE,...]",
    help="May be given several times. `all`: every policy with its defaults. full and random are"
    " always run; oracle too, where it is known what is needed.",
)
@click.option(
    "--steering",
    type=click.FloatRange(-100, 100),
    multiple=True,
    metavar="COEFFICIENT",
    help="Run full and each --policy also with the model's steering vector, times this. May be given several times.",
)
@click.option(
    "--with",
    "variants",
    type=options.KvFields(),
    multiple=True,
    metavar="FIELD=N,...",
    help=f"Run each --policy also with these: {', '.join(options.KvFields.KNOWN)}. May be given several times.",
)
@click.option(
    "--budget",
    "budgets",
    type=options.Budget(),
    multiple=True,
    default=(0.5,),
    help="Tokens, the prompt included (1024); or the prompt and a share of the reference trace"
    " (0.5, 50%). May be given several times. Default: 50%.",
)
@click.option(
    "--slack",
    type=_Slack(),
    default="15",
    show_default=True,
    help="Tokens by which all policies may exceed their budget between rounds; `own`: each policy's"
    " default.",
)
@click.option(
    "--published-protection",
    is_flag=True,
    help="Each policy keeps what its authors' does, instead of the rule that is equal for all.",
)
@click.option(
    "--positions", type=click.Choice(list(POSITIONS)), default="absolute", show_default=True
)
@click.option("--temperature", type=click.FloatRange(min=0), default=0.0, help="Default: greedy.")
@click.option("--top-p", type=click.FloatRange(0, 1, min_open=True), default=1.0)
@click.option(
    "--seeds",
    type=click.IntRange(min=1),
    default=1,
    help="Completions of each problem; more than one needs --temperature.",
)
@click.option(
    "--max-output-tokens", type=click.IntRange(min=1), help="Default: 1.25 times a known trace."
)
@click.option(
    "--at-once",
    type=click.IntRange(min=1),
    default=64,
    show_default=True,
    help="Requests that run at once, on each daemon.",
)
@click.option(
    "--out",
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for results and report. What it has already is not run again.",
)
@click.option(
    "--server",
    "servers",
    multiple=True,
    metavar="HOST:PORT",
    help="May be given several times: the work is spread over daemons of the same model. Default:"
    " $EPIKV_SERVER or " + DEFAULT_SERVER + ", unless a daemon is started.",
)
@click.option(
    "--ray",
    "cluster",
    is_flag=False,
    flag_value="auto",
    metavar="[ADDRESS]",
    help="Start a daemon on each node of this Ray cluster, or of the one here. --model and --binary are paths on all"
    " nodes.",
)
@click.option("--model-name", default="", help="Needed only if several models are served.")
@click.option("--model", type=_FILE, help="Start a daemon on this model file.")
@click.option(
    "--model-dir",
    type=_FOLDER,
    help="A sample model's folder. Its oracle knows what is needed; without --server, a daemon is"
    " started on it.",
)
@click.option(
    "--daemons",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="How many daemons are started on --model or --model-dir; the work is spread over them.",
)
@click.option("--binary", type=_FILE, help=harness.BUILT)
@click.option(
    "--daemon-flag",
    "flags",
    multiple=True,
    help="Flag of each daemon that is started; may be given several times.",
)
def command(names: tuple[str, ...], out: Path, **given: Any) -> None:
    """Measure what policies keep: problems with checkable answers, under budgets.

    After an interruption, the same command goes on where it was. Without --task it writes the
    report of what is in --out so far.
    """
    if given["seeds"] > 1 and not given["temperature"]:
        raise click.UsageError("greedy completions are all alike: --seeds needs a --temperature")
    from epikv.eval import plots

    plots.check()
    if names:
        sys.exit(_evaluate(names=names, out=out, **given))
    _report(out)


def _evaluate(
    *,
    names: tuple[str, ...],
    problems: int,
    split: str,
    wanted: tuple[str, ...],
    steering: tuple[float, ...],
    variants: tuple[dict[str, float], ...],
    budgets: tuple[int | float, ...],
    slack: int | None,
    published_protection: bool,
    positions: str,
    temperature: float,
    top_p: float,
    seeds: int,
    max_output_tokens: int | None,
    at_once: int,
    out: Path,
    model_name: str,
    model_dir: Path | None,
    **where: Any,
) -> int:
    """The exit status."""
    from epikv.cli import eval_models as models
    from epikv.eval import runner
    from epikv.eval.plan import Settings, arms, document
    from epikv.eval.summary import faults

    reading = answer_options.take(where, names)
    needs = models.needs(model_dir) if model_dir is not None else {}
    tasks = [_load(name, split, problems, reading, needs) for name in names]
    if len({task.name for task in tasks}) < len(tasks):
        raise click.UsageError("two tasks have one name")
    if steering and (forced := [task.name for task in tasks if not task.generated]):
        raise click.UsageError(
            f"{forced[0]} generates nothing, so there is nothing to steer: leave it or --steering out"
        )
    settings = Settings(
        split=split,
        seeds=seeds,
        temperature=temperature,
        top_p=top_p,
        max_output_tokens=max_output_tokens,
        equal_protection=not published_protection,
        positions=positions,
    )
    needed = [*wanted, models.STEERING] if steering else wanted
    with _served(at_once, model_dir, needed, **where) as served:
        first = served[0].client
        model = _model(first, model_name)
        _agree(served, model)
        catalog = first.policies(model=model.name)
        oracle = any(task.oracle for task in tasks)
        chosen = arms(catalog, wanted, slack, oracle, steering, variants)
        shown = [show_budget(budget) for budget in dict.fromkeys(budgets)]
        plan = document(model, tasks, chosen, shown, settings)
        try:
            servers = [runner.Server(each.client, each.address) for each in served]
            runner.run(servers, plan, tasks, settings, out, at_once)
        except (runner.Interrupted, KeyboardInterrupt):
            click.echo(f"interrupted; {_how_far(out)}", err=True)
            return INTERRUPTED
        except RpcError as error:
            raise click.ClickException(
                f"{', '.join(each.address for each in served)} went away: {error}\n{_how_far(out)}"
            ) from error
    summary = _report(out)
    return int(any(runner.FAILURE in fault for fault in faults(summary)))


def _report(folder: Path) -> dict[str, Any]:
    """Writes it, and tells what there is."""
    from epikv.eval import report, table
    from epikv.eval.summary import faults

    summary = report.write(folder)
    for line in table.made(summary["plan"]):
        click.echo(line)
    for each in table.short(summary):
        show.out.print()
        show.out.print(each)
    show.out.print("* the interval of the difference is without 0; length: of what full wrote")
    click.echo(_how_far(folder), err=True)
    for fault, count in faults(summary).items():
        click.echo(f"refused, {count} times: {fault}", err=True)
    click.echo(f"every figure: {folder / 'report.html'}, {folder / 'summary.md'}", err=True)
    return summary


def _load(
    name: str, split: str, problems: int, reading: "Reading", needs: "dict[str, Need]"
) -> "Task":
    from epikv.eval.plan import named
    from epikv.eval.tasks import load

    return named(name, load(name, split, problems, reading=reading, needs=needs), reading)


@contextmanager
def _served(
    at_once: int,
    model_dir: Path | None,
    wanted: Sequence[str],
    *,
    servers: Sequence[str],
    cluster: str | None,
    model: Path | None,
    daemons: int,
    binary: Path | None,
    flags: Sequence[str],
) -> Iterator[list[harness.Served]]:
    """The daemons at `servers` or of a Ray cluster, or `daemons` on `model` or on what `model_dir` holds."""
    from epikv.cli import eval_models as models

    if cluster is not None and (model is None or servers):
        raise click.UsageError("--ray needs --model, and no --server")
    if servers and model is not None:
        raise click.UsageError("give --server or --model: of a server's daemon the model is known")
    if len(set(servers)) < len(servers):
        raise click.UsageError("one --server is given twice")
    if daemons > 1 and (servers or cluster is not None or (model is None and model_dir is None)):
        raise click.UsageError(
            "--daemons needs --model or --model-dir, and neither --server nor --ray"
        )
    if not servers and model is None and model_dir is None and cluster is None:
        servers = [os.environ.get("EPIKV_SERVER", DEFAULT_SERVER)]
    own = [f"--max_running_requests={at_once}"]
    more = [f"--{flag.removeprefix('--')}" for flag in flags]
    if cluster is not None:
        assert model is not None
        with _on_nodes(cluster, model, [*own, *more], binary) as on_nodes:
            yield on_nodes
        return
    if not servers and model is None and model_dir is not None:
        named = {text.partition(":")[0] for text in wanted}
        if "all" in named:
            named |= models.CALIBRATED.keys() - {models.STEERING}
        found = models.artefacts(model_dir, named)
        own += [f"--artefact_dir={found}"] if found else []

    def to_serve() -> Path:
        if model is not None:
            return model
        assert model_dir is not None  # else there is a server
        return models.exported(model_dir)

    asked: list[str | None] = [*servers] or [None] * daemons
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                harness.serving(
                    to_serve,
                    [*own, *more],
                    server=server,
                    metrics=None,
                    binary=binary if server is not None else harness.built_binary(binary),
                    needs_metrics=False,
                )
            )
            for server in asked
        ]


@contextmanager
def _on_nodes(
    cluster: str, model: Path, flags: Sequence[str], binary: Path | None
) -> Iterator[list[harness.Served]]:
    """A daemon on each node of a Ray cluster."""
    try:
        from epikv.ray import nodes
    except ImportError as error:
        raise click.ClickException(
            f"{error}; install it: {pip_install('ray', 'gateway')}"
        ) from error
    try:
        with ExitStack() as stack:
            started = stack.enter_context(nodes.daemons(cluster, model, flags, binary or ""))
            harness.say(f"daemons of the Ray cluster: {', '.join(started.addresses)}")
            clients = [
                stack.enter_context(Client(address, _KEEPALIVE, token=started.token))
                for address in started.addresses
            ]
            yield [
                harness.Served(client, address, "")
                for client, address in zip(clients, started.addresses, strict=True)
            ]
    except DaemonError as error:
        raise click.ClickException(str(error)) from error


def _agree(served: Sequence[harness.Served], model: Model) -> None:
    """That all daemons serve the same, whose results may stand beside each other."""
    for each in served[1:]:
        other = each.client.model(model.name)
        for fact in ("weights", "dtype", "quantization", "kv_dtype", "calibration"):
            here, there = getattr(model, fact), getattr(other, fact)
            if here != there:
                raise click.UsageError(
                    f"{served[0].address} and {each.address} serve other models: {fact} {here}, {there}"
                )


def _model(client: Client, name: str) -> Model:
    served = client.models()
    if name:
        return client.model(name)
    if len(served) != 1:
        names = ", ".join(model.name for model in served)
        raise click.UsageError(f"several models are served, say which with --model-name: {names}")
    return served[0]


def _how_far(folder: Path) -> str:
    from epikv.eval import results
    from epikv.eval.plan import total

    plan, records = results.read(folder)
    told = f"{len(records)} of {total(plan)} completions are in {folder}"
    if refused := sum(bool(record.fault) for record in records):
        told += f": {len(records) - refused} were measured, {refused} were refused"
    more = "" if len(records) == total(plan) else "; the same command goes on from there"
    return told + more

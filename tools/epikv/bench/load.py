"""`epikv bench load`: a load of one's own against a daemon, and what came of it.

Open loop (--rate, --rate-of-capacity): requests arrive by a Poisson process whatever has become of
those before; latencies count from the arrival, so that nothing which falls behind can hide it.
Closed loop (--concurrency): each request's end begins the next.

load.schema.json is the JSON Schema of what --json writes.
"""

import json
import math
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click

from epikv import harness
from epikv.bench import capacity, plots
from epikv.bench.generator import ClosedLoop, Generator, Load, OpenLoop, Pattern
from epikv.bench.report import Window, report, show
from epikv.bench.watch import Watch
from epikv.bench.workload import Workload, parse_arm, parse_lengths, poisson
from epikv.errors import RpcError
from epikv.eval import answer_options, tasks
from epikv.eval.files import Reading
from epikv.eval.items import Item
from epikv.harness import Served
from epikv.messages import Model
from epikv.options import Experiment, Stop
from epikv.processes import INTERRUPTED

# Of the daemon that is started where no --model is given: a step takes milliseconds.
SHAPE: harness.Shape = {
    "hidden": 256,
    "layers": 4,
    "heads": 4,
    "kv_heads": 2,
    "ffn": 512,
    "vocab": 512,
    "context": 2048,
    "dtype": "bf16",
}
WATCH_SECONDS = 0.25  # between two probes

_CHECK_SECONDS = 60  # until a request is accepted


@dataclass(frozen=True)
class Deadline:
    """Seconds, or a multiple of the median of an idle daemon."""

    value: float
    of_idle: bool

    def seconds(self, idle: float | None) -> float:
        return self.value * idle if idle is not None else self.value


class _Parsed(click.ParamType):
    """What `parse` makes of a text, its ValueError being the user's."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name, self._parse = name, parse

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def _deadline(text: str) -> Deadline:
    found = re.fullmatch(r"(\d+\.?\d*|\.\d+)(x|s|ms)?", text)
    if found is None or float(found[1]) == 0:
        raise ValueError(f"'{text}' is neither seconds (2.5, 800ms) nor of the idle median (3x)")
    value, unit = float(found[1]), found[2]
    return Deadline(value / 1e3 if unit == "ms" else value, unit == "x")


_POSITIVE = click.FloatRange(min=0, min_open=True)


def workload_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """What `serving` takes beside `harness.options`."""
    length = _Parsed("tokens", parse_lengths)
    for option in (
        click.argument("daemon_flags", nargs=-1, metavar="[-- EPIKVD_FLAGS]"),
        click.option(
            "--model",
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            help="Start a daemon on this model file. Default: on one of random weights.",
        ),
        click.option("--model-name", default="", help="Needed only where several are served."),
        click.option("--seed", default=0, show_default=True),
        click.option(
            "--output",
            type=length,
            default="uniform:32:96",
            show_default=True,
            help="Most output tokens; forms as for --prompt.",
        ),
        click.option(
            "--prompt",
            type=length,
            default="uniform:32:96",
            show_default=True,
            help="Tokens: N, uniform:LEAST:MOST, lognormal:MEDIAN:SIGMA:MOST.",
        ),
        click.option(
            "--arm",
            "arms",
            type=_Parsed("policy[:budget[:weight]]", parse_arm),
            multiple=True,
            default=["full"],
            show_default=True,
            help="Of the mix; again for more. Budget: tokens, or a share (0.5, 50%).",
        ),
    ):
        command = option(command)
    return command


connections = click.option(
    "--connections", type=click.IntRange(min=1), default=8, show_default=True
)


@click.command("load")
@workload_options
@click.option("--rate", type=_POSITIVE, help="Open loop: requests a second.")
@click.option("--rate-of-capacity", type=_POSITIVE, help="Open loop: times its capacity.")
@click.option("--concurrency", type=click.IntRange(min=1), help="Closed loop: requests at once.")
@click.option(
    "--requests",
    type=click.IntRange(min=1),
    help="Closed loop: ends after so many, all of which count, whatever the duration.",
)
@click.option(
    "--task", help="Ask its problems (see `epikv eval`), and tell which answers are right."
)
@answer_options.add
@click.option(
    "--problems", type=click.IntRange(min=1), default=200, show_default=True, help="Of the task."
)
@click.option(
    "--units",
    type=click.IntRange(min=1),
    help="Users that requests come from in turn, each of whom keeps its arm of an experiment.",
)
@click.option(
    "--outcome",
    metavar="METRIC",
    default="",
    help="Record whether answers are right, of requests that take part in an experiment.",
)
@click.option(
    "--deadline",
    type=_Parsed("seconds", _deadline),
    help="From arrival to end: 2.5, 800ms, or 3x the median of an idle daemon.",
)
@click.option("--duration", type=_POSITIVE, default=30, show_default=True, help="Seconds.")
@click.option(
    "--warmup",
    type=click.FloatRange(min=0),
    default=5,
    show_default=True,
    help="Seconds before that, which do not count.",
)
@click.option(
    "--retry-share",
    type=click.FloatRange(0, 1),
    default=0,
    show_default=True,
    help="Open loop: of requests refused with a delay, sent again after it.",
)
@click.option(
    "--measure",
    type=_POSITIVE,
    default=10,
    show_default=True,
    help="Seconds for the idle median, and for each step of the capacity.",
)
@connections
@click.option(
    "--plots",
    "plots_folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="A folder for latency.png and timeline.png.",
)
@harness.options
def command(
    rate: float | None,
    rate_of_capacity: float | None,
    concurrency: int | None,
    requests: int | None,
    task: str | None,
    problems: int,
    units: int | None,
    outcome: str,
    deadline: Deadline | None,
    duration: float,
    warmup: float,
    retry_share: float,
    measure: float,
    connections: int,
    plots_folder: Path | None,
    json_file: Path | None,
    **where: Any,
) -> None:
    """Send a load to a daemon and tell latencies, throughput and goodput per policy and budget.

    One of --rate, --rate-of-capacity and --concurrency says how. Requests that take part in an
    experiment are told by its arms, too. Of --server's daemon, or of one
    that is started on --model with EPIKVD_FLAGS. Ctrl-C tells what there is. What --json writes is
    described by load.schema.json, beside this program's load.py.
    """
    if sum(given is not None for given in (rate, rate_of_capacity, concurrency)) != 1:
        raise click.UsageError("give one of --rate, --rate-of-capacity and --concurrency")
    if concurrency is not None and retry_share:
        raise click.UsageError("--retry-share is of an open loop; this one is closed")
    if requests is not None and concurrency is None:
        raise click.UsageError("--requests is of a closed loop: give --concurrency")
    if outcome and task is None:
        raise click.UsageError(
            "--outcome needs --task, whose answers are known to be right or wrong"
        )
    if plots_folder is not None:
        plots.check()
    reading = answer_options.take(where, [task or ""])
    asked = _problems(task, problems, reading)
    with serving(where, needs_metrics=False, units=units or 0, problems=asked) as (
        served,
        workload,
    ):
        generator = Generator(served.address, workload, connections=connections, outcome=outcome)
        idle = found = None
        if deadline is not None:
            idle = capacity.idle_median(generator, measure) if deadline.of_idle else None
            generator.deadline = deadline.seconds(idle)
        if rate_of_capacity is not None:
            found = capacity.measure(generator, measure)
            rate = rate_of_capacity * found.best.requests_per_second
        load, window, told = run(
            served,
            generator,
            pattern(rate, concurrency, warmup + duration, workload.seed, retry_share)
            if requests is None or concurrency is None
            else ClosedLoop(concurrency, math.inf, requests),
            warmup,
            duration if requests is None else None,
        )
        sent = f"{rate:.2f} requests/s" if rate is not None else f"{concurrency} at once"
        limit = "" if generator.deadline is None else f", deadline {generator.deadline:.3g} s"
        click.echo(f"{sent} for {window.seconds:.3g} s after {window.begin:.3g} s{limit}\n")
        show(told)
    details = {
        "bench": "load",
        "settings": {
            **settings(workload, generator),
            "rate": rate,
            "concurrency": concurrency,
            "requests": requests,
            "task": task,
            "problems": len(asked),
            "reading": reading.facts(),
            "units": units,
            "outcome": outcome,
            "retry_share": retry_share,
            "warmup_seconds": warmup,
            "duration_seconds": duration,
            "idle_median_seconds": idle,
        },
        "capacity": found and asdict(found),
        **told,
    }
    if plots_folder is not None:
        plots.draw(plots_folder, load, names(workload), window, told)
    if json_file is not None:
        json_file.write_text(json.dumps(details, indent=1) + "\n")
    if load.interrupted:
        sys.exit(INTERRUPTED)


def pattern(
    rate: float | None, concurrency: int | None, seconds: float, seed: int, retry_share: float
) -> Pattern:
    if concurrency is not None:
        return ClosedLoop(concurrency, seconds)
    assert rate is not None  # one of the two is given
    return OpenLoop(poisson(rate, seconds, seed), seconds, retry_share)


def _problems(task: str | None, count: int, reading: Reading) -> list[Item]:
    if task is None:
        return []
    found = [
        item for item in tasks.load(task, "load", count, reading=reading) if isinstance(item, Item)
    ]
    if not found:
        raise click.UsageError(f"--task: {task} generates nothing")
    return found


@contextmanager
def serving(
    where: dict[str, Any], needs_metrics: bool, **asked: Any
) -> Iterator[tuple[Served, Workload]]:
    """The daemon and the workload that `workload_options` and `harness.options` name, each of whose
    arms the daemon takes. asked: more of the workload."""
    arms, prompt, output = (where.pop(name) for name in ("arms", "prompt", "output"))
    seed, model_name = where.pop("seed"), where.pop("model_name")
    path, flags = where.pop("model"), where.pop("daemon_flags")
    if where["server"] is not None and (path or flags or where["binary"]):
        raise click.UsageError("--server's daemon runs: leave out --model, --binary and its flags")
    if len({arm.name for arm in arms}) < len(arms):
        raise click.UsageError("an arm is given twice; give it once, with a weight")

    def model() -> Path:
        return path or harness.random_model("load", **SHAPE)

    with harness.serving(model, flags, needs_metrics=needs_metrics, **where) as served:
        vocabulary = _asked_model(served, model_name).vocab_size
        workload = Workload(arms, prompt, output, vocabulary, model_name, seed, **asked)
        _check(served, workload)
        yield served, workload


def _asked_model(served: Served, name: str) -> Model:
    models = {model.name: model for model in served.client.models()}
    if not name and len(models) == 1:
        return next(iter(models.values()))
    if name not in models:
        raise click.UsageError(
            f"--model-name is '{name}'; the daemon serves {', '.join(sorted(models))}"
        )
    return models[name]


def _check(served: Served, workload: Workload) -> None:
    """That the shortest and the longest request of each arm are accepted; tells all that are not."""
    wrong = []
    for arm in workload.arms:
        for prompt, output in workload.extremes:
            stream = served.client.generate(
                prompt,
                kv=arm.kv,
                stop=Stop(max_output_tokens=output),
                model=workload.model,
                experiment=Experiment(opt_out=True),
                timeout=_CHECK_SECONDS,
            )
            try:
                with stream:
                    next(stream)
            except RpcError as error:
                length = "a problem" if isinstance(prompt, str) else len(prompt)
                wrong.append(f"{arm.name}, {length} + {output} tokens: {error}")
    if wrong:
        raise click.ClickException("\n".join(["the daemon does not take these arms", *wrong]))


def run(
    served: Served, generator: Generator, pattern: Pattern, warmup: float, duration: float | None
) -> tuple[Load, Window, dict[str, Any]]:
    """A load with the daemon watched: its samples, the window that counts, and its report.
    duration: None: all of it counts."""
    with Watch(served.address, served.metrics, WATCH_SECONDS) as watch:
        load = generator.run(pattern)
    if duration is None:
        warmup, duration = 0, load.seconds
    window = Window(warmup, warmup + duration, generator.deadline)
    if load.interrupted:
        window = replace(window, begin=min(warmup, load.seconds / 2), end=load.seconds)
    return load, window, report(load, names(generator.workload), window, watch.readings)


def names(workload: Workload) -> list[str]:
    return [arm.name for arm in workload.arms]


def settings(workload: Workload, generator: Generator) -> dict[str, Any]:
    """As the JSON tells them."""
    return {
        "arms": {arm.name: arm.weight for arm in workload.arms},
        "prompt": workload.prompt.spec,
        "output": workload.output.spec,
        "seed": workload.seed,
        "connections": generator.connections,
        "deadline_seconds": generator.deadline,
    }

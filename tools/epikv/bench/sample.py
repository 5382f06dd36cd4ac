"""The sample model's gates, through the daemon: policies at half the cache, on the same problems.

Many requests run at once in one daemon. A problem's budget is its prompt and half (or another
share) of its expected trace, and all policies protect the same tokens. `oracle` is told which
tokens the model was measured to need; `epikv_flat` takes its layers from the model's calibration.
"""

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

import click

from epikv.bench import harness
from epikv.bench.targets import Estimate, Target, bootstrap, finish
from epikv.client import Client
from epikv.options import Kv, Sampling, Stop
from epikv.sample.programs import Problem

if TYPE_CHECKING:
    from epikv.sample.calibrate import Need
    from epikv.sample.simulate import Outcome

MODELS = Path(__file__).resolve().parents[2] / "sample_model"
# `inverse` is epikv_flat with the sign turned round, `published` with the published layers and sign.
POLICIES = (
    "full", "oracle", "epikv_flat", "inverse", "published", "h2o", "sliding", "random"
)  # fmt: skip
PUBLISHED = {"layer_a": 1, "layer_b": 3, "sign": 1, "window": 64}  # at their depths in this model
GATED_FRACTION = 0.5
SLACK_TOKENS = 32  # how far past its expected trace a completion may go on
FULL, ORACLE, SEPARATION, INVERSE_DIFFERS = 0.95, 0.90, 0.5, 0.2


@click.command("sample")
@click.option(
    "--model-dir",
    "directories",
    multiple=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Hold this model to the gates. Default: measure every seed that comes with the package,"
    " and hold the shipped one to them.",
)
@click.option("--problems", "count", default=200, show_default=True)
@click.option(
    "--fraction",
    "fractions",
    multiple=True,
    type=click.FloatRange(0, 1, min_open=True),
    default=(0.5,),
    help="Of the trace that is kept. Several: one after another; the gates are those at 0.5.",
)
@click.option("--results", is_flag=True, help="Write each model's results.json, for its card.")
@click.option("--at-once", default=64, show_default=True, help="Requests running together.")
@harness.options
def command(
    directories: tuple[Path, ...],
    count: int,
    fractions: tuple[float, ...],
    results: bool,
    at_once: int,
    json_file: Path | None,
    **where: Any,
) -> None:
    """The sample models' accuracy by policy, at half the cache."""
    gated = list(directories) or [MODELS / (MODELS / "SHIPPED").read_text().strip()]
    measured = list(directories) or sorted(MODELS.glob("seed*"))
    if where["server"] is not None and len(measured) != 1:
        raise click.UsageError("--server serves one model: say which with --model-dir")
    targets: list[Target] = []
    details: dict[str, Any] = {}
    for directory in measured:
        flags = ["--threads=1", f"--max_running_requests={at_once}"]
        rows: list[dict[str, Any]] = []
        with harness.serving(lambda path=directory: _export(path), flags, **where) as served:
            for fraction in fractions:
                outcomes = _run(served.client, directory, count, fraction, at_once)
                rows += [
                    {"policy": name, "fraction": fraction, **outcome.summary()}
                    for name, outcome in outcomes.items()
                ]
                if directory in gated and fraction == GATED_FRACTION:
                    targets += _gates(directory.name, outcomes)
        details[directory.name] = rows
        if results:
            (directory / "results.json").write_text(json.dumps(rows, indent=1) + "\n")
    untargeted = None
    if GATED_FRACTION not in fractions:
        untargeted = f"the gates are those at a fraction of {GATED_FRACTION}"
    finish("sample", targets, details, json_file, untargeted=untargeted)


def _export(directory: Path) -> Path:
    """The model as the quickstart has it: in float32, with its calibration."""
    from epikv.export import ExportError, export

    path = harness.cached(directory.name, {"dtype": "float32"}, list(directory.glob("*.*")))
    if not path.exists():
        harness.say(f"exporting {directory}")
        try:
            export(directory, path, dtype="float32", name=directory.name)
        except ExportError as error:
            raise click.ClickException(str(error)) from error
    return path


def _run(
    client: Client, directory: Path, count: int, fraction: float, at_once: int
) -> "dict[str, Outcome]":
    """Every policy's completions of the held-out problems, judged."""
    from epikv.sample.calibrate import need_from, problems
    from epikv.sample.simulate import budgets, judge

    calibration = json.loads((directory / "calibration.json").read_text())
    tasks = problems("test", count)
    need, limits = need_from(calibration), budgets(tasks, fraction)
    outcomes = {}
    for name in POLICIES:

        def complete(number: int, name: str = name) -> str:
            task, budget = tasks[number], limits[number]
            return client.generate_once(
                task.prompt,
                kv=_kv(name, task, budget, need, calibration),
                sampling=Sampling(seed=number),
                stop=Stop(max_output_tokens=len(task.trace_tokens) + SLACK_TOKENS),
            ).text

        with ThreadPoolExecutor(at_once) as pool:
            texts = list(pool.map(complete, range(count)))
        outcomes[name] = judge(tasks, texts)
        share = _share(outcomes[name])
        answers = outcomes[name].summary()["answer_accuracy"]
        harness.say(
            f"{directory.name} {fraction:.0%} {name:<10} exact {share.value:.3f}"
            f" [{share.low:.3f}, {share.high:.3f}]  answers {answers:.3f}"
        )
    return outcomes


def _kv(name: str, task: Problem, budget: int, need: "Need", calibration: dict[str, Any]) -> Kv:
    from epikv.sample.simulate import recent

    params: dict[str, Any] = {}
    match name:
        case "full":
            return Kv("full")
        case "oracle":
            prompt = len(task.prompt.split())
            needed = need.tokens(task, recent(budget, prompt))
            params = {"prefer": [prompt + index for index in needed]}
        case "h2o":
            params = {"scope": "model"}
        case "epikv_flat" | "inverse":
            layers, sign = calibration["layers"], calibration["sign"]
            params = {
                "layer_a": layers["a"],
                "layer_b": layers["b"],
                "sign": sign if name == "epikv_flat" else -sign,
                "window": calibration["window"],
            }
        case "published":
            params = PUBLISHED
    policy = "epikv_flat" if name in ("inverse", "published") else name
    return Kv(policy, budget, params, equal_protection=True)


def _gates(model: str, outcomes: "dict[str, Outcome]") -> list[Target]:
    """What the shipped model promises. Differences are between policies on the same problems."""
    exact = {name: _exact(outcome) for name, outcome in outcomes.items()}
    gates = {
        "full": (_share(outcomes["full"]), FULL),
        "oracle": (_share(outcomes["oracle"]), ORACLE),
        "oracle_minus_sliding": (_difference(exact["oracle"], exact["sliding"]), SEPARATION),
        "h2o_minus_sliding": (
            _difference(exact["h2o"], exact["sliding"]),
            1 / len(exact["full"]),
        ),
        "epikv_flat_against_inverse": (
            _difference(*sorted((exact["epikv_flat"], exact["inverse"]), key=sum, reverse=True)),
            INVERSE_DIFFERS,
        ),
    }
    return [
        Target(f"{model}.{name}", estimate, bound, at_least=True)
        for name, (estimate, bound) in gates.items()
    ]


def _difference(more: Sequence[float], less: Sequence[float]) -> Estimate:
    """Of two means over the same problems."""
    return bootstrap(
        list(zip(more, less, strict=True)), lambda sample: mean(x - y for x, y in sample)
    )


def _exact(outcome: "Outcome") -> list[int]:
    """1 for each problem all of whose answers are right."""
    return [int(all(row)) for row in outcome.correct]


def _share(outcome: "Outcome") -> Estimate:
    from epikv.sample.simulate import wilson

    exact: Sequence[int] = _exact(outcome)
    return Estimate(mean(exact), *wilson(sum(exact), len(exact)))

"""The sample model's gates, through the daemon: policies at half the cache, on the same problems.

Many requests run at once in one daemon. A problem's budget is its prompt and half (or another
share) of its expected trace, and all policies protect the same tokens. `oracle` is told which
tokens the model was measured to need; `epikv_flat` takes its layers from the model's calibration.
With --policies it is the registered ones instead, in one table and without gates: survey.py.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from epikv.bench import harness, survey
from epikv.bench.targets import Target, finish
from epikv.bench.trial import PUBLISHED, Trial, exact, share
from epikv.client import Client
from epikv.eval.models import CALIBRATED, artefacts, exported
from epikv.options import Kv
from epikv.stats import difference

if TYPE_CHECKING:
    from epikv.sample.simulate import Outcome

MODELS = Path(__file__).resolve().parents[2] / "sample_model"
# `inverse` is epikv_flat with the sign turned round, `published` with the published layers and sign.
POLICIES = (
    "full", "oracle", "epikv_flat", "inverse", "published", "h2o", "sliding", "random"
)  # fmt: skip
GATED_FRACTION = 0.5
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
@click.option(
    "--policies",
    "wanted",
    metavar="all|NAME,NAME",
    help="A table of these registered policies, on the shipped model, instead of the gates.",
)
@click.option(
    "--missing", is_flag=True, help="With --policies: only what policies.json does not have yet."
)
@click.option(
    "--results",
    is_flag=True,
    help="Write each model's results.json, for its card; with --policies, its policies.md.",
)
@click.option("--at-once", default=64, show_default=True, help="Requests running together.")
@harness.options
def command(
    directories: tuple[Path, ...],
    count: int,
    fractions: tuple[float, ...],
    wanted: str | None,
    missing: bool,
    results: bool,
    at_once: int,
    json_file: Path | None,
    **where: Any,
) -> None:
    """The sample models' accuracy by policy, at half the cache."""
    gated = list(directories) or [MODELS / (MODELS / "SHIPPED").read_text().strip()]
    measured = list(directories) or (gated if wanted else sorted(MODELS.glob("seed*")))
    if where["server"] is not None and len(measured) != 1:
        raise click.UsageError("--server serves one model: say which with --model-dir")
    targets: list[Target] = []
    details: dict[str, Any] = {}
    for directory in measured:
        flags = ["--threads=1", f"--max_running_requests={at_once}"]
        if wanted is not None and where["server"] is None:
            found = artefacts(directory, CALIBRATED)
            flags += [f"--artefact_dir={found}"] if found else []
        rows: list[dict[str, Any]] = []
        with harness.serving(lambda path=directory: exported(path), flags, **where) as served:
            if wanted is not None:
                details[directory.name] = survey.run(
                    served.client,
                    directory,
                    wanted,
                    count,
                    fractions,
                    missing=missing,
                    at_once=at_once,
                    results=results,
                )
                continue
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
    if wanted is not None:
        untargeted = "--policies surveys, without gates"
    elif GATED_FRACTION not in fractions:
        untargeted = f"the gates are those at a fraction of {GATED_FRACTION}"
    finish("sample", targets, details, json_file, untargeted=untargeted)


def _run(
    client: Client, directory: Path, count: int, fraction: float, at_once: int
) -> "dict[str, Outcome]":
    """Every policy's completions of the held-out problems, judged."""
    trial = Trial(directory, count, fraction)
    outcomes = {}
    for name in POLICIES:
        outcomes[name], _ = trial.run(client, at_once, lambda n, name=name: _kv(name, trial, n))
        solved = share(outcomes[name])
        answers = outcomes[name].summary()["answer_accuracy"]
        harness.say(
            f"{directory.name} {fraction:.0%} {name:<10} exact {solved.value:.3f}"
            f" [{solved.low:.3f}, {solved.high:.3f}]  answers {answers:.3f}"
        )
    return outcomes


def _kv(name: str, trial: Trial, number: int) -> Kv:
    params: dict[str, Any] = {}
    match name:
        case "full":
            return Kv("full")
        case "oracle":
            params = {"prefer": trial.needed(number)}
        case "h2o":
            params = {"scope": "model"}
        case "epikv_flat" | "inverse":
            layers, sign = trial.calibration["layers"], trial.calibration["sign"]
            params = {
                "layer_a": layers["a"],
                "layer_b": layers["b"],
                "sign": sign if name == "epikv_flat" else -sign,
                "window": trial.calibration["window"],
            }
        case "published":
            params = PUBLISHED
    policy = "epikv_flat" if name in ("inverse", "published") else name
    return Kv(policy, trial.budgets[number], params, equal_protection=True)


def _gates(model: str, outcomes: "dict[str, Outcome]") -> list[Target]:
    """What the shipped model promises. Differences are between policies on the same problems."""
    solved = {name: exact(outcome) for name, outcome in outcomes.items()}
    gates = {
        "full": (share(outcomes["full"]), FULL),
        "oracle": (share(outcomes["oracle"]), ORACLE),
        "oracle_minus_sliding": (difference(solved["oracle"], solved["sliding"]), SEPARATION),
        "h2o_minus_sliding": (
            difference(solved["h2o"], solved["sliding"]),
            1 / len(solved["full"]),
        ),
        "epikv_flat_against_inverse": (
            difference(*sorted((solved["epikv_flat"], solved["inverse"]), key=sum, reverse=True)),
            INVERSE_DIFFERS,
        ),
    }
    return [
        Target(f"{model}.{name}", estimate, bound, at_least=True)
        for name, (estimate, bound) in gates.items()
    ]

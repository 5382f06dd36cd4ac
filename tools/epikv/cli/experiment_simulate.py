"""`epikv experiment simulate`: an experiment with made-up users, to see a report before there are real
ones."""

import random
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import click
from rich.table import Table

from epikv.cli import options, show
from epikv.client import Client
from epikv.messages import Accepted
from epikv.options import Experiment, Stop
from epikv.v1 import experiment_pb2

_RATE = 0.9  # of an arm that is not named


class _Rate(click.ParamType):
    """arm=share, from 0 to 1."""

    name = "arm=share"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[str, float]:
        if not isinstance(value, str):
            return value
        arm, _, share = value.partition("=")
        try:
            rate = float(share)
        except ValueError:
            rate = -1.0
        if not arm or not 0 <= rate <= 1:
            self.fail(f"'{value}' is not of the form arm=share, a share from 0 to 1", param, ctx)
        return arm, rate


@click.command("simulate")
@click.argument("name")
@click.option("--users", type=click.IntRange(min=1), default=400, show_default=True)
@click.option(
    "--rate",
    "rates",
    type=_Rate(),
    multiple=True,
    help=f"How often the answers of an arm are good. Again for others; else {_RATE}.",
)
@click.option("--prompt", default="a b c", show_default=True, help="Of every request.")
@click.option("--max-output-tokens", "-n", type=click.IntRange(min=1), default=8, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True, help="Of the users and outcomes.")
@click.option("--at-once", type=click.IntRange(min=1), default=16, show_default=True)
@options.server
def command(
    name: str,
    users: int,
    rates: tuple[tuple[str, float], ...],
    prompt: str,
    max_output_tokens: int,
    seed: int,
    at_once: int,
    server: str,
) -> None:
    """Let made-up users ask, and record made-up outcomes, in the running experiment NAME.

    The requests and what they cost are real. Whether an answer was good is drawn, by the --rate of
    its arm; it is recorded as the primary metric, a declared proportion. Outcomes stay in the
    store: make an experiment of its own for this.
    """
    with Client(server) as client:
        dealt = client.experiment(name)
        good = _rates(dealt, dict(rates))
        told: Counter[str] = Counter()
        with show.err.status("asking") as status, ThreadPoolExecutor(at_once) as pool:

            def ask(number: int) -> tuple[str, bool]:
                return _ask(client, dealt, good, f"simulated-{seed}-{number}", prompt, limit)

            limit = Stop(max_output_tokens=max_output_tokens)
            asked = [pool.submit(ask, number) for number in range(users)]
            try:
                for count, future in enumerate(as_completed(asked), 1):
                    arm, was_good = future.result()
                    told[arm] += 1
                    told[f"{arm}: good"] += was_good
                    status.update(f"{count} of {users} users")
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    table = Table("arm", "users", "good")
    for arm in [*good, "none"]:
        table.add_row(arm, str(told[arm]), "" if arm == "none" else str(told[f"{arm}: good"]))
    show.out.print(table)
    show.err.print(f"next: epikv experiment report {name}")


def _rates(dealt: experiment_pb2.Experiment, given: Mapping[str, float]) -> dict[str, float]:
    """By arm. Raises ClickException for what is no arm, and for a metric that takes no outcomes."""
    arms = [arm.name for arm in dealt.arms]
    if unknown := set(given) - set(arms):
        raise click.ClickException(
            f"{dealt.name} has no arm '{min(unknown)}'; it has {', '.join(arms)}"
        )
    proportion = experiment_pb2.Metric.KIND_PROPORTION
    if dealt.primary_metric not in [m.name for m in dealt.metrics if m.kind == proportion]:
        raise click.ClickException(
            f"the primary metric of {dealt.name}, {dealt.primary_metric}, is no proportion that it"
            " declares: there is nothing to simulate"
        )
    if dealt.state != experiment_pb2.Experiment.STATE_RUNNING:
        raise click.ClickException(
            f"{dealt.name} does not run: epikv experiment start {dealt.name}"
        )
    return {arm: given.get(arm, _RATE) for arm in arms}


def _ask(
    client: Client,
    dealt: experiment_pb2.Experiment,
    rates: Mapping[str, float],
    user: str,
    prompt: str,
    stop: Stop,
) -> tuple[str, bool]:
    """The user's arm, "none" outside, and whether the answer was good."""
    answer = client.generate_once(prompt, stop=stop, experiment=Experiment(unit_id=user))
    accepted = answer.accepted
    assert accepted is not None
    arm = _arm(accepted, dealt.name)
    if arm not in rates:
        return "none", False
    was_good = random.Random(f"{user}/{arm}").random() < rates[arm]
    client.record_outcome(accepted.request_id, dealt.primary_metric, was_good)
    return arm, was_good


def _arm(accepted: Accepted, experiment: str) -> str:
    dealt = dict(part.split("/", 1) for part in accepted.arm.split(",") if "/" in part)
    return dealt.get(experiment, "none")

"""Command line of the sample model: `python -m epikv.sample`."""

import json

import click

from epikv.extensions import Extensible
from epikv.sample import families


@click.group(cls=Extensible, extensions="epikv.sample")
def main() -> None:
    """Problems of the sample model; in a checkout that deploy/setup.sh has set up, its training and
    measuring, too."""


@main.command()
@click.option("--seed", default=0, show_default=True)
@click.option("--family", default="programs", type=click.Choice(list(families.FAMILIES)))
@click.option("--lines", type=int, help="Of the trace. Default: those of the family's tests.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def problem(seed: int, family: str, lines: int | None, as_json: bool) -> None:
    """Print a problem: prompt, expected trace, expected answers."""
    task = families.problem(seed, family, lines)
    if as_json:
        fields = {"prompt": task.prompt, "trace": task.trace, "answers": task.answers}
        click.echo(json.dumps(fields))
        return
    answers = ", ".join(f"{name} = {value}" for name, value in task.answers.items())
    click.echo(f"{task.prompt}\n\n{task.trace}\n\n{answers}")


@main.command()
@click.option("--server", default="127.0.0.1:50051", show_default=True)
@click.option("--seed", default=0, show_default=True, help="Of the problem.")
@click.option("--policy", default="epikv_flat", show_default=True)
@click.option("--budget", required=True, type=int, help="Tokens, the prompt included.")
def demo(server: str, seed: int, policy: str, budget: int) -> None:
    """Solve a problem through a running daemon, under a budget; exit 1 if the answer is wrong."""
    from epikv.sample.demo import demo as run

    raise SystemExit(0 if run(server, seed, policy, budget) else 1)


if __name__ == "__main__":
    main()

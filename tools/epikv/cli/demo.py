"""`epikv demo`"""

import click

from epikv.cli import options

SEED = 9  # of a problem that the shipped model solves under the default budget


@click.command("demo")
@click.option("--seed", default=SEED, show_default=True, help="Of the problem.")
@click.option("--policy", default="epikv_flat", show_default=True)
@click.option(
    "--budget",
    default=384,
    show_default=True,
    type=click.IntRange(min=1),
    help="Tokens, the prompt included.",
)
@click.option(
    "--beside",
    default="sliding",
    show_default=True,
    help="Another policy at the same budget, shown by its answer alone. Empty: none.",
)
@options.server
def command(seed: int, policy: str, budget: int, beside: str, server: str) -> None:
    """Solve a problem through a running daemon while its cache is held to a budget.

    For the sample model, which deploy/quickstart.sh exports. The exit status is 1 if POLICY's answer
    is wrong, or if less than 40 % of what was generated was dropped.
    """
    from epikv.sample import demo

    if not demo.demo(server, seed, policy, budget, beside):
        raise click.ClickException(
            "not as promised; is it the sample model that is served, and the budget below 400?"
        )

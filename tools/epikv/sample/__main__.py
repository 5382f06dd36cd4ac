"""Command line of the sample model: `python -m epikv.sample`."""

import json
from pathlib import Path

import click

from epikv.sample import families

MODEL = click.argument("model", type=click.Path(exists=True, file_okay=False, path_type=Path))
DEVICE = click.option("--device", default="cpu", show_default=True, help="cpu or cuda.")


OUT = click.option(
    "--out",
    default="build/evaluations",
    show_default=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="Where what is unfinished goes on.",
)


@click.group()
def main() -> None:
    """Make, train and measure the sample model."""


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
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--seed", required=True, type=int)
@click.option("--recall-tokens", default=2_000_000, show_default=True)
@click.option("--problem-tokens", default=8_000_000, show_default=True)
@DEVICE
def train(folder: Path, seed: int, recall_tokens: int, problem_tokens: int, device: str) -> None:
    """Train a model into FOLDER, or go on with the run found there."""
    from epikv.sample.train import Recipe, Run

    recipe = Recipe(seed, recall_tokens=recall_tokens, problem_tokens=problem_tokens)
    Run(recipe, folder, device).train()


@main.command()
@MODEL
@click.option("--count", default=40, show_default=True, help="Problems of each family.")
@DEVICE
def need(model: Path, count: int, device: str) -> None:
    """Measure which tokens MODEL reads later, for the oracle; writes its need.json."""
    from epikv.sample.model import load
    from epikv.sample.need import measure, save

    loaded = load(model, device)
    needs = {family: measure(loaded, family, count) for family in families.FAMILIES}
    save(needs, model)
    for family, found in needs.items():
        roles = "+".join(sorted(found.roles)) or "nothing"
        click.echo(f"{family}: {roles}; {found.only[roles]:.3f} of {found.full:.3f} with it alone")


@main.command()
@MODEL
@click.option("--problems", default=50, show_default=True)
@click.option("--family", default="programs", type=click.Choice(list(families.FAMILIES)))
@click.option("--fraction", default=0.5, show_default=True, help="Of the trace that is kept.")
def agree(model: Path, problems: int, family: str, fraction: float) -> None:
    """Hold evaluation of MODEL through a daemon against a plain Python loop, token for token; exit
    1 if a completion differs."""
    import torch

    from epikv.bench import harness
    from epikv.eval.models import exported
    from epikv.sample.agree import agree as run
    from epikv.sample.model import load

    torch.set_num_threads(1)  # the model is too small for more
    with harness.serving(
        lambda: exported(model), ["--deterministic=true"], server=None, metrics=None, binary=None
    ) as served:
        found = run(served.client, load(model), family, problems, fraction)
    for each in found:
        same = each.problems - len(each.different)
        differ = f"; different: {', '.join(each.different)}" if each.different else ""
        click.echo(
            f"{each.arm}: {same} of {each.problems} completions the same,"
            f" {each.evicting} with evictions{differ}"
        )
    raise SystemExit(any(each.different for each in found))


@main.command()
@MODEL
@click.option("--fit", default=12, show_default=True, help="Problems of each family to learn from.")
@click.option(
    "--count", default=25, show_default=True, help="Problems of each family to choose on."
)
@click.option("--fraction", "fractions", multiple=True, type=float, default=(0.35, 0.25))
def candidates(model: Path, fit: int, count: int, fractions: tuple[float, ...]) -> None:
    """Try ideas for policies on MODEL without a daemon; writes its candidates.json."""
    import torch

    from epikv.sample.candidates import measure

    torch.set_num_threads(1)  # the model is too small for more
    measure(model, fit, count, fractions)


@main.command()
@click.option("--seed", "seeds", multiple=True, help="Only this one, of tools/sample_model.")
@OUT
def calibrate(seeds: tuple[str, ...], out: Path) -> None:
    """Choose the pair of epikv_flat for every seed; interrupted, it goes on."""
    from epikv.sample.measure import calibrate as choose
    from epikv.sample.measure import folders

    for seed in folders(seeds):
        choose(seed, out / "calibration" / seed.name)


@main.command()
@click.argument("name", type=click.Choice(["tournament", "pair", "lengths", "reproduction"]))
@click.option("--seed", "seeds", multiple=True, help="Only this one, of tools/sample_model.")
@OUT
def evaluate(name: str, seeds: tuple[str, ...], out: Path) -> None:
    """Run one of the model card's evaluations on every seed; interrupted, it goes on."""
    from epikv.sample.measure import folders, measure, named

    for seed in folders(seeds):
        for each in named(name):
            measure(each, seed, out / each / seed.name)


@main.command()
def card() -> None:
    """Write the generated parts of the pages from what each seed's folder holds."""
    from epikv.sample.card import write

    write()


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

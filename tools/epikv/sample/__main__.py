"""Command line of the sample model: `python -m epikv.sample`."""

import json
from pathlib import Path

import click

from epikv.sample import families

MODEL = click.argument("model", type=click.Path(exists=True, file_okay=False, path_type=Path))
DEVICE = click.option("--device", default="cpu", show_default=True, help="cpu or cuda.")


@click.group()
def main() -> None:
    """Make, train, calibrate and simulate the sample model."""


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
@click.option("--select", default=40, show_default=True, help="Problems to measure and rank on.")
@click.option("--confirm", default=100, show_default=True, help="Problems to confirm on.")
@DEVICE
def calibrate(model: Path, select: int, confirm: int, device: str) -> None:
    """Find the pair of layers and sign for MODEL; writes its calibration.json."""
    from epikv.sample.calibrate import calibrate as find
    from epikv.sample.model import load

    result = find(load(model, device), select, confirm)
    (model / "calibration.json").write_text(json.dumps(result, indent=1) + "\n")
    click.echo(
        f"{model}: layers {result['layers']}, sign {result['sign']:+d},"
        f" confirmed: {result['confirmed']}"
    )


@main.command()
@MODEL
@click.option("--count", default=200, show_default=True, help="Test problems.")
@click.option("--fraction", "fractions", multiple=True, type=float, default=(0.5, 0.35))
@DEVICE
def simulate(model: Path, count: int, fractions: tuple[float, ...], device: str) -> None:
    """Run every policy on MODEL's held-out problems without a daemon: what `epikv bench sample`
    has to reproduce."""
    from epikv.sample.compare import compare
    from epikv.sample.model import load

    calibration = json.loads((model / "calibration.json").read_text())
    rows = compare(load(model, device), calibration, count, fractions)
    for row in rows:
        click.echo(
            f"{row['policy']:<20} {row['fraction']:>5.0%}  exact {row['exact']:.3f}"
            f"  answers {row['answer_accuracy']:.3f}"
        )


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
    where = {"server": None, "metrics": None, "binary": None}
    with harness.serving(lambda: exported(model), ["--deterministic=true"], **where) as served:
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
def card() -> None:
    """Write the tables of the model card from what each seed's folder holds."""
    from epikv.sample.card import CARD, render

    CARD.write_text(render(CARD.read_text()))


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

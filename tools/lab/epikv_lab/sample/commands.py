"""Commands of `python -m epikv.sample` that make, train and measure the model."""

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


@click.command()
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--seed", required=True, type=int)
@click.option("--recall-tokens", default=2_000_000, show_default=True)
@click.option("--problem-tokens", default=8_000_000, show_default=True)
@DEVICE
def train(folder: Path, seed: int, recall_tokens: int, problem_tokens: int, device: str) -> None:
    """Train a model into FOLDER, or go on with the run found there."""
    from epikv_lab.sample.train import Recipe, Run

    recipe = Recipe(seed, recall_tokens=recall_tokens, problem_tokens=problem_tokens)
    Run(recipe, folder, device).train()


@click.command()
@MODEL
@click.option("--count", default=40, show_default=True, help="Problems of each family.")
@DEVICE
def need(model: Path, count: int, device: str) -> None:
    """Measure which tokens MODEL reads later, for the oracle; writes its need.json."""
    from epikv.sample.need import save

    from epikv_lab.sample.ablation import measure
    from epikv_lab.sample.model import load

    loaded = load(model, device)
    needs = {family: measure(loaded, family, count) for family in families.FAMILIES}
    save(needs, model)
    for family, found in needs.items():
        roles = "+".join(sorted(found.roles)) or "nothing"
        click.echo(f"{family}: {roles}; {found.only[roles]:.3f} of {found.full:.3f} with it alone")


@click.command()
@MODEL
@click.option("--problems", default=50, show_default=True)
@click.option("--family", default="programs", type=click.Choice(list(families.FAMILIES)))
@click.option("--fraction", default=0.5, show_default=True, help="Of the trace that is kept.")
def agree(model: Path, problems: int, family: str, fraction: float) -> None:
    """Hold evaluation of MODEL through a daemon against a plain Python loop, token for token; exit
    1 if a completion differs."""
    import torch
    from epikv import harness
    from epikv.cli.eval_models import exported

    from epikv_lab.sample.agree import agree as run
    from epikv_lab.sample.model import load

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


@click.command()
@MODEL
@click.option("--fit", default=12, show_default=True, help="Problems of each family to learn from.")
@click.option(
    "--count", default=25, show_default=True, help="Problems of each family to choose on."
)
@click.option("--fraction", "fractions", multiple=True, type=float, default=(0.35, 0.25))
def candidates(model: Path, fit: int, count: int, fractions: tuple[float, ...]) -> None:
    """Try ideas for policies on MODEL without a daemon; writes its candidates.json."""
    import torch

    from epikv_lab.sample.candidates import measure

    torch.set_num_threads(1)  # the model is too small for more
    measure(model, fit, count, fractions)


@click.command()
@MODEL
@click.option("--fit", default=12, show_default=True, help="Problems of each family to learn from.")
@click.option(
    "--count", default=25, show_default=True, help="Problems of each family to choose on."
)
@click.option("--fraction", "fractions", multiple=True, type=float, default=(0.25, 0.15))
def heads(model: Path, fit: int, count: int, fractions: tuple[float, ...]) -> None:
    """Try the second list of ideas, by which heads keep tokens of their own; writes MODEL's heads.json."""
    import torch

    from epikv_lab.sample.heads import measure

    torch.set_num_threads(1)  # the model is too small for more
    measure(model, fit, count, fractions)


@click.command()
@click.option("--seed", "seeds", multiple=True, help="Only this one, of tools/sample_model.")
@OUT
def calibrate(seeds: tuple[str, ...], out: Path) -> None:
    """Choose the pair of epikv_flat for every seed; interrupted, it goes on."""
    from epikv_lab.sample.measure import calibrate as choose
    from epikv_lab.sample.measure import folders

    for seed in folders(seeds):
        choose(seed, out / "calibration" / seed.name)


@click.command()
@click.option("--seed", "seeds", multiple=True, help="Only this one, of tools/sample_model.")
@OUT
def gates(seeds: tuple[str, ...], out: Path) -> None:
    """Train the gates of learned policies for every seed; interrupted, it goes on."""
    from epikv_lab.sample.measure import folders, train_gates

    for seed in folders(seeds):
        train_gates(seed, out / "gates" / seed.name)


@click.command()
@click.option("--seed", "seeds", multiple=True, help="Only this one, of tools/sample_model.")
@OUT
def packets(seeds: tuple[str, ...], out: Path) -> None:
    """Train soft tokens for every seed, and measure answers over packets of documents."""
    from epikv_lab.sample.measure import folders
    from epikv_lab.sample.packets import measure

    for seed in folders(seeds):
        measure(seed, out / "packets" / seed.name)


@click.command()
@click.argument("name")
@click.option(
    "--policy",
    "only",
    multiple=True,
    help="Add these alone to the tournament, or to what `aged` is, with the anchors once more, which must come out the same.",
)
@click.option("--seed", "seeds", multiple=True, help="Only this one, of tools/sample_model.")
@click.option(
    "--daemons",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="The work is spread over so many, of one thread each.",
)
@OUT
def evaluate(
    name: str, only: tuple[str, ...], seeds: tuple[str, ...], daemons: int, out: Path
) -> None:
    """Run the evaluation NAME of the pages on every seed, or all whose names begin with it, such as
    tournament, pair, aged, lengths, reproduction and claims; interrupted, it goes on."""
    from epikv_lab.sample.measure import EVALUATIONS, folders, measure, named

    if not named(name):
        raise click.UsageError(f"'{name}' begins none of {', '.join(EVALUATIONS)}")
    if only and name not in ("tournament", "aged"):
        raise click.UsageError("--policy adds to the tournament and to aged alone")
    for seed in folders(seeds):
        for each in named(name):
            folder = out / (f"{each}-added" if only else each) / seed.name
            measure(each, seed, folder, only, daemons)


@click.command()
def card() -> None:
    """Write the generated parts of the pages from what each seed's folder holds."""
    from epikv_lab.sample.card import write

    write()

"""`python -m epikv_lab.stdlib`: makes the model of Python's library."""

from pathlib import Path

import click
from epikv.cli.options import KvFields

FOLDER = click.Path(file_okay=False, path_type=Path)
SOURCES = click.option(
    "--sources",
    default="build/stdlib",
    show_default=True,
    type=FOLDER,
    help="For Debian's packages.",
)


@click.group()
def main() -> None:
    """A small language model of Python's library, tests and manual."""


@main.command()
@SOURCES
def texts(sources: Path) -> None:
    """Say what is read, and of which part."""
    from epikv_lab.stdlib import corpus

    read = corpus.texts(corpus.fetch(sources))
    for part in ("train", "validation", "test"):
        of_part = [text for text in read if text.part == part]
        size = sum(len(text.text) for text in of_part)
        click.echo(f"{part}: {len(of_part)} files, {size / 1e6:.1f} million characters")
    click.echo(f"sha256 of all: {corpus.digest(read)}")


@main.command()
@click.argument("folder", type=FOLDER)
@click.option("--count", default=32, show_default=True)
@SOURCES
def excerpts(folder: Path, count: int, sources: Path) -> None:
    """Write parts of the training set into FOLDER, a file each, for `epikv calibrate`."""
    from epikv_lab.stdlib import corpus

    folder.mkdir(parents=True, exist_ok=True)
    for number, text in enumerate(corpus.excerpts(corpus.texts(corpus.fetch(sources)), count)):
        (folder / f"{number}.txt").write_text(text.text)


@main.command()
@click.argument("out", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--count", type=click.IntRange(min=1), default=600, show_default=True)
@click.option(
    "--max-tokens", type=click.IntRange(min=1), default=160, show_default=True, help="Of an answer."
)
@SOURCES
def requests(out: Path, count: int, max_tokens: int, sources: Path) -> None:
    """Write parts of the test set into OUT, as requests for `epikv advise --traffic`."""
    import json

    from epikv_lab.stdlib import corpus

    parts = corpus.requests(corpus.texts(corpus.fetch(sources)), count)
    lines = [json.dumps({"prompt": part, "max_tokens": max_tokens}) for part in parts]
    out.write_text("".join(f"{line}\n" for line in lines))
    click.echo(f"{len(parts)} requests")


@main.command()
@click.argument("folder", type=FOLDER)
@click.option("--seed", default=0, show_default=True)
@click.option("--tokens", type=click.IntRange(min=1), help="In place of the recipe's.")
@click.option("--threads", default=2, show_default=True)
@click.option("--compile", "compiled", is_flag=True, help="By torch.compile, a third faster.")
@click.option("--device", default="cpu", show_default=True, help="Where it trains: cpu or cuda.")
@click.option(
    "--at-once", default=1, show_default=True, help="Windows that run together; a GPU wants 16."
)
@SOURCES
def train(
    folder: Path,
    seed: int,
    tokens: int | None,
    threads: int,
    compiled: bool,
    device: str,
    at_once: int,
    sources: Path,
) -> None:
    """Train a model into FOLDER, or go on with the run found there."""
    import torch

    from epikv_lab.stdlib.train import Recipe, Run

    torch.set_num_threads(threads)
    recipe = Recipe(seed=seed) if tokens is None else Recipe(seed=seed, tokens=tokens)
    Run(recipe, folder, sources, compiled=compiled, device=device, at_once=at_once).train()


@main.command()
@click.argument("model", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("out", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--policy", "policies", multiple=True, help="Default: all that need no calibration.")
@click.option(
    "--with",
    "variants",
    type=KvFields(),
    multiple=True,
    metavar="FIELD=N,...",
    help="Judge each --policy also with these, as `epikv eval` does.",
)
@click.option("--passages", default=24, show_default=True)
@click.option("--at-once", default=16, show_default=True)
@click.option(
    "--artefact-dir",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Of calibrations: policies that need them are judged, too.",
)
@click.option("--binary", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@SOURCES
def judge(
    model: Path,
    out: Path,
    policies: tuple[str, ...],
    variants: tuple[dict[str, float], ...],
    passages: int,
    at_once: int,
    artefact_dir: Path | None,
    binary: Path | None,
    sources: Path,
) -> None:
    """Say what policies cost MODEL, exported from a folder of `train`, on files that it never read.

    What was run is kept in OUT, a line each, and not run again.
    """
    from epikv import harness
    from epikv.eval.plan import SLACK, arms

    from epikv_lab.stdlib import corpus, judge

    with harness.serving(
        lambda: model,
        [
            *([f"--artefact_dir={artefact_dir}"] if artefact_dir else []),
            *(["--kv_tier_bytes=1GiB"] if variants else []),
        ],
        server=None,
        metrics=None,
        binary=harness.built_binary(binary),
    ) as served:
        client = served.client
        [info] = client.models()
        catalog = client.policies()
        wanted = policies or judge.usable(catalog)
        texts = corpus.texts(corpus.fetch(sources))
        try:
            judge.bind(out, info.weights, corpus.digest(texts), SLACK)
        except ValueError as error:
            raise click.ClickException(str(error)) from error
        read = judge.passages(client.tokenizer(), texts, passages)
        compared = arms(catalog, wanted, SLACK, oracle=False, kv=variants)
        refused: dict[str, str] = {}
        found = judge.judge(client, info.name, read, compared, out, at_once, refused)
        for done, _ in enumerate(found, start=1):
            if done % 100 == 0:
                harness.say(f"{done} done")
    click.echo(judge.table(judge.costs(out)))
    for arm, why in refused.items():
        click.echo(f"not run: {arm}: {why}", err=True)


if __name__ == "__main__":
    main()

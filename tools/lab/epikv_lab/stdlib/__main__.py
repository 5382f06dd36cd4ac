"""`python -m epikv_lab.stdlib`: makes the model of Python's library."""

from pathlib import Path

import click

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
@click.option("--seed", default=0, show_default=True)
@click.option("--tokens", default=16_000_000, show_default=True)
@click.option("--threads", default=2, show_default=True)
@SOURCES
def train(folder: Path, seed: int, tokens: int, threads: int, sources: Path) -> None:
    """Train a model into FOLDER, or go on with the run found there."""
    import torch

    from epikv_lab.stdlib.train import Recipe, Run

    torch.set_num_threads(threads)
    Run(Recipe(seed=seed, tokens=tokens), folder, sources).train()


if __name__ == "__main__":
    main()

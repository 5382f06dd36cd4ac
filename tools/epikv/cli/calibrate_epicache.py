"""`epikv calibrate epicache`: how much of each layer's keys hangs on what is far away."""

from dataclasses import asdict
from pathlib import Path

import click

from epikv.cli import calibrate_sources as sources

_number = click.IntRange(1)


@click.command("epicache")
@sources.with_options(
    *sources.SOURCES,
    sources.out(),
    sources.length(16384),
    click.option(
        "--block",
        type=_number,
        help="Tokens of a block. Default: a quarter of the shortest text, at most 4096 as published.",
    ),
    click.option(
        "--sinks",
        type=click.IntRange(0),
        help="First tokens, which all blocks see. Default: a 32nd of the block, as published.",
    ),
    click.option(
        "--overlap",
        default=0.5,
        show_default=True,
        type=click.FloatRange(0, 1),
        help="Share of the block before that a block sees, its last tokens.",
    ),
    click.option(
        "--window",
        type=_number,
        help="Tokens whose keys are compared as one. Default: a quarter of the block, at most 100 as published.",
    ),
)
def command(
    model: Path,
    texts: tuple[Path, ...],
    tasks: tuple[str, ...],
    problems: int,
    out: Path,
    length: int,
    block: int | None,
    sinks: int | None,
    overlap: float,
    window: int | None,
) -> None:
    """Measure how much of each layer's keys MODEL makes of what is far away.

    Texts are read once whole, and once in blocks. Layers whose keys differ more get more of the budget."""
    source = sources.load_texts(model, texts, tasks, problems, length)
    from epikv.calibrate import artefacts
    from epikv.calibrate import epicache as calibration
    from epikv.eval.progress import progress

    try:
        artefacts.check(source.manifest)
        settings = calibration.settings_of(
            source.ids, block=block, sinks=sinks, overlap=overlap, window=window
        )
        ids = calibration.beyond_blocks(source.ids, settings)
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    with progress(len(ids), 0, "texts") as tell:
        found = calibration.measure(source.module, source.manifest, ids, settings, tell)
    try:
        artefacts.write(
            out,
            "epicache",
            source.manifest,
            params={"similarities": calibration.thousandths(found)},
            made_with={"texts": len(ids), "tokens": sum(map(len, ids)), **asdict(settings)},
        )
    except OSError as error:
        raise click.ClickException(str(error)) from error
    by_layer = ", ".join(f"{mean:.3f}" for mean in found.mean(0).tolist())
    click.echo(
        f"similarity by layer: {by_layer}; {len(ids)} texts in blocks of {settings.block} tokens"
    )

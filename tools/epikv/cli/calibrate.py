"""`epikv calibrate`"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from epikv.cli import calibrate_flat

if TYPE_CHECKING:
    from torch.jit import ScriptModule

    from epikv.export.manifest import Manifest

_file = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.group("calibrate")
def group() -> None:
    """Measure what a policy must know of a model, once: into a file for the daemon's artefact_dir, or
    (epikv_flat) into the model file."""


group.add_command(calibrate_flat.command)


def _measures(command: Callable[..., None]) -> Callable[..., None]:
    """What every measurement takes: a model, texts, and where the artefact goes."""
    for option in reversed(
        (
            click.argument("model", type=_file),
            click.option(
                "--text",
                "texts",
                type=_file,
                multiple=True,
                required=True,
                help="What the model wrote, prompt and thought; one text a file. Give it often.",
            ),
            click.option(
                "-o", "--out", type=click.Path(dir_okay=False, path_type=Path), required=True
            ),
            click.option(
                "--length", default=4096, show_default=True, help="Tokens read, of each text."
            ),
        )
    ):
        command = option(command)
    return command


def _load(
    model: Path, texts: tuple[Path, ...], length: int
) -> "tuple[ScriptModule, Manifest, list[list[int]]]":
    """The model, and the first tokens of every text."""
    try:
        from tokenizers import Tokenizer

        from epikv.export import load
    except ImportError as error:
        raise click.ClickException(
            f"{error}; install what calibration needs: pip install 'epikv[export]'"
        ) from error
    module, manifest, tokenizer = load(model)
    encoder = Tokenizer.from_str(tokenizer)
    longest = min(length, manifest.context_length)
    return module, manifest, [encoder.encode(t.read_text("utf-8")).ids[:longest] for t in texts]


def _write(out: Path, policy: str, manifest: "Manifest", **what: Any) -> None:
    from epikv import artefacts

    try:
        artefacts.write(out, policy, manifest, **what)
    except (OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error


@group.command("thinkv_tbe")
@_measures
@click.option("--skip", default=128, show_default=True, help="Tokens not measured, of each text.")
@click.option(
    "--bandwidth",
    default=1.0,
    show_default=True,
    type=click.FloatRange(min=0, min_open=True),
    help="Width of the density's kernel, in units of Silverman's rule.",
)
def thinkv_tbe(
    model: Path, texts: tuple[Path, ...], out: Path, length: int, skip: int, bandwidth: float
) -> None:
    """Find the layers and thresholds that tell types of thought apart in MODEL. Wants 100 texts."""
    module, manifest, tokens = _load(model, texts, length)
    from epikv.calibrate import thinkv_tbe as calibration

    sparsity = calibration.measure(module, manifest, tokens, skip)
    if sparsity.shape[1] < 2:
        raise click.ClickException(f"the texts have no tokens beyond the first {skip} (--skip)")
    modes = [calibration.modes(of_layer, bandwidth) for of_layer in sparsity]
    try:
        choice = calibration.choose(modes)
    except calibration.CalibrationError as error:
        raise click.ClickException(str(error)) from error
    _write(
        out,
        "thinkv_tbe",
        manifest,
        params={"layers": choice.layers, "theta1": choice.theta1, "theta2": choice.theta2},
        made_with={
            "texts": len(texts),
            "steps": sparsity.shape[1],
            "skip": skip,
            "bandwidth": bandwidth,
            "modes": [len(found.maxima) for found in modes],
        },
    )
    layers = ", ".join(map(str, choice.layers))
    click.echo(f"layers {layers}; theta1 {choice.theta1:.4f}, theta2 {choice.theta2:.4f}")


@group.command("triattention")
@_measures
def triattention(model: Path, texts: tuple[Path, ...], out: Path, length: int) -> None:
    """Measure what the queries of MODEL are like before they are rotated."""
    module, manifest, tokens = _load(model, texts, length)
    from epikv.calibrate import triattention as calibration

    try:
        data = calibration.measure(module, manifest, tokens)
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    count = sum(map(len, tokens))
    _write(
        out,
        "triattention",
        manifest,
        data=data,
        made_with={"texts": len(texts), "tokens": count},
    )
    click.echo(f"{len(manifest.layers)} layers of {manifest.num_heads} heads, over {count} tokens")

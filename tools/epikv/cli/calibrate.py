"""`epikv calibrate`"""

import json
from importlib.metadata import version
from pathlib import Path

import click

from epikv.artefacts import fingerprint

_file = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.group("calibrate")
def group() -> None:
    """Measure what a policy must know of a model, once, for the daemon's --artefact."""


@group.command("thinkv_tbe")
@click.argument("model", type=_file)
@click.option(
    "--text",
    "texts",
    type=_file,
    multiple=True,
    required=True,
    help="What the model wrote, prompt and thought; one text a file. Give it often: 100 texts.",
)
@click.option("-o", "--out", type=click.Path(dir_okay=False, path_type=Path), required=True)
@click.option("--skip", default=128, show_default=True, help="Tokens not measured, of each text.")
@click.option("--length", default=4096, show_default=True, help="Tokens read, of each text.")
@click.option(
    "--bandwidth",
    default=1.0,
    show_default=True,
    type=click.FloatRange(min=0, min_open=True),
    help="Width of the density's kernel, in units of Silverman's rule.",
)
def thinkv_tbe(
    model: Path, texts: tuple[Path, ...], out: Path, skip: int, length: int, bandwidth: float
) -> None:
    """Find the layers and thresholds that tell types of thought apart in MODEL."""
    try:
        from tokenizers import Tokenizer

        from epikv.calibrate import thinkv_tbe as calibration
        from epikv.export import load
    except ImportError as error:
        raise click.ClickException(
            f"{error}; install what calibration needs: pip install 'epikv[export]'"
        ) from error
    module, manifest, tokenizer = load(model)
    encoder = Tokenizer.from_str(tokenizer)
    longest = min(length, manifest.context_length)
    tokens = [encoder.encode(text.read_text("utf-8")).ids[:longest] for text in texts]
    sparsity = calibration.measure(module, manifest, tokens, skip)
    if sparsity.shape[1] < 2:
        raise click.ClickException(f"the texts have no tokens beyond the first {skip} (--skip)")
    modes = [calibration.modes(of_layer, bandwidth) for of_layer in sparsity]
    try:
        choice = calibration.choose(modes)
    except calibration.CalibrationError as error:
        raise click.ClickException(str(error)) from error
    artefact = {
        "artefact": 1,
        "policy": "thinkv_tbe",
        "model": {"name": manifest.name, "fingerprint": fingerprint(model)},
        "params": {"layers": choice.layers, "theta1": choice.theta1, "theta2": choice.theta2},
        "made_with": {
            "epikv": version("epikv"),
            "texts": len(texts),
            "steps": sparsity.shape[1],
            "skip": skip,
            "bandwidth": bandwidth,
            "modes": [len(found.maxima) for found in modes],
        },
    }
    out.write_text(json.dumps(artefact, indent=2) + "\n", "utf-8")
    layers = ", ".join(map(str, choice.layers))
    click.echo(f"layers {layers}; theta1 {choice.theta1:.4f}, theta2 {choice.theta2:.4f}")

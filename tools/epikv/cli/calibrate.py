"""`epikv calibrate`"""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from epikv.cli import (
    calibrate_epicache,
    calibrate_flat,
    calibrate_gates,
    calibrate_heads,
    calibrate_packet,
)
from epikv.cli import calibrate_sources as sources
from epikv.installing import pip_install

if TYPE_CHECKING:
    from tokenizers import Encoding
    from torch.jit import ScriptModule

    from epikv.export.manifest import Manifest


@click.group("calibrate")
def group() -> None:
    """Measure what a policy must know about a model.

    The result goes into a file for the daemon's artefact_dir or, for epikv_flat, into the model
    file."""


group.add_command(calibrate_flat.command)
group.add_command(calibrate_epicache.command)
for _gates in ("trimkv", "dbtrimkv", "dms", "kvzap", "epikv_forecast"):
    group.add_command(getattr(calibrate_gates, _gates))
for _heads in calibrate_heads.COMMANDS:
    group.add_command(_heads)
group.add_command(calibrate_packet.command)


# What every measurement takes.
_measures = sources.with_options(
    sources.MODEL, sources.texts(required=True), sources.out(), sources.length()
)


def _load(
    model: Path, texts: tuple[Path, ...], length: int
) -> "tuple[ScriptModule, Manifest, list[Encoding]]":
    """The model, and the first tokens of every text."""
    try:
        from tokenizers import Tokenizer

        from epikv.export import load
    except ImportError as error:
        raise _uninstalled(error) from error
    module, manifest, tokenizer = load(model)
    encoder = Tokenizer.from_str(tokenizer)
    encoder.enable_truncation(min(length, manifest.context_length))
    return module, manifest, [encoder.encode(text.read_text("utf-8")) for text in texts]


def _uninstalled(error: ImportError) -> click.ClickException:
    return click.ClickException(
        f"{error}; install what calibration needs: {pip_install('calibrate', 'export')}"
    )


def _write(out: Path, policy: str, manifest: "Manifest", **what: Any) -> None:
    from epikv.calibrate import artefacts

    try:
        artefacts.write(out, policy, manifest, **what)
    except (OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error


@group.command("thinkv_tbe")
@_measures
@click.option(
    "--skip",
    default=128,
    show_default=True,
    help="First tokens of each text that are not measured.",
)
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
    """Find the layers and thresholds that tell types of thought apart in MODEL. Needs 100 texts."""
    module, manifest, encoded = _load(model, texts, length)
    from epikv.calibrate import thinkv_tbe as calibration

    sparsity = calibration.measure(module, manifest, [text.ids for text in encoded], skip)
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
    """Measure what the queries of MODEL are on average before they are rotated."""
    module, manifest, encoded = _load(model, texts, length)
    from epikv.calibrate import triattention as calibration

    tokens = [text.ids for text in encoded]
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


@group.command("epikv_probe")
@_measures
@click.option(
    "--gap",
    default=64,
    show_default=True,
    type=click.IntRange(1),
    help="Attention to a token counts from queries at least so many tokens later; about the recent window.",
)
@click.option(
    "--after",
    metavar="TEXT",
    help="Text before the thought: tokens up to the first TEXT do not count.",
)
def epikv_probe(
    model: Path, texts: tuple[Path, ...], out: Path, length: int, gap: int, after: str | None
) -> None:
    """Fit the direction of the residual stream that shows what MODEL will attend to again.

    Needs 24 texts or more.
    """
    module, manifest, encoded = _load(model, texts, length)
    try:
        from epikv.calibrate import epikv_probe as calibration
    except ImportError as error:
        raise _uninstalled(error) from error

    counted = [
        calibration.Text(encoding.ids, _index_after(path, encoding, after) if after else 0)
        for path, encoding in zip(texts, encoded, strict=True)
    ]
    try:
        probe = calibration.find(module, manifest, counted, gap)
        ages = calibration.by_age(module, manifest, counted, probe.layer)
    except calibration.CalibrationError as error:
        raise click.ClickException(str(error)) from error
    _write(
        out,
        "epikv_probe",
        manifest,
        data={
            "layer": probe.layer,
            "weights": probe.weights,
            "by_age": [asdict(of) for of in ages],
        },
        made_with={
            "texts": probe.texts,
            "tokens": probe.tokens,
            "gap": gap,
            "after": after,
            "strength": probe.strength,
            "recall": probe.recall,
            "interval": probe.interval,
        },
    )
    click.echo(calibration.shown(probe.layer, probe.recall, probe.interval))


@group.command("steering")
@_measures
@click.option(
    "--mark",
    "marks",
    metavar="TEXT",
    multiple=True,
    required=True,
    help="One token: a sentence that holds it is one to steer away from. May be given several times.",
)
@click.option(
    "--sentence-end",
    "ends",
    metavar="TEXT",
    multiple=True,
    required=True,
    help="One token that ends sentences, and at which the vector is added. May be given several times.",
)
@click.option(
    "--begin",
    metavar="TEXT",
    help="One token: sentences count behind it. Default: from the first on.",
)
@click.option(
    "--end", metavar="TEXT", help="One token: sentences count before it. Default: to the last."
)
@click.option(
    "--layer",
    type=click.IntRange(0),
    help="Block before which the vector is added. Default: the one where sentences are told apart best.",
)
def steering(
    model: Path,
    texts: tuple[Path, ...],
    out: Path,
    length: int,
    marks: tuple[str, ...],
    ends: tuple[str, ...],
    begin: str | None,
    end: str | None,
    layer: int | None,
) -> None:
    """Find the vector that leads MODEL away from sentences that hold a mark.

    It is no policy: requests ask for it by their sampling options, under any policy. Every fourth
    text is held out, to tell how well the vector tells sentences apart.
    """
    module, manifest, encoded = _load(model, texts, length)
    from epikv.calibrate import steering as calibration

    token = _token_finder(model)
    words = calibration.Words(
        sorted(map(token, ends)),
        sorted(map(token, marks)),
        None if begin is None else token(begin),
        None if end is None else token(end),
    )
    try:
        found = calibration.find(module, manifest, [text.ids for text in encoded], words, layer)
    except calibration.CalibrationError as error:
        raise click.ClickException(str(error)) from error
    _write(
        out,
        "steering",
        manifest,
        data={
            "layer": found.layer,
            "at": words.ends,
            "ends": words.ends,
            "marks": words.marks,
            "begin": words.begin,
            "end": words.end,
        },
        arrays={"vector": found.vector},
        made_with={
            "texts": len(texts),
            "marked_sentences": found.marked,
            "other_sentences": found.others,
            "auc": found.auc,
        },
    )
    click.echo(
        f"layer {found.layer}; of {found.marked} marked and {found.others} other sentences; held-out "
        f"ones are told apart with an AUC of {found.auc:.2f} (chance: 0.50)"
    )


def _token_finder(model: Path) -> Callable[[str], int]:
    """Finds the token of the model that is a text."""
    from tokenizers import Tokenizer

    from epikv.export.archive import read_tokenizer

    tokenizer = Tokenizer.from_str(read_tokenizer(model))

    def token(text: str) -> int:
        named = tokenizer.token_to_id(text)
        if named is not None:
            return int(named)
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        if len(ids) != 1:
            raise click.ClickException(
                f"'{text}' is {len(ids)} tokens of this model; one is needed"
            )
        return int(ids[0])

    return token


def _index_after(path: Path, encoding: "Encoding", marker: str) -> int:
    """Of the first token behind the first `marker`."""
    head, found, _ = path.read_text("utf-8").partition(marker)
    if not found:
        raise click.ClickException(f"{path} does not hold '{marker}' (--after)")
    end = len(head) + len(marker)
    behind = (place for place, (start, _) in enumerate(encoding.offsets) if start >= end)
    return next(behind, len(encoding.ids))

"""`epikv calibrate trimkv`, `dbtrimkv`, `dms`, `kvzap`, `epikv_forecast`: gates, small models beside the model."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from epikv.cli import calibrate_sources as sources

if TYPE_CHECKING:
    from epikv.calibrate.kvzap import Samples

_positive = click.FloatRange(min=0, min_open=True)
_TEXTS = (
    *sources.SOURCES,
    sources.out("the gate's weights go"),
    sources.length(),
    sources.seed("Of first weights, and of the order of texts."),
)
_TRAINING = (
    click.option(
        "--steps",
        default=2000,
        show_default=True,
        type=click.IntRange(1),
        help="Texts trained on, one a step.",
    ),
    click.option("--rate", type=_positive, help="Learning rate. Default: as published."),
    sources.WORK,
)
_WIDTH = click.option(
    "--width",
    default=64,
    show_default=True,
    type=click.IntRange(1),
    help="Of the gate's hidden layers.",
)


def _say(figures: Mapping[str, object]) -> None:
    click.echo("Of texts held out:")
    for name, found in figures.items():
        click.echo(f"{name:10} {found}")


def _judged(held: Sequence[Any], figures: Mapping[str, Any]) -> dict[str, Any]:
    return {"texts": len(held), **{name: asdict(found) for name, found in figures.items()}}


def _retention(policy: str) -> click.Command:
    @click.command(
        policy,
        help=f"""Train gates for {policy} that foretell how long MODEL will need a token.

        The model's own weights stay as they are. A tenth of the texts is held out; at the end it says what the gates
        lose there.""",
    )
    @sources.with_options(
        *_TEXTS,
        _WIDTH,
        click.option(
            "--budget",
            default=128,
            show_default=True,
            type=click.IntRange(1),
            help="Tokens that the gate learns to remember, of each KV head"
            + ("; some more, others less." if policy == "dbtrimkv" else "."),
        ),
        *_TRAINING,
    )
    def command(
        model: Path,
        texts: tuple[Path, ...],
        tasks: tuple[str, ...],
        problems: int,
        out: Path,
        length: int,
        seed: int,
        width: int,
        budget: int,
        steps: int,
        rate: float | None,
        work: Path | None,
    ) -> None:
        source = sources.load_texts(model, texts, tasks, problems, length)
        from epikv.calibrate import gates, retention
        from epikv.eval.progress import progress

        of_policy = retention.TRAININGS[policy]
        training = replace(
            of_policy, width=width, steps=steps, rate=rate or of_policy.rate, seed=seed
        )
        try:
            gates.check(source.manifest)
            to_train, held = gates.parted(gates.longer_than(source.ids, 1))
            with progress(steps, 0, "steps") as tell:
                trained = retention.train(
                    source.module,
                    source.manifest,
                    policy,
                    to_train,
                    training,
                    budget,
                    work or out.with_suffix(".work"),
                    tell,
                )
        except gates.CalibrationError as error:
            raise click.ClickException(str(error)) from error
        figures = retention.judge(source.module, source.manifest, held, training, budget, trained)
        source.write(
            out,
            policy,
            trained.arrays(),
            **asdict(training),
            budget=budget,
            texts=len(to_train),
            tokens=sum(map(len, to_train)),
            held_out=_judged(held, figures),
        )
        _say(figures)

    return command


trimkv, dbtrimkv = _retention("trimkv"), _retention("dbtrimkv")


@click.command("dms")
@sources.with_options(
    *_TEXTS,
    click.option(
        "--window",
        default=512,
        show_default=True,
        type=click.IntRange(1),
        help="Newest tokens, which all stay; the recent window to ask for.",
    ),
    click.option(
        "--compression",
        default=8.0,
        show_default=True,
        type=click.FloatRange(min=1, min_open=True),
        help="Of older tokens one in so many stays in the end.",
    ),
    *_TRAINING,
)
def dms(
    model: Path,
    texts: tuple[Path, ...],
    tasks: tuple[str, ...],
    problems: int,
    out: Path,
    length: int,
    seed: int,
    window: int,
    compression: float,
    steps: int,
    rate: float | None,
    work: Path | None,
) -> None:
    """Train gates for dms that say which tokens MODEL can do without.

    The model's own weights stay as they are. A tenth of the texts is held out; at the end it says what the gates lose
    there."""
    source = sources.load_texts(model, texts, tasks, problems, length)
    from epikv.calibrate import dms as calibration
    from epikv.calibrate import gates
    from epikv.eval.progress import progress

    training = replace(
        calibration.TRAINING, steps=steps, rate=rate or calibration.TRAINING.rate, seed=seed
    )
    goal = calibration.Goal(window, compression)
    try:
        gates.check(source.manifest)
        to_train, held = gates.parted(gates.longer_than(source.ids, window))
        with progress(steps, 0, "steps") as tell:
            trained = calibration.train(
                source.module,
                source.manifest,
                to_train,
                training,
                goal,
                work or out.with_suffix(".work"),
                tell,
            )
    except gates.CalibrationError as error:
        raise click.ClickException(str(error)) from error
    figures = calibration.judge(source.module, source.manifest, held, training, goal, trained)
    source.write(
        out,
        "dms",
        calibration.arrays(trained),
        **asdict(training),
        **asdict(goal),
        texts=len(to_train),
        tokens=sum(map(len, to_train)),
        held_out=_judged(held, figures),
    )
    _say(figures)


@click.command("kvzap")
@sources.with_options(
    *_TEXTS,
    click.option(
        "--width",
        default=0,
        show_default=True,
        type=click.IntRange(0),
        help="Of the gate's hidden layer. 0: a ridge regression.",
    ),
    click.option(
        "--instruction",
        default="\n\nRepeat the previous context exactly.\n\n",
        show_default=True,
        help="What follows a text before it is read once more. Empty: it is not, and its own later tokens count.",
    ),
    click.option(
        "--gap",
        default=64,
        show_default=True,
        type=click.IntRange(1),
        help="Without an instruction: tokens count that are at least so many later; about the recent window.",
    ),
)
def kvzap(
    model: Path,
    texts: tuple[Path, ...],
    tasks: tuple[str, ...],
    problems: int,
    out: Path,
    length: int,
    seed: int,
    width: int,
    instruction: str,
    gap: int,
) -> None:
    """Fit gates for kvzap that foretell how much MODEL will take of a token."""
    source = sources.load_texts(model, texts, tasks, problems, length)
    from epikv.calibrate import gates
    from epikv.calibrate import kvzap as calibration
    from epikv.eval.progress import progress

    asked: list[int] = []
    if instruction:
        asked = source.encoder.encode(instruction, add_special_tokens=False).ids
    most = (source.manifest.context_length - len(asked)) // 2 if asked else length
    try:
        gates.check(source.manifest)
        ids = gates.longer_than(source.ids, 0 if asked else gap)
    except gates.CalibrationError as error:
        raise click.ClickException(str(error)) from error
    samples: list[Samples] = []
    with progress(len(ids), 0, "texts") as tell:
        for number, text in enumerate(ids, 1):
            of_text = calibration.Text(text[:most], asked, gap)
            samples.append(calibration.measure(source.module, source.manifest, of_text))
            tell(number)
    to_fit, held = gates.parted(samples)
    fitted = calibration.together(to_fit)
    if width == 0:
        arrays = calibration.ridge(fitted)
    else:
        with progress(calibration.PASSES, 0, "passes") as tell:
            arrays = calibration.network(fitted, width, seed=seed, tell=tell)
    explained = calibration.explained(arrays, calibration.together(held))
    source.write(
        out,
        "kvzap",
        arrays,
        texts=len(to_fit),
        tokens=fitted.given.shape[1],
        width=width,
        instruction=instruction,
        gap=None if asked else gap,
        explained=explained,
    )
    click.echo(
        "explained of texts held out, by layer: " + ", ".join(f"{share:.2f}" for share in explained)
    )


@click.command("epikv_forecast")
@sources.with_options(*sources.SOURCES, sources.out("what it found goes"), sources.length())
def epikv_forecast(
    model: Path,
    texts: tuple[Path, ...],
    tasks: tuple[str, ...],
    problems: int,
    out: Path,
    length: int,
) -> None:
    """Fit read-outs that foretell which tokens MODEL will look at.

    By head and age, of what each layer is given; and measure what its queries are like."""
    source = sources.load_texts(model, texts, tasks, problems, length)
    from epikv.calibrate import artefacts, forecast
    from epikv.eval.progress import progress

    moments = forecast.Moments.none(source.manifest)
    samples = []
    try:
        artefacts.check(source.manifest)
        ids = [text for text in source.ids if len(text) >= 2 * forecast.AGES[0]]
        ages = forecast.ages_of(ids)
        with progress(len(ids), 0, "texts") as tell:
            for number, text in enumerate(ids, 1):
                samples.append(
                    forecast.measure(source.module, source.manifest, text, ages, moments)
                )
                tell(number)
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    with progress(len(source.manifest.layers), 0, "layers") as tell:
        arrays, explained = forecast.fit(samples, ages, tell)
    source.write(
        out,
        "epikv_forecast",
        {**arrays, **forecast.queries(moments)},
        data={"ages": ages},
        texts=len(ids),
        tokens=sum(map(len, ids)),
        explained=explained,
    )
    by_age = ", ".join(f"{age}: {share:.2f}" for age, share in zip(ages, explained, strict=True))
    click.echo(f"explained of one half of the texts by the other, by age in tokens: {by_age}")

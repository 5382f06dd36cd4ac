"""`epikv calibrate trimkv`, `dbtrimkv`, `dms`, `kvzap`: gates, small models beside the model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from epikv.installing import pip_install

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from torch import Tensor
    from torch.jit import ScriptModule

    from epikv.calibrate.kvzap import Samples
    from epikv.export.manifest import Manifest
    from epikv.sample import Problem

_file = click.Path(exists=True, dir_okay=False, path_type=Path)
_new_file = click.Path(dir_okay=False, path_type=Path)
_positive = click.FloatRange(min=0, min_open=True)
SOURCES = (
    click.argument("model", type=_file),
    click.option(
        "--text",
        "texts",
        type=_file,
        multiple=True,
        help="Text that the model wrote, with its prompt; one text a file. Give it once for each file.",
    ),
    click.option(
        "--task",
        "tasks",
        multiple=True,
        help="Problems of a sample model with their solutions, instead: sample:FAMILY, as in `epikv eval`.",
    ),
    click.option("--problems", default=200, show_default=True, help="Problems of each task."),
)
_TEXTS = (
    *SOURCES,
    click.option(
        "-o",
        "--out",
        type=_new_file,
        required=True,
        help="File to write, for the daemon's artefact_dir; the gate's weights go beside it.",
    ),
    click.option(
        "--length", default=4096, show_default=True, help="Tokens of each text that are read."
    ),
    click.option(
        "--seed", default=0, show_default=True, help="Of first weights, and of the order of texts."
    ),
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
    click.option(
        "--work",
        type=_new_file,
        help="File that keeps what was trained, from which an interrupted run goes on. Default: OUT with .work in place"
        " of .json.",
    ),
)
_WIDTH = click.option(
    "--width",
    default=64,
    show_default=True,
    type=click.IntRange(1),
    help="Of the gate's hidden layers.",
)


def with_options(
    *options: Callable[..., Any],
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def decorated(command: Callable[..., None]) -> Callable[..., None]:
        for option in reversed(options):
            command = option(command)
        return command

    return decorated


@dataclass(frozen=True)
class Source:
    """The model, and the tokens of every text."""

    module: "ScriptModule"
    manifest: "Manifest"
    encoder: "Tokenizer"
    ids: list[list[int]]

    def write(
        self, out: Path, policy: str, arrays: "Mapping[str, Tensor]", **made_with: Any
    ) -> None:
        from epikv.calibrate import artefacts

        try:
            artefacts.write(out, policy, self.manifest, data={}, arrays=arrays, made_with=made_with)
        except (OSError, ValueError) as error:
            raise click.ClickException(str(error)) from error


def load_texts(
    model: Path, texts: Sequence[Path], tasks: Sequence[str], problems: int, length: int
) -> Source:
    try:
        from tokenizers import Tokenizer

        from epikv.export import load
    except ImportError as error:
        raise click.ClickException(
            f"{error}; install what calibration needs: {pip_install('calibrate', 'export')}"
        ) from error
    written = [text.read_text("utf-8") for text in texts]
    for task in tasks:
        written += _solutions(task, problems)
    if not written:
        raise click.UsageError("no texts: give --text or --task")
    module, manifest, tokenizer = load(model)
    encoder = Tokenizer.from_str(tokenizer)
    encoder.enable_truncation(min(length, manifest.context_length))
    return Source(module, manifest, encoder, [encoder.encode(text).ids for text in written])


def _solutions(task: str, count: int) -> list[str]:
    return [f"{one.prompt} {one.trace}" for one in sample_problems(task, count, "solutions")]


def sample_problems(task: str, count: int, what: str) -> "list[Problem]":
    """Of sample:FAMILY. what: is read of them."""
    from epikv.sample import FAMILIES, problem

    kind, _, family = task.partition(":")
    if kind != "sample" or family not in FAMILIES:
        raise click.BadParameter(
            f"{task} has no {what} to read; those have that are of the sample model:"
            f" {', '.join(f'sample:{name}' for name in FAMILIES)}. Of other tasks, let the model"
            " write texts and give them by --text",
            param_hint="--task",
        )
    return [problem(f"calibration/{number}", family) for number in range(count)]


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
    @with_options(
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
        source = load_texts(model, texts, tasks, problems, length)
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
@with_options(
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
    source = load_texts(model, texts, tasks, problems, length)
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
@with_options(
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
    source = load_texts(model, texts, tasks, problems, length)
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

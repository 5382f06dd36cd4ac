"""`epikv calibrate packet`: soft tokens, around documents that are cached alone."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from epikv.cli import calibrate_sources as sources
from epikv.installing import pip_install

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from epikv.calibrate.soft_tokens import Problem
    from epikv.export.manifest import Manifest


@click.command("packet")
@sources.MODEL
@sources.texts("Text to cut into documents and, at its end, a question; one problem a file.")
@sources.tasks(
    "Problems of a sample model, instead: sample:FAMILY, as in `epikv eval`. The lines of a prompt are dealt"
    " into documents, what stands before them is read first, and what is asked is the question."
)
@sources.PROBLEMS
@sources.out("the rows go")
@click.option(
    "--documents",
    default=4,
    show_default=True,
    type=click.IntRange(1),
    help="Of each problem, one after another, as good as of the same length.",
)
@click.option(
    "--question",
    default=32,
    show_default=True,
    type=click.IntRange(1),
    help="Last tokens of a text, which see all documents.",
)
@click.option(
    "--answer",
    default=128,
    show_default=True,
    type=click.IntRange(1),
    help="Tokens that the model says next, at most: of them the documents are to make the same.",
)
@sources.length(when=", if the model's context has room for them and all others")
@click.option(
    "--soft",
    default=8,
    show_default=True,
    type=click.IntRange(1, 64),
    help="Soft tokens before a document, and as many behind it.",
)
@click.option("--steps", default=240, show_default=True, type=click.IntRange(1))
@click.option(
    "--batch",
    default=8,
    show_default=True,
    type=click.IntRange(1),
    help="Problems of a step. As published: 64.",
)
@click.option(
    "--rate",
    default=5e-4,
    show_default=True,
    type=click.FloatRange(min=0, min_open=True),
    help="Learning rate at the start; it falls to 0 in a line.",
)
@sources.seed("Of first rows, and of the order of problems.")
@sources.WORK
def command(
    model: Path,
    texts: tuple[Path, ...],
    tasks: tuple[str, ...],
    problems: int,
    out: Path,
    documents: int,
    question: int,
    answer: int,
    length: int,
    soft: int,
    steps: int,
    batch: int,
    rate: float,
    seed: int,
    work: Path | None,
) -> None:
    """Train soft tokens, between which MODEL caches a document alone (`epikv packet create --soft-tokens`).

    Documents that were cached so and lie side by side are to answer as documents that were read one after
    another. The model's own weights stay as they are. A tenth of the problems is held out; at the end it
    says what is lost there."""
    try:
        from tokenizers import Tokenizer

        from epikv.export import load
    except ImportError as error:
        raise click.ClickException(
            f"{error}; install what calibration needs: {pip_install('calibrate', 'export')}"
        ) from error
    if not texts and not tasks:
        raise click.UsageError("no problems: give --text or --task")
    module, manifest, tokenizer = load(model)
    encoder = Tokenizer.from_str(tokenizer)
    from epikv.calibrate import artefacts, gates
    from epikv.calibrate import soft_tokens as calibration
    from epikv.eval.progress import progress

    training = calibration.Training(soft, steps, batch, rate, seed)
    most = min(length, manifest.context_length - 2 * soft * documents - answer)
    try:
        posed = [
            *_of_tasks(encoder, tasks, problems, documents),
            *_of_texts(encoder, manifest, texts, documents, question, most),
        ]
        calibration.check(manifest, posed, training, answer)
        with progress(len(posed), 0, "answers") as tell:
            posed = calibration.answered(module, manifest, posed, answer, tell)
        to_train, held = gates.parted(posed)
        with progress(steps, 0, "steps") as tell:
            trained = calibration.train(
                module, manifest, to_train, training, work or out.with_suffix(".work"), tell
            )
    except gates.CalibrationError as error:
        raise click.ClickException(str(error)) from error
    figures = calibration.judge(module, manifest, held, training, trained)
    try:
        artefacts.write(
            out,
            calibration.POLICY,
            manifest,
            data={},
            arrays=trained.arrays(),
            made_with={
                **asdict(training),
                "documents": documents,
                "answer": answer,
                "problems": len(to_train),
                "held_out": {
                    "problems": len(held),
                    **{name: asdict(found) for name, found in figures.items()},
                },
            },
        )
    except (OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"Of {len(held)} problems held out:")
    for name, found in figures.items():
        click.echo(f"{name:10} {found}")


def _of_tasks(
    encoder: "Tokenizer", tasks: Sequence[str], count: int, documents: int
) -> "Iterator[Problem]":
    from epikv.calibrate import soft_tokens as calibration

    for task in tasks:
        for one in sources.sample_problems(task, count, "documents"):
            parts = calibration.parts_of_prompt(one.prompt, documents)
            yield calibration.problem_of(
                [encoder.encode(part, add_special_tokens=False).ids for part in parts]
            )


def _of_texts(
    encoder: "Tokenizer",
    manifest: "Manifest",
    texts: Sequence[Path],
    documents: int,
    question: int,
    most: int,
) -> "Iterator[Problem]":
    from epikv.calibrate import soft_tokens as calibration

    for text in texts:
        ids = encoder.encode(text.read_text("utf-8")).ids[: max(0, most)]
        yield calibration.problem_of(
            calibration.parts_of_text(ids, manifest.bos_token_id, documents, question)
        )

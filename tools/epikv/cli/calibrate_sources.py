"""What commands of `epikv calibrate` read, and how they are told: a model, texts or tasks, a file to write."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from epikv.installing import pip_install

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from torch import Tensor
    from torch.jit import ScriptModule

    from epikv.export.manifest import Manifest
    from epikv.sample import Problem

_file = click.Path(exists=True, dir_okay=False, path_type=Path)
_new_file = click.Path(dir_okay=False, path_type=Path)

MODEL = click.argument("model", type=_file)
PROBLEMS = click.option("--problems", default=200, show_default=True, help="Problems of each task.")
WORK = click.option(
    "--work",
    type=_new_file,
    help="File that keeps what was trained, from which an interrupted run goes on. Default: OUT with .work in place"
    " of .json.",
)


def texts(
    what: str = "Text that the model wrote, with its prompt; one text a file.",
    *,
    required: bool = False,
) -> Callable[..., Any]:
    return click.option(
        "--text",
        "texts",
        type=_file,
        multiple=True,
        required=required,
        help=f"{what} Give it once for each file.",
    )


def tasks(what: str) -> Callable[..., Any]:
    return click.option("--task", "tasks", multiple=True, help=what)


def out(beside: str = "") -> Callable[..., Any]:
    """beside: what else is written."""
    return click.option(
        "-o",
        "--out",
        type=_new_file,
        required=True,
        help="File to write, for the daemon's artefact_dir"
        + (f"; {beside} beside it." if beside else "."),
    )


def length(default: int = 4096, when: str = "") -> Callable[..., Any]:
    return click.option(
        "--length",
        default=default,
        show_default=True,
        type=click.IntRange(1),
        help=f"Tokens of each text that are read{when}.",
    )


def seed(of: str) -> Callable[..., Any]:
    return click.option("--seed", default=0, show_default=True, help=of)


SOURCES = (
    MODEL,
    texts(),
    tasks(
        "Problems of a sample model with their solutions, instead: sample:FAMILY, as in `epikv eval`."
    ),
    PROBLEMS,
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
        self,
        out: Path,
        policy: str,
        arrays: "Mapping[str, Tensor]",
        data: Mapping[str, Any] | None = None,
        **made_with: Any,
    ) -> None:
        from epikv.calibrate import artefacts

        try:
            artefacts.write(
                out, policy, self.manifest, data=data or {}, arrays=arrays, made_with=made_with
            )
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

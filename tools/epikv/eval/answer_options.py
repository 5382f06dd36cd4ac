"""Options that say how files of problems are read, of every command that takes `--task file:PATH`."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from epikv.eval.files import Reading

Command = TypeVar("Command", bound=Callable[..., Any])

_OPTIONS = (
    click.option(
        "--template",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="File with the prompt for file:PATH; {problem}, {choices}, {context} and {input} stand for what"
        " the problem has. JSON: a prompt for each of LongBench's data sets.",
    ),
    click.option(
        "--format",
        "file_format",
        type=click.Choice(["auto", "own", "mmlu", "longbench", "ruler", "lm-eval"]),
        default="auto",
        show_default=True,
        help="Of file:PATH. auto: by the fields of each line.",
    ),
    click.option(
        "--answer-regex",
        metavar="REGEX",
        help="The answer is what the first group takes, in the last match. Of file:PATH.",
    ),
    click.option(
        "--answer-after",
        metavar="TEXT",
        help="The answer is the line behind the last TEXT. Of file:PATH.",
    ),
    click.option(
        "--match",
        metavar="math|exact|number|choice|contains|f1|rouge-l|python:FILE",
        help="When the answer is right. math: the same by the rules of MATH; python: as right(output, answer) of"
        " FILE says, which is run. Default: as the format has it. Of file:PATH.",
    ),
    click.option(
        "--choice-metric",
        type=click.Choice(["acc", "acc_norm"]),
        default="acc",
        show_default=True,
        help="The choice of a multiple choice: the likeliest, or the likeliest by character. Of file:PATH.",
    ),
)  # fmt: skip


def add(command: Command) -> Command:
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def take(given: dict[str, Any], tasks: Sequence[str]) -> "Reading":
    """Takes them out of what a command was given. Raises click.UsageError where no task is a file."""
    from epikv.eval.files import Reading, template
    from epikv.eval.forms import form

    path, file_format, regex, after, match, metric = (
        given.pop(name)
        for name in (
            *("template", "file_format", "answer_regex", "answer_after", "match", "choice_metric"),
        )
    )
    reading = Reading(
        template(path) if path is not None else None,
        file_format,
        form(regex, after, match),
        metric,
    )
    if reading != Reading() and not any(task.startswith("file:") for task in tasks):
        raise click.UsageError(
            "no --task is a file: how files are read (--template, --format, --answer-..., --match,"
            " --choice-metric) says nothing of others"
        )
    return reading

"""Problems of files: JSON objects, one a line, or rows of CSV, in the formats of epikv.eval.formats.

`id`, `unique_id` (MATH-500) or `doc_id` (lm-eval) is a problem's id, else its line's number.
"""

import csv
import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from epikv.eval.formats import READERS, Line, Place, detect
from epikv.eval.forms import AnswerForm, judge, misfit
from epikv.eval.items import Choices, Item

AUTO = "auto"
ACC, ACC_NORM = "acc", "acc_norm"
_CSV_COLUMNS = 3  # at least: a question, a choice, the answer


@dataclass(frozen=True)
class Reading:
    """How files of problems are read."""

    template: str | Mapping[str, str] | None = (
        None  # of prompts; by data set, where there are several
    )
    format: str = AUTO  # of READERS; AUTO: by a line's fields
    form: AnswerForm = AnswerForm()
    choice_metric: str = ACC  # by which the choice of a multiple choice is made

    def facts(self) -> dict[str, str]:
        """What plans and reports say of it; {}: nothing, as where all is as ever. Templates are told by
        the prompts."""
        facts = self.form.facts()
        if self.format != AUTO:
            facts["format"] = self.format
        if self.choice_metric != ACC:
            facts["choice_metric"] = self.choice_metric
        return facts


def read(path: Path, count: int, reading: Reading = Reading()) -> list[Item | Choices]:
    """The first `count` problems. Raises click.ClickException that names the line at fault."""
    place = Place(path, reading.template, reading.form.boxed)
    items: list[Item | Choices] = []
    first: dict[str, int] = {}  # line of each id
    filter_name: object = None  # of lm-eval, which has a line for each of a task's filters
    for number, row in _rows(path):
        if len(items) == count:
            break
        try:
            fields = row if isinstance(row, dict) else _object(row)
            if not items:
                filter_name = fields.get("filter")
            elif fields.get("filter") != filter_name and _format(fields, reading) == "lm-eval":
                continue
            line = READERS[_format(fields, reading)](fields, place)
            item = _question(line, line.id or str(number), reading)
        except ValueError as error:
            raise click.ClickException(f"{path}:{number}: {error}") from error
        if item.id in first:
            raise click.ClickException(
                f"{path}:{number}: the id {item.id} is that of line {first[item.id]}, too"
            )
        first[item.id] = number
        items.append(item)
    if not items:
        raise click.ClickException(f"{path}: no problems")
    return items


def template(path: Path) -> str | dict[str, str]:
    """Of a file: a text, or JSON with a text for each data set. Raises click.ClickException."""
    try:
        text = path.read_text("utf-8")
        if path.suffix != ".json":
            return text
        texts = json.loads(text)
    except (OSError, ValueError) as error:
        raise click.ClickException(f"{path}: {error}") from error
    if not isinstance(texts, dict) or not all(isinstance(each, str) for each in texts.values()):
        raise click.ClickException(f"{path}: not a JSON object of texts by data set")
    return texts


def _rows(path: Path) -> Iterator[tuple[int, str | dict[str, Any]]]:
    """Lines that are not empty, with their numbers."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise click.ClickException(f"{path}: {error}") from error
    if path.suffix == ".csv":
        yield from _csv(path, text)
        return
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            yield number, line


def _csv(path: Path, text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """MMLU's: question, choices, letter of the answer; with a line that names the columns, or none."""
    rows = csv.reader(io.StringIO(text, newline=""))
    for row in rows:
        number = rows.line_num
        if not row or (number == 1 and row[-1].strip().lower() == "answer"):
            continue
        if len(row) < _CSV_COLUMNS:
            raise click.ClickException(
                f"{path}:{number}: needs columns for the question, its choices and the answer"
            )
        yield number, {"question": row[0], "choices": row[1:-1], "answer": row[-1].strip()}


def _object(line: str) -> dict[str, Any]:
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError("not a JSON object")
    return fields


def _format(fields: Mapping[str, Any], reading: Reading) -> str:
    return detect(fields) if reading.format == AUTO else reading.format


def _question(line: Line, name: str, reading: Reading) -> Item | Choices:
    """Choices are scored, unless it is said how an answer is read: then the model writes one."""
    form = reading.form
    if line.choices and not form.facts():
        return Choices(
            name,
            line.prompt,
            line.continuations,
            tuple(map(len, line.choices)),
            line.right,
            by_length=reading.choice_metric == ACC_NORM,
        )
    measure = form.measure(line.measure)
    if measure is None:
        raise ValueError(f"no measure of '{line.measure_name}' is known here: give --match")
    for answer in line.answers:
        if why := misfit(form.match, answer):
            raise ValueError(why)
    if form.function is None:
        measure("", line.answers[0])  # a package that it lacks is told before anything is run
    each = line.each and form.match is None
    said = bool(line.measure_name or form.facts())
    return Item(
        name,
        line.prompt,
        judge(form, measure, line.answers, each, name),
        most_tokens=line.most_tokens,
        stop_strings=line.stop_strings,
        begins=form.begins,
        expects=(line.measure_name, *line.answers) if said else (),
    )

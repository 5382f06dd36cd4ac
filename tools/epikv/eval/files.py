"""Problems of a file: MATH-500, AIME, GSM8K and one's own, a JSON object a line.

    {"id": ..., "problem" or "question": ..., "answer": ...}    put into the prompt template
    {"id": ..., "prompt": ..., "answer": ...}                   a prompt as it stands

`unique_id` serves as id (MATH-500), and so does the line's number where there is none. Of an answer
that shows its work (GSM8K) what stands behind `####` counts.
"""

import json
from pathlib import Path
from typing import Any

import click

from epikv.eval.answers import extract, same
from epikv.eval.items import Item

PLACE = "{problem}"
TEMPLATE = (
    PLACE + "\n\nReason step by step, and put your final answer within \\boxed{}.\n\n"
)  # the last line break begins the reasoning


def read(path: Path, count: int, template: str = TEMPLATE) -> list[Item]:
    """The first `count` problems. Raises click.ClickException that names the line at fault."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise click.ClickException(f"{path}: {error}") from error
    items: list[Item] = []
    first: dict[str, int] = {}  # line of each id
    for number, line in enumerate(lines, 1):
        if len(items) == count:
            break
        if not line.strip():
            continue
        try:
            item = _item(line, number, template)
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


def _item(line: str, number: int, template: str) -> Item:
    try:
        fields: dict[str, Any] = json.loads(line)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError("not a JSON object")
    prompt = fields.get("prompt")
    if prompt is None:
        problem = fields.get("problem", fields.get("question"))
        if not isinstance(problem, str) or not problem.strip():
            raise ValueError("needs a text called problem, question or prompt")
        prompt = template.replace(PLACE, problem)
    if not isinstance(prompt, str) or not prompt:
        raise ValueError("prompt is not a text")
    truth = fields.get("answer")
    if isinstance(truth, bool) or not isinstance(truth, str | int | float) or truth == "":
        raise ValueError("needs an answer, a text or a number")
    truth = str(truth)
    if "####" in truth:
        truth = truth.rpartition("####")[2].strip()

    def judge(completion: str) -> list[bool]:
        return [same(extract(completion), truth)]

    name = fields.get("id", fields.get("unique_id", number))
    return Item(str(name), prompt, judge)

"""Traces: what the model writes under the whole cache, and how far its residual stream moved.

Only problems that it solves make a trace, and only those that it still solves when it is stopped
and begins anew at the places where labels begin anew: else a wrong answer would say nothing of
what was taken away.
"""

import base64
import hashlib
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from epikv.calibrate.journal import Journal
from epikv.calibrate.runs import Runner, room
from epikv.calibrate.signals import Floats
from epikv.eval.items import Item, solved
from epikv.eval.requests import most_tokens
from epikv.options import Output, Stop

RECENT = 128  # most tokens that equal protection spares for being new
TAIL = 64  # tokens taken for the answer where nothing marks it
# What an answer starts after, or with; the last of the first that is there.
AFTER, WITH = "</think>", "\\boxed"


@dataclass(frozen=True)
class Problem:
    """An item of a task."""

    task: str
    item: Item

    @property
    def key(self) -> str:
        """Another for another prompt: a file may change."""
        digest = hashlib.sha256(self.item.prompt.encode()).hexdigest()[:8]
        return f"{self.task} {self.item.id} {digest}"


@dataclass(frozen=True)
class Trace:
    """A solved problem."""

    problem: Problem
    prompt: list[int]
    output: list[int]
    answer: int  # the output token with which the answer starts
    steps: Floats  # [layers, len(output) - 1]: the last token is never cached

    def reference(self) -> int:
        """Tokens of which a budget takes a share."""
        return self.problem.item.trace_tokens or len(self.output)

    def budget(self, fraction: float) -> "Budget":
        return Budget.of(len(self.prompt), self.reference(), fraction)

    def candidates(self, fraction: float) -> int:
        """How many of the first output tokens eviction can reach before the answer starts: what is
        newer then is spared for being new."""
        return max(self.answer - self.budget(fraction).recent, 0)


@dataclass(frozen=True)
class Budget:
    """What a prompt and a share of the reference trace come to, in tokens."""

    tokens: int
    recent: int  # of these, spared for being new
    old: int  # of these, left for generated tokens that are not new

    @classmethod
    def of(cls, prompt: int, reference: int, fraction: float) -> "Budget":
        generated = round(fraction * reference)
        recent = min(RECENT, (prompt + generated) // 4, generated)
        return cls(prompt + generated, recent, generated - recent)


def collect(
    runner: Runner, problems: Sequence[Problem], journal: Journal, fraction: float, most: int | None
) -> list[Trace]:
    """The traces of the problems that the model solves, in their order.

    most: output tokens; None: as the task's reference trace lets expect, else as the server lets.
    """

    def one(problem: Problem) -> None:
        journal.add(problem.key, _trace(runner, problem, fraction, most))

    missing = [problem for problem in problems if problem.key not in journal]
    runner.each("traces", one, missing, len(problems) - len(missing))
    return [
        _read(problem, journal.records[problem.key])
        for problem in problems
        if "output" in journal.records[problem.key]
    ]


def answer_start(
    runner: Runner, output: Sequence[int], begins: Callable[[str], int | None] | None = None
) -> int:
    """The output token with which the answer starts: where it `begins`; if that is not known after the
    thought, else at the last box, else the last but TAIL."""
    text = runner.text(output, skip_special_tokens=False)

    def tokens(characters: int) -> int:
        """How many it takes to write so many characters."""
        return bisect_left(
            range(len(output) + 1),
            characters,
            key=lambda n: len(runner.text(output[:n], skip_special_tokens=False)),
        )

    if begins is not None and (marked := begins(text)) is not None:
        return tokens(marked + 1) - 1
    if (at := text.rfind(AFTER)) >= 0:
        start = tokens(at + len(AFTER))
        while (
            start < len(output) - 1
            and not runner.text(output[start : start + 1], skip_special_tokens=False).strip()
        ):
            start += 1
        return start
    if (at := text.rfind(WITH)) >= 0:
        return tokens(at + 1) - 1
    return max(len(output) - TAIL, 0)


def _trace(runner: Runner, problem: Problem, fraction: float, most: int | None) -> dict[str, Any]:
    """The journal's record: a trace, or why there is none."""
    item = problem.item
    prompt = runner.ids(item.prompt)
    stop = Stop(most_tokens(item, most), item.stop_strings)
    result = runner.complete(prompt, stop, Output(token_ids=True, residual_steps=True))
    if not solved(item.judge(result.text)):
        return {"unsolved": "from the start"}
    output = result.token_ids
    steps = np.array([s.residual_steps for s in result.signals], np.float32).T
    answer = answer_start(runner, output, item.begins)
    trace = Trace(problem, prompt, output, answer, steps.astype(np.float64))
    for start in {answer, min(trace.budget(fraction).recent, answer)}:
        stop = Stop(room(len(output) - start), item.stop_strings)
        again = runner.complete([*prompt, *output[:start]], stop)
        if not solved(item.judge(again.text)):
            return {"unsolved": f"from output token {start}"}
    return {
        "prompt": prompt,
        "output": output,
        "answer": answer,
        "layers": len(steps),
        "steps": base64.b64encode(np.ascontiguousarray(steps).tobytes()).decode(),
    }


def _read(problem: Problem, record: dict[str, Any]) -> Trace:
    steps = np.frombuffer(base64.b64decode(record["steps"]), np.float32)
    return Trace(
        problem,
        record["prompt"],
        record["output"],
        record["answer"],
        steps.reshape(record["layers"], -1).astype(np.float64),
    )

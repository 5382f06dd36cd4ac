"""Which tokens of a trace are needed, told by replacing them: those without which the answer is wrong.

A window of tokens is replaced by a filler of the same length, and the model goes on from there.

From where it goes on matters. `gap`: from as many tokens after the window as eviction spares for
being new, so that all later lines are written without it, as they would be after its eviction.
`answer`: from the answer on, what lies between given; this finds only what the answer itself reads
(the published way).
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from epikv.calibrate.journal import Journal
from epikv.calibrate.runs import Runner, room
from epikv.calibrate.signals import Bools
from epikv.calibrate.traces import Trace
from epikv.eval.items import solved
from epikv.options import Stop

FILLERS = ("randmulti", "random", "eos", "pad")
STARTS = ("gap", "answer")


@dataclass(frozen=True)
class Vocabulary:
    """What fillers are made of."""

    ordinary: NDArray[np.int64]  # ids of all tokens that are not special
    eos: int | None
    pad: int | None

    @classmethod
    def of(cls, tokenizer: str, vocab_size: int, eos: Sequence[int]) -> "Vocabulary":
        """tokenizer: the text of tokenizer.json."""
        added = json.loads(tokenizer).get("added_tokens", [])
        special = {token["id"] for token in added if token.get("special")} | set(eos)
        pads = [token["id"] for token in added if "pad" in token["content"].lower()]
        ordinary = np.array([i for i in range(vocab_size) if i not in special])
        return cls(ordinary, eos[0] if eos else None, pads[0] if pads else None)

    def filler(self, kind: str, length: int, seed: int, start: int) -> list[int]:
        """In place of so many tokens from `start` on; the same for the same seed and start.

        "randmulti": another ordinary token at each place; "random": one, repeated; "eos" and "pad":
        that one, repeated. Raises ValueError where there is no such token.
        """
        draw = np.random.default_rng([seed, start])
        token: int | None
        match kind:
            case "randmulti":
                return draw.choice(
                    self.ordinary, length, replace=length > len(self.ordinary)
                ).tolist()
            case "random":
                token = int(draw.choice(self.ordinary))
            case "eos" | "pad":
                token = self.eos if kind == "eos" else self.pad
        if token is None:
            raise ValueError(f"this model's tokenizer has no {kind} token")
        return [token] * length


@dataclass(frozen=True)
class Occlusion:
    """How tokens are taken away."""

    window: int = 32
    stride: int = 16
    filler: str = "randmulti"
    start: str = "gap"  # one of STARTS: from where the model goes on
    seed: int = 0


@dataclass(frozen=True)
class Window:
    """Tokens [first, end) of a trace's output, replaced; all before `go_on` is given."""

    trace: Trace
    first: int
    end: int
    go_on: int

    @property
    def key(self) -> str:
        return f"{self.trace.problem.key} {self.first}"

    def ids(self, occlusion: Occlusion, vocabulary: Vocabulary) -> list[int]:
        """What is given: the prompt, and the output up to `go_on` with the filler in it."""
        output = self.trace.output
        filler = vocabulary.filler(
            occlusion.filler, self.end - self.first, occlusion.seed, self.first
        )
        given = [*output[: self.first], *filler, *output[self.end : self.go_on]]
        return [*self.trace.prompt, *given]


def windows(trace: Trace, occlusion: Occlusion, fraction: float) -> Iterator[Window]:
    """Over all candidates, the last one cut short; latest first, so that what precedes a window is
    cached by the time it is asked for."""
    count = trace.candidates(fraction)
    for first in reversed(range(0, count, occlusion.stride)):
        end = min(first + occlusion.window, count)
        go_on = trace.answer
        if occlusion.start == "gap":
            go_on = min(end + trace.budget(fraction).recent, trace.answer)
        yield Window(trace, first, end, go_on)


def occlude(
    runner: Runner,
    over: Sequence[Window],
    occlusion: Occlusion,
    vocabulary: Vocabulary,
    journal: Journal,
) -> None:
    """Records, by window, which parts of the answer the model still gets right."""

    def one(window: Window) -> None:
        trace = window.trace
        ids = window.ids(occlusion, vocabulary)
        item = trace.problem.item
        most = room(len(trace.output) - window.go_on)
        result = runner.complete(ids, Stop(most, item.stop_strings))
        journal.add(window.key, {"right": list(item.judge(result.text))})

    missing = [window for window in over if window.key not in journal]
    runner.each("windows replaced", one, missing, len(over) - len(missing))


def flipped(window: Window, journal: Journal) -> bool:
    return not solved(journal.records[window.key]["right"])


def needed(windows: Sequence[tuple[Window, bool]], candidates: int) -> Bools:
    """Which candidates of a trace are needed: those in any window that flips. [candidates]"""
    result = np.zeros(candidates, bool)
    for window, flip in windows:
        if flip:
            result[window.first : window.end] = True
    return result

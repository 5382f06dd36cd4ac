"""Which candidates for eviction are needed, by either way to tell, and how the two agree."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from epikv.calibrate import eviction, occlusion
from epikv.calibrate.eviction import Eviction, Read
from epikv.calibrate.journal import Journal
from epikv.calibrate.occlusion import Occlusion, Vocabulary, Window
from epikv.calibrate.runs import Runner
from epikv.calibrate.separation import aucs
from epikv.calibrate.signals import Bools
from epikv.calibrate.traces import Trace

KINDS = ("eviction", "occlusion")


@dataclass(frozen=True)
class Labels:
    """Of traces, one by one."""

    needed: list[Bools]  # which of the candidates. [candidates]
    details: dict[str, Any]  # what to report
    # By occlusion: its windows, and of which the answer flips.
    windows: list[list[tuple[Window, bool]]] = field(default_factory=list)


def by_eviction(
    runner: Runner, traces: Sequence[Trace], fraction: float, how: Eviction, journal: Journal
) -> Labels:
    eviction.score(runner, traces, fraction, how.runs, journal)
    needed: list[Bools] = []
    told: dict[str, list[dict[str, Any]]] = {}  # of the first trace of each task
    for trace in traces:
        count = trace.candidates(fraction)
        found = eviction.reads(trace, count, how, journal)
        needed.append(np.isin(np.arange(count), [read.token for read in found]))
        if trace.problem.task not in told:
            told[trace.problem.task] = _told(runner, trace, found)
    return Labels(needed, {"reads of a trace": told})


def by_occlusion(
    runner: Runner,
    traces: Sequence[Trace],
    fraction: float,
    how: Occlusion,
    vocabulary: Vocabulary,
    journal: Journal,
) -> Labels:
    by_trace = [list(occlusion.windows(trace, how, fraction)) for trace in traces]
    every = [window for over in by_trace for window in over]
    occlusion.occlude(runner, every, how, vocabulary, journal)
    windows = [
        [(window, occlusion.flipped(window, journal)) for window in over] for over in by_trace
    ]
    counts = {"windows": len(every), "flipped": sum(flip for over in windows for _, flip in over)}
    needed = [
        occlusion.needed(over, trace.candidates(fraction))
        for over, trace in zip(windows, traces, strict=True)
    ]
    return Labels(needed, counts, windows)


def agreement(full: Labels, cheap: Labels) -> dict[str, float | None]:
    """Of labels by eviction with those by occlusion, over windows: whether a needed token is in it,
    and whether the answer flips. The AUC of one for the other, and Cohen's kappa; None where all
    windows are alike."""
    flips, hits = [], []
    for windows, needed in zip(full.windows, cheap.needed, strict=True):
        for window, flip in windows:
            flips.append(flip)
            hits.append(bool(needed[window.first : window.end].any()))
    return agreement_of(np.array(flips, bool), np.array(hits, bool))


def agreement_of(flips: Bools, hits: Bools) -> dict[str, float | None]:
    some_hit, some_flip = hits.any(), flips.any()
    alike = not some_flip or flips.all()
    same = float((flips == hits).mean())
    by_chance = float(flips.mean() * hits.mean() + (~flips).mean() * (~hits).mean())
    return {
        "flipped, with a needed token in it": float(flips[hits].mean()) if some_hit else None,
        "flipped, without": None if hits.all() else float(flips[~hits].mean()),
        "auc": None if alike else float(aucs(hits[None].astype(float), flips)[0]),
        "kappa": (same - by_chance) / (1 - by_chance) if by_chance < 1 else None,
    }


def _told(runner: Runner, trace: Trace, found: Sequence[Read]) -> list[dict[str, Any]]:
    """What is read by what, in words: the token, and its reader, each with some before it."""

    def words(at: int) -> str:
        return runner.text(trace.output[max(0, at - 3) : at + 1], skip_special_tokens=False)

    return [
        {
            "token": read.token,
            "text": words(read.token),
            "reader": read.reader,
            "read as": words(read.reader),
            "bad if gone": read.gone,
            "bad if kept": read.kept,
        }
        for read in found
    ]

"""Which tokens of a trace are needed, told by evicting at random.

The trace is forced through the model again and again (`Score`), one token a step, while `random`
evicts at the budget, each time others. A token is needed if a later one is badly predicted in runs
in which it was gone by then, more often than chance allows. What is evicted is what serving would
evict, at the same times; nothing is computed anew without it, so that single tokens can be told
apart, and one run tests them all.
"""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import hypergeom

from epikv.calibrate.journal import Journal
from epikv.calibrate.runs import Runner
from epikv.calibrate.traces import Trace
from epikv.options import Kv

ERROR = 0.05  # chance that a trace has a token that is called needed and is not


@dataclass(frozen=True)
class Eviction:
    """How often, and from when on a token is badly predicted."""

    runs: int = 48
    drop: float = 0.5  # nats less likely than under the whole cache


@dataclass(frozen=True)
class Read:
    """Output token `reader` is badly predicted where output token `token` is gone."""

    token: int
    reader: int
    gone: float  # share of runs with it gone in which the reader is badly predicted
    kept: float  # of the others
    p: float  # of so large a difference, by chance, for these two


def score(
    runner: Runner, traces: Sequence[Trace], fraction: float, runs: int, journal: Journal
) -> None:
    """Records each trace's log-probabilities under the whole cache, and in each run those and when
    each token was evicted."""

    def whole(trace: Trace) -> None:
        logprobs = runner.logprobs(trace.prompt, trace.output).logprobs
        journal.add(_whole(trace), {"logprobs": _pack(logprobs, np.float32)})

    def one(work: tuple[Trace, int]) -> None:
        trace, seed = work
        kv = Kv("random", trace.budget(fraction).tokens, {"frozen": True}, equal_protection=True)
        found = runner.logprobs(trace.prompt, trace.output, kv, seed)
        evicted = np.full(len(trace.output), len(trace.output))
        for event in found.evictions:
            for victims in event.victims:
                evicted[np.array(victims.index) - len(trace.prompt)] = event.at_token - len(
                    trace.prompt
                )
        record = {
            "logprobs": _pack(found.logprobs, np.float32),
            "evicted": _pack(evicted, np.int32),
        }
        journal.add(_run(trace, seed), record)

    unscored = [trace for trace in traces if _whole(trace) not in journal]
    runner.each("traces scored", whole, unscored, len(traces) - len(unscored))
    missing = [(t, seed) for t in traces for seed in range(runs) if _run(t, seed) not in journal]
    runner.each("runs under random eviction", one, missing, len(traces) * runs - len(missing))


def reads(trace: Trace, candidates: int, eviction: Eviction, journal: Journal) -> list[Read]:
    """Of every candidate, which later tokens are worse without it."""
    records = [journal.records[_run(trace, seed)] for seed in range(eviction.runs)]
    logprobs = np.stack([_unpack(record, "logprobs", np.float32) for record in records])
    evicted = np.stack([_unpack(record, "evicted", np.int32) for record in records])[:, :candidates]
    whole = _unpack(journal.records[_whole(trace)], "logprobs", np.float32)
    return find_reads(logprobs, whole, evicted, eviction.drop)


def find_reads(
    logprobs: NDArray[np.floating],
    whole: NDArray[np.floating],
    evicted: NDArray[np.integer],
    drop: float,
) -> list[Read]:
    """logprobs [runs, tokens], whole [tokens]; evicted [runs, candidates]: the token after which."""
    runs, tokens = logprobs.shape
    bad = whole - logprobs >= drop
    limit = ERROR / max(evicted.shape[1] * tokens, 1)
    found = []
    for reader in np.flatnonzero(bad.any(0)):
        wrong = bad[:, reader]
        # Token t is predicted in the step that caches token t - 1, before the eviction after it.
        gone = evicted < reader - 1
        count, both = gone.sum(0), gone[wrong].sum(0)
        p = _at_least(runs, int(wrong.sum()))[count, both]
        for token in np.flatnonzero(p <= limit):
            kept = (wrong.sum() - both[token]) / (runs - count[token])
            found.append(
                Read(
                    int(token),
                    int(reader),
                    float(both[token] / count[token]),
                    float(kept),
                    float(p[token]),
                )
            )
    return found


@cache
def _at_least(runs: int, wrong: int) -> NDArray[np.float64]:
    """Fisher's exact p: of `gone` runs drawn from all at random, so many or more are `wrong`.
    [gone, so many]"""
    gone, both = np.arange(runs + 1)[:, None], np.arange(runs + 1)[None]
    return hypergeom.sf(both - 1, runs, wrong, gone)


def _whole(trace: Trace) -> str:
    return trace.problem.key


def _run(trace: Trace, seed: int) -> str:
    return f"{trace.problem.key} {seed}"


def _pack(values: Any, dtype: type) -> str:
    return base64.b64encode(np.asarray(values, dtype).tobytes()).decode()


def _unpack(record: dict[str, Any], name: str, dtype: type) -> NDArray[Any]:
    return np.frombuffer(base64.b64decode(record[name]), dtype)

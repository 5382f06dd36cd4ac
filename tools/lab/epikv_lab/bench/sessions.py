"""What a long conversation costs as a session, turn by turn, beside the same one in a whole cache.

One daemon of one thread and a model of random weights, with the attention of the 0.5B shape. Each
turn adds so many tokens to the conversation and asks twice for the first token of an answer: as a
session, whose past is episodes of a fixed budget, and plainly, with what the prefix cache has of the
turn before. Every so often it asks a third time, plainly and with nothing cached: what a server does
that has forgotten the conversation. A turn begins once the session's episodes are up to date. The
order within a turn is turned round in the next.
"""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import click
from epikv import harness
from epikv.options import Kv, Session, Stop
from epikv.stats import bootstrap

from epikv_lab.bench.kv_dtype import SHAPE
from epikv_lab.bench.streams import random_prompt
from epikv_lab.bench.targets import finish

ARMS = ("session", "cached", "anew")
POOL = 1 << 30
FLAGS = (
    "--threads=1",
    f"--kv_pool_bytes={POOL}",
    "--prefix_cache_share=0.5",
    f"--session_bytes={POOL}",
)
UP_TO_DATE_SECONDS = 600
NO_TARGET = "the table says what a session takes"


@dataclass(frozen=True)
class Turn:
    """One request's first token, and its cache."""

    seconds: float  # to the first token, from the request's arrival
    peak_bytes: int
    computed: int  # tokens of the prompt that no cache had


@click.command("sessions")
@click.option("--turns", default=200, show_default=True)
@click.option("--tokens", default=96, show_default=True, help="Of a turn: question and answer.")
@click.option("--budget", default=1024, show_default=True, help="Tokens that an episode keeps.")
@click.option(
    "--anew",
    default=10,
    show_default=True,
    help="Ask with nothing cached in each of so many turns.",
)
@harness.options
def command(
    turns: int, tokens: int, budget: int, anew: int, json_file: Path | None, **where: Any
) -> None:
    """Memory and time to the first token of a session's turns, over a whole cache's."""
    load = [os.getloadavg()[0]]
    taken: list[dict[str, Turn]] = []
    updates: list[float] = []  # seconds that a turn's update of the episodes took
    with harness.serving(
        lambda: harness.random_model("kv_dtype", **SHAPE), FLAGS, **where
    ) as served:
        vocabulary = served.client.models()[0].vocab_size
        said = random_prompt(turns * tokens, vocabulary, seed=0)
        session = Session(f"bench {time.time_ns()}", budget)
        for number in range(1, turns + 1):
            arms = [arm for arm in ARMS if arm != "anew" or number % anew == 0]
            order = arms if number % 2 == 0 else arms[::-1]
            found = {}
            for arm in order:
                found[arm] = _ask(served, arm, said[: number * tokens], session)
                if arm == "session":
                    updates.append(_await_update(served))
            taken.append({arm: found[arm] for arm in arms})
            if number % anew == 0:
                shown = ", ".join(f"{arm} {1e3 * found[arm].seconds:.1f} ms" for arm in arms)
                harness.say(f"turn {number}, {number * tokens} tokens: {shown}")
    load.append(os.getloadavg()[0])

    figures = told(taken)
    click.echo(f"\n{table(figures, tokens)}\n")
    details = {
        "shape": SHAPE,
        "tokens": tokens,
        "budget": budget,
        "load_average": load,
        "figures": figures,
        "update_seconds": [seconds for seconds in updates if seconds > 0],
        "turns": [{arm: asdict(turn) for arm, turn in arms.items()} for arms in taken],
    }
    finish("sessions", [], details, json_file, untargeted=NO_TARGET)


def _ask(served: harness.Served, arm: str, prompt: Sequence[int], session: Session) -> Turn:
    summary = served.client.generate_once(
        list(prompt),
        kv=Kv(bypass_prefix_cache=arm == "anew"),
        session=session if arm == "session" else None,
        stop=Stop(1, ignore_eos=True),
    ).summary
    assert summary is not None and summary.kv is not None
    usage, timings = summary.usage, summary.timings
    assert usage is not None and timings is not None and timings.time_to_first_token is not None
    assert usage.prompt_tokens == len(prompt)
    cached = usage.cached_prompt_tokens + usage.packet_prompt_tokens
    return Turn(timings.time_to_first_token, summary.kv.peak_bytes, len(prompt) - cached)


def _await_update(served: harness.Served) -> float:
    """Seconds until the daemon does nothing any more."""
    begin = time.monotonic()
    idle = 0
    while idle < 2:  # an update may lie between two of its requests
        page = served.page()
        busy = page.total("epikv_requests_running") + page.total("epikv_requests_waiting")
        idle = 0 if busy else idle + 1
        if time.monotonic() - begin > UP_TO_DATE_SECONDS:
            raise click.ClickException("the server is busy with something else")
        time.sleep(0.02)
    seconds = time.monotonic() - begin
    return seconds if seconds > 0.1 else 0


def told(turns: Sequence[Mapping[str, Turn]]) -> list[dict[str, Any]]:
    """Of each quarter of the conversation."""
    parts = [turns[len(turns) * part // 4 : len(turns) * (part + 1) // 4] for part in range(4)]
    figures = []
    end = 0
    for part in parts:
        end += len(part)
        figure: dict[str, Any] = {"turns": end}
        for arm in ARMS:
            of = [turn[arm] for turn in part if arm in turn]
            figure[arm] = {
                "milliseconds": 1e3 * median(turn.seconds for turn in of) if of else None,
                "peak_bytes": max((turn.peak_bytes for turn in of), default=None),
                "computed": median(turn.computed for turn in of) if of else None,
            }
            pairs = [(turn["session"], turn[arm]) for turn in part if arm in turn]
            if arm != "session" and pairs:
                ratios = [session.seconds / whole.seconds for session, whole in pairs]
                figure[arm]["session_over_it"] = asdict(bootstrap(ratios))
        figures.append(figure)
    return figures


def table(figures: Sequence[Mapping[str, Any]], tokens: int) -> str:
    """Of `told`, in Markdown."""
    lines = [
        f"| turns of {tokens} tokens | peak MB: session, whole | tokens computed: session, cached"
        " | ms to the first token: session, cached, anew | session over cached | over anew |",
        "|---|---|---|---|---|---|",
    ]
    for figure in figures:
        session, cached, anew = (figure[arm] for arm in ARMS)
        cells = [
            f"to {figure['turns']}",
            f"{session['peak_bytes'] / 1e6:.1f}, {cached['peak_bytes'] / 1e6:.1f}",
            f"{session['computed']:.0f}, {cached['computed']:.0f}",
            ", ".join(_number(arm["milliseconds"]) for arm in (session, cached, anew)),
            *(_ratio(arm.get("session_over_it")) for arm in (cached, anew)),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def _ratio(of: Mapping[str, float] | None) -> str:
    return "–" if of is None else f"{of['value']:.2f} [{of['low']:.2f}, {of['high']:.2f}]"

"""How far a run has come, and when it will be done: on stderr, for people."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_PACE_SECONDS = 600  # over which the time left is estimated
_TOLD_SECONDS = 60  # between lines where there is no terminal for a bar


@contextmanager
def progress(total: int, done: int, what: str = "completions") -> Iterator[Callable[[int], None]]:
    """Of `total`, `done` were there before. What it gives is told how many there are now."""
    console = Console(stderr=True, highlight=False)
    console.print(f"{total} {what}, {done} of them there already")
    if not console.is_terminal:
        yield _lines(console, total, done)
        return
    columns = (
        TextColumn("{task.percentage:>3.0f}%"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("time left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, speed_estimate_period=_PACE_SECONDS) as bar:
        task = bar.add_task("", total=total, completed=done)
        yield lambda now: bar.update(task, completed=now)


def _lines(console: Console, total: int, done: int) -> Callable[[int], None]:
    began = told = time.monotonic()

    def tell(now: int) -> None:
        nonlocal told
        at = time.monotonic()
        if at < told + _TOLD_SECONDS or now == done:
            return
        told = at
        left = timedelta(seconds=round((at - began) / (now - done) * (total - now)))
        console.print(f"{now} of {total}, time left {left}")

    return tell

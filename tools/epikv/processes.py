"""Processes that end with the one that has started them, however it ends."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

INTERRUPTED = 130  # exit status of a command that Ctrl-C ended

# The kernel ends a process when the *thread* that started it ends: those of others start here.
_lasting = ThreadPoolExecutor(1)


def as_user(name: str | None) -> list[str]:
    """What stands before a command, which then runs as this user and is in no groups but its own.

    Popen(user=...) forks, as preexec_fn does: where gRPC has threads, the child may die or hang.
    setpriv is of util-linux, which every Debian has.
    """
    return [] if name is None else ["setpriv", f"--reuid={name}", "--clear-groups"]


def tether(end: signal.Signals = signal.SIGKILL, user: str | None = None) -> list[str]:
    """What stands before our process's number and a command, which then gets `end` when we end.

    Had we ended before the kernel was told, PPID would be another: then nothing starts. The kernel
    forgets `end` when the user changes, so that comes first.
    """
    check = '[ "$PPID" = "$1" ] && shift && exec "$@"'
    return [*as_user(user), "setpriv", f"--pdeathsig={end.name}", "sh", "-c", check, "sh"]


def start(
    command: Sequence[str],
    *,
    end: signal.Signals = signal.SIGKILL,
    user: str | None = None,
    **how: Any,
) -> subprocess.Popen[Any]:
    """As Popen(command, **how), of a process that gets `end` when this one ends."""

    def popen() -> subprocess.Popen[Any]:
        return subprocess.Popen([*tether(end, user), str(os.getpid()), *command], **how)

    if threading.current_thread() is threading.main_thread():
        return popen()
    return _lasting.submit(popen).result()


@contextmanager
def ending_in_order() -> Iterator[None]:
    """SIGTERM and SIGHUP end this process as an exception does, with 128 + their number.

    Who sends one often sends more of them at once (timeout, a terminal that closes): those change
    nothing. What was ignored (nohup), or is handled, stays so.
    """
    ending = False

    def end(number: int, _: object) -> None:
        nonlocal ending
        if ending:
            return
        ending = True
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            sys.exit(128 + number)
        # Not in a task, which would hold the exception: tasks are cancelled by it.
        loop.call_soon_threadsafe(sys.exit, 128 + number)

    numbers: list[int] = []
    if threading.current_thread() is threading.main_thread():  # no other may ask
        numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if _is_default(n)]
    for number in numbers:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def _is_default(number: int) -> bool:
    return signal.getsignal(number) is signal.SIG_DFL

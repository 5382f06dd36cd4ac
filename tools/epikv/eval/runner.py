"""Runs what a plan has left: many completions at once, on one daemon or on several, each written down when
it is there."""

import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from epikv.client import Client
from epikv.errors import RpcError
from epikv.eval.plan import FULL, Settings, Task, keys
from epikv.eval.progress import progress
from epikv.eval.requests import ask
from epikv.eval.results import Key, Record, Store, store

# What the daemon itself says of a request under this policy; all else ends the run.
REFUSALS = ("INVALID_ARGUMENT", "FAILED_PRECONDITION", "OUT_OF_RANGE")
FAILURE = "INTERNAL"
_POLL_SECONDS = 0.2


class Interrupted(Exception):
    """Ctrl-C, SIGTERM or SIGHUP; what had finished is written down."""


@dataclass
class Server:
    """A daemon that completions are asked of."""

    client: Client
    address: str
    running: int = 0  # of its completions
    lost: bool = False


def run(
    servers: Sequence[Server],
    plan: dict[str, Any],
    tasks: Sequence[Task],
    settings: Settings,
    folder: Path,
    at_once: int,
) -> None:
    """Runs the plan in `folder`, or what is missing of it there, `at_once` on each server.

    What a server had when it went away is run by the others. Raises Interrupted; RpcError when the last
    one goes away; click.ClickException as `store` does.
    """
    ids = {task.name: [item.id for item in task.items] for task in tasks}
    work = list(keys(plan, ids))
    with store(folder, plan) as found, progress(len(work), len(found.records)) as tell:
        evaluation = Evaluation(servers, plan, tasks, settings, found, at_once, tell)
        # A share of a trace is known when `full` has made it.
        for of_full in (True, False):
            evaluation.run([k for k in work if (k.arm == FULL) == of_full])


class Evaluation:
    """Runs completions of a plan. The main thread alone writes; the others ask."""

    def __init__(
        self,
        servers: Sequence[Server],
        plan: dict[str, Any],
        tasks: Sequence[Task],
        settings: Settings,
        found: Store,
        at_once: int,
        tell: Callable[[int], None],
    ) -> None:
        self._servers = servers
        self._model: str = plan["model"]["name"]
        self._items = {(task.name, item.id): item for task in tasks for item in task.items}
        self._arms = {arm["label"]: arm for arm in plan["arms"]}
        self._settings = settings
        self._found = found
        self._at_once = at_once
        self._tell = tell
        self._stopped = threading.Event()

    def run(self, work: Sequence[Key]) -> None:
        """Raises what ended it, when all that had finished by then is written down."""
        left = deque(key for key in work if key not in self._found.records)
        running: dict[Future[Record], tuple[Server, Key]] = {}
        error: BaseException | None = None
        with (
            _signals(self._stopped),
            ThreadPoolExecutor(self._at_once * len(self._servers)) as pool,
        ):
            while True:
                while error is None and left and (server := self._free()):
                    key = left.popleft()
                    server.running += 1
                    running[pool.submit(self._ask, server, key)] = server, key
                if not running:
                    break
                done, _ = wait(running, _POLL_SECONDS, FIRST_COMPLETED)
                for future in done:
                    server, key = running.pop(future)
                    server.running -= 1
                    if (failure := self._keep(future)) is None:
                        continue
                    if self._is_lost(server, failure):
                        left.appendleft(key)
                    else:
                        error = failure
                if error is not None or self._stopped.is_set():
                    self._stopped.set()
                    for server in self._servers:
                        server.client.close()  # cancels what is running
                self._tell(len(self._found.records))
        if error is not None:
            raise error
        if self._stopped.is_set():
            raise Interrupted

    def _free(self) -> Server | None:
        """The one with least to do, if it may have more."""
        if self._stopped.is_set():
            return None
        there = [each for each in self._servers if not each.lost]
        least = min(there, key=lambda each: each.running)
        return least if least.running < self._at_once else None

    def _is_lost(self, server: Server, failure: BaseException) -> bool:
        """Whether others run what it had."""
        if server.lost:
            return True
        others = [each for each in self._servers if each is not server and not each.lost]
        gone = isinstance(failure, RpcError) and failure.code is grpc.StatusCode.UNAVAILABLE
        if not gone or not others:
            return False
        print(f"{server.address} went away, the others go on: {failure}", file=sys.stderr)
        server.lost = True
        server.client.close()  # what else it had comes back
        return True

    def _keep(self, future: Future[Record]) -> BaseException | None:
        """Writes down what a completion came to. Gives what it failed with, if not by stopping."""
        error = future.exception()
        if error is None:
            self._found.append(future.result())
            return None
        return None if self._stopped.is_set() else error

    def _ask(self, server: Server, key: Key) -> Record:
        reference = self._found.records.get(Key(key.task, key.item, FULL, "", key.seed))
        if key.arm != FULL and key.budget.endswith("%") and (reference is None or reference.fault):
            return Record(**key._asdict(), fault="no reference trace: `full` was refused")
        while True:
            try:
                return ask(
                    server.client,
                    self._model,
                    key,
                    self._items[key.task, key.item],
                    self._arms[key.arm],
                    self._settings,
                    reference,
                )
            except RpcError as error:
                # With a reason it is the server that speaks, not the way to it.
                if error.reason and error.code.name in (*REFUSALS, FAILURE):
                    return Record(**key._asdict(), fault=str(error))
                full = error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
                if not full or error.retry_delay is None or self._stopped.wait(error.retry_delay):
                    raise


@contextmanager
def _signals(stopped: threading.Event) -> Iterator[None]:
    """The first Ctrl-C, SIGTERM or SIGHUP cancels what is running and keeps what is done; a second
    kills."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    if before[signal.SIGHUP] is signal.SIG_IGN:  # by nohup
        del before[signal.SIGHUP]

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def stop(*_: object) -> None:
        stopped.set()
        restore()

    for number in before:
        signal.signal(number, stop)
    try:
        yield
    finally:
        restore()

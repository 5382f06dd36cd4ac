"""Runs what a plan has left: many completions at once, each written down when it is there."""

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from itertools import islice
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


def run(
    client: Client,
    plan: dict[str, Any],
    tasks: Sequence[Task],
    settings: Settings,
    folder: Path,
    at_once: int,
) -> None:
    """Runs the plan in `folder`, or what is missing of it there.

    Raises Interrupted; RpcError when the daemon goes away; click.ClickException as `store` does.
    """
    ids = {task.name: [item.id for item in task.items] for task in tasks}
    work = list(keys(plan, ids))
    with store(folder, plan) as found, progress(len(work), len(found.records)) as tell:
        evaluation = _Evaluation(client, plan, tasks, settings, found, at_once, tell)
        # A share of a trace is known when `full` has made it.
        for of_full in (True, False):
            evaluation.run([k for k in work if (k.arm == FULL) == of_full])


class _Evaluation:
    """The main thread alone writes; the others ask."""

    def __init__(
        self,
        client: Client,
        plan: dict[str, Any],
        tasks: Sequence[Task],
        settings: Settings,
        found: Store,
        at_once: int,
        tell: Callable[[int], None],
    ) -> None:
        self._client = client
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
        left = iter([key for key in work if key not in self._found.records])
        with _signals(self._stopped), ThreadPoolExecutor(self._at_once) as pool:
            running = {pool.submit(self._ask, key) for key in islice(left, self._at_once)}
            error: BaseException | None = None
            while running:
                done, running = wait(running, _POLL_SECONDS, FIRST_COMPLETED)
                for future in done:
                    error = self._keep(future) or error
                if error is not None or self._stopped.is_set():
                    self._stopped.set()
                    self._client.close()  # cancels what is running
                else:
                    running |= {pool.submit(self._ask, key) for key in islice(left, len(done))}
                self._tell(len(self._found.records))
        if error is not None:
            raise error
        if self._stopped.is_set():
            raise Interrupted

    def _keep(self, future: Future[Record]) -> BaseException | None:
        """Writes down what a completion came to. Gives what it failed with, if not by stopping."""
        error = future.exception()
        if error is None:
            self._found.append(future.result())
            return None
        return None if self._stopped.is_set() else error

    def _ask(self, key: Key) -> Record:
        reference = self._found.records.get(Key(key.task, key.item, FULL, "", key.seed))
        if key.arm != FULL and key.budget.endswith("%") and (reference is None or reference.fault):
            return Record(**key._asdict(), fault="no reference trace: `full` was refused")
        while True:
            try:
                return ask(
                    self._client,
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

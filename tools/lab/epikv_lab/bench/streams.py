"""Streams that run at once, each read by a thread of its own."""

import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence

import click
import grpc
from epikv.client import Client
from epikv.errors import RpcError
from epikv.messages import Accepted, Delta, KvUsage, Summary
from epikv.options import Kv, Output, Sampling, Stop

_POLL_SECONDS = 0.01


class Running:
    """A completion of given length, from its start until it ends or is cancelled."""

    def __init__(
        self,
        client: Client,
        prompt: Sequence[int],
        kv: Kv,
        max_output_tokens: int,
        seed: int = 0,
    ) -> None:
        self.accepted: Accepted | None = None
        self.summary: Summary | None = None
        self.token_ids: list[int] = []
        self.arrivals: list[float] = []  # of each output token
        self.error: RpcError | None = None
        self._stream = client.generate(
            prompt,
            kv=kv,
            sampling=Sampling(temperature=0, seed=seed),
            stop=Stop(max_output_tokens=max_output_tokens),
            output=Output(text=False, token_ids=True),
        )
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    @property
    def tokens(self) -> int:
        return len(self.arrivals)

    @property
    def reserved_bytes(self) -> int:
        """Precondition: it is accepted."""
        assert self.accepted is not None and self.accepted.kv is not None
        return self.accepted.kv.reserved_bytes

    @property
    def usage(self) -> KvUsage:
        """Precondition: it has ended, and was not cancelled."""
        assert self.summary is not None and self.summary.kv is not None
        return self.summary.kv

    def cancel(self) -> None:
        self._stream.cancel()

    def join(self) -> None:
        """Waits for its end; raises what it failed with, unless it was cancelled."""
        self._thread.join()
        self.check()

    def check(self) -> None:
        if self.error is not None and self.error.code is not grpc.StatusCode.CANCELLED:
            raise click.ClickException(str(self.error))

    def _read(self) -> None:
        try:
            for event in self._stream:
                now = time.monotonic()
                match event:
                    case Accepted():
                        self.accepted = event
                    case Delta():
                        self.token_ids += event.token_ids
                        self.arrivals += [now] * len(event.token_ids)
                    case Summary():
                        self.summary = event
        except RpcError as error:
            self.error = error


def random_prompt(tokens: int, vocabulary: int, seed: int) -> list[int]:
    """Token ids, the same for the same seed."""
    rng = random.Random(seed)
    return [rng.randrange(vocabulary) for _ in range(tokens)]


def wait_until(
    done: Callable[[], bool], running: Iterable[Running], what: str, seconds: float = 1800
) -> None:
    """Polls; a stream that fails meanwhile ends the bench."""
    streams = list(running)
    deadline = time.monotonic() + seconds
    while not done():
        for stream in streams:
            stream.check()
        if time.monotonic() > deadline:
            raise click.ClickException(f"after {seconds:.0f} s still waiting for {what}")
        time.sleep(_POLL_SECONDS)


def cancel_all(running: Iterable[Running]) -> None:
    """Cancels and waits until every reader has seen it."""
    streams = list(running)
    for stream in streams:
        stream.cancel()
    for stream in streams:
        stream.join()

"""What a request turned out to be worth, and telling a server of it until it is kept."""

import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from types import UnionType
from typing import TypeVar

import grpc
from google.protobuf.timestamp_pb2 import Timestamp

from epikv.errors import RpcError
from epikv.messages import OutcomeResult
from epikv.v1.experiment_pb2 import RecordOutcomeRequest

MAX_BATCH = 1000  # outcomes of one call

_BUSY = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED}
_UNKNOWN = {grpc.StatusCode.NOT_FOUND}
_FIRST_DELAY, _LONGEST_DELAY = 0.1, 2.0  # seconds

Reply = TypeVar("Reply")


@dataclass(frozen=True)
class Outcome:
    """One fact about a request, for a metric that its experiment declares.

    What was recorded before under the same `key` may be recorded again and changes nothing.
    """

    request_id: str  # as Accepted gave it
    metric: str
    value: float  # of a proportion, 0 or 1
    time: datetime | None = None  # when it happened, with its time zone; None: when it arrives
    key: str = ""  # of several outcomes of one metric, which; at most 64 bytes
    tenant: str = ""  # whose request; empty: the caller's own

    @classmethod
    def from_json(cls, text: str | bytes) -> "Outcome":
        """An object of these fields, the time as `parse_time` reads it, true and false for 1 and 0.

        Raises ValueError, also for what no request can carry.
        """
        given = json.loads(text, parse_int=float)
        if not isinstance(given, dict):
            raise ValueError("an outcome is a JSON object")
        kinds: dict[str, type | UnionType] = dict.fromkeys(
            ("request_id", "metric", "time", "key", "tenant"), str
        )
        kinds["value"] = float | bool
        for name, value in given.items():
            if name not in kinds:
                raise ValueError(f"unknown field '{name}'; known: {', '.join(sorted(kinds))}")
            if not isinstance(value, kinds[name]):
                kind = "a number" if name == "value" else "a string"
                raise ValueError(f"{name} must be {kind}")
        for name in ("request_id", "metric", "value"):
            if name not in given:
                raise ValueError(f"{name} is missing")
        if "time" in given:
            given["time"] = parse_time(given["time"])
        outcome = cls(**{**given, "value": float(given["value"])})
        outcome.to_proto()
        return outcome

    def to_proto(self) -> RecordOutcomeRequest:
        """Raises ValueError for a time without a zone."""
        at = None
        if self.time is not None:
            at = Timestamp()
            at.FromDatetime(_zoned(self.time))
        return RecordOutcomeRequest(
            request_id=self.request_id,
            metric=self.metric,
            value=self.value,
            time=at,
            idempotency_key=self.key,
            tenant=self.tenant,
        )


def parse_time(text: str) -> datetime:
    """As ISO 8601 has it, with a zone. Raises ValueError."""
    return _zoned(datetime.fromisoformat(text))


def _zoned(at: datetime) -> datetime:
    if at.tzinfo is None:
        raise ValueError(f"the time {at.isoformat()} has no zone: end it with Z or +02:00")
    return at


@dataclass(frozen=True)
class Patience:
    """For how many seconds what was refused is tried again."""

    busy: float = 30  # the server cannot be reached, or has no room
    # It knows no such request that took part: the record of one that just began may take a moment.
    unknown: float = 3


class _Tries:
    def __init__(self, patience: Patience) -> None:
        self._busy, self._unknown = patience.busy, patience.unknown
        self._delay = _FIRST_DELAY

    def delay(self, codes: set[grpc.StatusCode], hint: float | None = None) -> float | None:
        """Seconds to wait before another try, after refusals of these codes; None: there have been
        enough. hint: the server's own, in seconds."""
        if not codes or not codes <= _BUSY | _UNKNOWN:
            return None
        left = self._unknown if codes <= _UNKNOWN else self._busy
        delay = min(self._delay, left) if hint is None else max(hint, _FIRST_DELAY)
        if left < 1e-3 or delay > left:
            return None
        if codes <= _UNKNOWN:
            self._unknown -= delay
        else:
            self._busy -= delay
        self._delay = min(2 * self._delay, _LONGEST_DELAY)
        return delay


async def record(
    call: Callable[[], Awaitable[Reply]],
    patience: Patience,
    sleep: Callable[[float], Awaitable[None]],
) -> Reply:
    """What `call`, which records an outcome, returns once it is kept. Raises RpcError.

    `sleep` waits for so many seconds.
    """
    tries = _Tries(patience)
    while True:
        try:
            return await call()
        except RpcError as error:
            delay = tries.delay({error.code}, error.retry_delay)
            if delay is None:
                raise
        await sleep(delay)


async def record_batch(
    call: Callable[[list[RecordOutcomeRequest]], Awaitable[list[OutcomeResult]]],
    outcomes: Sequence[RecordOutcomeRequest],
    patience: Patience,
    sleep: Callable[[float], Awaitable[None]],
) -> list[OutcomeResult]:
    """What became of each, those that were refused for a while tried again.

    Raises RpcError where a whole call is refused; recording all of them again does no harm.
    `sleep` waits for so many seconds. Precondition: MAX_BATCH at most.
    """
    results: dict[int, OutcomeResult] = {}
    pending = list(range(len(outcomes)))
    tries = _Tries(patience)
    while pending:
        try:
            replies = await call([outcomes[i] for i in pending])
        except RpcError as error:
            delay = tries.delay({error.code}, error.retry_delay) if error.code in _BUSY else None
            if delay is None:
                raise
        else:
            results.update(zip(pending, replies, strict=True))
            pending = [i for i in pending if _may_pass(results[i])]
            hints = [hint for i in pending if (hint := results[i].retry_delay) is not None]
            codes = {refused.code for i in pending if (refused := results[i].error) is not None}
            delay = tries.delay(codes, max(hints, default=None))
            if delay is None:
                break
        await sleep(delay)
    return [results[i] for i in range(len(outcomes))]


def _may_pass(result: OutcomeResult) -> bool:
    return result.error is not None and result.error.code in _BUSY | _UNKNOWN

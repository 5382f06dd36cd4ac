"""Which units take part in an experiment, and with which arm: as server/experiments/definition/assignment.h.

Hashes of the unit alone, so that a program finds without a server what every replica finds.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Protocol

from google.protobuf.duration_pb2 import Duration

from epikv.v1.experiment_pb2 import Switchback

NUM_BUCKETS = 10_000  # of a layer, which experiments share, and of an experiment, which arms share
_BUCKETS_PER_PERMILLE = NUM_BUCKETS // 1000
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Arm(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def weight_permille(self) -> int: ...


class Experiment(Protocol):
    """What of epikv.v1.Experiment says who gets what; any object with these fields will do."""

    @property
    def name(self) -> str: ...
    @property
    def layer(self) -> str: ...
    @property
    def salt(self) -> str: ...
    @property
    def bucket_version(self) -> int: ...
    @property
    def first_bucket(self) -> int: ...
    @property
    def traffic_permille(self) -> int: ...
    @property
    def arms(self) -> Iterable[Arm]: ...


def unit_hash(salt: str, version: int, unit: str) -> int:
    """The first eight bytes, big endian, of SHA-256 over salt, version in decimal and unit, with a
    zero byte after each of the first two."""
    text = b"\0".join((salt.encode(), str(version).encode(), unit.encode()))
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big")


def bucket_of(hashed: int) -> int:
    """In [0, NUM_BUCKETS): the hash as a fraction of 2^64, times NUM_BUCKETS, rounded down."""
    return hashed * NUM_BUCKETS >> 64


def layer_bucket(layer: str, unit: str) -> int:
    """Of a layer's units. One that is in the slice of an experiment is in no other's."""
    return bucket_of(unit_hash(f"layer/{layer}", 0, unit))


def arm_of(experiment: Experiment, unit: str) -> str | None:
    """The arm of a unit that takes part, by name; None: it does not.

    Who takes part follows from `first_bucket`, which an experiment has once it was started.
    Eligibility and opting out are of requests, not of units, and not looked at.
    """
    place = layer_bucket(experiment.layer or "default", unit) - experiment.first_bucket
    if not 0 <= place < experiment.traffic_permille * _BUCKETS_PER_PERMILLE:
        return None
    salt = experiment.salt or experiment.name
    bucket = bucket_of(unit_hash(salt, experiment.bucket_version, unit))
    end = 0
    for arm in experiment.arms:
        end += arm.weight_permille * _BUCKETS_PER_PERMILLE
        if bucket < end:
            return arm.name
    return None


@dataclass(frozen=True)
class Window:
    """Of a switchback experiment, which deals windows of time: as server/experiments/definition/windows.h."""

    number: int  # since 1970
    begin: datetime
    analysed_from: datetime  # its wash-out is over
    end: datetime

    @property
    def unit(self) -> str:
        """What is dealt: to `arm_of`."""
        return f"window/{self.number}"


def window_at(switchback: Switchback, time: datetime) -> Window:
    """The one that a request which began at `time`, an aware one, belongs to."""
    length = _timedelta(switchback.window)
    number = (time - _EPOCH) // length
    begin = _EPOCH + number * length
    return Window(number, begin, begin + wash_out_of(switchback), begin + length)


def wash_out_of(switchback: Switchback) -> timedelta:
    """A definition that no server has completed may leave it out."""
    if switchback.HasField("wash_out"):
        return _timedelta(switchback.wash_out)
    return timedelta(milliseconds=_timedelta(switchback.window) // timedelta(milliseconds=10))


def _timedelta(duration: Duration) -> timedelta:
    return timedelta(seconds=duration.seconds, microseconds=duration.nanos // 1000)

"""Units and windows of some experiments and their arms, as data: what C++ and Python must agree on.

    python tests/golden/make_experiment_assignment.py

Writes experiment_assignment.json beside this script, by `epikv.experiment.assignment`. Experiments
are epikv.v1.Experiment in JSON, some with their layer and salt left to the defaults; the arms of
each stand in the order of the units, "none" where one does not take part. Of switchback experiments
there are times, in microseconds since 1970, each with its window, whether it is in the wash-out, and
the arm.
"""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from epikv.experiment.assignment import arm_of, window_at
from epikv.v1.experiment_pb2 import Experiment
from google.protobuf.json_format import ParseDict

TO = Path(__file__).with_name("experiment_assignment.json")


def units() -> list[str]:
    """Of the kinds that callers have; the longest has the 128 bytes that a unit may."""
    odd = [
        "",
        " ",
        "0",
        "user-1 ",
        "USER-1",
        "a/b/c",
        "line\nbreak",
        "Zoë",
        "ユーザー7",
        "😀",
        "u" * 128,
    ]
    users = [f"user-{i}" for i in range(120)]
    sessions = [f"session:{i * 2654435761 % 2**32:08x}" for i in range(50)]
    return [*odd, *users, *sessions, *(f"ann+{i}@example.com" for i in range(19))]


def experiment(name: str, weights: list[int], **more: Any) -> dict[str, Any]:
    """`weights`: of its arms, in permille; the first is the control."""
    arms = [
        {"name": f"arm-{i}", "weight_permille": weight, "control": i == 0}
        for i, weight in enumerate(weights)
    ]
    return {"name": name, "traffic_permille": 1000, "bucket_version": 1, "arms": arms, **more}


EXPERIMENTS = [
    experiment("halves", [500, 500]),
    experiment("again", [500, 500], bucket_version=2),
    experiment("salted", [500, 500], salt="halves"),
    experiment("lower", [900, 100], traffic_permille=300),
    experiment("upper", [1, 999], traffic_permille=700, first_bucket=3000, bucket_version=12),
    experiment("three", [333, 333, 334], layer="positions", traffic_permille=500),
    experiment("eight", [125] * 8, layer="positions", traffic_permille=499, first_bucket=5010),
    experiment("last", [500, 500], traffic_permille=1, first_bucket=9990, salt="last-2"),
]


SWITCHBACKS = [
    experiment("minutes", [500, 500], switchback={"window": "60s", "wash_out": "6s"}),
    experiment("days", [500, 500], switchback={"window": "86400s", "wash_out": "1800s"}),
    experiment(
        "odd",
        [200, 300, 500],
        switchback={"window": "7.001s", "wash_out": "0.700s"},
        salt="odd-2",
        bucket_version=3,
    ),
    experiment("dry", [900, 100], switchback={"window": "1s", "wash_out": "0s"}),
]


def times() -> list[int]:
    """Microseconds since 1970, about the ends of windows and of wash-outs, one before 1970."""
    noon = 1_800_014_400_000_000
    steps = [n * 60_000_000 + e for n in range(24) for e in (0, 5_999_999, 6_000_000, 59_999_999)]
    return [-1, 0, *(noon + step for step in steps), *(noon + 7_001_000 * n for n in range(20))]


def switchback(definition: dict[str, Any]) -> dict[str, Any]:
    dealt = ParseDict(definition, Experiment())
    rows = []
    for micros in times():
        time = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=micros)
        window = window_at(dealt.switchback, time)
        assert window.begin <= time < window.end
        rows.append(
            [micros, window.number, time < window.analysed_from, arm_of(dealt, window.unit)]
        )
    return {"experiment": definition, "times": rows}


def golden() -> dict[str, Any]:
    defaults = {"layer": "", "salt": "", "first_bucket": 0}
    named = units()
    assert len(named) == len(set(named)) == 200
    experiments = []
    for definition in EXPERIMENTS:
        arms = [SimpleNamespace(**arm) for arm in definition["arms"]]
        dealt = SimpleNamespace(**{**defaults, **definition, "arms": arms})
        found = [arm_of(dealt, unit) or "none" for unit in named]
        experiments.append({"experiment": definition, "arms": found})
    command = f"python tests/golden/{Path(__file__).name}"
    return {
        "command": command,
        "units": named,
        "experiments": experiments,
        "switchbacks": [switchback(definition) for definition in SWITCHBACKS],
    }


def main() -> None:
    result = golden()
    rows = {
        name: ",\n".join(json.dumps(row) for row in result.pop(name))
        for name in ("experiments", "switchbacks")
    }
    lists = "".join(f', "{name}": [\n{text}\n]' for name, text in rows.items())
    TO.write_text(f"{json.dumps(result)[:-1]}{lists}}}\n")


if __name__ == "__main__":
    main()

"""What a replica is, as far as plans need it: its settings, its policies, and what a step of it costs.

A step takes

    base(sequences that decode) + prompts beside them + prompt tokens + pairs of prompt tokens that attend to each other
    + cached tokens that the decoding sequences attend to + requests that begin + what policies take

each times a cost of its own. `epikv.plan.measuring` finds them; a file keeps them.
"""

import json
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

# Times of a simulation are whole ticks, so that many steps at once end when they would one by one.
TICKS = 10**12  # a second

FORMAT = 2  # of the file


@dataclass(frozen=True)
class Settings:
    """Of the daemon: those of its settings that plans depend on, and facts about its model."""

    kv_capacity_tokens: int
    context_length: int
    vocabulary: int
    max_step_tokens: int = 512
    prefill_chunk_tokens: int = 256
    max_running_requests: int = 256
    max_queued_requests: int = 1024
    prefix_cache_share: float = 0.5
    kv_bytes_per_token: int = 1  # K and V of all layers

    @property
    def kv_capacity_bytes(self) -> int:
        return self.kv_capacity_tokens * self.kv_bytes_per_token


@dataclass(frozen=True)
class Policy:
    """How a policy evicts, and what it adds to steps."""

    prompt_eviction: str = ""  # "by_chunk", "at_end", "refuses"
    slack_tokens: int = 0
    decode_seconds: float = 0  # of a token that a sequence under it decodes
    prefill_seconds: float = 0  # of a token of its prompt
    # What a request reserves beside K and V.
    state_bytes_per_token: int = 0
    state_bytes_per_sequence: int = 0


@dataclass(frozen=True)
class Costs:
    """Of one replica. All are seconds."""

    settings: Settings
    base: tuple[tuple[int, float], ...]  # of a step, by sequences that decode; linear in between
    prefill: float  # of a prompt token
    mixed: float = 0  # of a step that reads prompts while others decode, beside its base
    pair: float = 0  # of a prompt token and one that it attends to
    attended: float = 0  # of a cached token that a decoding sequence attends to
    request: float = 0  # of a step, for each request that it begins
    # Of a request outside of steps: until its first token, and until its end.
    before_first: float = 0
    before_end: float = 0
    policies: Mapping[str, Policy] = field(default_factory=dict)  # those measured
    # How much longer than on average steps take, one moment after the other; () if they never do.
    paces: tuple[float, ...] = ()
    pace_seconds: float = 1  # of each
    error: float = 0  # median, over the measured loads, of the relative error of what is fitted
    # For readers: of each load, seconds in steps as measured and as these costs have them.
    measured: Mapping[str, Any] = field(default_factory=dict)

    def base_seconds(self, sequences: int) -> float:
        """Of a step in which so many decode. Beyond what was measured it goes on as it ended."""
        if len(self.base) == 1:
            return self.base[0][1]
        above = min(
            max(bisect_right(self.base, sequences, key=lambda knot: knot[0]), 1), len(self.base) - 1
        )
        (left, low), (right, high) = self.base[above - 1 : above + 1]
        return max(low + (high - low) * (sequences - left) / (right - left), 0.0)

    def pace_range(self) -> tuple[float, float]:
        """Of nine moments in ten. Requires that there are paces."""
        ordered = sorted(self.paces)
        cut = len(ordered) // 20
        return ordered[cut], ordered[-1 - cut]

    def at_pace(self, pace: float) -> "Costs":
        """Of steps that take so many times as long."""
        return replace(
            self,
            base=tuple((sequences, pace * seconds) for sequences, seconds in self.base),
            prefill=pace * self.prefill,
            mixed=pace * self.mixed,
            pair=pace * self.pair,
            attended=pace * self.attended,
            request=pace * self.request,
            policies={
                name: replace(
                    policy,
                    decode_seconds=pace * policy.decode_seconds,
                    prefill_seconds=pace * policy.prefill_seconds,
                )
                for name, policy in self.policies.items()
            },
        )

    def save(self, path: Path) -> None:
        path.write_text(json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> "Costs":
        """Raises ValueError for what is not a file of `save`."""
        try:
            content = json.loads(path.read_text())
            if content.pop("format") != FORMAT:
                raise ValueError("it is of another version of epikv")
            content["settings"] = Settings(**content["settings"])
            content["base"] = tuple((int(n), float(seconds)) for n, seconds in content["base"])
            content["paces"] = tuple(content["paces"])
            content["policies"] = {
                name: Policy(**policy) for name, policy in content["policies"].items()
            }
            return cls(**content)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(
                f"{path} holds no costs that `epikv plan capacity` measured ({error});"
                " remove it to measure them again"
            ) from None


def ticks(seconds: float) -> int:
    return round(seconds * TICKS)

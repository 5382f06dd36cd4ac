"""What a fleet is asked: arrivals, lengths, shared beginnings, policies with budgets, and a deadline."""

import json
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from heapq import heappop, heappush
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any

from epikv.bench.workload import Lengths, parse_arm, parse_lengths
from epikv.plan.costs import TICKS, Settings
from epikv.plan.replica import FULL, Arm, Call
from epikv.traces.log_file import LONGEST


@dataclass(frozen=True)
class Prefixes:
    """Beginnings that requests share: system prompts, examples. The first of them is asked the most: the
    n-th by a share of 1 / n^skew."""

    count: int
    tokens: int
    skew: float = 1.0


@dataclass(frozen=True)
class Conversations:
    """Each turn begins with all that was said before."""

    turns: int
    seconds: float  # on average, from a turn to the next


@dataclass(frozen=True)
class Recorded:
    """Requests of an access log, as (prompt, output, arm), which are drawn from."""

    requests: Sequence[tuple[int, int, int]]
    seconds: float  # from the first to the last


@dataclass(frozen=True)
class Workload:
    """Of a whole fleet. Lengths in tokens; a prompt's are beside what it shares and what was said before."""

    rate: float  # requests a second
    prompt: Lengths
    output: Lengths
    arms: Sequence[Arm] = (FULL,)
    weights: Sequence[float] = (1.0,)
    max_output: int | None = None  # that requests ask for; None: what they then use
    deadline: float | None = None  # seconds until the last token
    first_token: float | None = None  # seconds until the first
    prefixes: Prefixes | None = None
    conversations: Conversations | None = None
    recorded: Recorded | None = None
    seed: int = 0

    @property
    def shares(self) -> bool:
        """Whether requests begin alike."""
        return self.prefixes is not None or self.conversations is not None

    def with_half_budgets(self, policy: str) -> "Workload":
        """Budgets are halved; who keeps all gets a budget of half under `policy`."""
        arms = [
            Arm(policy, 0.5)
            if arm.budget is None
            else replace(
                arm,
                budget=arm.budget / 2 if isinstance(arm.budget, float) else max(arm.budget // 2, 1),
            )
            for arm in self.arms
        ]
        return replace(self, arms=arms)

    def calls(self, settings: Settings) -> Iterator[Call]:
        """Without an end, in order of arrival. Prompts that the context cannot hold end a conversation."""
        draw = Random(f"plan/{self.seed}")
        talks = self.conversations
        groups = list(range(self.prefixes.count)) if self.prefixes else []
        skew = self.prefixes.skew if self.prefixes else 0.0
        shares = list(accumulate(1 / (n + 1) ** skew for n in groups))
        shared = self.prefixes.tokens if self.prefixes else 0
        number = 0
        at = -talks.turns * talks.seconds if talks else 0.0  # those under way as it begins
        rate = self.rate / talks.turns if talks else self.rate
        turns: list[tuple[float, int, int, int, int]] = []  # at, talk, group, turns left, said
        while True:
            at += draw.expovariate(rate)
            while turns and turns[0][0] < at:
                yield from self._turn(draw, turns, heappop(turns), shared, settings)
            group = draw.choices(groups, cum_weights=shares)[0] if groups else -1
            if talks:
                beginning = (at, number, group, talks.turns, 0)
                yield from self._turn(draw, turns, beginning, shared, settings)
            else:
                prompt, output, arm = self._lengths(draw)
                yield self._call(at, shared + prompt, output, arm, group, shared, -1)
            number += 1

    def _turn(
        self,
        draw: Random,
        turns: list[tuple[float, int, int, int, int]],
        turn: tuple[float, int, int, int, int],
        shared: int,
        settings: Settings,
    ) -> Iterator[Call]:
        assert self.conversations is not None
        at, talk, group, left, said = turn
        prompt, output, arm = self._lengths(draw)
        whole = shared + said + prompt
        if whole + (self.max_output or output) > settings.context_length and said:
            return
        if left > 1:
            later = at + draw.expovariate(1 / self.conversations.seconds)
            heappush(turns, (later, talk, group, left - 1, said + prompt + output))
        if at >= 0:
            yield self._call(at, whole, output, arm, group, shared, talk)

    def _lengths(self, draw: Random) -> tuple[int, int, int]:
        if self.recorded is not None:
            prompt, output, arm = draw.choice(self.recorded.requests)
            shared = self.prefixes.tokens if self.prefixes else 0
            return max(prompt - shared, 1), output, arm  # what is shared was recorded with it
        arm = draw.choices(range(len(self.arms)), self.weights)[0] if len(self.arms) > 1 else 0
        prompt, output = self.prompt.draw(draw), self.output.draw(draw)
        return prompt, output, arm

    def _call(
        self, at: float, prompt: int, output: int, arm: int, group: int, shared: int, talk: int
    ) -> Call:
        most = self.max_output or output
        return Call(round(at * TICKS), prompt, output, most, arm, group, shared, talk)

    @property
    def longest(self) -> list[Call]:
        """The longest first turn of each arm."""
        shared = self.prefixes.tokens if self.prefixes else 0
        found = []
        for arm in range(len(self.arms)):
            lengths = [(self.prompt.most, self.output.most)]
            if self.recorded is not None:
                lengths = [
                    (max(p - shared, 1), o) for p, o, a in self.recorded.requests if a == arm
                ]
            for prompt, output in lengths:
                found.append(self._call(0, shared + prompt, output, arm, -1, 0, -1))
        return found


_KNOWN = {field.name for field in fields(Workload)} - {"weights", "recorded"}


def read(path: Path) -> dict[str, Any]:
    """What a TOML or JSON file says of a workload. Raises ValueError."""
    try:
        text = path.read_text()
        content = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except ValueError as error:
        raise ValueError(f"{path} is neither TOML nor JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} is no table of a workload's fields")
    if unknown := sorted(content.keys() - _KNOWN):
        known = ", ".join(sorted(_KNOWN))
        raise ValueError(f"{path}: there is no {', '.join(unknown)}; known: {known}")
    return content


def build(given: Mapping[str, Any], recorded: tuple[Recorded, Sequence[Arm]] | None) -> Workload:
    """Of a file's fields, which options may have replaced, and of what a log told. Raises ValueError."""
    given = dict(given)
    arms, weights = _arms(given.pop("arms", ["full"]))
    rate = given.pop("rate", None)
    if recorded is not None:
        if rate is None and recorded[0].seconds > 0:
            rate = (len(recorded[0].requests) - 1) / recorded[0].seconds
        arms, weights = list(recorded[1]), [1.0] * len(recorded[1])
    if rate is None:
        raise ValueError("the workload has no rate: give requests a second")
    for name, value in (("rate", rate), *((n, given.get(n)) for n in ("deadline", "first_token"))):
        if value is not None and not (isinstance(value, int | float) and 0 < value < float("inf")):
            raise ValueError(f"{name} is {value!r}, not a number above 0")
    if not isinstance(given.setdefault("seed", 0), int):
        raise ValueError(f"seed is {given['seed']!r}, not a whole number")
    most = given.get("max_output")
    if most is not None and not (isinstance(most, int) and most > 0):
        raise ValueError(f"max_output is {most!r}, not a number of tokens above 0")
    prompt = _lengths(given.pop("prompt", "uniform:32:96"))
    output = _lengths(given.pop("output", "uniform:32:96"))
    longest = max(o for _, o, _ in recorded[0].requests) if recorded else output.most
    if most is not None and most < longest:
        raise ValueError(f"max_output is {most}, less than the longest output, {longest}")
    prefixes = _table(Prefixes, "prefixes", given.pop("prefixes", None))
    conversations = _table(Conversations, "conversations", given.pop("conversations", None))
    if recorded is not None and conversations is not None:
        raise ValueError("a log does not tell which requests are one conversation: leave out one")
    return Workload(
        rate=float(rate),
        prompt=prompt,
        output=output,
        arms=arms,
        weights=weights,
        prefixes=prefixes,
        conversations=conversations,
        recorded=recorded[0] if recorded else None,
        **given,
    )


def _table(kind: Any, name: str, given: Any) -> Any:
    if given is None:
        return None
    try:
        found = kind(**given)
    except TypeError as error:
        raise ValueError(f"[{name}]: {error}") from None
    for field in fields(kind):
        value = getattr(found, field.name)
        wanted = "a whole number" if field.type is int else "a number"
        is_number = isinstance(value, int if field.type is int else int | float)
        if not is_number or not (0 < value < float("inf") or (field.name == "skew" and value == 0)):
            raise ValueError(f"[{name}] {field.name} is {value!r}, not {wanted} above 0")
    return found


def _lengths(given: Any) -> Lengths:
    return given if isinstance(given, Lengths) else parse_lengths(str(given))


def _arms(given: Sequence[Any]) -> tuple[list[Arm], list[float]]:
    if isinstance(given, str):
        raise ValueError(f"arms is {given!r}, not a list")
    parsed = [parse_arm(arm) if isinstance(arm, str) else arm for arm in given]
    arms = []
    for each in parsed:
        budget = each.kv.budget
        if isinstance(budget, str):
            raise ValueError(f"budget {budget!r} is no number")
        arms.append(FULL if each.kv.policy == FULL.policy else Arm(each.kv.policy, budget))
    return arms, [each.weight for each in parsed]


def read_log(path: Path) -> tuple[Recorded, list[Arm]]:
    """The requests of an access log that ended well. Raises ValueError where there are none."""
    from datetime import datetime

    requests: list[tuple[int, int, int]] = []
    arms: dict[Arm, int] = {}
    times: list[float] = []
    left_out: Counter[str] = Counter()
    with path.open("rb") as file:
        while line := file.readline(LONGEST):
            try:
                entry = json.loads(line)
                if entry["code"] != "OK" or not entry.get("output_tokens"):
                    left_out["no answer"] += 1
                    continue
                at = datetime.fromisoformat(entry["time"]).timestamp()
                policy = entry.get("policy") or "full"
                budget = None if policy == "full" else entry.get("budget_tokens") or None
                arm = arms.setdefault(Arm(policy, budget), len(arms))
                requests.append((int(entry["prompt_tokens"]), int(entry["output_tokens"]), arm))
                times.append(at)
            except (ValueError, KeyError, TypeError, AttributeError):
                left_out["damaged"] += 1
    if not requests:
        told = ", ".join(f"{count} {why}" for why, count in left_out.items()) or "it is empty"
        raise ValueError(f"{path} has no request that ended well: {told}")
    return Recorded(requests, max(times) - min(times)), list(arms)

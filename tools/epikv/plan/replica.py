"""One replica in a simulation: its queue, its admission and its batches, by the rules of the daemon.

The rules are those of runtime/engine/scheduler.cc and runtime/admission, for requests of one tenant and one
priority: first come, first served; a request is admitted if there is a place and room in the KV pool for the
most that it may ever hold; in a step every sequence that decodes has one token, and prompts have what is
left of max_step_tokens, the oldest first, in chunks that do not cross a multiple of prefill_chunk_tokens.

Steps with the same members are taken at once: only what begins, is read or ends costs time to simulate.
"""

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from math import ceil, isqrt

from epikv.plan.costs import Costs, Policy, ticks

# As in scheduler.cc: what prompts have of a step even if decoding fills it.
LEAST_PREFILL_TOKENS = 16


@dataclass(frozen=True)
class Arm:
    """How requests hold their KV cache. budget: tokens, a share of prompt + max output, or None: all."""

    policy: str = "full"
    budget: int | float | None = None

    def budget_of(self, prompt: int, most: int) -> int | None:
        """Tokens; None: nothing is evicted, as where all fits in the budget (the last token is never cached)."""
        budget = self.budget
        if isinstance(budget, float):
            budget = ceil(budget * (prompt + most))
        return None if budget is None or budget >= prompt + most - 1 else budget


FULL = Arm()


@dataclass(slots=True)
class Call:
    """A request. Lengths in tokens."""

    at: int  # ticks
    prompt: int
    output: int
    most: int  # output tokens that it asks for: room for them is reserved
    arm: int = 0
    # What it begins with: tokens that all of a group share, and the conversation that it goes on.
    group: int = -1
    shared: int = 0
    talk: int = -1
    user: int = -1  # of a closed loop


@dataclass(frozen=True)
class Demand:
    """Bytes of the KV pool that a request may hold (runtime/admission/kv_demand.cc)."""

    peak: int
    decode: int  # once its prompt is read


def demand(
    prompt: int, most: int, budget: int | None, policy: Policy, chunk: int, token_bytes: int = 1
) -> Demand:
    """budget: None, if nothing is ever evicted. token_bytes: of a token's K and V."""
    longest = prompt + most - 1

    def held(prefill: int, decode: int) -> Demand:
        each = token_bytes + policy.state_bytes_per_token
        own = policy.state_bytes_per_sequence
        return Demand(max(prefill, decode) * each + own, decode * each + own)

    if budget is None:
        return held(longest, longest)
    decode = min(min(prompt, budget) + longest - prompt, budget + policy.slack_tokens + 1)
    prefill = prompt
    if policy.prompt_eviction == "by_chunk":
        whole = prompt // chunk * chunk
        prefill = min(budget, whole) + prompt - whole
        if whole:
            prefill = max(prefill, min(budget, whole - chunk) + chunk)
        prefill = min(prompt, prefill)
    return held(prefill, decode)


class Model:
    """What all replicas of a fleet have in common: costs in ticks, and the arms of their requests."""

    def __init__(self, costs: Costs, arms: list[Arm]) -> None:
        self.settings = costs.settings
        self.arms = arms
        self._costs = costs
        self.mixed = ticks(costs.mixed)
        self.prefill = ticks(costs.prefill)
        self.pair = ticks(costs.pair)
        self.attended = ticks(costs.attended)
        self.request = ticks(costs.request)
        self.paces = costs.paces
        self.pace_ticks = ticks(costs.pace_seconds)
        self.policies = [costs.policies.get(arm.policy, Policy()) for arm in arms]
        self._full = costs.policies.get(FULL.policy, Policy())
        self.decode_of = [ticks(policy.decode_seconds) for policy in self.policies]
        self.prefill_of = [ticks(policy.prefill_seconds) for policy in self.policies]

    @cached_property
    def base(self) -> list[int]:
        """Of a step, by sequences that decode."""
        most = self.settings.max_running_requests
        return [ticks(self._costs.base_seconds(n)) for n in range(most + 1)]

    def demand(self, call: Call) -> Demand:
        budget = self.arms[call.arm].budget_of(call.prompt, call.most)
        policy = self._full if budget is None else self.policies[call.arm]
        settings = self.settings
        chunk, token = settings.prefill_chunk_tokens, settings.kv_bytes_per_token
        return demand(call.prompt, call.most, budget, policy, chunk, token)

    def idle_ticks(self, call: Call) -> tuple[int, int]:
        """That a request takes which has a replica for itself, until its first token and its last."""
        told: list[tuple[int, int]] = []
        replica = Replica(self, lambda _, first, end: told.append((first, end)))
        replica.submit(
            Call(0, call.prompt, call.output, call.output, call.arm)
        )  # whatever it reserves
        while replica.end is not None:
            replica.advance()
        return told[0]


class PrefixCache:
    """What a replica has cached of prompts, in whole blocks; what was used least recently goes first."""

    def __init__(self, block: int) -> None:
        self._block = block
        self._tokens: OrderedDict[tuple[str, int], int] = OrderedDict()
        self._total = 0

    def limit(self, tokens: int) -> None:
        while self._total > tokens:
            key, held = next(iter(self._tokens.items()))
            gone = min(held, -(-(self._total - tokens) // self._block) * self._block)
            self._set(key, held - gone)

    def match(self, call: Call, most: int) -> int:
        """Tokens of its prompt that need not run; at most so many."""
        found = 0
        for key, length in self._chain(call):
            held = self._tokens.get(key, 0)
            if held:
                self._tokens.move_to_end(key)
            found += min(held, length)
            if held < length // self._block * self._block:
                break
        return min(found, most) // self._block * self._block

    def keep(self, call: Call, tokens: int) -> None:
        """Of what it has cached since its beginning."""
        before = 0
        for key, length in self._chain(call):
            whole = min(tokens, before + length) // self._block * self._block
            own = whole - before // self._block * self._block
            if own > self._tokens.get(key, 0):
                self._set(key, own)
            before += length

    def _chain(self, call: Call) -> list[tuple[tuple[str, int], int]]:
        parts = []
        if call.group >= 0:
            parts.append((("group", call.group), call.shared))
        if call.talk >= 0:
            parts.append((("talk", call.talk), 1 << 40))
        return parts

    def _set(self, key: tuple[str, int], tokens: int) -> None:
        self._total += tokens - self._tokens.pop(key, 0)
        if tokens:
            self._tokens[key] = tokens


class _Sequence:
    __slots__ = ("budget", "cached", "call", "demand", "first", "grows", "kept", "most_shared")

    def __init__(self, call: Call, demand: Demand, budget: int | None, most_shared: int) -> None:
        self.call = call
        self.demand = demand
        self.budget = budget
        # Tokens of its prompt that are cached before anything is evicted; a prompt attends to no more.
        self.most_shared = most_shared
        self.cached = 0  # of its prompt
        self.first = 0  # ticks: when its first token came
        self.kept = (
            0  # tokens that it attends to: as its decoding begins, and once it no longer grows
        )
        self.grows = False  # by one a step


Ended = Callable[[Call, int, int], None]  # when its first token came, and its last; ticks


class Replica:
    """Times in ticks. `end` is when the steps under way end; None: it is idle.

    A step has the pace of the moment in which it begins. offset: of the model's paces, at time 0; None: the
    pace is even.
    """

    def __init__(self, model: Model, ended: Ended, offset: int | None = None) -> None:
        self._model, self._ended = model, ended
        self._offset = offset if model.paces else None
        settings = model.settings
        self._most_tokens = settings.max_step_tokens
        self._chunk = settings.prefill_chunk_tokens
        self._places = settings.max_running_requests
        self._free = settings.kv_capacity_bytes
        self._most_prefix = int(settings.prefix_cache_share * settings.kv_capacity_bytes)
        self._prefixes = PrefixCache(self._chunk)
        self.queue: deque[Call] = deque()
        self._prompts: list[_Sequence] = []  # in order of admission
        # Of the sequences that decode: what changes, and before which decode step.
        self._changes: list[tuple[int, int, _Sequence, bool]] = []
        self._decoding = 0
        self._attended = 0  # tokens, in the next step
        self._growing = 0
        self._policy_ticks = 0
        self._decode_steps = 0
        self._number = 0
        # The steps under way.
        self._begin = 0
        self._count = 0
        self._ticks = 0  # of the first
        self._growth = 0  # ticks by which each is longer than the one before it
        self._plan: list[tuple[_Sequence, int]] = []
        self.end: int | None = None
        # For reports and tests.
        self.busy = 0  # ticks
        self.steps = self.prefill_tokens = self.decode_tokens = self.hit_tokens = 0

    @property
    def running(self) -> int:
        return self._decoding + len(self._prompts)

    def submit(self, call: Call) -> bool:
        """False: its queue is full. Requires that what ends before call.at has been advanced."""
        if len(self.queue) >= self._model.settings.max_queued_requests:
            return False
        self.queue.append(call)
        if self.end is None:
            self._next(call.at)
        elif self._count > 1 and len(self.queue) == 1 and self._fits(call):
            self._cut(call.at)
        return True

    def advance(self) -> None:
        """To `end`: what the steps have told is told, and the next ones begin."""
        assert self.end is not None
        now, count = self.end, self._count
        self.busy += now - self._begin
        self.steps += count
        if self._decoding:
            self.decode_tokens += count * self._decoding
            self._decode_steps += count
            self._attended += count * self._growing
        changes = self._changes
        while changes and changes[0][0] <= self._decode_steps:
            _, _, sequence, is_end = heappop(changes)
            if is_end:
                self._leave(sequence, now)
            else:
                sequence.kept, sequence.grows = self._most_kept(sequence), False
                self._growing -= 1
        for sequence, tokens in self._plan:
            self.prefill_tokens += tokens
            sequence.cached += tokens
            if sequence.cached == sequence.call.prompt:
                self._prompts.remove(sequence)
                self._read(sequence, now)
        self._next(now)

    def _next(self, now: int) -> None:
        """Plans the steps that begin now."""
        model = self._model
        begun = self._admit()
        self._begin, self._plan = now, []
        decoding = self._decoding
        cost = model.base[decoding] + self._policy_ticks + model.attended * self._attended
        if self._prompts:
            if decoding:
                cost += model.mixed
            tokens = pairs = 0
            room = max(self._most_tokens - decoding, LEAST_PREFILL_TOKENS)
            for sequence in self._prompts:
                done = sequence.cached
                part = min(sequence.call.prompt - done, self._chunk - done % self._chunk, room)
                if part == 0:
                    break
                room -= part
                self._plan.append((sequence, part))
                tokens += part
                pairs += part * min(done, sequence.most_shared) + part * (part + 1) // 2
                if sequence.budget is not None:
                    cost += part * model.prefill_of[sequence.call.arm]
            cost += tokens * model.prefill + pairs * model.pair + begun * model.request
            self._count, self._growth = 1, 0
        elif decoding:
            self._count = self._changes[0][0] - self._decode_steps
            self._growth = model.attended * self._growing
        else:
            self.end = None
            return
        if self._offset is None:
            self._ticks = max(cost, 1)
            self.end = now + self._length(self._count)
            return
        moment, passed = divmod(now + self._offset, model.pace_ticks)
        pace = model.paces[moment % len(model.paces)]
        self._ticks = max(round(pace * cost), 1)
        self._growth = round(pace * self._growth)
        self.end = now + self._length(self._count)
        if self._count > 1:
            self._cut(now + model.pace_ticks - passed)

    def _length(self, count: int) -> int:
        return count * self._ticks + self._growth * (count * (count - 1) // 2)

    def _cut(self, at: int) -> None:
        """Ends the steps under way with the one in which that moment lies."""
        passed = at - self._begin
        if self._growth == 0:
            count = -(-passed // self._ticks)
        else:
            twice = 2 * self._ticks - self._growth
            root = isqrt(twice * twice + 8 * self._growth * passed)
            count = max((root - twice) // (2 * self._growth), 0)
            while self._length(count) < passed:
                count += 1
        count = max(count, 1)
        if count < self._count:
            self._count = count
            self.end = self._begin + self._length(count)

    def _fits(self, call: Call) -> bool:
        return self.running < self._places and self._model.demand(call).peak <= self._free

    def _admit(self) -> int:
        """How many requests begin."""
        model, begun = self._model, 0
        while self.queue and self.running < self._places:
            call = self.queue[0]
            demand = model.demand(call)
            if demand.peak > self._free:
                break
            self.queue.popleft()
            begun += 1
            self._free -= demand.peak
            budget = model.arms[call.arm].budget_of(call.prompt, call.most)
            by_chunk = model.policies[call.arm].prompt_eviction == "by_chunk"
            most_shared = min(call.prompt, budget) if by_chunk and budget else call.prompt
            sequence = _Sequence(call, demand, budget, most_shared)
            if call.group >= 0 or call.talk >= 0:
                self._limit_prefixes()
                most = min(call.prompt - 1, sequence.most_shared)
                sequence.cached = self._prefixes.match(call, most)
                self.hit_tokens += sequence.cached
            self._prompts.append(sequence)
        return begun

    def _most_kept(self, sequence: _Sequence) -> int:
        """Cached tokens that a sequence attends to in the long run. Between two rounds it holds from its
        budget to the slack more: their middle."""
        if sequence.budget is None:
            return sequence.call.prompt + sequence.call.output
        return sequence.budget + self._model.policies[sequence.call.arm].slack_tokens // 2

    def _read(self, sequence: _Sequence, now: int) -> None:
        """Its prompt is cached, and its first token is there."""
        call = sequence.call
        sequence.first = now
        self._free += sequence.demand.peak - sequence.demand.decode
        self._keep(sequence, sequence.most_shared)
        self._number += 1
        self._decoding += 1
        limit = self._most_kept(sequence)
        evicted = sequence.budget is not None and call.prompt >= sequence.budget
        sequence.kept = limit if evicted else call.prompt
        self._attended += sequence.kept
        if sequence.budget is not None:
            self._policy_ticks += self._model.decode_of[call.arm]
        if call.output == 1:
            self._leave(sequence, now)
            return
        steps = call.output - 1
        heappush(self._changes, (self._decode_steps + steps, self._number, sequence, True))
        if sequence.kept < limit:
            sequence.grows = True
            self._growing += 1
            if limit - sequence.kept < steps:
                full = self._decode_steps + limit - sequence.kept
                heappush(self._changes, (full, -self._number, sequence, False))

    def _leave(self, sequence: _Sequence, now: int) -> None:
        call = sequence.call
        self._decoding -= 1
        if sequence.budget is not None:
            self._policy_ticks -= self._model.decode_of[call.arm]
        if sequence.grows:
            self._growing -= 1
            sequence.kept += call.output - 1
        self._attended -= sequence.kept
        self._free += sequence.demand.decode
        if sequence.budget is None and call.talk >= 0:
            self._keep(sequence, call.prompt + call.output - 1)
        self._ended(call, sequence.first, now)

    def _keep(self, sequence: _Sequence, tokens: int) -> None:
        call = sequence.call
        if call.group >= 0 or call.talk >= 0:
            self._prefixes.keep(call, tokens)
            self._limit_prefixes()

    def _limit_prefixes(self) -> None:
        room = min(self._most_prefix, self._free)
        self._prefixes.limit(room // self._model.settings.kv_bytes_per_token)

"""The cache as an answer's eviction events tell it, against its budget and its summary."""

import itertools
import math
from dataclasses import dataclass

from calls import Outcome, Wrong, at_most, same
from epikv.messages import EvictionEvent, Model, Policy

Lane = tuple[int | None, int | None]  # layer and head; of lanes that share a decision: None


@dataclass(frozen=True)
class Share:
    """Lanes that share what their budgets sum to."""

    lanes: list[Lane]
    budget: int  # tokens of each


class Replay:
    """Plays one ended request's cache token by token. `chunk`: prompt tokens between rounds."""

    def __init__(self, model: Model, policy: Policy, chunk: int, outcome: Outcome) -> None:
        self._kv = outcome.accepted.kv
        self._summary = outcome.summary
        self._prompt = outcome.accepted.prompt_tokens
        self._cached = self._prompt + outcome.summary.usage.output_tokens - 1
        params = self._kv.policy_params or {}
        self._slack = params.get("slack", 0)
        # Of a budget that holds the whole request nothing is allotted.
        whole = self._kv.budget_tokens >= self._prompt + outcome.accepted.max_output_tokens - 1
        allocator = "uniform" if whole else params.get("allocator", "uniform")
        self._at_end = policy.prompt_eviction == "at_end"
        self._chunk = chunk
        self._rounds = {event.at_token: event for event in outcome.evictions}
        self._events = len(outcome.evictions)
        self._all_lanes = model.layers * model.kv_heads
        self._held: dict[Lane, set[int]] = {
            lane: set() for lane in self._lanes(model, allocator, outcome.evictions)
        }
        self._shares = self._share_out(model, allocator, params.get("window", 0))

    def _lanes(self, model: Model, allocator: str, events: list[EvictionEvent]) -> list[Lane]:
        named = {(v.layer, v.head) for event in events for v in event.victims}
        if allocator != "uniform":  # each decides for itself, whether or not it lost a token
            heads = range(model.kv_heads)
        elif not named or named == {(None, None)}:
            return [(None, None)]
        else:
            heads = [None] if all(head is None for _, head in named) else range(model.kv_heads)
        lanes = [(layer, head) for layer in range(model.layers) for head in heads]
        if not named <= set(lanes):
            raise Wrong(f"lanes {sorted(named - set(lanes))} of {sorted(lanes)}")
        return lanes

    def _share_out(self, model: Model, allocator: str, window: int) -> list[Share]:
        budget, lanes = self._kv.budget_tokens, list(self._held)
        by_layer = [lanes[i : i + model.kv_heads] for i in range(0, len(lanes), model.kv_heads)]
        match allocator:
            case "pyramid":
                budgets = _pyramid(model.layers, budget, min(window, budget))
                return [Share([lane], budgets[lane[0]]) for lane in lanes]
            case "head_pool":
                return [Share(layer, budget) for layer in by_layer]
            case "model_pool":
                return [Share(lanes, budget)]
            case _:
                return [Share([lane], budget) for lane in lanes]

    def check(self) -> None:
        lanes_each = self._all_lanes // len(self._held)
        peak = evicted = 0
        for token in range(self._cached):
            for held in self._held.values():
                held.add(token)
            peak = max(peak, self._entries())
            if event := self._rounds.pop(token, None):
                evicted += self._evict(event) * lanes_each
            if self._settled(token):
                self._check_held(token, self._slack if token >= self._prompt else 0)
        if self._rounds:
            raise Wrong(f"rounds at tokens {sorted(self._rounds)} of {self._cached}")
        usage = self._summary.kv
        same("rounds", usage.rounds, self._events)
        same("evicted entries", usage.evicted_entries, evicted)
        same("evicted tokens", usage.evicted_tokens, evicted // self._all_lanes)
        peak_tokens = math.ceil(peak / self._all_lanes)
        if (
            self._summary.timings.scratch_pass
        ):  # whose rows count in the peak; no event tells of them
            at_most("peak without the scratch pass", peak_tokens, usage.peak_tokens)
        else:
            same("peak", usage.peak_tokens, peak_tokens)
        same("final", usage.final_tokens, math.ceil(self._entries() / self._all_lanes))
        if usage.kept:
            same("kept", usage.kept, sorted(set().union(*self._held.values())))

    def _entries(self) -> int:
        lanes_each = self._all_lanes // len(self._held)
        return lanes_each * sum(len(held) for held in self._held.values())

    def _settled(self, token: int) -> bool:
        """Whether a round follows the token if it is due. None does once the last was sampled."""
        if token >= self._cached - 1:
            return False
        in_chunks = (token + 1) % self._chunk == 0 and not self._at_end
        return token >= self._prompt - 1 or in_chunks

    def _evict(self, event: EvictionEvent) -> int:
        """Tokens that go, of all lanes that decide for themselves."""
        newest, gone = event.at_token, 0
        if not self._settled(newest):
            raise Wrong(f"a round at token {newest}, where none can be")
        for victims in event.victims:
            held = self._held[victims.layer, victims.head]
            for index in victims.index:
                if index not in held:
                    raise Wrong(f"token {index} dropped at {newest}, which was not held")
                if self._protected(index, newest):
                    raise Wrong(f"protected token {index} dropped at {newest}")
                held.remove(index)
                gone += 1
        if gone == 0:
            raise Wrong(f"a round without victims at {newest}")
        self._check_held(newest, slack=0)
        return gone

    def _protected(self, index: int, newest: int) -> bool:
        kv = self._kv
        return (
            index < max(kv.protected_prompt_tokens, kv.sink_tokens)
            or index > newest - kv.recent_tokens
            or any(span.begin <= index < span.end for span in kv.protected_spans)
        )

    def _check_held(self, token: int, slack: int) -> None:
        for share in self._shares:
            entries = sum(len(self._held[lane]) for lane in share.lanes)
            where = f"lane {share.lanes[0]}" if len(share.lanes) == 1 else f"lanes {share.lanes}"
            limit = len(share.lanes) * (share.budget + slack)
            at_most(f"held after token {token} in {where}", entries, limit)


def _pyramid(layers: int, budget: int, window: int) -> list[int]:
    """Of each layer's lanes: in equal steps down to a twentieth of what is beside the window."""
    if layers == 1:
        return [budget]
    least = (budget - window) / 20
    most = 2 * (budget - window) - least
    shares = (window + most - layer * (most - least) / (layers - 1) for layer in range(layers))
    sums = [math.floor(owed + 0.5) for owed in itertools.accumulate(shares)]
    return [after - before for before, after in itertools.pairwise([0, *sums])]

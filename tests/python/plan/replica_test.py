"""A simulated replica keeps the daemon's rules, and steps taken at once end when they would one by one."""

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import pytest
from epikv.plan.costs import Costs, Policy, Settings
from epikv.plan.replica import Arm, Call, Model, PrefixCache, Replica, demand

SETTINGS = Settings(kv_capacity_tokens=10**6, context_length=10**6, vocabulary=100)
# In ticks, so that schedules can be counted by hand.
TICK = 1e-12


def costs(base=((0, 1000.0),), settings: Settings = SETTINGS, **more) -> Costs:
    given = {"prefill": 0.0, **more}
    policies = given.pop("policies", {})
    return Costs(
        settings,
        base=tuple((n, seconds * TICK) for n, seconds in base),
        policies=policies,
        **{name: value * TICK for name, value in given.items()},
    )


def served(model: Model, calls: Sequence[Call]) -> tuple[list[tuple[int, int, int]], Replica]:
    """(when it came, its first token, its last), by arrival; and the replica."""
    told: list[tuple[int, int, int]] = []
    replica = Replica(model, lambda call, first, end: told.append((call.at, first, end)))
    for call in sorted(calls, key=lambda call: call.at):
        while replica.end is not None and replica.end <= call.at:
            replica.advance()
        assert replica.submit(call)
    while replica.end is not None:
        replica.advance()
    return sorted(told), replica


def call(at: int, prompt: int, output: int, **more) -> Call:
    return Call(at, prompt, output, more.pop("most", output), **more)


def test_a_request_alone_takes_a_step_for_each_chunk_and_each_token_after_the_first() -> None:
    told, replica = served(Model(costs(), [Arm()]), [call(0, 600, 5)])
    # Chunks of 256, 256 and 88; the last of them gives the first token.
    assert told == [(0, 3000, 7000)]
    assert (replica.steps, replica.prefill_tokens, replica.decode_tokens) == (7, 600, 4)


def test_decoding_goes_first_and_prompts_have_the_room_left() -> None:
    settings = replace(SETTINGS, max_step_tokens=100, prefill_chunk_tokens=80)
    model = Model(costs(settings=settings), [Arm()])
    told, _ = served(model, [call(0, 10, 50), call(500, 200, 1), call(600, 200, 1)])
    # The first decodes from 1000 on, and 99 tokens are left for prompts in each step. The second
    # request has 80, the third 19 beside it. Then 80 and 19, 40 and 42 (up to its multiple of 80),
    # and the third, alone, 80 and 40.
    assert told[1] == (500, 4000, 4000)
    assert told[2] == (600, 6000, 6000)


def test_prompts_advance_by_sixteen_tokens_even_if_decoding_fills_the_step() -> None:
    settings = replace(SETTINGS, max_step_tokens=4)
    model = Model(costs(settings=settings), [Arm()])
    early = [call(0, 4, 100) for _ in range(4)]
    told, _ = served(model, [*early, call(5500, 32, 1)])
    assert told[-1] == (5500, 8000, 8000)


def test_a_step_has_the_pace_of_the_moment_in_which_it_begins() -> None:
    uneven = replace(costs(), paces=(1.0, 3.0), pace_seconds=10_000 * TICK)
    told: list[int] = []
    for offset in (0, 10_000):
        replica = Replica(Model(uneven, [Arm()]), lambda _, __, end: told.append(end), offset)
        replica.submit(call(0, 10, 30))
        while replica.end is not None:
            replica.advance()
    # 30 steps. 10 until 10000, 4 until 22000, 8 until 30000, 4 until 42000, and 4.
    # 4 until 12000, 8 until 20000, 4 until 32000, 8 until 40000, 4 until 52000, and 2.
    assert told == [46_000, 54_000]


def test_a_request_waits_for_a_place_and_others_wait_behind_it() -> None:
    settings = replace(SETTINGS, max_running_requests=1)
    told, _ = served(Model(costs(settings=settings), [Arm()]), [call(i, 10, 3) for i in range(3)])
    assert [end for _, _, end in told] == [3000, 6000, 9000]


def test_the_pool_holds_what_requests_may_need_at_most() -> None:
    settings = replace(SETTINGS, kv_capacity_tokens=29)
    model = Model(costs(settings=settings), [Arm()])
    # Each may come to hold 10 + 6 - 1 = 15 tokens, so two do not fit; the small one does not overtake.
    told, _ = served(model, [call(0, 10, 6), call(1, 10, 3, most=6), call(2, 2, 2)])
    assert [end for _, _, end in told] == [6000, 9000, 8000]


def test_a_full_queue_refuses() -> None:
    settings = replace(SETTINGS, max_running_requests=1, max_queued_requests=2)
    replica = Replica(Model(costs(settings=settings), [Arm()]), lambda *_: None)
    assert [replica.submit(call(i, 10, 3)) for i in range(4)] == [True, True, True, False]


@pytest.mark.parametrize(
    ("prompt", "most", "budget", "eviction", "peak", "decode"),
    [
        (600, 100, None, "", 699, 699),
        (600, 100, 128, "by_chunk", 384, 161),  # 128 kept and a chunk more; 128 + slack + 1
        (600, 100, 128, "at_end", 600, 161),
        (100, 20, 128, "by_chunk", 119, 119),
        (100, 400, 128, "refuses", 161, 161),
    ],
)
def test_what_a_request_reserves(
    prompt: int, most: int, budget: int | None, eviction: str, peak: int, decode: int
) -> None:
    """As kv_demand.cc has it."""
    found = demand(prompt, most, budget, Policy(eviction, 32), chunk=256)
    assert (found.peak, found.decode) == (peak, decode)
    state = Policy(eviction, 32, state_bytes_per_token=5, state_bytes_per_sequence=1000)
    found = demand(prompt, most, budget, state, chunk=256, token_bytes=30)
    assert (found.peak, found.decode) == (35 * peak + 1000, 35 * decode + 1000)


def test_a_budget_that_holds_all_is_none() -> None:
    """As admission has it: the last token is never cached."""
    policy = Policy("by_chunk", 0, decode_seconds=1, state_bytes_per_token=9)
    model = Model(costs(policies={"p": policy}), [Arm(), Arm("p", 35), Arm("p", 34)])
    whole, equal, less = (call(0, 16, 20, arm=arm) for arm in range(3))
    assert model.demand(equal) == model.demand(whole) != model.demand(less)
    assert model.idle_ticks(equal) == model.idle_ticks(whole) != model.idle_ticks(less)


class OneByOne:
    """The same rules without any coalescing, as plainly as they can be put."""

    def __init__(self, model: Model, calls: Sequence[Call]) -> None:
        self._model, self._calls = model, deque(sorted(calls, key=lambda call: call.at))

    def run(self) -> list[tuple[int, int, int]]:
        model, settings = self._model, self._model.settings
        now, told = 0, []
        queue: deque[Call] = deque()
        running: list[dict] = []
        while True:
            if not running and not queue:
                if not self._calls:
                    return sorted(told)
                now = max(now, self._calls[0].at)
            while self._calls and self._calls[0].at <= now:
                queue.append(self._calls.popleft())
            begun = 0
            while queue and len(running) < settings.max_running_requests:
                needs = model.demand(queue[0])
                held = sum(
                    s["needs"].peak if s["done"] < s["call"].prompt else s["needs"].decode
                    for s in running
                )
                if held + needs.peak > settings.kv_capacity_bytes:
                    break
                running.append({"call": queue.popleft(), "needs": needs, "done": 0, "told": 0})
                begun += 1
            decoding = [s for s in running if s["told"]]
            cost = model.base[len(decoding)]
            for s in decoding:
                cost += model.attended * self._held(s)
                if self._budget(s["call"]) is not None:
                    cost += model.decode_of[s["call"].arm]
            if decoding and len(decoding) < len(running):
                cost += model.mixed
            room = max(settings.max_step_tokens - len(decoding), 16)
            parts = []
            for s in running:
                if s["told"]:
                    continue
                chunk = settings.prefill_chunk_tokens
                part = min(s["call"].prompt - s["done"], chunk - s["done"] % chunk, room)
                if part == 0:
                    break
                room -= part
                parts.append((s, part))
                budget = self._budget(s["call"])
                by_chunk = model.policies[s["call"].arm].prompt_eviction == "by_chunk"
                kept = min(s["done"], budget) if by_chunk and budget else s["done"]
                cost += part * model.prefill
                if budget is not None:
                    cost += part * model.prefill_of[s["call"].arm]
                cost += model.pair * sum(kept + i for i in range(1, part + 1))
            cost += begun * model.request if parts else 0
            now += cost
            for s, part in parts:
                s["done"] += part
            for s in running:
                if s["told"]:
                    s["told"] += 1
                elif s["done"] == s["call"].prompt:
                    s["told"], s["first"] = 1, now
            for s in [s for s in running if s["told"] == s["call"].output]:
                running.remove(s)
                told.append((s["call"].at, s["first"], now))

    def _budget(self, call: Call) -> int | None:
        return self._model.arms[call.arm].budget_of(call.prompt, call.most)

    def _held(self, s: dict) -> int:
        call = s["call"]
        budget = self._budget(call)
        grown = call.prompt + s["told"] - 1
        if budget is None:
            return grown
        middle = budget + self._model.policies[call.arm].slack_tokens // 2
        return middle if call.prompt >= budget else min(grown, middle)


@pytest.mark.parametrize("seed", range(12))
def test_steps_taken_at_once_end_exactly_when_they_would_one_by_one(seed: int) -> None:
    dice = random.Random(seed)
    settings = replace(
        SETTINGS,
        kv_capacity_tokens=dice.choice([900, 2000, 10**6]),
        max_running_requests=dice.choice([2, 8, 64]),
        max_step_tokens=dice.choice([32, 128, 512]),
        prefill_chunk_tokens=dice.choice([32, 256]),
    )
    priced = costs(
        ((0, 1000.0), (1, 2000.0), (4, 5000.0)),
        settings,
        prefill=30.0,
        mixed=dice.choice([0.0, 600.0]),
        pair=1.0,
        attended=dice.choice([0.0, 3.0]),
        request=700.0,
        policies={"p": Policy("by_chunk", 10, 40 * TICK, 7 * TICK), "q": Policy("at_end")},
    )
    arms = [Arm(), Arm("p", 60), Arm("q", 0.5)]
    calls, at = [], 0
    for _ in range(120):
        at += round(dice.expovariate(1 / dice.choice([20_000, 90_000])))
        lengths = dice.randint(1, 300), dice.randint(1, 120)
        calls.append(call(at, *lengths, arm=dice.randrange(3)))
    model = Model(priced, arms)
    told, replica = served(model, calls)
    assert told == OneByOne(model, calls).run()
    assert replica.prefill_tokens == sum(call.prompt for call in calls)
    assert replica.decode_tokens == sum(call.output - 1 for call in calls)


def test_prompts_find_their_beginning_in_whole_blocks() -> None:
    prefixes = PrefixCache(block=10)
    first = call(0, 35, 1, group=1, shared=25, talk=7)
    assert prefixes.match(first, 34) == 0
    prefixes.keep(first, 35)
    assert prefixes.match(call(0, 60, 1, group=1, shared=25, talk=7), 59) == 30
    assert prefixes.match(call(0, 60, 1, group=1, shared=25, talk=8), 59) == 20
    assert prefixes.match(call(0, 60, 1, group=2, shared=25), 59) == 0
    assert prefixes.match(call(0, 20, 1, group=1, shared=25), 19) == 10  # its last token runs


def test_what_was_used_least_recently_is_forgotten_first() -> None:
    prefixes = PrefixCache(block=10)
    for talk in (1, 2, 3):
        prefixes.keep(call(0, 20, 1, talk=talk), 20)
    assert prefixes.match(call(0, 30, 1, talk=1), 29) == 20
    prefixes.limit(30)
    hits = [prefixes.match(call(0, 30, 1, talk=talk), 29) for talk in (1, 2, 3)]
    assert hits == [20, 0, 10]


def test_a_cached_beginning_is_not_read_again() -> None:
    settings = replace(SETTINGS, prefill_chunk_tokens=10)
    model = Model(costs(settings=settings), [Arm()])
    _, replica = served(model, [call(0, 40, 1, talk=1), call(10**6, 75, 1, talk=1)])
    assert replica.hit_tokens == 40 and replica.prefill_tokens == 40 + 35

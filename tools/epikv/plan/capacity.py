"""How many replicas meet a workload's deadline, and what that costs."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import islice
from math import ceil
from typing import Any

from epikv.plan.costs import TICKS, Costs
from epikv.plan.fleet import Closed, Open, Result, Window, quantile, simulate
from epikv.plan.replica import Model
from epikv.plan.workload import Workload

MOST_REPLICAS = 10_000

# A run is long enough to see a queue that grows by a thirtieth, and quantiles of so many requests.
_DEADLINES = 30
_REQUESTS = 6000
_WARMUP_SHARE = 1 / 3
# Tokens of a budget that admission wants beside a prompt which its policy does not evict.
BESIDE_PROMPT = 16
_SAMPLE = 500  # requests that are tried on an idle replica
_FINE = 0.01  # of the replicas: how exactly they are searched for
# Of more replicas a fleet of a part of the rate is searched first: from where, and in which steps.
_MANY = 100
_SMALL = (_MANY // 2, 5)


@dataclass(frozen=True)
class Answer:
    """What a fleet does. Latencies are in seconds."""

    routing: str
    replicas: int
    late: float  # share of the requests
    first_token_p50: float
    first_token_p99: float
    end_to_end_p50: float
    end_to_end_p99: float
    output_tokens_per_second: float
    hit_rate: float  # of prompt tokens, those that a replica had cached
    busy: float  # share of time in which a replica runs steps
    requests: int

    def cost_per_million(self, per_hour: float) -> float:
        """Of output tokens, where a replica costs so much an hour."""
        return self.replicas * per_hour / (3600 * self.output_tokens_per_second) * 1e6

    def told(self, per_hour: float | None) -> dict[str, Any]:
        cost = None if per_hour is None else self.cost_per_million(per_hour)
        return {**asdict(self), "cost_per_million_output_tokens": cost}


class Unfit(ValueError):
    """A workload that no number of replicas can serve."""


def check(costs: Costs, workload: Workload) -> None:
    """Raises Unfit for a request that a replica refuses, or a policy that was not measured."""
    model = Model(costs, list(workload.arms))
    settings = costs.settings
    for arm in workload.arms:
        if arm.policy != "full" and arm.policy not in costs.policies:
            known = ", ".join(sorted({"full", *costs.policies}))
            raise Unfit(
                f"the costs of policy '{arm.policy}' were not measured; they were of: {known};"
                " measure again, to another file"
            )
        if arm.policy != "full" and arm.budget is None:
            raise Unfit(
                f"policy '{arm.policy}' needs a budget: {arm.policy}:512 or {arm.policy}:0.5"
            )
    for call in workload.longest:
        if call.prompt + call.most > settings.context_length:
            raise Unfit(
                f"a request of {call.prompt} + {call.most} tokens is longer than the model's context,"
                f" {settings.context_length}"
            )
        budget = workload.arms[call.arm].budget_of(call.prompt, call.most)
        policy = model.policies[call.arm]
        needed = call.prompt + BESIDE_PROMPT
        if budget is not None and budget < needed and policy.prompt_eviction == "refuses":
            raise Unfit(
                f"policy '{workload.arms[call.arm].policy}' evicts nothing of prompts: one of {call.prompt}"
                f" tokens needs a budget of {needed}, and has {budget}; daemons refuse it"
            )
        peak = model.demand(call).peak
        if peak > settings.kv_capacity_bytes:
            raise Unfit(
                f"a request of {call.prompt} + {call.most} tokens may hold {peak} bytes of the KV pool,"
                f" and a replica's has {settings.kv_capacity_bytes}: no replica can ever run it"
            )


def check_deadline(costs: Costs, workload: Workload, share: float) -> None:
    """Raises Unfit if idle replicas, too, miss it for more than 1 - share of the requests."""
    model = Model(costs, list(workload.arms))
    told = []
    for call in islice(workload.calls(costs.settings), _SAMPLE):
        first, end = model.idle_ticks(call)
        told.append((first / TICKS + costs.before_first, end / TICKS + costs.before_end))
    for name, limit, place in (
        ("first token", workload.first_token, 0),
        ("deadline", workload.deadline, 1),
    ):
        if limit is None:
            continue
        took = sorted(each[place] for each in told)
        needed = took[min(int(share * len(took)), len(took) - 1)]
        if needed > limit:
            raise Unfit(
                f"{name}: an idle replica, too, needs {needed:.3g} s for {100 * share:g} % of the"
                f" requests, more than the {limit:g} s that they have: no number of replicas helps"
            )


class Planner:
    """Simulates fleets for one workload. say: hears how far it has come."""

    def __init__(
        self, costs: Costs, share: float, say: Callable[[str], None] = lambda _: None
    ) -> None:
        """share: of the requests, those that have to meet the deadline."""
        self._costs, self._share, self._say = costs, share, say

    def run(self, workload: Workload, routing: str, replicas: int) -> Answer:
        result = self._simulate(workload, routing, replicas)
        late = result.late(workload.deadline, workload.first_token)
        self._say(
            f"{routing}, {replicas} replicas: {result.requests} requests, {100 * late:.2g} % late"
        )
        return _answer(routing, replicas, result, late)

    def needed(self, workload: Workload, routing: str) -> Answer:
        """The fewest replicas that are found to meet the deadline; of many, within 1 %."""
        check(self._costs, workload)
        check_deadline(self._costs, workload, self._share)
        guess = self._least(workload)
        step = max(guess // 4, 1)
        if guess > _MANY:
            parts = guess // (_MANY // 2)
            part = self._search(replace(workload, rate=workload.rate / parts), routing, *_SMALL)
            guess, step = min(part.replicas * parts, MOST_REPLICAS), max(guess // 50, 1)
        return self._search(workload, routing, guess, step)

    def _search(self, workload: Workload, routing: str, guess: int, step: int) -> Answer:
        """From a guess in steps that double, until it is between two; then halves."""
        at = self.run(workload, routing, guess)
        low, best = (0, at) if self._meets(at) else (at.replicas, None)
        while best is None or (low == 0 and best.replicas > 1):
            if best is None:
                if low == MOST_REPLICAS:
                    raise Unfit(f"{routing}: {MOST_REPLICAS} replicas do not meet the deadline")
                at = self.run(workload, routing, min(low + step, MOST_REPLICAS))
            else:
                at = self.run(workload, routing, max(best.replicas - step, 1))
            step *= 2
            if self._meets(at):
                best = at
            else:
                low = at.replicas
        while best.replicas - low > max(1, _FINE * best.replicas):
            at = self.run(workload, routing, (low + best.replicas) // 2)
            if self._meets(at):
                best = at
            else:
                low = at.replicas
        return best

    def _meets(self, answer: Answer) -> bool:
        return answer.late <= 1 - self._share

    def _least(self, workload: Workload) -> int:
        """Replicas that are about busy all the time."""
        most = self._costs.settings.max_running_requests
        seconds = self._seconds(replace(workload, rate=1.0)) / 10
        calls = workload.calls(self._costs.settings)
        window = Window(seconds / 2, seconds)
        result = simulate(
            self._costs,
            list(workload.arms),
            Closed(calls, most, seconds),
            window,
            replicas=1,
            routing="round-robin",
        )
        each = max(result.answers, 1) / window.seconds
        return min(max(ceil(workload.rate / each), 1), MOST_REPLICAS)

    def _seconds(self, workload: Workload) -> float:
        limit = max(workload.deadline or 0, workload.first_token or 0)
        talk = workload.conversations
        whole = 3 * talk.turns * talk.seconds if talk else 0
        return max(_DEADLINES * limit, _REQUESTS / workload.rate, whole)

    def _simulate(self, workload: Workload, routing: str, replicas: int) -> Result:
        seconds = self._seconds(workload)
        return simulate(
            self._costs,
            list(workload.arms),
            Open(workload.calls(self._costs.settings), seconds),
            Window(_WARMUP_SHARE * seconds, seconds),
            replicas=replicas,
            routing=routing,
            seed=workload.seed,
        )


def _answer(routing: str, replicas: int, result: Result, late: float) -> Answer:
    if not result.end_to_end:
        raise Unfit(f"{routing}, {replicas} replicas: no request was served, all were refused")
    return Answer(
        routing=routing,
        replicas=replicas,
        late=late,
        first_token_p50=quantile(result.first_token, 0.5),
        first_token_p99=quantile(result.first_token, 0.99),
        end_to_end_p50=quantile(result.end_to_end, 0.5),
        end_to_end_p99=quantile(result.end_to_end, 0.99),
        output_tokens_per_second=result.output_tokens_per_second,
        hit_rate=result.hit_tokens / max(result.prompt_tokens, 1),
        busy=result.busy,
        requests=result.requests,
    )

"""What a load asks for: arms, lengths and arrivals, all of them drawn from one seed; or problems."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

from epikv.eval.items import Item, solved
from epikv.options import GREEDY, Experiment, Kv, parse_budget
from epikv.v1 import generation_pb2

_SPARE_TOKENS = 8


@dataclass(frozen=True)
class Arm:
    """A share of the requests, and how their KV cache is held."""

    name: str
    kv: Kv
    weight: float = 1


@dataclass(frozen=True)
class Lengths:
    """A distribution of whole numbers of tokens, from `least` to `most`."""

    spec: str
    least: int
    most: int
    draw: Callable[[Random], int]


def parse_arm(spec: str) -> Arm:
    """policy[:budget[:weight]]; the budget in tokens (256) or as a share (0.5, 50%), or empty."""
    policy, _, rest = spec.partition(":")
    budget, _, weight = rest.partition(":")
    if not policy:
        raise ValueError(f"'{spec}' names no policy; it is policy[:budget[:weight]]")
    try:
        share = float(weight) if weight else 1.0
    except ValueError:
        share = math.nan
    if not 0 < share < math.inf:
        raise ValueError(f"the weight of '{spec}' is '{weight}', not a number above 0")
    if not budget:
        return Arm(policy, Kv(policy), share)
    return Arm(f"{policy}:{budget}", Kv(policy, parse_budget(budget)), share)


def parse_lengths(spec: str) -> Lengths:
    """N, uniform:LEAST:MOST, or lognormal:MEDIAN:SIGMA:MOST, which draws again beyond MOST."""
    kind, *texts = spec.split(":")
    if not texts:
        kind, texts = "fixed", [kind]
    try:
        match kind, [float(text) for text in texts]:
            case "fixed", [tokens]:
                return Lengths(spec, *_range(tokens, tokens), lambda _: int(tokens))
            case "uniform", [low, high]:
                least, most = _range(low, high)
                return Lengths(spec, least, most, lambda draw: draw.randint(least, most))
            case "lognormal", [median, sigma, high]:
                _, most = _range(median, high)
                if not 0 < sigma <= 4:
                    raise ValueError(f"sigma is {sigma:g}, not in (0, 4]")
                return Lengths(spec, 1, most, _lognormal(math.log(median), sigma, most))
            case _:
                raise ValueError("it is N, uniform:LEAST:MOST or lognormal:MEDIAN:SIGMA:MOST")
    except ValueError as error:
        raise ValueError(f"'{spec}' is no distribution of lengths: {error}") from None


def _range(low: float, high: float) -> tuple[int, int]:
    if not (low.is_integer() and high.is_integer() and 1 <= low <= high):
        raise ValueError("lengths are whole numbers from 1 on, the least before the most")
    return int(low), int(high)


def _lognormal(mu: float, sigma: float, most: int) -> Callable[[Random], int]:
    def draw(random: Random) -> int:
        while True:
            tokens = max(round(random.lognormvariate(mu, sigma)), 1)
            if tokens <= most:
                return tokens

    return draw


def poisson(rate: float, seconds: float, seed: int) -> Iterator[float]:
    """Arrival times of `rate` a second on average, from 0 to `seconds`."""
    draw = Random(f"arrivals/{seed}")
    at = draw.expovariate(rate)
    while at < seconds:
        yield at
        at += draw.expovariate(rate)


@dataclass(frozen=True)
class Workload:
    """Requests by number: the same number and seed, the same request."""

    arms: Sequence[Arm]
    prompt: Lengths
    output: Lengths
    vocabulary: int
    model: str = ""
    seed: int = 0
    # Users that requests come from in turn, each of which keeps its arm of an experiment; 0: each
    # request is of its own.
    units: int = 0
    # Asked one after another and over again, in place of prompts that are drawn, and for the longest
    # output that solves them.
    problems: Sequence[Item] = ()

    def request(self, number: int) -> tuple[int, generation_pb2.GenerateRequest]:
        """The index of its arm, and the request."""
        draw = Random(f"request/{self.seed}/{number}")
        arm = draw.choices(range(len(self.arms)), [arm.weight for arm in self.arms])[0]
        request = self._problem(number) if self.problems else self._drawn(draw)
        request.model = self.model
        request.sampling.seed = draw.getrandbits(63)
        request.kv.CopyFrom(self.arms[arm].kv.to_proto())
        if self.units:
            unit = Experiment(unit_id=f"user-{self.seed}-{number % self.units}")
            request.experiment.CopyFrom(unit.to_proto())
        return arm, request

    def judge(self, number: int, text: str) -> bool | None:
        """Whether that is the right answer to a request; None: nobody knows."""
        if not self.problems:
            return None
        return solved(self.problems[number % len(self.problems)].judge(text))

    def _drawn(self, draw: Random) -> generation_pb2.GenerateRequest:
        prompt, output = self.prompt.draw(draw), self.output.draw(draw)
        return generation_pb2.GenerateRequest(
            token_ids=generation_pb2.TokenIds(ids=draw.choices(range(self.vocabulary), k=prompt)),
            sampling=GREEDY.to_proto(),
            stop=generation_pb2.StopParams(max_output_tokens=output),
            output=generation_pb2.OutputOptions(text=False, token_ids=True),
        )

    def _problem(self, number: int) -> generation_pb2.GenerateRequest:
        item = self.problems[number % len(self.problems)]
        return generation_pb2.GenerateRequest(
            text=item.prompt,
            sampling=GREEDY.to_proto(),
            stop=generation_pb2.StopParams(
                max_output_tokens=_longest(item, self.output), stop_strings=item.stop_strings
            ),
            output=generation_pb2.OutputOptions(text=True, token_ids=True),
        )

    @property
    def extremes(self) -> list[tuple[list[int] | str, int]]:
        """Prompts, and output tokens, of the shortest request and of the longest."""
        if self.problems:
            ordered = sorted(self.problems, key=lambda item: len(item.prompt))
            return [(i.prompt, _longest(i, self.output)) for i in (ordered[0], ordered[-1])]
        ends = {(self.prompt.least, self.output.least), (self.prompt.most, self.output.most)}
        return [([0] * prompt, output) for prompt, output in sorted(ends)]


def _longest(item: Item, output: Lengths) -> int:
    """Tokens in which a problem can be solved, with a few for an end that is put otherwise."""
    return output.most if item.trace_tokens is None else item.trace_tokens + _SPARE_TOKENS

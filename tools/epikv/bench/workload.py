"""What a load asks for: arms, lengths and arrivals, all of them drawn from one seed."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

from epikv.options import Kv, parse_budget
from epikv.v1 import generation_pb2


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

    def request(self, number: int) -> tuple[int, generation_pb2.GenerateRequest]:
        """The index of its arm, and the request."""
        draw = Random(f"request/{self.seed}/{number}")
        arm = draw.choices(range(len(self.arms)), [arm.weight for arm in self.arms])[0]
        prompt, output = self.prompt.draw(draw), self.output.draw(draw)
        return arm, generation_pb2.GenerateRequest(
            model=self.model,
            token_ids=generation_pb2.TokenIds(ids=draw.choices(range(self.vocabulary), k=prompt)),
            sampling=generation_pb2.SamplingParams(seed=draw.getrandbits(63)),
            stop=generation_pb2.StopParams(max_output_tokens=output),
            output=generation_pb2.OutputOptions(text=False, token_ids=True),
            kv=self.arms[arm].kv.to_proto(),
        )

    @property
    def extremes(self) -> list[tuple[int, int]]:
        """Prompt and output tokens of the shortest request and of the longest."""
        ends = {(self.prompt.least, self.output.least), (self.prompt.most, self.output.most)}
        return sorted(ends)

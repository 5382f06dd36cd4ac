"""What the soak sends: request number N of a seed is always the same."""

import math
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeAlias

from epikv.messages import Model, Policy, PolicyParam
from epikv.sample import problem
from epikv.v1 import generation_pb2, kv_pb2
from faults import CALIBRATIONS, Plant, plant

Request: TypeAlias = generation_pb2.GenerateRequest | generation_pb2.ScoreRequest

PROBLEMS = 200  # of the sample model, of which prompts are taken
DEFAULT_OUTPUT = 1024  # tokens, where none are asked for
SHARED_IDS = 3  # request ids that several clients use at once
STOP_STRINGS = (":", "ok", "so $m", "done #3", " check 6", "7 .", "\u00e9\u4e16", "never said")
TEMPERATURES = (0.0, 1e-38, 0.3, 0.7, 1.0, 2.0, 50.0, 3e38)


class Method(StrEnum):
    GENERATE = "Generate"
    ONCE = "GenerateOnce"
    SCORE = "Score"


class Behaviour(StrEnum):
    READ = "read"
    CANCEL = "cancel"
    CANCEL_BY_ID = "cancel by id"
    DISCONNECT = "disconnect"  # closes its connection
    DEADLINE = "deadline"
    SLOW = "slow"  # pauses before each message
    STALL = "stall"  # stops reading for longer than the daemon allows


METHODS = {Method.GENERATE: 70, Method.ONCE: 15, Method.SCORE: 15}
BEHAVIOURS = {
    Behaviour.READ: 66,
    Behaviour.CANCEL: 9,
    Behaviour.CANCEL_BY_ID: 6,
    Behaviour.DISCONNECT: 6,
    Behaviour.DEADLINE: 8,
    Behaviour.SLOW: 4,
    Behaviour.STALL: 1,
}


@dataclass(frozen=True)
class Case:
    """A request, and what its client does."""

    number: int
    method: Method
    behaviour: Behaviour
    request: Request
    wire: bytes  # the request as it is sent; with some faults no message at all
    events: int  # of a stream, read before the client acts
    seconds: float  # pause, deadline, or time before it acts
    faults: tuple[Plant, ...] = ()  # made it invalid; none: it may be valid


class Cases:
    """All requests of a seed, for these models and one registry."""

    def __init__(self, seed: int, models: list[Model], policies: list[Policy]) -> None:
        self._seed = seed
        self._models = models
        self._policies = policies

    def make(self, number: int) -> Case:
        model = self._models[number % len(self._models)]
        maker = _Maker(number, random.Random(f"{self._seed}/{number}"), model, self._policies)
        return maker.case()


class _Maker:
    """One case."""

    def __init__(
        self, number: int, rng: random.Random, model: Model, policies: list[Policy]
    ) -> None:
        self._number = number
        self._rng = rng
        self._model = model
        self._policy = rng.choice(policies)

    def case(self) -> Case:
        rng = self._rng
        method = _weighted(rng, METHODS)
        request = self._score() if method is Method.SCORE else self._generate()
        request.model = self._model.name
        if rng.random() < 0.12:
            wire, faults = plant(rng, request, self._model, self._policy)
            return Case(self._number, method, Behaviour.READ, request, wire, 0, 0.0, faults)
        behaviour = _weighted(rng, BEHAVIOURS)
        if method is not Method.GENERATE and behaviour in (Behaviour.SLOW, Behaviour.STALL):
            behaviour = Behaviour.READ
        if behaviour is Behaviour.CANCEL_BY_ID:
            request.request_id = f"own-{self._number}"
        elif rng.random() < 0.03:
            request.request_id = f"shared-{rng.randrange(SHARED_IDS)}"
        return Case(
            self._number,
            method,
            behaviour,
            request,
            request.SerializeToString(),
            events=rng.choice((0, 1, 2, self._between(1, 60))),
            seconds=self._seconds(behaviour),
        )

    def _seconds(self, behaviour: Behaviour) -> float:
        match behaviour:
            case Behaviour.SLOW:
                return self._rng.uniform(0.002, 0.02)
            case Behaviour.STALL:
                return self._rng.uniform(2.5, 8)
            case _:
                return math.exp(self._rng.uniform(math.log(0.001), math.log(2)))

    def _generate(self) -> generation_pb2.GenerateRequest:
        rng = self._rng
        request = generation_pb2.GenerateRequest()
        prompt = self._prompt(request)
        left = max(1, self._model.context_length - prompt)
        output = left if rng.random() < 0.02 else min(left, self._between(4, 600))
        if rng.random() < 0.97:
            request.stop.max_output_tokens = output
        else:
            output = min(left, DEFAULT_OUTPUT)
        self._sampling(request.sampling)
        self._stop(request.stop)
        self._kv(request.kv, prompt, output)
        wants = request.output
        if rng.random() < 0.3:
            wants.text = rng.random() < 0.5
        wants.token_ids = rng.random() < 0.85
        wants.logprobs = rng.random() < 0.75
        wants.kv_trace = rng.random() < 0.4
        wants.residual_steps = rng.random() < 0.2
        wants.kept = rng.random() < 0.5
        self._more(request, output)
        return request

    def _more(self, request: generation_pb2.GenerateRequest, output: int) -> None:
        """Options that chance draws from the request so far: it does not depend on them."""
        rng = random.Random(request.SerializeToString(deterministic=True))
        sampling, stop, wants = request.sampling, request.stop, request.output
        if rng.random() < 0.2:
            sampling.min_p = rng.choice((0.0, 0.05, 1.0))
        if rng.random() < 0.2:
            sampling.typical_p = rng.choice((1.0, 0.9, 0.2, 1e-6))
        if rng.random() < 0.2:
            sampling.repetition_penalty = rng.choice((0.01, 0.5, 1.0, 1.2, 100.0))
        if rng.random() < 0.2:
            sampling.frequency_penalty = rng.choice((-2.0, 0.0, 0.5, 2.0))
        if rng.random() < 0.2:
            sampling.presence_penalty = rng.choice((-2.0, 0.0, 0.5, 2.0))
        if rng.random() < 0.2:
            for token in self._some_tokens(rng):
                sampling.logit_bias[token] = rng.choice((-100.0, -1.0, 0.0, 1.0, 100.0))
        if rng.random() < 0.15:
            stop.min_output_tokens = rng.randint(1, output)
        stop.ignore_eos = rng.random() < 0.1
        if rng.random() < 0.2:
            wants.top_logprobs = rng.choice((1, 5, 20))
        wants.prompt_logprobs = self._policy.name == "full" and rng.random() < 0.5
        wants.progress = rng.random() < 0.3
        if rng.random() < 0.15:
            wants.coalesce.FromMilliseconds(rng.choice((0, 1, 50, 10_000)))

    def _some_tokens(self, rng: random.Random) -> list[int]:
        return rng.sample(range(self._model.vocab_size), rng.randint(1, 20))

    def _score(self) -> generation_pb2.ScoreRequest:
        rng = self._rng
        request = generation_pb2.ScoreRequest()
        prompt = self._prompt(request)
        left = max(1, self._model.context_length - prompt)
        length = min(left, self._between(1, 400))
        if rng.random() < 0.3:
            words = problem(rng.randrange(PROBLEMS)).trace.split()[:length]
            length = len(words)
            request.continuation_text = " ".join(words)
        else:
            request.continuation_ids.ids.extend(self._tokens(length))
        self._kv(request.kv, prompt, length)
        in_chunks = request.kv.policy == "full" and rng.random() < 0.5
        if in_chunks:
            request.cadence = generation_pb2.SCORE_CADENCE_CHUNK
        if rng.random() < 0.5:
            request.seed = rng.getrandbits(64)
        request.kv_trace = rng.random() < 0.5
        request.residual_steps = rng.random() < 0.2 and not in_chunks
        request.kept = rng.random() < 0.5
        return request

    def _prompt(self, request: Request) -> int:
        """Sets it; its tokens."""
        rng = self._rng
        if rng.random() < 0.5:
            longest = self._model.context_length - 1 if rng.random() < 0.15 else 200
            length = self._between(1, longest)
            request.token_ids.ids.extend(self._tokens(length))
            return length
        task = problem(rng.randrange(PROBLEMS))
        words = task.prompt.split()
        if rng.random() < 0.2:
            trace = task.trace.split()
            words += trace[: rng.randrange(len(trace))]
        request.text = " ".join(words)
        return len(words)

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(self._model.vocab_size) for _ in range(count)]

    def _sampling(self, sampling: generation_pb2.SamplingParams) -> None:
        rng = self._rng
        if rng.random() < 0.6:
            sampling.temperature = rng.choice(TEMPERATURES)
        if rng.random() < 0.3:
            sampling.top_k = rng.choice((0, 1, 2, 5, self._model.vocab_size, 1000, 2**32 - 1))
        if rng.random() < 0.3:
            sampling.top_p = rng.choice((1.0, 0.95, 0.5, 0.1, 1e-6))
        if rng.random() < 0.5:
            sampling.seed = rng.getrandbits(64)

    def _stop(self, stop: generation_pb2.StopParams) -> None:
        rng = self._rng
        if rng.random() < 0.25:
            stop.stop_strings.extend(rng.sample(STOP_STRINGS, rng.randint(1, 4)))
        if rng.random() < 0.15:
            stop.stop_token_ids.extend(self._tokens(rng.randint(1, 4)))
        stop.include_stop = rng.random() < 0.3

    def _kv(self, kv: kv_pb2.KvOptions, prompt: int, output: int) -> None:
        rng = self._rng
        name = self._policy.name
        kv.policy = name if rng.random() < 0.95 else ""
        self._budget(kv, prompt, output)
        if kv.policy:
            for param in self._policy.params:
                if param.default_value is None and name in CALIBRATIONS:
                    kv.policy_params[param.name] = CALIBRATIONS[name][param.name]
                if rng.random() < 0.4:
                    kv.policy_params[param.name] = _value(rng, param)
        positions = [
            kv_pb2.POSITION_MODE_UNSPECIFIED,
            kv_pb2.POSITION_MODE_ABSOLUTE,
            kv_pb2.POSITION_MODE_COMPACT,
        ]
        refused = {(option.field, option.value) for option in self._policy.incompatible_options}
        # One that is not calibrated does not say what it reads.
        if name not in CALIBRATIONS and ("kv.positions", "POSITION_MODE_CACHE") not in refused:
            positions.append(kv_pb2.POSITION_MODE_CACHE)
        kv.positions = rng.choice(positions)
        if rng.random() < 0.15:
            kv.equal_protection = True
            return
        if rng.random() < 0.2:
            kv.protect_prompt = rng.random() < 0.5
        if rng.random() < 0.2:
            kv.sink_tokens = rng.choice((0, 1, 4, self._between(1, 100)))
        if rng.random() < 0.2:
            kv.recent_tokens = rng.choice((0, 1, 16, self._between(1, 300)))
        if rng.random() < 0.15:
            for _ in range(rng.randint(1, 5)):
                begin = rng.randrange(prompt + output)
                end = min(prompt + output, begin + self._between(1, 40))
                kv.protected_spans.add(begin=begin, end=end)

    def _budget(self, kv: kv_pb2.KvOptions, prompt: int, output: int) -> None:
        rng = self._rng
        if self._policy.name == "full" and rng.random() < 0.7:
            return
        if not kv.policy and rng.random() < 0.3:
            return
        choice = rng.random()
        if choice < 0.6:  # over the prompt, with something left to evict
            kv.max_tokens = prompt + 16 + rng.randrange(max(1, output // 2))
        elif choice < 0.8:
            kv.max_tokens = self._between(1, self._model.context_length)
        else:
            kv.keep_ratio = 1.0 if rng.random() < 0.1 else 1 - rng.random()

    def _between(self, low: int, high: int) -> int:
        """Uniform by magnitude."""
        return round(math.exp(self._rng.uniform(math.log(low), math.log(high))))


def _value(rng: random.Random, param: PolicyParam) -> Any:
    """In the range of the schema. Where layers are counted, the model may still refuse it."""
    draw: dict[str, Callable[[], Any]] = {
        "bool": lambda: rng.random() < 0.5,
        "choice": lambda: rng.choice(param.choices),
        "int": lambda: _int(rng, param),
        "float": lambda: rng.uniform(param.min, param.max),
        "int_list": lambda: [_int(rng, param) for _ in range(rng.randrange(50))],
        "choice_list": lambda: rng.sample(param.choices, k=rng.randrange(3)),
    }
    return draw[param.type]()


def _int(rng: random.Random, param: PolicyParam) -> int:
    """Mostly small."""
    low, high = int(param.min), int(param.max)
    most = high - low if rng.random() < 0.02 else min(high - low, rng.choice((3, 6, 100, 1000)))
    return low + rng.randint(0, most)


def _weighted(rng: random.Random, weights: dict[Any, int]) -> Any:
    return rng.choices(list(weights), list(weights.values()))[0]


def float_bits(values: list[float]) -> list[bytes]:
    """So that equal means equal bits."""
    return [struct.pack("<f", value) for value in values]

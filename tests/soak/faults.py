"""Faults planted in valid requests, and what the refusal has to name."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from epikv.messages import Model, Policy
from epikv.v1 import generation_pb2, kv_pb2
from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper

INVALID = (grpc.StatusCode.INVALID_ARGUMENT,)
RANGE = (grpc.StatusCode.OUT_OF_RANGE, *INVALID)  # the latter beside other faults

# What a calibration would say to policies that this model has none for.
EVICT_NOTHING = {"full", "quest"}  # the budget of quest is what a step reads
CALIBRATIONS = {"thinkv_tbe": {"layers": [0, 1], "theta1": 0.3, "theta2": 0.6}}


@dataclass(frozen=True)
class Plant:
    """A fault in a request."""

    name: str
    field: str  # that the refusal names; empty: none
    codes: tuple[grpc.StatusCode, ...] = INVALID


@dataclass(frozen=True)
class Fault:
    plant: Plant
    spoil: Callable[[Any, random.Random, Model], None]
    part: str  # of the request; one fault each
    alone: bool = False  # other faults would hide it
    method: type[Any] | None = None  # absent: any request
    if_evicts: bool = False  # needs a policy that does


def plant(
    rng: random.Random, request: Any, model: Model, policy: Policy
) -> tuple[bytes, tuple[Plant, ...]]:
    """Spoils the request; what to send, and the faults in it."""
    if rng.random() < 0.1:
        return _no_message(rng, request)
    evicts = bool(request.kv.policy) and policy.name not in EVICT_NOTHING
    fitting = [
        fault
        for fault in FAULTS
        if (fault.method is None or isinstance(request, fault.method))
        and (evicts or not fault.if_evicts)
    ]
    chosen = [rng.choice(fitting)]
    if chosen[0].alone:
        request.kv.ClearField("policy_params")  # what is wrong with them may hide it,
        if request.kv.policy:
            request.kv.policy_params.update(CALIBRATIONS.get(policy.name, {}))
        if request.kv.policy == "full":
            request.kv.ClearField("budget")  # and so may a budget that `full` refuses
    else:
        for fault in rng.sample(fitting, rng.randrange(3)):
            if not fault.alone and fault.part not in [other.part for other in chosen]:
                chosen.append(fault)
    for fault in chosen:
        fault.spoil(request, rng, model)
    return request.SerializeToString(), tuple(fault.plant for fault in chosen)


def _no_message(rng: random.Random, request: Any) -> tuple[bytes, tuple[Plant, ...]]:
    if rng.random() < 0.5:
        request.text = "??"
        return request.SerializeToString().replace(b"??", b"\xff\xfe"), (Plant("no UTF-8", ""),)
    return b"\x0a\xff\xff" + rng.randbytes(rng.randrange(20)), (Plant("no message", ""),)


def _set(path: str, values: Sequence[Any]) -> Callable[[Any, random.Random, Model], None]:
    """Sets the field at `path` to one of them."""
    *parents, name = path.split(".")

    def spoil(request: Any, rng: random.Random, model: Model) -> None:
        for parent in parents:
            request = getattr(request, parent)
        setattr(request, name, rng.choice(values))

    return spoil


def _unknown(enum: EnumTypeWrapper) -> list[int]:
    """Values that it does not have."""
    return [max(enum.values()) + 1, 99]


def _param(name: str, values: Sequence[Any]) -> Callable[[Any, random.Random, Model], None]:
    def spoil(request: Any, rng: random.Random, model: Model) -> None:
        request.kv.policy_params[name] = rng.choice(values)

    return spoil


def _extend(path: str, values: Sequence[Any]) -> Callable[[Any, random.Random, Model], None]:
    """Replaces the repeated field at `path`."""
    *parents, name = path.split(".")

    def spoil(request: Any, rng: random.Random, model: Model) -> None:
        for parent in parents:
            request = getattr(request, parent)
        del getattr(request, name)[:]
        getattr(request, name).extend(values)

    return spoil


def _no_prompt(request: Any, rng: random.Random, model: Model) -> None:
    request.ClearField("token_ids")
    request.ClearField("text")
    choice = rng.randrange(3)
    if choice == 0:
        request.text = ""
    elif choice == 1:
        request.token_ids.SetInParent()


def _long_prompt(request: Any, rng: random.Random, model: Model) -> None:
    length = model.context_length + rng.choice((0, 1, 5000))
    request.token_ids.ids[:] = [5] * length


def _strange_token(request: Any, rng: random.Random, model: Model) -> None:
    strange = rng.choice((-1, model.vocab_size, 2**31 - 1, -(2**31)))
    request.token_ids.ids[:] = [5, strange]


def _long_output(request: Any, rng: random.Random, model: Model) -> None:
    # The prompt has a token at least.
    request.stop.max_output_tokens = rng.choice((model.context_length, 2**32 - 1))


def _strange_stop(request: Any, rng: random.Random, model: Model) -> None:
    request.stop.stop_token_ids[:] = [rng.choice((-1, model.vocab_size))]


def _no_budget(request: Any, rng: random.Random, model: Model) -> None:
    request.kv.ClearField("budget")


def _spans(request: Any, rng: random.Random, model: Model) -> None:
    request.kv.equal_protection = False
    del request.kv.protected_spans[:]
    begin, end = rng.choice(((5, 5), (7, 3), (0, model.context_length + 1), (2**32 - 1, 2**32 - 1)))
    request.kv.protected_spans.add(begin=begin, end=end)


def _many_spans(request: Any, rng: random.Random, model: Model) -> None:
    request.kv.equal_protection = False
    for _ in range(65):
        request.kv.protected_spans.add(begin=0, end=1)


def _equal_and_more(request: Any, rng: random.Random, model: Model) -> None:
    request.kv.equal_protection = True
    request.kv.sink_tokens = rng.randrange(5)


def _no_continuation(request: Any, rng: random.Random, model: Model) -> None:
    request.ClearField("continuation_ids")
    request.continuation_text = ""


def _strange_continuation(request: Any, rng: random.Random, model: Model) -> None:
    request.continuation_ids.ids[:] = [model.vocab_size, 5]


_GENERATE, _SCORE = generation_pb2.GenerateRequest, generation_pb2.ScoreRequest
_NAN, _INFINITY = math.nan, math.inf
_PARAMS = "kv.policy_params"

FAULTS = [
    Fault(Plant("no prompt", "prompt"), _no_prompt, "prompt"),
    Fault(Plant("long prompt", "prompt"), _long_prompt, "prompt", alone=True),
    Fault(Plant("strange token", "token_ids.ids[1]", RANGE), _strange_token, "prompt"),
    Fault(
        Plant("other model", "", (grpc.StatusCode.NOT_FOUND,)),
        _set("model", ["other", "\u4e16" * 100]),
        "model",
        alone=True,
    ),
    Fault(Plant("long id", "request_id"), _set("request_id", ["x" * 129, "y" * 5000]), "id"),
    Fault(
        Plant("temperature", "sampling.temperature"),
        _set("sampling.temperature", [-1, _NAN, _INFINITY, -1e-30]),
        "sampling",
        method=_GENERATE,
    ),
    Fault(
        Plant("top_p", "sampling.top_p"),
        _set("sampling.top_p", [0, -1, 1.01, _NAN]),
        "sampling",
        method=_GENERATE,
    ),
    Fault(
        Plant("no output", "stop.max_output_tokens"),
        _set("stop.max_output_tokens", [0]),
        "output",
        method=_GENERATE,
    ),
    Fault(
        Plant("long output", "stop.max_output_tokens"),
        _long_output,
        "output",
        alone=True,
        method=_GENERATE,
    ),
    Fault(
        Plant("many stop strings", "stop.stop_strings"),
        _extend("stop.stop_strings", ["x"] * 17),
        "strings",
        method=_GENERATE,
    ),
    Fault(
        Plant("long stop string", "stop.stop_strings[1]"),
        _extend("stop.stop_strings", ["x", "y" * 257]),
        "strings",
        method=_GENERATE,
    ),
    Fault(
        Plant("empty stop string", "stop.stop_strings[0]"),
        _extend("stop.stop_strings", ["", "x"]),
        "strings",
        method=_GENERATE,
    ),
    Fault(
        Plant("many stop tokens", "stop.stop_token_ids"),
        _extend("stop.stop_token_ids", [5] * 65),
        "tokens",
        method=_GENERATE,
    ),
    Fault(
        Plant("strange stop token", "stop.stop_token_ids[0]", RANGE),
        _strange_stop,
        "tokens",
        method=_GENERATE,
    ),
    Fault(Plant("other policy", "kv.policy"), _set("kv.policy", ["slidng", "FULL"]), "policy"),
    Fault(Plant("other parameter", f"{_PARAMS}.none"), _param("none", [1, "x", True]), "policy"),
    Fault(
        Plant("parameter of no type", f"{_PARAMS}.none"),
        _param("none", [None, {"a": 1}, [1.5], ["x"]]),
        "policy",
    ),
    Fault(
        Plant("strange slack", f"{_PARAMS}.slack"),
        _param("slack", [-1, 65537, 0.5, 1e300, _NAN, _INFINITY, "0", True, [1]]),
        "policy",
        if_evicts=True,
    ),
    Fault(Plant("budget 0", "kv.max_tokens"), _set("kv.max_tokens", [0]), "budget"),
    Fault(
        Plant("ratio", "kv.keep_ratio"),
        _set("kv.keep_ratio", [0, -0.5, 1.0000001, 5, _NAN, _INFINITY]),
        "budget",
    ),
    Fault(Plant("no budget", "kv.budget"), _no_budget, "policy", alone=True, if_evicts=True),
    Fault(
        Plant("positions", "kv.positions"),
        _set("kv.positions", _unknown(kv_pb2.PositionMode)),
        "positions",
    ),
    Fault(Plant("span", "kv.protected_spans[0]", RANGE), _spans, "spans"),
    Fault(Plant("many spans", "kv.protected_spans"), _many_spans, "spans"),
    Fault(Plant("equal and more", "kv.equal_protection"), _equal_and_more, "spans"),
    Fault(
        Plant("no continuation", "continuation"), _no_continuation, "continuation", method=_SCORE
    ),
    Fault(
        Plant("strange continuation", "continuation_ids.ids[0]", RANGE),
        _strange_continuation,
        "continuation",
        method=_SCORE,
    ),
    Fault(
        Plant("chunks while evicting", "cadence"),
        _set("cadence", [generation_pb2.SCORE_CADENCE_CHUNK]),
        "cadence",
        alone=True,
        method=_SCORE,
        if_evicts=True,
    ),
    Fault(
        Plant("other cadence", "cadence"),
        _set("cadence", _unknown(generation_pb2.ScoreCadence)),
        "cadence",
        method=_SCORE,
    ),
]

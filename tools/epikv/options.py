"""What a caller may ask of a request. Everything left out is the server's default."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from datetime import timedelta
from typing import Any, TypeVar

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from epikv.v1 import experiment_pb2, generation_pb2, kv_pb2, steering_pb2

Proto = TypeVar("Proto", bound=Message)


def message_of(kind: type[Proto], **fields: Any) -> Proto:
    """A message with these fields. Raises ValueError that names the one which cannot hold its value."""
    try:
        return kind(**fields)
    except (TypeError, ValueError):
        for name, value in fields.items():
            try:
                kind(**{name: value})
            except (TypeError, ValueError) as error:
                raise ValueError(f"{name} cannot be {value!r}: {error}") from None
        raise


POSITIONS = {
    "absolute": kv_pb2.POSITION_MODE_ABSOLUTE,
    "compact": kv_pb2.POSITION_MODE_COMPACT,
    "cache": kv_pb2.POSITION_MODE_CACHE,
}

PRIORITIES = {
    "low": generation_pb2.PRIORITY_LOW,
    "normal": generation_pb2.PRIORITY_NORMAL,
    "high": generation_pb2.PRIORITY_HIGH,
}


SPECULATION_SOURCES = {
    "off": generation_pb2.SPECULATION_SOURCE_OFF,
    "ngram": generation_pb2.SPECULATION_SOURCE_NGRAM,
    "draft": generation_pb2.SPECULATION_SOURCE_DRAFT,
}

_BUDGET = "a number of tokens (256) or a share (0.5, 50%)"
_MOST_TOKENS = 2**32 - 1  # that the field holds


def parse_budget(text: str) -> int | float:
    """A `Kv.budget` as people write it: tokens (256) or a share (0.5, 50%)."""
    try:
        if text.endswith("%"):
            return float(text[:-1]) / 100
        return float(text) if "." in text else int(text)
    except ValueError:
        raise ValueError(f"'{text}' is not {_BUDGET}") from None


def show_budget(budget: int | float) -> str:
    """A budget as `parse_budget` reads it back: "256", "50%"."""
    return f"{100 * budget:g}%" if isinstance(budget, float) else str(budget)


def parse_param(text: str) -> tuple[str, Any]:
    """A policy's parameter as people write it: name=value, the value in JSON or else as it stands."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise ValueError(f"'{text}' is not of the form name=value")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


ROLES = {
    "system": generation_pb2.CHAT_ROLE_SYSTEM,
    "user": generation_pb2.CHAT_ROLE_USER,
    "assistant": generation_pb2.CHAT_ROLE_ASSISTANT,
    "tool": generation_pb2.CHAT_ROLE_TOOL,
}
TOOL_CHOICES = {
    None: generation_pb2.TOOL_CHOICE_MODE_UNSPECIFIED,
    "auto": generation_pb2.TOOL_CHOICE_MODE_AUTO,
    "none": generation_pb2.TOOL_CHOICE_MODE_NONE,
    "required": generation_pb2.TOOL_CHOICE_MODE_REQUIRED,
}


@dataclass(frozen=True)
class Tool:
    """A function that a model may call.

    `parameters`: JSON schema of its arguments; None: it has none.
    `strict`: whether calls are held to the schema, else arguments are any object; None: where they can
    be.
    """

    name: str
    description: str = ""
    parameters: str | Mapping[str, Any] | None = None
    strict: bool | None = None

    def to_proto(self) -> generation_pb2.Tool:
        return generation_pb2.Tool(
            name=self.name,
            description=self.description,
            parameters="" if self.parameters is None else _json(self.parameters),
            strict=self.strict,
        )


@dataclass(frozen=True)
class Chat:
    """A conversation as a prompt: messages of `role` and `content`, a system message or none, then
    user and assistant in turns. An assistant's message may have `tool_calls`, each of `id`, `name`
    and `arguments` (JSON, or a dict), and `reasoning`; a message of role "tool", with the
    `tool_call_id` of the call that it answers, follows each call.

    `thinking`: whether the model thinks before it answers, if it can be told; None: as its template
    does it.
    `special_tokens_in_contents`: whether special tokens written in contents act as such; else they
    are text.
    `tools`: functions that the model may call; they need Output(answer=True), which has the calls.
    `tool_choice`: "auto", "none" or "required"; None: auto.
    `tool`: the one function that may be called; empty: each.
    `single_call`: at most one call in an answer.
    """

    messages: Sequence[Mapping[str, Any]]
    thinking: bool | None = None
    special_tokens_in_contents: bool = False
    tools: Sequence[Tool] = ()
    tool_choice: str | None = None
    tool: str = ""
    single_call: bool = False

    def to_proto(self) -> generation_pb2.ChatPrompt:
        """Raises ValueError for what is no message, or no choice."""
        if self.tool_choice not in TOOL_CHOICES:
            known = ", ".join(name for name in TOOL_CHOICES if name)
            raise ValueError(f"tool_choice is {known}, not {self.tool_choice!r}")
        choice = generation_pb2.ToolChoice(
            mode=TOOL_CHOICES[self.tool_choice], name=self.tool, single=self.single_call
        )
        return generation_pb2.ChatPrompt(
            messages=[_message(message) for message in self.messages],
            thinking=self.thinking,
            special_tokens_in_contents=self.special_tokens_in_contents,
            tools=[tool.to_proto() for tool in self.tools],
            tool_choice=choice if choice.ByteSize() else None,
        )


def _message(message: Mapping[str, Any]) -> generation_pb2.ChatMessage:
    more = {"assistant": {"tool_calls", "reasoning"}, "tool": {"tool_call_id"}}
    role = message.get("role")
    if role not in ROLES or not {"role", "content"} <= set(message) <= {
        "role",
        "content",
        *more.get(role, ()),
    }:
        raise ValueError(
            f"a message has a role ({', '.join(ROLES)}) and a content, not {dict(message)}"
        )
    return generation_pb2.ChatMessage(
        role=ROLES[role],
        content=message["content"],
        reasoning=message.get("reasoning", ""),
        tool_call_id=message.get("tool_call_id", ""),
        tool_calls=[_call(call) for call in message.get("tool_calls") or ()],
    )


def _call(call: Mapping[str, Any]) -> generation_pb2.ToolCall:
    if set(call) != {"id", "name", "arguments"}:
        raise ValueError(f"a call has an id, a name and arguments, not {dict(call)}")
    return generation_pb2.ToolCall(
        id=call["id"], name=call["name"], arguments=_json(call["arguments"])
    )


def _json(value: str | Mapping[str, Any]) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


_TIER_DTYPES = {0: None, 8: kv_pb2.TIER_DTYPE_INT8, 4: kv_pb2.TIER_DTYPE_INT4}

Prompt = str | Sequence[int] | Chat  # text, token ids, or a conversation


class _Options:
    def __repr__(self) -> str:
        """Of what is not left out, so that signatures and errors are short."""
        given = []
        for each in fields(self):  # type: ignore[arg-type]  # subclasses are dataclasses
            made = each.default_factory
            default = each.default if made is MISSING else made()
            if (value := getattr(self, each.name)) != default:
                given.append(f"{each.name}={value!r}")
        return f"{type(self).__name__}({', '.join(given)})"


@dataclass(frozen=True, repr=False)
class Kv(_Options):
    """How the KV cache is held to a budget.

    `budget` counts tokens when it is an int, and is a share of prompt + max output, in (0, 1], when
    it is a float; text is read as on the command line ("50%"). `positions` is "absolute", "compact"
    or "cache". The four protections replace the policy's own; `equal_protection` replaces them all
    by the rule that comparisons use; None: as the server says.
    """

    policy: str = ""
    budget: int | float | str | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    positions: str | None = None
    protect_prompt: bool | None = None
    sink_tokens: int | None = None
    recent_tokens: int | None = None
    protected_spans: Sequence[tuple[int, int]] = ()  # [begin, end) by token index
    equal_protection: bool | None = None
    read_tokens: int = 0  # of a lane by a decode step; 0: all
    tier_tokens: int = 0  # evicted ones that are kept below the cache
    tier_fetch: int = 0  # of these, that each new token attends to
    tier_doubt: float = 0.0  # not 0: only where the next token's entropy is above so many nats
    tier_bits: int = 0  # 8 or 4, to which they are rounded there; 0: they are not
    guard: int = 0  # tokens that a query asks for, dropped ones come back; 0: there is no guard
    protect_thinking: int = 0  # first tokens of an answer's thinking that are not evicted
    evict_thinking: bool = False  # the rest of it, as soon as it has ended
    cache_salt: str = ""  # prompts share cached prefixes with those of the same salt
    bypass_prefix_cache: bool = False

    def _tier(self) -> kv_pb2.KvTier | None:
        if not self.tier_tokens and not self.tier_fetch and not self.tier_doubt and not self.guard:
            return None
        guard = message_of(kv_pb2.KvGuard, asked=self.guard) if self.guard else None
        if self.tier_bits not in _TIER_DTYPES:
            raise ValueError(f"tier_bits is {self.tier_bits}; known: 8, 4")
        return message_of(
            kv_pb2.KvTier,
            tokens=self.tier_tokens,
            fetch=self.tier_fetch,
            doubt=self.tier_doubt,
            dtype=_TIER_DTYPES[self.tier_bits],
            guard=guard,
        )

    def _thinking(self) -> kv_pb2.KvThinking | None:
        if not self.protect_thinking and not self.evict_thinking:
            return None
        return message_of(
            kv_pb2.KvThinking, protected_tokens=self.protect_thinking, evict=self.evict_thinking
        )

    def to_proto(self) -> kv_pb2.KvOptions:
        """Raises ValueError for an unknown position mode or a value no field can hold."""
        if self.positions is not None and self.positions not in POSITIONS:
            raise ValueError(f"positions is '{self.positions}'; known: {', '.join(POSITIONS)}")
        result = message_of(
            kv_pb2.KvOptions,
            policy=self.policy,
            positions=POSITIONS[self.positions] if self.positions else None,
            protect_prompt=self.protect_prompt,
            sink_tokens=self.sink_tokens,
            recent_tokens=self.recent_tokens,
            protected_spans=[kv_pb2.TokenSpan(begin=b, end=e) for b, e in self.protected_spans],
            equal_protection=self.equal_protection,
            read_tokens=self.read_tokens,
            tier=self._tier(),
            thinking=self._thinking(),
            cache_salt=self.cache_salt,
            bypass_prefix_cache=self.bypass_prefix_cache,
        )
        if self.params:
            result.policy_params.update(self.params)
        budget = parse_budget(self.budget) if isinstance(self.budget, str) else self.budget
        if isinstance(budget, float):
            result.keep_ratio = budget
        elif budget is not None:
            if isinstance(budget, bool) or not 0 <= budget <= _MOST_TOKENS:
                raise ValueError(f"budget cannot be {budget}: it is {_BUDGET}")
            result.max_tokens = budget
        return result


@dataclass(frozen=True, repr=False)
class Steering(_Options):
    """How strongly the model's steering vector is added; what is left out is the server's default."""

    coefficient: float | None = None
    growth: float | None = None  # for each sentence so far in which the model turned back

    def to_proto(self) -> steering_pb2.Steering:
        return message_of(steering_pb2.Steering, **vars(self))


@dataclass(frozen=True, repr=False)
class Sampling(_Options):
    """What is left out is the model's own, else as if it were not there: greedy, then.

    At most one of `regex`, `choice`, `json_schema` and `grammar` (EBNF) says what the whole text has to
    be; a schema is JSON, or what JSON is made from.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # by token id
    n: int | None = None  # completions of the prompt; more than one needs a temperature
    regex: str | None = None
    choice: Sequence[str] | None = None
    json_schema: str | Mapping[str, Any] | None = None
    grammar: str | None = None
    steering: Steering | None = None  # absent: none

    def to_proto(self) -> generation_pb2.SamplingParams:
        """Raises ValueError for more than one constraint."""
        fields = vars(self) | {"choice": None}
        constraints = ("regex", "choice", "json_schema", "grammar")
        given = [name for name in constraints if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"one constraint is possible, not {' and '.join(given)}")
        if isinstance(self.json_schema, Mapping):
            fields["json_schema"] = json.dumps(self.json_schema, ensure_ascii=False)
        if self.steering is not None:
            fields["steering"] = self.steering.to_proto()
        if self.choice is not None:
            fields["choice"] = generation_pb2.StringList(items=self.choice)
        return message_of(generation_pb2.SamplingParams, **fields)


GREEDY = Sampling(temperature=0)  # whatever the model's own is


@dataclass(frozen=True, repr=False)
class Stop(_Options):
    """When to end, beside the model's end-of-sequence tokens."""

    max_output_tokens: int | None = None
    stop_strings: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop: bool = False
    min_output_tokens: int = 0
    ignore_eos: bool = False

    def to_proto(self) -> generation_pb2.StopParams:
        return message_of(generation_pb2.StopParams, **vars(self))


@dataclass(frozen=True, repr=False)
class Output(_Options):
    """What to send back."""

    text: bool | None = None  # default: true
    token_ids: bool = False
    logprobs: bool = False
    kv_trace: bool = False
    residual_steps: bool = False
    kept: bool = False
    top_logprobs: int = 0
    prompt_logprobs: bool = False
    progress: bool = False
    coalesce: float | None = None  # seconds that a delta may wait for others
    answer: bool = False  # of a Chat: the answer's parts beside its text

    def to_proto(self) -> generation_pb2.OutputOptions:
        coalesce = None
        if self.coalesce is not None:
            coalesce = Duration()
            coalesce.FromTimedelta(timedelta(seconds=self.coalesce))
        return message_of(generation_pb2.OutputOptions, **{**vars(self), "coalesce": coalesce})


@dataclass(frozen=True, repr=False)
class Scheduling(_Options):
    """Who is served first while requests wait.

    `priority` is "low", "normal" or "high"; tenants of one priority take turns.
    """

    priority: str | None = None  # default: normal
    tenant: str = ""  # at most 64 bytes

    def to_proto(self) -> generation_pb2.SchedulingOptions:
        """Raises ValueError for an unknown priority."""
        if self.priority is not None and self.priority not in PRIORITIES:
            raise ValueError(f"priority is '{self.priority}'; known: {', '.join(PRIORITIES)}")
        return generation_pb2.SchedulingOptions(
            priority=PRIORITIES[self.priority] if self.priority else None, tenant=self.tenant
        )


@dataclass(frozen=True, repr=False)
class Speculation(_Options):
    """Several tokens of an output in one step: what may come is guessed, and verified.

    It changes when tokens come, and not which. `source` is "ngram", which guesses what followed in
    prompt and output the last time that the newest tokens were there, "draft", which guesses what
    the model's draft says (a smaller one, that the daemon has loaded with it), or "off".
    """

    source: str = "ngram"
    max_tokens: int = 0  # guesses in a step, at most 15; 0: 8

    def to_proto(self) -> generation_pb2.Speculation:
        """Raises ValueError for an unknown source."""
        if self.source not in SPECULATION_SOURCES:
            known = ", ".join(SPECULATION_SOURCES)
            raise ValueError(f"source is '{self.source}'; known: {known}")
        return message_of(
            generation_pb2.Speculation,
            source=SPECULATION_SOURCES[self.source],
            max_tokens=self.max_tokens,
        )


@dataclass(frozen=True, repr=False)
class Session(_Options):
    """A long conversation whose past is kept to a budget between requests, as episodes."""

    id: str  # of the tenant and the model; at most 128 bytes
    budget_tokens: int  # of the past, kept of each layer and KV head; at least 64
    episodes: int = 0  # at most 16; 0: 4

    def to_proto(self) -> generation_pb2.SessionOptions:
        return message_of(generation_pb2.SessionOptions, **vars(self))


@dataclass(frozen=True, repr=False)
class Experiment(_Options):
    """How a request takes part in the server's experiments."""

    unit_id: str = ""  # who keeps its arm: a user, a session; empty: the request is its own unit
    opt_out: bool = False
    force_arm: str = ""  # "experiment/arm", left out of every analysis
    covariate: float | None = None  # known before, and what outcomes may depend on

    def to_proto(self) -> experiment_pb2.ExperimentContext:
        return message_of(experiment_pb2.ExperimentContext, **vars(self))

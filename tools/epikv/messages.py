"""The messages of epikv.v1 that a caller reads, as plain dataclasses of the same names and fields.

Durations are seconds, times datetimes in UTC, enums their names in lower case without prefix, absent
fields None. What a
field means stands in the .proto files; a test holds the two in agreement.
"""

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeAlias

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from epikv.errors import RpcError, status_code
from epikv.options import (
    Experiment,
    Output,
    Sampling,
    Scheduling,
    Speculation,
    Steering,
    Stop,
)

if TYPE_CHECKING:  # descriptors are of one of two implementations
    from google._upb import _message as upb


@dataclass(frozen=True)
class TokenSpan:
    begin: int
    end: int


@dataclass(frozen=True)
class KvGuard:
    asked: int
    follow: bool
    relax_times: int
    relax_prob: float


@dataclass(frozen=True)
class KvTier:
    tokens: int
    fetch: int
    doubt: float  # nats; 0: fetched at each step
    dtype: str  # "unspecified" is as they were cached; "int8", "int4"
    guard: KvGuard | None


@dataclass(frozen=True)
class KvThinking:
    protected_tokens: int
    evict: bool


@dataclass(frozen=True)
class ResolvedKv:
    policy: str
    budget_tokens: int
    policy_params: dict[str, Any] | None
    positions: str  # "absolute", "compact", "cache"
    protected_prompt_tokens: int
    sink_tokens: int
    recent_tokens: int
    protected_spans: list[TokenSpan]
    reserved_bytes: int
    uncalibrated: bool
    read_tokens: int  # of a lane, by a decode step; 0: all
    tier: KvTier | None
    tier_bytes: int
    thinking: KvThinking | None = None


@dataclass(frozen=True)
class Accepted:
    request_id: str
    model: str
    kv: ResolvedKv | None
    sampling: Sampling | None
    prompt_tokens: int
    max_output_tokens: int
    stop_token_ids: list[int]
    queue_position: int
    arm: str
    stop: Stop | None  # None of a score
    output: Output | None
    cadence: str  # of a score "decode", "chunk"; else "unspecified"
    predicted_wait: float | None  # seconds
    scheduling: Scheduling | None
    speculation: Speculation | None = None


@dataclass(frozen=True)
class TokenSignals:
    residual_steps: list[float]


@dataclass(frozen=True)
class TopLogprobs:
    token_ids: list[int]
    logprobs: list[float]


@dataclass(frozen=True)
class PromptLogprobs:
    first: int
    token_ids: list[int]
    logprobs: list[float]
    top_logprobs: list[TopLogprobs]


@dataclass(frozen=True)
class Progress:
    prompt_tokens_done: int
    prompt_tokens: int
    cached_prompt_tokens: int


@dataclass(frozen=True)
class ToolCallDelta:
    index: int
    id: str  # with its first part; then empty, as is the name
    name: str
    arguments: str  # a piece


@dataclass(frozen=True)
class AnswerDelta:
    reasoning: str
    content: str
    tool_calls: list[ToolCallDelta]


@dataclass(frozen=True)
class ToolCall:
    id: str
    name: str
    arguments: str  # a JSON object


@dataclass(frozen=True)
class Answer:
    """Of a Chat, in its parts."""

    reasoning: str
    content: str
    tool_calls: list[ToolCall]


@dataclass(frozen=True)
class Delta:
    completion: int  # whose, of `Sampling.n`
    text: str
    token_ids: list[int]
    logprobs: list[float]
    signals: list[TokenSignals]
    top_logprobs: list[TopLogprobs]
    answer: AnswerDelta | None = None


@dataclass(frozen=True)
class Victims:
    layer: int | None
    head: int | None
    index: list[int]
    recalled: list[int] = field(default_factory=list)  # tokens of the tier that came back


@dataclass(frozen=True)
class EvictionEvent:
    at_token: int
    victims: list[Victims]
    completion: int


@dataclass(frozen=True)
class Usage:
    prompt_tokens: int
    output_tokens: int
    cached_prompt_tokens: int
    packet_prompt_tokens: int = 0
    thinking_tokens: int = 0  # of the output, where it is asked for
    guessed_tokens: int = 0  # that steps ran
    accepted_tokens: int = 0  # and came true


@dataclass(frozen=True)
class KvUsage:
    policy: str
    budget_tokens: int
    peak_tokens: int
    final_tokens: int
    evicted_entries: int
    evicted_tokens: int
    rounds: int
    peak_bytes: int
    uncalibrated: bool
    kept: list[int]
    packed_bytes: int = 0
    read_share: float = 0  # of the cache, by decode steps; 0: all was read
    demoted_entries: int = 0  # to the tier below the cache
    recalled_entries: int = 0  # and back
    forgotten_entries: int = 0  # as the tier was full
    fetched_entries: int = 0  # attended to in the tier
    tier_failed: bool = False
    doubted_steps: int = 0  # that ran a second time, with tokens of the tier


@dataclass(frozen=True)
class Finished:
    """Of several completions, this one has ended."""

    completion: int
    finish_reason: str
    stop_string: str | None
    stop_token_id: int | None
    output_tokens: int
    kv: KvUsage | None
    kv_trace_truncated: bool


@dataclass(frozen=True)
class Timings:
    """Seconds."""

    queue: float | None
    prefill: float | None
    time_to_first_token: float | None
    decode: float | None
    eviction: float | None
    # What the policy had the model run before its rounds in the prompt; at its end a part of `decode`.
    scratch_pass: float | None = None


@dataclass(frozen=True)
class Summary:
    finish_reason: str  # "length", "end", "stop_token", "stop_string"
    stop_string: str | None
    stop_token_id: int | None
    usage: Usage | None
    kv: KvUsage | None
    timings: Timings | None
    kv_trace_truncated: bool
    arm: str


Event: TypeAlias = Accepted | Progress | PromptLogprobs | Delta | EvictionEvent | Finished | Summary


@dataclass(frozen=True)
class Completion:
    """One of several."""

    text: str
    token_ids: list[int]
    logprobs: list[float]
    signals: list[TokenSignals]
    evictions: list[EvictionEvent]
    top_logprobs: list[TopLogprobs]
    finished: Finished | None
    answer: Answer | None = None


@dataclass(frozen=True)
class GenerateResult:
    accepted: Accepted | None
    text: str
    token_ids: list[int]
    logprobs: list[float]
    signals: list[TokenSignals]
    evictions: list[EvictionEvent]
    summary: Summary | None
    top_logprobs: list[TopLogprobs]
    prompt_logprobs: PromptLogprobs | None
    completions: list[Completion]  # where `Sampling.n` > 1; else the fields above
    answer: Answer | None = None


@dataclass(frozen=True)
class ScoreResponse:
    accepted: Accepted | None
    token_ids: list[int]
    logprobs: list[float]
    greedy: list[bool]
    signals: list[TokenSignals]
    evictions: list[EvictionEvent]
    summary: Summary | None
    top_logprobs: list[TopLogprobs]


@dataclass(frozen=True)
class Packet:
    """K and V that one request has cached, for others to begin with."""

    id: str
    model: str
    tenant: str
    tokens: int  # that a request takes from it as prompt tokens
    kept_tokens: float  # held of them, on average over layers and KV heads
    soft_tokens: bool  # among them
    bytes: int
    create_time: datetime | None


@dataclass(frozen=True)
class CreatedPacket:
    packet: Packet | None
    result: GenerateResult | None  # of the request that left it


@dataclass(frozen=True)
class PolicyParam:
    name: str
    type: str
    default_value: Any
    min: float | None
    max: float | None
    choices: list[str]
    help: str


@dataclass(frozen=True)
class DefaultProtection:
    protect_prompt: bool | None
    sink_tokens: int
    recent_tokens: int | None
    recent_share: float | None


@dataclass(frozen=True)
class IncompatibleOption:
    field: str
    value: str
    reason: str


@dataclass(frozen=True)
class PolicyCost:
    level: str  # "cheap", "moderate", "heavy"
    share_of_step: float
    cpu_us_per_token: float
    cached_tokens: int
    made_with: str


@dataclass(frozen=True)
class Policy:
    name: str
    summary: str
    paper: str
    params: list[PolicyParam]
    params_schema: dict[str, Any] | None  # JSON Schema
    evaluation_only: bool
    signals: list[str]
    granularity: str
    prompt_eviction: str
    slack_tokens: int
    default_protection: DefaultProtection | None
    incompatible_options: list[IncompatibleOption]
    columns: list[str]
    state_bytes_per_token: int
    state_bytes_per_sequence: int
    cost: PolicyCost | None
    needs_artefact: bool
    has_artefact: bool


@dataclass(frozen=True)
class Calibration:
    policy: str
    layer_a: int
    layer_b: int
    sign: int
    window: int
    confirmed: bool


@dataclass(frozen=True)
class ChatSupport:
    refusal: str  # why a model takes no conversations; empty: it does
    system_refusal: str  # why no system message
    thinking: bool  # may be chosen
    tools_refusal: str = ""  # why it takes no tools
    several_calls: bool = False  # in one answer


@dataclass(frozen=True)
class RenderedChat:
    text: str  # special tokens included
    token_ids: list[int]


@dataclass(frozen=True)
class Model:
    name: str
    architecture: str
    dtype: str
    vocab_size: int
    context_length: int
    layers: int
    heads: int
    kv_heads: int
    hidden_size: int
    kv_bytes_per_token: int
    kv_dtype: str  # of cached K and V
    kv_capacity_tokens: int
    kv_capacity_bytes: int
    default_policy: str
    calibration: Calibration | None
    bos_token_id: int | None
    eos_token_ids: list[int]
    deterministic: bool
    decode_kernel: str
    prefill_kernel: str
    threads: int
    device: str  # "cpu", "cuda"
    weights: str  # digest
    quantization: str  # of the linears: "int8", "int4"; "": as dtype says
    tensor_parallel: int  # processes that serve it; what is said in bytes is each one's
    draft_model: str  # its name, of Speculation("draft"); "": there is none
    chat: ChatSupport | None
    sampling: Sampling | None  # where a request does not say


@dataclass(frozen=True)
class ModelStatus:
    name: str
    state: str  # "loading", "serving", "retiring"
    live_requests: int  # running or waiting


@dataclass(frozen=True)
class ServerStatus:
    state: str  # "starting", "serving", "draining"
    version: str
    start_time: datetime | None
    models: list[ModelStatus]


@dataclass(frozen=True)
class ModelLoad:
    model: str
    running_requests: int
    waiting_requests: int
    kv_used_bytes: int
    kv_reserved_bytes: int  # by running requests, what they use included
    kv_capacity_bytes: int
    predicted_wait: float | None  # seconds, of a request that came now
    prompt_tokens_per_second: float
    output_tokens_per_second: float
    kv_prefix_bytes: int  # of cached prefixes


@dataclass(frozen=True)
class ActiveRequest:
    request_id: str
    model: str
    state: str  # "queued", "prefill", "decode"
    waits_for: str  # "turn", "kv", "place", "reader"; of nothing "unspecified"
    policy: str
    budget_tokens: int
    prompt_tokens: int
    cached_tokens: int  # so far, evicted ones included
    output_tokens: int
    max_output_tokens: int
    kv_used_bytes: int
    kv_reserved_bytes: int
    age: float | None
    time_left: float | None  # until its deadline; None: there is none
    completion: int


@dataclass(frozen=True)
class Recorded:
    duplicate: bool
    spooled: bool


@dataclass(frozen=True)
class OutcomeResult:
    """Of one outcome among several."""

    code: int
    reason: str
    message: str
    response: Recorded | None  # None: it was refused
    retry_delay: float | None  # seconds, of what may be tried again

    @property
    def error(self) -> RpcError | None:
        """What recording it alone would have raised."""
        if self.code == 0:
            return None
        return RpcError(
            status_code(self.code), self.message, reason=self.reason, retry_delay=self.retry_delay
        )


MESSAGES: dict[str, type] = {
    "epikv.v1.Accepted": Accepted,
    "epikv.v1.ActiveRequest": ActiveRequest,
    "epikv.v1.Answer": Answer,
    "epikv.v1.AnswerDelta": AnswerDelta,
    "epikv.v1.BatchRecordOutcomesResponse.Result": OutcomeResult,
    "epikv.v1.Calibration": Calibration,
    "epikv.v1.ChatSupport": ChatSupport,
    "epikv.v1.Completion": Completion,
    "epikv.v1.CreatePacketResponse": CreatedPacket,
    "epikv.v1.DefaultProtection": DefaultProtection,
    "epikv.v1.Delta": Delta,
    "epikv.v1.EvictionEvent": EvictionEvent,
    "epikv.v1.EvictionEvent.Victims": Victims,
    "epikv.v1.ExperimentContext": Experiment,
    "epikv.v1.Finished": Finished,
    "epikv.v1.GenerateResult": GenerateResult,
    "epikv.v1.IncompatibleOption": IncompatibleOption,
    "epikv.v1.KvGuard": KvGuard,
    "epikv.v1.KvThinking": KvThinking,
    "epikv.v1.KvTier": KvTier,
    "epikv.v1.KvUsage": KvUsage,
    "epikv.v1.Model": Model,
    "epikv.v1.ModelLoad": ModelLoad,
    "epikv.v1.ModelStatus": ModelStatus,
    "epikv.v1.OutputOptions": Output,
    "epikv.v1.Packet": Packet,
    "epikv.v1.Policy": Policy,
    "epikv.v1.PolicyCost": PolicyCost,
    "epikv.v1.PolicyParam": PolicyParam,
    "epikv.v1.Progress": Progress,
    "epikv.v1.PromptLogprobs": PromptLogprobs,
    "epikv.v1.RecordOutcomeResponse": Recorded,
    "epikv.v1.ResolvedKv": ResolvedKv,
    "epikv.v1.SamplingParams": Sampling,
    "epikv.v1.Steering": Steering,
    "epikv.v1.SchedulingOptions": Scheduling,
    "epikv.v1.ScoreResponse": ScoreResponse,
    "epikv.v1.ServerStatus": ServerStatus,
    "epikv.v1.Speculation": Speculation,
    "epikv.v1.StopParams": Stop,
    "epikv.v1.Summary": Summary,
    "epikv.v1.Timings": Timings,
    "epikv.v1.TokenSignals": TokenSignals,
    "epikv.v1.TokenSpan": TokenSpan,
    "epikv.v1.ToolCall": ToolCall,
    "epikv.v1.ToolCallDelta": ToolCallDelta,
    "epikv.v1.TopLogprobs": TopLogprobs,
    "epikv.v1.Usage": Usage,
}


def from_proto(message: Message) -> Any:
    """The dataclass of a message in MESSAGES; of well-known types, their Python value."""
    name = message.DESCRIPTOR.full_name
    fields: Any = message  # by its name it is known which
    if name == "google.protobuf.Duration":
        return fields.seconds + fields.nanos / 1e9
    if name == "google.protobuf.Timestamp":
        return fields.ToDatetime(tzinfo=UTC)
    if name in ("google.protobuf.Struct", "google.protobuf.Value"):
        return whole(MessageToDict(message))
    if name == "epikv.v1.StringList":
        return list(fields.items)
    return MESSAGES[name](
        **{field.name: _field(message, field) for field in message.DESCRIPTOR.fields}
    )


def _field(message: Message, field: "FieldDescriptor | upb.FieldDescriptor") -> Any:
    value = getattr(message, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return dict(value)  # of scalars
    if field.is_repeated:
        return [_value(item, field) for item in value]
    if field.has_presence and not message.HasField(field.name):
        return None
    return _value(value, field)


def _value(value: Any, field: "FieldDescriptor | upb.FieldDescriptor") -> Any:
    if field.message_type is not None:
        return from_proto(value)
    if field.enum_type is not None:
        return enum_name(field.enum_type, value)
    return value


def enum_name(enum: "EnumDescriptor | upb.EnumDescriptor", number: int) -> str:
    """FINISH_REASON_STOP_TOKEN is "stop_token"; a number this version does not know is itself."""
    if number not in enum.values_by_number:
        return str(number)
    prefix = enum.values_by_number[0].name.removesuffix("UNSPECIFIED")
    return enum.values_by_number[number].name.removeprefix(prefix).lower()


def as_json(message: Message) -> dict[str, Any]:
    """A message as programs read it: all fields that have a value or a default, by their names in
    the contract, and 64-bit integers as numbers, which protobuf's own JSON has as strings."""
    text = MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return _with_integers(text, message.DESCRIPTOR)


def _with_integers(
    value: dict[str, Any], descriptor: "Descriptor | upb.Descriptor"
) -> dict[str, Any]:
    made = {}
    for name, item in value.items():
        field = descriptor.fields_by_name.get(name)
        items = item if isinstance(item, list) else [item]
        if field is None:
            return whole(value)  # of a type that has a JSON of its own
        if field.cpp_type in (FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64):
            items = [int(each) for each in items]
        elif field.message_type is not None and all(isinstance(each, dict) for each in items):
            items = [_with_integers(each, field.message_type) for each in items]
        made[name] = items if isinstance(item, list) else items[0]
    return made


def whole(value: Any) -> Any:
    """A JSON value with its whole numbers as ints: protobuf knows only doubles."""
    if isinstance(value, dict):
        return {key: whole(item) for key, item in value.items()}
    if isinstance(value, list):
        return [whole(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value

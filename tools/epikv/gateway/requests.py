"""Bodies of requests, and the requests of the daemon that they stand for.

Fields have the names and meanings of OpenAI's API; those of vLLM that tools send are taken beside them,
and those of the daemon (`kv`, `experiment`, ...), which SDKs send by `extra_body`. A field that is not
known is refused: a budget that is misspelt would not be kept to.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import Annotated, Any, Literal, TypeVar

from google.protobuf.message import DecodeError
from pydantic import BaseModel, ConfigDict, Field, PlainValidator

from epikv import calls, options
from epikv.gateway.errors import ApiError
from epikv.v1 import generation_pb2

Options = TypeVar("Options")
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Count = Annotated[int, Field(ge=0, lt=2**31)]
Item = TypeVar("Item")

PromptSchema = str | list[str] | list[TokenId] | list[list[TokenId]]

MOST_PROMPTS = 128  # of one body
MOST_ITEMS = 1 << 20  # of any list: more than a message to the daemon holds
MOST_FEW = 1024  # of lists that are short: of messages, stop strings, fields
LONGEST_USER = 128  # bytes
MOST_LOGPROBS = 20
DEFAULT_COMPLETION_TOKENS = 16  # as the dialect has it, where max_tokens is absent
# What protobuf raises of values that a message cannot hold.
UNFIT = (AttributeError, DecodeError, OverflowError, RecursionError, TypeError, ValueError)
_MASK = 2**64 - 1

Few = Annotated[list[Item], Field(max_length=MOST_FEW, fail_fast=True)]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def _prompt_of(value: Any) -> Any:
    """Text, texts, ids or lists of ids: told by the first item, and wrong with the first that differs. A
    union of kinds would tell of every item and every kind, which takes as long as a stranger likes."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise ValueError("must be text, a list of texts, a list of token ids, or a list of those")
    if isinstance(value[0], int):
        return _ids_of(value)
    if len(value) > MOST_PROMPTS:
        raise ValueError(f"has {len(value)} items, must have 1 to {MOST_PROMPTS}")
    if isinstance(value[0], str):
        for place, item in enumerate(value):
            if not isinstance(item, str):
                raise ValueError(f"item {place} is no text, as those before it")
        return value
    return [_ids_of(item) for item in value]


def _ids_of(value: Any) -> list[int]:
    if not isinstance(value, list) or not 1 <= len(value) <= MOST_ITEMS:
        raise ValueError(f"must be 1 to {MOST_ITEMS} token ids")
    for place, item in enumerate(value):
        if type(item) is not int or not 0 <= item < 2**31:
            raise ValueError(f"item {place} is no token id")
    return value


Prompts = Annotated[Any, PlainValidator(_prompt_of, json_schema_input_type=PromptSchema)]


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class StructuredOutputs(Body):
    """What the whole text has to be; one of them."""

    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_: str | dict[str, Any] | None = Field(None, alias="json")


class JsonSchema(Body):
    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class GenerationBody(Body):
    """What completions and chats have in common."""

    model: str = ""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=16)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: str | Few[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    max_tokens: Count | None = None
    response_format: ResponseFormat | None = None
    user: str | None = None  # keeps its arm of an experiment
    prompt_cache_key: str | None = None  # its own word for what begins alike

    # As vLLM has them.
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Count | None = None
    stop_token_ids: Few[TokenId] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    structured_outputs: StructuredOutputs | None = None

    # The daemon's own.
    kv: dict[str, Any] | None = None
    experiment: dict[str, Any] | None = None
    session: dict[str, Any] | None = None
    speculation: dict[str, Any] | None = None
    steering: dict[str, Any] | None = None
    packets: Few[str] | None = None
    labels: dict[str, str] | None = None
    cache_salt: str | None = None
    priority: Literal["low", "normal", "high"] | None = None
    tenant: str | None = None

    # Of OpenAI's, for a provider that is not this one: taken, and without meaning here.
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_retention: str | None = None

    def most_tokens(self) -> int | None:
        return self.max_tokens

    def output(self) -> options.Output:
        raise NotImplementedError

    def counts_tokens(self) -> bool:
        """While they come."""
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def request(self, prompt: options.Prompt, request_id: str) -> generation_pb2.GenerateRequest:
        """Raises ApiError for what the daemon's message cannot hold."""
        try:
            return calls.generate_request(
                prompt,
                _kv(self),
                _sampling(self),
                _stop(self),
                self.output(),
                options.Scheduling(self.priority, self.tenant or ""),
                _experiment(self),
                self.labels,
                self.packets or (),
                _options(options.Session, "session", self.session),
                self.model,
                request_id,
                _options(options.Speculation, "speculation", self.speculation),
            )
        except UNFIT as error:
            raise ApiError(f"{error}" or "a value is out of range") from None


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: Prompts
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    best_of: int | None = None
    suffix: str | None = None
    add_special_tokens: bool = True

    def prompts(self) -> list[str | list[int]]:
        """Each of which is a request of its own."""
        one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if one else self.prompt

    def check(self) -> None:
        """Raises ApiError."""
        if self.suffix:
            raise ApiError("suffix: this server does not insert", param="suffix")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ApiError("best_of: must be n, all of which are returned", param="best_of")
        if self.max_tokens == 0 and not self.echo:
            raise ApiError("max_tokens: must be at least 1, or 0 with echo", param="max_tokens")
        if self.echo and self.stream and (self.logprobs is not None or self.max_tokens == 0):
            raise ApiError("echo: not with logprobs or max_tokens 0 in a stream", param="echo")

    def most_tokens(self) -> int | None:
        """At least one: where none was asked for, it is left out of the answer."""
        return DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else max(1, self.max_tokens)

    def output(self) -> options.Output:
        wants = self.logprobs is not None
        return options.Output(
            token_ids=wants or self.counts_tokens() or bool(self.echo),
            logprobs=wants,
            top_logprobs=self.logprobs or 0,
            prompt_logprobs=wants and bool(self.echo),
        )


class TextPart(Body):
    type: Literal["text"]
    text: str


class CalledFunction(Body):
    name: str
    arguments: str


class ToolCall(Body):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None  # as it came in a stream; without meaning here

    def plain(self) -> dict[str, str]:
        return {"id": self.id, "name": self.function.name, "arguments": self.function.arguments}


class Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Few[TextPart] | None = None
    name: str | None = None
    refusal: str | None = None
    # Of the assistant's, as they were answered.
    reasoning_content: str | None = None
    tool_calls: Few[ToolCall] | None = None
    # Of what SDKs send back of an answer; without meaning here.
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None
    tool_call_id: str | None = None  # of a tool's

    def plain(self) -> dict[str, Any]:
        content = self.content or ""
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        plain: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": content,
        }
        if self.tool_calls:
            plain["tool_calls"] = [call.plain() for call in self.tool_calls]
        if self.reasoning_content:
            plain["reasoning"] = self.reasoning_content
        if self.tool_call_id is not None:
            plain["tool_call_id"] = self.tool_call_id
        return plain


class Function(Body):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function

    def plain(self) -> options.Tool:
        of = self.function
        return options.Tool(of.name, of.description or "", of.parameters, of.strict)


class FunctionName(Body):
    name: str


class OneTool(Body):
    type: Literal["function"]
    function: FunctionName


class ChatTemplateOptions(Body):
    enable_thinking: bool | None = None


def chat_of(
    messages: Sequence[Message],
    template: ChatTemplateOptions | None,
    tools: Sequence[Tool] | None,
    choice: str | OneTool | None = None,
    *,
    single_call: bool = False,
) -> options.Chat:
    """Without tools there is nothing to choose from: a choice of none of them asks for nothing."""
    chat = options.Chat(
        [each.plain() for each in messages],
        thinking=template.enable_thinking if template else None,
    )
    if not tools and (choice is None or choice in ("none", "auto")):
        return chat
    one = isinstance(choice, OneTool)
    return replace(
        chat,
        tools=[each.plain() for each in tools or ()],
        tool_choice="required" if isinstance(choice, OneTool) else choice,
        tool=choice.function.name if isinstance(choice, OneTool) else "",
        single_call=single_call or one,
    )


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MOST_FEW, fail_fast=True)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    chat_template_kwargs: ChatTemplateOptions | None = None
    reasoning_effort: str | None = None  # without meaning here
    tools: Few[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | OneTool | None = None
    parallel_tool_calls: bool | None = None

    def chat(self) -> options.Chat:
        return chat_of(
            self.messages,
            self.chat_template_kwargs,
            self.tools,
            self.tool_choice,
            single_call=self.parallel_tool_calls is False,
        )

    def check(self) -> None:
        """Raises ApiError."""
        if self.top_logprobs and not self.logprobs:
            raise ApiError("top_logprobs: needs logprobs to be true", param="top_logprobs")
        if self.most_tokens() == 0:
            raise ApiError("max_tokens: must be at least 1", param="max_tokens")

    def most_tokens(self) -> int | None:
        newer = self.max_completion_tokens
        return self.max_tokens if newer is None else newer

    def output(self) -> options.Output:
        return options.Output(
            text=False,  # the answer has it
            answer=True,
            token_ids=bool(self.logprobs) or self.counts_tokens(),
            logprobs=bool(self.logprobs),
            top_logprobs=(self.top_logprobs or 0) if self.logprobs else 0,
        )


class TokenizeBody(Body):
    """POST /tokenize: of a text, or of a conversation."""

    model: str = ""
    prompt: str | None = None
    messages: Few[Message] | None = None
    tools: Few[Tool] | None = None
    add_special_tokens: bool = True
    chat_template_kwargs: ChatTemplateOptions | None = None
    return_token_strs: bool = False

    def chat(self) -> options.Chat:
        return chat_of(self.messages or [], self.chat_template_kwargs, self.tools)


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str = ""
    tokens: Annotated[list[TokenId], Field(max_length=MOST_ITEMS, fail_fast=True)]


def _sampling(body: GenerationBody) -> options.Sampling:
    return options.Sampling(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=max(0, body.top_k) if body.top_k is not None else None,  # -1: all, too
        seed=body.seed & _MASK if body.seed is not None else None,
        min_p=body.min_p,
        typical_p=body.typical_p,
        repetition_penalty=body.repetition_penalty,
        frequency_penalty=body.frequency_penalty,
        presence_penalty=body.presence_penalty,
        logit_bias={int(token): bias for token, bias in (body.logit_bias or {}).items()},
        n=body.n,
        steering=_options(options.Steering, "steering", body.steering),
        **dict(_constraints(body)),
    )


def _constraints(body: GenerationBody) -> Iterator[tuple[str, Any]]:
    """Of which one is possible."""
    asked = body.response_format
    if asked is not None and asked.type == "json_object":
        yield "json_schema", {"type": "object", "additionalProperties": True}
    elif asked is not None and asked.type == "json_schema":
        schema = asked.json_schema.schema_ if asked.json_schema else None
        if schema is None:
            raise ApiError(
                "response_format.json_schema: has no schema", param="response_format.json_schema"
            )
        yield "json_schema", json.dumps(schema, ensure_ascii=False)
    if body.structured_outputs is not None:
        if asked is not None and asked.type != "text":
            raise ApiError(
                "structured_outputs: not beside response_format", param="structured_outputs"
            )
        of = body.structured_outputs
        for name, value in (
            ("regex", of.regex),
            ("choice", of.choice),
            ("grammar", of.grammar),
            ("json_schema", of.json_),
        ):
            if value is not None:
                yield name, value


def _stop(body: GenerationBody) -> options.Stop:
    return options.Stop(
        max_output_tokens=body.most_tokens(),
        stop_strings=[body.stop] if isinstance(body.stop, str) else body.stop or (),
        stop_token_ids=body.stop_token_ids or (),
        include_stop=bool(body.include_stop_str_in_output),
        min_output_tokens=body.min_tokens or 0,
        ignore_eos=bool(body.ignore_eos),
    )


def _kv(body: GenerationBody) -> options.Kv:
    given = dict(body.kv or {})
    if body.cache_salt is not None:
        given["cache_salt"] = body.cache_salt
    return _options(options.Kv, "kv", given) or options.Kv()


def _experiment(body: GenerationBody) -> options.Experiment:
    """Who is named as the user keeps an arm, if no unit is named."""
    user = body.user or ""
    if len(user.encode()) > LONGEST_USER:  # its digest keeps an arm as well
        user = hashlib.sha256(user.encode()).hexdigest()
    given = {"unit_id": user} | (body.experiment or {})
    return _options(options.Experiment, "experiment", given) or options.Experiment()


def _options(kind: type[Options], name: str, given: dict[str, Any] | None) -> Options | None:
    """Raises ApiError for a field that is not known."""
    if given is None:
        return None
    known = [each.name for each in fields(kind)]  # type: ignore[arg-type]  # all are dataclasses
    for field in given:
        if field not in known:
            raise ApiError(
                f"{name}.{field}: is not known; known: {', '.join(known)}", param=f"{name}.{field}"
            )
    try:
        return kind(**given)
    except TypeError as error:  # one that is required is missing
        raise ApiError(f"{name}: {error}", param=name) from None

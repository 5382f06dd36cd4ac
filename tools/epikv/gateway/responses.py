"""What daemons send, as bodies and as the events of a stream."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from epikv.gateway.tokens import TokenTexts
from epikv.messages import enum_name, from_proto
from epikv.v1 import generation_pb2

_REASONS = generation_pb2.FinishReason.DESCRIPTOR
_LEAST_LOGPROB = -9999.0  # as OpenAI tells of what cannot be: JSON has no infinity
_FINISH = {"length": "length", "end": "stop", "stop_token": "stop", "stop_string": "stop"}

# What has tokens, and how likely they were; and what says how a completion ended.
Likely = (
    generation_pb2.Delta
    | generation_pb2.Completion
    | generation_pb2.GenerateResult
    | generation_pb2.PromptLogprobs
)
Output = generation_pb2.Completion | generation_pb2.GenerateResult
Ended = generation_pb2.Finished | generation_pb2.Summary


@dataclass(frozen=True)
class Head:
    """What all parts of an answer begin with."""

    id: str
    created: int  # seconds since 1970

    def of(self, kind: str, accepted: generation_pb2.Accepted) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": accepted.model}


def _told(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)


def finish_of(end: Ended) -> dict[str, Any]:
    """`stop_reason`, as vLLM has it: the string or the token that was found."""
    match = end.WhichOneof("stop_match")
    return {
        "finish_reason": _FINISH.get(enum_name(_REASONS, end.finish_reason), "stop"),
        "stop_reason": getattr(end, match) if match else None,
    }


def usage_of(
    summaries: Iterable[generation_pb2.Summary], *, nothing_asked: bool = False
) -> dict[str, Any]:
    """nothing_asked: what was made is left out of the answer."""
    prompt = output = cached = thinking = 0
    for summary in summaries:
        prompt += summary.usage.prompt_tokens
        output += 0 if nothing_asked else summary.usage.output_tokens
        cached += summary.usage.cached_prompt_tokens + summary.usage.packet_prompt_tokens
        thinking += summary.usage.thinking_tokens
    return usage(prompt, output) | {
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": thinking},
    }


def usage(prompt: int, output: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
    }


def facts_of(accepted: generation_pb2.Accepted, summary: generation_pb2.Summary) -> dict[str, Any]:
    """What OpenAI's API has no words for: the request's name, its arm, its KV cache, and when."""
    return {
        "request_id": accepted.request_id,
        "arm": summary.arm,
        "seed": accepted.sampling.seed,
        "kv": asdict(from_proto(summary.kv)),
        "timings": asdict(from_proto(summary.timings)),
    }


class Completions:
    """The bodies of /v1/completions. top: likeliest tokens told of at each place; None: no
    log-probabilities."""

    whole = part = "text_completion"

    def __init__(self, top: int | None, texts: TokenTexts | None) -> None:
        self._top = top
        self._texts = texts

    def begin(self, index: int, echoed: str) -> list[dict[str, Any]]:
        """Choices of a stream, before any text that is made."""
        return [self._choice(index, echoed, None, {"finish_reason": None})] if echoed else []

    def delta(self, index: int, delta: generation_pb2.Delta, at: int) -> dict[str, Any] | None:
        """A choice of a stream; None: it has nothing for its reader. at: characters before it."""
        if not delta.text and not delta.token_ids:
            return None
        logprobs = self.logprobs(delta, delta.text, at)
        return self._choice(index, delta.text, logprobs, {"finish_reason": None})

    def end(self, index: int, end: Mapping[str, Any]) -> dict[str, Any]:
        return self._choice(index, "", None, end)

    def choice(self, index: int, output: Output, end: Mapping[str, Any]) -> dict[str, Any]:
        return self._choice(index, output.text, self.logprobs(output, output.text, 0), end)

    def echoed(
        self,
        choice: dict[str, Any],
        text: str,
        prompt: Sequence[int],
        of_prompt: generation_pb2.PromptLogprobs,
        answer: Sequence[int],
    ) -> dict[str, Any]:
        """The choice with its prompt before it. text: of both; prompt, answer: their tokens, none of an
        answer that is left out."""
        if self._top is None:
            return choice | {"text": text}
        first = {  # which nothing foretells
            "tokens": self._texts_of(prompt[:1]),
            "token_logprobs": [None],
            "top_logprobs": [None] if self._top else None,
        }
        parts = [first, self._table(of_prompt)]
        if answer:
            parts.append(choice["logprobs"])
        logprobs = {
            name: [each for part in parts for each in part[name]] if first[name] else None
            for name in first
        }
        offsets = self._offsets([*prompt, *answer], text, 0)
        return choice | {"text": text, "logprobs": logprobs | {"text_offset": offsets}}

    def logprobs(self, likely: Likely, text: str, at: int) -> dict[str, Any] | None:
        """at: characters before the text."""
        if self._top is None:
            return None
        offsets = self._offsets(likely.token_ids, text, at)
        return self._table(likely) | {"text_offset": offsets}

    def _offsets(self, ids: Sequence[int], text: str, at: int) -> list[int]:
        assert self._texts is not None
        return self._texts.offsets(ids, text, at)

    def _table(self, likely: Likely) -> dict[str, Any]:
        tokens = self._texts_of(likely.token_ids)
        logprobs = [_told(logprob) for logprob in likely.logprobs]
        tops = None
        if self._top:
            taken = zip(likely.top_logprobs, tokens, logprobs, strict=True)
            tops = [self._likeliest(*each) for each in taken]
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops}

    def _likeliest(
        self, top: generation_pb2.TopLogprobs, token: str, logprob: float
    ) -> dict[str, float]:
        """With the one that was taken, be it among them or not."""
        likeliest = zip(self._texts_of(top.token_ids), map(_told, top.logprobs), strict=True)
        return {token: logprob} | dict(reversed(list(likeliest)))  # of one text, its likeliest

    def _texts_of(self, ids: Iterable[int]) -> list[str]:
        assert self._texts is not None
        return [self._texts.text(token) for token in ids]

    @staticmethod
    def _choice(index: int, text: str, logprobs: Any, end: Mapping[str, Any]) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs, **end}


class Chats:
    """The bodies of /v1/chat/completions."""

    whole, part = "chat.completion", "chat.completion.chunk"

    def __init__(self, top: int | None, texts: TokenTexts | None) -> None:
        self._top = top
        self._texts = texts

    def begin(self, index: int, echoed: str) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        return [self._part(index, delta, None, {"finish_reason": None})]

    def delta(self, index: int, delta: generation_pb2.Delta, at: int) -> dict[str, Any] | None:
        told: dict[str, Any] = {}
        if delta.answer.reasoning:
            told["reasoning_content"] = delta.answer.reasoning
        if delta.answer.tool_calls:
            told["tool_calls"] = [_call_part(call) for call in delta.answer.tool_calls]
        if delta.answer.content or (delta.token_ids and not told):
            told["content"] = delta.answer.content
        if not told:
            return None
        return self._part(index, told, self.logprobs(delta), {"finish_reason": None})

    def end(self, index: int, end: Mapping[str, Any]) -> dict[str, Any]:
        return self._part(index, {}, None, end)

    def choice(self, index: int, output: Output, end: Mapping[str, Any]) -> dict[str, Any]:
        answer = output.answer
        message: dict[str, Any] = {
            "role": "assistant",
            "content": answer.content or (None if answer.tool_calls else ""),
            "refusal": None,
        }
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in answer.tool_calls
            ]
            end = _called(end)
        return {"index": index, "message": message, "logprobs": self.logprobs(output), **end}

    def logprobs(self, likely: Likely) -> dict[str, Any] | None:
        if self._top is None:
            return None
        tops = likely.top_logprobs or [generation_pb2.TopLogprobs()] * len(likely.token_ids)
        content = [
            self._token(token, logprob)
            | {
                "top_logprobs": [
                    self._token(*each) for each in zip(top.token_ids, top.logprobs, strict=True)
                ]
            }
            for token, logprob, top in zip(likely.token_ids, likely.logprobs, tops, strict=True)
        ]
        return {"content": content, "refusal": None}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        assert self._texts is not None
        data = self._texts.data(token)
        return {"token": self._texts.text(token), "logprob": _told(logprob), "bytes": list(data)}

    @staticmethod
    def _part(index: int, delta: Any, logprobs: Any, end: Mapping[str, Any]) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": logprobs, **end}


def _call_part(call: generation_pb2.ToolCallDelta) -> dict[str, Any]:
    function = {"arguments": call.arguments}
    if not call.id:
        return {"index": call.index, "function": function}
    return {
        "index": call.index,
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, **function},
    }


def _called(end: Mapping[str, Any]) -> Mapping[str, Any]:
    """The end of an answer that has called tools."""
    whole = end["finish_reason"] == "stop" and end["stop_reason"] is None
    return {**end, "finish_reason": "tool_calls"} if whole else end


Form = Completions | Chats


def choices_of(
    form: Form, first: int, result: generation_pb2.GenerateResult
) -> list[dict[str, Any]]:
    """Of one prompt's completions, numbered from `first`."""
    if not result.completions:
        return [form.choice(first, result, finish_of(result.summary))]
    return [
        form.choice(first + place, each, finish_of(each.finished))
        for place, each in enumerate(result.completions)
    ]


class Parts:
    """The choices of a stream, of one prompt whose completions are numbered from `first`."""

    def __init__(self, form: Form, first: int, n: int) -> None:
        self._form = form
        self._first = first
        self._characters = [0] * n
        self._called = [False] * n  # some tool
        self.n = n
        self.output_tokens = 0

    def begin(self, echoed: str) -> list[dict[str, Any]]:
        """echoed: text that stands before each completion."""
        choices = []
        for place in range(self.n):
            choices += self._form.begin(self._first + place, echoed)
            self._characters[place] = len(echoed)
        return choices

    def of(self, event: generation_pb2.GenerateResponse) -> dict[str, Any] | None:
        """A choice, or nothing that a client would see."""
        kind = event.WhichOneof("event")
        if kind == "delta":
            delta = event.delta
            place = delta.completion
            self.output_tokens += len(delta.token_ids)
            self._called[place] |= bool(delta.answer.tool_calls)
            choice = self._form.delta(self._first + place, delta, self._characters[place])
            self._characters[place] += len(delta.text)
            return choice
        if kind == "finished":
            return self._end(event.finished.completion, event.finished)
        if kind == "summary" and self.n == 1:
            return self._end(0, event.summary)
        return None

    def _end(self, place: int, ended: Ended) -> dict[str, Any]:
        end: Mapping[str, Any] = finish_of(ended)
        return self._form.end(self._first + place, _called(end) if self._called[place] else end)

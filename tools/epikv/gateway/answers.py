"""The answer to a body that asks for text: whole, or as a stream."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.responses import JSONResponse, Response, StreamingResponse

from epikv.errors import RpcError
from epikv.gateway import requests as bodies
from epikv.gateway import responses
from epikv.gateway.echo import Behind, Echo
from epikv.gateway.errors import ApiError
from epikv.gateway.events import DONE, MEDIA_TYPE, event
from epikv.gateway.upstream import Caller, Generation, Upstream
from epikv.v1 import generation_pb2

Result = TypeVar("Result")


@dataclass(frozen=True)
class Asked:
    """A body that asks for text, and how it is answered."""

    body: bodies.GenerationBody
    requests: Sequence[generation_pb2.GenerateRequest]  # one for each prompt
    form: responses.Form
    head: responses.Head
    caller: Caller


async def results_of(asked: Asked, upstream: Upstream) -> list[generation_pb2.GenerateResult]:
    """What the daemons say to each prompt, once all have said it."""
    return await _all(
        upstream.ask(lambda of: of.generation.GenerateOnce, each, asked.caller)
        for each in asked.requests
    )


def choices_of(
    form: responses.Form, results: Sequence[generation_pb2.GenerateResult]
) -> list[dict[str, Any]]:
    choices: list[dict[str, Any]] = []
    for result in results:
        choices += responses.choices_of(form, len(choices), result)
    return choices


async def echoed(
    form: responses.Completions,
    choices: Iterable[dict[str, Any]],
    results: Sequence[generation_pb2.GenerateResult],
    echoes: Sequence[Echo],
    *,
    alone: bool,
) -> list[dict[str, Any]]:
    """The choices, each with its prompt before it; alone: in place of it."""
    rest = iter(choices)
    made = []
    for echo, result in zip(echoes, results, strict=True):
        for answer in result.completions or [result]:
            text, ids = echo.prompt, list(answer.token_ids)
            if alone:
                ids = []
            else:
                text = echo.begin + await echo.behind(answer.text, ids)
            made.append(form.echoed(next(rest), text, echo.ids, result.prompt_logprobs, ids))
    return made


def whole(
    asked: Asked,
    choices: Sequence[dict[str, Any]],
    results: Sequence[generation_pb2.GenerateResult],
    *,
    nothing_asked: bool = False,
) -> Response:
    facts = [responses.facts_of(result.accepted, result.summary) for result in results]
    summaries = [result.summary for result in results]
    return JSONResponse(
        {
            **asked.head.of(asked.form.whole, results[0].accepted),
            "choices": choices,
            "usage": responses.usage_of(summaries, nothing_asked=nothing_asked),
            "epikv": facts[0] if len(facts) == 1 else facts,
        }
    )


async def stream(asked: Asked, upstream: Upstream, echoes: Sequence[Echo] = ()) -> Response:
    """Once the daemon has taken all of them: what it refuses has a status of its own. echoes: of all
    prompts, or of none."""
    begun = await _all(
        (upstream.generate(each, asked.caller) for each in asked.requests), undo=Generation.close
    )
    return _Streaming(_Stream(asked, begun, echoes))


class _Streaming(StreamingResponse):
    """Ends what its stream has begun, however it ends itself."""

    def __init__(self, stream: "_Stream") -> None:
        super().__init__(stream.lines(), media_type=MEDIA_TYPE)
        self._stream = stream

    async def __call__(self, *connection: Any) -> None:
        try:
            await super().__call__(*connection)
        finally:
            self._stream.close()


class _Stream:
    """Server-sent events of one or more completions, as their messages come."""

    def __init__(
        self,
        asked: Asked,
        begun: Sequence[Generation],
        echoes: Sequence[Echo],
    ) -> None:
        self._begun = begun
        self._head = asked.head.of(asked.form.part, begun[0].accepted)
        self._echoes = echoes
        wanted = asked.body.stream_options or bodies.StreamOptions()
        self._usage_at_end = wanted.include_usage
        self._usage_always = wanted.continuous_usage_stats
        n = asked.body.n or 1
        self._parts = [responses.Parts(asked.form, n * place, n) for place in range(len(begun))]
        self._behind = [[Behind(echo) for _ in range(n)] for echo in echoes]
        self._summaries: dict[int, generation_pb2.Summary] = {}

    async def lines(self) -> AsyncIterator[bytes]:
        try:
            for place, parts in enumerate(self._parts):
                for choice in parts.begin(self._echoes[place].begin if self._echoes else ""):
                    yield self._event([choice])
            end: list[dict[str, Any]] = []  # a choice that waits for what is said at the end
            async for place, message in _merged(self._begun):
                kind = message.WhichOneof("event")
                if kind == "summary":
                    self._summaries[place] = message.summary
                elif kind == "delta" and self._behind:
                    delta = message.delta
                    behind = self._behind[place][delta.completion]
                    delta.text = await behind.part(delta.text, delta.token_ids)
                part = self._parts[place].of(message)
                if part is None:
                    continue
                if end:
                    yield self._event(end)
                end = [] if kind == "delta" else [part]
                if not end:
                    yield self._event([part])
            yield self._event(end, **self._facts())
            if self._usage_at_end:
                yield self._event([], usage=responses.usage_of(self._summaries.values()))
        except RpcError as error:
            yield event(ApiError.from_rpc(error).body())
        yield DONE

    def close(self) -> None:
        for generation in self._begun:
            generation.close()

    def _facts(self) -> dict[str, Any]:
        facts = [
            responses.facts_of(generation.accepted, self._summaries[place])
            for place, generation in enumerate(self._begun)
        ]
        return {"epikv": facts[0] if len(facts) == 1 else facts}

    def _event(self, choices: Sequence[dict[str, Any]], **more: Any) -> bytes:
        told = {**self._head, "choices": choices, **more}
        if self._usage_at_end:
            told.setdefault("usage", None)
        if self._usage_always and not told.get("usage"):
            prompt = sum(generation.accepted.prompt_tokens for generation in self._begun)
            output = sum(parts.output_tokens for parts in self._parts)
            told["usage"] = responses.usage(prompt, output)
        return event(told)


async def _merged(
    begun: Sequence[Generation],
) -> AsyncIterator[tuple[int, generation_pb2.GenerateResponse]]:
    """Messages with the place of who sent them, as they come. One of each waits at most: who reads
    slowly makes the daemons wait."""
    if len(begun) == 1:
        async for message in begun[0]:
            yield 0, message
        return
    waiting = {
        asyncio.ensure_future(anext(generation)): place for place, generation in enumerate(begun)
    }
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                place = waiting.pop(task)
                try:
                    message = task.result()
                except StopAsyncIteration:
                    continue
                waiting[asyncio.ensure_future(anext(begun[place]))] = place
                yield place, message
    finally:
        for task in waiting:
            task.cancel()


async def _all(
    awaitables: Iterable[Awaitable[Result]], undo: Callable[[Result], None] = lambda _: None
) -> list[Result]:
    """All results; or the first failure, and nothing is left of the others."""
    tasks = [asyncio.ensure_future(each) for each in awaitables]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if not isinstance(result, BaseException):
                undo(result)
        raise

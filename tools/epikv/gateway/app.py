"""The gateway's routes."""

import asyncio
import json
import math
import re
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import from_json
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from epikv.connection import Tls
from epikv.errors import RpcError
from epikv.gateway import openapi, responses
from epikv.gateway import requests as bodies
from epikv.gateway.errors import ApiError
from epikv.gateway.limits import GONE, Limits
from epikv.gateway.metrics import CONTENT_TYPE, Metrics
from epikv.gateway.tokens import TokenTexts
from epikv.gateway.upstream import Caller, Generation, Upstream
from epikv.messages import Model
from epikv.outcome import Outcome
from epikv.v1 import generation_pb2, model_pb2, tokenization_pb2

Result = TypeVar("Result")
Body = TypeVar("Body", bound=bodies.Body)

_PASSED_ON = ("authorization", "traceparent", "tracestate")
_DONE = b"data: [DONE]\n\n"
_MOST_TOKENIZERS = 8  # kept in memory
_MOST_FAULTS = 8  # told of one body
_LONGEST_TIMEOUT = 1e6  # seconds
_STARTED = int(time.time())
_IS_TYPE = re.compile(r"^(str$|list\[|dict\[|function-|constrained)")
_LONGEST_NAME = 200  # characters, of a field that is told
_LONGEST_ID = 100
# Some clients take these for ends of lines.
_ESCAPED = {ord(char): f"\\u{ord(char):04x}" for char in "\x85\u2028\u2029"}
# What OpenAI's API has and no model here is for.
_ABSENT = ("audio", "batches", "embeddings", "files", "images", "moderations", "responses")


@dataclass(frozen=True)
class Settings:
    servers: tuple[str, ...]  # HOST:PORT of each daemon
    tls: Tls | None = None  # of the way to them
    body_bytes: int = 4 << 20  # of one request: the daemon takes no larger messages
    body_seconds: float = 30  # within which a body has to come
    at_once: int = 1024  # requests of one worker
    origins: tuple[str, ...] = ()  # of pages whose scripts may ask
    local: bool = False  # only this machine reaches it


def create_app(settings: Settings) -> Starlette:
    metrics = Metrics()

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        gateway.upstream = Upstream(settings.servers, settings.tls)
        yield
        await gateway.upstream.close()

    gateway = Gateway(metrics)
    around = [
        Middleware(
            Limits,
            metrics=metrics,
            body_bytes=settings.body_bytes,
            body_seconds=settings.body_seconds,
            at_once=settings.at_once,
            origins=settings.origins,
            local=settings.local,
        )
    ]
    if settings.origins:
        around.insert(
            0,  # so that pages can read refusals, too
            Middleware(
                CORSMiddleware,
                allow_origins=settings.origins,
                allow_methods=["*"],
                allow_headers=["*"],
                expose_headers=["x-request-id", "retry-after", "retry-after-ms"],
            ),
        )
    return Starlette(
        routes=[
            *(
                Route(path, _while_there(endpoint), methods=[method])
                for method, path, endpoint in (
                    ("POST", "/v1/completions", gateway.completions),
                    ("POST", "/v1/chat/completions", gateway.chats),
                    ("GET", "/v1/models", gateway.models),
                    ("GET", "/v1/models/{name:path}", gateway.model),
                    ("POST", "/v1/outcomes", gateway.outcome),
                    ("POST", "/tokenize", gateway.tokenize),
                    ("POST", "/detokenize", gateway.detokenize),
                    ("GET", "/tokenizer_info", gateway.tokenizer_info),
                )
            ),
            Route("/health", gateway.health),
            Route("/metrics", gateway.page_of_metrics),
            Route("/openapi.json", _openapi),
            Route("/docs", _docs),
            *(
                Route(path, _absent, methods=["GET", "POST", "DELETE"])
                for name in _ABSENT
                for path in (f"/v1/{name}", f"/v1/{name}/{{rest:path}}")
            ),
        ],
        middleware=around,
        lifespan=lifespan,
        exception_handlers={
            ApiError: _refused,
            RpcError: _refused,
            HTTPException: _refused,
        },
    )


class Gateway:
    """What each route does, with the daemons behind it."""

    upstream: Upstream  # while the application runs

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._texts: dict[str, TokenTexts] = {}  # by the digest of a model's weights

    async def completions(self, request: Request) -> Response:
        body = await _read(request, bodies.CompletionBody)
        body.check()
        caller = _caller(request)
        prompts = body.prompts()
        if not body.add_special_tokens:
            prompts = [await self._ids(prompt, body, caller) for prompt in prompts]
        form = responses.Completions(body.logprobs, await self._texts_for(body, caller))
        asked = await self._asked(body, prompts, request, caller)
        head = responses.Head(f"cmpl-{request.state.request_id}", int(time.time()))
        if body.stream:
            echoed = [await self._text(prompt, body, caller) for prompt in prompts if body.echo]
            return await self._stream(asked, body, form, head, caller, echoed)
        results = await self._whole(asked, caller)
        choices = _choices(form, results)
        if body.echo:
            choices = await self._echoed(form, choices, results, prompts, body, caller)
        return _whole_answer(form, head, choices, results, nothing_asked=body.max_tokens == 0)

    async def chats(self, request: Request) -> Response:
        body = await _read(request, bodies.ChatBody)
        body.check()
        caller = _caller(request)
        top = (body.top_logprobs or 0) if body.logprobs else None
        form = responses.Chats(top, await self._texts_for(body, caller))
        asked = await self._asked(body, [body.chat()], request, caller)
        head = responses.Head(f"chatcmpl-{request.state.request_id}", int(time.time()))
        if body.stream:
            return await self._stream(asked, body, form, head, caller)
        results = await self._whole(asked, caller)
        return _whole_answer(form, head, _choices(form, results), results)

    async def models(self, request: Request) -> Response:
        models = await self.upstream.models(_caller(request))
        return JSONResponse({"object": "list", "data": [_model(model) for model in models]})

    async def model(self, request: Request) -> Response:
        await self.upstream.models(_caller(request))  # as it is now
        return JSONResponse(
            _model(await self.upstream.model(request.path_params["name"], _caller(request)))
        )

    async def outcome(self, request: Request) -> Response:
        try:
            outcome = Outcome.from_json(await request.body()).to_proto()
        except bodies.UNFIT as error:
            raise ApiError(str(error) or "the body is out of range") from None
        await self.upstream.ask(lambda of: of.experiments.RecordOutcome, outcome, _caller(request))
        return JSONResponse({"recorded": True})

    async def tokenize(self, request: Request) -> Response:
        body = await _read(request, bodies.TokenizeBody)
        caller = _caller(request)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError("give one of prompt and messages", param="prompt")
        if body.prompt is not None:
            ids = await self._encode(body.prompt, body.model, caller, body.add_special_tokens)
        else:
            rendered = await self.upstream.ask(
                lambda of: of.tokenization.ApplyChatTemplate,
                _message(
                    lambda: tokenization_pb2.ApplyChatTemplateRequest(
                        model=body.model, chat=body.chat().to_proto()
                    )
                ),
                caller,
            )
            ids = list(rendered.tokens.ids)
        model = await self.upstream.model(body.model, caller)
        answer = {"count": len(ids), "max_model_len": model.context_length, "tokens": ids}
        if body.return_token_strs:
            texts = await self._texts_of(model, caller)
            answer["token_strs"] = [texts.text(token) for token in ids]
        return JSONResponse(answer)

    async def detokenize(self, request: Request) -> Response:
        body = await _read(request, bodies.DetokenizeBody)
        return JSONResponse(
            {"prompt": await self._decode(body.tokens, body.model, _caller(request))}
        )

    async def tokenizer_info(self, request: Request) -> Response:
        caller = _caller(request)
        await self.upstream.models(caller)  # whether the caller may know
        model = await self.upstream.model(request.query_params.get("model", ""), caller)
        texts = await self._texts_of(model, caller)
        ends = [texts.name(token) for token in model.eos_token_ids]
        begins = None if model.bos_token_id is None else texts.name(model.bos_token_id)
        return JSONResponse(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "model_max_length": model.context_length,
                "bos_token": begins,
                "eos_token": ends[0] if ends else None,
                "pad_token": ends[0] if ends else None,
            }
        )

    async def health(self, request: Request) -> Response:
        """Whether a daemon can be asked. Where they are is nobody's business here."""
        states = await self.upstream.healthy()
        told = {"serving": states.count(True), "servers": len(states)}
        return JSONResponse(told, status_code=200 if any(states) else 503)

    async def page_of_metrics(self, request: Request) -> Response:
        return Response(self._metrics.page(), media_type=CONTENT_TYPE)

    async def _asked(
        self,
        body: bodies.GenerationBody,
        prompts: Sequence[Any],
        request: Request,
        caller: Caller,
    ) -> list[generation_pb2.GenerateRequest]:
        """A request for each prompt. Where neither it nor the model says a temperature, it is 1, as
        OpenAI has it; the daemon would be greedy."""
        name = _id_of(request)
        made = []
        for place, prompt in enumerate(prompts):
            one = body.request(prompt, name if len(prompts) == 1 else f"{name}-{place}")
            if not one.sampling.HasField("temperature"):
                own = (await self.upstream.model(body.model, caller)).sampling
                if own is None or not own.temperature:
                    one.sampling.temperature = 1
            made.append(one)
        return made

    async def _whole(
        self, asked: Sequence[generation_pb2.GenerateRequest], caller: Caller
    ) -> list[generation_pb2.GenerateResult]:
        return await _all(
            self.upstream.ask(lambda of: of.generation.GenerateOnce, each, caller) for each in asked
        )

    async def _stream(
        self,
        asked: Sequence[generation_pb2.GenerateRequest],
        body: bodies.GenerationBody,
        form: responses.Form,
        head: responses.Head,
        caller: Caller,
        echoed: Sequence[str] = (),
    ) -> Response:
        """Once the daemon has taken all of them: what it refuses has a status of its own."""
        begun = await _all(
            (self.upstream.generate(each, caller) for each in asked), undo=Generation.close
        )
        return Streaming(Stream(begun, body, form, head, echoed))

    async def _echoed(
        self,
        form: responses.Completions,
        choices: Sequence[dict[str, Any]],
        results: Sequence[generation_pb2.GenerateResult],
        prompts: Sequence[str | list[int]],
        body: bodies.CompletionBody,
        caller: Caller,
    ) -> list[dict[str, Any]]:
        """The choices, each with its prompt before it."""
        made = []
        n = len(choices) // len(prompts)
        for place, prompt in enumerate(prompts):
            text = await self._text(prompt, body, caller)
            ids = await self._ids(prompt, body, caller) if body.logprobs is not None else []
            made += [
                form.echoed(
                    choice, text, ids, results[place].prompt_logprobs, alone=body.max_tokens == 0
                )
                for choice in choices[n * place : n * (place + 1)]
            ]
        return made

    async def _text(
        self, prompt: str | list[int], body: bodies.CompletionBody, caller: Caller
    ) -> str:
        if isinstance(prompt, str):
            return prompt
        return await self._decode(prompt, body.model, caller)

    async def _ids(
        self, prompt: str | list[int], body: bodies.CompletionBody, caller: Caller
    ) -> list[int]:
        if not isinstance(prompt, str):
            return prompt
        return await self._encode(prompt, body.model, caller, body.add_special_tokens)

    async def _encode(self, text: str, model: str, caller: Caller, special: bool) -> list[int]:
        reply = await self.upstream.ask(
            lambda of: of.tokenization.Tokenize,
            _message(
                lambda: tokenization_pb2.TokenizeRequest(
                    model=model, text=text, add_special_tokens=special
                )
            ),
            caller,
        )
        return list(reply.tokens.ids)

    async def _decode(self, ids: Sequence[int], model: str, caller: Caller) -> str:
        reply = await self.upstream.ask(
            lambda of: of.tokenization.Detokenize,
            tokenization_pb2.DetokenizeRequest(
                model=model, tokens=generation_pb2.TokenIds(ids=ids), skip_special_tokens=False
            ),
            caller,
        )
        return str(reply.text)

    async def _texts_for(self, body: bodies.GenerationBody, caller: Caller) -> TokenTexts | None:
        """If its answer names tokens."""
        if not body.output().logprobs:
            return None
        return await self._texts_of(await self.upstream.model(body.model, caller), caller)

    async def _texts_of(self, model: Model, caller: Caller) -> TokenTexts:
        found = self._texts.get(model.weights)
        if found is None:
            request = model_pb2.GetTokenizerRequest(model=model.name)
            found = TokenTexts.from_json(await self.upstream.tokenizer(request, caller))
            await self.upstream.models(caller)
            now = await self.upstream.model(model.name, caller)
            if not model.weights or now.weights != model.weights:
                return found  # another model may have come by the name meanwhile
            if len(self._texts) >= _MOST_TOKENIZERS:
                del self._texts[next(iter(self._texts))]
            self._texts[model.weights] = found
        return found


class Streaming(StreamingResponse):
    """Ends what its stream has begun, however it ends itself."""

    def __init__(self, stream: "Stream") -> None:
        super().__init__(stream.lines(), media_type="text/event-stream")
        self._stream = stream

    async def __call__(self, *connection: Any) -> None:
        try:
            await super().__call__(*connection)
        finally:
            self._stream.close()


class Stream:
    """Server-sent events of one or more completions, as their messages come."""

    def __init__(
        self,
        begun: Sequence[Generation],
        body: bodies.GenerationBody,
        form: responses.Form,
        head: responses.Head,
        echoed: Sequence[str],
    ) -> None:
        self._begun = begun
        self._form = form
        self._head = head.of(form.part, begun[0].accepted)
        self._echoed = echoed
        wanted = body.stream_options or bodies.StreamOptions()
        self._usage_at_end = wanted.include_usage
        self._usage_always = wanted.continuous_usage_stats
        n = body.n or 1
        self._parts = [responses.Parts(form, n * place, n) for place in range(len(begun))]
        self._summaries: dict[int, generation_pb2.Summary] = {}

    async def lines(self) -> AsyncIterator[bytes]:
        try:
            for place, parts in enumerate(self._parts):
                for choice in parts.begin(self._echoed[place] if self._echoed else ""):
                    yield self._event([choice])
            end: list[dict[str, Any]] = []  # a choice that waits for what is said at the end
            async for place, message in _merged(self._begun):
                kind = message.WhichOneof("event")
                if kind == "summary":
                    self._summaries[place] = message.summary
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
            yield _line(ApiError.from_rpc(error).body())
        yield _DONE

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
        event = {**self._head, "choices": choices, **more}
        if self._usage_at_end:
            event.setdefault("usage", None)
        if self._usage_always and not event.get("usage"):
            prompt = sum(generation.accepted.prompt_tokens for generation in self._begun)
            output = sum(parts.output_tokens for parts in self._parts)
            event["usage"] = responses.usage(prompt, output)
        return _line(event)


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


async def _read(request: Request, kind: type[Body]) -> Body:
    """Raises ApiError that names a field at fault, and tells of some. What is wrong with a body is not
    looked for longer than what is right."""
    try:
        given = from_json(await request.body(), allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(f"Invalid JSON: {error}") from None
    if not isinstance(given, dict):
        raise ApiError("the body must be an object")
    for name in given:
        if name not in kind.model_fields:
            shown = name[:_LONGEST_NAME]
            raise ApiError(f"{shown}: is not known here", param=shown)
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_context=False, include_input=False)
        told = [": ".join(filter(None, (_path(fault["loc"]), fault["msg"]))) for fault in faults]
        # Of a union's members, the one that was meant.
        deepest = max(faults, key=lambda fault: len(fault["loc"]))
        raise ApiError(
            "; ".join(told[:_MOST_FAULTS]), param=_path(deepest["loc"]) or None
        ) from None


def _path(location: tuple[int | str, ...]) -> str:
    """Of a union's members pydantic names the type, which is no field."""
    parts = (str(part) for part in location if not _IS_TYPE.search(str(part)))
    return ".".join(parts)[:_LONGEST_NAME]


def _id_of(request: Request) -> str:
    """What the daemon is to call a request. A client's own name is followed by one of ours: a mesh gives
    several requests the same."""
    given = str(request.state.request_id)
    if "x-request-id" not in request.headers:
        return given
    return f"{given[:_LONGEST_ID]}-{uuid.uuid4().hex[:8]}"


def _caller(request: Request) -> Caller:
    """Raises ApiError for what gRPC cannot carry."""
    metadata = []
    for name in _PASSED_ON:
        value = request.headers.get(name)
        if value is None:
            continue
        if not (value.isascii() and value.isprintable()):
            raise ApiError(f"header {name}: must be printable ASCII")
        metadata.append((name, value))
    deadline = None
    if (text := request.headers.get("timeout")) is not None:
        try:
            timeout = float(text)
        except ValueError:
            timeout = math.nan
        if not 0 < timeout <= _LONGEST_TIMEOUT:
            raise ApiError(f"header timeout: must be seconds above 0, is {text!r:.40}")
        deadline = time.monotonic() + timeout
    return Caller(tuple(metadata), deadline)


def _message(make: Callable[[], Result]) -> Result:
    """Raises ApiError for what a message cannot hold."""
    try:
        return make()
    except bodies.UNFIT as error:
        raise ApiError(str(error) or "a value is out of range") from None


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


def _while_there(endpoint: Callable[[Request], Awaitable[Response]]) -> Any:
    """Ends with its client what a route does, once it has read the body."""

    async def until_gone(request: Request) -> Response:
        await request.body()
        answer = asyncio.ensure_future(endpoint(request))
        gone = asyncio.ensure_future(_until_gone(request))
        try:
            await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise ApiError("the client has gone", status=GONE)
            return answer.result()
        finally:
            gone.cancel()
            answer.cancel()

    return until_gone


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _choices(
    form: responses.Form, results: Sequence[generation_pb2.GenerateResult]
) -> list[dict[str, Any]]:
    choices: list[dict[str, Any]] = []
    for result in results:
        choices += responses.choices_of(form, len(choices), result)
    return choices


def _whole_answer(
    form: responses.Form,
    head: responses.Head,
    choices: Sequence[dict[str, Any]],
    results: Sequence[generation_pb2.GenerateResult],
    *,
    nothing_asked: bool = False,
) -> Response:
    facts = [responses.facts_of(result.accepted, result.summary) for result in results]
    summaries = [result.summary for result in results]
    return JSONResponse(
        {
            **head.of(form.whole, results[0].accepted),
            "choices": choices,
            "usage": responses.usage_of(summaries, nothing_asked=nothing_asked),
            "epikv": facts[0] if len(facts) == 1 else facts,
        }
    )


def _line(event: Any) -> bytes:
    return (
        b"data: " + json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
    )


def _model(model: Model) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": _STARTED,
        "owned_by": "epikv",
        "max_model_len": model.context_length,
    }


async def _absent(request: Request) -> Response:
    raise ApiError(
        f"{request.url.path}: this server generates text; it has no model for this",
        status=404,
        code="unsupported_endpoint",
    )


async def _openapi(request: Request) -> Response:
    return JSONResponse(openapi.document())


async def _docs(request: Request) -> Response:
    return HTMLResponse(openapi.PAGE)


async def _refused(request: Request, error: Exception) -> Response:
    if isinstance(error, RpcError):
        error = ApiError.from_rpc(error)
    if isinstance(error, HTTPException):  # a path or a method that there is not
        error = ApiError(
            f"{request.method} {request.url.path}: {error.detail}", status=error.status_code
        )
    assert isinstance(error, ApiError)
    return JSONResponse(error.body(), error.status, error.headers())

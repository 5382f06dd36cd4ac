"""What each route does."""

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from epikv.gateway import answers, responses
from epikv.gateway import requests as bodies
from epikv.gateway.echo import Echo
from epikv.gateway.errors import ApiError
from epikv.gateway.metrics import CONTENT_TYPE, Metrics
from epikv.gateway.reading import caller_of, fitting, id_of, read
from epikv.gateway.tokens import Tokenizers, TokenTexts
from epikv.gateway.upstream import Caller, Upstream
from epikv.messages import Model
from epikv.outcome import Outcome
from epikv.v1 import generation_pb2, tokenization_pb2

_STARTED = int(time.time())


class Routes:
    """With the daemons behind them."""

    def __init__(self, upstream: Upstream, metrics: Metrics) -> None:
        self._upstream = upstream
        self._tokenizers = Tokenizers(upstream)
        self._metrics = metrics

    async def completions(self, request: Request) -> Response:
        body = await read(request, bodies.CompletionBody)
        body.check()
        caller = replace(caller_of(request), prefix_key=body.prompt_cache_key or "")
        prompts = body.prompts()
        if not body.add_special_tokens:
            prompts = [await self._ids(prompt, body, caller) for prompt in prompts]
        form = responses.Completions(body.logprobs, await self._texts_for(body, caller))
        made = await self._requests(body, prompts, request, caller)
        head = responses.Head(f"cmpl-{request.state.request_id}", int(time.time()))
        asked = answers.Asked(body, made, form, head, caller)
        if body.stream:
            echoes = [await self._echo(prompt, body, caller) for prompt in prompts if body.echo]
            return await answers.stream(asked, self._upstream, echoes)
        results = await answers.results_of(asked, self._upstream)
        choices = answers.choices_of(form, results)
        if body.echo:
            echoes = [await self._echo(prompt, body, caller) for prompt in prompts]
            alone = body.max_tokens == 0
            choices = await answers.echoed(form, choices, results, echoes, alone=alone)
        return answers.whole(asked, choices, results, nothing_asked=body.max_tokens == 0)

    async def chats(self, request: Request) -> Response:
        body = await read(request, bodies.ChatBody)
        body.check()
        caller = replace(caller_of(request), prefix_key=body.prompt_cache_key or "")
        top = (body.top_logprobs or 0) if body.logprobs else None
        form = responses.Chats(top, await self._texts_for(body, caller))
        made = await self._requests(body, [body.chat()], request, caller)
        head = responses.Head(f"chatcmpl-{request.state.request_id}", int(time.time()))
        asked = answers.Asked(body, made, form, head, caller)
        if body.stream:
            return await answers.stream(asked, self._upstream)
        results = await answers.results_of(asked, self._upstream)
        return answers.whole(asked, answers.choices_of(form, results), results)

    async def models(self, request: Request) -> Response:
        models = await self._upstream.models(caller_of(request))
        return JSONResponse({"object": "list", "data": [_model(model) for model in models]})

    async def model(self, request: Request) -> Response:
        await self._upstream.models(caller_of(request))  # as it is now
        return JSONResponse(
            _model(await self._upstream.model(request.path_params["name"], caller_of(request)))
        )

    async def outcome(self, request: Request) -> Response:
        try:
            outcome = Outcome.from_json(await request.body()).to_proto()
        except bodies.UNFIT as error:
            raise ApiError(str(error) or "the body is out of range") from None
        await self._upstream.ask(
            lambda of: of.experiments.RecordOutcome, outcome, caller_of(request)
        )
        return JSONResponse({"recorded": True})

    async def tokenize(self, request: Request) -> Response:
        body = await read(request, bodies.TokenizeBody)
        caller = caller_of(request)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError("give one of prompt and messages", param="prompt")
        if body.prompt is not None:
            ids = await self._tokenizers.encode(
                body.prompt, body.model, caller, body.add_special_tokens
            )
        else:
            rendered = await self._upstream.ask(
                lambda of: of.tokenization.ApplyChatTemplate,
                fitting(
                    lambda: tokenization_pb2.ApplyChatTemplateRequest(
                        model=body.model, chat=body.chat().to_proto()
                    )
                ),
                caller,
            )
            ids = list(rendered.tokens.ids)
        model = await self._upstream.model(body.model, caller)
        answer = {"count": len(ids), "max_model_len": model.context_length, "tokens": ids}
        if body.return_token_strs:
            texts = await self._tokenizers.texts_of(model, caller)
            answer["token_strs"] = [texts.text(token) for token in ids]
        return JSONResponse(answer)

    async def detokenize(self, request: Request) -> Response:
        body = await read(request, bodies.DetokenizeBody)
        return JSONResponse(
            {"prompt": await self._tokenizers.decode(body.tokens, body.model, caller_of(request))}
        )

    async def tokenizer_info(self, request: Request) -> Response:
        caller = caller_of(request)
        await self._upstream.models(caller)  # whether the caller may know
        model = await self._upstream.model(request.query_params.get("model", ""), caller)
        texts = await self._tokenizers.texts_of(model, caller)
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
        states = await self._upstream.healthy()
        told = {"serving": states.count(True), "servers": len(states)}
        return JSONResponse(told, status_code=200 if any(states) else 503)

    async def page_of_metrics(self, request: Request) -> Response:
        return Response(self._metrics.page(), media_type=CONTENT_TYPE)

    async def _requests(
        self,
        body: bodies.GenerationBody,
        prompts: Sequence[Any],
        request: Request,
        caller: Caller,
    ) -> list[generation_pb2.GenerateRequest]:
        """A request for each prompt. Where neither it nor the model says a temperature, it is 1, as
        OpenAI has it; the daemon would be greedy."""
        name = id_of(request)
        made = []
        for place, prompt in enumerate(prompts):
            one = body.request(prompt, name if len(prompts) == 1 else f"{name}-{place}")
            if not one.sampling.HasField("temperature"):
                own = (await self._upstream.model(body.model, caller)).sampling
                if own is None or not own.temperature:
                    one.sampling.temperature = 1
            made.append(one)
        return made

    async def _echo(
        self, prompt: str | list[int], body: bodies.CompletionBody, caller: Caller
    ) -> Echo:
        decode = partial(self._tokenizers.decode, model=body.model, caller=caller)
        text = prompt if isinstance(prompt, str) else await decode(prompt)
        ids = await self._ids(prompt, body, caller)
        return Echo(text, ids, partial(decode, special=False))

    async def _ids(
        self, prompt: str | list[int], body: bodies.CompletionBody, caller: Caller
    ) -> list[int]:
        if not isinstance(prompt, str):
            return prompt
        return await self._tokenizers.encode(prompt, body.model, caller, body.add_special_tokens)

    async def _texts_for(self, body: bodies.GenerationBody, caller: Caller) -> TokenTexts | None:
        """If its answer names tokens."""
        if not body.output().logprobs:
            return None
        return await self._tokenizers.texts_of(
            await self._upstream.model(body.model, caller), caller
        )


def _model(model: Model) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": _STARTED,
        "owned_by": "epikv",
        "max_model_len": model.context_length,
    }

"""The gateway as an ASGI application: its paths, and what stands around them."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from epikv.connection import Tls
from epikv.errors import RpcError
from epikv.gateway import openapi
from epikv.gateway.errors import ApiError
from epikv.gateway.limits import GONE, Limits
from epikv.gateway.metrics import Metrics
from epikv.gateway.routes import Routes
from epikv.gateway.settings import Settings
from epikv.gateway.upstream import Upstream

# What OpenAI's API has and no model here is for.
_ABSENT = ("audio", "batches", "embeddings", "files", "images", "moderations", "responses")
_NO_SCRIPTS = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"}


def create_app(settings: Settings, tls: Tls | None = None) -> Starlette:
    """In the event loop that will run it. tls: of the way to the daemons."""
    metrics = Metrics()
    upstream = Upstream(settings.servers, tls)
    routes = Routes(upstream, metrics)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await upstream.close()

    around = [Middleware(Limits, settings=settings, metrics=metrics)]
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
                    ("POST", "/v1/completions", routes.completions),
                    ("POST", "/v1/chat/completions", routes.chats),
                    ("GET", "/v1/models", routes.models),
                    ("GET", "/v1/models/{name:path}", routes.model),
                    ("POST", "/v1/outcomes", routes.outcome),
                    ("POST", "/tokenize", routes.tokenize),
                    ("POST", "/detokenize", routes.detokenize),
                    ("GET", "/tokenizer_info", routes.tokenizer_info),
                )
            ),
            Route("/health", routes.health),
            Route("/metrics", routes.page_of_metrics),
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


async def _absent(request: Request) -> Response:
    raise ApiError(
        f"{request.url.path}: this server generates text; it has no model for this",
        status=404,
        code="unsupported_endpoint",
    )


async def _openapi(request: Request) -> Response:
    return JSONResponse(openapi.document())


async def _docs(request: Request) -> Response:
    return HTMLResponse(openapi.page(), headers=_NO_SCRIPTS)


async def _refused(request: Request, error: Exception) -> Response:
    if isinstance(error, RpcError):
        error = ApiError.from_rpc(error)
    if isinstance(error, HTTPException):  # a path or a method that there is not
        error = ApiError(
            f"{request.method} {request.url.path}: {error.detail}", status=error.status_code
        )
    assert isinstance(error, ApiError)
    return JSONResponse(error.body(), error.status, error.headers())

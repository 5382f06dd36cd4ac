"""What the routes take, as an OpenAPI document."""

from functools import cache
from importlib.metadata import version
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from epikv.gateway import requests

PAGE = """<!doctype html>
<title>epikv gateway</title>
<meta charset="utf-8">
<link rel="stylesheet" href="https://cdn.jsdelivr.net/npm/swagger-ui-dist@5/swagger-ui.css">
<div id="page"></div>
<script src="https://cdn.jsdelivr.net/npm/swagger-ui-dist@5/swagger-ui-bundle.js"></script>
<script>SwaggerUIBundle({url: "openapi.json", dom_id: "#page"})</script>
"""

_BODIES: dict[str, tuple[type[BaseModel], str]] = {
    "/v1/completions": (requests.CompletionBody, "Text that goes on from prompts."),
    "/v1/chat/completions": (requests.ChatBody, "The next message of a conversation."),
    "/tokenize": (requests.TokenizeBody, "Token ids of a text or a conversation."),
    "/detokenize": (requests.DetokenizeBody, "The text of token ids."),
}
_READS = {
    "/v1/models": "The models that are served.",
    "/v1/models/{name}": "One of them.",
    "/tokenizer_info": "Special tokens of a model's tokenizer.",
    "/health": "Whether a daemon can be asked: 200 or 503.",
    "/metrics": "Series for Prometheus.",
}
_OUTCOME = {
    "type": "object",
    "required": ["request_id", "metric", "value"],
    "additionalProperties": False,
    "properties": {
        "request_id": {"type": "string"},
        "metric": {"type": "string"},
        "value": {"type": ["number", "boolean"]},
        "time": {"type": "string", "format": "date-time"},
        "key": {"type": "string"},
        "tenant": {"type": "string"},
    },
}


@cache
def document() -> dict[str, Any]:
    references, definitions = models_json_schema(
        [(kind, "validation") for kind, _ in _BODIES.values()],
        ref_template="#/components/schemas/{model}",
    )
    paths = {
        path: {"post": _operation(what, references[(kind, "validation")])}
        for path, (kind, what) in _BODIES.items()
    }
    paths["/v1/outcomes"] = {"post": _operation("What a request turned out to be worth.", _OUTCOME)}
    paths |= {path: {"get": _operation(what)} for path, what in _READS.items()}
    return {
        "openapi": "3.1.0",
        "info": {"title": "epikv gateway", "version": version("epikv")},
        "paths": paths,
        "components": {"schemas": definitions["$defs"]},
    }


def _operation(what: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    operation: dict[str, Any] = {"summary": what, "responses": {"200": {"description": "OK"}}}
    if body is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": body}},
        }
    return operation

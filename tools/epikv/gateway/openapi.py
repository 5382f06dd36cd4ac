"""What the routes take, as an OpenAPI document, and as a page of it."""

from functools import cache
from html import escape
from importlib.metadata import version
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from epikv.gateway import requests

_STYLE = """
body { max-width: 60em; margin: 2em auto; padding: 0 1em; font-family: sans-serif; line-height: 1.4 }
td { padding: 0 1.5em 0 0; vertical-align: top }
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


@cache
def page() -> str:
    """For readers: one that asks no other server for anything, and runs no script."""
    told = document()
    parts = [
        f"<h2>{method.upper()} {escape(path)}</h2><p>{escape(operation['summary'])}{_body(operation)}"
        for path, methods in told["paths"].items()
        for method, operation in methods.items()
    ]
    parts += [
        f'<h2 id="{name}">{name}</h2>{_fields(schema)}'
        for name, schema in told["components"]["schemas"].items()
    ]
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>epikv gateway</title>'
        f"<style>{_STYLE}</style><h1>epikv gateway {told['info']['version']}</h1>"
        f'<p>The same <a href="openapi.json">for programs</a>.</p>{"".join(parts)}</html>'
    )


def _body(operation: dict[str, Any]) -> str:
    if "requestBody" not in operation:
        return ""
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    return _fields(schema) if "properties" in schema else f" Body: {_kind(schema)}."


def _fields(schema: dict[str, Any]) -> str:
    needed = schema.get("required", ())
    rows = (
        f"<tr><td><code>{escape(name)}</code><td>{_kind(field)}{', required' * (name in needed)}"
        for name, field in schema["properties"].items()
    )
    return f"<table>{''.join(rows)}</table>"


def _kind(schema: dict[str, Any]) -> str:
    """In words."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f'<a href="#{name}">{name}</a>'
    if "anyOf" in schema:
        return " or ".join(_kind(each) for each in schema["anyOf"] if each != {"type": "null"})
    if "enum" in schema or "const" in schema:
        return escape(", ".join(map(str, schema.get("enum", [schema.get("const")]))))
    kinds = schema.get("type", "any")
    if kinds == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    return " or ".join([kinds] if isinstance(kinds, str) else kinds)

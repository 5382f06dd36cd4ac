"""Bodies that are nearly right, against a gateway and the daemon behind it.

    python tests/soak/bodies.py [--seconds N] [--seed N]

Bodies that the gateway takes are changed: values replaced by odd ones, fields dropped, doubled, moved and
misspelt, bytes cut and flipped. Whatever comes, the answer is an error in OpenAI's body with a status
below 500 but for 503 and 504, or what was asked for; and the gateway answers a sound request afterwards.
Exit status 1, and the body: it is not so.
"""

import argparse
import copy
import http.client
import json
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from epikv.testing import Daemon, Gateway
from soak import sample_model

sys.path.append(str(Path(__file__).resolve().parents[1] / "fixtures" / "python"))
from chat_model import export_chat
from tool_templates import HERMES_THINKING

HELLO = [{"role": "user", "content": "hello"}]
BODIES: list[tuple[str, dict[str, Any]]] = [
    (
        "/v1/completions",
        {
            "model": "sample",
            "prompt": "1 2 3",
            "max_tokens": 4,
            "n": 2,
            "temperature": 0.7,
            "top_p": 0.9,
            "stop": ["x"],
            "seed": 3,
            "logprobs": 2,
            "logit_bias": {"5": 1.5},
            "kv": {
                "policy": "snapkv",
                "budget": 200,
                "positions": "compact",
                "params": {"window": 16, "decorate": []},
                "protect_prompt": False,
                "protected_spans": [[0, 2]],
            },
            "experiment": {"unit_id": "u", "opt_out": False, "covariate": 1.5},
            "steering": {"coefficient": 0.0},
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    ),
    (
        "/v1/completions",
        {"model": "sample", "prompt": [[5, 6], [7]], "max_tokens": 1, "echo": True, "logprobs": 1},
    ),
    (
        "/v1/completions",
        {
            "model": "sample",
            "prompt": ["1", "2"],
            "max_tokens": 3,
            "structured_outputs": {"regex": "[0-9]+"},
        },
    ),
    (
        "/v1/chat/completions",
        {
            "model": "sample",
            "messages": HELLO,
            "max_completion_tokens": 4,
            "logprobs": True,
            "top_logprobs": 2,
            "response_format": {"type": "text"},
            "chat_template_kwargs": {"enable_thinking": True},
            "session": {"id": "s", "budget_tokens": 64, "episodes": 2},
        },
    ),
    (
        "/v1/chat/completions",
        {
            "model": "sample",
            "messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
            "max_tokens": 3,
            "stream": True,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"enum": [1, 2]}},
            },
        },
    ),
    (
        "/v1/chat/completions",
        {
            "model": "tools",
            "messages": [
                *HELLO,
                {
                    "role": "assistant",
                    "content": None,
                    "reasoning_content": "hm",
                    "tool_calls": [
                        {
                            "id": "c1",
                            "type": "function",
                            "function": {"name": "f", "arguments": '{"a": [1, "x"]}'},
                        }
                    ],
                },
                {"role": "tool", "tool_call_id": "c1", "content": "3"},
            ],
            "tools": [
                {
                    "type": "function",
                    "function": {
                        "name": "f",
                        "description": "Finds.",
                        "strict": False,
                        "parameters": {
                            "type": "object",
                            "properties": {"a": {"enum": [1, 2]}},
                            "required": ["a"],
                        },
                    },
                },
                {"type": "function", "function": {"name": "g"}},
            ],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
            "parallel_tool_calls": False,
            "max_tokens": 30,
            "stream": True,
            "kv": {"evict_thinking": True, "protect_thinking": 2},
        },
    ),
    ("/tokenize", {"model": "sample", "prompt": "1 2", "return_token_strs": True}),
    ("/tokenize", {"model": "tools", "messages": HELLO}),
    ("/detokenize", {"model": "sample", "tokens": [5, 6, 7]}),
    ("/v1/outcomes", {"request_id": "r", "metric": "m", "value": 1}),
]
ODD: list[Any] = [
    None, True, False, 0, 1, -1, 2, 17, 2**31, 2**32, 2**63, 2**64, 10**30, 10**400, 0.5, -0.0, 1e-320, 1e308,
    "", "x", "sample", "\x00", "é", "\U0001f600", "1" * 5000, "nan", "50%", [], [[]], [None], [0], {},
    {"": None}, {"a": {"b": [1]}}, ["x", 1], [5] * 300, {"type": "text"}, "full", "epikv_flat",
]  # fmt: skip
LONGEST_OUTPUT = 64  # tokens: what is asked for has to end soon


def places(value: Any, found: list[tuple[Any, Any]] | None = None) -> list[tuple[Any, Any]]:
    """Containers in a body, each with a key of its own."""
    found = [] if found is None else found
    keys = value.keys() if isinstance(value, dict) else range(len(value))
    for key in keys:
        found.append((value, key))
        if isinstance(value[key], dict | list):
            places(value[key], found)
    return found


def changed(body: dict[str, Any], draw: random.Random) -> bytes:
    body = copy.deepcopy(body)
    for _ in range(draw.choice((1, 1, 1, 2, 3, 5))):
        there = places(body)
        if not there:
            break
        container, key = draw.choice(there)
        way = draw.randrange(6)
        if way <= 2:
            container[key] = copy.deepcopy(draw.choice(ODD))
        elif way == 3:
            container.pop(key)
        elif way == 4 and isinstance(container, dict):
            container[draw.choice([key + "s", key[:-1], key.upper(), "\u00e9"])] = container[key]
        else:
            container[key] = [container[key], copy.deepcopy(container[key])]
    for name in ("max_tokens", "max_completion_tokens"):
        if isinstance(body.get(name), int) and body[name] > LONGEST_OUTPUT:
            body[name] = LONGEST_OUTPUT
    if not any(name in body for name in ("max_tokens", "max_completion_tokens")):
        body["max_tokens"] = 4
    data = json.dumps(body, ensure_ascii=draw.random() < 0.5).encode("utf-8", "surrogatepass")
    if draw.random() < 0.15 and data:
        at = draw.randrange(len(data))
        data = draw.choice(
            (data[:at], data[:at] + bytes([draw.randrange(256)]) + data[at + 1 :], data + data[at:])
        )
    return data


def fault(status: int, headers: http.client.HTTPMessage, answer: bytes) -> str | None:
    """What is wrong with an answer."""
    if status >= 500 and status not in (503, 504):
        return f"status {status}"
    if headers.get_content_type() == "text/event-stream":
        return None if answer.endswith(b"data: [DONE]\n\n") else "the stream has no end"
    try:
        read = json.loads(answer)
    except ValueError:
        return "the answer is no JSON"
    if status == 200:
        return None
    if not isinstance(read, dict) or set(read) != {"error"}:
        return "the error has not OpenAI's body"
    if set(read["error"]) != {"message", "type", "param", "code"}:
        return "the error has not OpenAI's fields"
    return None if read["error"]["message"] else "the error says nothing"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=1800)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    given = parser.parse_args()
    draw = random.Random(given.seed)
    statuses: Counter[int] = Counter()
    flags = (
        "--model_name=sample",
        "--threads=1",
        "--session_bytes=50000000",
        "--packet_bytes=50000000",
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        Daemon(
            sample_model(),
            *flags,
            f'--models=path: "{export_chat(Path(folder), "tools", HERMES_THINKING)}" name: "tools"',
        ) as daemon,
        Gateway(daemon.grpc) as gateway,
    ):
        end = time.monotonic() + given.seconds
        while time.monotonic() < end:
            path, body = draw.choice(BODIES)
            data = changed(body, draw)
            connection = http.client.HTTPConnection(gateway.address, timeout=120)
            connection.request("POST", path, data, {"content-type": "application/json"})
            reply = connection.getresponse()
            wrong = fault(reply.status, reply.headers, reply.read())
            connection.close()
            statuses[reply.status] += 1
            if wrong is not None:
                print(f"{path}: {wrong}\n{data!r}\n{gateway.log}", file=sys.stderr)
                return 1
        connection = http.client.HTTPConnection(gateway.address, timeout=120)
        sound = json.dumps({"model": "sample", "prompt": "1 2 3", "max_tokens": 1}).encode()
        connection.request("POST", "/v1/completions", sound)
        reply = connection.getresponse()
        assert reply.status == 200, f"a sound request: {reply.status} {reply.read()!r}; {statuses}"
        assert "Traceback" not in gateway.log, gateway.log
    told = ", ".join(f"{count} of {status}" for status, count in sorted(statuses.items()))
    print(f"seed {given.seed}: {statuses.total()} bodies, {told}: all held")
    return 0


if __name__ == "__main__":
    sys.exit(main())

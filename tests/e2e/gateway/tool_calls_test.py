"""Tools and thinking in chats, through OpenAI's client: of models that say random things, so that what
is well-formed was held to it."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai as sdk
import pytest
import tool_templates as templates
from chat_model import VOCAB, export_chat
from chat_templates import R1_DISTILL
from epikv import Chat, Output, RpcError, Sampling, Stop, Tool
from epikv.testing import Daemon, Gateway
from openai import OpenAI
from page_blocks import ROOT, blocks, commands

FAMILIES = {
    "hermes": templates.HERMES,
    "thinking": templates.HERMES_THINKING,
    "llama3": templates.LLAMA3,
    "mistral": templates.MISTRAL,
}
LOOK_UP: Any = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Finds a lane.",
        "parameters": {
            "type": "object",
            "properties": {
                "lane": {"type": "integer", "minimum": 0, "maximum": 99},
                "of": {"enum": ["keys", "values"]},
            },
            "required": ["lane", "of"],
            "additionalProperties": False,
        },
    },
}
PAUSE: Any = {"type": "function", "function": {"name": "pause"}}
SPECIAL = ["<|bos|>", "<|eos|>", "[TOOL_CALLS]", "<think>", "</think>"]
ASK: Any = [{"role": "user", "content": "which lane?"}]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """With a model a family."""
    folder = tmp_path_factory.mktemp("families")
    templates_of = {**FAMILIES, "thinker": R1_DISTILL}
    paths = [export_chat(folder, name, each, SPECIAL) for name, each in templates_of.items()]
    first, *others = paths
    more = [f'--models=path: "{path}" name: "{path.stem}"' for path in others]
    flags = ("--threads=1", "--kv_pool_bytes=40000000", f"--model_name={first.stem}")
    with Daemon(first, *flags, *more) as running:
        yield running


def ask(model: str, **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": ASK, "seed": 7, "temperature": 1, "max_tokens": 900} | more


@pytest.mark.parametrize("model", FAMILIES)
def test_calls_are_held_to_their_schemas(openai: OpenAI, model: str) -> None:
    asked = ask(model, tools=[LOOK_UP, PAUSE], tool_choice="required", parallel_tool_calls=False)
    whole = openai.chat.completions.create(**asked)
    [choice] = whole.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    [call] = choice.message.tool_calls
    arguments = json.loads(call.function.arguments)
    if call.function.name == "look_up":
        assert 0 <= arguments["lane"] < 100 and arguments["of"] in ("keys", "values")
    else:
        assert (call.function.name, arguments) == ("pause", {})
    assert len(call.id) == (9 if model == "mistral" else 29)

    parts = list(openai.chat.completions.create(**asked, stream=True))
    told = [
        piece for part in parts for each in part.choices for piece in each.delta.tool_calls or ()
    ]
    assert [piece.index for piece in told] == [0] * len(told)
    assert told[0].id and told[0].function.name == call.function.name
    assert not any(piece.id or piece.function.name for piece in told[1:])
    assert "".join(piece.function.arguments for piece in told) == call.function.arguments
    assert parts[-1].choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize("model", FAMILIES)
def test_the_one_that_is_named_is_called(openai: OpenAI, model: str) -> None:
    one = {"type": "function", "function": {"name": "look_up"}}
    for seed in range(3):
        whole = openai.chat.completions.create(
            **ask(model, tools=[PAUSE, LOOK_UP], tool_choice=one, seed=seed)
        )
        [call] = whole.choices[0].message.tool_calls
        assert call.function.name == "look_up"


@pytest.mark.parametrize("model", FAMILIES)
def test_results_go_back(openai: OpenAI, model: str) -> None:
    """What the client got is what it sends, in as many rounds as it likes."""
    messages = list(ASK)
    for _ in range(3):
        answer = openai.chat.completions.create(
            **ask(
                model,
                messages=messages,
                tools=[LOOK_UP],
                tool_choice="required",
                parallel_tool_calls=False,
            )
        )
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "lane 3"})
    assert openai.chat.completions.create(**ask(model, messages=messages, max_tokens=5)).choices


def test_nothing_is_called_where_nothing_may_be(openai: OpenAI) -> None:
    for model in FAMILIES:
        whole = openai.chat.completions.create(
            **ask(model, tools=[LOOK_UP], tool_choice="none", max_tokens=40)
        )
        assert whole.choices[0].message.tool_calls is None
        assert whole.choices[0].finish_reason in ("length", "stop")
        free = openai.chat.completions.create(**ask(model, tools=[LOOK_UP], max_tokens=40))
        assert free.choices[0].finish_reason in ("length", "stop", "tool_calls")


@pytest.mark.parametrize(
    ("more", "status", "param", "message"),
    [
        ({"tool_choice": "required"}, 400, "tool_choice", "no tools to choose from"),
        ({"tools": [LOOK_UP, LOOK_UP]}, 400, "tools[1].name", "another tool's, too"),
        (
            {"tools": [{"type": "function", "function": {"name": "a b"}}]},
            400,
            "tools[0].name",
            "1 to 64 letters",
        ),
        (
            {
                "tools": [PAUSE],
                "tool_choice": {"type": "function", "function": {"name": "x"}},
            },
            400,
            "tool_choice.name",
            "'x' is no tool's",
        ),
        (
            {
                "tools": [
                    {
                        "type": "function",
                        "function": {
                            "name": "f",
                            "strict": True,
                            "parameters": {"type": "object", "minProperties": 1},
                        },
                    }
                ]
            },
            400,
            "tools",
            "of 'f': .*minProperties",
        ),
        (
            {"tools": [PAUSE], "response_format": {"type": "json_object"}},
            400,
            "response_format",
            "together with chat.tools",
        ),
        (
            {"messages": [*ASK, {"role": "tool", "tool_call_id": "x", "content": "y"}]},
            400,
            "messages[1].tool_call_id",
            "'x' is the id of no call",
        ),
        (
            {"tools": [{"type": "custom", "custom": {"name": "x"}}]},
            400,
            None,
            "tools.0.type: Input should be 'function'",
        ),
    ],
)
def test_what_is_wrong_is_named(
    openai: OpenAI, more: dict[str, Any], status: int, param: str | None, message: str
) -> None:
    with pytest.raises(sdk.APIStatusError, match=message) as caught:
        openai.chat.completions.create(**ask("hermes", **more))
    assert caught.value.status_code == status
    if param is not None:
        assert caught.value.param == param


def test_a_call_that_is_cut_is_not_said_to_be_whole(openai: OpenAI) -> None:
    cut = openai.chat.completions.create(
        **ask("hermes", tools=[LOOK_UP], tool_choice="required", stop=['"of'])
    )
    assert cut.choices[0].finish_reason == "stop"
    short = openai.chat.completions.create(
        **ask("hermes", tools=[LOOK_UP], tool_choice="required", max_tokens=30)
    )
    assert short.choices[0].finish_reason == "length"


def test_thinking_is_told_apart(openai: OpenAI) -> None:
    """Its tag is made likely, and comes after some tokens."""
    asked = ask(
        "thinker",
        max_tokens=80,
        seed=1,
        logit_bias={str(VOCAB - 1): 1.5},
        extra_body={"kv": {"evict_thinking": True, "protect_thinking": 2}, "ignore_eos": True},
    )
    whole = openai.chat.completions.create(**asked)
    message = whole.choices[0].message
    reasoning = message.model_extra["reasoning_content"]
    assert reasoning and "</think>" not in reasoning and message.content
    thinking = whole.usage.completion_tokens_details.reasoning_tokens
    assert 2 < thinking < 80
    facts = whole.model_extra["epikv"]["kv"]
    assert (facts["policy"], facts["evicted_tokens"]) == ("full", thinking - 2)

    parts = [
        each.delta
        for part in openai.chat.completions.create(**asked, stream=True)
        for each in part.choices
    ]
    told = [part.model_extra.get("reasoning_content") or "" for part in parts]
    assert "".join(told) == reasoning
    assert "".join(part.content or "" for part in parts) == message.content


def test_the_page_shows_it(gateway: Gateway) -> None:
    page = ROOT / "docs/clients.md"
    [block] = [each for each in blocks(page) if Path(__file__).name in each.note]
    text = commands(block).replace("127.0.0.1:8000", gateway.address).replace('"qwen"', '"hermes"')
    run = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stderr
    called, ended = run.stdout.splitlines()
    assert re.fullmatch(r"look_up \{'lane': -?\d+\}", called)
    assert ended in ("length", "stop", "tool_calls")


def test_the_contract_has_it_all(daemon: Daemon) -> None:
    with daemon.client() as client:
        result = client.generate_once(
            Chat(ASK, tools=[Tool("pause")], tool_choice="required", single_call=True),
            sampling=Sampling(temperature=1, seed=3),
            stop=Stop(400),
            output=Output(answer=True, text=False),
            model="hermes",
        )
        assert result.answer is not None and (result.text, result.answer.content) == ("", "")
        [call] = result.answer.tool_calls
        assert (call.name, json.loads(call.arguments)) == ("pause", {})
        chat = client.model("hermes").chat
        assert chat is not None and (chat.tools_refusal, chat.several_calls) == ("", True)
        assert client.model("thinker").chat.tools_refusal
        with pytest.raises(RpcError, match="takes no tools") as caught:
            client.apply_chat_template(Chat(ASK, tools=[Tool("pause")]), model="thinker")
        assert caught.value.reason == "CHAT_FORMAT"
        with pytest.raises(RpcError, match="needs output.answer"):
            client.generate_once(Chat(ASK, tools=[Tool("pause")]), model="hermes")
        with pytest.raises(RpcError, match="needs a chat prompt"):
            client.generate_once("x", output=Output(answer=True), model="hermes")

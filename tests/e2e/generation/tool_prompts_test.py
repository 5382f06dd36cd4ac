"""Tools in conversations: the prompts that the daemon makes of them are those of transformers."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tool_templates as templates
from chat_model import export_chat
from epikv import Chat, Client, RpcError, Tool
from epikv.testing import Daemon
from page_blocks import ROOT, blocks, commands
from transformers import AutoTokenizer

FAMILIES = {
    "hermes": templates.HERMES,
    "thinking": templates.HERMES_THINKING,
    "llama3": templates.LLAMA3,
    "mistral": templates.MISTRAL,
}
TOOLS = [
    Tool(
        "look_up",
        'Finds "lanes", 世\n in any',
        {"type": "object", "properties": {"of": {"enum": ["k", 'v"\\']}, "é": {"type": "number"}}},
    ),
    Tool("pause"),
    Tool("stop_all", "Stops.", {"type": "object", "properties": {}, "required": []}),
]
SYSTEM = {"role": "system", "content": "be brief. "}


def called(*names: str, said: str = "", thought: str = "", first: int = 1) -> dict[str, Any]:
    """An assistant's message."""
    arguments = [
        {"of": "k", "é": [1, 2.5, None, True, {"deep": 'a "b"\n世'}]},
        {},
        {"n": -12345678901234567890},
    ]
    calls = [
        {"id": f"call0000{first + i}", "name": name, "arguments": arguments[(first + i) % 3]}
        for i, name in enumerate(names)
    ]
    message: dict[str, Any] = {"role": "assistant", "content": said, "tool_calls": calls}
    return message | ({"reasoning": thought} if thought else {})


def result(content: str, number: int = 1) -> dict[str, Any]:
    return {"role": "tool", "content": content, "tool_call_id": f"call0000{number}"}


ONE = [{"role": "user", "content": "which lane?"}]
LOOP = [*ONE, called("look_up"), result('{"lane": 3}')]
TWICE = [*LOOP, called("pause", first=2), result(" waited\n", 2)]
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": ONE,
    "turns": [*ONE, {"role": "assistant", "content": "three"}, {"role": "user", "content": "why?"}],
    "loop": LOOP,
    "twice": TWICE,
    "answered": [
        *LOOP,
        {"role": "assistant", "content": "lane 3"},
        {"role": "user", "content": "ok"},
    ],
    "several": [*ONE, called("look_up", "pause"), result("a"), result("b", 2)],
    "said": [*ONE, called("look_up", said="I look."), result("<tool_response>é</tool_response>")],
    "thought": [*ONE, called("look_up", said="I look.", thought="\nhm, é\n"), result("3")],
    "again": [*TWICE, {"role": "assistant", "content": "done"}, *ONE],
}


def as_transformers_has_them(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    names = {call["id"]: call["name"] for m in messages for call in m.get("tool_calls", ())}
    made = []
    for message in messages:
        theirs = dict(message)
        if calls := theirs.pop("tool_calls", None):
            theirs["tool_calls"] = [
                {
                    "id": call["id"],
                    "type": "function",
                    "function": {"name": call["name"], "arguments": call["arguments"]},
                }
                for call in calls
            ]
        if "tool_call_id" in theirs:
            theirs["name"] = names[theirs["tool_call_id"]]
        if thought := theirs.pop("reasoning", None):
            theirs["reasoning_content"] = thought
        made.append(theirs)
    return made


def function(tool: Tool) -> dict[str, Any]:
    of: dict[str, Any] = {"name": tool.name}
    of |= {"description": tool.description} if tool.description else {}
    of |= {"parameters": tool.parameters} if tool.parameters else {}
    return {"type": "function", "function": of}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("tools")
    for name, template in FAMILIES.items():
        export_chat(folder, name, template)
    return {name: folder / name for name in FAMILIES}


@pytest.fixture(scope="module")
def client(checkpoints: dict[str, Path]) -> Iterator[Client]:
    first, *others = checkpoints
    more = [f'--models=path: "{checkpoints[name]}.pt" name: "{name}"' for name in others]
    flags = ("--threads=1", "--kv_pool_bytes=20000000", f"--model_name={first}")
    with Daemon(Path(f"{checkpoints[first]}.pt"), *flags, *more) as daemon:
        with daemon.client() as made:
            yield made


def test_the_page_calls_a_tool(checkpoints: dict[str, Path]) -> None:
    [block] = [each for each in blocks(ROOT / "docs/models.md") if Path(__file__).name in each.note]
    with Daemon(Path(f"{checkpoints['hermes']}.pt"), "--threads=1") as daemon:
        text = commands(block).replace("localhost:50051", daemon.grpc)
        run = subprocess.run(
            [sys.executable, "-c", text], capture_output=True, text=True, timeout=120, check=False
        )
    assert run.returncode == 0, run.stderr
    assert re.match(r'look_up \{("lane": \d)?', run.stdout)


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_are_those_of_transformers(
    client: Client, checkpoints: dict[str, Path], family: str
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoints[family])
    refused = set()
    for name, turns in CONVERSATIONS.items():
        for system in (False, True):
            messages = [SYSTEM, *turns] if system else turns
            for tools in ([], TOOLS[1:2], TOOLS):
                try:
                    ours = client.apply_chat_template(Chat(messages, tools=tools), model=family)
                except RpcError as error:
                    assert error.reason == "CHAT_FORMAT", error
                    refused.add(name)
                    continue
                theirs = tokenizer.apply_chat_template(
                    as_transformers_has_them(messages),
                    tools=[function(tool) for tool in tools] or None,
                    tokenize=False,
                    add_generation_prompt=True,
                )
                assert ours.text == theirs, (name, system, len(tools))
    assert refused == ({"several"} if family == "llama3" else set())

"""Clients that share no code with this project, from tests/clients: the contract alone suffices."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from epikv import Accepted, Client, Delta, Kv, Output, Stop, Summary
from epikv.sample import problem
from epikv.testing import Daemon

CLIENTS = Path(__file__).parents[2] / "clients"
PROMPT, BUDGET, OUTPUT = problem(3).prompt, 120, 150
REQUEST = {
    "text": PROMPT,
    "kv": {"policy": "sliding", "max_tokens": BUDGET},
    "stop": {"max_output_tokens": OUTPUT},
    "output": {"token_ids": True},
}
BAD_REQUEST = {"text": PROMPT, "kv": {"policy": "nonesuch"}, "sampling": {"top_p": 7}}


@pytest.mark.parametrize(
    "command",
    [[sys.executable, str(CLIENTS / "reflection.py")], ["node", str(CLIENTS / "node/client.js")]],
    ids=["grpcio by reflection", "grpc-js from the protos"],
)
def test_a_foreign_client_streams_and_reads_errors(
    daemon: Daemon, client: Client, command: list[str]
) -> None:
    ended = subprocess.run(
        [*command, daemon.grpc, json.dumps(REQUEST), json.dumps(BAD_REQUEST)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout)
    kinds = [next(iter(event)) for event in found["events"]]
    assert kinds[0] == "accepted" and kinds[-1] == "summary"
    assert set(kinds[1:-1]) == {"delta"} and len(kinds) > 3, "streamed, not sent at once"

    accepted, *deltas, summary = (next(iter(event.values())) for event in found["events"])
    ours = list(
        client.generate(
            PROMPT,
            kv=Kv("sliding", BUDGET),
            stop=Stop(OUTPUT),
            output=Output(token_ids=True),
        )
    )
    assert isinstance(ours[0], Accepted) and isinstance(ours[-1], Summary)
    own_deltas = [event for event in ours if isinstance(event, Delta)]
    assert accepted["kv"]["policy"] == "sliding"
    assert accepted["prompt_tokens"] == ours[0].prompt_tokens
    assert "".join(delta["text"] for delta in deltas) == "".join(d.text for d in own_deltas)
    tokens = [token for delta in deltas for token in delta["token_ids"]]
    assert tokens == [token for delta in own_deltas for token in delta.token_ids]
    assert summary["kv"]["evicted_tokens"] == ours[-1].kv.evicted_tokens > 0
    assert summary["finish_reason"] in ("FINISH_REASON_LENGTH", "FINISH_REASON_END")

    error = found["error"]
    assert error["code"] == "INVALID_ARGUMENT" and error["message"]
    info, request = (
        next(detail for detail in error["details"] if detail["type"] == kind)
        for kind in ("ErrorInfo", "BadRequest")
    )
    assert (info["reason"], info["domain"]) == ("INVALID_REQUEST", "epikv")
    fields = {violation["field"] for violation in request["field_violations"]}
    assert fields == {"kv.policy", "sampling.top_p"}

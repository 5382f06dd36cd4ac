"""OpenAI's client for Node, unmodified, through the gateway."""

import json
import subprocess
from pathlib import Path

from epikv import Kv, Sampling, Stop
from epikv.sample import problem
from epikv.scrape import scrape
from epikv.testing import Daemon, Gateway
from waiting import eventually

PROGRAM = Path(__file__).parents[2] / "clients/node/openai_client.js"
PROMPT = problem(3).prompt


def test_it_streams_reads_errors_and_leaves(daemon: Daemon, gateway: Gateway) -> None:
    ended = subprocess.run(
        ["node", str(PROGRAM), f"{gateway.url}/v1", "sample", PROMPT],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    with daemon.client() as client:
        plain = client.generate_once(
            PROMPT, kv=Kv("sliding", 120), sampling=Sampling(temperature=0), stop=Stop(40)
        )
    assert found["models"] == ["sample"]
    assert found["text"] == found["streamed"]["text"] == plain.text
    assert found["usage"] == found["streamed"]["usage"]
    assert found["usage"]["completion_tokens"] == plain.summary.usage.output_tokens
    assert found["kv"]["peak_tokens"] == plain.summary.kv.peak_tokens
    assert found["streamed"]["finish"] == "length"
    assert found["chat"]["role"] == "assistant" and found["helper"] == found["chat"]["content"]
    assert found["errors"] == {
        "policy": {
            "kind": "BadRequestError",
            "status": 400,
            "param": "kv.policy",
            "code": "invalid_request",
        },
        "model": {
            "kind": "NotFoundError",
            "status": 404,
            "param": None,
            "code": "model_not_found",
        },
        "embeddings": {
            "kind": "NotFoundError",
            "status": 404,
            "param": None,
            "code": "unsupported_endpoint",
        },
        "deadline": found["errors"]["deadline"],
    }
    assert found["errors"]["deadline"]["status"] == 504
    eventually(lambda: scrape(daemon.metrics).total("epikv_requests_running") == 0)
    assert scrape(daemon.metrics).total("epikv_requests_finished_total", reason="cancelled") == 1

"""Policies keep what kvpress keeps: the same checkpoint, the same prompt, the same budget, its own run."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from epikv import EvictionEvent, Kv, Output, Stop
from epikv.sample import problem
from epikv.testing import Daemon

ROOT = Path(__file__).parents[3]
CLIENTS = ROOT / "build" / "clients"
PROGRAM = ROOT / "tests" / "clients" / "python" / "kvpress_kept.py"
PROMPT, BUDGET = problem(9).prompt, 60
ALL_MAY_GO = {"protect_prompt": False, "sink_tokens": 0, "recent_tokens": 0}
# By press: its arguments, and the same of ours.
PRESSES = {
    "KnormPress": ({}, Kv("knorm", BUDGET, **ALL_MAY_GO)),
    "KeyDiffPress": ({}, Kv("keydiff", BUDGET, **ALL_MAY_GO)),
    "SnapKVPress": (
        {"window_size": 32, "kernel_size": 5},
        Kv("snapkv", BUDGET, params={"window": 32}, **ALL_MAY_GO),
    ),
    "CURPress": ({}, Kv("cur", BUDGET, **ALL_MAY_GO)),
    "StreamingLLMPress": (
        {"n_sink": 4},
        Kv("streaming_llm", BUDGET, protect_prompt=False, sink_tokens=4, recent_tokens=BUDGET - 4),
    ),
}


@pytest.fixture(scope="module")
def daemon(sample_model: Path) -> Iterator[Daemon]:
    with Daemon(sample_model, "--threads=1") as running:
        yield running


@pytest.fixture(scope="module")
def theirs(sample_directory: Path) -> dict[str, Any]:
    """What kvpress_kept.py prints."""
    assert (CLIENTS / "stamp").exists(), "run tests/clients/python/install.sh first"
    command = [str(CLIENTS / "bin" / "python"), str(PROGRAM), str(sample_directory), PROMPT]
    presses = {name: params for name, (params, _) in PRESSES.items()}
    ended = subprocess.run(
        [*command, str(BUDGET), json.dumps(presses)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


@pytest.mark.parametrize("press", PRESSES)
def test_the_same_tokens_are_kept(daemon: Daemon, theirs: dict[str, Any], press: str) -> None:
    _, kv = PRESSES[press]
    gone: dict[tuple[int | None, int | None], set[int]] = {}
    with daemon.client() as client:
        # The prompt is evicted once it is cached: the first of two tokens follows it.
        for event in client.generate(
            PROMPT, kv=kv, stop=Stop(2, ignore_eos=True), output=Output(kv_trace=True)
        ):
            if isinstance(event, EvictionEvent):
                for victims in event.victims:
                    gone.setdefault((victims.layer, victims.head), set()).update(victims.index)
    for layer, heads in enumerate(theirs["kept"][press]):
        for head, kept in enumerate(heads):
            dropped = gone.get((layer, head)) or gone[None, None]
            assert set(range(theirs["tokens"])) - dropped == set(kept), (layer, head)
            assert len(kept) == BUDGET

"""Tools of others, unmodified, through the gateway: the blocks of docs/clients.md that ask with them."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from epikv.scrape import scrape
from epikv.testing import Daemon, Gateway
from page_blocks import ROOT, Block, blocks, commands

PAGE = ROOT / "docs" / "clients.md"
CLIENTS = ROOT / "build" / "clients"
TOOLS = {"aiperf", "guidellm", "litellm", "lm_eval"}
# lm-eval and guidellm ask nobody for tokenizers; aiperf finds no local ones if told so.
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}


def block(tool: str) -> Block:
    [found] = [each for each in blocks(PAGE) if "tools_test" in each.note and tool in each.text]
    return found


def run(tool: str, gateway: Gateway, directory: Path, folder: Path) -> str:
    """Runs a tool's block, and returns what it printed."""
    assert (CLIENTS / "stamp").exists(), "run tests/clients/python/install.sh first"
    shutil.copytree(ROOT / "docs" / "examples", folder / "docs" / "examples")
    (folder / "DIR").symlink_to(directory)
    text = commands(block(tool)).replace("127.0.0.1:8000", gateway.address)
    program = [CLIENTS / "bin" / "python"] if block(tool).language == "python" else ["bash", "-e"]
    environment = {
        **os.environ,
        "PATH": f"{CLIENTS / 'bin'}:{os.environ['PATH']}",
        "HOME": str(folder),
        "OMP_NUM_THREADS": "1",
        **(OFFLINE if tool != "aiperf" else {}),
    }
    ended = subprocess.run(
        [*program, "-c", text],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_every_tool_has_its_block() -> None:
    of_tools = [each for each in blocks(PAGE) if "tools_test" in each.note]
    assert len(of_tools) == len(TOOLS) == len({block(tool) for tool in TOOLS})


def test_litellm_and_langchain(
    gateway: Gateway, sample_directory: Path, tmp_path: Path, daemon: Daemon
) -> None:
    reasons = run("litellm", gateway, sample_directory, tmp_path).split()
    # As OpenAI's, answers are sampled: either may end by itself or not.
    assert len(reasons) == 2 and {*reasons} <= {"stop", "length"}
    page = scrape(daemon.metrics)
    assert page.total("epikv_requests_finished_total", policy="sliding") == 2, "with their budget"


@pytest.mark.nightly
def test_lm_eval(gateway: Gateway, sample_directory: Path, tmp_path: Path) -> None:
    """Its log-likelihoods are those of transformers."""
    run("lm_eval", gateway, sample_directory, tmp_path)
    [results] = tmp_path.glob("lm_eval/sample/results_*.json")
    scores = json.loads(results.read_text())["results"]
    assert scores["epikv_recall_choice"]["acc,none"] == 1
    assert scores["epikv_recall"]["exact_match,answer"] == 1
    [samples] = tmp_path.glob("lm_eval/sample/samples_epikv_recall_choice_*.jsonl")
    lines = [json.loads(line) for line in samples.read_text().splitlines()]
    assert len(lines) == 16
    told = {
        (line["doc"]["context"], choice): (float(resp[0][0]), resp[0][1] in (True, "True"))
        for line in lines
        for choice, resp in zip(line["doc"]["choices"], line["resps"], strict=True)
    }
    assert len(told) == 64
    for (context, choice), found in told.items():
        total, greedy = by_transformers(sample_directory, context, f" {choice}")
        assert found[0] == pytest.approx(total, abs=1e-3)
        assert found[1] == greedy


def by_transformers(directory: Path, context: str, choice: str) -> tuple[float, bool]:
    """The log-likelihood of the choice's tokens, and whether each is the likeliest."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    whole, begin = tokenizer.encode(context + choice), len(tokenizer.encode(context))
    with torch.no_grad():
        logprobs = model(torch.tensor([whole])).logits[0].log_softmax(-1)
    places = range(begin - 1, len(whole) - 1)
    total = sum(float(logprobs[place, whole[place + 1]]) for place in places)
    return total, all(int(logprobs[place].argmax()) == whole[place + 1] for place in places)


@pytest.mark.nightly
def test_guidellm(gateway: Gateway, sample_directory: Path, tmp_path: Path) -> None:
    run("guidellm", gateway, sample_directory, tmp_path)
    [benchmark] = json.loads((tmp_path / "guidellm.json").read_text())["benchmarks"]
    requests = benchmark["metrics"]["request_totals"]
    assert (requests["successful"], requests["errored"]) == (40, 0)
    made = benchmark["metrics"]["output_token_count"]["successful"]
    assert made["mean"] == 20, "it asked to go on beyond the end, and reads the usage"


@pytest.mark.nightly
def test_aiperf(gateway: Gateway, sample_directory: Path, tmp_path: Path) -> None:
    run("aiperf", gateway, sample_directory, tmp_path)
    [report] = tmp_path.glob("artifacts/*/profile_export_aiperf.json")
    found = json.loads(report.read_text())
    assert found["request_count"]["avg"] == 40
    assert found["time_to_first_token"]["avg"] > 0
    assert found.get("error_request_count", {"avg": 0})["avg"] == 0

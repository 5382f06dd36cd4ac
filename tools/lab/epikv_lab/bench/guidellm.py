"""guidellm, unmodified, through `epikv gateway`, beside `epikv bench load` at the daemon behind it.

Both send the same load to one daemon of one thread, in turns: prompts and outputs of fixed lengths, so
many at once, the next as soon as one has ended. What they then say of throughput and of first tokens is to
be the same. The model is of the 0.5B shape, so that the way through the gateway is little of the time; all
of them share the machine. guidellm comes with `bash tests/clients/python/install.sh`.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
from epikv import harness
from epikv.export.synthetic import word_tokenizer
from epikv.stats import bootstrap
from epikv.testing import Gateway

from epikv_lab.bench.gateway import LARGE
from epikv_lab.bench.targets import Target, finish

CLIENTS = Path(__file__).resolve().parents[4] / "build" / "clients"
NEAR = 0.05  # of each other


@click.command("guidellm")
@click.option("--rounds", default=3, show_default=True, help="Of each, in turns.")
@click.option("--concurrency", default=4, show_default=True, help="Requests at once.")
@click.option("--requests", default=24, show_default=True, help="Of a round.")
@click.option("--prompt", default=128, show_default=True, help="Tokens.")
@click.option("--output", default=32, show_default=True, help="Tokens.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path))
def command(
    rounds: int, concurrency: int, requests: int, prompt: int, output: int, json_file: Path | None
) -> None:
    """What guidellm says of throughput and first tokens, over what `epikv bench load` says."""
    program = CLIENTS / "bin" / "guidellm"
    if not program.exists():
        raise click.ClickException(
            "guidellm is not there: run `bash tests/clients/python/install.sh`"
        )
    found: dict[str, list[dict[str, float]]] = {"load": [], "guidellm": []}
    with (
        tempfile.TemporaryDirectory() as name,
        harness.serving(
            lambda: harness.random_model("gateway", **LARGE),
            ("--threads=1", "--kv_pool_bytes=1073741824"),
            server=None,
            metrics=None,
            binary=None,
        ) as served,
        Gateway(served.address) as gateway,
    ):
        folder = Path(name)
        _write_data(folder, requests, prompt, output)
        load = [
            *(sys.executable, "-c", "from epikv.cli import main; main()", "bench", "load"),
            *("--server", served.address),
            *("--prompt", str(prompt), "--output", str(output), "--json", str(folder / "load")),
            *("--concurrency", str(concurrency), "--requests", str(requests)),
        ]
        guide = [
            *(str(program), "run", "--disable-progress", "--tokenizer", f"kind=hf_auto,model={name}"),
            *("--backend", f"kind=openai_http,target=http://{gateway.address},model=gateway,"
            "request_format=/v1/completions"),
            *("--profile", f"kind=concurrent,streams={concurrency}"),
            *("--constraint", f"kind=max_requests,count={requests}"),
            *("--data", f"kind=json_file,path={folder / 'prompts.jsonl'}"),
            *("--output", f"kind=json,path={folder / 'guidellm.json'}"),
        ]  # fmt: skip
        for number in range(rounds):
            for which in ("load", "guidellm") if number % 2 else ("guidellm", "load"):
                _run(guide if which == "guidellm" else load)
                told = json.loads(
                    (folder / ("guidellm.json" if which == "guidellm" else "load")).read_text()
                )
                found[which].append(_of_guidellm(told) if which == "guidellm" else _of_load(told))
            harness.say(
                f"round {number + 1}: {found['load'][-1]}, guidellm {found['guidellm'][-1]}"
            )
    targets = []
    for metric in ("output_tokens_per_second", "first_token_seconds"):
        ratio = bootstrap(
            [
                guide_[metric] / load_[metric]
                for guide_, load_ in zip(found["guidellm"], found["load"], strict=True)
            ]
        )
        targets += [
            Target(metric, ratio, 1 - NEAR, at_least=True),
            Target(metric, ratio, 1 + NEAR),
        ]
    finish("guidellm", targets, found, json_file)


def _write_data(folder: Path, requests: int, prompt: int, output: int) -> None:
    """The tokenizer, and prompts of other words each: nothing of one is cached for the next."""
    word_tokenizer(LARGE["vocab"]).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    draw = random.Random(0)
    with (folder / "prompts.jsonl").open("w") as file:
        for _ in range(requests):
            words = " ".join(f"w{draw.randrange(LARGE['vocab'])}" for _ in range(prompt))
            line = {"prompt": words, "prompt_tokens_count": prompt, "output_tokens_count": output}
            file.write(json.dumps(line) + "\n")


def _run(arguments: list[str]) -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    ended = subprocess.run(arguments, check=False, capture_output=True, text=True, env=environment)
    if ended.returncode != 0:
        raise click.ClickException(f"{' '.join(arguments)}\n{ended.stdout}{ended.stderr}")


def _of_load(told: dict[str, Any]) -> dict[str, float]:
    total = told["total"]
    return {
        "requests": total["ok"],
        "output_tokens_per_second": total["output_tokens_per_second"],
        "first_token_seconds": total["time_to_first_token"]["p50"],
    }


def _of_guidellm(told: dict[str, Any]) -> dict[str, float]:
    metrics = told["benchmarks"][0]["metrics"]
    return {
        "requests": metrics["request_totals"]["successful"],
        "prompt_tokens": metrics["prompt_token_count"]["successful"]["median"],
        "output_tokens": metrics["output_token_count"]["successful"]["median"],
        "output_tokens_per_second": metrics["output_tokens_per_second"]["successful"]["mean"],
        "first_token_seconds": metrics["time_to_first_token_ms"]["successful"]["median"] / 1e3,
    }

"""`python -m epikv_lab.export.large`: what it takes to export and serve a model of a real one's size.

A checkpoint of random weights is written in shards, exported by `epikv export`, and served for a
few tokens. Each stage is a process of its own; printed is how long it took and the most memory it
had: all that was resident, mapped files included, and of that what is its own and could not have
been dropped.
"""

import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from epikv import processes
from epikv.export.exporter import DTYPES
from epikv.export.synthetic import write_directory
from epikv.options import Kv, Output, Stop
from epikv.testing import Daemon

_LLAMA: dict[str, Any] = {
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "vocab_size": 128256,
}
# Of config.json: as meta-llama/Llama-3.1-8B and Llama-3.2-1B have them; the first with half of its
# layers; and one for tests.
SHAPES: dict[str, dict[str, Any]] = {
    "8b": {
        **_LLAMA,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
    },
    "1b": {
        **_LLAMA,
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 8192,
        "tie_word_embeddings": True,
    },
    "tiny": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "vocab_size": 331,
    },
}
# As Qwen/Qwen2.5-0.5B has it, but for the biases.
SHAPES["0.5b"] = {
    "max_position_embeddings": 32768,
    "rope_theta": 1000000.0,
    "vocab_size": 151936,
    "hidden_size": 896,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4864,
    "tie_word_embeddings": True,
}
SHAPES["4b"] = {**SHAPES["8b"], "num_hidden_layers": 16}
SHARDS = 8  # about
PROMPT, OUTPUTS, BUDGET = 32, 16, 40  # tokens
GIB = 1 << 30


@dataclass
class Peak:
    """The most that a process has had, in bytes."""

    resident: int = 0
    own: int = 0

    def look(self, pid: int) -> None:
        try:
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:  # it has ended
            return
        sizes = {
            name: int(rest.split()[0]) * 1024
            for name, _, rest in (line.partition(":") for line in status.splitlines())
            if name in ("VmHWM", "RssAnon")
        }
        self.resident = max(self.resident, sizes.get("VmHWM", 0))
        self.own = max(self.own, sizes.get("RssAnon", 0))


@contextmanager
def watched(pid: int) -> Iterator[Peak]:
    """Looks at a process ten times a second."""
    peak, ended = Peak(), threading.Event()

    def watch() -> None:
        peak.look(pid)
        while not ended.wait(0.1):
            peak.look(pid)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        ended.set()
        thread.join()


def told(stage: str, seconds: float, peak: Peak, more: str = "") -> None:
    click.echo(
        f"{stage}: {seconds:.0f} s, {peak.resident / GIB:.1f} GiB resident at most, of which"
        f" {peak.own / GIB:.1f} its own{more}"
    )


def run(stage: str, call: str) -> None:
    """Runs a stage as a process, and ends with it if it fails."""
    begin = time.monotonic()
    code = f"import epikv.cli, epikv_lab.export.large; {call}"
    process = processes.start([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    try:
        with watched(process.pid) as peak:
            _, log = process.communicate()
    finally:  # before its folder is removed
        process.kill()
        process.wait()
    if process.returncode != 0:
        sys.exit(f"{stage}: {log.strip()}")
    told(stage, time.monotonic() - begin, peak)


def write(shape: str, dtype: str, directory: str) -> None:
    """The checkpoint, in about SHARDS files."""
    config = SHAPES[shape]
    ffn = 3 * config["hidden_size"] * config["intermediate_size"] * config["num_hidden_layers"]
    write_directory(config, Path(directory), DTYPES[dtype], shard_bytes=2 * ffn // SHARDS)


def serve(model: Path) -> None:
    """Loads it and completes a prompt twice: with the whole cache and under a budget."""
    begin = time.monotonic()
    # Nobody's pace is to depend on the memory left.
    daemon = Daemon(model, "--kv_pool_bytes=268435456", start_seconds=1800)
    with daemon, watched(daemon.pid) as peak, daemon.client() as client:
        loaded = time.monotonic() - begin
        prompt = [1 + i for i in range(PROMPT)]
        for kv in (Kv("full"), Kv("snapkv", BUDGET, {"window": 4, "slack": 0})):
            result = client.generate_once(
                prompt,
                kv=kv,
                stop=Stop(max_output_tokens=OUTPUTS, ignore_eos=True),
                output=Output(token_ids=True),
                timeout=1800,
            )
            summary = result.summary
            assert summary is not None and summary.kv is not None and summary.timings is not None
            assert summary.timings.decode is not None  # there were several tokens
            pace = summary.timings.decode / (OUTPUTS - 1)
            click.echo(
                f"{kv.policy}: {len(result.token_ids)} tokens after {PROMPT}, first after"
                f" {summary.timings.time_to_first_token:.1f} s, {pace:.2f} s a token,"
                f" {summary.kv.evicted_entries} entries evicted"
            )
    told("serve", time.monotonic() - begin, peak, f"; {loaded:.0f} s to load")


@click.command()
@click.option("--shape", type=click.Choice(list(SHAPES)), default="8b")
@click.option("--dtype", type=click.Choice(list(DTYPES)), default="bf16")
@click.option("--check/--no-check", default=True, help="Compare with transformers.")
@click.option(
    "--folder",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="With room for twice the model. Default: the system's, for temporary files.",
)
@processes.ending_in_order()
def main(shape: str, dtype: str, check: bool, folder: Path | None) -> None:
    """Write, export and serve a random model of SHAPE; its files are removed in the end."""
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        checkpoint, model = Path(temporary) / shape, Path(temporary) / "model.pt"
        run("write", f"epikv_lab.export.large.write({shape!r}, {dtype!r}, {str(checkpoint)!r})")
        size = sum(file.stat().st_size for file in checkpoint.iterdir())
        click.echo(f"the checkpoint: {size / GIB:.1f} GiB")
        words = ["export", str(checkpoint), str(model), f"--dtype={dtype}"]
        run("export", f"epikv.cli.main({words + ([] if check else ['--no-check'])!r})")
        serve(model)


if __name__ == "__main__":
    main()

"""`python tests/bench/gpu_limit.py MODEL SHARE,..`: a daemon whose KV pool is SHARE of a GPU's memory, and full.

Twice as many requests come as fit: of a long prompt, under several policies, sampled and greedy.
Fails unless all end well, the pool was full, and nothing is reserved at the end. One line a share.
"""

import random
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Self

from epikv.errors import RpcError
from epikv.options import Kv, Output, Sampling, Stop
from epikv.scrape import scrape
from epikv.testing import Daemon

PROMPT, OUTPUTS = 4000, 48
RUNNING = 256
# Of each dozen requests: what is asked for beside `full`.
KINDS = (
    Kv(),
    Kv(),
    Kv("epikv_flat", budget=PROMPT + 20),
    Kv(),
    Kv("sliding", budget=3000, protect_prompt=False, positions="compact"),
    Kv(),
    Kv("random", budget=2000, protect_prompt=False),
    Kv(),
    Kv(),
    Kv("h2o", budget=1000, protect_prompt=False),
    Kv(),
    Kv("snapkv", budget=1000, protect_prompt=False),
)


def used_mebibytes() -> int:
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.check_output(command, text=True).split()[0])


class Watch:
    """The most that was in use while the `with` block ran."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.pool = self.used = 0.0  # ratio of the pool that was reserved; MiB of the GPU

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(0.5):
            page = scrape(self._daemon.metrics)
            self.pool = max(self.pool, page.total("epikv_kv_reserved_ratio"))
            self.used = max(self.used, used_mebibytes())


def fill(daemon: Daemon, share: float) -> bool:
    """Whether it held."""
    with daemon.client() as client:
        model = client.models()[0]
        fit = min(RUNNING, model.kv_capacity_tokens // (PROMPT + OUTPUTS))

        def ask(number: int) -> str:
            rng = random.Random(number)
            try:
                client.generate_once(
                    [rng.randrange(model.vocab_size) for _ in range(PROMPT)],
                    kv=KINDS[number % len(KINDS)],
                    stop=Stop(max_output_tokens=OUTPUTS, ignore_eos=True),
                    sampling=Sampling(temperature=0.0 if number % 2 else 0.8, seed=number),
                    output=Output(top_logprobs=20 if number % 5 == 0 else 0, text=False),
                )
            except RpcError as error:
                return str(error)
            return ""

        begin = time.monotonic()
        with Watch(daemon) as watch, ThreadPoolExecutor(2 * fit) as pool:
            failed = [why for why in pool.map(ask, range(2 * fit)) if why]
        seconds = time.monotonic() - begin
        for why in sorted(set(failed))[:5]:
            print(f"     {failed.count(why)} times: {why[:300]}")
        left = scrape(daemon.metrics).total("epikv_kv_reserved_ratio")
    print(
        f"share {share}: pool of {model.kv_capacity_tokens} tokens, {model.kv_capacity_bytes / 2**30:.1f} GiB,"
        f" reserved to {watch.pool:.3f}; {watch.used:.0f} MiB of the GPU in use; {2 * fit} requests of"
        f" {PROMPT} + {OUTPUTS} tokens in {seconds:.1f} s, {len(failed)} failed; {left:.3f} is reserved at the end",
        flush=True,
    )
    for line in daemon.log.splitlines():
        if "record" in line or "memory" in line or "failed" in line:
            print(f"     log: {line[:300]}")
    return not failed and watch.pool > 0.9 and left == 0


def main(model: str, shares: list[float]) -> None:
    held = True
    for share in shares:
        with Daemon(
            model,
            "--device=cuda",
            f"--kv_memory_share={share}",
            f"--max_running_requests={RUNNING}",
            "--max_step_tokens=2048",
            "--prefill_chunk_tokens=512",
            "--max_queued_tokens=100000000",
            start_seconds=200,
        ) as daemon:
            held = fill(daemon, share) and held
    sys.exit(not held)


if __name__ == "__main__":
    main(sys.argv[1], [float(share) for share in sys.argv[2].split(",")])

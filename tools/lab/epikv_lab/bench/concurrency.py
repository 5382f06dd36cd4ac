"""How many requests a KV pool holds at once: budgeted over whole caches.

The pool holds exactly 16 requests of 4096 tokens that keep their whole cache. Many more are sent
than fit, and those past their first token at the same moment are counted. Then a mixed load of
requests that come and go makes lanes move, and the longest stall that caused is reported.
"""

import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
from epikv import harness
from epikv.options import Kv
from epikv.stats import Estimate

from epikv_lab.bench.streams import Running, cancel_all, random_prompt, wait_until
from epikv_lab.bench.targets import Target, finish

SHAPE: harness.Shape = {
    "hidden": 64,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 64,
    "ffn": 128,
    "vocab": 512,
    "context": 4096,
    "dtype": "bf16",
}
POOL_REQUESTS, TOTAL, PROMPT, BUDGET = 16, 4096, 256, 512
BOUND = 7
BUDGETED = {
    "epikv_flat": Kv("epikv_flat", BUDGET),
    "sliding_slack_64": Kv("sliding", BUDGET, {"slack": 64}),
    "knorm_slack_32": Kv("knorm", BUDGET, {"slack": 32}),
}
# The mixed load: lengths in tokens.
LONGEST_PROMPT, LONGEST_OUTPUT, BUDGETS = 1600, 300, (64, 1600)


@dataclass(frozen=True)
class Moves:
    """What moving lanes has cost since the daemon started."""

    rows: int
    longest_seconds: float


@click.command("concurrency")
@click.option("--requests", default=160, show_default=True, help="Sent at once.")
@click.option("--mixed", default=600, show_default=True, help="Requests of the mixed load.")
@harness.options
def command(requests: int, mixed: int, json_file: Path | None, **where: Any) -> None:
    """Requests past their first token at once, in a pool of 16 x 4096 tokens."""
    flags = [f"--max_running_requests={requests}", f"--max_queued_requests={requests}"]
    if where["server"] is None:
        flags.append(f"--kv_pool_bytes={POOL_REQUESTS * _whole_cache_bytes(where)}")
    with harness.serving(_model, flags, **where) as served:
        full = _most_at_once(served, "full", Kv("full"), requests)
        counts = {name: _most_at_once(served, name, kv, requests) for name, kv in BUDGETED.items()}
        before = _moves(served)
        _mixed_load(served, mixed, requests)
        after = _moves(served)
    click.echo(
        f"\nmixed load of {mixed} requests: {after.rows - before.rows} rows moved;"
        f" the longest stall {1e3 * after.longest_seconds:.3f} ms\n"
    )
    targets = [
        Target(f"{name}_over_full", Estimate.exact(count / full), BOUND, at_least=True)
        for name, count in counts.items()
    ]
    details = {
        "shape": SHAPE,
        "at_once": {"full": full, **counts},
        "before_mixed_load": asdict(before),
        "after_mixed_load": asdict(after),
    }
    finish("concurrency", targets, details, json_file)


def _model() -> Path:
    return harness.random_model("concurrency", **SHAPE)


def _whole_cache_bytes(where: dict[str, Any]) -> int:
    """What one request that keeps its whole cache reserves: asked of a daemon."""
    with harness.serving(_model, **where) as served:
        stream = _start(served, Kv("full"), seed=0)
        wait_until(lambda: stream.accepted is not None, [stream], "a request")
        cancel_all([stream])
        return stream.reserved_bytes


def _start(served: harness.Served, kv: Kv, seed: int) -> Running:
    prompt = random_prompt(PROMPT, SHAPE["vocab"], seed)
    return Running(served.client, prompt, kv, TOTAL - PROMPT)


def _most_at_once(served: harness.Served, name: str, kv: Kv, requests: int) -> int:
    """Starts all; counts when each admitted one has its first token and the rest wait for room."""
    running = [_start(served, kv, seed) for seed in range(requests)]

    def past_first_token() -> int:
        return sum(stream.tokens > 0 for stream in running)

    def settled() -> bool:
        page = served.page()
        if page.total("epikv_requests_waiting", reason="kv") + past_first_token() < requests:
            return False
        return page.total("epikv_requests_running") == past_first_token()

    wait_until(settled, running, f"{name} to fill the pool")
    most = past_first_token()
    if most == requests or any(stream.summary is not None for stream in running):
        raise click.ClickException(f"{name}: of {requests} requests none waits or some have ended")
    harness.say(f"{name}: {most} past their first token at once")
    cancel_all(running)
    served.wait_until_idle()
    return most


def _mixed_load(served: harness.Served, requests: int, at_once: int) -> None:
    """Requests of random lengths and policies; a new one for each that ends."""
    rng = random.Random(0)
    running: list[Running] = []
    for number in range(requests):
        budget = rng.randint(*BUDGETS)
        kv = rng.choice(
            [Kv("full"), Kv("sliding", budget), Kv("random", budget), Kv("knorm", budget)]
        )
        prompt = random_prompt(rng.randint(1, LONGEST_PROMPT), SHAPE["vocab"], number)
        running.append(Running(served.client, prompt, kv, rng.randint(1, LONGEST_OUTPUT), number))
        wait_until(
            lambda: sum(r.summary is None for r in running) < at_once,  # noqa: B023  asked at once
            running,
            "a free place",
        )
        running = [stream for stream in running if stream.summary is None]
        if (number + 1) % 100 == 0:
            harness.say(f"mixed load: {number + 1} of {requests} sent")
    for stream in running:
        stream.join()


def _moves(served: harness.Served) -> Moves:
    page = served.page()
    return Moves(
        int(page.value("epikv_kv_rows_moved_total")),
        page.value("epikv_kv_longest_move_seconds"),
    )

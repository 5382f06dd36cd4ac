"""The daemon that the scenarios ask."""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from socket import create_server

from credentials import new_token
from epikv import Client, RpcError
from epikv.scrape import scrape
from epikv.testing import Daemon
from metrics_page import moved
from odd_model import save, unreadable
from series_scenarios import POOL_BYTES, SESSION_BYTES
from series_world import Files, World


def files_of(folder: Path, model: Path, artefacts: Path | None = None) -> Files:
    return Files(
        model,
        artefacts,
        tokens=folder / "tokens",
        damaged=folder / "damaged.pt",
        odd=save(folder / "odd.pt"),
        unreadable=unreadable(folder / "unreadable.pt"),
        store=folder / "store.db",
    )


def refused_while_it_starts(address: str, token: str, served: threading.Event) -> None:
    eager = [(f"grpc.{which}_reconnect_backoff_ms", 10) for which in ("initial", "min", "max")]
    with Client(address, eager, token=token) as client:
        while not served.is_set():
            with contextlib.suppress(RpcError):
                client.generate_once("", timeout=10)  # which is refused afterwards, too


@contextlib.contextmanager
def asked_while_it_starts(
    model: Path, flags: list[str], address: str, token: str
) -> Iterator[Daemon]:
    """One that has refused something since it was starting; it starts so fast that this may take
    several tries."""
    for tries_left in reversed(range(10)):
        served = threading.Event()
        asking = threading.Thread(target=refused_while_it_starts, args=(address, token, served))
        asking.start()
        try:
            with Daemon(model, *flags, token=token) as daemon:
                served.set()
                asking.join()
                rejected = scrape(daemon.metrics).total(
                    "epikv_requests_rejected_total", reason="starting"
                )
                if rejected or not tries_left:
                    yield daemon
                    return
        finally:
            served.set()
            asking.join()


@contextlib.contextmanager
def busy_world(files: Files) -> Iterator[World]:
    """A daemon with all that can be asked of one, already asked while it was starting."""
    (token, *lines), (user, *more), (experimenter, *most) = (
        new_token("olga", "operator"),
        new_token("ulf", "user"),
        new_token("erna", "experimenter"),
    )
    files.tokens.write_text("".join([*lines, *more, *most]))
    with create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    flags = [
        f"--listen={address}",
        f"--auth_tokens_file={files.tokens}",
        *([f"--artefact_dir={files.artefacts}"] if files.artefacts else []),
        f"--draft_model={files.model}",
        "--access_log=/dev/full",
        "--vllm_dialect",
        "--load_reports",
        "--metrics_max_series=50000",  # of every policy its own
        "--threads=1",
        "--max_running_requests=4",
        "--max_queued_requests=3",
        "--prefill_chunk_tokens=32",
        f"--kv_pool_bytes={POOL_BYTES}",
        "--kv_tier_bytes=1000000",
        "--packet_bytes=2000000",
        f"--session_bytes={SESSION_BYTES}",
        f"--packet_dir={files.store.parent / 'packets'}",
        "--outbox_messages=8",
        "--outbox_bytes=1024",
        "--stream_stall_seconds=600",
        f"--experiment_store={files.store}",
        "--experiment_spool_bytes=1048576",
        "--experiment_guardrail_seconds=0.2",
        "--experiment_shadow_permille=1000",
        "--experiment_shadow_time_share=1",
    ]
    with asked_while_it_starts(files.model, flags, address, token) as daemon:
        world = World(daemon, files, token, user, experimenter)
        at_start = moved({}, world.page)
        world.moved["start"] = {s for s in at_start if world.page[s.family].type != "gauge"}
        yield world

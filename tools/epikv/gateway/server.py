"""Runs the gateway: workers behind one socket, until a signal ends them."""

import json
import logging
import os
import signal
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from socket import IPPROTO_TCP, TCP_USER_TIMEOUT

import uvicorn
from starlette.applications import Starlette
from uvicorn.config import STARTUP_FAILURE
from uvicorn.supervisors import Multiprocess

from epikv.connection import Tls
from epikv.gateway import metrics
from epikv.gateway.app import Settings, create_app

_log = logging.getLogger("uvicorn.error")
_LOOK_SECONDS = 1.0
_SETTINGS = "EPIKV_GATEWAY_SETTINGS"  # how workers get them, which are processes of their own


@dataclass(frozen=True)
class Serving:
    host: str
    port: int
    settings: Settings
    workers: int = 1
    certificate: Path | None = None  # PEM; with it, clients speak TLS
    key: Path | None = None
    drain_seconds: float = 60  # that streams may go on for after a signal
    stall_seconds: float = 60  # that a client may take nothing


def app() -> Starlette:
    """Of the one process, or of a worker, which ends with the process that has started it."""
    if metrics.shared():
        threading.Thread(target=_follow, args=(os.getppid(),), daemon=True).start()
    given = json.loads(os.environ[_SETTINGS])
    given["tls"] = Tls(**given["tls"]) if given["tls"] else None
    for name in ("servers", "origins"):
        given[name] = tuple(given[name])
    try:
        return create_app(Settings(**given))
    except (
        ValueError
    ) as error:  # of a daemon's address, or of TLS: no other worker would fare better
        _log.error("%s", error)
        sys.exit(STARTUP_FAILURE)


def _follow(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)


def run(serving: Serving) -> None:
    """Until SIGTERM or SIGINT. Streams that have begun may go on for drain_seconds."""
    os.environ[_SETTINGS] = json.dumps(asdict(serving.settings), default=str)
    config = uvicorn.Config(
        "epikv.gateway.server:app",
        factory=True,
        host=serving.host,
        port=serving.port,
        workers=serving.workers,
        ssl_certfile=serving.certificate,
        ssl_keyfile=serving.key,
        http="h11",  # which has a limit for headers
        timeout_graceful_shutdown=int(serving.drain_seconds),
        access_log=False,
        server_header=False,
        log_level="warning",
        ws="none",
    )
    socket = config.bind_socket()
    # A client that does not read has so long for what waits for it, then its connection ends; and so
    # does what it asked for. Sockets that are accepted have the option too.
    stall = int(1000 * serving.stall_seconds)
    socket.setsockopt(IPPROTO_TCP, TCP_USER_TIMEOUT, stall)
    socket.listen(config.backlog)  # who comes before the workers waits
    host, port = socket.getsockname()[:2]
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    print(json.dumps({"http": address, "servers": serving.settings.servers}), flush=True)
    # The server takes signals, and raises them again once it has ended in order: that is no failure.
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    if serving.workers == 1:
        uvicorn.Server(config).run(sockets=[socket])
    else:
        with metrics.shared_among_workers():
            Multiprocess(config, sockets=[socket]).run()

"""Runs the gateway: workers behind one socket, until a signal ends them."""

import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict

import h11
import uvicorn
from starlette.applications import Starlette
from uvicorn.config import STARTUP_FAILURE
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.supervisors import Multiprocess

from epikv.connection import Tls
from epikv.gateway import metrics
from epikv.gateway.app import create_app
from epikv.gateway.settings import Settings

_log = logging.getLogger("uvicorn.error")
_LOOK_SECONDS = 1.0
_MOST_WAITING_BYTES = 1 << 16  # of requests behind the one that is answered
_SETTINGS = "EPIKV_GATEWAY_SETTINGS"  # how workers get them, which are processes of their own


def app() -> Starlette:
    """Of the one process, or of a worker, which ends with the process that has started it."""
    if metrics.shared():
        threading.Thread(target=_follow, args=(os.getppid(),), daemon=True).start()
    settings = Settings(**json.loads(os.environ[_SETTINGS]))
    try:
        return create_app(settings, Tls.from_environment())
    except ValueError as error:  # of a daemon's address or of TLS: another worker fares no better
        _log.error("%s", error)
        sys.exit(STARTUP_FAILURE)


def _follow(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)


class _Http(H11Protocol):
    """h11 has a limit for headers. uvicorn reads nothing once a second request stands behind the one that
    is answered, and so would not see that the client leaves: it goes on here while what waits is little.
    """

    def handle_events(self) -> None:
        super().handle_events()
        if self.flow.read_paused and self.conn.their_state is h11.DONE:
            waiting, _ = self.conn.trailing_data
            if len(waiting) <= _MOST_WAITING_BYTES:
                self.flow.resume_reading()


class _Workers(Multiprocess):
    """Begins another in place of one that has died."""

    def keep_subprocess_alive(self) -> None:
        before = {process.pid for process in self.processes}
        super().keep_subprocess_alive()
        for pid in before - {process.pid for process in self.processes}:
            metrics.forget_worker(pid)


class Server:
    """Listens from when it is made; runs in the main thread."""

    def __init__(self, settings: Settings) -> None:
        """Raises OSError for an address that it cannot have."""
        self._settings = settings
        self._socket = socket.socket(socket.AF_INET6 if ":" in settings.host else socket.AF_INET)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind((settings.host, settings.port))
        self._config = uvicorn.Config(
            "epikv.gateway.server:app",
            factory=True,
            workers=settings.workers,
            ssl_certfile=settings.tls_certificate,
            ssl_keyfile=settings.tls_key,
            http=_Http,
            timeout_graceful_shutdown=settings.drain_seconds,
            access_log=False,
            server_header=False,
            log_level="warning",
            ws="none",
        )
        # A client that does not read has so long for what waits for it, then its connection ends; and so
        # does what it asked for. Sockets that are accepted have the option too.
        stall = int(1000 * settings.stall_seconds)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, stall)
        # Before it runs: nobody else can take the address, and who comes sooner waits.
        self._socket.listen(self._config.backlog)

    def run(self, servers: Sequence[str] | None = None) -> None:
        """Until SIGTERM or SIGINT. Streams that have begun may go on for drain_seconds. servers: in place
        of those that it was told."""
        told = asdict(self._settings) | ({} if servers is None else {"servers": servers})
        os.environ[_SETTINGS] = json.dumps(told, default=str)
        if self._settings.workers == 1:
            alone = uvicorn.Server(self._config)
            # Only once it runs it takes signals by itself. When it has ended in order it raises them again.
            for each in (signal.SIGINT, signal.SIGTERM):
                signal.signal(each, alone.handle_exit)
            self._tell(told["servers"])
            alone.run(sockets=[self._socket])
        else:
            workers = _Workers(self._config, sockets=[self._socket])  # takes signals from here on
            self._tell(told["servers"])
            with metrics.shared_among_workers():
                workers.run()

    def _tell(self, servers: Sequence[str]) -> None:
        host, port = self._socket.getsockname()[:2]
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        print(json.dumps({"http": address, "servers": servers}), flush=True)

"""A daemon of one's own, and a gateway, for end-to-end tests and benches."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from grpc_health.v1 import health_pb2, health_pb2_grpc

from epikv import processes, programs
from epikv.client import Client
from epikv.connection import Tls, connect

# Channel options; a `Client` with these receives no more than it reads.
PACED = [("grpc.http2.lookahead_bytes", 16), ("grpc.http2.bdp_probe", 0)]

_POLL_SECONDS = 0.02
_GATEWAY_SECONDS = 90  # to begin to serve, and to end


class DaemonError(Exception):
    """The daemon did not start, serve or stop as it should; the message ends with its log."""


class _Served:
    """A process of ours, from the moment it serves until the `with` block ends. Then it gets SIGTERM and
    has to end with status 0. It does not outlive this process, even if that is killed."""

    _name: str  # in errors

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        start_seconds: float,
        stop_seconds: float,
    ) -> None:
        self._command = command
        self._environment = environment
        self._start_seconds = start_seconds
        self._stop_seconds = stop_seconds
        self._terminated = False
        self.addresses: dict[str, Any] = {}  # what it printed when it began to serve

    def __enter__(self) -> Self:
        self._directory = tempfile.TemporaryDirectory(prefix="epikv-")
        self._out, self._log = (Path(self._directory.name) / name for name in ("out", "log"))
        with self._out.open("wb") as stdout, self._log.open("wb") as stderr:
            self._process = processes.start(
                self._command,
                stdout=stdout,
                stderr=stderr,
                process_group=0,  # a Ctrl-C at the terminal is for us: we end it
                env=self._environment,
            )
        try:
            self._wait_until_serving(time.monotonic() + self._start_seconds)
        except BaseException:
            self.kill()
            self._directory.cleanup()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            status = self.stop()
            if status != 0 and kind is None:
                raise self._wrong(f"ended with status {status}")
        finally:
            self._directory.cleanup()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def log(self) -> str:
        """All it has written to stderr so far."""
        return self._log.read_text(errors="replace")

    def terminate(self) -> None:
        """Sends SIGTERM, the first time only (a second one ends a draining daemon at once)."""
        if not self._terminated:
            self._terminated = True
            self._process.send_signal(signal.SIGTERM)

    def stop(self) -> int:
        """Sends SIGTERM, if it still runs, and waits; its exit status."""
        self.terminate()
        try:
            return self._process.wait(self._stop_seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            raise self._wrong(f"ran {self._stop_seconds} s after SIGTERM") from None

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def _wait_until_serving(self, deadline: float) -> None:
        while not (line := self._out.read_bytes()).endswith(b"\n"):
            if self._process.poll() is not None:
                raise self._wrong(f"ended with status {self._process.returncode} before it served")
            if time.monotonic() > deadline:
                raise self._wrong(f"did not serve within {self._start_seconds} s")
            time.sleep(_POLL_SECONDS)
        self.addresses = json.loads(line.splitlines()[0])

    def _wrong(self, what: str) -> DaemonError:
        return DaemonError(f"{self._name} {what}\n{self.log}")


class Daemon(_Served):
    """A running `epikvd`, from the moment it serves until the `with` block ends.

        with Daemon(model, "--deterministic=true") as daemon, Client(daemon.grpc) as client: ...

    Listens on free loopback ports. Leaving the block sends SIGTERM and expects exit status 0. It does
    not outlive this process, even if that is killed.
    """

    _name = "epikvd"

    def __init__(
        self,
        model: Path | str,
        *flags: str,
        binary: Path | str | None = None,
        token: str | None = None,
        tls: Tls | None = None,
        start_seconds: float = 120,
        stop_seconds: float = 60,
    ) -> None:
        """`binary`: default find_binary(). Flags come after the defaults and win over them.

        `token` and `tls`: of `client()`, as the flags ask for them.
        """
        command = [
            str(binary or find_binary()),
            "--listen=127.0.0.1:0",
            "--metrics_listen=127.0.0.1:0",
            "--admin_listen=127.0.0.1:0",
            f"--model={model}",
            *flags,
        ]
        super().__init__(command, start_seconds=start_seconds, stop_seconds=stop_seconds)
        self._token, self._tls = token, tls

    @property
    def grpc(self) -> str:
        return str(self.addresses["grpc"])

    @property
    def admin(self) -> str:
        return str(self.addresses["admin"])

    @property
    def metrics(self) -> str:
        return str(self.addresses["metrics"])

    def client(self) -> Client:
        return Client(self.grpc, token=self._token, tls=self._tls)

    def _wait_until_serving(self, deadline: float) -> None:
        super()._wait_until_serving(deadline)
        with connect(self.grpc, tls=self._tls) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            request = health_pb2.HealthCheckRequest()
            timeout = max(deadline - time.monotonic(), 1)
            status = health.Check(request, wait_for_ready=True, timeout=timeout).status
        if status != health_pb2.HealthCheckResponse.SERVING:
            name = health_pb2.HealthCheckResponse.ServingStatus.Name(status)
            raise self._wrong(f"printed its addresses but its health is {name}")


class Gateway(_Served):
    """`epikv gateway` in front of these daemons, HOST:PORT each, on a port of its own, until it is left.

    flags: of the command. environment: beside this process's own.
    """

    _name = "the gateway"

    def __init__(self, *servers: str, flags: Sequence[str] = (), **environment: str) -> None:
        command = [sys.executable, "-c", "from epikv.cli import main; main()", "gateway"]
        command += ["--listen=127.0.0.1:0", *flags]
        command += [f"--server={server}" for server in servers]
        super().__init__(
            command,
            environment={**os.environ, **environment},
            start_seconds=_GATEWAY_SECONDS,
            stop_seconds=_GATEWAY_SECONDS,
        )

    @property
    def address(self) -> str:
        """HOST:PORT."""
        return str(self.addresses["http"])

    @property
    def url(self) -> str:
        return f"http://{self.address}"


def find_binary() -> Path:
    """The `epikvd` of $EPIKVD, of this package or its checkout (see programs), or of PATH."""
    if given := os.environ.get("EPIKVD"):
        return Path(given)
    if ours := programs.find("epikvd"):
        return ours
    if found := shutil.which("epikvd"):
        return Path(found)
    raise DaemonError("no epikvd found: build it, or name it with $EPIKVD")

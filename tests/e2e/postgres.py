"""A PostgreSQL server of one's own, of Debian's package."""

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from epikv import processes


class Postgres:
    """Runs until the `with` block ends, in a temporary folder and on a socket there. As root it runs as
    another user: PostgreSQL refuses to be root."""

    def __enter__(self) -> Self:
        self._folder = Path(tempfile.mkdtemp(prefix="epikv-postgres-"))
        self._user = pwd.getpwnam("postgres").pw_name if os.geteuid() == 0 else None
        if self._user is not None:
            shutil.chown(self._folder, self._user)
        self._run(
            "initdb",
            "-D",
            str(self._data),
            "-A",
            "trust",
            "-U",
            "epikv",
            "--no-sync",
            "--no-locale",
        )
        self._server: subprocess.Popen[bytes] | None = None
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def url(self) -> str:
        return f"postgresql://epikv@/postgres?host={self._folder}"

    def start(self) -> None:
        options = ["-c", "listen_addresses=", "-c", "fsync=off", "-c", "shared_buffers=16MB"]
        self._server = processes.start(
            [self._binary("postgres"), "-D", str(self._data), "-k", str(self._folder), *options],
            end=signal.SIGQUIT,
            user=self._user,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + 60
        ready = [self._binary("pg_isready"), "-h", str(self._folder), "-q"]
        while subprocess.run(ready, check=False).returncode != 0:
            assert time.monotonic() < deadline
            assert self._server.poll() is None
            time.sleep(0.05)

    def stop(self) -> None:
        """At once, as if it had crashed."""
        if self._server is not None:
            self._server.send_signal(signal.SIGQUIT)
            self._server.wait()
            self._server = None

    @property
    def _data(self) -> Path:
        return self._folder / "data"

    def _run(self, program: str, *arguments: str) -> None:
        command = [*processes.as_user(self._user), self._binary(program), *arguments]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

    @staticmethod
    def _binary(program: str) -> str:
        found = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{program}"))
        return str(found[-1]) if found else program

"""A daemon that ends with this process."""

import json
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence

from epikv import processes
from epikv.testing import DaemonError, find_binary

_LAST_LINES = 20  # of its log, which an error shows


class Process:
    """From the moment it serves. Its log goes to this process's stderr, which Ray keeps."""

    def __init__(
        self, flags: Sequence[str], binary: str = "", on_loss: Callable[[], None] = lambda: None
    ) -> None:
        """Flags that come later win. on_loss: is called, in a thread of its own, when the daemon has ended and was not
        told to. Raises DaemonError, with the end of its log."""
        local = ("--listen=127.0.0.1:0", "--metrics_listen=127.0.0.1:0", "--admin_listen=")
        self._process = processes.start(
            [binary or str(find_binary()), *local, *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=0,
            text=True,
        )
        self._on_loss = on_loss
        self._serves = False
        self._last: deque[str] = deque(maxlen=_LAST_LINES)
        self._log = threading.Thread(target=self._pass_on, daemon=True)
        self._log.start()
        assert self._process.stdout is not None
        line = self._process.stdout.readline()  # it serves, or has ended
        if not line:
            status = self._process.wait()
            self._log.join()
            raise DaemonError(f"epikvd ended with status {status}\n{''.join(self._last)}")
        addresses = json.loads(line)
        self.grpc = str(addresses["grpc"])
        self.metrics = str(addresses["metrics"])
        self._serves = True

    @property
    def pid(self) -> int:
        return self._process.pid

    def stop(self, seconds: float) -> None:
        """Lets it drain; after so long it is killed."""
        self._serves = False
        self._process.terminate()
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _pass_on(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._last.append(line)
            sys.stderr.write(line)
        if self._serves:
            self._on_loss()

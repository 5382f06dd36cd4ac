"""A log that grows, is renamed and begun anew."""

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

LONGEST = 1 << 20  # bytes; the daemon's longest lines are some kilobytes


class LogFile:
    """Reads whole lines, and knows how to go on from where it was. One thread at a time."""

    def __init__(self, path: Path, state: Path | None = None) -> None:
        """state: keeps the place between runs. Raises OSError for a log that cannot be read."""
        self._path = path
        self._state = state
        self._file: BinaryIO = path.open("rb")
        if state is not None and state.exists():
            place = json.loads(state.read_text())
            if place["inode"] == self._inode() and place["offset"] <= path.stat().st_size:
                self._file.seek(place["offset"])

    def read(self, most: int) -> Iterator[bytes]:
        """The next lines there are, at most so many. A line that is being written comes later, whole; one
        of more than LONGEST bytes comes in pieces, so that no file fills the memory."""
        for _ in range(most):
            before = self._file.tell()
            line = self._file.readline(LONGEST)
            if not line.endswith(b"\n") and len(line) < LONGEST:
                self._file.seek(before)
                if not self._renewed():
                    return
                continue
            yield line

    def keep_place(self) -> None:
        """What was read is done with."""
        if self._state is None:
            return
        place = {"inode": self._inode(), "offset": self._file.tell()}
        new = self._state.with_name(f"{self._state.name}.new")
        new.write_text(json.dumps(place))
        new.replace(self._state)

    def _renewed(self) -> bool:
        """At the end: whether the log goes on in another file of this name, or was cut."""
        with suppress(FileNotFoundError):
            now = self._path.stat()
            if now.st_ino != self._inode():
                self._file.close()
                self._file = self._path.open("rb")
                return True
            if now.st_size < self._file.tell():
                self._file.seek(0)
                return True
        return False

    def _inode(self) -> int:
        return os.fstat(self._file.fileno()).st_ino

    def close(self) -> None:
        self._file.close()

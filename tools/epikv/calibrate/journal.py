"""A file of results that outlives the run that writes it: one JSON object a line, the first of which
says what they are results of."""

import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from threading import Lock
from typing import Any, Self


class JournalError(Exception):
    """The file belongs to something else."""


class Journal:
    """Records by key, in the order they were written; for any number of threads of one process.

    with Journal(path, {"model": digest, "window": 4}) as journal: ...

    A record is on disk when `add` returns. A line cut short by a crash is dropped; a file of other
    settings is refused, not overwritten.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        """Raises JournalError, naming the settings that differ, or if another process writes it."""
        self.records: dict[str, dict[str, Any]] = {}
        self._lock = Lock()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+b")
        try:
            self._read(path, {"settings": json.loads(json.dumps(dict(settings)))})
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __contains__(self, key: str) -> bool:
        return key in self.records

    def add(self, key: str, record: Mapping[str, Any]) -> None:
        with self._lock:
            self.records[key] = dict(record)
            self._write({"key": key, **record})

    def _read(self, path: Path, header: Mapping[str, Any]) -> None:
        """What is there, without what follows the last newline; a new file gets the header."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise JournalError(f"another process is writing {path}") from None
        self._file.seek(0)
        content = self._file.read()
        whole = content[: content.rfind(b"\n") + 1]
        lines = whole.splitlines()
        if lines:
            _check(path, json.loads(lines[0]), header)
        self._file.truncate(len(whole))
        if not lines:
            self._write(header)
        for line in lines[1:]:
            record = json.loads(line)
            self.records[record.pop("key")] = record

    def _write(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())


def _check(path: Path, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    found, wanted = found.get("settings", {}), wanted["settings"]
    differ = [
        f"{name} is {found.get(name)!r} there, {wanted.get(name)!r} here"
        for name in sorted({*found, *wanted})
        if found.get(name) != wanted.get(name)
    ]
    if differ:
        raise JournalError(
            f"{path} was begun with other settings ({'; '.join(differ)}): name another folder"
        )

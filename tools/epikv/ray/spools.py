"""Folders in which daemons of one node keep records of experiments while the store is away."""

import fcntl
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import BinaryIO


class Spool:
    """A folder below `folder` that is this process's alone until it ends: one with records that another has
    left, if there is any. Raises OSError."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for path in _candidates(folder):
            lock = _locked(path.with_suffix(".lock"))
            if lock is None:
                continue
            # A daemon may outlive its replica by some moments.
            if (theirs := path / "lock").exists():
                free = _locked(theirs)
                if free is None:
                    lock.close()
                    continue
                free.close()
            self.path, self._lock = path, lock
            return

    def close(self) -> None:
        self._lock.close()


def _candidates(folder: Path) -> Iterator[Path]:
    """Those with records first; then all others, and new ones without end."""
    known = sorted(path for path in folder.iterdir() if path.is_dir())
    yield from (path for path in known if any(path.glob("*.spool")))
    yield from (folder / str(number) for number in count())


def _locked(path: Path) -> BinaryIO | None:
    """The file, which holds the lock until it is closed; None: another has it."""
    file = path.open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file

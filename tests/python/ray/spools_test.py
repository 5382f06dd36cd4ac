"""Each daemon of a node has a spool of its own, and none that has records is forgotten."""

import fcntl
from pathlib import Path

from epikv.ray.spools import Spool


def test_each_has_its_own_until_it_ends(tmp_path: Path) -> None:
    first, second = Spool(tmp_path / "spools"), Spool(tmp_path / "spools")
    assert first.path != second.path
    first.close()
    assert Spool(tmp_path / "spools").path == first.path


def test_records_that_were_left_are_taken_up_first(tmp_path: Path) -> None:
    spools = [Spool(tmp_path) for _ in range(3)]
    left = spools[2].path
    left.mkdir()
    (left / "0000000000000000.spool").touch()
    for spool in spools:
        spool.close()
    assert Spool(tmp_path).path == left


def test_of_a_daemon_that_has_not_ended_none_is_taken(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    spool.path.mkdir()
    spool.close()
    with (spool.path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert Spool(tmp_path).path != spool.path
    assert Spool(tmp_path).path == spool.path

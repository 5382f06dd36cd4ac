"""The memory of a process, as Linux tells it."""

from pathlib import Path


def resident(pid: int | str = "self", *, peak: bool = False) -> int:
    """Bytes of its resident set, now or at the most."""
    name = "VmHWM:" if peak else "VmRSS:"
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(name):
            return 1024 * int(line.split()[1])
    raise OSError(f"/proc/{pid}/status has no {name}")


def forget_peak() -> None:
    """This process's: what it is now is the most from here on."""
    Path("/proc/self/clear_refs").write_text("5")

"""What every runner speaks: JSON, one object a line.

It is started with a configuration as its argument. Its first line is {"ready": settings}, all that
decides its speed, or {"refused": why}. For each line on stdin,

    {"prompts": [[id, ...], ...], "new": n}

it generates n greedy tokens behind each prompt, all at once, whatever its end-of-text token, and
answers

    {"tokens": [[id, ...], ...], "times": [[seconds, ...], ...], "peak": bytes}

where times are since the job began, when a peer could hand out each token, which is -1 if it did not
say which; peak is the process's largest resident set; or {"refused": why}, and goes on. What
libraries print on stdout goes to stderr.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


class Streams:
    """The tokens of a job, from the moment that this is made."""

    def __init__(self, count: int) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(count)]
        self.times: list[list[float]] = [[] for _ in range(count)]
        self._begin = time.perf_counter()

    def add(self, stream: int, token: int) -> None:
        self.tokens[stream].append(int(token))
        self.times[stream].append(time.perf_counter() - self._begin)


Run = Callable[[list[list[int]], int], Streams]


def serve(
    load: Callable[[Mapping[str, Any]], tuple[Run, Mapping[str, Any]]],
    pid: Callable[[], int] = os.getpid,
    close: Callable[[], None] = lambda: None,
) -> None:
    """Until stdin ends. load(configuration) gives what runs a job, and the settings it has.

    pid: of the process whose memory is told, once it is loaded. close() is called at the end.
    """
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def answer(content: Mapping[str, Any]) -> None:
        out.write(json.dumps(content) + "\n")

    try:
        run, settings = load(json.loads(sys.argv[1]))
    except Exception as error:  # whatever a peer raises is told
        answer({"refused": told(error)})
        return
    answer({"ready": {**settings, **_environment()}})
    for line in sys.stdin:
        job = json.loads(line)
        try:
            streams = run(job["prompts"], job["new"])
        except Exception as error:  # whatever a peer raises is told
            answer({"refused": told(error)})
        else:
            answer({"tokens": streams.tokens, "times": streams.times, "peak": _peak(pid())})
    close()
    out.flush()
    os._exit(0)  # CTranslate2 aborts when the interpreter ends


def told(error: Exception) -> str:
    """In one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:400]


def _environment() -> dict[str, str]:
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(("OMP_", "GOMP_", "KMP_"))
    }


def _peak(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])

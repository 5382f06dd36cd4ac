"""Programs that are measured: a runner of a peer, or a daemon of ours. Both stay loaded."""

import asyncio
import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import grpc
from epikv import harness, processes
from epikv.connection import connect_async
from epikv.errors import RpcError
from epikv.options import Kv, Output, Sampling, Speculation, Stop
from epikv.testing import Daemon, DaemonError
from epikv.v1 import generation_pb2, generation_pb2_grpc

from epikv_lab.bench.peers.venvs import Refused, last_line
from epikv_lab.bench.resident import resident

LOAD_SECONDS = 600
GUESSES = 8  # of prompt lookup, in a step
# Workers spin from one product to the next, as deploy/ and the Dockerfile have them, and then sleep:
# one that spun on would take the core of whoever is measured next.
ENVIRONMENT = {"GOMP_SPINCOUNT": "10000", "KMP_BLOCKTIME": "1", "HF_HUB_OFFLINE": "1"}


# What holds engines and their libraries to a lesser processor, by what is left.
HELD: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "avx2": MappingProxyType(
            {
                "ATEN_CPU_CAPABILITY": "avx2",
                "CT2_FORCE_CPU_ISA": "AVX2",
                "DNNL_MAX_CPU_ISA": "AVX2",
                "MKL_ENABLE_INSTRUCTIONS": "AVX2",
                "ONEDNN_MAX_CPU_ISA": "AVX2",
            }
        )
    }
)


@dataclass(frozen=True)
class Job:
    """new greedy tokens behind each prompt, all at once; kv: of ours."""

    prompts: list[list[int]]
    new: int
    kv: Kv = field(default_factory=lambda: Kv("full"))
    lookup: bool = False  # guess by prompt lookup; of ours


@dataclass(frozen=True)
class Reply:
    """Of each stream its tokens, and when each was there: seconds since the job began."""

    tokens: list[list[int]]
    times: list[list[float]]
    peak: int  # bytes of its largest resident set


class Engine(Protocol):
    """A loaded program. Raises Refused where it does not load or answer; it may then have ended."""

    settings: Mapping[str, Any]  # that decide its speed

    @property
    def pid(self) -> int: ...

    def run(self, job: Job, limit: float) -> Reply:
        """limit: seconds that it may take."""

    def cpu(self) -> float:
        """Seconds of processor time that it has used so far."""

    def close(self) -> None: ...


class Runner:
    """A peer in a process of its own, which speaks as runners/serve.py says."""

    def __init__(
        self,
        command: Sequence[str],
        configuration: Mapping[str, Any],
        threads: int,
        environment: Mapping[str, str] = {},
    ) -> None:
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - until close()
        self._process = processes.start(
            [*command, json.dumps({**configuration, "threads": threads})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, **ENVIRONMENT, "OMP_NUM_THREADS": str(threads), **environment},
            text=True,
            process_group=0,
        )
        assert self._process.stdin is not None and self._process.stdout is not None  # pipes
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        try:
            self.settings = self._answer(LOAD_SECONDS)["ready"]
        except BaseException:
            self.close()
            raise

    def run(self, job: Job, limit: float) -> Reply:
        try:
            self._stdin.write(json.dumps({"prompts": job.prompts, "new": job.new}) + "\n")
            self._stdin.flush()
        except BrokenPipeError as error:
            raise Refused(self._end()) from error
        reply = Reply(**self._answer(limit))
        if any(len(tokens) != job.new for tokens in reply.tokens):
            counts = sorted({len(tokens) for tokens in reply.tokens})
            raise Refused(f"it generated {counts} tokens, not {job.new}")
        return reply

    @property
    def pid(self) -> int:
        return self._process.pid

    def cpu(self) -> float:
        return _cpu(self._process.pid)

    def close(self) -> None:
        """Ends it and what it has started."""
        self._kill()
        self._process.wait()
        with suppress(BrokenPipeError):  # a job that it did not live to read
            self._stdin.close()
        self._stdout.close()
        self._errors.close()

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _answer(self, limit: float) -> dict[str, Any]:
        late = threading.Event()

        def end() -> None:
            late.set()
            self._kill()

        timer = threading.Timer(limit, end)
        timer.start()
        try:
            line = self._stdout.readline()
        finally:
            timer.cancel()
        if late.is_set():
            raise Refused(f"no answer within {limit:g} s")
        if not line:
            raise Refused(self._end())
        answer = json.loads(line)
        if "refused" in answer:
            raise Refused(answer["refused"])
        return answer

    def _end(self) -> str:
        """What it died of."""
        status = self._process.wait()
        how = signal.Signals(-status).name if status < 0 else f"status {status}"
        self._errors.seek(0)
        said = last_line(self._errors.read())
        return f"it ended with {how}" + (f": {said}" if said else "")


class Epikvd:
    """Our daemon, over gRPC: a stream is a call of Generate."""

    def __init__(
        self,
        model: Path,
        threads: int,
        pool_bytes: int,
        binary: Path | None,
        cpu: str | None = None,
    ) -> None:
        flags = {
            "threads": threads,
            "kv_pool_bytes": pool_bytes,
            "prefix_cache_share": 0,
            **({"cpu": cpu} if cpu else {}),
        }
        self._stack = ExitStack()
        try:
            daemon = Daemon(
                model,
                *(f"--{name}={value}" for name, value in flags.items()),
                binary=binary or harness.fresh_binary(harness.ROOT),
            )
            self._daemon = self._stack.enter_context(daemon)
        except DaemonError as error:
            raise Refused(last_line(str(error))) from error
        self._client = self._stack.enter_context(daemon.client())
        self._served = harness.Served(self._client, daemon.grpc, daemon.metrics, daemon.pid)
        page = self._served.page()
        held = {
            kind: page.total("epikv_torch_memory_bytes", kind=kind)
            for kind in ("weights", "kv_pool", "scratch")
        }
        if untold := [kind for kind, size in held.items() if size == 0]:
            self.close()
            raise Refused(f"its metrics do not say what it holds: {', '.join(untold)}")
        self.held_bytes = sum(held.values())
        held["resident_at_start"] = resident(daemon.pid)  # of LibTorch's own as well
        self.settings: Mapping[str, Any] = {**flags, "bytes": held}

    def run(self, job: Job, limit: float) -> Reply:
        try:
            tokens, times = asyncio.run(_generate(self._daemon.grpc, job, limit))
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise Refused(f"no answer within {limit:g} s") from error
            raise Refused(str(RpcError.from_grpc(error))) from error
        self._served.wait_until_idle()
        return Reply(tokens, times, resident(self._daemon.pid, peak=True))

    @property
    def pid(self) -> int:
        return self._daemon.pid

    def cpu(self) -> float:
        return _cpu(self._daemon.pid)

    def close(self) -> None:
        try:
            self._stack.close()
        except DaemonError as error:
            harness.say(f"epikvd: {last_line(str(error))}")


async def _generate(
    server: str, job: Job, limit: float
) -> tuple[list[list[int]], list[list[float]]]:
    """As of Reply. In one loop of raw messages: where every core is the daemon's, what reads its
    streams takes from it, a thread a stream twice as much."""
    async with connect_async(server, [("grpc.enable_retries", 0)]) as channel:
        await channel.channel_ready()
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        begin = time.monotonic()

        async def stream(prompt: list[int]) -> tuple[list[int], list[float]]:
            tokens: list[int] = []
            times: list[float] = []
            request = generation_pb2.GenerateRequest(
                token_ids=generation_pb2.TokenIds(ids=prompt),
                kv=job.kv.to_proto(),
                sampling=Sampling(temperature=0).to_proto(),
                stop=Stop(max_output_tokens=job.new).to_proto(),
                output=Output(text=False, token_ids=True).to_proto(),
                speculation=Speculation(max_tokens=GUESSES).to_proto() if job.lookup else None,
            )
            async for message in stub.Generate(request, timeout=limit):
                if ids := message.delta.token_ids:
                    now = time.monotonic() - begin
                    tokens += ids
                    times += [now] * len(ids)
            return tokens, times

        found = await asyncio.gather(*(stream(prompt) for prompt in job.prompts))
    return [tokens for tokens, _ in found], [times for _, times in found]


def _cpu(pid: int) -> float:
    """User and system time of a process and those that it has started, in seconds."""
    process = Path(f"/proc/{pid}")
    children = (process / "task" / str(pid) / "children").read_text().split()
    fields = (process / "stat").read_text().rpartition(")")[2].split()
    own = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return own + sum(_cpu(int(child)) for child in children)

"""llama.cpp's own server with a slot for each stream, over HTTP."""

import http.client
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from serve import Run, Streams, serve

START_SECONDS = 120


class _Server:
    """One at a time, with as many slots and as much context as a job needs."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self._made: tuple[int, int] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def ensure(self, slots: int, tokens: int) -> None:
        if self._made == (slots, tokens):
            return
        self.stop()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        threads = str(self._config["threads"])
        command = [
            *self._config["tether"],
            str(os.getpid()),
            self._config["binary"],
            *("--model", self._config["model"]),
            *("--parallel", str(slots)),
            *("--ctx-size", str(slots * -(-tokens // 256) * 256)),
            *("--threads", threads, "--threads-batch", threads),
            *("--port", str(self.port)),
            *("--host", "127.0.0.1"),
            "--no-kv-unified",
            "--no-webui",
        ]
        self._process = subprocess.Popen(command, stdout=sys.stderr)
        deadline = time.monotonic() + START_SECONDS
        while not self._healthy():
            if self._process.poll() is not None:
                raise RuntimeError(f"llama-server ended with {self._process.returncode}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"llama-server is not ready after {START_SECONDS} s")
            time.sleep(0.05)
        self._made = (slots, tokens)

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._process = self._made = None

    def _healthy(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()


def load(config: Mapping[str, Any]) -> tuple[Run, Mapping[str, Any]]:
    """configuration: model, threads, binary (llama-server), tether (epikv.processes.tether)."""
    server.append(_Server(config))
    server[0].ensure(1, 256)

    def run(prompts: list[list[int]], new: int) -> Streams:
        server[0].ensure(len(prompts), len(prompts[0]) + new)
        failed: list[Exception] = []
        streams = Streams(len(prompts))

        def read(stream: int) -> None:
            try:
                _complete(server[0].port, prompts[stream], new, stream, streams)
            except Exception as error:  # of a thread: told by the main one
                failed.append(error)

        readers = [threading.Thread(target=read, args=(n,)) for n in range(len(prompts))]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        if failed:
            raise failed[0]
        return streams

    version = subprocess.run(
        [config["binary"], "--version"], check=False, capture_output=True, text=True
    )
    settings = {
        "version": (version.stdout + version.stderr).strip().splitlines()[0],
        "parallel": "one slot a stream",
        "kv_unified": False,
        "kv": "f16",
    }
    return run, settings


def _complete(port: int, ids: list[int], new: int, stream: int, streams: Streams) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    body = {
        "prompt": ids,
        "n_predict": new,
        "temperature": 0,
        "samplers": ["temperature"],
        "stream": True,
        "return_tokens": True,
        "ignore_eos": True,
        "cache_prompt": False,
    }
    connection.request(
        "POST", "/completion", json.dumps(body), {"Content-Type": "application/json"}
    )
    reply = connection.getresponse()
    if reply.status != 200:
        raise RuntimeError(f"llama-server answers {reply.status}: {reply.read().decode()[:200]}")
    told = 0
    for line in reply:
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            tokens = event.get("tokens", [])
            if event.get("stop"):  # some were never told: the text held only parts of characters
                tokens = [*tokens, *[-1] * (event["tokens_predicted"] - told - len(tokens))]
            for token in tokens:
                streams.add(stream, token)
            told += len(tokens)
    connection.close()


server: list[_Server] = []
# There is a server once these are asked.
serve(load, lambda: server[0].pid, lambda: server[0].stop())  # noqa: PLW0108

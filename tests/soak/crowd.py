"""A process full of clients that ask for much, and leave before they have it."""

import multiprocessing
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from multiprocessing.connection import Connection
from typing import Any

import grpc
from epikv.testing import PACED
from epikv.v1 import generation_pb2, generation_pb2_grpc

# Processes begin as copies of one that has imported all this and opened nothing.
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["__main__", __name__])

ANSWER_SECONDS = 120.0


class Way(StrEnum):
    """How clients leave."""

    CANCEL = "cancel"
    CANCEL_BY_ID = "cancel by id"
    KILL = "kill"  # SIGKILL of their process: its connection ends without a word
    DEADLINE = "deadline"


@dataclass(frozen=True)
class Plan:
    """What a crowd does."""

    requests: dict[str, bytes]  # serialized GenerateRequests, by their ids
    until: str  # the event that each reads to; then it reads no more
    way: Way
    deadlines: Sequence[float] = ()  # seconds, one each, of those who leave by them
    paced: bool = False  # they receive no more than they read


class Crowd:
    """One connection of a process of its own."""

    def __init__(self, server: str, plan: Plan) -> None:
        self._plan = plan
        self._pipe, theirs = _processes.Pipe()
        self._process = _processes.Process(target=_live, args=(server, plan, theirs), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def names(self) -> AbstractSet[str]:
        """The ids of its requests."""
        return self._plan.requests.keys()

    @property
    def way(self) -> Way:
        return self._plan.way

    def ready(self) -> frozenset[str]:
        """Waits until each has read as far as it will; the ids of those that did not come so far."""
        return self._told()

    def leave(self) -> None:
        if self._plan.way is Way.KILL:
            self._process.kill()
        else:
            self._pipe.send(None)

    def codes(self) -> Counter[str]:
        """How their calls ended, once all have. Of a process that was killed nobody knows."""
        codes = Counter() if self._plan.way is Way.KILL else self._told()
        self._process.join()
        self._pipe.close()
        return codes

    def _told(self) -> Any:
        if not self._pipe.poll(ANSWER_SECONDS):
            raise TimeoutError(f"a crowd said nothing for {ANSWER_SECONDS:.0f} s")
        return self._pipe.recv()


def _live(server: str, plan: Plan, pipe: Connection) -> None:
    with grpc.insecure_channel(server, PACED if plan.paced else []) as channel:
        method = channel.unary_stream("/epikv.v1.GenerationService/Generate")
        # Of the server alone: the clients' library knows of no deadline.
        told = [[("grpc-timeout", f"{1000 * seconds:.0f}m")] for seconds in plan.deadlines]
        told = told or [None] * len(plan.requests)
        calls = [
            method(request, metadata=metadata)
            for request, metadata in zip(plan.requests.values(), told, strict=True)
        ]
        late = [
            name
            for name, call in zip(plan.requests, calls, strict=True)
            if not _read_until(call, plan.until)
        ]
        pipe.send(frozenset(late))
        try:
            pipe.recv()
        except EOFError:  # nobody is there any more
            os._exit(1)
        if plan.way is Way.CANCEL:
            for call in calls:
                call.cancel()
        if plan.way is Way.CANCEL_BY_ID:
            _cancel_by_id(channel, plan.requests)
        pipe.send(Counter(_code(call) for call in calls))
    # What is left of a Python process has no part in this.
    os._exit(0)


def _read_until(call: grpc.Call, event: str) -> bool:
    with suppress(grpc.RpcError):
        for message in call:
            if generation_pb2.GenerateResponse.FromString(message).WhichOneof("event") == event:
                return True
    return False


def _cancel_by_id(channel: grpc.Channel, names: Iterable[str]) -> None:
    stub = generation_pb2_grpc.GenerationServiceStub(channel)
    requests = [generation_pb2.CancelRequestRequest(request_id=name) for name in names]
    asked = [stub.CancelRequest.future(request) for request in requests]
    for answer in asked:
        with suppress(grpc.RpcError):  # it has ended by itself
            answer.result()


def _code(call: grpc.Call) -> str:
    """Of its end, everything read."""
    with suppress(grpc.RpcError):
        for _ in call:
            pass
    return call.code().name

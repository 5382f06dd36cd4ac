"""Sends a case as its client would, and tells what came of it."""

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from cases import Behaviour, Case, Method
from epikv.errors import RpcError
from epikv.messages import (
    Accepted,
    Delta,
    EvictionEvent,
    GenerateResult,
    Progress,
    PromptLogprobs,
    ScoreResponse,
    Summary,
    TokenSignals,
    TopLogprobs,
    from_proto,
)
from epikv.v1 import generation_pb2, generation_pb2_grpc

SERVICE = "/epikv.v1.GenerationService/"
ANSWER_SECONDS = 120.0  # every call of a small model has ended by then
# A connection of its own that takes in next to nothing ahead of its reader.
OWN = (("grpc.use_local_subchannel_pool", 1),)
NARROW = (*OWN, ("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0))


class Wrong(Exception):
    """The daemon did something that it must not."""


def same(what: str, found: Any, wanted: Any) -> None:
    """Raises Wrong if they differ; of lists, it tells the first difference."""
    if found == wanted:
        return
    if isinstance(found, list) and isinstance(wanted, list) and len(found) == len(wanted):
        at = next(i for i, pair in enumerate(zip(found, wanted, strict=True)) if pair[0] != pair[1])
        what, found, wanted = f"{what}[{at}]", found[at], wanted[at]
    raise Wrong(f"{what}: {found}, should be {wanted}")


def at_most(what: str, found: int, limit: int) -> None:
    if found > limit:
        raise Wrong(f"{what}: {found}, may be {limit}")


@dataclass
class Outcome:
    """All that a client has seen of its request."""

    case: Case
    accepted: Accepted | None = None
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    prompt: list[int] = field(default_factory=list)  # tokens whose log-probabilities came
    greedy: list[bool] = field(default_factory=list)
    signals: list[TokenSignals] = field(default_factory=list)
    evictions: list[EvictionEvent] = field(default_factory=list)
    summary: Summary | None = None  # None: it did not end well
    error: RpcError | None = None

    def add(self, event: Any) -> None:
        """The next message of a stream. Raises Wrong if it comes out of turn."""
        if self.summary is not None:
            raise Wrong(f"{type(event).__name__} after the summary")
        if (self.accepted is None) != isinstance(event, Accepted):
            raise Wrong(f"{type(event).__name__} where accepted is {self.accepted}")
        match event:
            case Accepted():
                self.accepted = event
            case Delta():
                self.text += event.text
                self.tokens += event.token_ids
                self.logprobs += event.logprobs
                self.top_logprobs += event.top_logprobs
                self.signals += event.signals
            case PromptLogprobs():
                if self.tokens or self.text or event.first != len(self.prompt) + 1:
                    raise Wrong(f"log-probabilities of the prompt from {event.first}")
                self.prompt += event.token_ids
            case Progress():
                if self.tokens or self.text:
                    raise Wrong("progress of the prompt after its first delta")
            case EvictionEvent():
                self.evictions.append(event)
            case Summary():
                self.summary = event

    def take(self, result: GenerateResult | ScoreResponse) -> None:
        self.accepted, self.summary = result.accepted, result.summary
        self.tokens, self.logprobs = result.token_ids, result.logprobs
        self.signals, self.evictions = result.signals, result.evictions
        self.top_logprobs = result.top_logprobs
        match result:
            case GenerateResult():
                self.text = result.text
                if result.prompt_logprobs is not None:
                    self.prompt = result.prompt_logprobs.token_ids
            case ScoreResponse():
                self.greedy = result.greedy


class Caller:
    """One client: its connection, used by one thread at a time."""

    def __init__(self, server: str) -> None:
        self._server = server
        self._channel = grpc.insecure_channel(server, [("grpc.max_receive_message_length", -1)])

    def close(self) -> None:
        self._channel.close()

    def run(self, case: Case) -> Outcome:
        """Raises Wrong if a stream's messages come out of turn."""
        outcome = Outcome(case)
        with self._connection(case) as channel:
            try:
                if case.method is Method.GENERATE:
                    _stream(case, channel, outcome)
                else:
                    _ask(case, channel, outcome)
            except grpc.RpcError as error:
                outcome.error = RpcError.from_grpc(error)
            except grpc.FutureCancelledError:
                outcome.error = RpcError(grpc.StatusCode.CANCELLED, "cancelled here")
        return outcome

    @contextmanager
    def _connection(self, case: Case) -> Iterator[grpc.Channel]:
        options = {
            Behaviour.DISCONNECT: OWN,
            Behaviour.SLOW: NARROW,
            Behaviour.STALL: NARROW,
        }.get(case.behaviour)
        if options is None:
            yield self._channel
            return
        with grpc.insecure_channel(self._server, options) as channel:
            yield channel


def _timeout(case: Case) -> float:
    return case.seconds if case.behaviour is Behaviour.DEADLINE else ANSWER_SECONDS


def _stream(case: Case, channel: grpc.Channel, outcome: Outcome) -> None:
    method = channel.unary_stream(
        SERVICE + case.method, response_deserializer=generation_pb2.GenerateResponse.FromString
    )
    call = method(case.wire, timeout=_timeout(case))
    for number in itertools.count():
        if case.behaviour is Behaviour.SLOW:
            time.sleep(case.seconds)
        elif number == case.events:
            _act(case, channel, call.cancel)
        message = next(call, None)
        if message is None:
            break
        outcome.add(from_proto(getattr(message, message.WhichOneof("event"))))
    if outcome.summary is None:
        raise Wrong("the stream ended well without a summary")


def _ask(case: Case, channel: grpc.Channel, outcome: Outcome) -> None:
    results = {
        Method.ONCE: generation_pb2.GenerateResult,
        Method.SCORE: generation_pb2.ScoreResponse,
    }
    method = channel.unary_unary(
        SERVICE + case.method, response_deserializer=results[case.method].FromString
    )
    call = method.future(case.wire, timeout=_timeout(case))
    ended = threading.Event()
    call.add_done_callback(lambda _: ended.set())
    acts = (Behaviour.CANCEL, Behaviour.CANCEL_BY_ID, Behaviour.DISCONNECT)
    if case.behaviour in acts and not ended.wait(case.seconds):
        _act(case, channel, call.cancel)
    outcome.take(from_proto(call.result()))


def _act(case: Case, channel: grpc.Channel, cancel: Callable[[], Any]) -> None:
    match case.behaviour:
        case Behaviour.CANCEL:
            cancel()
        case Behaviour.CANCEL_BY_ID:
            _cancel_by_id(channel, case.request.request_id)
        case Behaviour.DISCONNECT:
            channel.close()
        case Behaviour.STALL:
            time.sleep(case.seconds)


def _cancel_by_id(channel: grpc.Channel, request_id: str) -> None:
    stub = generation_pb2_grpc.GenerationServiceStub(channel)
    request = generation_pb2.CancelRequestRequest(request_id=request_id)
    try:
        stub.CancelRequest(request, timeout=ANSWER_SECONDS)
    except grpc.RpcError as error:
        if error.code() is not grpc.StatusCode.NOT_FOUND:  # it has ended, or not yet begun
            raise

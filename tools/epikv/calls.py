"""What a client asks of a server: each call once, for both kinds of client.

The functions are coroutines over a Connection. AsyncClient awaits them. The connection of Client
blocks instead of waiting for an event loop, so there a coroutine ends at its first step.
"""

import functools
import inspect
import time as clock
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, cast

import grpc
import grpc.aio
from google.protobuf.field_mask_pb2 import FieldMask
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc

from epikv.connection import bearer, token_from_environment
from epikv.errors import DeadlineExceeded, RpcError, Unavailable
from epikv.messages import (
    Accepted,
    CreatedPacket,
    Delta,
    Event,
    GenerateResult,
    Model,
    OutcomeResult,
    Packet,
    Policy,
    Recorded,
    RenderedChat,
    ScoreResponse,
    from_proto,
)
from epikv.options import (
    Chat,
    Experiment,
    Kv,
    Output,
    Prompt,
    Sampling,
    Scheduling,
    Session,
    Speculation,
    Stop,
)
from epikv.outcome import MAX_BATCH, Outcome, Patience, record, record_batch
from epikv.prefix import prefix_metadata
from epikv.v1 import (
    experiment_pb2,
    experiment_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
    packet_pb2,
    packet_pb2_grpc,
    policy_pb2,
    policy_pb2_grpc,
    tokenization_pb2,
    tokenization_pb2_grpc,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_HEALTH_POLL_SECONDS = 0.1


class Connection(ABC):
    """The services of `server`, HOST:PORT, over a channel of either kind.

    `token` goes with every call; None: $EPIKV_TOKEN.
    """

    def __init__(
        self, server: str, channel: grpc.Channel | grpc.aio.Channel, token: str | None
    ) -> None:
        self.server = server
        self.is_closed = False
        self.generation = generation_pb2_grpc.GenerationServiceStub(channel)
        self.tokenization = tokenization_pb2_grpc.TokenizationServiceStub(channel)
        self.models = model_pb2_grpc.ModelServiceStub(channel)
        self.packets = packet_pb2_grpc.PacketServiceStub(channel)
        self.policies = policy_pb2_grpc.PolicyServiceStub(channel)
        self.experiments = experiment_pb2_grpc.ExperimentServiceStub(channel)
        self.health = health_pb2_grpc.HealthStub(channel)
        self._metadata = bearer(token if token is not None else token_from_environment())

    def start(
        self, method: Callable[..., Any], request: Message, timeout: float | None = None
    ) -> Any:
        """What `method`, of one of the services, returns. Raises ValueError for a closed client."""
        if self.is_closed:
            raise ValueError("the client is closed")
        metadata = (*self._metadata, *prefix_metadata(request))
        return method(request, timeout=timeout, metadata=metadata)

    @abstractmethod
    async def ask(
        self, method: Callable[..., Any], request: Message, timeout: float | None = None
    ) -> Any:
        """The reply, within `timeout` seconds. Raises RpcError; ValueError for a closed client."""

    @abstractmethod
    async def ask_for_parts(self, method: Callable[..., Any], request: Message) -> list[Any]:
        """All messages of a reply that is a stream. Raises as `ask` does."""

    @abstractmethod
    async def sleep(self, seconds: float) -> None: ...


def as_method(call: Callable[..., Any], method: Callable[..., Any], returns: Any = None) -> None:
    """Gives `method` the name, docstring and parameters of `call`, whose connection is its `self`.

    `returns`: the type of its result; None: that of `call`.
    """
    functools.update_wrapper(method, call)
    signature = inspect.signature(call)
    connection, *parameters = signature.parameters.values()
    returns = signature.return_annotation if returns is None else returns
    taken = [inspect.Parameter("self", connection.kind), *parameters]
    described = cast(Any, method)
    described.__signature__ = signature.replace(parameters=taken, return_annotation=returns)
    annotations = {each.name: each.annotation for each in parameters}
    described.__annotations__ = {**annotations, "return": returns}


def generate(
    connection: Connection,
    prompt: Prompt,
    *,
    kv: Kv = Kv(),
    sampling: Sampling = Sampling(),
    stop: Stop = Stop(),
    output: Output = Output(),
    scheduling: Scheduling = Scheduling(),
    experiment: Experiment = Experiment(),
    labels: Mapping[str, str] | None = None,
    packets: Sequence[str] = (),
    session: Session | None = None,
    speculation: Speculation | None = None,
    model: str = "",
    request_id: str = "",
    timeout: float | None = None,
) -> Any:
    """Starts a completion, and returns its stream of events: Accepted, Deltas (and Progress,
    PromptLogprobs, EvictionEvents, if asked for), Summary. Its `text()` gives the text alone.

    prompt: text, a list of token ids, or a Chat.
    kv: the policy, and the budget that it holds the KV cache to.
    sampling: temperature, seed, and what the whole text has to be, such as JSON of a schema.
    stop: the most tokens, and strings or tokens that end it.
    output: what to send beside the text: token ids, logprobs, evictions.
    scheduling: priority and tenant. experiment: who keeps its arm of an A/B test.
    labels: experiments may choose requests by them.
    packets: ids of packets that stand before the prompt (`create_packet`).
    session: of a long conversation, whose past is kept to a budget; the prompt is all of it.
    speculation: several tokens in one step, where they can be guessed.
    model: empty where one model is served. request_id: empty: the server makes one.
    timeout: seconds until the server ends it; None: no limit of the client's.
    """
    request = generate_request(
        prompt,
        kv,
        sampling,
        stop,
        output,
        scheduling,
        experiment,
        labels,
        packets,
        session,
        model,
        request_id,
        speculation,
    )
    return connection.start(connection.generation.Generate, request, timeout)


def event_of(message: generation_pb2.GenerateResponse) -> Event:
    """What one message of a stream holds."""
    return from_proto(getattr(message, message.WhichOneof("event")))


def text_of(event: Event) -> str:
    """What it adds to the text, often nothing. Raises ValueError of several completions."""
    n = event.sampling.n if isinstance(event, Accepted) and event.sampling else None
    if (n or 1) > 1 or (isinstance(event, Delta) and event.completion > 0):
        raise ValueError("text() is of one completion; of several, each Delta names its own")
    return event.text if isinstance(event, Delta) else ""


async def generate_once(
    connection: Connection,
    prompt: Prompt,
    *,
    kv: Kv = Kv(),
    sampling: Sampling = Sampling(),
    stop: Stop = Stop(),
    output: Output = Output(),
    scheduling: Scheduling = Scheduling(),
    experiment: Experiment = Experiment(),
    labels: Mapping[str, str] | None = None,
    packets: Sequence[str] = (),
    session: Session | None = None,
    speculation: Speculation | None = None,
    model: str = "",
    request_id: str = "",
    timeout: float | None = None,
) -> GenerateResult:
    """The whole completion at once: `text`, `usage`, `kv`, ... Arguments are those of `generate`.

    Raises RpcError for what the server refuses, with its reason and what to do.
    """
    request = generate_request(
        prompt,
        kv,
        sampling,
        stop,
        output,
        scheduling,
        experiment,
        labels,
        packets,
        session,
        model,
        request_id,
        speculation,
    )
    return from_proto(await connection.ask(connection.generation.GenerateOnce, request, timeout))


async def score(
    connection: Connection,
    prompt: Prompt,
    continuation: str | Sequence[int],
    *,
    kv: Kv = Kv(),
    chunked: bool = False,
    kv_trace: bool = False,
    residual_steps: bool = False,
    kept: bool = False,
    seed: int | None = None,
    top_logprobs: int = 0,
    packets: Sequence[str] = (),
    scheduling: Scheduling = Scheduling(),
    model: str = "",
    request_id: str = "",
    timeout: float | None = None,
) -> ScoreResponse:
    """Log-probabilities of `continuation` after `prompt`, evicting as generating would.

    prompt, kv, packets, scheduling, model, request_id, timeout: as of `generate`.
    continuation: text or token ids. Its tokens are given, not sampled.
    chunked: force it through in prefill chunks: faster, only under the policy `full`.
    seed: of policies that draw at random; a completion's, to repeat its evictions.
    top_logprobs: so many likeliest tokens at each place, beside the one that stands there.
    kv_trace, residual_steps, kept: what is sent of evictions, as of Output.
    """
    request = generation_pb2.ScoreRequest(
        request_id=request_id,
        model=model,
        kv=kv.to_proto(),
        cadence=generation_pb2.SCORE_CADENCE_CHUNK if chunked else None,
        kv_trace=kv_trace,
        residual_steps=residual_steps,
        kept=kept,
        seed=seed,
        top_logprobs=top_logprobs,
        packets=packets,
        scheduling=scheduling.to_proto(),
        **_prompt(prompt),
        **_text_or_ids("continuation", "continuation_text", "continuation_ids", continuation),
    )
    return from_proto(await connection.ask(connection.generation.Score, request, timeout))


async def create_packet(
    connection: Connection,
    prompt: Prompt,
    *,
    soft_tokens: bool = False,
    kv: Kv = Kv(),
    sampling: Sampling = Sampling(),
    stop: Stop = Stop(),
    output: Output = Output(),
    scheduling: Scheduling = Scheduling(),
    experiment: Experiment = Experiment(),
    labels: Mapping[str, str] | None = None,
    packets: Sequence[str] = (),
    model: str = "",
    request_id: str = "",
    timeout: float | None = None,
) -> CreatedPacket:
    """Reads a prompt and keeps its K and V, for requests that name the packet's id (`packets`).

    Arguments are those of `generate`. Without `Stop.max_output_tokens` the packet is the prompt's;
    with it, the output is a part of it, but for its last token.
    soft_tokens: read it between the tokens that `epikv calibrate packet` trained.
    """
    request = packet_pb2.CreatePacketRequest(
        request=generate_request(
            prompt,
            kv,
            sampling,
            stop,
            output,
            scheduling,
            experiment,
            labels,
            packets,
            None,
            model,
            request_id,
        ),
        soft_tokens=soft_tokens,
    )
    return from_proto(await connection.ask(connection.packets.CreatePacket, request, timeout))


async def packets(connection: Connection, *, model: str = "", tenant: str = "") -> list[Packet]:
    """The tenant's packets, the newest first; of one model, or of all."""
    request = packet_pb2.ListPacketsRequest(model=model, tenant=tenant)
    reply = await connection.ask(connection.packets.ListPackets, request)
    return [from_proto(packet) for packet in reply.packets]


async def delete_packet(connection: Connection, packet_id: str, *, tenant: str = "") -> None:
    """Requests that have named it go on; NOT_FOUND if there is none, or it is another tenant's."""
    request = packet_pb2.DeletePacketRequest(id=packet_id, tenant=tenant)
    await connection.ask(connection.packets.DeletePacket, request)


async def cancel(connection: Connection, request_id: str) -> None:
    """Ends a running or queued request of anyone's; NOT_FOUND if there is none."""
    request = generation_pb2.CancelRequestRequest(request_id=request_id)
    await connection.ask(connection.generation.CancelRequest, request)


async def tokenize(
    connection: Connection, text: str, *, add_special_tokens: bool = True, model: str = ""
) -> list[int]:
    """The token ids of a text, by the model's own tokenizer."""
    request = tokenization_pb2.TokenizeRequest(
        model=model, text=text, add_special_tokens=add_special_tokens
    )
    return list((await connection.ask(connection.tokenization.Tokenize, request)).tokens.ids)


async def detokenize(
    connection: Connection,
    token_ids: Sequence[int],
    *,
    skip_special_tokens: bool = True,
    model: str = "",
) -> str:
    """The text of token ids."""
    request = tokenization_pb2.DetokenizeRequest(
        model=model,
        tokens=generation_pb2.TokenIds(ids=token_ids),
        skip_special_tokens=skip_special_tokens,
    )
    return (await connection.ask(connection.tokenization.Detokenize, request)).text


async def apply_chat_template(
    connection: Connection, chat: Chat, *, model: str = ""
) -> RenderedChat:
    """The prompt that `generate` would make of a conversation."""
    request = tokenization_pb2.ApplyChatTemplateRequest(model=model, chat=chat.to_proto())
    reply = await connection.ask(connection.tokenization.ApplyChatTemplate, request)
    return RenderedChat(text=reply.text, token_ids=list(reply.tokens.ids))


async def models(connection: Connection) -> list[Model]:
    """The models that are served."""
    reply = await connection.ask(connection.models.ListModels, model_pb2.ListModelsRequest())
    return [from_proto(model) for model in reply.models]


async def model(connection: Connection, name: str) -> Model:
    """The served model of this name; NOT_FOUND if there is none."""
    request = model_pb2.GetModelRequest(name=name)
    return from_proto(await connection.ask(connection.models.GetModel, request))


async def tokenizer_json(connection: Connection, *, model: str = "") -> bytes:
    """The model's tokenizer.json, to the byte as it was exported."""
    request = model_pb2.GetTokenizerRequest(model=model)
    parts = await connection.ask_for_parts(connection.models.GetTokenizer, request)
    return b"".join(part.json for part in parts)


async def tokenizer(connection: Connection, *, model: str = "") -> "Tokenizer":
    """The model's tokenizer, of the package `tokenizers`: the ids are those of the daemon."""
    from tokenizers import Tokenizer  # only who asks for it needs the package

    return Tokenizer.from_str((await tokenizer_json(connection, model=model)).decode())


async def policies(connection: Connection, *, model: str = "") -> list[Policy]:
    """All policies by name, with their defaults for `model`."""
    request = policy_pb2.ListPoliciesRequest(model=model)
    reply = await connection.ask(connection.policies.ListPolicies, request)
    return [from_proto(policy) for policy in reply.policies]


async def policy(connection: Connection, name: str, *, model: str = "") -> Policy:
    """The policy of this name, with its defaults for `model`; NOT_FOUND if there is none."""
    request = policy_pb2.GetPolicyRequest(name=name, model=model)
    return from_proto(await connection.ask(connection.policies.GetPolicy, request))


# Definitions are messages, read and written whole: what was read may be changed and sent back,
# and nothing that this version does not know of gets lost.


async def experiments(connection: Connection) -> list[experiment_pb2.Experiment]:
    """All of them by name."""
    request = experiment_pb2.ListExperimentsRequest()
    reply = await connection.ask(connection.experiments.ListExperiments, request)
    return list(reply.experiments)


async def experiment(connection: Connection, name: str) -> experiment_pb2.Experiment:
    """The experiment of this name; NOT_FOUND if there is none."""
    request = experiment_pb2.GetExperimentRequest(name=name)
    return await connection.ask(connection.experiments.GetExperiment, request)


async def create_experiment(
    connection: Connection, definition: experiment_pb2.Experiment, *, validate_only: bool = False
) -> experiment_pb2.Experiment:
    """As a draft. `epikv.experiment.definition` reads one from a file."""
    request = experiment_pb2.CreateExperimentRequest(
        experiment=definition, validate_only=validate_only
    )
    return await connection.ask(connection.experiments.CreateExperiment, request)


async def update_experiment(
    connection: Connection,
    definition: experiment_pb2.Experiment,
    *,
    mask: Sequence[str] = (),
    allow_rebucket: bool = False,
    validate_only: bool = False,
) -> experiment_pb2.Experiment:
    """Replaces the fields in `mask`; default: all that are not the server's own.

    ABORTED (ETAG) unless `definition` has the etag of the latest.
    """
    request = experiment_pb2.UpdateExperimentRequest(
        experiment=definition,
        update_mask=FieldMask(paths=mask) if mask else None,
        allow_rebucket=allow_rebucket,
        validate_only=validate_only,
    )
    return await connection.ask(connection.experiments.UpdateExperiment, request)


async def start_experiment(
    connection: Connection, name: str, *, etag: str = ""
) -> experiment_pb2.Experiment:
    """From now on requests take part in it. ABORTED (ETAG) where `etag` is given and not the latest."""
    request = experiment_pb2.StartExperimentRequest(name=name, etag=etag)
    return await connection.ask(connection.experiments.StartExperiment, request)


async def stop_experiment(
    connection: Connection, name: str, *, reason: str = "", etag: str = ""
) -> experiment_pb2.Experiment:
    """No further requests take part in it. `reason` is kept with it; `etag` is as of start_experiment."""
    request = experiment_pb2.StopExperimentRequest(name=name, reason=reason, etag=etag)
    return await connection.ask(connection.experiments.StopExperiment, request)


async def experiment_report(
    connection: Connection, name: str, *, points: int = 0
) -> experiment_pb2.ExperimentReport:
    """What it has found so far. points: of each series over time, at most 200; 0: 50."""
    request = experiment_pb2.GetExperimentReportRequest(name=name, points=points)
    return await connection.ask(connection.experiments.GetExperimentReport, request)


async def plan_experiment(
    connection: Connection,
    *,
    rate: float | None = None,
    sd: float | None = None,
    effect: float | None = None,
    units: int | None = None,
    power: float = 0,
    alpha: float = 0,
    looks: int = 0,
    arms: int = 0,
    control_permille: int = 0,
    covariate_r2: float = 0,
    pairs: bool = False,
) -> experiment_pb2.ExperimentPlan:
    """How many units it takes to find `effect`, or what so many `units` find.

    Of a proportion give its `rate`, of a mean the standard deviation `sd` between units; of the
    others 0 is the server's default. With `pairs`, `sd` is that of a unit's difference between both
    arms' answers. What a field means: PlanExperimentRequest.
    """
    if (rate is None) == (sd is None):
        raise ValueError("give the rate of a proportion or the sd of a mean, one of them")
    if (effect is None) == (units is None):
        raise ValueError("give the effect to be found or the units there will be, one of them")
    kinds = experiment_pb2.Metric
    request = experiment_pb2.PlanExperimentRequest(
        kind=kinds.KIND_MEAN if rate is None else kinds.KIND_PROPORTION,
        rate=rate,
        sd=sd,
        effect=effect,
        units=units,
        power=power,
        alpha=alpha,
        looks=looks,
        arms=arms,
        control_permille=control_permille,
        covariate_r2=covariate_r2,
        pairs=pairs,
    )
    return await connection.ask(connection.experiments.PlanExperiment, request)


async def record_outcome(
    connection: Connection,
    request_id: str,
    metric: str,
    value: float,
    *,
    time: datetime | None = None,
    key: str = "",
    tenant: str = "",
    patience: Patience = Patience(),
) -> Recorded:
    """What a request turned out to be worth; for arguments see Outcome. When it returns, the
    outcome is kept. Of a request whose arm is "none" it is NOT_FOUND, after `patience`."""
    request = Outcome(request_id, metric, value, time=time, key=key, tenant=tenant).to_proto()

    async def call() -> Recorded:
        return from_proto(await connection.ask(connection.experiments.RecordOutcome, request))

    return await record(call, patience, connection.sleep)


async def record_outcomes(
    connection: Connection, outcomes: Iterable[Outcome], *, patience: Patience = Patience()
) -> list[OutcomeResult]:
    """One result each, in order: one that is refused keeps no other out.

    Raises RpcError where a whole call is refused; recording all of them again does no harm.
    `patience` is with each batch of MAX_BATCH.
    """

    async def call(batch: list[experiment_pb2.RecordOutcomeRequest]) -> list[OutcomeResult]:
        request = experiment_pb2.BatchRecordOutcomesRequest(outcomes=batch)
        reply = await connection.ask(connection.experiments.BatchRecordOutcomes, request)
        return [from_proto(result) for result in reply.results]

    requests = [outcome.to_proto() for outcome in outcomes]
    results: list[OutcomeResult] = []
    for begin in range(0, len(requests), MAX_BATCH):
        batch = requests[begin : begin + MAX_BATCH]
        results += await record_batch(call, batch, patience, connection.sleep)
    return results


async def wait_ready(connection: Connection, timeout: float = 60) -> None:
    """Returns when the server's health service (grpc.health.v1) says that it serves a model.

    Raises DeadlineExceeded after `timeout` seconds, with the address and what is wrong there; any
    other RpcError at once, as of a port that has no health service.
    """
    end = clock.monotonic() + timeout
    wrong = "no answer"
    while (left := end - clock.monotonic()) > 0:
        try:
            request = health_pb2.HealthCheckRequest()
            reply = await connection.ask(connection.health.Check, request, left)
        except Unavailable as error:
            wrong = error.message
        except DeadlineExceeded:
            pass
        else:
            if reply.status == health_pb2.HealthCheckResponse.SERVING:
                return
            name = health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)
            wrong = f"its health is {name}"
        await connection.sleep(min(_HEALTH_POLL_SECONDS, max(0, end - clock.monotonic())))
    raise RpcError(
        grpc.StatusCode.DEADLINE_EXCEEDED,
        f"{connection.server} is not ready after {timeout:g} s: {wrong}",
    )


def generate_request(
    prompt: Prompt,
    kv: Kv,
    sampling: Sampling,
    stop: Stop,
    output: Output,
    scheduling: Scheduling,
    experiment: Experiment,
    labels: Mapping[str, str] | None,
    packets: Sequence[str],
    session: Session | None,
    model: str,
    request_id: str,
    speculation: Speculation | None = None,
) -> generation_pb2.GenerateRequest:
    kinds = (Kv, Sampling, Stop, Output, Scheduling, Experiment)
    for given, kind in zip(
        (kv, sampling, stop, output, scheduling, experiment), kinds, strict=True
    ):
        if not isinstance(given, kind):
            raise ValueError(
                f"{kind.__name__.lower()} is an epikv.{kind.__name__}; not {given!r:.80}"
            )
    return generation_pb2.GenerateRequest(
        request_id=request_id,
        model=model,
        sampling=sampling.to_proto(),
        stop=stop.to_proto(),
        output=output.to_proto(),
        kv=kv.to_proto(),
        scheduling=scheduling.to_proto(),
        experiment=experiment.to_proto(),
        labels=labels,
        packets=packets,
        session=session.to_proto() if session is not None else None,
        speculation=speculation.to_proto() if speculation is not None else None,
        **_prompt(prompt),
    )


def _prompt(prompt: Prompt) -> dict[str, Any]:
    """The one field of a prompt that is set."""
    if isinstance(prompt, Chat):
        return {"chat": prompt.to_proto()}
    return _text_or_ids("prompt", "text", "token_ids", prompt)


def _text_or_ids(
    what: str, text: str, token_ids: str, given: str | Sequence[int]
) -> dict[str, Any]:
    """The one of the fields `text` and `token_ids` that is set. Raises ValueError for neither."""
    if isinstance(given, str):
        return {text: given}
    try:
        if given is None or isinstance(given, bytes):  # which would be ids
            raise TypeError
        return {token_ids: generation_pb2.TokenIds(ids=given)}
    except (TypeError, ValueError):
        kinds = (
            "text or a list of token ids"
            if what != "prompt"
            else ("text, a list of token ids, or a Chat of messages")
        )
        raise ValueError(f"a {what} is {kinds}; not {given!r:.80}") from None

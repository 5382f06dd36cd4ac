"""A thin, typed client of epikvd."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Self, TypeVar

import grpc
from google.protobuf.field_mask_pb2 import FieldMask
from google.protobuf.message import Message

from epikv.connection import Tls, connect, token_from_environment
from epikv.errors import RpcError
from epikv.experiment.outcome import MAX_BATCH, Outcome, Patience, record, record_batch
from epikv.messages import (
    Event,
    GenerateResult,
    Model,
    OutcomeResult,
    Policy,
    Recorded,
    RenderedChat,
    ScoreResponse,
    from_proto,
)
from epikv.options import Chat, Experiment, Kv, Output, Sampling, Scheduling, Stop
from epikv.v1 import (
    experiment_pb2,
    experiment_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
    policy_pb2,
    policy_pb2_grpc,
    tokenization_pb2,
    tokenization_pb2_grpc,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer

DEFAULT_SERVER = "127.0.0.1:50051"

Prompt = str | Sequence[int] | Chat  # text, token ids, or a conversation
Reply = TypeVar("Reply", bound=Message)
Result = TypeVar("Result")


class Stream:
    """A running completion: iterate over its events; leaving a `with` block cancels what is left.

    Iterating raises RpcError when the call fails, CANCELLED after `cancel()` included.
    """

    def __init__(self, call: grpc.Call) -> None:
        self._call = call

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        try:
            message = next(self._call)
        except grpc.RpcError as error:
            raise RpcError.from_grpc(error) from None
        return from_proto(getattr(message, message.WhichOneof("event")))

    def cancel(self) -> None:
        """Ends the request, from any thread; the server frees its KV cache within one step."""
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()


class Client:
    """One connection to a server, for any number of threads. Every call raises RpcError.

    `timeout`, where a method has it, is the call's deadline in seconds; `model` may be left empty
    where one model is served.
    """

    def __init__(
        self,
        server: str = DEFAULT_SERVER,
        options: Sequence[tuple[str, Any]] = (),
        *,
        token: str | None = None,
        tls: Tls | None = None,
    ) -> None:
        """`options` are gRPC channel arguments, over this client's own.

        `token` is shown to the server with every call; default: $EPIKV_TOKEN. Without `tls`, and
        where Tls.from_environment finds nothing, all goes in plain text.
        """
        own = [("grpc.max_receive_message_length", -1)]
        self._channel = connect(
            server,
            [*own, *options],
            tls=tls or Tls.from_environment(),
            token=token if token is not None else token_from_environment(),
        )
        self._generation = generation_pb2_grpc.GenerationServiceStub(self._channel)
        self._tokenization = tokenization_pb2_grpc.TokenizationServiceStub(self._channel)
        self._models = model_pb2_grpc.ModelServiceStub(self._channel)
        self._policies = policy_pb2_grpc.PolicyServiceStub(self._channel)
        self._experiments = experiment_pb2_grpc.ExperimentServiceStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancels what is running and closes the connection."""
        self._channel.close()

    def generate(
        self,
        prompt: Prompt,
        *,
        kv: Kv = Kv(),
        sampling: Sampling = Sampling(),
        stop: Stop = Stop(),
        output: Output = Output(),
        scheduling: Scheduling = Scheduling(),
        experiment: Experiment = Experiment(),
        labels: Mapping[str, str] | None = None,
        model: str = "",
        request_id: str = "",
        timeout: float | None = None,
    ) -> Stream:
        """Starts a completion: Accepted, Deltas (and Progress, PromptLogprobs, EvictionEvents, if
        asked for), Summary. Experiments may choose requests by `labels`."""
        request = _generate_request(
            prompt, kv, sampling, stop, output, scheduling, experiment, labels, model, request_id
        )
        return Stream(self._generation.Generate(request, timeout=timeout))

    def generate_once(
        self,
        prompt: Prompt,
        *,
        kv: Kv = Kv(),
        sampling: Sampling = Sampling(),
        stop: Stop = Stop(),
        output: Output = Output(),
        scheduling: Scheduling = Scheduling(),
        experiment: Experiment = Experiment(),
        labels: Mapping[str, str] | None = None,
        model: str = "",
        request_id: str = "",
        timeout: float | None = None,
    ) -> GenerateResult:
        """The whole completion at once."""
        request = _generate_request(
            prompt, kv, sampling, stop, output, scheduling, experiment, labels, model, request_id
        )
        return from_proto(_call(self._generation.GenerateOnce, request, timeout))

    def score(
        self,
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
        scheduling: Scheduling = Scheduling(),
        model: str = "",
        request_id: str = "",
        timeout: float | None = None,
    ) -> ScoreResponse:
        """Log-probabilities of `continuation` after `prompt`, evicting as generating would.

        `chunked` forces it through in prefill chunks: faster, only under the policy `full`.
        `seed`: of policies that draw at random; a completion's, to repeat its evictions.
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
            scheduling=scheduling.to_proto(),
            **_either("text", "token_ids", prompt),
            **_either("continuation_text", "continuation_ids", continuation),
        )
        return from_proto(_call(self._generation.Score, request, timeout))

    def cancel(self, request_id: str) -> None:
        """Ends a running or queued request of anyone's; NOT_FOUND if there is none."""
        request = generation_pb2.CancelRequestRequest(request_id=request_id)
        _call(self._generation.CancelRequest, request)

    def tokenize(self, text: str, *, add_special_tokens: bool = True, model: str = "") -> list[int]:
        request = tokenization_pb2.TokenizeRequest(
            model=model, text=text, add_special_tokens=add_special_tokens
        )
        return list(_call(self._tokenization.Tokenize, request).tokens.ids)

    def detokenize(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = True, model: str = ""
    ) -> str:
        request = tokenization_pb2.DetokenizeRequest(
            model=model,
            tokens=generation_pb2.TokenIds(ids=token_ids),
            skip_special_tokens=skip_special_tokens,
        )
        return _call(self._tokenization.Detokenize, request).text

    def apply_chat_template(self, chat: Chat, *, model: str = "") -> RenderedChat:
        """The prompt that `generate` would make of a conversation."""
        request = tokenization_pb2.ApplyChatTemplateRequest(model=model, chat=chat.to_proto())
        reply = _call(self._tokenization.ApplyChatTemplate, request)
        return RenderedChat(text=reply.text, token_ids=list(reply.tokens.ids))

    def models(self) -> list[Model]:
        reply = _call(self._models.ListModels, model_pb2.ListModelsRequest())
        return [from_proto(model) for model in reply.models]

    def model(self, name: str) -> Model:
        return from_proto(_call(self._models.GetModel, model_pb2.GetModelRequest(name=name)))

    def tokenizer_json(self, *, model: str = "") -> bytes:
        """The model's tokenizer.json, to the byte as it was exported."""
        request = model_pb2.GetTokenizerRequest(model=model)
        try:
            return b"".join(part.json for part in self._models.GetTokenizer(request))
        except grpc.RpcError as error:
            raise RpcError.from_grpc(error) from None

    def tokenizer(self, *, model: str = "") -> "Tokenizer":
        """The model's tokenizer, of the package `tokenizers`: the ids are those of the daemon."""
        from tokenizers import Tokenizer  # only who asks for it needs the package

        return Tokenizer.from_str(self.tokenizer_json(model=model).decode())

    def policies(self, *, model: str = "") -> list[Policy]:
        """All policies by name, with their defaults for `model`."""
        reply = _call(self._policies.ListPolicies, policy_pb2.ListPoliciesRequest(model=model))
        return [from_proto(policy) for policy in reply.policies]

    def policy(self, name: str, *, model: str = "") -> Policy:
        request = policy_pb2.GetPolicyRequest(name=name, model=model)
        return from_proto(_call(self._policies.GetPolicy, request))

    # Definitions are messages, read and written whole: what was read may be changed and sent back,
    # and nothing that this version does not know of gets lost.

    def experiments(self) -> list[experiment_pb2.Experiment]:
        """All of them by name."""
        request = experiment_pb2.ListExperimentsRequest()
        return list(_call(self._experiments.ListExperiments, request).experiments)

    def experiment(self, name: str) -> experiment_pb2.Experiment:
        request = experiment_pb2.GetExperimentRequest(name=name)
        return _call(self._experiments.GetExperiment, request)

    def create_experiment(
        self, definition: experiment_pb2.Experiment, *, validate_only: bool = False
    ) -> experiment_pb2.Experiment:
        """As a draft. `epikv.experiment.definition` reads one from a file."""
        request = experiment_pb2.CreateExperimentRequest(
            experiment=definition, validate_only=validate_only
        )
        return _call(self._experiments.CreateExperiment, request)

    def update_experiment(
        self,
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
        return _call(self._experiments.UpdateExperiment, request)

    def start_experiment(self, name: str, *, etag: str = "") -> experiment_pb2.Experiment:
        request = experiment_pb2.StartExperimentRequest(name=name, etag=etag)
        return _call(self._experiments.StartExperiment, request)

    def stop_experiment(
        self, name: str, *, reason: str = "", etag: str = ""
    ) -> experiment_pb2.Experiment:
        request = experiment_pb2.StopExperimentRequest(name=name, reason=reason, etag=etag)
        return _call(self._experiments.StopExperiment, request)

    def experiment_report(self, name: str, *, points: int = 0) -> experiment_pb2.ExperimentReport:
        """What it has found so far. points: of each series over time, at most 200; 0: 50."""
        request = experiment_pb2.GetExperimentReportRequest(name=name, points=points)
        return _call(self._experiments.GetExperimentReport, request)

    def plan_experiment(
        self,
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
    ) -> experiment_pb2.ExperimentPlan:
        """How many units it takes to find `effect`, or what so many `units` find.

        Of a proportion give its `rate`, of a mean the standard deviation `sd` between units; of the
        others 0 is the server's default. What a field means: PlanExperimentRequest.
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
        )
        return _call(self._experiments.PlanExperiment, request)

    def record_outcome(
        self,
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
        outcome = Outcome(request_id, metric, value, time=time, key=key, tenant=tenant).to_proto()
        return from_proto(record(lambda: _call(self._experiments.RecordOutcome, outcome), patience))

    def record_outcomes(
        self, outcomes: Iterable[Outcome], *, patience: Patience = Patience()
    ) -> list[OutcomeResult]:
        """One result each, in order: one that is refused keeps no other out.

        Raises RpcError where a whole call is refused; recording all of them again does no harm.
        `patience` is with each batch of MAX_BATCH.
        """
        requests = [outcome.to_proto() for outcome in outcomes]
        results: list[OutcomeResult] = []
        for begin in range(0, len(requests), MAX_BATCH):
            batch = requests[begin : begin + MAX_BATCH]
            results += record_batch(self._record_outcomes, batch, patience)
        return results

    def _record_outcomes(
        self, outcomes: list[experiment_pb2.RecordOutcomeRequest]
    ) -> list[OutcomeResult]:
        request = experiment_pb2.BatchRecordOutcomesRequest(outcomes=outcomes)
        reply = _call(self._experiments.BatchRecordOutcomes, request)
        return [from_proto(result) for result in reply.results]


def patiently(call: Callable[[], Result], *, attempts: int = 4, most_seconds: float = 60) -> Result:
    """What `call` returns. While the server refuses it and says when to come back, that is waited for.

    For calls that do their work at once: `patiently(lambda: client.generate_once("..."))`. The last
    refusal is raised, and so is one whose delay is over `most_seconds`.
    """
    while True:
        try:
            return call()
        except RpcError as error:
            attempts -= 1
            delay = error.retry_delay
            if attempts <= 0 or delay is None or delay > most_seconds:
                raise
        time.sleep(delay)


def _call(method: Callable[..., Reply], request: Message, timeout: float | None = None) -> Reply:
    try:
        return method(request, timeout=timeout)
    except grpc.RpcError as error:
        raise RpcError.from_grpc(error) from None


def _generate_request(
    prompt: Prompt,
    kv: Kv,
    sampling: Sampling,
    stop: Stop,
    output: Output,
    scheduling: Scheduling,
    experiment: Experiment,
    labels: Mapping[str, str] | None,
    model: str,
    request_id: str,
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
        **_either("text", "token_ids", prompt),
    )


def _either(text: str, token_ids: str, prompt: Prompt) -> dict[str, Any]:
    """The one field of a prompt that is set: text or token ids by these names, or a chat."""
    if isinstance(prompt, str):
        return {text: prompt}
    if isinstance(prompt, Chat):
        return {"chat": prompt.to_proto()}
    try:
        if prompt is None or isinstance(prompt, bytes):  # which would be ids
            raise TypeError
        return {token_ids: generation_pb2.TokenIds(ids=prompt)}
    except (TypeError, ValueError):
        raise ValueError(
            f"a prompt is text, a list of token ids, or a Chat of messages; not {prompt!r:.80}"
        ) from None

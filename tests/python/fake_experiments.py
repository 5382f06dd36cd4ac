"""The experiments of the stand-in for the daemon: definitions, etags and outcomes in memory."""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import isfinite
from typing import NoReturn

import grpc
from epikv.v1 import errors_pb2, experiment_pb2, experiment_pb2_grpc
from google.protobuf import any_pb2
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

Outcomes = dict[tuple[str, str, str, str], float]  # by tenant, request, metric, key


@dataclass
class Experiments:
    """What there is, and what a test says of it."""

    definitions: dict[str, experiment_pb2.Experiment] = field(default_factory=dict)
    took_part: set[str] = field(default_factory=set)  # requests by id
    # Of those, how often each is not found before its record has arrived.
    arriving: dict[str, int] = field(default_factory=dict)
    outcomes: Outcomes = field(default_factory=dict)
    # Of the next calls that record: a code, and a hint in seconds.
    refusals: list[tuple[grpc.StatusCode, float | None]] = field(default_factory=list)
    # Of the next outcomes that a batch records: refused for so many seconds each.
    delays: list[float] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)  # outcomes of each call that was taken
    is_store_away: bool = False
    # Of each experiment, what the next calls for a report get; the last stays.
    reports: dict[str, list[experiment_pb2.ExperimentReport]] = field(default_factory=dict)
    plan: experiment_pb2.ExperimentPlan = field(default_factory=experiment_pb2.ExperimentPlan)

    def metrics(self) -> set[str]:
        return {metric.name for e in self.definitions.values() for metric in e.metrics}


def refuse(
    context: grpc.ServicerContext, code: grpc.StatusCode, message: str, *details: Message
) -> NoReturn:
    """details: of google.rpc, or packed."""
    packed = [
        detail
        if isinstance(detail, any_pb2.Any)
        else any_pb2.Any(
            type_url=f"type.googleapis.com/google.rpc.{detail.DESCRIPTOR.name}",
            value=detail.SerializeToString(),
        )
        for detail in details
    ]
    status = errors_pb2.Status(code=code.value[0], message=message, details=packed)
    context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
    context.abort(code, message)


def reason(word: str) -> errors_pb2.ErrorInfo:
    return errors_pb2.ErrorInfo(reason=word, domain="epikv")


def _duration(seconds: float) -> Duration:
    whole, rest = divmod(seconds, 1)
    return Duration(seconds=int(whole), nanos=round(rest * 1e9))


def _complete(definition: experiment_pb2.Experiment) -> None:
    definition.layer = definition.layer or "default"
    definition.salt = definition.salt or definition.name
    definition.alpha = definition.alpha or 0.05


class Service(experiment_pb2_grpc.ExperimentServiceServicer):
    def __init__(self, kept: Experiments, noted: Callable[[Message], None]) -> None:
        self._kept = kept
        self._noted = noted
        self._changes = 0

    def ListExperiments(self, request, context):
        named = sorted(self._kept.definitions.items())
        return experiment_pb2.ListExperimentsResponse(experiments=[e for _, e in named])

    def GetExperiment(self, request, context):
        return self._find(request.name, context)

    def CreateExperiment(self, request, context):
        self._noted(request)
        made = experiment_pb2.Experiment()
        made.CopyFrom(request.experiment)
        self._check(made, context)
        if made.name in self._kept.definitions:
            refuse(context, grpc.StatusCode.ALREADY_EXISTS, f"there is an experiment '{made.name}'")
        made.state = experiment_pb2.Experiment.STATE_DRAFT
        made.bucket_version = 1
        _complete(made)
        return made if request.validate_only else self._keep(made)

    def UpdateExperiment(self, request, context):
        self._noted(request)
        before = self._find(request.experiment.name, context)
        self._match(before, request.experiment.etag, context)
        after = experiment_pb2.Experiment()
        if request.HasField("update_mask"):
            after.CopyFrom(before)
            request.update_mask.MergeMessage(request.experiment, after, True, True)
        else:
            after.CopyFrom(request.experiment)
        self._check(after, context)
        is_running = before.state == experiment_pb2.Experiment.STATE_RUNNING
        if list(before.arms) != list(after.arms) and is_running and not request.allow_rebucket:
            message = "it runs, and units could move to another arm"
            refuse(context, grpc.StatusCode.FAILED_PRECONDITION, message, reason("REBUCKET"))
        for own in ("state", "bucket_version", "first_bucket"):
            setattr(after, own, getattr(before, own))
        if before.HasField("start_time"):
            after.start_time.CopyFrom(before.start_time)
        _complete(after)
        return after if request.validate_only else self._keep(after)

    def StartExperiment(self, request, context):
        return self._move(request, experiment_pb2.Experiment.STATE_RUNNING, context)

    def StopExperiment(self, request, context):
        return self._move(request, experiment_pb2.Experiment.STATE_STOPPED, context)

    def GetExperimentReport(self, request, context):
        self._noted(request)
        self._refuse_as_told(context)
        if request.name not in self._kept.reports:
            refuse(context, grpc.StatusCode.NOT_FOUND, f"no experiment '{request.name}'")
        reports = self._kept.reports[request.name]
        return reports.pop(0) if len(reports) > 1 else reports[0]

    def PlanExperiment(self, request, context):
        self._noted(request)
        return self._kept.plan

    def RecordOutcome(self, request, context):
        self._noted(request)
        self._refuse_as_told(context)
        result = self._record(request)
        if result.code:
            code = next(code for code in grpc.StatusCode if code.value[0] == result.code)
            refuse(context, code, result.message, reason(result.reason))
        return result.response

    def BatchRecordOutcomes(self, request, context):
        self._refuse_as_told(context)
        if len(request.outcomes) > 1000:
            refuse(context, grpc.StatusCode.INVALID_ARGUMENT, "at most 1000 outcomes")
        self._kept.batches.append(len(request.outcomes))
        results = [self._delay() or self._record(outcome) for outcome in request.outcomes]
        return experiment_pb2.BatchRecordOutcomesResponse(results=results)

    def _find(self, name, context):
        if name not in self._kept.definitions:
            refuse(context, grpc.StatusCode.NOT_FOUND, f"no experiment '{name}'")
        return self._kept.definitions[name]

    def _match(self, definition, etag, context):
        if definition.etag != etag:
            message = f"'{definition.name}' has changed since it was read"
            refuse(context, grpc.StatusCode.ABORTED, message, reason("ETAG"))

    def _check(self, definition, context):
        weight = sum(arm.weight_permille for arm in definition.arms)
        if weight == 1000:
            return
        violation = errors_pb2.BadRequest.FieldViolation(
            field="experiment.arms", description=f"weights must sum to 1000, are {weight}"
        )
        details = errors_pb2.BadRequest(field_violations=[violation])
        refuse(context, grpc.StatusCode.INVALID_ARGUMENT, "1 field is invalid", details)

    def _keep(self, definition):
        self._changes += 1
        definition.etag = f"etag-{self._changes}"
        self._kept.definitions[definition.name] = definition
        return definition

    def _move(self, request, state, context):
        self._noted(request)
        before = self._find(request.name, context)
        if request.etag:
            self._match(before, request.etag, context)
        after = experiment_pb2.Experiment()
        after.CopyFrom(before)
        after.state = state
        if state == experiment_pb2.Experiment.STATE_STOPPED:
            after.stop_reason = request.reason
            after.stop_time.FromJsonString("2031-05-02T12:00:00Z")
        else:
            after.start_time.FromJsonString("2031-05-01T12:00:00Z")
        return self._keep(after)

    def _refuse_as_told(self, context):
        if not self._kept.refusals:
            return
        code, delay = self._kept.refusals.pop(0)
        hint = [] if delay is None else [errors_pb2.RetryInfo(retry_delay=_duration(delay))]
        refuse(context, code, "not now", *hint)

    def _delay(self):
        if not self._kept.delays:
            return None
        return experiment_pb2.BatchRecordOutcomesResponse.Result(
            code=grpc.StatusCode.RESOURCE_EXHAUSTED.value[0],
            message="not now",
            retry_delay=_duration(self._kept.delays.pop(0)),
        )

    def _record(self, outcome):
        def refused(code: grpc.StatusCode, word: str, message: str):
            return experiment_pb2.BatchRecordOutcomesResponse.Result(
                code=code.value[0], reason=word, message=message
            )

        kept, request_id = self._kept, outcome.request_id
        left = kept.arriving.get(request_id, 0)
        kept.arriving[request_id] = max(0, left - 1)
        if request_id not in kept.took_part or left > 0:
            return refused(grpc.StatusCode.NOT_FOUND, "", f"'{request_id}' took part in nothing")
        if outcome.metric not in kept.metrics() or not isfinite(outcome.value):
            message = f"unknown metric '{outcome.metric}', or no number"
            return refused(grpc.StatusCode.INVALID_ARGUMENT, "METRIC", message)
        place = (outcome.tenant, request_id, outcome.metric, outcome.idempotency_key)
        is_known = place in kept.outcomes
        before = kept.outcomes.setdefault(place, outcome.value)
        if before != outcome.value:
            return refused(grpc.StatusCode.ALREADY_EXISTS, "", f"it is {before:g}")
        response = experiment_pb2.RecordOutcomeResponse(
            duplicate=is_known, spooled=kept.is_store_away
        )
        return experiment_pb2.BatchRecordOutcomesResponse.Result(response=response)

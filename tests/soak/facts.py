"""What must hold of every answer: its status, and what it says of the cache."""

import math
import random
from dataclasses import dataclass, replace

import grpc
from cache import Replay
from calls import Outcome, Wrong, at_most, same
from cases import Behaviour, Case, Method, float_bits
from epikv.errors import RpcError
from epikv.messages import Accepted, Model, Policy, Summary
from epikv.options import POSITIONS
from epikv.v1 import generation_pb2
from faults import EVICT_NOTHING
from google.protobuf.json_format import MessageToDict

INVALID, PRECONDITION, EXHAUSTED, UNAVAILABLE, CANCELLED = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
)
# Of requests that are valid by the schemas.
REFUSALS = {
    (INVALID, "INVALID_REQUEST"),  # of policy parameters only: see _check_violations
    (INVALID, "KV_BUDGET"),
    (PRECONDITION, "KV_POOL_TOO_SMALL"),
    (PRECONDITION, "ROUND_TOO_LARGE"),
    (INVALID, "KV_POOL_TOO_SMALL"),  # and a policy parameter is at fault besides
    (EXHAUSTED, "QUEUE_FULL"),
}
# Of what the client did; an empty reason: whatever it is.
ENDS = {
    Behaviour.CANCEL: {(CANCELLED, "")},
    Behaviour.CANCEL_BY_ID: {(CANCELLED, "")},
    Behaviour.DISCONNECT: {(CANCELLED, "")},
    Behaviour.DEADLINE: {
        (grpc.StatusCode.DEADLINE_EXCEEDED, ""),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_INFEASIBLE"),
    },
    Behaviour.STALL: {(EXHAUSTED, "SLOW_READER"), (CANCELLED, "")},
}
STOPPING = {(UNAVAILABLE, ""), (CANCELLED, "")}
DRAINED = (UNAVAILABLE, "DRAINING")  # by an operator: what runs goes on
REFUSED = (INVALID, grpc.StatusCode.OUT_OF_RANGE, PRECONDITION)


@dataclass(frozen=True)
class Rules:
    """What the answers of one daemon are held against."""

    models: dict[str, Model]
    policies: dict[str, Policy]
    chunk: int  # prompt tokens between rounds

    def check(self, outcome: Outcome, *, stopping: bool = False, drained: bool = False) -> None:
        """Raises Wrong for a status or a message that must not be.

        stopping: the daemon has had SIGTERM; drained: by an operator, meanwhile.
        """
        error = outcome.error
        if drained and error is not None and was_drained(error):
            if outcome.accepted is not None:
                raise Wrong(f"a drain ended what ran: {error}")
        elif outcome.case.faults and not stopping:
            _check_planted(outcome)
        elif error is not None and not outcome.case.faults:
            _check_error(outcome, error, stopping)
        if outcome.accepted is not None:
            self._check_accepted(outcome.case, outcome.accepted)
        if outcome.summary is not None:
            self._check_end(outcome, outcome.summary)
        if _traced(outcome):
            policy = self.policies[outcome.accepted.kv.policy]
            Replay(self._model(outcome.case), policy, self.chunk, outcome).check()

    def _model(self, case: Case) -> Model:
        """The one that is asked, which need not be named where there is no other."""
        return self.models[case.request.model or next(iter(self.models))]

    def _check_accepted(self, case: Case, accepted: Accepted) -> None:
        kv, asked = accepted.kv, case.request.kv
        same("request id", accepted.request_id, case.request.request_id or accepted.request_id)
        same("policy", kv.policy, asked.policy or kv.policy)
        if case.request.HasField("token_ids"):
            same("prompt", accepted.prompt_tokens, len(case.request.token_ids.ids))
        total = accepted.prompt_tokens + accepted.max_output_tokens
        budget = total
        evicts = kv.policy not in EVICT_NOTHING
        if evicts and asked.HasField("max_tokens"):
            budget = asked.max_tokens
        if evicts and asked.HasField("keep_ratio"):
            budget = math.ceil(asked.keep_ratio * total * (1 - 1e-15))
        same("budget", kv.budget_tokens, budget)
        same("positions", POSITIONS[kv.positions], max(asked.positions, 1))
        for name, value in MessageToDict(asked.policy_params).items():
            if value != []:  # a list of nothing asks for the model's own
                same(f"parameter {name}", kv.policy_params[name], value)
        if case.method is Method.SCORE:
            return
        sampling = case.request.sampling
        for name in ("temperature", "top_p", "seed", "min_p", "typical_p", "repetition_penalty"):
            if sampling.HasField(name):
                same(name, getattr(accepted.sampling, name), getattr(sampling, name))
        if sampling.HasField("top_k"):  # over the vocabulary all are the same
            told = (accepted.sampling.top_k, sampling.top_k)
            same("top_k", *(min(k, self._model(case).vocab_size) for k in told))
        same("logit bias", accepted.sampling.logit_bias, dict(sampling.logit_bias))
        ends = [] if case.request.stop.ignore_eos else self._model(case).eos_token_ids
        stops = {*case.request.stop.stop_token_ids, *ends}
        same("stop tokens", set(accepted.stop_token_ids), stops)
        if case.request.stop.HasField("max_output_tokens"):
            asked_output = case.request.stop.max_output_tokens
            same("max output", accepted.max_output_tokens, asked_output)

    def _check_end(self, outcome: Outcome, summary: Summary) -> None:
        accepted, request = outcome.accepted, outcome.case.request
        output = summary.usage.output_tokens
        same("prompt in the summary", summary.usage.prompt_tokens, accepted.prompt_tokens)
        at_most("cached prompt", summary.usage.cached_prompt_tokens, accepted.prompt_tokens)
        at_most("bytes held", summary.kv.peak_bytes, accepted.kv.reserved_bytes)
        at_most("output", output, accepted.max_output_tokens)
        if summary.finish_reason == "length":
            same("output", output, accepted.max_output_tokens)
        if outcome.case.method is Method.SCORE:
            same("reason", summary.finish_reason, "length")
            same("greedy marks", len(outcome.greedy), output)
            has = (True, True, request.residual_steps, request.kept)
        else:
            self._check_stop(outcome, summary)
            wants = request.output
            has = (wants.token_ids, wants.logprobs, wants.residual_steps, wants.kept)
        same("token ids", len(outcome.tokens), output if has[0] else 0)
        same("logprobs", len(outcome.logprobs), output if has[1] else 0)
        top = 0 if outcome.case.method is Method.SCORE else request.output.top_logprobs
        same("likeliest tokens", len(outcome.top_logprobs), output if top else 0)
        if any(len(place.token_ids) != top for place in outcome.top_logprobs):
            raise Wrong(f"not {top} likeliest tokens at each place")
        if outcome.case.method is not Method.SCORE:
            wanted = request.output.prompt_logprobs
            same("prompt figures", len(outcome.prompt), accepted.prompt_tokens - 1 if wanted else 0)
        # The last output token is never cached; of the prompt's none is an output token.
        same("signals", len(outcome.signals), output - 1 if has[2] else 0)
        same("kept", bool(summary.kv.kept), has[3])
        if any(not -math.inf < logprob <= 1e-6 for logprob in outcome.logprobs):
            raise Wrong(f"a log-probability among {outcome.logprobs}")

    def _check_stop(self, outcome: Outcome, summary: Summary) -> None:
        stop = outcome.case.request.stop
        least = stop.min_output_tokens + (summary.finish_reason != "length")
        at_most("least output", least, summary.usage.output_tokens)
        last = outcome.tokens[-1] if outcome.tokens else None
        match summary.finish_reason:
            case "length":
                pass
            case "end":
                if last is not None and last not in self._model(outcome.case).eos_token_ids:
                    raise Wrong(f"it ended at token {last}")
            case "stop_token":
                if summary.stop_token_id not in stop.stop_token_ids:
                    raise Wrong(f"nobody asked to stop at token {summary.stop_token_id}")
                same(
                    "last token",
                    last if outcome.tokens else summary.stop_token_id,
                    summary.stop_token_id,
                )
            case "stop_string":
                if summary.stop_string not in stop.stop_strings:
                    raise Wrong(f"nobody asked to stop at '{summary.stop_string}'")
            case other:
                raise Wrong(f"it finished by '{other}'")
        if outcome.text and not stop.include_stop and not stop.min_output_tokens:
            for string in stop.stop_strings:
                if string in outcome.text:
                    raise Wrong(f"the text has the stop string '{string}'")


def was_drained(error: RpcError) -> bool:
    """The request was refused by an operator's drain."""
    return (error.code, error.reason) == DRAINED


def same_answer(first: Outcome, again: Outcome) -> None:
    """Raises Wrong unless `again`, which asked for everything, repeats what `first` has seen."""
    if again.summary is None:
        raise Wrong(f"alone it ended with {again.error}")
    if first.summary is None:
        for name in ("tokens", "signals", "evictions", "text"):
            seen = getattr(first, name)
            same(f"alone, {name}", getattr(again, name)[: len(seen)], seen)
        told = float_bits(again.logprobs[: len(first.logprobs)])
        same("alone, logprobs", told, float_bits(first.logprobs))
        return
    for name in ("tokens", "signals", "evictions", "greedy", "text"):
        if getattr(first, name):
            same(f"alone, {name}", getattr(again, name), getattr(first, name))
    if first.logprobs:
        same("alone, logprobs", float_bits(again.logprobs), float_bits(first.logprobs))
    same("alone, end", _comparable(again.summary, first), _comparable(first.summary, first))


def same_scores(generated: Outcome, scored: Outcome) -> None:
    """Raises Wrong unless scoring a completion's output repeats its log-probabilities."""
    if scored.summary is None:
        raise Wrong(f"scoring ended with {scored.error}")
    same("scored tokens", scored.tokens, generated.tokens)
    same("scored logprobs", float_bits(scored.logprobs), float_bits(generated.logprobs))
    if generated.case.request.output.kv_trace:
        same("rounds while scoring", scored.evictions, generated.evictions)
    if generated.signals:
        same("signals while scoring", scored.signals, generated.signals)
    used, wanted = (_comparable(o.summary, generated).kv for o in (scored, generated))
    same("cache while scoring", replace(used, budget_tokens=wanted.budget_tokens), wanted)


def _comparable(summary: Summary, first: Outcome) -> Summary:
    """Without what depends on time, on who came before, or on what else was asked for."""
    kept = summary.kv.kept if first.summary.kv.kept else []
    return replace(
        summary,
        usage=replace(summary.usage, cached_prompt_tokens=0),
        timings=None,
        arm="",  # drawn for each request, as nobody says of which unit it is
        kv=replace(summary.kv, kept=kept, peak_bytes=0),
    )


def _traced(outcome: Outcome) -> bool:
    """All rounds are known, and they came one token at a time."""
    request = outcome.case.request
    if outcome.summary is None or outcome.summary.kv_trace_truncated:
        return False
    if outcome.case.method is Method.SCORE:
        return request.kv_trace and request.cadence != generation_pb2.SCORE_CADENCE_CHUNK
    return request.output.kv_trace


def _check_planted(outcome: Outcome) -> None:
    faults, error = outcome.case.faults, outcome.error
    names = ", ".join(fault.name for fault in faults)
    if error is None:
        raise Wrong(f"accepted in spite of: {names}")
    if len(faults) > 1 and error.code is not INVALID:
        raise Wrong(f"{names}: {error}")
    if not any(error.code in fault.codes for fault in faults):
        raise Wrong(f"{names}: {error}")
    named = {violation.field for violation in error.field_violations}
    if missing := {fault.field for fault in faults if fault.field} - named:
        raise Wrong(f"{names}: {sorted(missing)} not named in {error}")
    if not error.reason or not error.message:
        raise Wrong(f"{names}: nothing said in {error}")


def _check_error(outcome: Outcome, error: RpcError, stopping: bool) -> None:
    case = outcome.case
    allowed = REFUSALS | ENDS.get(case.behaviour, set()) | (STOPPING if stopping else set())
    if case.request.request_id.startswith("shared"):
        allowed = allowed | {(grpc.StatusCode.ALREADY_EXISTS, "DUPLICATE_ID")}
    ended = (error.code, error.reason)
    if ended not in allowed and (error.code, "") not in allowed:
        raise Wrong(f"it ended with {error}")
    if outcome.accepted is not None and ended in REFUSALS:
        raise Wrong(f"refused after it was accepted: {error}")
    if error.code not in REFUSED:
        return
    fields = [violation.field for violation in error.field_violations]
    if not fields or not error.message:
        raise Wrong(f"nothing said in {error}")
    if error.code is INVALID and any(
        field != "kv.budget" and not field.startswith("kv.policy_params") for field in fields
    ):
        raise Wrong(f"a valid request was refused: {error}")


def budgets_to_try(rng: random.Random, error: RpcError) -> tuple[int, int | None]:
    """Of a refusal that named the smallest budget: that one, and one that is still too small."""
    smallest, given = int(error.metadata["min"]), int(error.metadata["budget"])
    if smallest <= given:
        raise Wrong(f"the smallest budget is {smallest} and {given} was refused")
    return smallest, rng.randint(given + 1, smallest - 1) if given + 1 < smallest else None


def tally(outcome: Outcome) -> str:
    """How it ended, in a word or two."""
    if outcome.error is None:
        return "ok"
    return f"{outcome.error.code.name} {outcome.error.reason}".strip()

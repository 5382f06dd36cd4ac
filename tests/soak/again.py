"""The same request once more: replayed with everything told, scored, or with another budget."""

from dataclasses import replace

from calls import Outcome
from cases import Behaviour, Case, Method, Request
from epikv.v1 import generation_pb2
from faults import EVICT_NOTHING


def _read(case: Case, request: Request, method: Method | None = None) -> Case:
    return replace(
        case,
        method=method or case.method,
        behaviour=Behaviour.READ,
        request=request,
        wire=request.SerializeToString(),
    )


def replayed(first: Outcome) -> Case:
    """The request as it was resolved, with all outputs; it is to say what `first` said."""
    request = type(first.case.request)()
    request.CopyFrom(first.case.request)
    request.request_id = ""
    seed = first.accepted.sampling.seed
    in_chunks = False
    if isinstance(request, generation_pb2.ScoreRequest):
        request.seed = seed
        wants = request
        in_chunks = request.cadence == generation_pb2.SCORE_CADENCE_CHUNK
    else:
        request.sampling.seed = seed
        wants = request.output
        wants.text = wants.token_ids = wants.logprobs = True
    wants.kv_trace = wants.kept = True
    wants.residual_steps = not in_chunks
    return _read(first.case, request)


def can_score(outcome: Outcome) -> bool:
    return (
        outcome.summary is not None
        and outcome.case.method is not Method.SCORE
        and bool(outcome.tokens)
        and bool(outcome.logprobs)
        and not _evicts_for_its_length(outcome)
    )


def _evicts_for_its_length(outcome: Outcome) -> bool:
    """A pyramid's last lanes evict below the budget. What is known not to outgrow the budget evicts nothing, and
    that is known of the output once it has ended."""
    assert outcome.summary is not None
    if (outcome.accepted.kv.policy_params or {}).get("allocator") != "pyramid":
        return False
    cached = outcome.accepted.prompt_tokens + len(outcome.tokens) - 1
    return outcome.summary.kv.rounds > 0 and cached <= outcome.accepted.kv.budget_tokens


def scored(generated: Outcome) -> Case:
    """Its output, under the cache as it was resolved: shares and rules would resolve anew."""
    first, kv = generated.case.request, generated.accepted.kv
    request = generation_pb2.ScoreRequest(
        model=first.model,
        seed=generated.accepted.sampling.seed,
        kv_trace=True,
        kept=True,
        residual_steps=first.output.residual_steps,
    )
    if first.HasField("text"):
        request.text = first.text
    else:
        request.token_ids.CopyFrom(first.token_ids)
    request.continuation_ids.ids.extend(generated.tokens)
    wanted = request.kv
    wanted.policy = kv.policy
    wanted.policy_params.update(kv.policy_params or {})
    wanted.positions = first.kv.positions
    if kv.policy not in EVICT_NOTHING:
        wanted.max_tokens = kv.budget_tokens
    elif kv.read_tokens:
        wanted.max_tokens = kv.read_tokens
    wanted.protect_prompt = kv.protected_prompt_tokens > 0
    wanted.sink_tokens = kv.sink_tokens
    wanted.recent_tokens = kv.recent_tokens
    total = generated.accepted.prompt_tokens + len(generated.tokens)
    for span in kv.protected_spans:
        if span.begin < total:
            wanted.protected_spans.add(begin=span.begin, end=min(span.end, total))
    return _read(generated.case, request, Method.SCORE)


def with_budget(case: Case, tokens: int) -> Case:
    request = type(case.request)()
    request.CopyFrom(case.request)
    request.request_id = ""
    request.kv.max_tokens = tokens
    return _read(case, request)

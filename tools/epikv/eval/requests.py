"""One completion of an evaluation: what is asked of the daemon, and what becomes of the answer."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil
from typing import Any

from epikv.client import Client
from epikv.eval.items import Item, Probe
from epikv.eval.plan import FULL, ORACLE, Settings
from epikv.eval.results import Key, Record
from epikv.messages import Summary
from epikv.options import Kv, Output, Sampling, Steering, Stop, parse_budget

ROOM = 1.25  # most output tokens, times those of the task's reference trace
TAIL = 120  # characters of a completion that are kept


def ask(
    client: Client,
    model: str,
    key: Key,
    item: Item | Probe,
    arm: Mapping[str, Any],
    settings: Settings,
    reference: Record | None,
) -> Record:
    """Runs one completion. Raises RpcError.

    arm: of the plan. reference: the same problem's under `full`, for a budget that is a share.
    """
    kv = Kv(FULL, positions=settings.positions)
    if arm["policy"] != FULL:
        budget = tokens(key.budget, item, reference)
        params = dict(arm["params"])
        if arm["policy"] == ORACLE and item.needed is not None:
            params["prefer"] = item.needed(budget)
        kv = Kv(
            arm["policy"],
            budget,
            params,
            positions=settings.positions,
            equal_protection=settings.equal_protection,
            **arm.get("kv", {}),
        )
    record = Record(**key._asdict())
    if isinstance(item, Probe):
        return _score(client, model, record, item, kv)
    most = settings.max_output_tokens
    if most is None and item.trace_tokens is not None:
        most = ceil(ROOM * item.trace_tokens)
    result = client.generate_once(
        item.prompt,
        kv=kv,
        sampling=Sampling(
            settings.temperature,
            settings.top_p,
            seed=seed(key),
            steering=Steering(arm["steering"]) if "steering" in arm else None,
        ),
        stop=Stop(most),
        output=Output(token_ids=True),
        model=model,
    )
    assert result.summary is not None
    return replace(
        _filled(record, result.summary),
        right=item.judge(result.text),
        output_tokens=len(result.token_ids),
        digest=digest(result.token_ids),
        tail=result.text[-TAIL:],
    )


def tokens(budget: str, item: Item | Probe, reference: Record | None) -> int:
    """A budget as the server counts it, the prompt included."""
    size = parse_budget(budget)
    if isinstance(size, int):
        return size
    assert reference is not None
    trace = reference.output_tokens if item.trace_tokens is None else item.trace_tokens
    return reference.prompt_tokens + round(size * trace)


def seed(key: Key) -> int:
    """Of sampling and of policies that draw: the same for all arms and budgets of a problem."""
    text = f"{key.task}/{key.item}/{key.seed}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")


def digest(token_ids: Sequence[int]) -> str:
    """By which two completions are seen to be the same, token for token."""
    return hashlib.sha256(" ".join(map(str, token_ids)).encode()).hexdigest()[:16]


def _score(client: Client, model: str, record: Record, probe: Probe, kv: Kv) -> Record:
    ids, ends = _tokenized(client, model, probe)
    answers = list(zip(ends[1::2], ends[2::2], strict=True))
    if any(begin >= end for begin, end in answers):
        raise ValueError(
            f"the model's tokenizer gives an answer of {record.task} no token of its own"
        )
    result = client.score(ids[: ends[0]], ids[ends[0] :], kv=kv, seed=seed(record.key), model=model)
    assert result.summary is not None
    right = [all(result.greedy[begin - ends[0] : end - ends[0]]) for begin, end in answers]
    return replace(
        _filled(record, result.summary),
        right=right,
        finish="",  # it ends where its text does
        output_tokens=len(result.token_ids),
    )


def _tokenized(client: Client, model: str, probe: Probe) -> tuple[list[int], list[int]]:
    """Token ids of the whole text, and where the prompt and each part end in them.

    The whole is tokenized at once, as a model would have it; a part begins at the first token that
    is another than without it.
    """
    text, prefixes = probe.prompt, []
    for part in probe.parts:
        prefixes.append(client.tokenize(text, model=model))
        text += part
    ids = client.tokenize(text, model=model)
    return ids, [_shared(prefix, ids) for prefix in prefixes] + [len(ids)]


def _shared(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common beginning."""
    return next(
        (n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def _filled(record: Record, summary: Summary) -> Record:
    usage, kv, timings = summary.usage, summary.kv, summary.timings
    assert usage is not None and kv is not None
    return replace(
        record,
        finish=summary.finish_reason,
        prompt_tokens=usage.prompt_tokens,
        budget_tokens=kv.budget_tokens,
        evicted_tokens=kv.evicted_tokens,
        rounds=kv.rounds,
        peak_tokens=kv.peak_tokens,
        peak_bytes=kv.peak_bytes,
        uncalibrated=kv.uncalibrated,
        decode_seconds=(timings and timings.decode) or 0.0,
    )

"""One completion of an evaluation: what is asked of the daemon, and what becomes of the answer."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil
from typing import Any

from epikv.client import Client
from epikv.eval.items import Choices, Item, Probe, Question, Replay
from epikv.eval.plan import FULL, ORACLE, Settings
from epikv.eval.results import Key, Record
from epikv.messages import ScoreResponse, Summary
from epikv.options import Chat, Kv, Output, Sampling, Steering, Stop, parse_budget

ROOM = 1.25  # most output tokens, times those of the task's reference trace
# Whatever the model's own settings are: what is likeliest is what is looked for.
GREEDY = Sampling(0.0, repetition_penalty=1.0, frequency_penalty=0.0, presence_penalty=0.0)
TAIL = 120  # characters of a completion that are kept


def ask(
    client: Client,
    model: str,
    key: Key,
    item: Question,
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
    if isinstance(item, Choices):
        return _choose(client, model, record, item, kv)
    if isinstance(item, Replay):
        return _replay(client, model, record, item, kv, reference)
    result = client.generate_once(
        item.prompt,
        kv=kv,
        sampling=Sampling(
            settings.temperature,
            settings.top_p,
            seed=seed(key),
            steering=Steering(arm["steering"]) if "steering" in arm else None,
        ),
        stop=Stop(most_tokens(item, settings.max_output_tokens), item.stop_strings),
        output=Output(token_ids=True),
        model=model,
    )
    assert result.summary is not None
    return replace(
        _filled(record, result.summary),
        right=list(item.judge(result.text)),
        output_tokens=len(result.token_ids),
        digest=digest(result.token_ids),
        tail=result.text[-TAIL:],
    )


def most_tokens(item: Item, asked: int | None) -> int | None:
    """Of output: as was asked; else as the benchmark has it, or as the reference trace lets expect;
    None: as the server lets."""
    if asked is not None or item.trace_tokens is None:
        return item.most_tokens if asked is None else asked
    return ceil(ROOM * item.trace_tokens)


def tokens(budget: str, item: Question, reference: Record | None) -> int:
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
    ids, ends = _tokenized(client, model, probe.prompt, probe.parts)
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


def _choose(client: Client, model: str, record: Record, choices: Choices, kv: Kv) -> Record:
    """Scores each choice in a request of its own. Figures of the cache are those of the longest.

    The prompt's last token is forced through with the choice. So what a policy drops of a prompt is
    gone when the choice's first token is predicted: else one token alone would never tell.
    """
    scored: list[ScoreResponse] = []
    logprobs: list[float] = []
    for continuation in choices.continuations:
        ids, (prompt, _) = _tokenized(client, model, choices.prompt, (continuation,))
        begin = max(prompt - 1, 1)
        result = client.score(ids[:begin], ids[begin:], kv=kv, seed=seed(record.key), model=model)
        scored.append(result)
        logprobs.append(sum(result.logprobs[prompt - begin :]))
    longest = max(scored, key=lambda result: len(result.token_ids))
    assert longest.summary is not None
    acc = likeliest(logprobs) == choices.right
    acc_norm = likeliest(logprobs, choices.characters) == choices.right
    return replace(
        _filled(record, longest.summary),
        right=[acc_norm if choices.by_length else acc],
        finish="",  # nothing is generated
        output_tokens=len(longest.token_ids),
        acc=acc,
        acc_norm=acc_norm,
        choice_logprobs=logprobs,
    )


def _replay(
    client: Client,
    model: str,
    record: Record,
    replay: Replay,
    kv: Kv,
    reference: Record | None,
) -> Record:
    """Under `full` the answer is made, under all else its tokens are forced through."""
    if isinstance(replay.prompt, str):
        prompt = client.tokenize(replay.prompt, model=model)
    else:
        messages = [{"role": role, "content": content} for role, content in replay.prompt]
        prompt = client.apply_chat_template(Chat(messages), model=model).token_ids
    if kv.policy == FULL:
        made = client.generate_once(
            prompt,
            kv=kv,
            sampling=GREEDY,
            stop=Stop(replay.most_tokens),
            output=Output(text=False, token_ids=True),
            model=model,
        )
        assert made.summary is not None
        return replace(
            _filled(record, made.summary),
            right=[1.0],
            output_tokens=len(made.token_ids),
            digest=digest(made.token_ids),
            token_ids=list(made.token_ids),
        )
    assert reference is not None
    result = client.score(prompt, reference.token_ids, kv=kv, seed=seed(record.key), model=model)
    assert result.summary is not None
    return replace(
        _filled(record, result.summary),
        right=[sum(result.greedy) / len(result.greedy)],
        finish="",
        output_tokens=len(result.token_ids),
    )


def likeliest(logprobs: Sequence[float], characters: Sequence[int] | None = None) -> int:
    """The first of the choices with the highest log-probability, or the highest by character."""
    lengths = characters or [1] * len(logprobs)
    return max(range(len(logprobs)), key=lambda choice: logprobs[choice] / lengths[choice])


def _tokenized(
    client: Client, model: str, prompt: str, parts: Sequence[str]
) -> tuple[list[int], list[int]]:
    """Token ids of the whole text, and where the prompt and each part end in them.

    The whole is tokenized at once, as a model would have it; a part begins at the first token that
    is another than without it.
    """
    text, prefixes = prompt, []
    for part in parts:
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
        doubted_steps=kv.doubted_steps,
        peak_tokens=kv.peak_tokens,
        peak_bytes=kv.peak_bytes,
        uncalibrated=kv.uncalibrated,
        decode_seconds=(timings and timings.decode) or 0.0,
    )

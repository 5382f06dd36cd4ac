"""Sampling and output options on the real model, held against each other and against scoring."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from epikv import Client, Delta, Kv, Output, Progress, PromptLogprobs, RpcError, Sampling, Stop
from epikv.sample import problem
from epikv.testing import Daemon

TASK = problem(9)
# "<bos> ask answer passcode": no problem at all, so the model cannot be certain of what follows.
UNSURE = [2, 6, 7, 15]
FACTS = Output(token_ids=True, logprobs=True, top_logprobs=5)
EVERYTHING = Sampling(
    temperature=0.9,
    top_p=0.95,
    top_k=50,
    min_p=0.02,
    typical_p=0.95,
    repetition_penalty=1.1,
    frequency_penalty=0.1,
    presence_penalty=0.2,
    logit_bias={5: -2.0},
    seed=17,
)


@pytest.fixture(scope="module")
def repeatable(sample_model: Path) -> Iterator[Client]:
    flags = ("--threads=1", "--deterministic=true", "--prefill_chunk_tokens=64")
    with Daemon(sample_model, *flags) as daemon, daemon.client() as client:
        yield client


@pytest.mark.parametrize("kv", [Kv(), Kv("sliding", 400)], ids=["full", "sliding"])
def test_prompt_logprobs_are_those_of_scoring_the_prompt(repeatable: Client, kv: Kv) -> None:
    """Bit for bit in deterministic mode, over several events."""
    tokens = repeatable.tokenize(TASK.prompt + " " + TASK.trace)[:200]
    output = Output(prompt_logprobs=True, top_logprobs=4, progress=True)
    events = list(
        repeatable.generate(tokens, kv=kv, stop=Stop(max_output_tokens=300), output=output)
    )
    parts = [event for event in events if isinstance(event, PromptLogprobs)]
    first_delta = next(i for i, event in enumerate(events) if isinstance(event, Delta))
    assert len(parts) > 1 and all(event in events[:first_delta] for event in parts)
    progress = [event.prompt_tokens_done for event in events if isinstance(event, Progress)]
    assert progress == sorted(progress) and progress[-1] == len(tokens)

    # One more, so that the chunks are the same: the last scored token is never cached.
    scored = repeatable.score(tokens[:1], [*tokens[1:], 9], chunked=True, top_logprobs=4)
    assert parts[0].first == 1
    assert [token for part in parts for token in part.token_ids] == tokens[1:]
    assert [value for part in parts for value in part.logprobs] == scored.logprobs[:-1]
    assert [top for part in parts for top in part.top_logprobs] == scored.top_logprobs[:-1]


def test_logprobs_of_a_prompt_that_is_evicted_are_refused(client: Client) -> None:
    tokens = client.tokenize(TASK.prompt)
    with pytest.raises(RpcError) as refused:
        client.generate_once(tokens, kv=Kv("sliding", 64), output=Output(prompt_logprobs=True))
    assert refused.value.code is grpc.StatusCode.FAILED_PRECONDITION
    assert refused.value.reason == "PROMPT_EVICTED"
    assert [v.field for v in refused.value.field_violations] == ["output.prompt_logprobs"]


def test_the_likeliest_tokens_begin_with_the_greedy_one(client: Client) -> None:
    result = client.generate_once(TASK.prompt, output=FACTS)
    assert len(result.top_logprobs) == len(result.token_ids) > 50
    for token, logprob, top in zip(
        result.token_ids, result.logprobs, result.top_logprobs, strict=True
    ):
        assert (top.token_ids[0], top.logprobs[0]) == (token, logprob)
        assert len(set(top.token_ids)) == 5
        assert top.logprobs == sorted(top.logprobs, reverse=True)


def test_a_seed_gives_the_same_text_in_any_batch(repeatable: Client) -> None:
    """With every setting at once; the neighbours' settings are others."""
    wanted = {"sampling": EVERYTHING, "output": FACTS, "stop": Stop(max_output_tokens=60)}
    alone = repeatable.generate_once(TASK.prompt, **wanted)
    neighbours = [replace(EVERYTHING, seed=seed, temperature=1.3) for seed in range(5)]
    with ThreadPoolExecutor(6) as pool:
        others = [
            pool.submit(repeatable.generate_once, problem(i).prompt, sampling=sampling)
            for i, sampling in enumerate(neighbours)
        ]
        together = repeatable.generate_once(TASK.prompt, **wanted)
        texts = {other.result().text for other in others}
    assert (together.token_ids, together.logprobs) == (alone.token_ids, alone.logprobs)
    assert len(texts) == 5
    echoed = alone.accepted.sampling
    assert echoed.seed == 17 and echoed.logit_bias == {5: -2.0}
    assert echoed.min_p == pytest.approx(0.02) and echoed.typical_p == pytest.approx(0.95)


def test_each_penalty_and_bias_changes_greedy_text(repeatable: Client) -> None:
    stop = Stop(max_output_tokens=60)
    plain = repeatable.generate_once(UNSURE, stop=stop, output=FACTS)
    for sampling in (
        Sampling(repetition_penalty=1.5),
        Sampling(frequency_penalty=1.5),
        Sampling(presence_penalty=2),
    ):
        changed = repeatable.generate_once(UNSURE, sampling=sampling, stop=stop, output=FACTS)
        assert changed.token_ids != plain.token_ids, sampling
        # The figures stay those of the raw logits.
        for chosen, top in zip(changed.logprobs, changed.top_logprobs, strict=True):
            assert chosen <= top.logprobs[0]
    forced = repeatable.generate_once(
        UNSURE, sampling=Sampling(logit_bias={7: 100}), stop=stop, output=FACTS
    )
    assert set(forced.token_ids) == {7}
    banned = repeatable.generate_once(
        UNSURE, sampling=Sampling(logit_bias={plain.token_ids[0]: -100}), output=FACTS
    )
    assert plain.token_ids[0] not in banned.token_ids


def test_the_end_waits_for_the_least_output(client: Client) -> None:
    plain = client.generate_once(TASK.prompt, output=FACTS)
    length = plain.summary.usage.output_tokens
    assert plain.summary.finish_reason == "end"
    end = plain.token_ids[-1]
    longer = client.generate_once(
        TASK.prompt, stop=Stop(min_output_tokens=length + 20), output=FACTS
    )
    assert longer.summary.usage.output_tokens > length + 20
    assert end not in longer.token_ids[: length + 20]
    assert longer.token_ids[: length - 1] == plain.token_ids[:-1]


def test_the_models_end_may_be_ignored(client: Client) -> None:
    plain = client.generate_once(TASK.prompt, output=FACTS)
    on = len(plain.token_ids) + 30
    ignored = client.generate_once(
        TASK.prompt, stop=Stop(ignore_eos=True, max_output_tokens=on), output=FACTS
    )
    assert ignored.summary.finish_reason == "length" and len(ignored.token_ids) == on
    assert ignored.token_ids[: len(plain.token_ids)] == plain.token_ids
    assert ignored.accepted.stop_token_ids == []


def test_deltas_wait_for_each_other_where_they_may(client: Client) -> None:
    stop = Stop(max_output_tokens=100, ignore_eos=True)
    events = list(client.generate(TASK.prompt, stop=stop, output=Output(coalesce=10)))
    deltas = [event for event in events if isinstance(event, Delta)]
    assert len(deltas) <= 2  # the first, and all others at the end
    assert (
        "".join(delta.text for delta in deltas) == client.generate_once(TASK.prompt, stop=stop).text
    )

"""OpenAI's client for Python, unmodified, through the gateway."""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import openai as sdk
import pytest
from byte_model import export_bytes
from epikv import Kv, Output, Sampling, Stop
from epikv.sample import problem
from epikv.scrape import scrape
from epikv.testing import Daemon, Gateway
from openai import OpenAI
from waiting import eventually

TASK = problem(9)
LONG = {"max_tokens": 700, "extra_body": {"ignore_eos": True}}


def test_models(openai: OpenAI) -> None:
    [model] = openai.models.list()
    assert (model.id, model.object, model.owned_by) == ("sample", "model", "epikv")
    assert openai.models.retrieve("sample").id == "sample"
    with pytest.raises(sdk.NotFoundError, match="model 'gpt-5' is not served") as caught:
        openai.models.retrieve("gpt-5")
    assert caught.value.code == "model_not_found"


def test_a_completion_is_the_daemons(daemon: Daemon, openai: OpenAI) -> None:
    with daemon.client() as client:
        plain = client.generate_once(
            TASK.prompt,
            kv=Kv("epikv_flat", 130),
            sampling=Sampling(temperature=0),
            stop=Stop(60),
            output=Output(logprobs=True, token_ids=True, top_logprobs=2),
        )
    ask: dict[str, Any] = {
        "model": "sample",
        "prompt": TASK.prompt,
        "max_tokens": 60,
        "temperature": 0,
        "logprobs": 2,
        "extra_body": {"kv": {"policy": "epikv_flat", "budget": 130}},
    }
    whole = openai.completions.create(**ask)
    [choice] = whole.choices
    assert choice.text == plain.text
    assert choice.logprobs.token_logprobs == pytest.approx(plain.logprobs)
    assert [max(top.values()) for top in choice.logprobs.top_logprobs] == pytest.approx(
        [top.logprobs[0] for top in plain.top_logprobs]
    )
    usage = plain.summary.usage
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (
        usage.prompt_tokens,
        usage.output_tokens,
    )
    facts = whole.model_extra["epikv"]
    assert facts["kv"]["policy"] == "epikv_flat"
    assert facts["kv"]["peak_tokens"] == plain.summary.kv.peak_tokens
    assert facts["kv"]["evicted_tokens"] == plain.summary.kv.evicted_tokens > 0
    assert whole.id == f"cmpl-{facts['request_id']}"
    unnamed = openai.completions.create(**{**ask, "model": ""})
    assert unnamed.model == whole.model == "sample", "the one that has answered"

    *parts, last = openai.completions.create(
        **ask, stream=True, stream_options={"include_usage": True}
    )
    assert "".join(part.choices[0].text for part in parts) == plain.text
    logprobs = [
        logprob
        for part in parts
        if part.choices[0].logprobs
        for logprob in part.choices[0].logprobs.token_logprobs
    ]
    assert logprobs == pytest.approx(plain.logprobs)
    assert [part.choices[0].finish_reason for part in parts if part.choices[0].finish_reason] == [
        choice.finish_reason
    ]
    assert parts[-1].model_extra["epikv"]["kv"]["policy"] == "epikv_flat"
    assert last.choices == [] and last.usage.total_tokens == whole.usage.total_tokens


def test_several_prompts_and_completions(openai: OpenAI) -> None:
    """Of texts and of token ids, in order."""
    prompts = ["1 2 3", "4 5 6"]
    ids = [
        openai.post("/../tokenize", body={"prompt": text}, cast_to=object)["tokens"]
        for text in prompts
    ]
    ask: dict[str, Any] = {
        "model": "sample",
        "max_tokens": 12,
        "n": 2,
        "temperature": 0.8,
        "seed": 5,
        "extra_body": {"ignore_eos": True},
    }
    whole = openai.completions.create(prompt=prompts, **ask)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert openai.completions.create(prompt=ids, **ask).choices == whole.choices
    alone = openai.completions.create(prompt=ids[1], **ask).choices
    assert [choice.text for choice in alone] == [choice.text for choice in whole.choices[2:]]
    streamed = dict.fromkeys(range(4), "")
    for part in openai.completions.create(prompt=prompts, stream=True, **ask):
        for choice in part.choices:
            streamed[choice.index] += choice.text
    assert list(streamed.values()) == [choice.text for choice in whole.choices]
    assert whole.usage.completion_tokens == 4 * 12


def test_echo_tells_of_the_prompt(daemon: Daemon, openai: OpenAI) -> None:
    with daemon.client() as client:
        ids = client.tokenize(TASK.prompt)
        scored = client.score(ids[:1], ids[1:])
    for most in (0, 1):
        result = openai.completions.create(
            model="sample", prompt=ids, max_tokens=most, echo=True, logprobs=1, temperature=0
        )
        [choice] = result.choices
        logprobs = choice.logprobs.token_logprobs
        assert logprobs[0] is None and len(logprobs) == len(ids) + most
        assert logprobs[1 : len(ids)] == pytest.approx(scored.logprobs, abs=1e-4)
        greedy = [
            token == max(top, key=top.__getitem__)
            for token, top in zip(
                choice.logprobs.tokens[1:], choice.logprobs.top_logprobs[1:], strict=True
            )
        ]
        assert greedy[: len(scored.greedy)] == scored.greedy
        assert result.usage.completion_tokens == most
        assert choice.text.startswith(TASK.prompt)
    text = openai.completions.create(
        model="sample", prompt="1 2 3", max_tokens=2, echo=True, stream=True, temperature=0
    )
    assert "".join(part.choices[0].text for part in text).startswith("1 2 3")


def test_an_echoed_prompt_and_its_answer_are_one_text(daemon: Daemon, openai: OpenAI) -> None:
    ask: dict[str, Any] = {"model": "sample", "temperature": 0, "max_tokens": 4}
    answer = openai.completions.create(prompt=TASK.prompt, **ask).choices[0].text
    with daemon.client() as client:
        ids = client.tokenize(TASK.prompt)
    for prompt in (TASK.prompt, ids):
        [choice] = openai.completions.create(prompt=prompt, echo=True, logprobs=1, **ask).choices
        assert choice.text == f"{TASK.prompt} {answer}"
        tokens, offsets = choice.logprobs.tokens, choice.logprobs.text_offset
        spans = [choice.text[a:b] for a, b in pairwise([*offsets, len(choice.text)])]
        assert spans == [tokens[0].strip(), *tokens[1:]]
    parts = openai.completions.create(prompt=[TASK.prompt, "1 2 3"], echo=True, stream=True, **ask)
    streamed = dict.fromkeys(range(2), "")
    for part in parts:
        for each in part.choices:
            streamed[each.index] += each.text
    assert streamed[0] == choice.text and streamed[1].startswith("1 2 3 ")


def test_where_the_tokens_of_an_answer_alone_begin(openai: OpenAI) -> None:
    ask: dict[str, Any] = {"model": "sample", "temperature": 0, "max_tokens": 4, "logprobs": 1}
    [choice] = openai.completions.create(prompt=TASK.prompt, **ask).choices
    offsets = choice.logprobs.text_offset
    spans = [choice.text[a:b] for a, b in pairwise([*offsets, len(choice.text)])]
    first, *others = choice.logprobs.tokens
    assert spans == [first.strip(), *others]
    streamed = [
        offset
        for part in openai.completions.create(prompt=TASK.prompt, stream=True, **ask)
        for each in part.choices
        if each.logprobs
        for offset in each.logprobs.text_offset
    ]
    assert streamed == offsets


def test_a_chat(daemon: Daemon, openai: OpenAI) -> None:
    messages: list[Any] = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}],
        },
    ]
    ask: dict[str, Any] = {"model": "sample", "messages": messages, "temperature": 0}
    whole = openai.chat.completions.create(
        max_completion_tokens=40, logprobs=True, top_logprobs=2, **ask
    )
    [choice] = whole.choices
    assert choice.message.role == "assistant"
    assert len(choice.logprobs.content) == whole.usage.completion_tokens
    for token in choice.logprobs.content:
        assert bytes(token.bytes).decode() == token.token
        assert len(token.top_logprobs) == 2
    parts = list(openai.chat.completions.create(max_tokens=40, stream=True, **ask))
    assert parts[0].choices[0].delta.role == "assistant"
    assert "".join(part.choices[0].delta.content or "" for part in parts) == choice.message.content
    assert parts[-1].choices[0].finish_reason == choice.finish_reason
    with openai.chat.completions.stream(**ask) as events:
        assert (
            events.get_final_completion()
            .choices[0]
            .message.content.startswith(choice.message.content)
        )


def test_what_ends_it(openai: OpenAI) -> None:
    ask: dict[str, Any] = {"model": "sample", "prompt": TASK.prompt, "temperature": 0}
    whole = openai.completions.create(max_tokens=700, **ask).choices[0]
    assert whole.finish_reason == "stop"
    word = whole.text.split()[10]
    stopped = openai.completions.create(max_tokens=700, stop=[word], **ask).choices[0]
    assert stopped.finish_reason == "stop" and word not in stopped.text
    assert stopped.model_extra["stop_reason"] == word
    kept = openai.completions.create(
        max_tokens=700, stop=word, extra_body={"include_stop_str_in_output": True}, **ask
    ).choices[0]
    assert kept.text == stopped.text + word
    cut = openai.completions.create(**ask).choices[0]
    assert cut.finish_reason == "length", "sixteen tokens where none are asked for"
    assert len(cut.text.split()) == 16


def test_the_temperature_is_one_where_none_is_asked_for(openai: OpenAI) -> None:
    ask: dict[str, Any] = {"model": "sample", "prompt": [5] * 40, **LONG, "max_tokens": 40}
    texts = {openai.completions.create(seed=seed, **ask).choices[0].text for seed in range(3)}
    assert len(texts) == 3
    same = {openai.completions.create(seed=-7, **ask).choices[0].text for _ in range(2)}
    assert len(same) == 1
    biased = openai.completions.create(
        temperature=0, logit_bias={"9": 100}, frequency_penalty=0, presence_penalty=0.5, **ask
    )
    assert len(set(biased.choices[0].text.split())) == 1


@pytest.fixture(scope="module")
def bytes_openai(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    model = export_bytes(tmp_path_factory.mktemp("models"), "bytes")
    with Daemon(model, "--threads=1") as daemon, Gateway(daemon.grpc) as gateway:
        with OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
            yield client


def test_structured_output(bytes_openai: OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "n": {"enum": [1, 2]}},
        "required": ["ok", "n"],
        "additionalProperties": False,
    }
    ask: dict[str, Any] = {"model": "bytes", "prompt": "{", "max_tokens": 200, "seed": 3}
    for asked in (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": schema},
            }
        },
        {"structured_outputs": {"json": schema}},
    ):
        text = bytes_openai.completions.create(extra_body=asked, **ask).choices[0].text
        found = json.loads(text)
        assert isinstance(found["ok"], bool) and found["n"] in (1, 2)
    text = bytes_openai.completions.create(
        extra_body={"response_format": {"type": "json_object"}, "ignore_eos": False},
        **{**ask, "max_tokens": 900},
    ).choices[0]
    assert text.text.startswith("{") or text.finish_reason == "length"
    for asked, allowed in (
        ({"choice": ["yes", "no"]}, ("yes", "no")),
        ({"regex": "a{3}"}, ("aaa",)),
        ({"grammar": 'root ::= "x" "y"'}, ("xy",)),
    ):
        text = bytes_openai.completions.create(extra_body={"structured_outputs": asked}, **ask)
        assert text.choices[0].text in allowed


def test_tokens_that_are_parts_of_characters(bytes_openai: OpenAI) -> None:
    result = bytes_openai.completions.create(
        model="bytes", prompt="é", max_tokens=1, echo=True, logprobs=1
    )
    assert result.choices[0].logprobs.tokens[:2] == ["bytes:\\xc3", "bytes:\\xa9"]


def test_an_answer_ends_a_character_of_its_prompt(bytes_openai: OpenAI) -> None:
    ask: dict[str, Any] = {"model": "bytes", "prompt": [0x61, 0xC3], "max_tokens": 1, "echo": True}
    ask["logit_bias"] = {str(0xA9): 100}
    [choice] = bytes_openai.completions.create(logprobs=1, **ask).choices
    assert choice.text == "aé"
    assert choice.logprobs.text_offset == [0, 1, 1]
    parts = bytes_openai.completions.create(stream=True, **ask)
    assert "".join(part.choices[0].text for part in parts) == "aé"


def test_errors_are_the_sdks_own(openai: OpenAI) -> None:
    with pytest.raises(sdk.BadRequestError) as caught:
        openai.completions.create(model="sample", prompt="1", temperature=-1)
    assert (caught.value.param, caught.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(sdk.BadRequestError) as caught:
        openai.completions.create(model="sample", prompt=[5] * 2000)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(sdk.NotFoundError, match="no model for this"):
        openai.embeddings.create(model="sample", input="hello")
    with pytest.raises(sdk.BadRequestError) as caught:
        openai.completions.create(
            model="sample", prompt="1", extra_body={"kv": {"policy": "epikv_flt", "budget": 64}}
        )
    assert caught.value.param == "kv.policy" and "epikv_flat" in caught.value.message


def test_a_stream_that_fails_says_so(daemon: Daemon, openai: OpenAI) -> None:
    stream = openai.completions.create(model="sample", prompt=[5] * 40, stream=True, **LONG)
    next(iter(stream))
    request_id = stream.response.headers["x-request-id"]
    with daemon.client() as client:
        client.cancel(request_id)
    with pytest.raises(sdk.APIError, match="CancelRequest"):
        list(stream)


def test_a_timeout_is_the_daemons_deadline(openai: OpenAI) -> None:
    with pytest.raises(sdk.InternalServerError, match="deadline") as caught:
        openai.completions.create(
            model="sample", prompt=[5] * 40, extra_headers={"timeout": "0.05"}, **LONG
        )
    assert caught.value.status_code == 504


def test_who_leaves_is_cancelled(daemon: Daemon, openai: OpenAI) -> None:
    """While it streams, and while it waits for the whole."""

    def ended() -> float:
        page = scrape(daemon.metrics)
        return page.total("epikv_requests_finished_total", reason="cancelled")

    before = ended()
    stream = openai.completions.create(model="sample", prompt=[5] * 40, stream=True, **LONG)
    next(iter(stream))
    stream.close()
    eventually(lambda: ended() == before + 1)
    with pytest.raises(sdk.APITimeoutError):
        openai.completions.create(model="sample", prompt=[5] * 40, timeout=0.1, **LONG)
    eventually(lambda: ended() == before + 2)
    eventually(lambda: scrape(daemon.metrics).total("epikv_requests_running") == 0)


def test_an_outcome_of_a_request(openai: OpenAI) -> None:
    with pytest.raises(sdk.APIStatusError) as caught:
        openai.post(
            "/outcomes", body={"request_id": "1", "metric": "good", "value": 1}, cast_to=object
        )
    assert "no experiments" in caught.value.message


def test_many_at_once(openai: OpenAI) -> None:
    def ask(number: int) -> str:
        stream = openai.completions.create(
            model="sample", prompt=TASK.prompt, max_tokens=40, temperature=0, stream=True
        )
        begin = time.monotonic()
        text = "".join(part.choices[0].text for part in stream)
        assert time.monotonic() - begin < 60
        return text

    with ThreadPoolExecutor(16) as pool:
        assert len(set(pool.map(ask, range(48)))) == 1


def test_a_gateway_that_stops_drops_no_stream(daemon: Daemon, tmp_path: Path) -> None:
    with Gateway(daemon.grpc) as gateway:
        with OpenAI(base_url=f"{gateway.url}/v1", api_key="none") as client:
            stream = client.completions.create(model="sample", prompt=[5] * 40, stream=True, **LONG)
            parts = iter(stream)
            next(parts)
            gateway.terminate()
            rest = list(parts)
            assert rest[-1].choices[0].finish_reason == "length"
        assert gateway.stop() == 0

"""What clients are told of requests that are wrong: rows of the table in docs/errors.md, through a real
channel. The files beside this one have the table's other rows.

Of what only C++ can provoke: a policy that throws or answers nonsense is in broken_policy_test.cc, an
answer over max_sent_message_bytes in transport_test.cc, a second LoadModel in admin_service_test.cc.
"""

import math
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from epikv.testing import Daemon
from epikv.v1 import (
    admin_pb2,
    experiment_pb2,
    generation_pb2,
    model_pb2,
    policy_pb2,
    tokenization_pb2,
)
from google.protobuf.message import Message
from sound_experiment import definition, outcome
from told import (
    ADMIN,
    CONTEXT,
    EXPERIMENT,
    GENERATION,
    LONGEST,
    VOCABULARY,
    Code,
    Generate,
    Row,
    Score,
    ask,
    check,
    generate,
    kv,
    refusal,
)


def sampling(name: str, value: float, *says: str) -> Row:
    return Row(generate(sampling={name: value}), {f"sampling.{name}": [*says]})


def in_range(request: Message, field: str, *says: str, **metadata: str) -> Row:
    reason = "SPAN_RANGE" if "span" in field else "TOKEN_RANGE"
    return Row(request, {field: [*says]}, metadata, code=Code.OUT_OF_RANGE, reason=reason)


NAN = math.nan
UNKNOWN_ENUM = 99


ROWS = {
    # Missing prompt.
    "no prompt": Row(Generate(), {"prompt": ["empty"]}),
    "empty text": Row(generate(text=""), {"prompt": ["empty"]}),
    "no token ids": Row(Generate(token_ids={}), {"prompt": ["empty"]}),
    "nothing to score": Row(
        Score(), {"prompt": ["empty"], "continuation": ["empty"]}, method=f"{GENERATION}/Score"
    ),
    # Bad ranges, with the limit and the value given.
    "temperature": sampling("temperature", -0.5, "-0.5"),
    "top_p none": sampling("top_p", 0, "(0, 1]", "is 0"),
    "top_p over": sampling("top_p", 1.5, "(0, 1]", "is 1.5"),
    "min_p": sampling("min_p", 2, "[0, 1]", "is 2"),
    "typical_p": sampling("typical_p", 0, "(0, 1]", "is 0"),
    "repetition penalty": sampling("repetition_penalty", 0, "[0.01, 100]", "is 0"),
    "frequency penalty": sampling("frequency_penalty", 3, "[-2, 2]", "is 3"),
    "presence penalty": sampling("presence_penalty", -3, "[-2, 2]", "is -3"),
    "logit bias": Row(
        generate(sampling={"logit_bias": {5: 101}}),
        {"sampling.logit_bias[5]": ["[-100, 100]", "is 101"]},
    ),
    "regex": Row(
        generate(sampling={"regex": "a(b"}), {"sampling.constraint.regex": ["parenthesis"]}
    ),
    "choice": Row(
        generate(sampling={"choice": {"items": ["x"] * 1025}}),
        {"sampling.constraint.choice": ["1025", "1024"]},
    ),
    "schema": Row(
        generate(sampling={"json_schema": '{"type": "array", "uniqueItems": true}'}),
        {"sampling.constraint.json_schema": ["'uniqueItems'"]},
    ),
    "grammar": Row(
        generate(sampling={"grammar": "root ::= rest"}), {"sampling.constraint.grammar": ["rest"]}
    ),
    "no output": Row(
        generate(stop={"max_output_tokens": 0}), {"stop.max_output_tokens": ["at least 1"]}
    ),
    "least output over the most": Row(
        generate(stop={"max_output_tokens": 3, "min_output_tokens": 4}),
        {"stop.min_output_tokens": ["is 4", "3"]},
    ),
    "stop strings": Row(
        generate(stop={"stop_strings": ["", "x" * 257, "fine"]}),
        {
            "stop.stop_strings[0]": ["1 to 256", "has 0"],
            "stop.stop_strings[1]": ["1 to 256", "has 257"],
        },
    ),
    "top log-probabilities": Row(
        generate(output={"top_logprobs": 21}), {"output.top_logprobs": ["20", "21"]}
    ),
    "coalesce": Row(
        generate(output={"coalesce": {"seconds": 11}}), {"output.coalesce": ["10s", "11s"]}
    ),
    "request id": Row(generate(request_id="i" * 129), {"request_id": ["129", "128"]}),
    "tenant": Row(generate(scheduling={"tenant": "t" * 65}), {"scheduling.tenant": ["65", "64"]}),
    "budget": Row(kv("sliding", 0), {"kv.max_tokens": ["at least 1"]}),
    "share": Row(kv("sliding", keep_ratio=1.5), {"kv.keep_ratio": ["(0, 1]", "is 1.5"]}),
    "unknown values": Row(
        generate(scheduling={"priority": UNKNOWN_ENUM}, kv={"positions": UNKNOWN_ENUM}),
        {"scheduling.priority": ["99"], "kv.positions": ["99"]},
    ),
    # NaN, in every number that could be.
    "not a number": Row(
        generate(
            sampling={
                "temperature": NAN,
                "top_p": NAN,
                "min_p": NAN,
                "typical_p": NAN,
                "repetition_penalty": NAN,
                "frequency_penalty": NAN,
                "presence_penalty": NAN,
                "logit_bias": {5: NAN},
            },
            kv={"policy": "sliding", "keep_ratio": NAN},
        ),
        {
            **{
                f"sampling.{name}": ["nan"]
                for name in (
                    "temperature",
                    "top_p",
                    "min_p",
                    "typical_p",
                    "repetition_penalty",
                    "frequency_penalty",
                    "presence_penalty",
                    "logit_bias[5]",
                )
            },
            "kv.keep_ratio": ["nan"],
        },
    ),
    # Bad UTF-8; and what is no message at all.
    "not UTF-8": Row(
        generate(text="??", request_id="!!")
        .SerializeToString()
        .replace(b"??", b"\xff\xfe")
        .replace(b"!!", b"a\xff"),
        {"text": ["byte 0"], "request_id": ["byte 1"]},
        reason="NOT_UTF8",
    ),
    "no message": Row(b"\x0a\xff\xff", {}, reason="MALFORMED"),
    # Policies and their parameters.
    "unknown policy": Row(
        kv("slidng", 300), {"kv.policy": ["'slidng'", "did you mean sliding?", "--all"]}
    ),
    "unknown parameters": Row(
        kv("epikv_flat", 300, {"layer_c": 1, "windw": 2}),
        {
            "kv.policy_params.layer_c": ["layer_a", "window"],
            "kv.policy_params.windw": ["layer_a", "window"],
        },
    ),
    "parameter of another type": Row(
        kv("h2o", 300, {"scope": 3}), {"kv.policy_params.scope": ["head", "model"]}
    ),
    "parameter out of range": Row(
        kv("epikv_flat", 300, {"window": 1}), {"kv.policy_params.window": ["2", "1"]}
    ),
    "no budget for it": Row(kv("sliding"), {"kv.budget": ["max_tokens", "keep_ratio"]}),
    "option that a policy excludes": Row(
        kv("knorm", 300, positions="POSITION_MODE_CACHE"),
        {"kv.positions": ["'knorm'", "absolute or compact"]},
    ),
    # Everything at once.
    "all at once": Row(
        Generate(
            request_id="i" * 200,
            sampling={"temperature": -1, "top_p": 2, "logit_bias": {VOCABULARY: 1}},
            stop={"max_output_tokens": 0, "stop_token_ids": [-1]},
            output={"top_logprobs": 100},
            kv={"policy": "nothing", "max_tokens": 0, "protected_spans": [{"begin": 5, "end": 5}]},
            scheduling={"tenant": "t" * 100},
        ),
        {
            "prompt": [],
            "request_id": [],
            "sampling.temperature": [],
            "sampling.top_p": [],
            f"sampling.logit_bias[{VOCABULARY}]": [],
            "stop.max_output_tokens": [],
            "stop.stop_token_ids[0]": [],
            "output.top_logprobs": [],
            "kv.policy": [],
            "kv.max_tokens": [],
            "kv.protected_spans[0]": [],
            "scheduling.tenant": [],
        },
        {"vocab_size": str(VOCABULARY)},
        reason="TOKEN_RANGE",
    ),
    # Outside the vocabulary, outside the sequence.
    "token": in_range(
        Generate(token_ids={"ids": [5, VOCABULARY]}),
        "token_ids.ids[1]",
        str(VOCABULARY),
        f"[0, {VOCABULARY})",
        vocab_size=str(VOCABULARY),
    ),
    "negative token": in_range(
        Generate(token_ids={"ids": [-1]}), "token_ids.ids[0]", "-1", vocab_size=str(VOCABULARY)
    ),
    "stop token": in_range(
        generate(stop={"stop_token_ids": [5, VOCABULARY]}),
        "stop.stop_token_ids[1]",
        str(VOCABULARY),
        vocab_size=str(VOCABULARY),
    ),
    "biased token": in_range(
        generate(sampling={"logit_bias": {1000: 1}}),
        "sampling.logit_bias[1000]",
        "1000",
        vocab_size=str(VOCABULARY),
    ),
    "token to decode": replace(
        in_range(
            tokenization_pb2.DetokenizeRequest(tokens={"ids": [5, VOCABULARY]}),
            "tokens.ids[1]",
            str(VOCABULARY),
            vocab_size=str(VOCABULARY),
        ),
        method="TokenizationService/Detokenize",
    ),
    "protected token": in_range(
        kv("sliding", 300, protected_spans=[{"begin": 5, "end": 2000}]),
        "kv.protected_spans[0]",
        str(LONGEST),
        tokens=str(LONGEST),
        end="2000",
    ),
    # Lengths and budgets, with limit and given value in the metadata.
    "context": Row(
        generate(stop={"max_output_tokens": 1200}),
        {"stop.max_output_tokens": ["114", "1200", str(CONTEXT)]},
        {"context_length": str(CONTEXT), "prompt_tokens": "114", "max_output_tokens": "1200"},
        reason="CONTEXT_LENGTH",
    ),
    "prompt over the context": Row(
        Generate(token_ids={"ids": [5] * (CONTEXT + 1)}),
        {"prompt": [str(CONTEXT + 1), str(CONTEXT)]},
        {
            "context_length": str(CONTEXT),
            "prompt_tokens": str(CONTEXT + 1),
            "max_output_tokens": "1",
        },
        reason="CONTEXT_LENGTH",
    ),
    "budget below its protection": Row(
        kv("sliding", 100, protect_prompt=True),
        {"kv.budget": ["100", "115"]},
        {"budget": "100", "min": "115"},
        reason="KV_BUDGET",
    ),
    "budget of a policy that keeps all": Row(
        generate(kv={"policy": "full", "max_tokens": 100}, stop={"max_output_tokens": 10}),
        {"kv.budget": ["'full'", "100", "123"]},
        {"budget": "100", "min": "123"},
        reason="KV_BUDGET",
    ),
    # What needs something that is not there.
    "statistics": Row(
        kv("triattention", 300),
        {"kv.policy": ["epikv calibrate triattention"]},
        {"policy": "triattention"},
        code=Code.FAILED_PRECONDITION,
        reason="ARTEFACT_MISSING",
    ),
    "log-probabilities of an evicted prompt": Row(
        generate(kv={"policy": "sliding", "max_tokens": 64}, output={"prompt_logprobs": True}),
        {"output.prompt_logprobs": ["'sliding'", "114", "64", "130"]},
        {"budget": "64", "min": "130"},
        code=Code.FAILED_PRECONDITION,
        reason="PROMPT_EVICTED",
    ),
    "message out of turn": Row(
        Generate(chat={"messages": [{"role": "CHAT_ROLE_ASSISTANT", "content": "hello"}]}),
        {"chat.messages[0].role": ["user", "assistant", "in turns"]},
    ),
    "pool": Row(
        generate(stop={"max_output_tokens": 900}),
        {"kv.budget": ["never"]},
        {"needed_bytes": "...", "capacity_bytes": "1300000"},
        code=Code.FAILED_PRECONDITION,
        reason="KV_POOL_TOO_SMALL",
    ),
    "pairs": Row(
        kv("rkv", 64),
        {"kv.policy_params.redundancy": ["--max_round_pairs", "redundancy = linear", "10000"]},
        {"pairs": "...", "most_pairs": "10000"},
        code=Code.FAILED_PRECONDITION,
        reason="ROUND_TOO_LARGE",
    ),
}
SMALL = {"pool", "pairs"}  # of the daemon that is called so


@pytest.mark.parametrize("name", ROWS)
def test_what_is_wrong_with_a_request(plain: Daemon, small: Daemon, name: str) -> None:
    row = ROWS[name]
    check(row, refusal((small if name in SMALL else plain).grpc, row.method, row.request))


def test_a_text_that_no_token_goes_on_with(plain: Daemon) -> None:
    """The vocabulary has the first word, and nothing of the second."""
    told = refusal(
        plain.grpc, f"{GENERATION}/Generate", generate(sampling={"choice": {"items": ["ask zzz"]}})
    )
    assert (told.code, told.info.reason) == (Code.FAILED_PRECONDITION, "CONSTRAINT_FAILED")
    assert "no token of this model's vocabulary" in told.message


UNKNOWN = {
    "model": (f"{GENERATION}/Generate", generate(model="gone"), "model"),
    "model to score": (f"{GENERATION}/Score", Score(model="gone"), "model"),
    "model described": ("ModelService/GetModel", model_pb2.GetModelRequest(name="gone"), "model"),
    "model of a tokenizer": (
        "TokenizationService/Tokenize",
        tokenization_pb2.TokenizeRequest(model="gone"),
        "model",
    ),
    "policy": ("PolicyService/GetPolicy", policy_pb2.GetPolicyRequest(name="gone"), "policy"),
    "request": (
        f"{GENERATION}/CancelRequest",
        generation_pb2.CancelRequestRequest(request_id="gone"),
        "request",
    ),
    **{
        f"experiment: {method}": (f"{EXPERIMENT}/{method}", request, "experiment")
        for method, request in (
            ("GetExperiment", experiment_pb2.GetExperimentRequest(name="gone")),
            (
                "UpdateExperiment",
                experiment_pb2.UpdateExperimentRequest(experiment=definition("gone")),
            ),
            ("StartExperiment", experiment_pb2.StartExperimentRequest(name="gone")),
            ("StopExperiment", experiment_pb2.StopExperimentRequest(name="gone")),
            ("GetExperimentReport", experiment_pb2.GetExperimentReportRequest(name="gone")),
        )
    },
    "request of an outcome": (f"{EXPERIMENT}/RecordOutcome", outcome("gone"), "request"),
    "model to unload": (f"{ADMIN}/UnloadModel", admin_pb2.UnloadModelRequest(name="gone"), "model"),
    "model whose requests are asked for": (
        f"{ADMIN}/ListActiveRequests",
        admin_pb2.ListActiveRequestsRequest(model="gone"),
        "model",
    ),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_does_not_exist(plain: Daemon, name: str) -> None:
    method, request, kind = UNKNOWN[name]
    address = plain.admin if method.startswith(ADMIN) else plain.grpc
    told = refusal(address, method, request)
    assert (told.code, told.info.reason) == (Code.NOT_FOUND, "NOT_FOUND")
    resource = told.details["ResourceInfo"]
    assert (resource.resource_type, resource.resource_name) == (kind, "gone")
    assert "'gone'" in told.message
    # The record of a request that took part may be on its way.
    assert ("RetryInfo" in told.details) == (name == "request of an outcome")


def test_a_message_that_is_too_large_is_refused_by_grpc(sample_model: Path) -> None:
    flags = ("--threads=1", "--max_message_bytes=10000")
    with Daemon(sample_model, *flags) as daemon, pytest.raises(grpc.RpcError) as caught:
        ask(daemon.grpc, f"{GENERATION}/Generate", generate(text="x" * 20000))
    assert caught.value.code() is Code.RESOURCE_EXHAUSTED
    assert "10000" in caught.value.details()


def test_a_method_that_is_not_there_is_refused_by_grpc(plain: Daemon) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        ask(plain.grpc, f"{GENERATION}/Embed", b"")
    assert caught.value.code() is Code.UNIMPLEMENTED

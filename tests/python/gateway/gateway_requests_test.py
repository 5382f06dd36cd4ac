"""Bodies as requests of the daemon, and its errors as bodies."""

import json
from typing import Any

import grpc
import pytest
from epikv.errors import FieldViolation, RpcError
from epikv.gateway.errors import ApiError
from epikv.gateway.requests import ChatBody, CompletionBody
from epikv.v1 import generation_pb2, kv_pb2


def asked(**body: Any) -> generation_pb2.GenerateRequest:
    read = CompletionBody.model_validate_json(json.dumps({"prompt": "x", **body}))
    return read.request("x", "id")


def chatted(*messages: dict[str, Any], **body: Any) -> generation_pb2.GenerateRequest:
    read = ChatBody.model_validate_json(json.dumps({"messages": messages, **body}))
    return read.request(read.chat(), "id")


def test_every_field_finds_its_place() -> None:
    made = asked(
        model="m",
        n=2,
        seed=-1,
        stop="end",
        temperature=0.5,
        top_p=0.9,
        top_k=-1,
        min_p=0.1,
        typical_p=0.8,
        repetition_penalty=1.1,
        frequency_penalty=0.2,
        presence_penalty=0.3,
        logit_bias={"7": -2},
        max_tokens=9,
        min_tokens=3,
        stop_token_ids=[4],
        include_stop_str_in_output=True,
        ignore_eos=True,
        kv={"policy": "sliding", "budget": 0.5, "params": {"a": 1}, "positions": "compact"},
        experiment={"unit_id": "u", "covariate": 2.5},
        session={"id": "s", "budget_tokens": 64},
        packets=["p"],
        labels={"a": "b"},
        cache_salt="salt",
        priority="low",
        tenant="t",
        logprobs=3,
    )
    sampling, stop, kv = made.sampling, made.stop, made.kv
    assert (made.model, made.request_id, made.text) == ("m", "id", "x")
    assert (sampling.n, sampling.seed, sampling.top_k) == (2, 2**64 - 1, 0)
    assert sampling.temperature == 0.5 and sampling.logit_bias == {7: -2}
    for name in ("top_p", "min_p", "typical_p", "repetition_penalty", "presence_penalty"):
        assert sampling.HasField(name)
    assert (stop.max_output_tokens, stop.min_output_tokens) == (9, 3)
    assert (list(stop.stop_strings), list(stop.stop_token_ids)) == (["end"], [4])
    assert stop.include_stop and stop.ignore_eos
    assert (kv.policy, kv.keep_ratio, kv.cache_salt) == ("sliding", 0.5, "salt")
    assert kv.positions == kv_pb2.POSITION_MODE_COMPACT and kv.policy_params["a"] == 1
    assert (made.experiment.unit_id, made.experiment.covariate) == ("u", 2.5)
    assert (made.session.id, made.session.budget_tokens) == ("s", 64)
    assert (list(made.packets), dict(made.labels)) == (["p"], {"a": "b"})
    assert made.scheduling.tenant == "t"
    assert made.scheduling.priority == generation_pb2.PRIORITY_LOW
    assert made.output.logprobs and made.output.token_ids and made.output.top_logprobs == 3


def test_what_is_left_out_is_the_daemons() -> None:
    made = asked()
    assert made.stop.max_output_tokens == 16, "the dialect's own"
    assert not made.sampling.HasField("temperature") and not made.HasField("session")
    assert not chatted({"role": "user", "content": "x"}).stop.HasField("max_output_tokens")


def test_the_user_keeps_an_arm() -> None:
    assert asked(user="ann").experiment.unit_id == "ann"
    assert asked(user="ann", experiment={"unit_id": "bob"}).experiment.unit_id == "bob"
    assert asked(user="ann", experiment={"covariate": 1}).experiment.unit_id == "ann"


def test_messages() -> None:
    made = chatted(
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        chat_template_kwargs={"enable_thinking": False},
        max_tokens=5,
        max_completion_tokens=7,
    )
    system, user = made.chat.messages
    assert (system.role, system.content) == (generation_pb2.CHAT_ROLE_SYSTEM, "be brief")
    assert user.content == "ab"
    assert made.chat.HasField("thinking") and not made.chat.thinking
    assert made.stop.max_output_tokens == 7


def test_constraints() -> None:
    schema = {"type": "object"}
    of_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    assert json.loads(asked(response_format=of_format).sampling.json_schema) == schema
    anything = json.loads(asked(response_format={"type": "json_object"}).sampling.json_schema)
    assert anything == {"type": "object", "additionalProperties": True}
    assert not asked(response_format={"type": "text"}).sampling.WhichOneof("constraint")
    assert asked(structured_outputs={"regex": "a+"}).sampling.regex == "a+"
    with pytest.raises(ApiError, match="not beside"):
        asked(response_format=of_format, structured_outputs={"regex": "a"})


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"kv": {"budgt": 1}}, "kv.budgt"),
        ({"kv": {"budget": [1]}}, None),
        ({"experiment": {"unit": "x"}}, "experiment.unit"),
        ({"session": {"id": "x"}}, "session"),
        ({"steering": {"coefficient": "much"}}, None),
        ({"kv": {"params": {"a": {"b": 1}}, "policy": 5}}, None),
        ({"seed": 2**64 - 1, "logit_bias": {"99999999999": 1}}, None),
    ],
)
def test_what_no_message_holds(body: dict[str, Any], param: str | None) -> None:
    with pytest.raises(ApiError) as caught:
        asked(**body)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(
    ("code", "reason", "status", "kind"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, "KV_BUDGET", 400, "invalid_request_error"),
        (grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED", 401, "authentication_error"),
        (grpc.StatusCode.PERMISSION_DENIED, "", 403, "permission_error"),
        (grpc.StatusCode.ALREADY_EXISTS, "DUPLICATE_ID", 409, "invalid_request_error"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", 429, "rate_limit_error"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "ANSWER_TOO_LARGE", 400, "invalid_request_error"),
        (grpc.StatusCode.UNAVAILABLE, "DRAINING", 503, "server_error"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "", 504, "server_error"),
        (grpc.StatusCode.INTERNAL, "POLICY_FAILED", 500, "server_error"),
        (grpc.StatusCode.UNKNOWN, "", 500, "server_error"),
    ],
)
def test_errors_of_the_daemon(code: grpc.StatusCode, reason: str, status: int, kind: str) -> None:
    error = ApiError.from_rpc(RpcError(code, "so it is", reason=reason, retry_delay=0.25))
    told = error.body()["error"]
    assert (error.status, told["type"], told["message"]) == (status, kind, "so it is")
    assert error.headers() == {"retry-after": "1", "retry-after-ms": "250"}


def test_fields_have_the_names_that_clients_gave_them() -> None:
    def told(*fields: str) -> dict[str, Any]:
        violations = tuple(FieldViolation(field, "is wrong") for field in fields)
        error = RpcError(
            grpc.StatusCode.INVALID_ARGUMENT, "it is wrong", field_violations=violations
        )
        return ApiError.from_rpc(error).body()["error"]

    names = {
        "sampling.temperature": "temperature",
        "stop.max_output_tokens": "max_tokens",
        "stop.stop_strings[3]": "stop_strings[3]",
        "token_ids.ids[2]": "prompt.ids[2]",
        "chat.messages[1].role": "messages[1].role",
        "sampling.constraint.json_schema": "response_format",
        "kv.policy_params.window": "kv.policy_params.window",
    }
    for field, param in names.items():
        assert told(field)["param"] == param
    both = told("sampling.top_p", "kv.policy")
    assert both["message"] == "it is wrong; top_p: is wrong; kv.policy: is wrong"

"""What clients are told when something is wrong: each row of the table in docs/errors.md, through
a real channel, the details read by Google's own types, which share no code with epikv.

Of what only C++ can provoke: a policy that throws or answers nonsense is in broken_policy_test.cc, an
answer over max_sent_message_bytes in transport_test.cc, a second LoadModel in admin_service_test.cc.
"""

import json
import math
import re
import socket
import sqlite3
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import broken_models
import grpc
import pytest
import torch
from click.testing import CliRunner
from epikv.cli import main
from epikv.export.synthetic import word_tokenizer
from epikv.sample import problem
from epikv.scrape import scrape
from epikv.testing import PACED, Daemon
from epikv.v1 import (
    admin_pb2,
    experiment_pb2,
    generation_pb2,
    model_pb2,
    policy_pb2,
    tokenization_pb2,
)
from google.protobuf.message import Message
from google.rpc import error_details_pb2
from grpc_status import rpc_status

CONTEXT, VOCABULARY, PROMPT_TOKENS = 1280, 164, 114  # of the sample model and its prompt
LONGEST = PROMPT_TOKENS + 1024  # with as many output tokens as there are where none are asked for
TASK = problem(9)
TRACE = "0af7651916cd43dd8448eb211c80319c"
Code = grpc.StatusCode
Generate, Score = generation_pb2.GenerateRequest, generation_pb2.ScoreRequest
GENERATION, ADMIN = "GenerationService", "AdminService"
EXPERIMENT = "ExperimentService"


@dataclass(frozen=True)
class Told:
    """What a client was told; `details` by the name of their type."""

    code: grpc.StatusCode
    message: str
    details: dict[str, Message]
    trailers: dict[str, str | bytes]

    @property
    def info(self) -> error_details_pb2.ErrorInfo:
        return self.details["ErrorInfo"]

    @property
    def metadata(self) -> dict[str, str]:
        return {key: value for key, value in self.info.metadata.items() if key != "trace_id"}

    @property
    def fields(self) -> dict[str, str]:
        """What is wrong, by field."""
        bad = self.details.get("BadRequest", error_details_pb2.BadRequest())
        return {violation.field: violation.description for violation in bad.field_violations}

    @property
    def retry_seconds(self) -> float:
        delay = self.details["RetryInfo"].retry_delay
        return delay.seconds + delay.nanos / 1e9


def told(error: grpc.RpcError) -> Told:
    """Reads an error of ours, and checks what all of them have."""
    status = rpc_status.from_call(error)  # raises if it contradicts the call's code or message
    assert status is not None, f"no details: {error}"
    details = {}
    for packed in status.details:
        name = packed.type_url.removeprefix("type.googleapis.com/google.rpc.")
        detail = getattr(error_details_pb2, name)()
        assert packed.Unpack(detail)
        assert name not in details
        details[name] = detail
    info = details["ErrorInfo"]
    assert status.details[0].type_url.endswith("ErrorInfo")
    assert info.domain == "epikv" and info.reason
    assert len(bytes.fromhex(info.metadata["trace_id"])) == 16
    assert status.message
    if error.code() is Code.FAILED_PRECONDITION:
        [missing] = details["PreconditionFailure"].violations
        assert missing.type == info.reason and missing.description == status.message
    return Told(error.code(), status.message, details, dict(error.trailing_metadata()))


def ask(
    address: str, method: str, request: Message | bytes, options: Any = (), **call: Any
) -> list[bytes]:
    """All that `Service/Method` answers to one request, on a connection of its own."""
    wire = request if isinstance(request, bytes) else request.SerializeToString()
    with grpc.insecure_channel(address, options) as channel:
        method = channel.unary_stream(f"/epikv.v1.{method}")
        return list(method(wire, **{"timeout": 60, **call}))


def refusal(address: str, method: str, request: Message | bytes, **call: Any) -> Told:
    with pytest.raises(grpc.RpcError) as caught:
        ask(address, method, request, **call)
    return told(caught.value)


def generate(**fields: Any) -> Generate:
    return Generate(**{"text": TASK.prompt, **fields})


def kv(policy: str, budget: int | None = None, params: dict | None = None, **more: Any) -> Generate:
    request = generate(kv={"policy": policy, **more})
    if budget is not None:
        request.kv.max_tokens = budget
    request.kv.policy_params.update(params or {})
    return request


def eventually(is_so: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@dataclass(frozen=True)
class Row:
    """A request, and what its sender is told: exactly these fields, each with these words."""

    request: Message | bytes
    fields: dict[str, list[str]]
    metadata: dict[str, str] = field(default_factory=dict)
    method: str = f"{GENERATION}/Generate"
    code: grpc.StatusCode = Code.INVALID_ARGUMENT
    reason: str = "INVALID_REQUEST"


def sampling(name: str, value: float, *says: str) -> Row:
    return Row(generate(sampling={name: value}), {f"sampling.{name}": [*says]})


def in_range(request: Message, field: str, *says: str, **metadata: str) -> Row:
    reason = "SPAN_RANGE" if "span" in field else "TOKEN_RANGE"
    return Row(request, {field: [*says]}, metadata, code=Code.OUT_OF_RANGE, reason=reason)


NAN = math.nan
UNKNOWN_ENUM = 99


ARMS = [
    {"name": "full", "weight_permille": 500, "control": True},
    {"name": "lean", "weight_permille": 500, "kv": {"policy": "sliding", "max_tokens": 300}},
]
METRICS = [{"name": "right", "kind": "KIND_PROPORTION"}, {"name": "score"}]
ELIGIBLE = {"takes": "part"}  # labels


def definition(name: str = "lean", **changes: Any) -> experiment_pb2.Experiment:
    sound = {
        "name": name,
        "traffic_permille": 1000,
        "eligibility": {"labels": ELIGIBLE},
        "arms": ARMS,
        "metrics": METRICS,
        "primary_metric": "right",
    }
    return experiment_pb2.Experiment(**{**sound, **changes})


def arms(*changes: dict[str, Any]) -> list[dict[str, Any]]:
    """ARMS, each with its changes."""
    return [{**arm, **change} for arm, change in zip(ARMS, changes, strict=True)]


def undefined(fields: dict[str, list[str]], **changes: Any) -> Row:
    """A definition that is refused; fields below `experiment`."""
    request = experiment_pb2.CreateExperimentRequest(
        experiment=definition(**changes), validate_only=True
    )
    full = {f"experiment.{name}": says for name, says in fields.items()}
    return Row(request, full, method=f"{EXPERIMENT}/CreateExperiment")


def unplanned(*says: str, **changes: Any) -> Row:
    request = {"kind": "KIND_PROPORTION", "rate": 0.1, "effect": 0.03, **changes}
    return Row(
        experiment_pb2.PlanExperimentRequest(**request),
        {"plan": [*says]},
        method=f"{EXPERIMENT}/PlanExperiment",
    )


def outcome(request_id: str = "took part", **fields: Any) -> experiment_pb2.RecordOutcomeRequest:
    request = {"metric": "score", "value": 1, **fields}
    return experiment_pb2.RecordOutcomeRequest(request_id=request_id, **request)


def uncounted(fields: dict[str, list[str]], **changes: Any) -> Row:
    return Row(outcome(**changes), fields, method=f"{EXPERIMENT}/RecordOutcome")


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
    "conversation with a model that has no format for it": Row(
        Generate(chat={"messages": [{"role": "CHAT_ROLE_USER", "content": "hello"}]}),
        {"chat": ["chat"]},
        code=Code.FAILED_PRECONDITION,
        reason="CHAT_FORMAT",
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
    # Experiments: a definition, its parts each by themselves.
    "names of an experiment": undefined(
        {
            "name": ["lower-case", "'Lean'"],
            "layer": ["63 bytes"],
            "salt": ["'s_1'"],
            "hypothesis": ["1025", "1024"],
            "sample_ratio_explanation": ["1025", "1024"],
        },
        name="Lean",
        layer="l" * 64,
        salt="s_1",
        hypothesis="h" * 1025,
        sample_ratio_explanation="e" * 1025,
    ),
    "one arm": undefined({"arms": ["2 to 8", "are 1"]}, arms=ARMS[:1]),
    "weights and controls": undefined(
        {
            "arms[0].weight_permille": ["at least 1"],
            "arms": ["one must be the control", "0 are"],
        },
        arms=arms({"weight_permille": 0, "control": False}, {"weight_permille": 1000}),
    ),
    "names of arms": undefined(
        {"arms[0].name": ["'none'", "cannot be the name"], "arms[1].name": ["lower-case", "'2'"]},
        arms=arms({"name": "none"}, {"name": "2"}),
    ),
    "two arms of one name": undefined(
        {"arms[1].name": ["'full'", "twice"]}, arms=arms({}, {"name": "full"})
    ),
    "an arm's options, as a model sees them": undefined(
        {
            "arms[0].kv.cache_salt": ["request's own"],
            "arms[1].kv.policy": ["'slidng'", "sliding", "(model 'sample')"],
        },
        arms=arms({"kv": {"cache_salt": "mine"}}, {"kv": {"policy": "slidng", "max_tokens": 300}}),
    ),
    "who takes part": undefined(
        {"traffic_permille": ["1 to 1000", "is 1001"], "eligibility.labels": ["has 9", "8"]},
        traffic_permille=1001,
        eligibility={"labels": {str(i): "" for i in range(9)}},
    ),
    "metrics": undefined(
        {
            "metrics[0].name": ["lower-case", "'Right'"],
            "metrics[0].tau": ["nan"],
            "metrics[0].kind": ["99"],
            "metrics[0].direction": ["99"],
            "metrics[0].covariate": ["99"],
            "metrics[1].name": ["'failed'", "measured by the server"],
            "metrics[3].name": ["'score'", "twice"],
            "primary_metric": ["'rigth'", "score", "kv_evicted_tokens"],
        },
        metrics=[
            {
                "name": "Right",
                "tau": NAN,
                "kind": UNKNOWN_ENUM,
                "direction": UNKNOWN_ENUM,
                "covariate": UNKNOWN_ENUM,
            },
            {"name": "failed"},
            {"name": "score"},
            {"name": "score"},
        ],
        primary_metric="rigth",
    ),
    "too many metrics": undefined(
        {"metrics": ["has 9", "8"]}, metrics=[{"name": f"m{i}"} for i in range(9)]
    ),
    "guardrails": undefined(
        {"guardrails[0].metric": ["''", "right"], "guardrails[1].margin": ["-1"]},
        guardrails=[{"margin": 1}, {"metric": "failed", "margin": -1}],
    ),
    "too many guardrails": undefined(
        {"guardrails": ["has 9", "8"]}, guardrails=[{"metric": "failed"}] * 9
    ),
    "alpha and window": undefined(
        {"alpha": ["(0, 0.5)", "is 0.5"], "outcome_window": ["more than 0", "is 0"]},
        alpha=0.5,
        outcome_window={},
    ),
    "an end that no calendar has": undefined(
        {"end_time": ["1 to 9999"]}, end_time={"seconds": 10**15}
    ),
    # ... and whatever else is asked of one.
    "what an update may not set": Row(
        experiment_pb2.UpdateExperimentRequest(
            experiment=definition(), update_mask={"paths": ["state", "alpha"]}
        ),
        {"update_mask": ["'state'", "hypothesis", "outcome_window"]},
        method=f"{EXPERIMENT}/UpdateExperiment",
    ),
    "why it stops": Row(
        experiment_pb2.StopExperimentRequest(name="lean", reason="r" * 1025),
        {"reason": ["1025", "1024"]},
        method=f"{EXPERIMENT}/StopExperiment",
    ),
    "points of a report": Row(
        experiment_pb2.GetExperimentReportRequest(name="lean", points=201),
        {"points": ["200"]},
        method=f"{EXPERIMENT}/GetExperimentReport",
    ),
    "a plan without an aim": unplanned("effect", "units", effect=None),
    "a plan for one arm": unplanned("2 to 8", arms=1),
    "a plan of a certain power": unplanned("power", "is 2", power=2),
    "a plan of a rate that is none": unplanned("rate", "is 1.5", rate=1.5),
    # Requests that take part, and their outcomes.
    "context of an experiment": Row(
        generate(
            experiment={
                "unit_id": "u" * 129,
                "covariate": NAN,
                "force_arm": "lean/full",
                "opt_out": True,
            }
        ),
        {
            "experiment.unit_id": ["129", "128"],
            "experiment.covariate": ["finite"],
            "experiment.force_arm": ["opt_out"],
        },
    ),
    "labels": Row(generate(labels={str(i): "" for i in range(9)}), {"labels": ["has 9", "8"]}),
    "a label": Row(generate(labels={"k": "v" * 65}), {"labels": ["1 to 64 bytes"]}),
    "an arm that does not run": Row(
        generate(experiment={"force_arm": "lean/fat"}),
        {"experiment.force_arm": ["'lean/fat'", "experiment/arm"]},
    ),
    "an arm where there are no experiments": Row(
        generate(experiment={"force_arm": "lean/full"}, stop={"max_output_tokens": 1}),
        {"experiment.force_arm": ["no experiments"]},
    ),
    "an outcome": uncounted(
        {
            "request_id": ["empty"],
            "value": ["finite"],
            "idempotency_key": ["65", "64"],
            "metric": ["65", "64"],
            "time": ["1 to 9999"],
        },
        request_id="",
        value=NAN,
        idempotency_key="k" * 65,
        metric="m" * 65,
        time={"seconds": 2**62},
    ),
    # No request has them, and no index of a database has to.
    "an outcome of what no request is called": uncounted(
        {"request_id": ["129", "128"], "tenant": ["65", "64"]},
        request_id="i" * 129,
        tenant="t" * 65,
    ),
    "an outcome that is no proportion": uncounted(
        {"value": ["0 or 1", "'right'"]}, metric="right", value=0.5
    ),
    "an outcome that nobody declared": uncounted(
        {"metric": ["'took part'", "'wrong'"]}, metric="wrong"
    ),
    "an outcome that no store can hold": uncounted({"outcome": ["store"]}, idempotency_key="a\0b"),
    "no outcomes": Row(
        experiment_pb2.BatchRecordOutcomesRequest(),
        {"outcomes": ["1 to 1000", "are 0"]},
        method=f"{EXPERIMENT}/BatchRecordOutcomes",
    ),
    "too many outcomes": Row(
        experiment_pb2.BatchRecordOutcomesRequest(outcomes=[outcome()] * 1001),
        {"outcomes": ["1 to 1000", "are 1001"]},
        method=f"{EXPERIMENT}/BatchRecordOutcomes",
    ),
}
SMALL = {"pool", "an arm where there are no experiments"}  # of the daemon that is called so


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("experiments") / "store.db"


@pytest.fixture(scope="module")
def plain(sample_model: Path, store: Path) -> Iterator[Daemon]:
    """Without statistics for policies that need them; with experiments, see `define`."""
    flags = (f"--experiment_store={store}", "--experiment_spool_bytes=1048576")
    with Daemon(sample_model, "--threads=1", *flags) as daemon:
        define(daemon)
        yield daemon


def define(daemon: Daemon) -> None:
    """An experiment in every state, and a request that took part in "lean" and in "hasty"."""

    def manage(method: str, request: Message) -> None:
        ask(daemon.grpc, f"{EXPERIMENT}/{method}", request)

    # Their arms set nothing, so that they run beside "lean".
    aside = {"arms": arms({}, {"kv": {}}), "metrics": [{"name": "haste"}]}
    aside["primary_metric"] = "haste"
    definitions = [
        definition("lean"),
        definition("hasty", layer="hasty", outcome_window={"nanos": 1000}, **aside),
        definition("over", layer="over", **aside),
        definition("draft"),
        definition("elsewhere", layer="elsewhere"),
        definition("undecided", primary_metric=""),
        definition("past", end_time={"seconds": 1}),
    ]
    for experiment in definitions:
        create = experiment_pb2.CreateExperimentRequest(experiment=experiment)
        manage("CreateExperiment", create)
    for name in ("lean", "hasty", "over"):
        manage("StartExperiment", experiment_pb2.StartExperimentRequest(name=name))
    manage("StopExperiment", experiment_pb2.StopExperimentRequest(name="over"))
    ask(
        daemon.grpc,
        f"{GENERATION}/Generate",
        generate(request_id="took part", labels=ELIGIBLE, stop={"max_output_tokens": 1}),
    )
    manage("RecordOutcome", outcome(metric="right"))


QUEUE = {"max_queued_requests": 3, "max_queued_tokens": 100000}


@pytest.fixture(scope="module")
def small(sample_model: Path) -> Iterator[Daemon]:
    """One place, three more to wait, a small pool, a small outbox."""
    flags = (
        "--kv_pool_bytes=1300000",
        "--max_running_requests=1",
        *(f"--{limit}={value}" for limit, value in QUEUE.items()),
        "--outbox_messages=8",
        "--stream_stall_seconds=600",
    )
    with Daemon(sample_model, "--threads=1", *flags) as daemon:
        yield daemon


@pytest.mark.parametrize("name", ROWS)
def test_what_is_wrong_with_a_request(plain: Daemon, small: Daemon, name: str) -> None:
    row = ROWS[name]
    told = refusal((small if name in SMALL else plain).grpc, row.method, row.request)
    assert (told.code, told.info.reason) == (row.code, row.reason), told.message
    assert set(told.fields) == set(row.fields)
    for at, words in row.fields.items():
        for word in words:
            assert word in told.fields[at]
    assert set(told.metadata) == set(row.metadata)
    for key, value in row.metadata.items():
        assert value in (told.metadata[key], "...")
    if row.fields:  # the sentence names the first, and counts the others
        first = next(iter(told.fields))
        assert told.message.startswith(f"{first}: ")
        assert len(row.fields) == 1 or f"(and {len(row.fields) - 1} more)" in told.message
    if row.code is Code.FAILED_PRECONDITION:
        [missing] = told.details["PreconditionFailure"].violations
        assert [missing.subject] == [*row.fields]


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


def changed(name: str, path: str, **fields: Any) -> experiment_pb2.UpdateExperimentRequest:
    return experiment_pb2.UpdateExperimentRequest(
        experiment=definition(name, **fields), update_mask={"paths": [path]}
    )


# What an experiment's state forbids: who is asked, the reason, and words.
FORBIDDEN = {
    "a layer without room": (
        "StartExperiment",
        experiment_pb2.StartExperimentRequest(name="draft"),
        "LAYER_FULL",
        ["'default'", "1000 permille", "leave at most 0"],
    ),
    "arms of another layer": (
        "StartExperiment",
        experiment_pb2.StartExperimentRequest(name="elsewhere"),
        "ARMS_CONFLICT",
        ["'lean'", "'default'", "policy and budget"],
    ),
    "a start without a primary metric": (
        "StartExperiment",
        experiment_pb2.StartExperimentRequest(name="undecided"),
        "EXPERIMENT_STATE",
        ["'undecided'", "primary_metric"],
    ),
    "a start after its end": (
        "StartExperiment",
        experiment_pb2.StartExperimentRequest(name="past"),
        "EXPERIMENT_STATE",
        ["'past'", "end_time"],
    ),
    "a second start": (
        "StartExperiment",
        experiment_pb2.StartExperimentRequest(name="over"),
        "EXPERIMENT_STATE",
        ["'over'", "create another"],
    ),
    "a stop of what does not run": (
        "StopExperiment",
        experiment_pb2.StopExperimentRequest(name="draft"),
        "EXPERIMENT_STATE",
        ["'draft'"],
    ),
    "a report of a draft": (
        "GetExperimentReport",
        experiment_pb2.GetExperimentReportRequest(name="draft"),
        "EXPERIMENT_STATE",
        ["'draft'"],
    ),
    "other arms of what is over": (
        "UpdateExperiment",
        changed("over", "traffic_permille", traffic_permille=1),
        "EXPERIMENT_STATE",
        ["'over'"],
    ),
    "units that would move": (
        "UpdateExperiment",
        changed("lean", "traffic_permille", traffic_permille=1),
        "REBUCKET",
        ["'lean'", "allow_rebucket"],
    ),
    "what has been decided": (
        "UpdateExperiment",
        changed("lean", "alpha", alpha=0.1),
        "DECIDED",
        ["'lean'", "alpha"],
    ),
    "an outcome that is late": (
        "RecordOutcome",
        outcome(metric="haste"),
        "OUTCOME_LATE",
        ["'took part'", "outcome_window"],
    ),
}


@pytest.mark.parametrize("name", FORBIDDEN)
def test_what_an_experiment_does_not_allow(plain: Daemon, name: str) -> None:
    method, request, reason, words = FORBIDDEN[name]
    told = refusal(plain.grpc, f"{EXPERIMENT}/{method}", request)
    assert (told.code, told.info.reason) == (Code.FAILED_PRECONDITION, reason)
    for word in words:
        assert word in told.message


STALE: dict[str, Message] = {
    "UpdateExperiment": experiment_pb2.UpdateExperimentRequest(experiment=definition(etag="old")),
    "StartExperiment": experiment_pb2.StartExperimentRequest(name="lean", etag="old"),
    "StopExperiment": experiment_pb2.StopExperimentRequest(name="lean", etag="old"),
}


@pytest.mark.parametrize("method", STALE)
def test_what_has_changed_since_it_was_read(plain: Daemon, method: str) -> None:
    told = refusal(plain.grpc, f"{EXPERIMENT}/{method}", STALE[method])
    assert (told.code, told.info.reason) == (Code.ABORTED, "ETAG")
    assert "'lean'" in told.message and "read it again" in told.message


TAKEN = {
    "experiment": (
        "CreateExperiment",
        experiment_pb2.CreateExperimentRequest(experiment=definition("lean")),
        "DUPLICATE_ID",
        "lean",
    ),
    "outcome": ("RecordOutcome", outcome(metric="right", value=0), "OUTCOME_CONFLICT", "took part"),
}


@pytest.mark.parametrize("kind", TAKEN)
def test_what_is_there_already(plain: Daemon, kind: str) -> None:
    method, request, reason, name = TAKEN[kind]
    told = refusal(plain.grpc, f"{EXPERIMENT}/{method}", request)
    assert (told.code, told.info.reason) == (Code.ALREADY_EXISTS, reason)
    resource = told.details["ResourceInfo"]
    assert (resource.resource_type, resource.resource_name) == (kind, name)
    assert f"'{name}'" in told.message


def test_each_outcome_of_a_batch(plain: Daemon) -> None:
    """Is told what it would be told alone."""
    outcomes = [
        outcome(idempotency_key="batch"),
        outcome("gone"),
        outcome(metric="right", value=0),
        outcome(metric="haste"),
        outcome(value=NAN),
    ]
    batch = experiment_pb2.BatchRecordOutcomesRequest(outcomes=outcomes)
    [answer] = ask(plain.grpc, f"{EXPERIMENT}/BatchRecordOutcomes", batch)
    kept, *others = experiment_pb2.BatchRecordOutcomesResponse.FromString(answer).results
    assert kept.code == 0 and kept.HasField("response")
    for result, alone in zip(others, outcomes[1:], strict=True):
        told = refusal(plain.grpc, f"{EXPERIMENT}/RecordOutcome", alone)
        assert result.code == told.code.value[0] and not result.HasField("response")
        assert (result.reason, result.message) == (told.info.reason, told.message)
        assert result.HasField("retry_delay") == ("RetryInfo" in told.details)
    assert others[0].retry_delay.seconds == 1


@pytest.mark.parametrize(
    "method",
    [
        method.name
        for method in experiment_pb2.DESCRIPTOR.services_by_name[EXPERIMENT].methods
        if method.name != "PlanExperiment"  # which needs none
    ],
)
def test_a_server_without_experiments(small: Daemon, method: str) -> None:
    told = refusal(small.grpc, f"{EXPERIMENT}/{method}", b"")
    assert (told.code, told.info.reason) == (Code.FAILED_PRECONDITION, "EXPERIMENTS_OFF")
    assert "--experiment_store" in told.message


def test_a_store_that_is_away(plain: Daemon, store: Path) -> None:
    """Nobody can write to it: definitions have to wait; outcomes, once the spool is full, and
    requests never."""
    stop = experiment_pb2.StopExperimentRequest(name="lean")
    another = experiment_pb2.CreateExperimentRequest(experiment=definition("another"))
    with closing(sqlite3.connect(store, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        unavailable = [
            refusal(plain.grpc, f"{EXPERIMENT}/{method}", request)
            for method, request in (("CreateExperiment", another), ("StopExperiment", stop))
        ]
        request = generate(labels=ELIGIBLE, stop={"max_output_tokens": 1})
        ask(plain.grpc, f"{GENERATION}/Generate", request)
        outcomes = [outcome("gone")] * 1000
        while outcomes:  # until there is no room for one
            batch = experiment_pb2.BatchRecordOutcomesRequest(outcomes=outcomes)
            [answer] = ask(plain.grpc, f"{EXPERIMENT}/BatchRecordOutcomes", batch)
            results = experiment_pb2.BatchRecordOutcomesResponse.FromString(answer).results
            if any(result.code for result in results):
                outcomes = outcomes[: len(outcomes) // 10]
        longer = outcome("gone", idempotency_key="k" * 64)
        unavailable.append(refusal(plain.grpc, f"{EXPERIMENT}/RecordOutcome", longer))
    for told in unavailable:
        assert (told.code, told.info.reason) == (Code.UNAVAILABLE, "STORE_UNAVAILABLE")
        assert told.retry_seconds == 1


def hold(channel: grpc.Channel, request_id: str) -> grpc.Call:
    """A stream that is accepted, and stays where it is: nobody reads on, and its outbox is full."""
    request = kv("epikv_flat", 130)
    request.request_id = request_id
    request.output.kv_trace = True
    call = channel.unary_stream(f"/epikv.v1.{GENERATION}/Generate")(request.SerializeToString())
    next(call)
    return call


def set_queue(daemon: Daemon, limits: dict[str, int]) -> None:
    request = admin_pb2.UpdateConfigRequest(config=limits, update_mask={"paths": [*limits]})
    ask(daemon.admin, f"{ADMIN}/UpdateConfig", request)


@pytest.fixture
def busy(small: Daemon) -> Iterator[Daemon]:
    """Its place is taken by the request "runs", and "waits" and two more fill the queue."""
    with grpc.insecure_channel(small.grpc, PACED) as channel:
        calls = [hold(channel, "runs")]
        eventually(lambda: scrape(small.metrics).total("epikv_requests_running") == 1)
        calls += [hold(channel, name) for name in ("waits", "waits, too", "waits as well")]
        eventually(lambda: scrape(small.metrics).total("epikv_requests_waiting") == 3)
        yield small
        set_queue(small, QUEUE)
        for call in calls:
            call.cancel()
        eventually(lambda: scrape(small.metrics).total("epikv_requests_running") == 0)
        eventually(lambda: scrape(small.metrics).total("epikv_requests_waiting") == 0)


# Limits that three requests are beyond, whose prompts and outputs may fill the context, and what
# is told: the limit, and what is there.
FULL_QUEUES = {
    "requests": ({"max_queued_requests": 2}, {2, 3}),
    "tokens": ({"max_queued_requests": 9, "max_queued_tokens": 3000}, {3000, 3 * LONGEST}),
}


@pytest.mark.parametrize("unit", FULL_QUEUES)
def test_a_full_queue(busy: Daemon, unit: str) -> None:
    """Counted in requests or in tokens; the limit was lowered, so that it is not what is there."""
    limits, numbers = FULL_QUEUES[unit]
    set_queue(busy, limits)
    told = refusal(busy.grpc, f"{GENERATION}/Generate", kv("epikv_flat", 130))
    assert (told.code, told.info.reason) == (Code.RESOURCE_EXHAUSTED, "QUEUE_FULL")
    [quota] = told.details["QuotaFailure"].violations
    assert quota.subject and quota.description
    assert 0 < told.retry_seconds <= 300
    pushback = int(told.trailers["grpc-retry-pushback-ms"])
    assert pushback == pytest.approx(1000 * told.retry_seconds, abs=1)
    assert unit in told.message
    assert numbers <= {int(number) for number in re.findall(r"\d+", told.message)}, told.message


def test_an_id_that_is_taken(busy: Daemon) -> None:
    request = kv("epikv_flat", 130)
    for request.request_id in ("runs", "waits"):
        told = refusal(busy.grpc, f"{GENERATION}/Generate", request)
        assert (told.code, told.info.reason) == (Code.ALREADY_EXISTS, "DUPLICATE_ID")
        resource = told.details["ResourceInfo"]
        assert resource.resource_type == "request"
        assert resource.resource_name == request.request_id


def test_a_request_that_was_cancelled(small: Daemon) -> None:
    with grpc.insecure_channel(small.grpc, PACED) as channel:
        call = hold(channel, "id")
        cancel = generation_pb2.CancelRequestRequest(request_id="id")
        ask(small.grpc, f"{GENERATION}/CancelRequest", cancel)
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
    told_ = told(caught.value)
    assert (told_.code, told_.info.reason) == (Code.CANCELLED, "CANCELLED")
    assert "CancelRequest" in told_.message


def test_a_deadline_that_cannot_be_met(plain: Daemon) -> None:
    """One that is too short for the request is refused at once."""
    request = generate(stop={"max_output_tokens": 900, "ignore_eos": True})
    ask(plain.grpc, f"{GENERATION}/Generate", request)  # the pace is known
    # Of the server alone: a client's own clock would speak first.
    in_20_ms = [("grpc-timeout", "20m")]
    told = refusal(plain.grpc, f"{GENERATION}/Generate", request, metadata=in_20_ms, timeout=None)
    assert (told.code, told.info.reason) == (Code.DEADLINE_EXCEEDED, "DEADLINE_INFEASIBLE")
    assert set(told.metadata) == {"seconds_left", "wait_seconds", "run_seconds"}
    assert float(told.metadata["seconds_left"]) < 0.03 < float(told.metadata["run_seconds"])
    assert told.metadata["run_seconds"] in told.message
    assert "RetryInfo" not in told.details, "no later try would be any faster"


def test_a_deadline_behind_a_queue(sample_model: Path) -> None:
    """Refused for the wait, and told when it would be in time."""
    flags = ("--threads=1", "--max_running_requests=1")
    request = generate(stop={"max_output_tokens": 900, "ignore_eos": True})
    with Daemon(sample_model, *flags) as daemon, ExitStack() as stack:
        channel = stack.enter_context(grpc.insecure_channel(daemon.grpc))
        begin = time.monotonic()
        ask(daemon.grpc, f"{GENERATION}/Generate", request)  # the pace is known
        seconds = time.monotonic() - begin
        method = channel.unary_stream(f"/epikv.v1.{GENERATION}/Generate")
        calls = [method(request.SerializeToString()) for _ in range(50)]
        for call in calls:
            stack.callback(call.cancel)
            next(call)
        timeout = [("grpc-timeout", f"{2000 * seconds:.0f}m")]  # enough, but for those ahead
        told = refusal(
            daemon.grpc, f"{GENERATION}/Generate", request, metadata=timeout, timeout=None
        )
        assert (told.code, told.info.reason) == (Code.DEADLINE_EXCEEDED, "DEADLINE_INFEASIBLE")
        assert float(told.metadata["wait_seconds"]) > 0
        pushback = int(told.trailers["grpc-retry-pushback-ms"])
        assert pushback == pytest.approx(1000 * told.retry_seconds, abs=1) and pushback > 0


def test_a_deadline_that_passes(small: Daemon) -> None:
    """gRPC itself says so, also where the server's clock is first."""
    with grpc.insecure_channel(small.grpc, PACED) as channel:
        request = kv("epikv_flat", 130)
        request.output.kv_trace = True
        call = channel.unary_stream(f"/epikv.v1.{GENERATION}/Generate")(
            request.SerializeToString(), metadata=[("grpc-timeout", "2S")]
        )
        next(call)
        missed = {"reason": "deadline"}
        eventually(
            lambda: scrape(small.metrics).total("epikv_requests_finished_total", **missed) == 1
        )
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
    assert caught.value.code() is Code.DEADLINE_EXCEEDED


def test_a_reader_that_is_too_slow(sample_model: Path) -> None:
    flags = ("--threads=1", "--outbox_messages=8", "--stream_stall_seconds=1")
    with (
        Daemon(sample_model, *flags) as daemon,
        grpc.insecure_channel(daemon.grpc, PACED) as channel,
    ):
        call = hold(channel, "slow")
        slow = {"reason": "slow_reader"}
        eventually(
            lambda: scrape(daemon.metrics).total("epikv_requests_finished_total", **slow) == 1
        )
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
    told_ = told(caught.value)
    assert (told_.code, told_.info.reason) == (Code.RESOURCE_EXHAUSTED, "SLOW_READER")


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


def test_a_server_that_is_starting(sample_model: Path) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as client,
        socket.create_server(("127.0.0.1", 0)) as operator,
    ):
        listen, admin_listen = (f"127.0.0.1:{port.getsockname()[1]}" for port in (client, operator))
    refused: list[Told] = []

    def early() -> None:
        """As soon as the port is there; then the models are being loaded for seconds."""
        eager = [(f"grpc.{which}_reconnect_backoff_ms", 10) for which in ("initial", "min", "max")]
        for address, method, request in (
            (listen, f"{GENERATION}/Generate", generate()),
            (admin_listen, f"{ADMIN}/Drain", admin_pb2.DrainRequest()),
            (admin_listen, f"{ADMIN}/UnloadModel", admin_pb2.UnloadModelRequest(name="sample")),
        ):
            refused.append(refusal(address, method, request, options=eager, wait_for_ready=True))

    client = threading.Thread(target=early)
    client.start()
    more = [
        f"--models=path: '{sample_model}' name: '{i}' kv_pool_bytes: 33554432" for i in range(9)
    ]
    listens = (f"--listen={listen}", f"--admin_listen={admin_listen}")
    with Daemon(sample_model, *listens, "--threads=1", *more):
        client.join()
    assert [(told.code, told.info.reason) for told in refused] == [
        (Code.UNAVAILABLE, "STARTING"),
        (Code.FAILED_PRECONDITION, "STARTING"),
        (Code.FAILED_PRECONDITION, "STARTING"),
    ]
    assert refused[0].retry_seconds > 0


def test_a_server_that_drains_and_stops(sample_model: Path) -> None:
    flags = ("--threads=1", "--max_running_requests=1", "--drain_seconds=3")
    endless = generate(stop={"max_output_tokens": 900, "ignore_eos": True}).SerializeToString()
    with Daemon(sample_model, *flags) as daemon, grpc.insecure_channel(daemon.grpc) as channel:
        method = channel.unary_stream(f"/epikv.v1.{GENERATION}/Generate")
        calls = [method(endless) for _ in range(100)]  # more than the drain has time for
        for call in calls:
            next(call)
        ask(daemon.admin, f"{ADMIN}/Drain", admin_pb2.DrainRequest())
        drained = refusal(daemon.grpc, f"{GENERATION}/Generate", generate())
        daemon.terminate()
        eventually(lambda: "stopping" in daemon.log)
        stopping = []
        for method, request in (
            ("Resume", admin_pb2.ResumeRequest()),
            ("UnloadModel", admin_pb2.UnloadModelRequest(name="sample")),
        ):
            stopping.append(refusal(daemon.admin, f"{ADMIN}/{method}", request))
        with pytest.raises(grpc.RpcError) as caught:
            list(calls[-1])
        ended = told(caught.value)
        assert daemon.stop() == 0
    for unavailable in (drained, ended):
        assert unavailable.code is Code.UNAVAILABLE
        assert unavailable.info.reason == "DRAINING"
        assert unavailable.retry_seconds > 0
    for refused in stopping:
        assert (refused.code, refused.info.reason) == (Code.FAILED_PRECONDITION, "STOPPING")


def test_who_may_not(sample_model: Path, tmp_path: Path) -> None:
    made = CliRunner().invoke(main, ["token", "ann", "user"])
    token = made.stderr.split()[-1]
    (tmp_path / "tokens").write_text(made.stdout)
    ann = [("authorization", f"Bearer {token}")]
    flag = f"--auth_tokens_file={tmp_path / 'tokens'}"
    status = admin_pb2.GetServerStatusRequest()
    others = generate(scheduling={"tenant": "bob"})
    store = f"--experiment_store={tmp_path / 'store.db'}"
    with Daemon(sample_model, "--threads=1", flag, store, token=token) as daemon:
        nobody = refusal(daemon.grpc, f"{GENERATION}/Generate", generate())
        stranger = refusal(
            daemon.grpc,
            f"{GENERATION}/Generate",
            generate(),
            metadata=[("authorization", "Bearer 0000000000000000")],
        )
        user = refusal(daemon.admin, f"{ADMIN}/GetServerStatus", status, metadata=ann)
        tenant = refusal(daemon.grpc, f"{GENERATION}/Generate", others, metadata=ann)
        theirs = refusal(
            daemon.grpc, f"{EXPERIMENT}/RecordOutcome", outcome(tenant="bob"), metadata=ann
        )
        start = refusal(
            daemon.grpc,
            f"{EXPERIMENT}/StartExperiment",
            experiment_pb2.StartExperimentRequest(name="lean"),
            metadata=ann,
        )
        force = refusal(
            daemon.grpc,
            f"{GENERATION}/Generate",
            generate(experiment={"force_arm": "lean/full"}),
            metadata=ann,
        )
    for told in (nobody, stranger):
        assert (told.code, told.info.reason) == (Code.UNAUTHENTICATED, "UNAUTHENTICATED")
        assert "0000" not in told.message
    for told, role, says in (
        (user, "operator", "GetServerStatus"),
        (tenant, "operator", "'bob'"),
        (theirs, "operator", "'bob'"),
        (start, "experimenter", "StartExperiment"),
        (force, "experimenter", "force_arm"),
    ):
        assert (told.code, told.info.reason) == (Code.PERMISSION_DENIED, "PERMISSION_DENIED")
        assert told.metadata == {"role": role}
        assert says in told.message


class Odd(broken_models.Tiny):
    """Of token 8 come NaN, and of token 9, for which it has no row, nothing at all."""

    def __init__(self) -> None:
        super().__init__()
        self.embed.weight.data[8] = math.nan

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, last: torch.Tensor
    ) -> torch.Tensor:
        rows = torch.where(token_ids == 9, token_ids + 1000, token_ids)
        x = torch.ops.epikv.block(self.embed(rows), 0)
        x = self.first(x, 0)
        x = self.second(torch.ops.epikv.block(x, 1), 1)
        return self.finish(torch.ops.epikv.block(x, 2), last)


def save(path: Path, normalizer: dict[str, Any] | None = None) -> Path:
    """`Odd`, its tokenizer with that normalizer."""
    tokenizer = json.loads(word_tokenizer(broken_models.VOCAB).to_str())
    files = {
        "manifest.json": json.dumps(asdict(broken_models.manifest())),
        "tokenizer.json": json.dumps({**tokenizer, "normalizer": normalizer}),
    }
    broken_models.save(Odd(), path, files)
    return path


def unreadable(path: Path) -> Path:
    """A model whose tokenizer this build cannot read."""
    return save(path, {"type": "StripAccents"})


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    model = save(tmp_path_factory.mktemp("odd") / "odd.pt")
    flags = ("--threads=1", "--kv_pool_bytes=1000000", "--deterministic=true")
    with Daemon(model, *flags) as daemon:
        yield daemon


@pytest.mark.parametrize(("token", "says"), [(8, "NaN"), (9, "index out of range")])
def test_a_forward_that_fails(odd: Daemon, token: int, says: str) -> None:
    """It fails its own request; those in its batch notice nothing."""
    good = Generate(token_ids={"ids": [1, 2, 3]}, stop={"max_output_tokens": 40})
    bad = Generate(token_ids={"ids": [1, token, 3]}, stop={"max_output_tokens": 40})
    good.output.token_ids = good.output.logprobs = True
    good.sampling.logit_bias.update({8: -100, 9: -100})

    def tokens(answer: list[bytes]) -> list[int]:
        result = generation_pb2.GenerateResult.FromString(answer[0])
        return [*result.token_ids, *result.logprobs]

    alone = tokens(ask(odd.grpc, f"{GENERATION}/GenerateOnce", good))
    with grpc.insecure_channel(odd.grpc) as channel:
        method = channel.unary_unary(f"/epikv.v1.{GENERATION}/GenerateOnce")
        requests = [good, good, bad, good]
        trace = [("traceparent", f"00-{TRACE}-b7ad6b7169203331-01")]
        calls = [method.future(r.SerializeToString(), metadata=trace) for r in requests]
        with pytest.raises(grpc.RpcError) as caught:
            calls.pop(2).result()
        assert all(tokens([call.result()]) == alone for call in calls)
    failed = told(caught.value)
    assert failed.code is Code.INTERNAL and failed.info.reason == "INTERNAL"
    assert says in failed.message and "\n" not in failed.message
    assert failed.info.metadata["trace_id"] == TRACE


def load(path: Path, **more: Any) -> admin_pb2.LoadModelRequest:
    return admin_pb2.LoadModelRequest(source={"path": str(path), **more})


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("broken")
    broken_models.write(folder)
    flip(folder / "valid.pt", folder / "flipped.pt")
    return folder


def flip(whole: Path, flipped: Path) -> str:
    """Writes `whole` with one bit of its largest weight flipped; returns that record's name."""
    with zipfile.ZipFile(whole) as archive:
        weight = max(
            (record for record in archive.infolist() if "/data/" in record.filename),
            key=lambda record: record.file_size,
        )
        data = archive.read(weight)
    content = whole.read_bytes()
    place = content.index(data, weight.header_offset) + len(data) // 2
    flipped.write_bytes(content[:place] + bytes([content[place] ^ 0x10]) + content[place + 1 :])
    return weight.filename.split("/", 1)[1]


@pytest.mark.parametrize("name", ["truncated", "empty", "not_a_model", "flipped"])
def test_a_model_file_that_is_damaged(odd: Daemon, broken: Path, name: str) -> None:
    told = refusal(odd.admin, f"{ADMIN}/LoadModel", load(broken / f"{name}.pt", name="new"))
    assert (told.code, told.info.reason) == (Code.DATA_LOSS, "DATA_LOSS"), told.message
    assert name in told.message


def test_a_damaged_weight_is_named(odd: Daemon, broken: Path, tmp_path: Path) -> None:
    record = flip(broken / "valid.pt", tmp_path / "flipped.pt")
    told = refusal(odd.admin, f"{ADMIN}/LoadModel", load(tmp_path / "flipped.pt", name="new"))
    assert told.code is Code.DATA_LOSS
    assert f"its record '{record}' has a wrong checksum" in told.message


@pytest.mark.parametrize(
    ("name", "reason"),
    {
        "no_tokenizer": "the file has no tokenizer.json",
        "no_manifest": "the file has no manifest.json",
        "manifest_later": "made by a later version of epikv",
    }.items(),
)
def test_a_model_that_is_not_what_its_manifest_says(
    odd: Daemon, broken: Path, name: str, reason: str
) -> None:
    told = refusal(odd.admin, f"{ADMIN}/LoadModel", load(broken / f"{name}.pt", name="new"))
    assert told.code is Code.FAILED_PRECONDITION and reason in told.message


def test_other_models_that_are_not_loaded(odd: Daemon, broken: Path, tmp_path: Path) -> None:
    def refused(request: admin_pb2.LoadModelRequest) -> Told:
        return refusal(odd.admin, f"{ADMIN}/LoadModel", request)

    missing = refused(load(tmp_path / "none.pt", name="new"))
    assert missing.code is Code.NOT_FOUND and "none.pt" in missing.message

    contract = refused(load(broken / "missing_attention.pt", name="new"))
    assert contract.code is Code.FAILED_PRECONDITION and "contract" in contract.message

    taken = refused(load(broken / "valid.pt", name="tiny"))
    assert (taken.code, taken.info.reason) == (Code.ALREADY_EXISTS, "DUPLICATE_ID")
    assert taken.details["ResourceInfo"].resource_name == "tiny"

    nothing = refused(admin_pb2.LoadModelRequest())
    assert nothing.code is Code.INVALID_ARGUMENT and set(nothing.fields) == {"source.path"}

    unread = unreadable(tmp_path / "unreadable.pt")
    not_built = refused(load(unread, name="new", kv_pool_bytes=1000000))
    assert (not_built.code, not_built.info.reason) == (Code.UNIMPLEMENTED, "UNIMPLEMENTED")
    assert "StripAccents" in not_built.message


def test_settings_that_are_wrong(odd: Daemon) -> None:
    request = admin_pb2.UpdateConfigRequest(
        config={"drain_seconds": -1, "log_level": "loud"},
        update_mask={"paths": ["drain_seconds", "log_level", "threads"]},
    )
    told = refusal(odd.admin, f"{ADMIN}/UpdateConfig", request)
    assert (told.code, told.info.reason) == (Code.INVALID_ARGUMENT, "INVALID_REQUEST")
    assert set(told.fields) == {"update_mask", "config.drain_seconds", "config.log_level"}
    grace = admin_pb2.UnloadModelRequest(name="tiny", grace={"seconds": -1})
    told = refusal(odd.admin, f"{ADMIN}/UnloadModel", grace)
    assert set(told.fields) == {"grace"}


def test_several_models_and_none_named(odd: Daemon, broken: Path) -> None:
    second = load(broken / "valid.pt", name="second", kv_pool_bytes=1000000)
    ask(odd.admin, f"{ADMIN}/LoadModel", second)
    told = refusal(odd.grpc, f"{GENERATION}/Generate", Generate(token_ids={"ids": [1]}))
    assert told.code is Code.INVALID_ARGUMENT and set(told.fields) == {"model"}
    assert "'second'" in told.message and "'tiny'" in told.message
    ask(odd.admin, f"{ADMIN}/UnloadModel", admin_pb2.UnloadModelRequest(name="second"))

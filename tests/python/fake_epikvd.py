"""A stand-in for the daemon that speaks epikv.v1, for tests of the client alone.

In a test: `serve()`. As a program it takes the daemon's flags, prints its line and ends on SIGTERM;
--fail makes it end at once, --exit_status=N with N at the end.
"""

import json
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import fake_experiments
import grpc
from epikv.v1 import (
    errors_pb2,
    experiment_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
    kv_pb2,
    model_pb2,
    model_pb2_grpc,
    policy_pb2,
    policy_pb2_grpc,
    tokenization_pb2,
    tokenization_pb2_grpc,
)
from fake_experiments import reason, refuse
from google.protobuf import any_pb2
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

MODEL = model_pb2.Model(
    name="fake", vocab_size=50, layers=2, kv_heads=1, eos_token_ids=[7], threads=1
)
# Word-level: w0, w1, ...
TOKENIZER = json.dumps(
    {
        "model": {"type": "WordLevel", "vocab": {f"w{i}": i for i in range(50)}, "unk_token": "w0"},
        "pre_tokenizer": {"type": "WhitespaceSplit"},
    }
).encode()
FLAT = policy_pb2.Policy(
    name="epikv_flat",
    summary="keeps what changed the residual",
    granularity="token",
    prompt_eviction="refuses",
    default_protection=policy_pb2.DefaultProtection(sink_tokens=4, recent_share=0.5),
    incompatible_options=[
        policy_pb2.IncompatibleOption(field="kv.budget", value="absent", reason="it evicts")
    ],
    columns=["age"],
    state_bytes_per_token=12,
    cost=policy_pb2.PolicyCost(
        level="cheap", share_of_step=0.004, cpu_us_per_token=9, cached_tokens=4096, made_with="x86"
    ),
    params=[
        policy_pb2.PolicyParam(name="layer_a", type="int", min=0, max=1),
        policy_pb2.PolicyParam(name="window", type="int", min=2),
    ],
)
FLAT.params_schema.update({"properties": {"window": {"minimum": 2}}})
FLAT.params[1].default_value.number_value = 64
ORACLE = policy_pb2.Policy(name="oracle", granularity="token", evaluation_only=True)


@dataclass
class Fake:
    """The running server: where it listens, and what it was asked."""

    address: str = ""
    requests: list[Message] = field(default_factory=list)
    tokens: list[str | None] = field(default_factory=list)  # of the calls, as shown
    ended: threading.Event = field(default_factory=threading.Event)  # of an endless request
    status: health.HealthServicer = field(default_factory=health.HealthServicer)
    experiments: fake_experiments.Experiments = field(default_factory=fake_experiments.Experiments)


def accepted(request: generation_pb2.GenerateRequest) -> generation_pb2.Accepted:
    result = generation_pb2.Accepted(
        request_id=request.request_id or "r1",
        model="fake",
        kv=kv_pb2.ResolvedKv(
            policy=request.kv.policy or "full", positions=kv_pb2.POSITION_MODE_ABSOLUTE
        ),
        sampling=generation_pb2.SamplingParams(seed=5, logit_bias={3: 0.5}),
        arm="none",
    )
    if request.sampling.HasField("n"):
        result.sampling.n = request.sampling.n
    result.kv.policy_params.update({"layer_a": 1, "ratio": 0.5})
    return result


def summary() -> generation_pb2.Summary:
    return generation_pb2.Summary(
        finish_reason=generation_pb2.FINISH_REASON_STOP_STRING,
        stop_string="end",
        usage=generation_pb2.Usage(prompt_tokens=3, output_tokens=2),
        kv=kv_pb2.KvUsage(policy="full", budget_tokens=5, peak_tokens=5),
        timings=generation_pb2.Timings(
            time_to_first_token=Duration(nanos=250_000_000), decode=Duration(seconds=2)
        ),
    )


def abort(context: grpc.ServicerContext) -> None:
    """A refusal with all its details."""
    details = [
        errors_pb2.ErrorInfo(reason="KV_BUDGET", domain="epikv", metadata={"smallest": "24"}),
        errors_pb2.BadRequest(
            field_violations=[
                errors_pb2.BadRequest.FieldViolation(
                    field="kv.max_tokens", description="too small"
                ),
                errors_pb2.BadRequest.FieldViolation(field="kv.policy", description="unknown"),
            ]
        ),
        errors_pb2.RetryInfo(retry_delay=Duration(seconds=1, nanos=500_000_000)),
    ]
    unknown = any_pb2.Any(type_url="type.googleapis.com/google.rpc.Help", value=b"\xff")
    refuse(context, grpc.StatusCode.INVALID_ARGUMENT, "2 fields are invalid", *details, unknown)


class _Generation(generation_pb2_grpc.GenerationServiceServicer):
    def __init__(self, fake: Fake) -> None:
        self._fake = fake

    def Generate(self, request, context):
        self._fake.requests.append(request)
        if request.kv.policy == "nope":
            abort(context)
        endless = request.text == "endless"
        if endless:
            self._note_end(context)
        yield generation_pb2.GenerateResponse(accepted=accepted(request))
        if endless:
            self._fake.ended.wait(10)
            return
        if request.output.progress:
            progress = generation_pb2.Progress(prompt_tokens_done=256, prompt_tokens=300)
            yield generation_pb2.GenerateResponse(progress=progress)
        top = [generation_pb2.TopLogprobs(token_ids=[7], logprobs=[-0.25])]
        if request.output.prompt_logprobs:
            prompt = generation_pb2.PromptLogprobs(
                first=1, token_ids=[4], logprobs=[-1.5], top_logprobs=top
            )
            yield generation_pb2.GenerateResponse(prompt_logprobs=prompt)
        said = request.chat.messages[-1].content if request.chat.messages else request.text
        for token, word in enumerate(said.split()):
            delta = generation_pb2.Delta(text=f"{word} ", token_ids=[token], logprobs=[-0.5])
            if request.output.top_logprobs:
                delta.top_logprobs.extend(top)
            yield generation_pb2.GenerateResponse(delta=delta)
        if request.output.kv_trace:
            victims = [kv_pb2.EvictionEvent.Victims(layer=0, index=[4, 9])]
            event = kv_pb2.EvictionEvent(at_token=12, victims=victims)
            yield generation_pb2.GenerateResponse(eviction=event)
        yield generation_pb2.GenerateResponse(summary=summary())

    def GenerateOnce(self, request, context):
        self._fake.requests.append(request)
        if request.kv.policy == "crowded":
            refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, "it is full", reason("QUEUE_FULL"))
        if request.text == "endless":
            self._note_end(context)
            self._fake.ended.wait(10)
        return generation_pb2.GenerateResult(
            accepted=accepted(request), text=request.text.upper(), summary=summary()
        )

    def Score(self, request, context):
        self._fake.requests.append(request)
        if request.kv.policy == "nope":
            abort(context)
        return generation_pb2.ScoreResponse(
            token_ids=[3, 4], logprobs=[-1.0, -2.0], greedy=[True, False], summary=summary()
        )

    def CancelRequest(self, request, context):
        self._fake.requests.append(request)
        return generation_pb2.CancelRequestResponse()

    def _note_end(self, context):
        if not context.add_callback(self._fake.ended.set):
            self._fake.ended.set()  # it ended before it began


class _Tokenization(tokenization_pb2_grpc.TokenizationServiceServicer):
    def Tokenize(self, request, context):
        ids = [len(word) for word in request.text.split()]
        tokens = generation_pb2.TokenIds(ids=[1, *ids] if request.add_special_tokens else ids)
        return tokenization_pb2.TokenizeResponse(tokens=tokens)

    def ApplyChatTemplate(self, request, context):
        text = "".join(f"[{message.content}]" for message in request.chat.messages)
        tokens = generation_pb2.TokenIds(ids=[len(text)])
        return tokenization_pb2.ApplyChatTemplateResponse(text=text, tokens=tokens)

    def Detokenize(self, request, context):
        text = " ".join(f"t{token}" for token in request.tokens.ids)
        return tokenization_pb2.DetokenizeResponse(text=text)


class _Models(model_pb2_grpc.ModelServiceServicer):
    def ListModels(self, request, context):
        return model_pb2.ListModelsResponse(models=[MODEL])

    def GetModel(self, request, context):
        if request.name != MODEL.name:
            context.abort(grpc.StatusCode.NOT_FOUND, f"no model '{request.name}'")
        return MODEL

    def GetTokenizer(self, request, context):
        if request.model not in ("", MODEL.name):
            context.abort(grpc.StatusCode.NOT_FOUND, f"no model '{request.model}'")
        for begin in range(0, len(TOKENIZER), 100):
            yield model_pb2.TokenizerPart(json=TOKENIZER[begin : begin + 100])


class _Policies(policy_pb2_grpc.PolicyServiceServicer):
    def __init__(self, policies: Sequence[policy_pb2.Policy]) -> None:
        self._policies = policies

    def ListPolicies(self, request, context):
        return policy_pb2.ListPoliciesResponse(policies=self._policies)

    def GetPolicy(self, request, context):
        return ORACLE if request.name == ORACLE.name else FLAT


class _Tokens(grpc.ServerInterceptor):
    """Notes the header `authorization` of every call."""

    def __init__(self, fake: Fake) -> None:
        self._fake = fake

    def intercept_service(self, continuation, details):
        headers = dict(details.invocation_metadata)
        self._fake.tokens.append(headers.get("authorization"))
        return continuation(details)


@contextmanager
def serve(
    listen: str = "127.0.0.1:0",
    generation: generation_pb2_grpc.GenerationServiceServicer | None = None,
    threads: int = 4,
    policies: Sequence[policy_pb2.Policy] = (FLAT, ORACLE),
    experiments: experiment_pb2_grpc.ExperimentServiceServicer | None = None,
) -> Iterator[Fake]:
    """Serves until the block ends. generation and experiments: instead of those here."""
    fake = Fake()
    server = grpc.server(ThreadPoolExecutor(threads), interceptors=[_Tokens(fake)])
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(
        generation or _Generation(fake), server
    )
    tokenization_pb2_grpc.add_TokenizationServiceServicer_to_server(_Tokenization(), server)
    model_pb2_grpc.add_ModelServiceServicer_to_server(_Models(), server)
    policy_pb2_grpc.add_PolicyServiceServicer_to_server(_Policies(policies), server)
    experiment_pb2_grpc.add_ExperimentServiceServicer_to_server(
        experiments or fake_experiments.Service(fake.experiments, fake.requests.append), server
    )
    fake.status.set("", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(fake.status, server)
    fake.address = f"127.0.0.1:{server.add_insecure_port(listen)}"
    server.start()
    try:
        yield fake
    finally:
        server.stop(None).wait()


def main() -> None:
    flags = dict(flag.removeprefix("--").partition("=")[::2] for flag in sys.argv[1:])
    print("loading", flags["model"], file=sys.stderr)
    if "fail" in flags:
        sys.exit("cannot load the model: it is made up")
    terminated = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: terminated.set())
    with serve(flags["listen"]) as fake:
        print(json.dumps({"grpc": fake.address, "metrics": "127.0.0.1:1"}), flush=True)
        while not terminated.wait(0.05):
            pass
    sys.exit(int(flags.get("exit_status", 0)))


if __name__ == "__main__":
    main()

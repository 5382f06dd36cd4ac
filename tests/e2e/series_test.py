"""Every series that the daemon exports, what moves it, and that nothing else does.

`FAMILIES` is the whole page: each family with its type, the closed set of each label, and the
scenario, a group of RPCs to a running daemon, that must move it. A family or label value that is
not there fails, and so does one that no scenario moves. `QUIET` are scenarios without an engine's
part, with all that each may move.
"""

import contextlib
import re
import sqlite3
import threading
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from io import SEEK_END
from itertools import count, zip_longest
from pathlib import Path
from socket import create_server

import grpc
import pytest
from daemon_test import start
from epikv import (
    Accepted,
    Chat,
    Client,
    Delta,
    Experiment,
    Kv,
    Output,
    Patience,
    RpcError,
    Scheduling,
    Stop,
    Stream,
)
from epikv.connection import connect
from epikv.sample import problem
from epikv.scrape import scrape
from epikv.testing import PACED, Daemon
from epikv.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    config_pb2,
    experiment_pb2,
    experiment_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
)
from error_table_test import save, unreadable
from google.protobuf import text_format
from google.protobuf.duration_pb2 import Duration
from google.protobuf.field_mask_pb2 import FieldMask
from grpc_health.v1 import health_pb2, health_pb2_grpc
from metrics_page import Family, Series, moved, parse
from security_test import new_token, replace

ROOT = Path(__file__).parents[2]
GENEROUS_SECONDS = 30
TASK = problem(9)
PROMPT = [5] * 40
HELLO = Chat([{"role": "user", "content": "hello"}])
CONTEXT, TASK_TOKENS = 1280, 114
PRIORITIES = ("low", "normal", "high")
TOKEN_BYTES = 3080  # of the sample model
POOL_BYTES, SMALL_POOL = 2900 * TOKEN_BYTES, 1000 * TOKEN_BYTES

# More than what lies in the buffers between the daemon and a client that does not read.
MUCH = Output(top_logprobs=20, residual_steps=True)

# ---------------------------------------------------------------------------------------------
# The page.

PHASES = ("prefill", "decode")
POLICIES, EVICTING = ("all policies",), ("all policies that evict",)
FAILURES = ("deadline", "deadline_infeasible", "error", "slow_reader", "drained", "cancelled")
STAGES = ("schedule", "forward", "attention", "taps", "sample", "deliver", "observe", "evict")
OF_CPU = tuple(stage for stage in STAGES if stage != "attention")
REFUSALS = (
    "invalid_request token_range span_range context_length kv_budget kv_pool_too_small "
    "artefact_missing prompt_evicted chat_format queue_full starting loading draining duplicate_id "
    "not_found not_utf8 malformed unauthenticated permission_denied deadline_infeasible other"
)
METHODS = """
    GenerationService/Generate GenerationService/GenerateOnce GenerationService/Score
    GenerationService/CancelRequest TokenizationService/Tokenize TokenizationService/Detokenize
    TokenizationService/ApplyChatTemplate
    ModelService/ListModels ModelService/GetModel ModelService/GetTokenizer
    PolicyService/ListPolicies PolicyService/GetPolicy
    ExperimentService/ListExperiments ExperimentService/GetExperiment
    ExperimentService/CreateExperiment ExperimentService/UpdateExperiment
    ExperimentService/StartExperiment ExperimentService/StopExperiment
    ExperimentService/GetExperimentReport ExperimentService/PlanExperiment
    ExperimentService/RecordOutcome ExperimentService/BatchRecordOutcomes
    AdminService/GetServerStatus AdminService/GetLoad AdminService/ListActiveRequests
    AdminService/Drain AdminService/Resume AdminService/GetConfig AdminService/UpdateConfig
    AdminService/LoadModel AdminService/UnloadModel AdminService/FlushPrefixCache
    AdminService/DumpState other
"""
MODEL = {"model": ("sample",)}
ARMS = {"arm": ("none", "lean/wide", "lean/narrow", "other")}
A = MODEL | {"policy": POLICIES} | ARMS
OF_EVICTIONS = MODEL | {"policy": EVICTING} | ARMS
LEAN = {"experiment": ("lean",)}
OUTCOMES = {"arm": ("wide", "narrow"), "metric": ("right", "score")}
SHADOW = LEAN | {"arm": ("wide", "narrow")}
ANY: tuple[str, ...] = ()  # of one sample, whose labels say something
# Their values are names that somebody chose.
NAMING = {"model", "arm", "experiment", "guardrail", "metric"}

# Both arms evict; of 120 tokens each keeps less. Their outcomes stop it.
DEFINITION = """
    name: "lean" traffic_permille: 1000
    arms { name: "wide" weight_permille: 500 control: true kv { policy: "sliding" max_tokens: 100 } }
    arms { name: "narrow" weight_permille: 500 kv { policy: "sliding" max_tokens: 80 } }
    metrics { name: "right" kind: KIND_PROPORTION }
    metrics { name: "score" }
    primary_metric: "right"
    guardrails { metric: "right" margin: 0.1 }
"""
AT_ONCE = Patience(busy=0, unknown=0)


@dataclass(frozen=True)
class Expected:
    type: str
    moved_by: str
    labels: dict[str, tuple[str, ...]] = field(default_factory=dict)


def of(kind: str, moved_by: str, **families: dict[str, tuple[str, ...]]) -> dict[str, Expected]:
    return {name: Expected(kind, moved_by, labels) for name, labels in families.items()}


FAMILIES: dict[str, Expected] = {
    **of(
        "histogram",
        "policies",
        gen_ai_server_request_duration_seconds=A
        | {
            "gen_ai_operation_name": ("text_completion", "score"),
            "error_type": ("", *FAILURES),
        },
        gen_ai_server_time_to_first_token_seconds=A,
        gen_ai_server_time_per_output_token_seconds=A,
        epikv_inter_token_latency_seconds=MODEL,
        epikv_request_queue_seconds=MODEL,
        epikv_request_prefill_seconds=MODEL,
        epikv_request_decode_seconds=MODEL,
        epikv_step_seconds=MODEL | {"phase": (*PHASES, "mixed")},
        epikv_step_stage_seconds=MODEL | {"stage": STAGES},
        epikv_step_batch_tokens=MODEL,
        epikv_step_batch_sequences=MODEL,
        epikv_kv_eviction_seconds=MODEL | {"policy": EVICTING},
        epikv_request_kv_budget_tokens=A,
        epikv_request_kv_peak_tokens=A,
        epikv_request_kv_final_tokens=A,
        epikv_request_kv_kept_ratio=A,
        epikv_evicted_attention_mass_ratio=OF_EVICTIONS,
    ),
    **of("histogram", "crowd", epikv_stream_write_stall_seconds={}),
    **of(
        "counter",
        "policies",
        epikv_requests_finished_total=A
        | {"reason": ("length", "end", "stop_token", "stop_string", *FAILURES)},
        epikv_tokens_total=A | {"kind": ("prompt", "prompt_cached", "output")},
        epikv_prefix_cache_queried_tokens_total=MODEL,
        epikv_prefix_cache_hit_tokens_total=MODEL,
        epikv_step_tokens_total=MODEL | {"phase": PHASES},
        epikv_step_seconds_total=MODEL | {"stage": STAGES},
        epikv_step_cpu_seconds_total=MODEL | {"stage": OF_CPU},
        epikv_engine_cpu_seconds_total=MODEL,
        epikv_kv_tokens_evicted_total=OF_EVICTIONS | {"phase": PHASES},
        epikv_kv_entries_evicted_total=OF_EVICTIONS | {"phase": PHASES},
        epikv_kv_eviction_rounds_total=OF_EVICTIONS | {"phase": PHASES},
    ),
    **of("counter", "small", epikv_metrics_label_overflow_total=MODEL),
    **of("counter", "crowd", epikv_kv_rows_moved_total=MODEL),
    **of("counter", "reload", epikv_auth_reload_failures_total={}),
    **of("counter", "introspect", epikv_access_log_dropped_total={}),
    **of(
        "counter",
        "refusals",
        epikv_requests_rejected_total=MODEL | {"reason": tuple(REFUSALS.split())},
        epikv_grpc_requests_total={
            "method": tuple(METHODS.split()),
            "code": tuple(code.name for code in grpc.StatusCode),
        },
    ),
    **of(
        "counter",
        "nothing",
        epikv_policy_errors_total=A | {"kind": ("threw", "status", "invalid_set")},
        epikv_kv_budget_overrun_tokens_total=A,
    ),
    **of(
        "gauge",
        "crowd",
        epikv_requests_running=MODEL | {"priority": PRIORITIES},
        epikv_requests_waiting=MODEL | {"priority": PRIORITIES, "reason": ("kv", "running")},
        epikv_predicted_wait_seconds=MODEL,
        epikv_kv_bytes=MODEL | {"state": ("used", "reserved", "cached_prefix", "free")},
        epikv_kv_usage_ratio=MODEL,
        epikv_kv_reserved_ratio=MODEL,
        epikv_kv_longest_move_seconds=MODEL,
    ),
    **of(
        "gauge",
        "load",
        epikv_kv_capacity_bytes=MODEL,
        epikv_torch_memory_bytes=MODEL | {"kind": ("weights", "kv_pool", "scratch")},
        epikv_threads=MODEL | {"pool": ("engine",)},
        epikv_model_load_seconds=MODEL,
        epikv_model_info=MODEL
        | {"architecture": ANY, "dtype": ANY, "decode_kernel": ANY, "weights": ANY},
        epikv_metrics_series={},
    ),
    **of(
        "counter",
        "experiment",
        epikv_experiment_assignments_total=LEAN
        | {
            "arm": ("wide", "narrow", "none"),
            "source": ("hash", "wash_out", "forced", "excluded"),
        },
        epikv_experiment_exposures_total=LEAN | {"arm": ("wide", "narrow")},
        epikv_experiment_outcomes_total=LEAN | OUTCOMES,
    ),
    **of("histogram", "experiment", epikv_experiment_outcome_value=LEAN | OUTCOMES),
    **of(
        "counter",
        "shadow",
        epikv_experiment_shadow_requests_total=SHADOW
        | {"outcome": ("compared", "displaced", "interrupted", "failed")},
        epikv_experiment_shadow_tokens_total=SHADOW,
        epikv_experiment_shadow_agreed_tokens_total=SHADOW,
        epikv_experiment_shadow_kl_nats_total=SHADOW,
        epikv_experiment_shadow_seconds_total={},
        epikv_experiment_shadow_interruptions_total={},
    ),
    **of("gauge", "shadow", epikv_experiment_shadow_waiting_requests={}),
    **of(
        "gauge",
        "experiment",
        epikv_experiments_running={},
        epikv_experiment_srm_p_value=LEAN,
    ),
    **of(
        "counter",
        "outage",
        epikv_experiment_records_total={
            "fate": ("written", "spooled", "replayed", "dropped", "refused")
        },
        epikv_outcomes_orphaned_total={
            "reason": (
                "conflict",
                "unknown_request",
                "waiting",
                "late",
                "undeclared_metric",
                "invalid",
            )
        },
        epikv_experiment_store_outage_seconds_total={},
        epikv_experiment_spool_damaged_bytes_total={},
    ),
    **of("gauge", "outage", epikv_experiment_spool_bytes={}),
    **of(
        "counter",
        "breach",
        epikv_experiment_guardrail_breaches_total=LEAN
        | {"arm": ("narrow",), "guardrail": ("right",)},
    ),
    **of("gauge", "operate", epikv_drain_state={}),
    **of(
        "gauge",
        "operate",
        epikv_config_info=dict.fromkeys(
            "max_step_tokens prefill_chunk_tokens max_running_requests max_queued_requests "
            "max_queued_tokens default_max_output_tokens default_policy default_equal_protection "
            "deterministic".split(),
            ANY,
        ),
    ),
    **of(
        "gauge",
        "nothing",
        epikv_build_info={"version": ANY, "commit": ANY, "torch": ANY, "grpc": ANY},
        epikv_policy_info={
            "policy": ANY,
            "version": ANY,
            "config_hash": ANY,
            "evaluation_only": ("true", "false"),
        },
        process_start_time_seconds={},
        process_max_fds={},
    ),
    # As time goes by, and by being looked at.
    **of("counter", "idle", process_cpu_seconds_total={}),
    **of(
        "gauge",
        "policies",
        epikv_kv_peak_used_bytes=MODEL,
        process_resident_memory_bytes={},
    ),
    **of("gauge", "load", process_virtual_memory_bytes={}, process_threads={}),
    **of("gauge", "crowd", process_open_fds={}),
    **of("counter", "idle", exposer_transferred_bytes_total={}, exposer_scrapes_total={}),
    **of("summary", "idle", exposer_request_latencies={}),
}

# Moved while nobody asks for anything.
BY_THEMSELVES = re.compile("process_|exposer_")

BY_A_BROKEN_POLICY = "no policy of the build fails: tests/server/broken_policy_test.cc"
# (family, label, value) that no scenario moves, and why. "": all of it.
UNMOVED = {
    ("epikv_policy_errors_total", "", ""): BY_A_BROKEN_POLICY,
    ("epikv_grpc_requests_total", "code", "UNKNOWN"): "nothing answers so",
    ("epikv_grpc_requests_total", "method", "other"): "a method that the metrics do not know",
    ("epikv_requests_rejected_total", "reason", "other"): "a reason that they do not know",
    (
        "epikv_experiment_shadow_requests_total",
        "outcome",
        "failed",
    ): "tests/experiments/shadow_test.cc",
    ("epikv_kv_budget_overrun_tokens_total", "", ""): "must stay 0",
    ("epikv_build_info", "", ""): "constant",
    ("epikv_policy_info", "", ""): "constant",
    ("process_start_time_seconds", "", ""): "constant",
    ("process_max_fds", "", ""): "constant",
}


# Of every call that ends: its line of the access log has no room on /dev/full.
CALLS = {"epikv_grpc_requests_total", "epikv_access_log_dropped_total"}
OF_A_NEW_MODEL = {
    "epikv_kv_bytes",
    "epikv_kv_capacity_bytes",
    "epikv_metrics_series",
    "epikv_model_info",
    "epikv_model_load_seconds",
    "epikv_threads",
    "epikv_torch_memory_bytes",
}
# What moves in scenarios that no engine has a part in, beside what moves by itself.
QUIET: dict[str, set[str]] = {
    "idle": set(),
    "probed": set(),
    "load": CALLS | OF_A_NEW_MODEL | {"epikv_requests_rejected_total"},
    "refusals": CALLS | {"epikv_requests_rejected_total"},
    "introspect": CALLS,
    "reload": {"epikv_auth_reload_failures_total"},
}

# What these move, nothing else does.
SOLE_MOVERS = {"operate", "reload", "breach", "small"}

TABLE_BEGIN, TABLE_END = "<!-- series: begin -->", "<!-- series: end -->"

# ---------------------------------------------------------------------------------------------
# Daemons, and what their pages do.


def text(daemon: Daemon) -> str:
    with urllib.request.urlopen(f"http://{daemon.metrics}/metrics", timeout=30) as reply:
        return reply.read().decode()


def page(daemon: Daemon) -> dict[str, Family]:
    return parse(text(daemon))


@dataclass
class Files:
    """What daemons are started with."""

    model: Path
    artefacts: Path
    tokens: Path
    # Models: damaged, odd in what it makes of some tokens, and of a kind that is not built.
    damaged: Path
    odd: Path
    unreadable: Path
    store: Path  # of experiments

    @property
    def spool(self) -> Path:
        return self.store.with_name(self.store.name + ".spool")


class World:
    """A daemon, the calls that it gets, and which series move meanwhile."""

    def __init__(
        self,
        daemon: Daemon,
        files: Files,
        token: str = "",
        user: str = "",
        experimenter: str = "",
    ) -> None:
        """`token`, of an operator, and those of others: empty where the daemon asks for none."""
        self.daemon, self.files, self.token, self.user = daemon, files, token, user
        self.client = Client(daemon.grpc, token=token)
        self.paced = Client(daemon.grpc, PACED, token=token)
        self.experimenter = Client(daemon.grpc, token=experimenter)
        self.experiments = experiment_pb2_grpc.ExperimentServiceStub(
            connect(daemon.grpc, token=experimenter)
        )
        self.admin = admin_pb2_grpc.AdminServiceStub(connect(daemon.admin, token=token))
        self.page = page(daemon)
        self.bound = int(self.page["epikv_metrics_series"].values[frozenset()])
        self.moved: dict[str, set[Series]] = defaultdict(set)
        self._scenario = ""

    def run(self, scenario: Callable[["World"], None]) -> None:
        self._scenario = scenario.__name__
        self._settle()
        self.moved[self._scenario].clear()
        scenario(self)
        self.until("epikv_requests_running", 0)
        self._settle()

    def _settle(self) -> None:
        """Looks until the access log has given up the line of every call."""
        deadline = time.monotonic() + GENEROUS_SECONDS
        self.look()
        while len({self.value(family) for family in CALLS}) > 1:
            assert time.monotonic() < deadline, {f: self.value(f) for f in CALLS}
            self.look()

    def look(self) -> None:
        self._take(text(self.daemon))

    def _take(self, answer: str) -> None:
        before, self.page = self.page, parse(answer)
        self.moved[self._scenario] |= moved(before, self.page)

    def value(self, family: str, **labels: str) -> float:
        """The sum of the series that have these labels."""
        if family not in self.page:
            return 0
        values = self.page[family].values.items()
        return sum(v for has, v in values if labels.items() <= dict(has).items())

    def until(self, family: str, value: float, **labels: str) -> None:
        """Of a counter or gauge. Looks at the page that shows it."""
        deadline = time.monotonic() + GENEROUS_SECONDS
        pairs = [f'{label}="{wanted}"' for label, wanted in labels.items()]
        while True:
            answer = text(self.daemon)  # which takes long to parse
            lines = [line for line in answer.splitlines() if re.match(rf"{family}\b", line)]
            found = [line for line in lines if all(pair in line for pair in pairs)]
            if sum(float(line.rpartition(" ")[2]) for line in found) == value:
                return self._take(answer)
            assert time.monotonic() < deadline, f"{family} {labels}: not {value} but {found}"

    def until_more(self, family: str, **labels: str) -> None:
        """Looks until it is more than at the last look."""
        before = self.value(family, **labels)
        deadline = time.monotonic() + GENEROUS_SECONDS
        while self.value(family, **labels) <= before:
            assert time.monotonic() < deadline, f"{family} {labels} stays {before}"
            self.look()

    def take_part(self, request_id: str, tokens: int = 80, **context: bool | str) -> str:
        """The arm of a request, which is its own unit."""
        result = self.experimenter.generate_once(
            PROMPT,
            stop=Stop(tokens, min_output_tokens=tokens, ignore_eos=True),
            experiment=Experiment(**context),
            model="sample",
            request_id=request_id,
        )
        assert result.accepted is not None
        return result.accepted.arm

    def record(self, request_id: str, metric: str, value: float, key: str = "") -> bool:
        """Whether the outcome is in the spool."""
        client = self.experimenter
        return client.record_outcome(request_id, metric, value, key=key, patience=AT_ONCE).spooled

    @contextlib.contextmanager
    def store_away(self) -> Iterator[None]:
        """Nobody can write to it."""
        with contextlib.closing(sqlite3.connect(self.files.store, isolation_level=None)) as other:
            other.execute("BEGIN EXCLUSIVE")
            yield

    def hold(
        self, tokens: int, priority: str = "normal", request_id: str = "", model: str = "sample"
    ) -> Stream:
        """A request of so many tokens of KV, whose client does not read."""
        stop = Stop(tokens - len(PROMPT), min_output_tokens=tokens - len(PROMPT), ignore_eos=True)
        return self.paced.generate(
            PROMPT,
            stop=stop,
            output=MUCH,
            scheduling=Scheduling(priority),
            request_id=request_id,
            model=model,
        )

    def running(self, *tokens: int, priorities: Sequence[str] = ()) -> list[Stream]:
        """Held, and admitted in this order."""
        streams = []
        for number, priority in zip_longest(tokens, priorities, fillvalue="normal"):
            streams.append(self.hold(number, priority))
            self.until("epikv_requests_running", self.value("epikv_requests_running") + 1)
        return streams

    def leave(self, *streams: Stream) -> None:
        for stream in streams:
            stream.cancel()
        self.until("epikv_requests_running", 0)


def refused(reason: str, call: Callable[[], object]) -> None:
    with pytest.raises(RpcError) as caught:
        call()
    assert caught.value.reason.lower() == reason, caught.value


# ---------------------------------------------------------------------------------------------
# Scenarios.


def load(world: World) -> None:
    """A model beside the first, which is asked for too early, and one that is damaged."""
    path, damaged = world.files.model, world.files.damaged
    source = config_pb2.ModelSource(path=str(path), name="b", kv_pool_bytes=SMALL_POOL)
    loading = world.admin.LoadModel.future(admin_pb2.LoadModelRequest(source=source))
    reason = ""
    while reason != "LOADING":  # NOT_FOUND, as long as the load has not begun
        with pytest.raises(RpcError) as early:
            world.client.generate_once([1], model="b")
        reason = early.value.reason
    loading.result()
    weights = bytearray(path.read_bytes())
    weights[len(weights) // 2] ^= 0x10
    damaged.write_bytes(weights)
    source = config_pb2.ModelSource(path=str(damaged), name="c", kv_pool_bytes=SMALL_POOL)
    with pytest.raises(grpc.RpcError) as caught:
        world.admin.LoadModel(admin_pb2.LoadModelRequest(source=source))
    assert caught.value.code() is grpc.StatusCode.DATA_LOSS


def probed(world: World) -> None:
    """What probes and grpcurl ask gRPC's own services on both ports."""
    for address in (world.daemon.grpc, world.daemon.admin):
        with grpc.insecure_channel(address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            for name in ("", "liveness", "models/sample"):
                health.Check(health_pb2.HealthCheckRequest(service=name))
            watch = health.Watch(health_pb2.HealthCheckRequest())
            next(watch)
            watch.cancel()
            reflection = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
            next(channel.stream_stream(reflection)(iter([b"\x3a\x00"]), timeout=10))
    world.look()


def policies(world: World) -> None:
    """Each policy once over its budget, every way to end well, and scoring."""
    client = world.client
    ask = partial(client.generate_once, PROMPT, model="sample")
    long = Stop(120, min_output_tokens=120, ignore_eos=True)
    for policy in client.policies(model="sample"):
        small = {"slack": 4, "window": 16, "prefer": [1]}
        params = {p.name: small[p.name] for p in policy.params if p.name in small}
        ask(kv=Kv("full") if policy.name == "full" else Kv(policy.name, 100, params), stop=long)
    client.generate_once(
        TASK.prompt, model="sample", kv=Kv("sliding", 64, protect_prompt=False), stop=Stop(2)
    )
    text = client.generate_once(TASK.prompt, model="sample", output=Output(token_ids=True))
    assert text.summary is not None
    ends = [("end", Stop())]
    ends += [("stop_string", Stop(stop_strings=[text.text[:3]]))]
    ends += [("stop_token", Stop(stop_token_ids=[text.token_ids[0]]))]
    for reason, stop in ends:
        client.generate_once(TASK.prompt, model="sample", stop=stop)
        world.look()
        assert world.value("epikv_requests_finished_total", reason=reason) > 0, reason
    client.score(TASK.prompt, TASK.trace, model="sample")
    for _ in range(2):  # a prompt that is known when it comes again
        client.generate_once([5] * 300, model="sample", stop=Stop(1))
    # A prompt beside a stream that decodes.
    with client.generate(PROMPT, model="sample", stop=Stop(900, min_output_tokens=900)) as stream:
        while not isinstance(next(stream), Delta):
            pass
        ask(stop=Stop(1))
        stream.cancel()


def refusals(world: World) -> None:
    ask = partial(world.client.generate_once, TASK.prompt, model="sample")
    refused("invalid_request", lambda: world.client.generate_once("", model="sample"))
    refused("token_range", lambda: world.client.generate_once([10**6], model="sample"))
    refused("span_range", lambda: ask(kv=Kv("sliding", 300, protected_spans=[(5, 2000)])))
    refused("context_length", lambda: world.client.generate_once([5] * 2000, model="sample"))
    refused("kv_budget", lambda: ask(kv=Kv("sliding", 100, protect_prompt=True)))
    refused(
        "prompt_evicted", lambda: ask(kv=Kv("sliding", 64), output=Output(prompt_logprobs=True))
    )
    refused("chat_format", lambda: world.client.generate_once(HELLO, model="sample"))
    refused("kv_pool_too_small", lambda: ask(model="b", stop=Stop(CONTEXT - TASK_TOKENS)))
    refused("artefact_missing", lambda: ask(model="b", kv=Kv("triattention", 300)))
    refused("not_found", lambda: ask(model="nosuch"))
    refused("not_found", lambda: world.client.cancel("nosuch"))
    soon = Stop(900, min_output_tokens=900)
    request = generation_pb2.GenerateRequest(
        model="sample", token_ids={"ids": PROMPT}, stop=soon.to_proto()
    )
    with pytest.raises(grpc.RpcError) as caught:
        with connect(world.daemon.grpc, token=world.token) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            stub.GenerateOnce(request, metadata=[("grpc-timeout", "30m")])
    assert RpcError.from_grpc(caught.value).reason == "DEADLINE_INFEASIBLE"
    with connect(world.daemon.grpc, token=world.token) as channel:
        send = channel.unary_unary("/epikv.v1.GenerationService/GenerateOnce")
        text = generation_pb2.GenerateRequest(model="sample", text="??").SerializeToString()
        for reason, message in (
            ("NOT_UTF8", text.replace(b"??", b"\xff\xfe")),
            ("MALFORMED", b"\x0a\xff\xff"),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                send(message)
            assert RpcError.from_grpc(caught.value).reason == reason
    with Client(world.daemon.grpc, token="unknown" * 8) as stranger:
        refused("unauthenticated", stranger.models)
    with connect(world.daemon.admin, token=world.user) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            admin_pb2_grpc.AdminServiceStub(channel).GetLoad(admin_pb2.GetLoadRequest())
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED


def crowd(world: World) -> None:
    """Places, room and queue are taken, at every priority; clients read slowly, late or no more."""
    # Room for three: the fourth waits for KV.
    big = world.running(900, 900, 900)
    waiting = [world.hold(900, priority, f"waits {priority}") for priority in PRIORITIES]
    world.until("epikv_requests_waiting", 3, reason="kv")
    refused("duplicate_id", lambda: list(world.hold(900, request_id="waits low")))
    refused("queue_full", lambda: list(world.hold(900)))
    world.leave(*waiting, *big)

    # Four places.
    some = [*world.running(700), *world.running(700, 700, 700, priorities=PRIORITIES)]
    waiting = [world.hold(700, priority) for priority in PRIORITIES]
    world.until("epikv_requests_waiting", 3, reason="running")
    # What was not read in time stood still, and goes on.
    list(some.pop())
    world.leave(*waiting, *some)

    # The third is in the way of the fourth.
    first, second, third = world.running(700, 900, 700)
    second.cancel()
    world.until("epikv_requests_running", 2)
    world.leave(first, third, *world.running(950))


def late(world: World) -> None:
    """Deadlines that pass, of what runs and of what waits, and a cancel by somebody else."""
    (held,) = world.running(900)
    accepted = next(held)
    assert isinstance(accepted, Accepted)
    world.client.cancel(accepted.request_id)
    world.until("epikv_requests_running", 0)
    stop = Stop(900, min_output_tokens=900, ignore_eos=True)
    request = generation_pb2.GenerateRequest(
        model="sample",
        token_ids={"ids": PROMPT},
        stop=stop.to_proto(),
        output=MUCH.to_proto(),
    )
    with connect(world.daemon.grpc, PACED, token=world.token) as channel:
        # The server's deadline alone: the client's library knows of none.
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        places = world.running(700, 700, 700, 700)
        dropped = stub.Generate(request, metadata=[("grpc-timeout", "4000m")])
        world.until("epikv_requests_waiting", 1, reason="running")
        # Nothing can run: the engine looks at the queue when it is asked for something.
        queued = admin_pb2.ActiveRequest.STATE_QUEUED
        ask = admin_pb2.ListActiveRequestsRequest()
        while any(r.state == queued for r in world.admin.ListActiveRequests(ask).requests):
            pass
        world.leave(*places)
        ended = stub.Generate(request, metadata=[("grpc-timeout", "3000m")])
        world.until("epikv_requests_running", 1)
        world.until("epikv_requests_running", 0)
        del dropped, ended  # which would cancel them


def broken(world: World) -> None:
    """A forward that fails its request, and a model that this build cannot run."""
    source = config_pb2.ModelSource(path=str(world.files.odd), name="odd", kv_pool_bytes=1000000)
    world.admin.LoadModel(admin_pb2.LoadModelRequest(source=source))
    refused("internal", lambda: world.client.generate_once([1, 8, 3], model="odd"))
    world.until("epikv_requests_finished_total", 1, reason="error")
    world.admin.UnloadModel(admin_pb2.UnloadModelRequest(name="odd"))
    source.path = str(world.files.unreadable)
    with pytest.raises(grpc.RpcError) as caught:
        world.admin.LoadModel(admin_pb2.LoadModelRequest(source=source))
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def operate(world: World) -> None:
    admin, client = world.admin, world.client
    admin.GetServerStatus(admin_pb2.GetServerStatusRequest())
    admin.GetLoad(admin_pb2.GetLoadRequest())
    admin.ListActiveRequests(admin_pb2.ListActiveRequestsRequest())
    admin.GetConfig(admin_pb2.GetConfigRequest())
    admin.FlushPrefixCache(admin_pb2.FlushPrefixCacheRequest())
    admin.DumpState(admin_pb2.DumpStateRequest())
    admin.UpdateConfig(
        admin_pb2.UpdateConfigRequest(
            config=config_pb2.ServerConfig(default_max_output_tokens=7),
            update_mask=FieldMask(paths=["default_max_output_tokens"]),
        )
    )
    admin.Drain(admin_pb2.DrainRequest())
    world.look()
    refused("draining", lambda: client.generate_once(PROMPT, model="sample"))
    admin.Resume(admin_pb2.ResumeRequest())
    # What runs on a model that goes ends with it; the one before it, which keeps its name's series,
    # has as long as it takes.
    source = config_pb2.ModelSource(path=str(world.files.model), name="b", kv_pool_bytes=SMALL_POOL)
    before = world.hold(900, model="b")
    world.until("epikv_requests_running", 1, model="b")
    admin.LoadModel(admin_pb2.LoadModelRequest(source=source, replace=True))
    ended = world.hold(900, model="b")
    world.until("epikv_requests_running", 2, model="b")
    admin.UnloadModel(admin_pb2.UnloadModelRequest(name="b", grace=Duration()))
    world.until("epikv_requests_finished_total", 1, reason="drained")
    ended.cancel()
    before.cancel()


def introspect(world: World) -> None:
    client = world.client
    assert client.detokenize(client.tokenize("1 + 1", model="sample"), model="sample")
    with pytest.raises(RpcError, match="CHAT_FORMAT"):
        client.apply_chat_template(HELLO, model="sample")
    client.model(client.models()[0].name)
    client.tokenizer_json(model="sample")
    client.policy(client.policies(model="sample")[0].name, model="sample")


def reload(world: World) -> None:
    """A tokens file that is wrong: who looks at it is a thread of the daemon."""
    right = world.files.tokens.read_text()
    replace(world.files.tokens, "root eve 00\n")
    world.until("epikv_auth_reload_failures_total", 1)
    replace(world.files.tokens, right)


def start_lean(world: World) -> None:
    client = world.experimenter
    client.create_experiment(text_format.Parse(DEFINITION, experiment_pb2.Experiment()))
    draft = client.experiment("lean")
    client.start_experiment("lean", etag=draft.etag)
    refused("etag", lambda: client.update_experiment(draft))


def experiment(world: World) -> None:
    """Requests take part, or do not, and what they turned out to be worth is recorded."""
    start_lean(world)
    arms: dict[str, str] = {}
    while len({*arms.values()}) < 2:
        name = f"unit {len(arms)}"
        arms[name] = world.take_part(name)
    assert {*arms.values()} == {"lean/wide", "lean/narrow"}
    assert world.take_part("forced", force_arm="lean/wide") == "lean/wide"
    assert world.take_part("left out", opt_out=True) == "none"

    record = world.record
    record("unit 0", "right", 1)
    record("unit 0", "right", 1)
    refused("outcome_conflict", lambda: record("unit 0", "right", 0))
    refused("not_found", lambda: record("nosuch", "right", 1))
    refused("invalid_request", lambda: record("unit 0", "wrong", 1))
    refused("invalid_request", lambda: record("a\0b", "score", 1))  # which no store can hold
    world.experiments.BatchRecordOutcomes(
        experiment_pb2.BatchRecordOutcomesRequest(
            outcomes=[{"request_id": "unit 0", "metric": "score", "value": 1}]
        )
    )
    for window, late in ((Duration(nanos=1000), True), (Duration(seconds=3600), False)):
        world.experimenter.update_experiment(
            experiment_pb2.Experiment(name="lean", outcome_window=window), mask=["outcome_window"]
        )
        if late:
            refused("outcome_late", lambda: record("unit 0", "score", 1, "late"))

    [known] = world.experiments.ListExperiments(experiment_pb2.ListExperimentsRequest()).experiments
    world.experiments.GetExperimentReport(
        experiment_pb2.GetExperimentReportRequest(name=known.name)
    )
    world.experiments.PlanExperiment(
        experiment_pb2.PlanExperimentRequest(kind="KIND_PROPORTION", rate=0.1, effect=0.03)
    )


def set_switchback(world: World, switchback: experiment_pb2.Switchback | None) -> None:
    world.experimenter.update_experiment(
        experiment_pb2.Experiment(name="lean", switchback=switchback),
        mask=["switchback"],
        allow_rebucket=True,
    )


def switch(world: World) -> None:
    """The whole server is on one arm, and in a wash-out until the day's last millisecond."""
    day, most = Duration(seconds=86400), Duration(seconds=86399, nanos=999_000_000)
    set_switchback(world, experiment_pb2.Switchback(window=day, wash_out=most))
    assert world.take_part("washed out").startswith("lean/")


def shadow(world: World) -> None:
    """Finished requests are replayed, but for those that newer ones displace while something is
    live, and one that live ones always interrupt."""
    requests, waiting = (
        f"epikv_experiment_shadow_{of}" for of in ("requests_total", "waiting_requests")
    )
    compared = world.value(requests, outcome="compared")
    held = world.hold(900)
    world.until("epikv_requests_running", 1)
    number = count()
    while not world.value(requests, outcome="displaced"):
        world.take_part(f"waiting {next(number)}", tokens=2)
        world.look()
    world.leave(held)
    world.until(waiting, 0)
    world.look()
    assert world.value(requests, outcome="compared") > compared

    while not world.value(requests, outcome="interrupted"):
        world.take_part(f"interrupted {next(number)}", tokens=900)
        for _ in range(12):  # more often than such a replay takes, and than it is tried
            time.sleep(0.1)
            world.client.generate_once(PROMPT, model="sample", stop=Stop(2))
        world.look()
    world.until(waiting, 0)


def outage(world: World) -> None:
    """Nobody can write to the store of experiments, and then they can again."""
    bytes_, damaged = "epikv_experiment_spool_bytes", "epikv_experiment_spool_damaged_bytes_total"
    with world.store_away():
        assert world.record("unit 0", "score", 1, key="spooled")
        world.until_more(bytes_)
        world.until_more("epikv_experiment_store_outage_seconds_total")
    world.until(bytes_, 0)

    # A disk changes the last record, which a replay under way may have read before.
    with world.store_away():
        assert world.record("unit 0", "score", 1, key="kept")
        assert world.record("unit 0", "score", 1, key="lost")
        [segment] = world.files.spool.glob("*.spool")
        with segment.open("r+b") as file:
            file.seek(-1, SEEK_END)
            last = file.read(1)
            file.seek(-1, SEEK_END)
            file.write(bytes([last[0] ^ 1]))
        world.until_more("epikv_experiment_store_outage_seconds_total")
    world.until_more(damaged)
    world.until(bytes_, 0)

    # Until there is no room for one more.
    with world.store_away():
        outcomes = [{"request_id": "nosuch", "metric": "score", "value": 1}] * 1000
        while outcomes:
            batch = experiment_pb2.BatchRecordOutcomesRequest(outcomes=outcomes)
            results = world.experiments.BatchRecordOutcomes(batch).results
            if any(result.code for result in results):
                outcomes = outcomes[: len(outcomes) // 10]
        assert world.take_part("unheard of").startswith("lean/")
        world.until_more("epikv_experiment_records_total", fate="dropped")
    world.until(bytes_, 0)
    spooled, replayed = (
        world.value("epikv_experiment_records_total", fate=fate) for fate in ("spooled", "replayed")
    )
    assert spooled - replayed == 1, "all come back but the one that the disk changed"


def breach(world: World) -> None:
    """The worse arm's guardrail stops the experiment, whose arms share the server again."""
    set_switchback(world, None)
    for number in count():
        name = f"worse {number}"
        arm = world.take_part(name, tokens=2)
        if arm == "none":
            break
        world.record(name, "right", float(arm == "lean/wide"))
    stopped = world.experimenter.stop_experiment("lean", reason="enough")
    assert stopped.stop_reason == "guardrail/right/narrow"
    world.until("epikv_experiments_running", 0)
    assert world.value("epikv_experiment_guardrail_breaches_total") == 1


def small(world: World) -> None:
    """No series for a policy, an arm or an experiment of its own; little patience with slow
    readers."""
    ask = partial(world.client.generate_once, PROMPT, model="sample")
    ask(kv=Kv("sliding", 80), stop=Stop(120, min_output_tokens=120, ignore_eos=True))
    start_lean(world)
    assert world.take_part("unit 0").startswith("lean/")
    world.until("epikv_experiments_running", 1)
    assert "epikv_experiment_assignments_total" not in world.page
    held = world.hold(900)
    world.until("epikv_requests_finished_total", 1, reason="slow_reader")
    held.cancel()


def idle(world: World) -> None:
    """Nobody asks for anything, but the daemon looks at its files and is scraped."""
    clock = "process_cpu_seconds_total"
    until = time.monotonic() + 2  # its own timers are of a second
    ticks = 0
    while ticks < 5 or time.monotonic() < until:
        before = world.value(clock)
        world.look()
        ticks += world.value(clock) > before


# What has stopped has series for ten minutes: it comes last.
SCENARIOS = (
    probed,
    load,
    policies,
    refusals,
    crowd,
    late,
    broken,
    introspect,
    reload,
    operate,
    experiment,
    shadow,
    switch,
    outage,
    breach,
)


# ---------------------------------------------------------------------------------------------
# Tests.


@dataclass
class Observed:
    """What moved in which scenario, and the page at the end of them."""

    moved: dict[str, set[Series]]
    families: dict[str, Family]
    policies: list[str]
    series: int  # on that page
    least_series: int  # that a daemon may be limited to

    def all(self) -> Set[Series]:
        return set().union(*self.moved.values())


def refused_while_it_starts(address: str, token: str, served: threading.Event) -> None:
    eager = [(f"grpc.{which}_reconnect_backoff_ms", 10) for which in ("initial", "min", "max")]
    with Client(address, eager, token=token) as client:
        while not served.is_set():
            with contextlib.suppress(RpcError):
                client.generate_once("", timeout=10)  # which is refused afterwards, too


@contextlib.contextmanager
def asked_while_it_starts(
    model: Path, flags: list[str], address: str, token: str
) -> Iterator[Daemon]:
    """One that has refused something since it was starting; it starts so fast that this may take
    several tries."""
    for tries_left in reversed(range(10)):
        served = threading.Event()
        asking = threading.Thread(target=refused_while_it_starts, args=(address, token, served))
        asking.start()
        try:
            with Daemon(model, *flags, token=token) as daemon:
                served.set()
                asking.join()
                rejected = scrape(daemon.metrics).total(
                    "epikv_requests_rejected_total", reason="starting"
                )
                if rejected or not tries_left:
                    yield daemon
                    return
        finally:
            served.set()
            asking.join()


@contextlib.contextmanager
def busy_world(files: Files) -> Iterator[World]:
    """A daemon with all that can be asked of one, already asked while it was starting."""
    (token, *lines), (user, *more), (experimenter, *most) = (
        new_token("olga", "operator"),
        new_token("ulf", "user"),
        new_token("erna", "experimenter"),
    )
    files.tokens.write_text("".join([*lines, *more, *most]))
    with create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    flags = [
        f"--listen={address}",
        f"--auth_tokens_file={files.tokens}",
        f"--artefact_dir={files.artefacts}",
        "--access_log=/dev/full",
        "--metrics_max_series=40000",  # of every policy its own
        "--threads=1",
        "--max_running_requests=4",
        "--max_queued_requests=3",
        "--prefill_chunk_tokens=32",
        f"--kv_pool_bytes={POOL_BYTES}",
        "--outbox_messages=8",
        "--outbox_bytes=1024",
        "--stream_stall_seconds=600",
        f"--experiment_store={files.store}",
        "--experiment_spool_bytes=1048576",
        "--experiment_guardrail_seconds=0.2",
        "--experiment_shadow_permille=1000",
        "--experiment_shadow_time_share=1",
    ]
    with asked_while_it_starts(files.model, flags, address, token) as daemon:
        world = World(daemon, files, token, user, experimenter)
        at_start = moved({}, world.page)
        world.moved["start"] = {s for s in at_start if world.page[s.family].type != "gauge"}
        yield world


@pytest.fixture(scope="module")
def observed(
    sample_model: Path, artefact_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Observed:
    folder = tmp_path_factory.mktemp("series")
    files = Files(
        sample_model,
        artefact_dir,
        tokens=folder / "tokens",
        damaged=folder / "damaged.pt",
        odd=save(folder / "odd.pt"),
        unreadable=unreadable(folder / "unreadable.pt"),
        store=folder / "store.db",
    )
    with busy_world(files) as world:
        world.run(idle)
        for scenario in SCENARIOS:
            world.run(scenario)
        names = [policy.name for policy in world.client.policies(model="sample")]
        series = sum(not line.startswith("#") for line in text(world.daemon).splitlines())
        seen = Observed(world.moved, world.page, names, series, world.bound)
    files.store = folder / "another.db"
    flags = (
        f"--experiment_store={files.store}",
        f"--metrics_max_series={seen.least_series}",
        "--stream_stall_seconds=0.3",
        "--outbox_bytes=1024",
    )
    with Daemon(sample_model, "--threads=1", *flags, "--access_log=/dev/full") as daemon:
        world = World(daemon, files)
        world.run(small)
        seen.moved |= world.moved
    return seen


@pytest.mark.parametrize("scenario", QUIET)
def test_nothing_else_moves(observed: Observed, scenario: str) -> None:
    there = families(observed.moved[scenario])
    assert {family for family in there if not BY_THEMSELVES.match(family)} == QUIET[scenario]


def test_every_family_is_expected_and_there(observed: Observed) -> None:
    assert set(observed.families) == set(FAMILIES)


@pytest.mark.parametrize("name", FAMILIES)
def test_family_is_moved_by_its_scenario(observed: Observed, name: str) -> None:
    expected, there = FAMILIES[name], observed.families[name]
    assert there.type == expected.type
    assert {label for labels in there.values for label, _ in labels} == set(expected.labels)
    movers = {scenario for scenario, series in observed.moved.items() if name in families(series)}
    if expected.moved_by == "nothing":
        assert (name, "", "") in UNMOVED and not movers
    elif expected.moved_by in SOLE_MOVERS:
        assert movers == {expected.moved_by}
    else:
        assert expected.moved_by in movers, movers


@pytest.mark.parametrize("name", [n for n, e in FAMILIES.items() if e.moved_by != "nothing"])
def test_every_value_of_every_label_moves(observed: Observed, name: str) -> None:
    of_family = [dict(series.labels) for series in observed.all() if series.family == name]
    for label, values in FAMILIES[name].labels.items():
        if values is ANY or label == "model":
            continue
        if values in (POLICIES, EVICTING):
            known = {*observed.policies, "other"} - ({"full"} if values == EVICTING else set())
        else:
            known = set(values)
        unmoved = {value for family, of, value in UNMOVED if (family, of) == (name, label)}
        assert {labels[label] for labels in of_family} == known - unmoved, label


def test_the_page_keeps_its_promise(observed: Observed, sample_model: Path, tmp_path: Path) -> None:
    promised = observed.families["epikv_metrics_series"].values[frozenset()]
    assert observed.least_series < observed.series <= promised
    least = observed.least_series
    store = f"--experiment_store={tmp_path / 'store.db'}"
    status, log = start(f"--model={sample_model}", f"--metrics_max_series={least - 1}", store)
    assert status == 1 and f"raise it to at least {least}\n" in log, log


def families(series: Set[Series]) -> set[str]:
    return {one.family for one in series}


# ---------------------------------------------------------------------------------------------
# The table for people.


def row(name: str, expected: Expected, family: Family) -> str:
    cells = []
    for label, values in expected.labels.items():
        closed = values not in (ANY, POLICIES, EVICTING) and label not in NAMING
        few = closed and len(values) <= 12
        cells.append(
            f"`{label}`" + (f" ({', '.join(v or 'empty' for v in values)})" if few else "")
        )
    return f"| `{name}` | {expected.type} | {', '.join(cells)} | {family.help} |"


def test_the_readme_has_the_whole_page(observed: Observed) -> None:
    rows = [row(name, FAMILIES[name], observed.families[name]) for name in sorted(FAMILIES)]
    lines = (ROOT / "server" / "README.md").read_text().splitlines()
    there = lines[lines.index(TABLE_BEGIN) + 3 : lines.index(TABLE_END)]
    assert there == rows, "what belongs there:\n" + "\n".join(rows)


def test_alerts_are_about_series_that_there_are() -> None:
    alerts = (ROOT / "deploy" / "prometheus" / "alerts.yml").read_text()
    named = set(re.findall(r"\b(?:epikv|gen_ai|process)_\w+", alerts))
    assert len(named) > 8
    assert {re.sub("_(bucket|count)$", "", name) for name in named} <= set(FAMILIES)

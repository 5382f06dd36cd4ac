"""The page that a daemon exports: each family with its type, the closed set of each label, and the scenario
that must move it; what no scenario moves, and all that those without an engine's part may move."""

import re
from dataclasses import dataclass, field

import grpc

PRIORITIES = ("low", "normal", "high")
PHASES = ("prefill", "decode")
POLICIES, EVICTING = ("all policies",), ("all policies that evict",)
FAILURES = ("deadline", "deadline_infeasible", "error", "slow_reader", "drained", "cancelled")
STAGES = (
    "schedule",
    "draft",
    "forward",
    "attention",
    "taps",
    "sample",
    "deliver",
    "observe",
    "evict",
)
OF_CPU = tuple(stage for stage in STAGES if stage != "attention")
REFUSALS = (
    "invalid_request token_range span_range context_length kv_budget kv_pool_too_small kv_tier_too_small "
    "artefact_missing prompt_evicted chat_format packets_off packets_full packet_model sessions_off queue_full starting loading draining duplicate_id "
    "not_found not_utf8 malformed unauthenticated permission_denied deadline_infeasible other"
)
METHODS = """
    GenerationService/Generate GenerationService/GenerateOnce GenerationService/Score
    GenerationService/CancelRequest TokenizationService/Tokenize TokenizationService/Detokenize
    TokenizationService/ApplyChatTemplate
    ModelService/ListModels ModelService/GetModel ModelService/GetTokenizer
    PolicyService/ListPolicies PolicyService/GetPolicy
    PacketService/CreatePacket PacketService/ListPackets PacketService/DeletePacket
    ExperimentService/ListExperiments ExperimentService/GetExperiment
    ExperimentService/CreateExperiment ExperimentService/UpdateExperiment
    ExperimentService/StartExperiment ExperimentService/StopExperiment
    ExperimentService/GetExperimentReport ExperimentService/PlanExperiment
    ExperimentService/RecordOutcome ExperimentService/BatchRecordOutcomes
    VllmEngine/Generate VllmEngine/HealthCheck VllmEngine/Abort VllmEngine/GetModelInfo
    VllmEngine/GetServerInfo VllmEngine/GetLoads VllmEngine/GetTokenizer
    OpenRcaService/StreamCoreMetrics
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
            "gen_ai_operation_name": ("text_completion", "chat", "score"),
            "error_type": ("", *FAILURES),
        },
        gen_ai_server_time_to_first_token_seconds=A,
        gen_ai_server_time_per_output_token_seconds=A,
        epikv_inter_token_latency_seconds=A,
        epikv_request_queue_seconds=A,
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
        epikv_guessed_tokens_total=MODEL | {"result": ("accepted", "rejected")},
        epikv_step_seconds_total=MODEL | {"stage": STAGES},
        epikv_step_cpu_seconds_total=MODEL | {"stage": OF_CPU},
        epikv_engine_cpu_seconds_total=MODEL,
        epikv_kv_tokens_evicted_total=OF_EVICTIONS | {"phase": PHASES},
        epikv_kv_entries_evicted_total=OF_EVICTIONS | {"phase": PHASES},
        epikv_kv_eviction_rounds_total=OF_EVICTIONS | {"phase": PHASES},
    ),
    **of(
        "counter",
        "tier",
        epikv_tier_entries_total=MODEL | {"event": ("demoted", "recalled", "forgotten", "fetched")},
        epikv_tier_seconds_total=MODEL,
        epikv_doubted_steps_total=MODEL,
    ),
    **of("gauge", "tier", epikv_tier_bytes=MODEL | {"state": ("reserved", "free")}),
    **of("counter", "packets", epikv_packet_prompt_tokens_total=MODEL),
    **of(
        "gauge",
        "packets",
        epikv_packets={},
        epikv_packet_memory_bytes={},
        epikv_packet_folder_bytes={},
    ),
    **of("gauge", "sessions", epikv_sessions={}, epikv_session_bytes={}),
    **of(
        "counter",
        "sessions",
        epikv_session_updates_total={"result": ("done", "failed")},
        epikv_session_requests_total={"start": ("whole", "episode", "anew")},
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
        epikv_tier_failures_total=MODEL,
    ),
    **of(
        "gauge",
        "crowd",
        epikv_requests_running=MODEL | {"priority": PRIORITIES},
        epikv_requests_waiting=MODEL | {"priority": PRIORITIES, "reason": ("kv", "running")},
        epikv_load_running_requests=MODEL,
        epikv_load_waiting_requests=MODEL,
        epikv_predicted_wait_seconds=MODEL,
        epikv_kv_bytes=MODEL | {"state": ("used", "reserved", "cached_prefix", "free")},
        epikv_kv_usage_ratio=MODEL,
        epikv_kv_reserved_ratio=MODEL,
        epikv_kv_longest_move_seconds=MODEL,
        epikv_engine_last_step_timestamp_seconds=MODEL,
    ),
    **of("gauge", "nothing", epikv_engine_step_age_seconds=MODEL),
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
        "counter",
        "nothing",
        epikv_experiment_pairs_total=SHADOW
        | {"outcome": ("compared", "displaced", "interrupted", "failed")},
    ),
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
    **of(
        "gauge",
        "operate",
        epikv_drain_state={},
        epikv_lifecycle_state={"state": ("starting", "serving", "draining")},
    ),
    **of("gauge", "nothing", epikv_tls_certificate_expiry_timestamp_seconds={}),
    **of("gauge", "load", epikv_connections={"port": ("clients", "operators")}),
    **of(
        "counter",
        "nothing",
        epikv_connections_refused_total={
            "port": ("clients", "operators"),
            "reason": ("port_limit", "peer_limit", "descriptors", "unread_bytes"),
        },
    ),
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
        epikv_resident_memory_bytes=MODEL | {"kind": ("kv_touched", "signals", "constraints")},
        process_resident_memory_bytes={},
    ),
    **of("gauge", "load", process_virtual_memory_bytes={}, process_threads={}),
    **of("gauge", "crowd", process_open_fds={}),
    **of("counter", "idle", exposer_transferred_bytes_total={}, exposer_scrapes_total={}),
    **of("summary", "idle", exposer_request_latencies={}),
}

# Moved while nobody asks for anything.
BY_THEMSELVES = re.compile("process_|exposer_|epikv_connections$")

BY_A_BROKEN_POLICY = "no policy of the build fails: tests/server/broken_policy_test.cc"
BY_PACKETS_TEST = "needs another daemon: tests/e2e/generation/packets_test.py"
# (family, label, value) that no scenario moves, and why. "": all of it.
UNMOVED = {
    ("epikv_policy_errors_total", "", ""): BY_A_BROKEN_POLICY,
    ("epikv_grpc_requests_total", "code", "UNKNOWN"): "nothing answers so",
    ("epikv_grpc_requests_total", "method", "other"): "a method that the metrics do not know",
    ("epikv_requests_rejected_total", "reason", "other"): "a reason that they do not know",
    ("epikv_requests_rejected_total", "reason", "packets_off"): BY_PACKETS_TEST,
    ("epikv_requests_rejected_total", "reason", "packet_model"): BY_PACKETS_TEST,
    (
        "epikv_requests_rejected_total",
        "reason",
        "sessions_off",
    ): "needs another daemon: tests/e2e/generation/sessions_test.py",
    (
        "epikv_experiment_shadow_requests_total",
        "outcome",
        "failed",
    ): "tests/experiments/shadow_test.cc",
    (
        "epikv_experiment_pairs_total",
        "",
        "",
    ): "tests/experiments/shadow_test.cc, tests/e2e/experiments/pairs_test.py",
    ("epikv_kv_budget_overrun_tokens_total", "", ""): "must stay 0",
    ("epikv_tier_failures_total", "", ""): "no disk fails: tests/laws/tier_laws_test.cc",
    ("epikv_engine_step_age_seconds", "", ""): "no step hangs: tests/e2e/operating/hang_test.py",
    (
        "epikv_connections_refused_total",
        "",
        "",
    ): "tests/e2e/operating: connections_test.py, unread_requests_test.py",
    ("epikv_lifecycle_state", "state", "starting"): "it has started: tests/server/metrics_test.cc",
    ("epikv_tls_certificate_expiry_timestamp_seconds", "", ""): "tests/server/tls_test.cc",
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
    "epikv_tier_bytes",
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

"""How well requests are served, and what they wait for."""

from epikv_lab.dashboards.panels import (
    INSTANCE,
    MODEL,
    Dashboard,
    Query,
    Row,
    Unit,
    lines,
    number,
)
from epikv_lab.dashboards.promql import (
    OF_INSTANCE,
    mean,
    quantile,
    rates,
    series,
    share,
    total,
)

FIRST_TOKEN = "gen_ai_server_time_to_first_token_seconds"
PER_TOKEN = "gen_ai_server_time_per_output_token_seconds"
DURATION = "gen_ai_server_request_duration_seconds"
ENDED_WELL = 'error_type=""'


def three(name: str, *matchers: str) -> tuple[Query, ...]:
    """Quantiles of a histogram that are looked at together."""
    return tuple(
        Query(quantile(each, name, *matchers), f"p{round(100 * each)}")
        for each in (0.5, 0.95, 0.99)
    )


def late_share(window: str) -> str:
    """Of first tokens, those that took more than 10 s: as the alerts count."""
    within, all_ = (
        f"sum(rate({series(f'{FIRST_TOKEN}_{part}', *more)}[{window}]))"
        for part, *more in (("bucket", 'le="10"'), ("count",))
    )
    return f"1 - {share(within, all_)}"


SERVING = Dashboard(
    "epikv-serving",
    "epikv / Serving",
    "How well requests are served, and what they wait for.",
    variables=(INSTANCE, MODEL),
    rows=(
        Row(
            "Now",
            (
                number(
                    "Running",
                    "Requests that hold KV cache.",
                    f"sum({series('epikv_requests_running')})",
                ),
                number(
                    "Waiting", "Requests in the queue.", f"sum({series('epikv_requests_waiting')})"
                ),
                number(
                    "Output tokens",
                    "Tokens that steps decode in a second.",
                    rates("epikv_step_tokens_total", 'phase="decode"'),
                    unit=Unit.PER_SECOND,
                ),
                number(
                    "First token, p95",
                    "95 % of requests wait no longer for their first token.",
                    quantile(0.95, FIRST_TOKEN),
                    unit=Unit.SECONDS,
                    limit=10,
                ),
                number(
                    "Failed",
                    "Share of ended requests that ended with an error of the daemon.",
                    share(
                        rates("epikv_requests_finished_total", 'reason="error"'),
                        rates("epikv_requests_finished_total"),
                    ),
                    unit=Unit.SHARE,
                    limit=0.01,
                ),
                number(
                    "Reserved KV",
                    "Share of the fullest KV pool that running requests have reserved.",
                    f"max({series('epikv_kv_reserved_ratio')})",
                    unit=Unit.SHARE,
                    limit=0.95,
                ),
            ),
        ),
        Row(
            "Latency",
            (
                lines(
                    "Time to first token",
                    "From arrival to the first output token.",
                    *three(FIRST_TOKEN),
                    unit=Unit.SECONDS,
                ),
                lines(
                    "Time per output token",
                    "Mean time of a request's tokens after the first, over requests.",
                    *three(PER_TOKEN),
                    unit=Unit.SECONDS,
                ),
                lines(
                    "Time between tokens",
                    "Of all streams' consecutive tokens: what a reader sees as stutter is in its p99.",
                    *three("epikv_inter_token_latency_seconds"),
                    unit=Unit.SECONDS,
                ),
                lines(
                    "Whole request",
                    "From arrival to the end, of requests that ended well.",
                    *three(DURATION, ENDED_WELL),
                    unit=Unit.SECONDS,
                ),
                lines(
                    "Where a request's time goes",
                    "Means of waiting in the queue, of the prompt, and of decoding.",
                    *(
                        Query(mean(f"epikv_request_{part}_seconds"), part)
                        for part in ("queue", "prefill", "decode")
                    ),
                    unit=Unit.SECONDS,
                    stacked=True,
                ),
                lines(
                    "First tokens over 10 s",
                    "Their share over the windows of the alerts, which fire at 14.4 % and at 6 %.",
                    *(Query(late_share(window), window) for window in ("5m", "30m", "1h", "6h")),
                    unit=Unit.SHARE,
                    limit=0.06,
                ),
            ),
        ),
        Row(
            "Traffic",
            (
                lines(
                    "Requests by how they ended",
                    "length, end, stop_token and stop_string are good ends.",
                    Query(rates("epikv_requests_finished_total", by="reason"), "{{reason}}"),
                    unit=Unit.REQUESTS_PER_SECOND,
                    stacked=True,
                ),
                lines(
                    "Refusals by reason",
                    "Requests that were refused before they were queued; the page of errors has the reasons.",
                    Query(
                        f"{rates('epikv_requests_rejected_total', by='reason')} > 0", "{{reason}}"
                    ),
                    unit=Unit.REQUESTS_PER_SECOND,
                    stacked=True,
                ),
                lines(
                    "Calls by code",
                    "All RPCs that have ended, health and reflection left out.",
                    Query(
                        f"{rates('epikv_grpc_requests_total', by='code', of=OF_INSTANCE)} > 0",
                        "{{code}}",
                    ),
                    unit=Unit.REQUESTS_PER_SECOND,
                    stacked=True,
                ),
                lines(
                    "Tokens of steps",
                    "What the engines compute: prompts, and output.",
                    Query(rates("epikv_step_tokens_total", by="phase"), "{{phase}}"),
                    unit=Unit.PER_SECOND,
                ),
                lines(
                    "Tokens of requests",
                    "Counted when a request ends; prompt_cached are those of the prompts that were copied.",
                    Query(rates("epikv_tokens_total", by="kind"), "{{kind}}"),
                    unit=Unit.PER_SECOND,
                ),
                lines(
                    "Calls by method",
                    "The busiest ten.",
                    Query(
                        f"topk(10, {rates('epikv_grpc_requests_total', by='method', of=OF_INSTANCE)} > 0)",
                        "{{method}}",
                    ),
                    unit=Unit.REQUESTS_PER_SECOND,
                ),
            ),
        ),
        Row(
            "Queue and readers",
            (
                lines(
                    "Running by priority",
                    "Requests that hold KV cache.",
                    Query(total("priority", series("epikv_requests_running")), "{{priority}}"),
                    stacked=True,
                ),
                lines(
                    "Waiting by reason",
                    "What the first of the queue waits for: room in the KV pool, or one of max_running_requests.",
                    Query(total("reason", series("epikv_requests_waiting")), "{{reason}}"),
                    stacked=True,
                ),
                lines(
                    "Predicted wait",
                    "How long a request that comes now would wait.",
                    Query(
                        f"max by (model) ({series('epikv_predicted_wait_seconds')})", "{{model}}"
                    ),
                    unit=Unit.SECONDS,
                ),
                lines(
                    "Time in the queue",
                    "From arrival to admission.",
                    *three("epikv_request_queue_seconds"),
                    unit=Unit.SECONDS,
                ),
                lines(
                    "Readers that are late",
                    "How long a stream stood still because its client read slowly.",
                    *(
                        Query(
                            quantile(each, "epikv_stream_write_stall_seconds", of=OF_INSTANCE), name
                        )
                        for each, name in ((0.5, "p50"), (0.99, "p99"))
                    ),
                    unit=Unit.SECONDS,
                ),
                lines(
                    "Prompt tokens from the prefix cache",
                    "Share of the prompts' tokens that were copied instead of computed.",
                    Query(
                        share(
                            rates("epikv_prefix_cache_hit_tokens_total", by="model"),
                            rates("epikv_prefix_cache_queried_tokens_total", by="model"),
                        ),
                        "{{model}}",
                    ),
                    unit=Unit.SHARE,
                ),
            ),
        ),
        Row(
            "Engine",
            (
                lines(
                    "Step time",
                    "Half of the steps, and all but a hundredth, take no longer; by what they ran.",
                    *(
                        Query(
                            quantile(each, "epikv_step_seconds", by="phase"),
                            f"{{{{phase}}}} {name}",
                        )
                        for each, name in ((0.5, "p50"), (0.99, "p99"))
                    ),
                    unit=Unit.SECONDS,
                ),
                lines(
                    "Where a second of an engine goes",
                    "Seconds of steps in a second, by stage. Below 1 the engines had nothing to do for the rest.",
                    Query(
                        rates("epikv_step_seconds_total", 'stage!~"attention|taps"', by="stage"),
                        "{{stage}}",
                    ),
                    unit=Unit.SECONDS,
                    stacked=True,
                ),
                lines(
                    "Inside the forward pass",
                    "Seconds in a second. Attention and taps are parts of the forward pass.",
                    Query(
                        rates(
                            "epikv_step_seconds_total",
                            'stage=~"forward|attention|taps"',
                            by="stage",
                        ),
                        "{{stage}}",
                    ),
                    unit=Unit.SECONDS,
                ),
                lines(
                    "Batch",
                    "Means over steps.",
                    Query(mean("epikv_step_batch_sequences"), "sequences"),
                    Query(mean("epikv_step_batch_tokens"), "tokens"),
                ),
                lines(
                    "Slowest stages",
                    "99 % of a stage's turns take no longer.",
                    Query(quantile(0.99, "epikv_step_stage_seconds", by="stage"), "{{stage}}"),
                    unit=Unit.SECONDS,
                ),
                lines(
                    "The engines' own CPU time",
                    "CPU seconds of the engines' threads in a second, by stage; whole is all stages together.",
                    Query(rates("epikv_step_cpu_seconds_total", by="stage"), "{{stage}}"),
                    Query(rates("epikv_engine_cpu_seconds_total"), "whole"),
                    unit=Unit.SECONDS,
                ),
            ),
        ),
    ),
)

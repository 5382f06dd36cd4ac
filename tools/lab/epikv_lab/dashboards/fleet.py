"""Instances beside each other: which are there, what they run, and whether one stands out."""

from epikv_lab.dashboards.panels import (
    INSTANCE,
    Dashboard,
    Query,
    Row,
    Unit,
    Variable,
    lines,
    number,
    table,
)
from epikv_lab.dashboards.promql import OF_INSTANCE, quantile, rates, series, share
from epikv_lab.dashboards.serving import FIRST_TOKEN

JOB = Variable("job", "label_values(epikv_build_info, job)", whole=None)
GATEWAY = Variable(
    "gateway", "label_values(epikv_gateway_requests_in_flight, instance)", whole=None
)
OF_JOB = 'job=~"$job"'
OF_GATEWAY = 'instance=~"$gateway"'
NAMED = "{{instance}}"


def each(expression: str) -> Query:
    return Query(expression, NAMED)


def gauge(name: str, how: str = "sum") -> Query:
    return each(f"{how} by (instance) ({series(name, of=OF_INSTANCE)})")


def rated(name: str, *matchers: str) -> Query:
    return each(rates(name, *matchers, by="instance", of=OF_INSTANCE))


FLEET = Dashboard(
    "epikv-fleet",
    "epikv / Fleet",
    "Instances beside each other: which are there, what they run, and whether one stands out.",
    variables=(JOB, INSTANCE, GATEWAY),
    rows=(
        Row(
            "Now",
            (
                number("Up", "Instances that answer scrapes.", f"sum({series('up', of=OF_JOB)})"),
                number(
                    "Down",
                    "Instances that are known and do not answer.",
                    f"count({series('up', of=OF_JOB)} == 0) or vector(0)",
                    limit=1,
                ),
                number(
                    "Drained",
                    "Instances that refuse new requests on purpose.",
                    f"sum({series('epikv_drain_state', of=OF_INSTANCE)})",
                    limit=1,
                ),
                number(
                    "Alerts",
                    "That fire now. Each names a section of the runbook.",
                    'count(ALERTS{alertstate="firing", alertname=~"Epikvd.*"}) or vector(0)',
                    limit=1,
                ),
                number(
                    "Restarts",
                    "Of the processes, in the time shown.",
                    f"sum(changes({series('process_start_time_seconds', of=OF_INSTANCE)}[$__range]))",
                    limit=1,
                ),
                number(
                    "Longest step now",
                    "How long a step of an engine has lasted, from a second on. Minutes mean that it hangs.",
                    f"max({series('epikv_engine_step_age_seconds', of=OF_INSTANCE)})",
                    unit=Unit.SECONDS,
                    limit=60,
                ),
            ),
        ),
        Row(
            "What they run",
            (
                table(
                    "Builds",
                    "The daemon's version and commit, and what it runs on.",
                    series("epikv_build_info", of=OF_INSTANCE),
                    "job",
                    width=12,
                ),
                table(
                    "Models",
                    "What is served, and how.",
                    series("epikv_model_info", of=OF_INSTANCE),
                    "job",
                    width=12,
                ),
                table(
                    "Settings",
                    "As they are now. Instances of one kind should agree.",
                    series("epikv_config_info", of=OF_INSTANCE),
                    "job",
                    width=24,
                ),
            ),
        ),
        Row(
            "Load",
            (
                lines(
                    "Running", "Requests that hold KV cache.", gauge("epikv_load_running_requests")
                ),
                lines("Waiting", "Requests in the queue.", gauge("epikv_load_waiting_requests")),
                lines(
                    "Predicted wait",
                    "How long a request that comes now would wait.",
                    gauge("epikv_predicted_wait_seconds", "max"),
                    unit=Unit.SECONDS,
                ),
                lines(
                    "Reserved KV",
                    "Share of the pool that running requests have reserved.",
                    gauge("epikv_kv_reserved_ratio", "max"),
                    unit=Unit.SHARE,
                    limit=0.95,
                ),
                lines(
                    "Output tokens",
                    "A second.",
                    rated("epikv_step_tokens_total", 'phase="decode"'),
                    unit=Unit.PER_SECOND,
                ),
                lines(
                    "Time to first token, p95",
                    "Of one instance alone: it is slow, or gets too much.",
                    each(quantile(0.95, FIRST_TOKEN, by="instance", of=OF_INSTANCE)),
                    unit=Unit.SECONDS,
                ),
                lines(
                    "Failed",
                    "Share of ended requests that ended with an error of the daemon.",
                    each(
                        share(
                            rates(
                                "epikv_requests_finished_total",
                                'reason="error"',
                                by="instance",
                                of=OF_INSTANCE,
                            ),
                            rates("epikv_requests_finished_total", by="instance", of=OF_INSTANCE),
                        )
                    ),
                    unit=Unit.SHARE,
                    limit=0.01,
                ),
                lines(
                    "Refused",
                    "Requests a second, for whatever reason.",
                    rated("epikv_requests_rejected_total"),
                    unit=Unit.REQUESTS_PER_SECOND,
                ),
                lines(
                    "How uneven the load is",
                    "The busiest instance's running requests over their mean: 1 is even.",
                    Query(
                        f"max({gauge('epikv_load_running_requests').promql})"
                        f" / (avg({gauge('epikv_load_running_requests').promql}) > 0)",
                        "busiest / mean",
                    ),
                ),
            ),
        ),
        Row(
            "Processes",
            (
                lines("CPU", "Cores in use.", rated("process_cpu_seconds_total")),
                lines(
                    "Resident memory",
                    "Of the process.",
                    gauge("process_resident_memory_bytes"),
                    unit=Unit.BYTES,
                ),
                lines(
                    "File descriptors",
                    "Share of what the process may open.",
                    each(
                        f"{series('process_open_fds', of=OF_INSTANCE)}"
                        f" / {series('process_max_fds', of=OF_INSTANCE)}"
                    ),
                    unit=Unit.SHARE,
                    limit=0.8,
                ),
                lines(
                    "Connections",
                    "Open ones of a gRPC port.",
                    Query(
                        f"sum by (instance, port) ({series('epikv_connections', of=OF_INSTANCE)})",
                        "{{instance}} {{port}}",
                    ),
                ),
                lines(
                    "Refused connections",
                    "A second, by reason.",
                    Query(
                        rates(
                            "epikv_connections_refused_total", by="instance, reason", of=OF_INSTANCE
                        ),
                        "{{instance}} {{reason}}",
                    ),
                    unit=Unit.PER_SECOND,
                ),
                lines("Threads", "Of the process.", gauge("process_threads")),
                lines(
                    "Uptime",
                    "Since the process began.",
                    each(f"time() - {series('process_start_time_seconds', of=OF_INSTANCE)}"),
                    unit=Unit.SECONDS,
                ),
                lines(
                    "Since the newest step",
                    "An engine that nobody asks for anything makes no steps.",
                    Query(
                        f"time() - {series('epikv_engine_last_step_timestamp_seconds', of=OF_INSTANCE)}",
                        "{{instance}} {{model}}",
                    ),
                    unit=Unit.SECONDS,
                ),
                lines(
                    "What they do",
                    "Each instance is 1 in one of these.",
                    Query(
                        f"sum by (state) ({series('epikv_lifecycle_state', of=OF_INSTANCE)})",
                        "{{state}}",
                    ),
                    stacked=True,
                ),
                lines(
                    "Loading a model",
                    "How long each model took, with measuring kernels and warming up.",
                    Query(
                        series("epikv_model_load_seconds", of=OF_INSTANCE), "{{instance}} {{model}}"
                    ),
                    unit=Unit.SECONDS,
                ),
                lines(
                    "Lines missing from the access log, tokens files refused",
                    "Since the start.",
                    Query(
                        f"sum({series('epikv_access_log_dropped_total', of=OF_INSTANCE)})", "lines"
                    ),
                    Query(
                        f"sum({series('epikv_auth_reload_failures_total', of=OF_INSTANCE)})",
                        "files",
                    ),
                    limit=1,
                ),
                lines(
                    "Series",
                    "The most that an instance's page can hold, with the models and policies in use.",
                    gauge("epikv_metrics_series"),
                ),
            ),
        ),
        Row(
            "Gateways",
            (
                lines(
                    "HTTP requests",
                    "A second, by status. 499: the client had gone.",
                    Query(
                        rates("epikv_gateway_requests_total", by="status", of=OF_GATEWAY),
                        "{{status}}",
                    ),
                    unit=Unit.REQUESTS_PER_SECOND,
                    stacked=True,
                ),
                lines(
                    "First byte, p95",
                    "From a request's first byte to its answer's, by route.",
                    Query(
                        quantile(
                            0.95, "epikv_gateway_first_byte_seconds", by="route", of=OF_GATEWAY
                        ),
                        "{{route}}",
                    ),
                    unit=Unit.SECONDS,
                ),
                lines(
                    "In flight",
                    "Requests that have begun and not ended.",
                    Query(
                        f"sum by (instance) ({series('epikv_gateway_requests_in_flight', of=OF_GATEWAY)})",
                        NAMED,
                    ),
                ),
            ),
        ),
    ),
)

"""What the KV pool holds, what eviction takes out of it, and what it costs."""

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


def gauge(name: str, by: str, *matchers: str, of: str | None = None) -> Query:
    """A gauge, added up."""
    selected = series(name, *matchers) if of is None else series(name, *matchers, of=of)
    return Query(total(by, selected), f"{{{{{by}}}}}" if by else name.removeprefix("epikv_"))


KV = Dashboard(
    "epikv-kv",
    "epikv / KV and eviction",
    "What the KV pool holds, what eviction takes out of it, and what it costs.",
    variables=(INSTANCE, MODEL),
    rows=(
        Row(
            "Now",
            (
                number(
                    "Used",
                    "Used share of the KV pools.",
                    f"max({series('epikv_kv_usage_ratio')})",
                    unit=Unit.SHARE,
                ),
                number(
                    "Reserved",
                    "Share that running requests have reserved, used or not.",
                    f"max({series('epikv_kv_reserved_ratio')})",
                    unit=Unit.SHARE,
                    limit=0.95,
                ),
                number(
                    "Waiting for KV",
                    "Requests behind one that waits for room in the pool.",
                    "sum(" + series("epikv_requests_waiting", 'reason="kv"') + ")",
                    limit=1,
                ),
                number(
                    "Evicted tokens",
                    "In a second.",
                    rates("epikv_kv_tokens_evicted_total"),
                    unit=Unit.PER_SECOND,
                ),
                number(
                    "Steps' time for eviction",
                    "Share of the wall time of steps.",
                    share(
                        rates("epikv_step_seconds_total", 'stage="evict"'),
                        rates("epikv_step_seconds_total", 'stage!~"attention|taps"'),
                    ),
                    unit=Unit.SHARE,
                ),
                number(
                    "Budget overruns",
                    "Tokens held above reservations. More than 0 is a fault of epikvd.",
                    f"sum({series('epikv_kv_budget_overrun_tokens_total')})",
                    limit=1,
                ),
            ),
        ),
        Row(
            "Pool",
            (
                lines(
                    "Pool by use",
                    "used; reserved by running requests and not yet used; cached prefixes; free.",
                    gauge("epikv_kv_bytes", "state"),
                    unit=Unit.BYTES,
                    stacked=True,
                ),
                lines(
                    "Used and reserved",
                    "A reservation is what keeps others waiting. A wide gap: requests ask for more than they write.",
                    Query(f"avg({series('epikv_kv_usage_ratio')})", "used"),
                    Query(f"avg({series('epikv_kv_reserved_ratio')})", "reserved"),
                    unit=Unit.SHARE,
                    limit=0.95,
                ),
                lines(
                    "Most used, and the capacity",
                    "Since the start of each instance.",
                    gauge("epikv_kv_peak_used_bytes", ""),
                    gauge("epikv_kv_capacity_bytes", ""),
                    unit=Unit.BYTES,
                ),
                lines(
                    "Prompt tokens from the prefix cache",
                    "Tokens a second: asked for, and found.",
                    Query(rates("epikv_prefix_cache_queried_tokens_total"), "queried"),
                    Query(rates("epikv_prefix_cache_hit_tokens_total"), "hit"),
                    unit=Unit.PER_SECOND,
                ),
                lines(
                    "Rows moved to make room",
                    "Rows a second, so that a request's lanes fit in one place.",
                    Query(rates("epikv_kv_rows_moved_total"), "rows"),
                    unit=Unit.PER_SECOND,
                ),
                lines(
                    "Longest move",
                    "Since the start. All streams wait meanwhile.",
                    Query(
                        f"max by (model) ({series('epikv_kv_longest_move_seconds')})", "{{model}}"
                    ),
                    unit=Unit.SECONDS,
                ),
            ),
        ),
        Row(
            "Eviction",
            (
                lines(
                    "Evicted tokens",
                    "Entries divided by layers and KV heads, a second, by phase.",
                    Query(rates("epikv_kv_tokens_evicted_total", by="phase"), "{{phase}}"),
                    unit=Unit.PER_SECOND,
                ),
                lines(
                    "Rounds",
                    "Evictions that removed something, a second, by phase.",
                    Query(rates("epikv_kv_eviction_rounds_total", by="phase"), "{{phase}}"),
                    unit=Unit.PER_SECOND,
                ),
                lines(
                    "Time of a round",
                    "One request's round: its policy chooses victims, and they are removed.",
                    *(
                        Query(quantile(each, "epikv_kv_eviction_seconds"), name)
                        for each, name in ((0.5, "p50"), (0.99, "p99"))
                    ),
                    unit=Unit.SECONDS,
                ),
                lines(
                    "What a request keeps",
                    "Share of its cached tokens that it held at its end; half and a tenth of the requests keep less.",
                    *(
                        Query(quantile(each, "epikv_request_kv_kept_ratio"), name)
                        for each, name in ((0.1, "p10"), (0.5, "p50"))
                    ),
                    unit=Unit.SHARE,
                ),
                lines(
                    "Tokens of a request",
                    "Means: of the budget, the most that it held, and what it held at its end.",
                    *(
                        Query(mean(f"epikv_request_kv_{part}_tokens"), part)
                        for part in ("budget", "peak", "final")
                    ),
                ),
                lines(
                    "Attention lost",
                    "Share of the newest query's attention that went to what a round evicted.",
                    *(
                        Query(quantile(each, "epikv_evicted_attention_mass_ratio"), name)
                        for each, name in ((0.5, "p50"), (0.95, "p95"))
                    ),
                    unit=Unit.SHARE,
                ),
            ),
        ),
        Row(
            "Tier, packets and sessions",
            (
                lines(
                    "Tier",
                    "Bytes below the KV pool; none where kv_tier_bytes is 0.",
                    gauge("epikv_tier_bytes", "state"),
                    unit=Unit.BYTES,
                    stacked=True,
                ),
                lines(
                    "Entries of the tier, and steps in doubt",
                    "Of requests that have ended, a second. forgotten: the tier was full. In doubt a step runs twice.",
                    Query(rates("epikv_tier_entries_total", by="event"), "{{event}}"),
                    Query(rates("epikv_doubted_steps_total"), "steps in doubt"),
                    unit=Unit.PER_SECOND,
                ),
                lines(
                    "Time for the tier, and failures",
                    "Seconds of moving entries in a second; failed requests in a second.",
                    Query(rates("epikv_tier_seconds_total"), "seconds"),
                    Query(rates("epikv_tier_failures_total"), "failures"),
                ),
                lines(
                    "Packets and sessions",
                    "How many are kept.",
                    gauge("epikv_packets", "", of=OF_INSTANCE),
                    gauge("epikv_sessions", "", of=OF_INSTANCE),
                ),
                lines(
                    "Bytes of packets and sessions",
                    "In memory, and in packet_dir.",
                    *(
                        gauge(f"epikv_{name}_bytes", "", of=OF_INSTANCE)
                        for name in ("packet_memory", "packet_folder", "session")
                    ),
                    unit=Unit.BYTES,
                ),
                lines(
                    "Prompt tokens from packets",
                    "A second.",
                    Query(rates("epikv_packet_prompt_tokens_total", by="model"), "{{model}}"),
                    unit=Unit.PER_SECOND,
                ),
                lines(
                    "Requests of sessions",
                    "By what they began with. anew: a prompt that was evicted to the budget again.",
                    Query(
                        rates("epikv_session_requests_total", by="start", of=OF_INSTANCE),
                        "{{start}}",
                    ),
                    unit=Unit.REQUESTS_PER_SECOND,
                ),
                lines(
                    "Updates of sessions",
                    "A second, by result.",
                    Query(
                        rates("epikv_session_updates_total", by="result", of=OF_INSTANCE),
                        "{{result}}",
                    ),
                    unit=Unit.PER_SECOND,
                ),
            ),
        ),
        Row(
            "Memory",
            (
                lines(
                    "Tensors",
                    "weights and kv_pool are there for good; scratch is that of the largest step.",
                    gauge("epikv_torch_memory_bytes", "kind"),
                    unit=Unit.BYTES,
                    stacked=True,
                ),
                lines(
                    "Taken as it is needed",
                    "What was used of the pool, attention rows, constraints.",
                    gauge("epikv_resident_memory_bytes", "kind"),
                    unit=Unit.BYTES,
                    stacked=True,
                ),
                lines(
                    "Process",
                    "Resident memory of each instance.",
                    gauge("process_resident_memory_bytes", "instance", of=OF_INSTANCE),
                    unit=Unit.BYTES,
                ),
            ),
        ),
    ),
)

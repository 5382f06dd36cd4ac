"""Policies beside each other, on the requests that chose them."""

from epikv_lab.dashboards.panels import (
    INSTANCE,
    MODEL,
    Dashboard,
    Query,
    Row,
    Unit,
    Variable,
    lines,
    table,
)
from epikv_lab.dashboards.promql import OF_MODEL, mean, quantile, rates, series, share
from epikv_lab.dashboards.serving import DURATION, ENDED_WELL, FIRST_TOKEN, PER_TOKEN

POLICY = Variable(
    "policy",
    'label_values(epikv_requests_finished_total{instance=~"$instance", model=~"$model"}, policy)',
)
OF = f'{OF_MODEL}, policy=~"$policy"'
NAMED = "{{policy}}"


def by_policy(expression: str) -> Query:
    return Query(expression, NAMED)


POLICIES = Dashboard(
    "epikv-policies",
    "epikv / Policies",
    "Policies beside each other, on the requests that chose them. Requests differ, so this ranks nothing: "
    "experiments and `epikv eval` do.",
    variables=(INSTANCE, MODEL, POLICY),
    rows=(
        Row(
            "Use",
            (
                lines(
                    "Requests",
                    "Ended requests a second.",
                    by_policy(rates("epikv_requests_finished_total", by="policy", of=OF)),
                    unit=Unit.REQUESTS_PER_SECOND,
                    stacked=True,
                ),
                lines(
                    "Output tokens",
                    "Of ended requests, a second.",
                    by_policy(rates("epikv_tokens_total", 'kind="output"', by="policy", of=OF)),
                    unit=Unit.PER_SECOND,
                    stacked=True,
                ),
                table(
                    "Requests in the time shown",
                    "By policy and how they ended.",
                    "round(sum by (policy, reason) (increase("
                    f"{series('epikv_requests_finished_total', of=OF)}[$__range]))) > 0",
                ),
            ),
        ),
        Row(
            "What users wait for",
            (
                lines(
                    "Time to first token, p95",
                    "A policy may look at a whole prompt before its first token.",
                    by_policy(quantile(0.95, FIRST_TOKEN, by="policy", of=OF)),
                    unit=Unit.SECONDS,
                ),
                lines(
                    "Queue, p95",
                    "From arrival to admission: a larger budget waits longer for room in the KV pool.",
                    by_policy(quantile(0.95, "epikv_request_queue_seconds", by="policy", of=OF)),
                    unit=Unit.SECONDS,
                ),
                lines(
                    "Between tokens, p99",
                    "Of consecutive tokens of a stream: rounds of eviction are in it.",
                    by_policy(
                        quantile(0.99, "epikv_inter_token_latency_seconds", by="policy", of=OF)
                    ),
                    unit=Unit.SECONDS,
                ),
                lines(
                    "Time per output token, p50",
                    "Requests share their steps, so a slow policy is also in the figures of others.",
                    by_policy(quantile(0.5, PER_TOKEN, by="policy", of=OF)),
                    unit=Unit.SECONDS,
                ),
                lines(
                    "Whole request, p95",
                    "Of requests that ended well.",
                    by_policy(quantile(0.95, DURATION, ENDED_WELL, by="policy", of=OF)),
                    unit=Unit.SECONDS,
                ),
            ),
        ),
        Row(
            "What they keep",
            (
                lines(
                    "Kept share, p50",
                    "Of a request's cached tokens, what it held at its end.",
                    by_policy(quantile(0.5, "epikv_request_kv_kept_ratio", by="policy", of=OF)),
                    unit=Unit.SHARE,
                ),
                lines(
                    "Budget, mean",
                    "Tokens that requests allowed themselves.",
                    by_policy(mean("epikv_request_kv_budget_tokens", by="policy", of=OF)),
                ),
                lines(
                    "Most tokens held, p95",
                    "Of a request.",
                    by_policy(quantile(0.95, "epikv_request_kv_peak_tokens", by="policy", of=OF)),
                ),
                lines(
                    "Attention lost, p50",
                    "Share of the newest query's attention that went to what a round evicted.",
                    by_policy(
                        quantile(0.5, "epikv_evicted_attention_mass_ratio", by="policy", of=OF)
                    ),
                    unit=Unit.SHARE,
                ),
                lines(
                    "Attention lost, p95",
                    "What the policy loses at worst is told better by this than by the median.",
                    by_policy(
                        quantile(0.95, "epikv_evicted_attention_mass_ratio", by="policy", of=OF)
                    ),
                    unit=Unit.SHARE,
                ),
                lines(
                    "Evicted tokens",
                    "A second.",
                    by_policy(rates("epikv_kv_tokens_evicted_total", by="policy", of=OF)),
                    unit=Unit.PER_SECOND,
                ),
            ),
        ),
        Row(
            "What they cost, and what went wrong",
            (
                lines(
                    "Time of a round, p95",
                    "The policy chooses victims, and they are removed.",
                    by_policy(quantile(0.95, "epikv_kv_eviction_seconds", by="policy", of=OF)),
                    unit=Unit.SECONDS,
                ),
                lines(
                    "Time of rounds",
                    "Seconds in a second.",
                    by_policy(rates("epikv_kv_eviction_seconds_sum", by="policy", of=OF)),
                    unit=Unit.SECONDS,
                    stacked=True,
                ),
                lines(
                    "Rounds",
                    "A second.",
                    by_policy(rates("epikv_kv_eviction_rounds_total", by="policy", of=OF)),
                    unit=Unit.PER_SECOND,
                ),
                lines(
                    "Share that ended badly",
                    "Deadlines, errors, slow readers, drains; cancelled requests are not counted as bad.",
                    by_policy(
                        share(
                            rates(
                                "epikv_requests_finished_total",
                                'reason=~"deadline.*|error|slow_reader|drained"',
                                by="policy",
                                of=OF,
                            ),
                            rates("epikv_requests_finished_total", by="policy", of=OF),
                        )
                    ),
                    unit=Unit.SHARE,
                ),
                lines(
                    "Errors of policies",
                    "Requests that failed because their policy did, since the start. Any is a fault.",
                    Query(
                        f"sum by (policy, kind) ({series('epikv_policy_errors_total', of=OF)})",
                        "{{policy}} {{kind}}",
                    ),
                    limit=1,
                ),
                lines(
                    "Counted as other",
                    "Requests a second whose policy or arm has no series of its own: raise metrics_max_series.",
                    Query(rates("epikv_metrics_label_overflow_total", by="model"), "{{model}}"),
                    unit=Unit.REQUESTS_PER_SECOND,
                ),
            ),
        ),
    ),
)

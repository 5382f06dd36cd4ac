"""Whether experiments run as they should, and what their arms do."""

from epikv_lab.dashboards.panels import (
    INSTANCE,
    Dashboard,
    Query,
    Row,
    Unit,
    Variable,
    lines,
    number,
)
from epikv_lab.dashboards.promql import OF_INSTANCE, mean, quantile, rates, series, share
from epikv_lab.dashboards.serving import FIRST_TOKEN, PER_TOKEN

EXPERIMENT = Variable(
    "experiment",
    'label_values(epikv_experiment_srm_p_value{instance=~"$instance"}, experiment)',
)
OF = f'{OF_INSTANCE}, experiment=~"$experiment"'
# Of requests, whose arm is "EXPERIMENT/ARM", with commas between several.
OF_REQUESTS = f'{OF_INSTANCE}, arm=~"(.*,)?($experiment)/.*"'


def by_arm(expression: str) -> Query:
    return Query(expression, "{{arm}}")


def of_arm(expression: str) -> Query:
    return Query(expression, "{{experiment}}/{{arm}}")


def shadow(part: str, by: str = "experiment, arm") -> str:
    return rates(f"epikv_experiment_shadow_{part}_total", by=by, of=OF)


EXPERIMENTS = Dashboard(
    "epikv-experiments",
    "epikv / Experiments",
    "Whether experiments run as they should, and what their arms do. Differences are to be read in their "
    "reports: here nothing is by unit, and looking again and again finds differences that there are not.",
    variables=(INSTANCE, EXPERIMENT),
    rows=(
        Row(
            "Now",
            (
                number(
                    "Running",
                    "Experiments. Instances with one store run the same.",
                    f"max({series('epikv_experiments_running', of=OF_INSTANCE)})",
                ),
                number(
                    "Least p-value of a split",
                    "Below 0.001 units of one arm are lost or kept back, and the report is blocked.",
                    f"min({series('epikv_experiment_srm_p_value', of=OF)})",
                    limit=0.001,
                    low_is_bad=True,
                ),
                number(
                    "Guardrails breached",
                    "Each stops its experiment; the series go ten minutes later.",
                    f"sum({series('epikv_experiment_guardrail_breaches_total', of=OF)}) or vector(0)",
                    limit=1,
                ),
                number(
                    "Outcomes",
                    "That count, a second.",
                    rates("epikv_experiment_outcomes_total", of=OF),
                    unit=Unit.PER_SECOND,
                ),
                number(
                    "Spool",
                    "Bytes of records that wait for the store.",
                    f"sum({series('epikv_experiment_spool_bytes', of=OF_INSTANCE)})",
                    unit=Unit.BYTES,
                    limit=1,
                ),
                number(
                    "Lost records",
                    "That neither store nor spool could take, since the start.",
                    "sum("
                    + series(
                        "epikv_experiment_records_total", 'fate=~"dropped|refused"', of=OF_INSTANCE
                    )
                    + ")",
                    limit=1,
                ),
            ),
        ),
        Row(
            "Arms",
            (
                lines(
                    "Requests by arm",
                    "What dealt them is in the legend: hash, wash_out, forced; excluded ones have no arm.",
                    Query(
                        rates(
                            "epikv_experiment_assignments_total",
                            by="experiment, arm, source",
                            of=OF,
                        ),
                        "{{experiment}}/{{arm}} {{source}}",
                    ),
                    unit=Unit.REQUESTS_PER_SECOND,
                    stacked=True,
                ),
                lines(
                    "Exposures",
                    "Requests in which eviction could act under any arm.",
                    of_arm(rates("epikv_experiment_exposures_total", by="experiment, arm", of=OF)),
                    unit=Unit.REQUESTS_PER_SECOND,
                ),
                lines(
                    "p-value of the split",
                    "Of units by arm against the weights. Below 0.001 something loses units of one arm.",
                    Query(
                        f"min by (experiment) ({series('epikv_experiment_srm_p_value', of=OF)})",
                        "{{experiment}}",
                    ),
                    limit=0.001,
                    low_is_bad=True,
                    logarithmic=True,
                ),
                lines(
                    "Outcomes",
                    "A second, by arm and metric.",
                    Query(
                        rates(
                            "epikv_experiment_outcomes_total", by="experiment, arm, metric", of=OF
                        ),
                        "{{experiment}}/{{arm}} {{metric}}",
                    ),
                    unit=Unit.PER_SECOND,
                ),
                lines(
                    "Mean outcome",
                    "Units that ask often weigh more here than in a report.",
                    Query(
                        mean("epikv_experiment_outcome_value", by="experiment, arm, metric", of=OF),
                        "{{experiment}}/{{arm}} {{metric}}",
                    ),
                ),
                lines(
                    "Kept share, p50",
                    "Of a request's cached tokens, what it held at its end.",
                    by_arm(quantile(0.5, "epikv_request_kv_kept_ratio", by="arm", of=OF_REQUESTS)),
                    unit=Unit.SHARE,
                ),
                lines(
                    "Time to first token, p95",
                    "Requests of all arms share their steps.",
                    by_arm(quantile(0.95, FIRST_TOKEN, by="arm", of=OF_REQUESTS)),
                    unit=Unit.SECONDS,
                ),
                lines(
                    "Time per output token, p50",
                    "Requests of all arms share their steps.",
                    by_arm(quantile(0.5, PER_TOKEN, by="arm", of=OF_REQUESTS)),
                    unit=Unit.SECONDS,
                ),
                lines(
                    "Requests by how they ended",
                    "A second, by arm.",
                    Query(
                        rates("epikv_requests_finished_total", by="arm, reason", of=OF_REQUESTS),
                        "{{arm}} {{reason}}",
                    ),
                    unit=Unit.REQUESTS_PER_SECOND,
                ),
            ),
        ),
        Row(
            "Replays beside the full cache",
            (
                lines(
                    "Same likeliest token",
                    "Share of replayed output tokens for which arm and full cache agree.",
                    of_arm(share(shadow("agreed_tokens"), shadow("tokens"))),
                    unit=Unit.SHARE,
                ),
                lines(
                    "Divergence",
                    "Nats a token, of the arm's next-token distribution from that of the full cache.",
                    of_arm(share(shadow("kl_nats"), shadow("tokens"))),
                ),
                lines(
                    "Replays",
                    "A second, by what became of them.",
                    Query(shadow("requests", by="outcome"), "{{outcome}}"),
                    unit=Unit.REQUESTS_PER_SECOND,
                    stacked=True,
                ),
                lines(
                    "Pairs",
                    "Requests that both arms answered, a second, by what became of the answers.",
                    Query(
                        rates("epikv_experiment_pairs_total", by="outcome", of=OF), "{{outcome}}"
                    ),
                    unit=Unit.REQUESTS_PER_SECOND,
                    stacked=True,
                ),
                lines(
                    "Time for replays",
                    "Seconds in a second, of engines that had nothing else to do.",
                    Query(
                        rates("epikv_experiment_shadow_seconds_total", of=OF_INSTANCE), "seconds"
                    ),
                    unit=Unit.SECONDS,
                ),
                lines(
                    "Interruptions",
                    "Replays that gave way to a live request, a second.",
                    Query(
                        rates("epikv_experiment_shadow_interruptions_total", of=OF_INSTANCE),
                        "interruptions",
                    ),
                    unit=Unit.PER_SECOND,
                ),
                lines(
                    "Held for a replay",
                    "Sampled requests in memory.",
                    Query(
                        f"sum({series('epikv_experiment_shadow_waiting_requests', of=OF_INSTANCE)})",
                        "requests",
                    ),
                ),
            ),
        ),
        Row(
            "Records",
            (
                lines(
                    "Records by fate",
                    "A second. spooled: the store was away; dropped and refused: the spool was full, too.",
                    Query(
                        rates("epikv_experiment_records_total", by="fate", of=OF_INSTANCE),
                        "{{fate}}",
                    ),
                    unit=Unit.PER_SECOND,
                    stacked=True,
                ),
                lines(
                    "Spool",
                    "Bytes of records that wait for the store.",
                    Query(
                        f"sum by (instance) ({series('epikv_experiment_spool_bytes', of=OF_INSTANCE)})",
                        "{{instance}}",
                    ),
                    unit=Unit.BYTES,
                ),
                lines(
                    "Store away",
                    "Share of the time.",
                    Query(
                        rates(
                            "epikv_experiment_store_outage_seconds_total",
                            by="instance",
                            of=OF_INSTANCE,
                        ),
                        "{{instance}}",
                    ),
                    unit=Unit.SHARE,
                ),
                lines(
                    "Outcomes that count for nothing",
                    "A second, by reason. waiting: not yet.",
                    Query(
                        rates("epikv_outcomes_orphaned_total", by="reason", of=OF_INSTANCE),
                        "{{reason}}",
                    ),
                    unit=Unit.PER_SECOND,
                ),
                lines(
                    "Damaged spool",
                    "Bytes that could not be read, since the start.",
                    Query(
                        "sum by (instance) ("
                        + series("epikv_experiment_spool_damaged_bytes_total", of=OF_INSTANCE)
                        + ")",
                        "{{instance}}",
                    ),
                    unit=Unit.BYTES,
                    limit=1,
                ),
            ),
        ),
    ),
)

"""How many replicas there should be, by what their daemons say."""

from typing import Any

from epikv.scrape import Page

WAITING = "waiting"
RESERVED = "reserved"
_ROOM = 0.8  # of a pool that is not to be exceeded for long


def stats(page: Page) -> dict[str, float]:
    """Of one daemon, from its /metrics: how many wait, and the share of its KV pool that is reserved."""
    return {
        WAITING: page.total("epikv_load_waiting_requests"),
        RESERVED: page.total("epikv_kv_reserved_ratio"),
    }


class ByWaiting:
    """Ray's autoscaling policy: as many replicas as what runs fills, and one more for each
    `waiting_per_replica` that wait. Ray bounds and delays it as its AutoscalingConfig says."""

    def __init__(self, waiting_per_replica: float = 5) -> None:
        self._waiting_per_replica = waiting_per_replica

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        told = context.aggregated_metrics or {}
        if not told.get(RESERVED):  # nobody has said anything yet
            return context.target_num_replicas, {}
        waiting = sum(told.get(WAITING, {}).values()) + (context.total_queued_requests or 0)
        filled = sum(told[RESERVED].values()) / _ROOM
        return filled + waiting / self._waiting_per_replica, {}

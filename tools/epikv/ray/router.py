"""Which replica of Ray Serve gets a request: what begins alike goes to one."""

import pickle
import random
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from epikv.prefix import HEADER
from epikv.ray.affinity import chosen


def prefix_of(request: PendingRequest) -> str:
    """By the header; else by Ray's own session id. Of what comes by HTTP a router has no body."""
    metadata = request.metadata
    if metadata.grpc_context is not None:
        found = dict(metadata.grpc_context.invocation_metadata()).get(HEADER, "")
    elif metadata.is_http_request:
        headers = pickle.loads(request.args[0]).asgi_scope["headers"]
        found = dict(headers).get(HEADER.encode(), b"").decode("latin-1")
    else:
        found = ""
    return str(found or metadata.session_id)


class PrefixRouter(RequestRouter):
    """The first of a prefix's replicas that has at most `balance_factor` times its share of the open requests,
    or one. Without a prefix, or where that one takes no more, the less loaded of two at random."""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self._balance_factor = 1.5

    def initialize_state(self, balance_factor: float = 1.5) -> None:
        self._balance_factor = balance_factor

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        two = random.sample(candidate_replicas, min(2, len(candidate_replicas)))
        if pending_request is None:
            return [two]
        pending_request.routing_context.should_backoff = True
        prefix = prefix_of(pending_request)
        if not prefix or not candidate_replicas:
            return [two]
        by_name = {each.replica_id.unique_id: each for each in candidate_replicas}
        known = self.replica_queue_len_cache  # what replicas said last, and what went there since
        loads = {name: known.get(each.replica_id) or 0 for name, each in by_name.items()}
        return [[by_name[chosen(prefix, loads, self._balance_factor)]], two]

"""A replica of Ray Serve, and its daemon."""

import asyncio
import os
import sys
import time
from typing import Any

from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc
from starlette.applications import Starlette

from epikv.connection import CLIENT_OPTIONS, connect_async
from epikv.gateway.app import create_app
from epikv.gateway.settings import Settings as GatewaySettings
from epikv.ray import scaling
from epikv.ray.process import Process
from epikv.ray.services import Answer, Calls, Metadata, served
from epikv.ray.settings import Settings
from epikv.ray.spools import Spool
from epikv.scrape import scrape

_HEALTH_SECONDS = 5.0
_TELL_SECONDS = 0.2  # in which clients are told why their streams have ended
_ASK_SECONDS = 5.0
_END_SECONDS = 10.0


def _gateway(daemon: str) -> GatewaySettings:
    """As `epikv gateway` has them by itself. Ray listens, and waits for streams."""
    return GatewaySettings(
        listen="127.0.0.1:0",
        servers=[daemon],
        workers=1,
        tls_certificate=None,
        tls_key=None,
        max_body_bytes=4 << 20,
        body_seconds=30,
        max_requests=1024,
        drain_seconds=0,
        stall_seconds=60,
        origins=(),
    )


def _end_at_once() -> None:
    """A replica without its daemon: so Ray sends nothing here any more, and starts another."""
    time.sleep(_TELL_SECONDS)
    print("epikvd has ended, and this replica with it", file=sys.stderr, flush=True)
    os._exit(1)


@served
class Replica:
    """gRPC by the methods that `served` adds, HTTP by the gateway's application."""

    def __init__(self, settings: dict[str, Any]) -> None:
        told = Settings(**settings)
        flags = told.daemon_flags()
        if told.experiment_spool is not None:
            self._spool = Spool(told.experiment_spool)
            flags = [f"--experiment_spool={self._spool.path}", *flags]
        self._daemon = Process(flags, told.binary, _end_at_once)
        options = [*CLIENT_OPTIONS, ("grpc.max_send_message_length", -1)]
        self._channel = connect_async(self._daemon.grpc, options)
        self._health = health_pb2_grpc.HealthStub(self._channel)
        self.calls = Calls(self._channel)

    def __serve_build_asgi_app__(self) -> Starlette:
        """For Ray, once the replica is made."""
        return create_app(_gateway(self._daemon.grpc))

    async def check_health(self) -> None:
        """For Ray, which replaces the replica when this raises."""
        request = health_pb2.HealthCheckRequest(service="liveness")
        reply = await self._health.Check(request, timeout=_HEALTH_SECONDS)
        if reply.status != health_pb2.HealthCheckResponse.SERVING:
            raise RuntimeError("a step of epikvd hangs")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """For Ray, some times a second."""
        return scaling.stats(await asyncio.to_thread(scrape, self._daemon.metrics))

    async def on_all(self, path: str, request: Message, metadata: Metadata) -> list[Answer]:
        """What each replica's daemon answers, of those that can be asked."""
        from ray import serve

        here = serve.get_replica_context().replica_id.deployment_id
        handle = serve.get_deployment_handle(here.name, here.app_name)
        asked = handle.broadcast("ask", path, request, metadata)
        answers = await asked.results_async(timeout_s=_ASK_SECONDS, return_exceptions=True)
        return [each for each in answers if isinstance(each, Answer)]

    async def ask(self, path: str, request: Message, metadata: Metadata) -> Answer:
        """What this replica's daemon answers."""
        return await self.calls.ask(path, request, metadata)

    def addresses(self) -> dict[str, str]:
        """Where its daemon is, for who watches: `handle.broadcast("addresses").results()`."""
        import ray

        node = ray.get_runtime_context().get_node_id()
        return {
            "node": node,
            "grpc": self._daemon.grpc,
            "metrics": self._daemon.metrics,
            "pid": str(self._daemon.pid),
        }

    def __del__(self) -> None:
        """For Ray, once nothing of this replica runs, or graceful_shutdown_timeout_s has passed."""
        if daemon := getattr(self, "_daemon", None):
            daemon.stop(_END_SECONDS)

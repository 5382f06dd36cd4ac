"""Replicas of epikv.ray on a Ray cluster of one node, until standard input ends.

    PYTHONPATH=tools PYTHON_WITH_RAY ray_replicas.py SETTINGS

SETTINGS: JSON of epikv.ray.Settings. Prints where Ray's gRPC proxy listens. Ray keeps what it needs in $RAY_TMPDIR.
"""

import json
import os
import socket
import sys
from contextlib import ExitStack

import ray
from epikv.ray import Settings, app
from epikv.ray.services import SERVICER_FUNCTIONS
from ray import serve
from ray.serve.config import HTTPOptions, ProxyLocation, gRPCOptions


def main() -> None:
    settings = Settings(**json.loads(sys.argv[1]))
    told = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Ray writes there, too
    with ExitStack() as held:
        sockets = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        http, grpc = (each.getsockname()[1] for each in sockets)
    ray.init(
        num_cpus=settings.replicas + 1,
        object_store_memory=80 << 20,
        include_dashboard=False,
        log_to_driver=False,
    )
    serve.start(
        proxy_location=ProxyLocation.HeadOnly,
        http_options=HTTPOptions(host="127.0.0.1", port=http),
        grpc_options=gRPCOptions(port=grpc, grpc_servicer_functions=SERVICER_FUNCTIONS),
    )
    serve.run(app(settings))
    print(f"127.0.0.1:{grpc}", file=told, flush=True)
    sys.stdin.read()
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()

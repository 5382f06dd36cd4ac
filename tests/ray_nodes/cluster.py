"""A Ray cluster of several nodes on this machine, for tests, until its stdin ends.

    RAY_TMPDIR=FOLDER build/ray/bin/python tests/ray_nodes/cluster.py SETTINGS

FOLDER: where Ray keeps its sockets and logs; it has a short path. SETTINGS: JSON of epikv.ray.Settings, in place of
`args` in deploy/ray/serve.yaml; null: it serves nothing. The first line of stdout is JSON of where it listens. Then
each line of stdin is a command, which a line of JSON answers:

    replicas        where each replica's daemon is
    wanted          how many replicas run or start
    kill NODE       kills the processes of a node
    add             adds a node; its id
    change JSON     replaces what it serves, by other settings; null once it has begun
    end             ends Ray Serve in order
"""

import json
import os
import socket
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import ray
import yaml
from epikv.ray import Settings, app
from ray import serve
from ray.cluster_utils import Cluster
from ray.serve.config import HTTPOptions, ProxyLocation, gRPCOptions

FILE = Path(__file__).parents[2] / "deploy" / "ray" / "serve.yaml"
NAME = "epikv"


def free_ports(count: int) -> list[int]:
    with ExitStack() as held:
        sockets = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]


def add_node(cluster: Cluster) -> Any:
    """The first is the head, which cannot be killed."""
    return cluster.add_node(num_cpus=1, object_store_memory=80 << 20, include_dashboard=False)


def main() -> None:
    settings = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Ray writes there, too
    cluster = Cluster()
    nodes = {node.node_id: node for node in (add_node(cluster), add_node(cluster))}
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    told: dict[str, Any] = {"ray": cluster.address, "nodes": list(nodes)}
    if settings is not None:
        http, grpc = free_ports(2)
        file = yaml.safe_load(FILE.read_text())
        serve.start(
            proxy_location=ProxyLocation.HeadOnly,  # one machine has one of each port
            http_options=HTTPOptions(**file["http_options"] | {"port": http}),
            grpc_options=gRPCOptions(**file["grpc_options"] | {"port": grpc}),
        )
        serve.run(app(Settings(**settings)), name=NAME)
        told |= {"http": f"127.0.0.1:{http}", "grpc": f"127.0.0.1:{grpc}"}
    print(json.dumps(told), file=answers, flush=True)
    for line in sys.stdin:
        match line.split():
            case ["wanted"]:
                states = serve.status().applications[NAME].deployments["epikvd"].replica_states
                answer = sum(states.values())
            case ["kill", node]:
                cluster.remove_node(nodes.pop(node), allow_graceful=False)
                answer: Any = None
            case ["add"]:
                node = add_node(cluster)
                nodes[node.node_id] = node
                answer = node.node_id
            case ["replicas"]:
                asked = serve.get_app_handle(NAME).broadcast("addresses")
                told = asked.results(return_exceptions=True)  # of one that is just lost, an error
                answer = [each for each in told if isinstance(each, dict)]
            case ["change", text]:
                serve.run(app(Settings(**json.loads(text))), name=NAME, blocking=False)
                answer = None
            case ["end"]:
                serve.shutdown()
                answer = None
            case other:
                raise ValueError(other)
        print(json.dumps(answer), file=answers, flush=True)
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()

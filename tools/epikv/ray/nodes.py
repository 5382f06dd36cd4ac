"""A daemon on every node of a Ray cluster, for as long as something is asked of them."""

import hashlib
import secrets
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from epikv.ray.process import Process
from epikv.testing import DaemonError

_START_SECONDS = 300.0  # in which a node has CPUs free, and its daemon serves


@dataclass(frozen=True)
class Started:
    """Daemons of one model."""

    addresses: list[str]
    token: str  # that they ask for


class _Node:
    """Of one node; the daemon ends with this actor."""

    def __init__(self, flags: Sequence[str], tokens: str, binary: str) -> None:
        with tempfile.TemporaryDirectory(prefix="epikv-") as folder:
            file = Path(folder) / "tokens"
            file.write_text(tokens)
            # The daemon looks for another file now and then, and keeps what it has while there is none.
            own = [f"--listen={ray.util.get_node_ip_address()}:0", f"--auth_tokens_file={file}"]
            self._daemon = Process([*own, *flags], binary)

    def address(self) -> str:
        return self._daemon.grpc


@contextmanager
def daemons(
    address: str, model: Path, flags: Sequence[str] = (), binary: Path | str = ""
) -> Iterator[Started]:
    """address: of the cluster, or `auto`. model, and binary if it is given: paths on every node. Each daemon has all
    CPUs of its node. Nodes whose daemon does not start are left out. Raises DaemonError when none does."""
    digest = hashlib.sha256(model.read_bytes()).hexdigest()
    token = f"epikv-{secrets.token_urlsafe(32)}"
    tokens = f"user ray {hashlib.sha256(token.encode()).hexdigest()}\n"
    all_flags = [f"--model={model.resolve()}", f"--model_digests=sha256:{digest}"]
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise DaemonError(f"no Ray cluster at '{address}': {error}") from error
    try:
        actors = {}
        for node in ray.nodes():
            num_cpus = int(node["Resources"].get("CPU", 0))
            if node["Alive"] and num_cpus > 0:
                where = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
                actor = ray.remote(_Node).options(num_cpus=num_cpus, scheduling_strategy=where)
                threads = f"--threads={num_cpus}"
                name = f"{node['NodeManagerHostname']} ({node['NodeID'][:8]})"
                actors[name] = actor.remote([*all_flags, threads, *flags], tokens, str(binary))
        yield Started(_addresses(actors), token)
        for actor in actors.values():
            ray.kill(actor)
    finally:
        ray.shutdown()


def _addresses(actors: dict[str, Any]) -> list[str]:
    asked = {name: actor.address.remote() for name, actor in actors.items()}
    ray.wait(list(asked.values()), num_returns=len(asked), timeout=_START_SECONDS)
    found, wrong = [], []
    for name, answer in asked.items():
        try:
            found.append(ray.get(answer, timeout=0))
        except (RayError, TimeoutError) as error:
            wrong.append(f"{name} has no daemon: {error}")
    if not found:
        raise DaemonError("\n".join(wrong) or "the Ray cluster has no node with a CPU")
    for each in wrong:
        print(each, file=sys.stderr)
    return found

"""What a deployment is told."""

import math
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Settings(BaseModel):
    """The arguments of `epikv.ray:app`, from a command line (model=PATH) or a file of Serve's."""

    model_config = ConfigDict(extra="forbid")

    # Of the model file, on every node: a shared folder, or a copy. What `epikv export` wrote.
    model: Path
    # Its SHA-256, in hexadecimal. The daemon refuses a file that has another.
    digest: str = Field(default="", pattern="^([0-9a-f]{64})?$")
    # More of the daemon's settings: --NAME=VALUE. They win over all that is said here.
    flags: list[str] = []
    # On each node: records of experiments wait there while their store (--experiment_store in `flags`) is away. Each
    # daemon has a folder of its own in it, which another one takes up when it has gone.
    experiment_spool: Path | None = None
    binary: str = ""  # the epikvd of a node. Empty: $EPIKVD, or the one on its PATH.

    replicas: int = Field(default=1, ge=1)
    # Fields of Ray's AutoscalingConfig, such as min_replicas and max_replicas, instead of `replicas`.
    autoscaling: dict[str, Any] | None = None
    waiting_per_replica: float = Field(default=5, gt=0)  # a replica more for each so many that wait
    # A prefix's replica is passed over while it has more than its share of the open calls, times this.
    balance_factor: float = Field(default=1.5, ge=1)
    max_ongoing_requests: int = Field(default=1024, ge=1)  # of a replica; Ray keeps those beyond

    num_cpus: float = Field(default=1, gt=0)  # of a replica, for Ray; and the daemon's threads
    actor: dict[str, Any] = {}  # more of Ray's actor options: num_gpus, resources, runtime_env
    drain_seconds: int = Field(default=60, ge=0)  # that streams may go on when a replica ends

    def daemon_flags(self) -> list[str]:
        verified = [f"--model_digests=sha256:{self.digest}"] if self.digest else []
        return [
            *verified,
            f"--model={self.model}",
            f"--threads={math.ceil(self.num_cpus)}",
            f"--drain_seconds={self.drain_seconds}",
            *self.flags,
        ]

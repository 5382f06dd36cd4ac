"""A daemon with the sample model, and a gateway in front of it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from epikv.testing import Daemon, Gateway
from openai import OpenAI


@pytest.fixture(scope="module")
def daemon(sample_model: Path) -> Iterator[Daemon]:
    with Daemon(sample_model, "--threads=1") as running:
        yield running


@pytest.fixture(scope="module")
def gateway(daemon: Daemon) -> Iterator[Gateway]:
    with Gateway(daemon.grpc) as running:
        yield running


@pytest.fixture(scope="module")
def openai(gateway: Gateway) -> Iterator[OpenAI]:
    """OpenAI's own client, told nothing but where."""
    with OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
        yield client

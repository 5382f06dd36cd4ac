"""The daemon that tests of constraints ask."""

from collections.abc import Iterator

import pytest
from byte_model import export_bytes
from epikv import Client
from epikv.testing import Daemon


@pytest.fixture(scope="module")
def talking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A byte-level model of random weights; "\\x03" ends it."""
    path = export_bytes(tmp_path_factory.mktemp("bytes"), "bytes", eos_token_id=3)
    flags = ("--threads=1", "--deterministic=true", "--prefill_chunk_tokens=16")
    with Daemon(path, *flags) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def talker(talking: Daemon) -> Iterator[Client]:
    with talking.client() as client:
        yield client

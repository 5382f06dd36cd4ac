"""A stand-in for the daemon."""

from collections.abc import Iterator

import fake_epikvd
import pytest
from epikv import Client


@pytest.fixture(scope="module")
def server() -> Iterator[fake_epikvd.Fake]:
    with fake_epikvd.serve() as fake:
        yield fake


@pytest.fixture
def fake(server: fake_epikvd.Fake) -> fake_epikvd.Fake:
    server.requests.clear()
    server.ended.clear()
    server.tokens.clear()
    return server


@pytest.fixture
def client(fake: fake_epikvd.Fake) -> Iterator[Client]:
    with Client(fake.address) as result:
        yield result

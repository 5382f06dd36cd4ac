"""The client's side of experiments: taking part, definitions, arms and outcomes."""

from collections.abc import Iterator

import fake_epikvd
import pytest
from click.testing import CliRunner, Result
from epikv import Client, Experiment
from epikv.cli import main
from epikv.v1 import experiment_pb2


@pytest.fixture(scope="module")
def server() -> Iterator[fake_epikvd.Fake]:
    with fake_epikvd.serve() as fake:
        yield fake


@pytest.fixture
def fake(server: fake_epikvd.Fake) -> fake_epikvd.Fake:
    server.requests.clear()
    return server


@pytest.fixture
def client(fake: fake_epikvd.Fake) -> Iterator[Client]:
    with Client(fake.address) as result:
        yield result


def run(*arguments: str, **kwargs: object) -> Result:
    return CliRunner().invoke(main, arguments, **kwargs)


def test_a_request_says_how_it_takes_part(client: Client, fake: fake_epikvd.Fake) -> None:
    experiment = Experiment(unit_id="ann", covariate=0.0)
    list(client.generate("x", experiment=experiment, labels={"tier": "free"}))
    client.generate_once("x", experiment=Experiment(force_arm="e/lean"))
    list(client.generate("x"))
    ann, forced, plain = fake.requests
    assert ann.experiment.unit_id == "ann" and ann.experiment.HasField("covariate")
    assert dict(ann.labels) == {"tier": "free"}
    assert forced.experiment == experiment_pb2.ExperimentContext(force_arm="e/lean")
    assert plain.experiment == experiment_pb2.ExperimentContext() and not plain.labels


def test_generate_has_options_for_it(fake: fake_epikvd.Fake) -> None:
    given = "--unit ann --arm e/lean --label tier=free --label a=b=c".split()
    assert run("generate", "x", *given, "--server", fake.address).exit_code == 0
    assert run("generate", "x", "--opt-out", "--server", fake.address).exit_code == 0
    taking, out = fake.requests
    assert (taking.experiment.unit_id, taking.experiment.force_arm) == ("ann", "e/lean")
    assert dict(taking.labels) == {"tier": "free", "a": "b=c"}
    assert out.experiment.opt_out
    assert run("generate", "x", "--label", "tier").exit_code == 2

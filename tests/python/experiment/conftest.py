"""Experiments of a stand-in for the daemon."""

from collections.abc import Callable, Iterator
from pathlib import Path

import fake_epikvd
import pytest
from click.testing import Result
from command_line import run
from dealt_experiment import SOUND, written
from epikv import Client
from epikv.cli import experiment_report, show
from epikv.experiment import definition
from fake_reports import report


@pytest.fixture(scope="module")
def server() -> Iterator[fake_epikvd.Fake]:
    with fake_epikvd.serve() as fake:
        yield fake


@pytest.fixture
def fake(server: fake_epikvd.Fake) -> fake_epikvd.Fake:
    server.requests.clear()
    server.experiments.__init__()
    return server


@pytest.fixture
def client(fake: fake_epikvd.Fake) -> Iterator[Client]:
    with Client(fake.address) as result:
        yield result


@pytest.fixture
def lean(tmp_path: Path) -> Path:
    """A file with a sound definition."""
    return written(tmp_path / "lean.textproto", SOUND)


@pytest.fixture
def running(fake: fake_epikvd.Fake, client: Client, lean: Path) -> fake_epikvd.Fake:
    """An experiment runs, and two requests took part."""
    client.create_experiment(definition.read(lean))
    client.start_experiment("lean-1")
    fake.experiments.took_part |= {"r-1", "r-2"}
    return fake


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long each wait was, which takes no time here."""
    result: list[float] = []
    monkeypatch.setattr("epikv.client.time.sleep", result.append)
    return result


@pytest.fixture
def ask(fake: fake_epikvd.Fake, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Runs `epikv experiment` against the stand-in, on a wide screen."""
    monkeypatch.setattr(show.out, "width", 160)
    return lambda *words, **more: run(
        "experiment", *map(str, words), env={"EPIKV_SERVER": fake.address}, **more
    )


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Callable[[str], str]:
    def tell(kind: str) -> str:
        experiment_report.tell(report(kind))
        return capsys.readouterr().out

    return tell

"""Every query of every dashboard is asked of a real Prometheus that has scraped a real daemon and a gateway."""

import json
import math
import re
import shlex
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from epikv import Kv, Session, Stop
from epikv.testing import Gateway
from epikv_lab.dashboards.reading import Asked, Drawn, File, Prometheus, Reader
from page_blocks import ROOT, blocks
from prometheus_server import Prometheus as OwnPrometheus
from prometheus_server import shipped
from series_daemon import busy_world, files_of
from series_families import ANY, EVICTING, FAMILIES, NAMING, POLICIES
from series_scenarios import TASK, broken, crowd, experiment, packets, sessions, tier
from series_world import PROMPT, World, refused

FOLDER = ROOT / "deploy" / "grafana"
DASHBOARDS = [File(path) for path in sorted(FOLDER.glob("*.json"))]
PANELS = [(file, panel) for file in DASHBOARDS for panel in file.panels()]
# What no daemon has: Prometheus' own, and the gateway's.
OTHERS: dict[str, dict[str, tuple[str, ...]]] = {
    "up": {},
    "ALERTS": {"alertname": ANY, "alertstate": ("pending", "firing")},
    "epikv_gateway_requests_total": {"route": ANY, "status": ANY},
    "epikv_gateway_first_byte_seconds": {"route": ANY},
    "epikv_gateway_requests_in_flight": {},
}
OF_ALL = {"job", "instance", "le"}
NAME = re.compile(r"\b(?:(?:epikv|gen_ai|process)_\w+|up|ALERTS)\b")
SELECTOR = re.compile(rf"({NAME.pattern})\{{([^}}]*)\}}")
MATCHER = re.compile(r'(\w+)(=~|!~|!=|=)"([^"]*)"')
BY = re.compile(r"\bby \(([^)]*)\)")


@dataclass(frozen=True)
class Shown:
    address: str  # of a Prometheus
    start: float

    def reader(self, file: File) -> Reader:
        """Of all the time since the start, over which rates are taken, too."""
        end = time.time()
        return Reader(file, Prometheus(self.address), self.start, end, rate_seconds=600)


def ask(world: World) -> None:
    """Two policies, a prompt that is known when it comes again, and one that is refused."""
    long = Stop(80, min_output_tokens=80, ignore_eos=True)
    for policy in ("sliding", "epikv_flat"):
        world.client.generate_once(PROMPT, model="sample", kv=Kv(policy, 90), stop=long)
    for _ in range(2):
        world.client.generate_once([5] * 300, model="sample", stop=Stop(2, min_output_tokens=2))
    refused("invalid_request", lambda: world.client.generate_once("", model="sample"))


def ask_again(world: World, gateway: Gateway) -> None:
    """Of each series whose first value Prometheus has: so it has a rate."""
    ask(world)
    world.client.generate_once([5] * 420, model="sample", stop=Stop(1), session=Session("one", 64))
    list(*world.running(700))
    for number in range(6):
        name = f"again {number}"
        world.take_part(name)
        world.record(name, "right", 1)
        world.record(name, "score", 1)
    body = {"model": "sample", "prompt": TASK.prompt, "max_tokens": 2}
    request = urllib.request.Request(
        f"{gateway.url}/v1/completions",
        json.dumps(body).encode(),
        {"authorization": f"Bearer {world.token}", "content-type": "application/json"},
    )
    for _ in range(2):
        with urllib.request.urlopen(request, timeout=60) as reply:
            assert reply.status == 200


@pytest.fixture(scope="module")
def shown(sample_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shown]:
    folder = tmp_path_factory.mktemp("dashboards")
    with (
        busy_world(files_of(folder, sample_model)) as world,
        Gateway(world.daemon.grpc) as gateway,
    ):
        (own := folder / "prometheus").mkdir()
        start = time.time()
        prometheus = OwnPrometheus(own, shipped(world.daemon.metrics, gateway=gateway.address))

        def scraped() -> None:
            """All that there is now, of both."""
            scrapes = prometheus.until("min(count_over_time(up[1h]))", lambda _: True)
            prometheus.until("min(count_over_time(up[1h]))", lambda many: many >= scrapes + 2)

        try:
            prometheus.until("sum(up)", lambda up: up == 2)
            for scenario in (ask, tier, packets, sessions, crowd, broken, experiment):
                world.run(scenario)
            scraped()
            ask_again(world, gateway)
            world.until("epikv_experiment_shadow_waiting_requests", 0)
            scraped()
            yield Shown(f"http://{prometheus.address}", start)
        finally:
            prometheus.stop()


def numbers(reader: Reader, query: Asked) -> list[float]:
    if query.instant:
        found = [value for _, value in reader.rows(query)]
    else:
        found = [value for line in reader.lines(query) for value in line.values]
    return [value for value in found if math.isfinite(value)]


def without_data(reader: Reader, file: File) -> list[str]:
    return [
        f"{panel.row}: {panel.title}: {reader.with_values(query.promql)}"
        for panel in file.panels()
        for query in panel.queries
        if not numbers(reader, query)
    ]


@pytest.mark.parametrize("file", DASHBOARDS, ids=lambda file: file.name)
def test_every_query_has_data(file: File, shown: Shown) -> None:
    assert without_data(shown.reader(file), file) == []


def test_a_query_without_data_is_found(shown: Shown, tmp_path: Path) -> None:
    text = (FOLDER / "epikv-kv.json").read_text()
    (tmp_path / "broken.json").write_text(text.replace("epikv_kv_usage_ratio{", "epikv_kv_usage{"))
    file = File(tmp_path / "broken.json")
    found = [line.split(": ")[1] for line in without_data(shown.reader(file), file)]
    assert found == ["Used", "Used and reserved"]


@pytest.mark.parametrize("file", DASHBOARDS, ids=lambda file: file.name)
def test_every_variable_has_values(file: File, shown: Shown) -> None:
    reader = shown.reader(file)
    assert all(reader.label_values(query) for query, _ in file.variables().values())


def known(name: str) -> dict[str, tuple[str, ...]] | None:
    """The labels of a series, by the name that a query has for it."""
    for candidate in (name, re.sub("_(bucket|count|sum)$", "", name)):
        if candidate in FAMILIES:
            return FAMILIES[candidate].labels
        if candidate in OTHERS:
            return OTHERS[candidate]
    return None


def faults(promql: str, legend: str) -> list[str]:
    """Names of series, labels and values that there are not."""
    names = set(NAME.findall(promql)) - OF_ALL
    found = [name for name in names if known(name) is None]
    if found:
        return found
    there = OF_ALL.union(*(known(name) or {} for name in names))
    for name, matchers in SELECTOR.findall(promql):
        labels = known(name) or {}
        for label, _, pattern in MATCHER.findall(matchers):
            if label not in labels and label not in OF_ALL:
                found.append(f"{name}: {label}")
            values = labels.get(label, ANY)
            closed = values not in (ANY, POLICIES, EVICTING) and label not in NAMING
            if closed and "$" not in pattern:
                parts = pattern.split("|")
                found += [
                    f"{name}: {label}: {part}"
                    for part in parts
                    if not any(re.fullmatch(part, value) for value in values)
                ]
    by = [label.strip() for labels in BY.findall(promql) for label in labels.split(",")]
    used = {*by, *re.findall(r"\{\{(\w+)\}\}", legend)}
    return found + sorted(used - there)


@pytest.mark.parametrize(
    ("file", "panel"), PANELS, ids=lambda each: each.name if isinstance(each, File) else each.title
)
def test_a_panel_names_what_there_is(file: File, panel: Drawn) -> None:
    """A query that adds two series has data, too, where one of them is nowhere."""
    for query in panel.queries:
        assert NAME.search(query.promql)
        assert faults(query.promql, query.legend) == []


@pytest.mark.parametrize(
    ("promql", "legend", "fault"),
    [
        ("sum(epikv_tokens{a='b'}) or vector(0)", "", "epikv_tokens"),
        ('sum(epikv_drain_state{model="m"})', "", "epikv_drain_state: model"),
        (
            'epikv_requests_finished_total{reason=~"error|eror"}',
            "",
            "epikv_requests_finished_total: reason: eror",
        ),
        ("sum by (polcy) (epikv_tokens_total)", "", "polcy"),
        ("sum by (policy) (epikv_tokens_total)", "{{polcy}}", "polcy"),
    ],
)
def test_a_name_that_there_is_not_is_found(promql: str, legend: str, fault: str) -> None:
    assert faults(promql, legend) == [fault]


def test_the_page_draws_them(shown: Shown, tmp_path: Path) -> None:
    page = ROOT / "docs" / "dashboards.md"
    [block] = [each for each in blocks(page) if "dashboards_test.py" in each.note]
    command = block.text.replace("http://127.0.0.1:9090", shown.address)
    assert block.page == "docs/dashboards.md" and command != block.text
    python, *arguments = shlex.split(command)
    assert python == "python"
    subprocess.run([sys.executable, *arguments], cwd=tmp_path, check=True)
    pictures = {path.stem: path for path in (tmp_path / "build" / "dashboards").glob("*.png")}
    assert set(pictures) == {file.name for file in DASHBOARDS}
    for path in pictures.values():
        assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 20_000

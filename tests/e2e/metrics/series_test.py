"""Every series that the daemon exports, what moves it, and that nothing else does.

`FAMILIES` (series_families.py) is the whole page: each family with its type, the closed set of each
label, and the scenario (series_scenarios.py), a group of RPCs to a running daemon, that must move it. A
family or label value that is not there fails, and so does one that no scenario moves. `QUIET` are
scenarios without an engine's part, with all that each may move.
"""

import re
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path

import pytest
from epikv.testing import Daemon
from failed_start import start
from metrics_page import Family, Series, parse, skim
from series_daemon import busy_world, files_of
from series_families import (
    ANY,
    BY_THEMSELVES,
    EVICTING,
    FAMILIES,
    NAMING,
    POLICIES,
    QUIET,
    SOLE_MOVERS,
    UNMOVED,
    Expected,
)
from series_scenarios import SCENARIOS, idle, small
from series_world import World, text

ROOT = Path(__file__).parents[3]

TABLE_BEGIN, TABLE_END = "<!-- series: begin -->", "<!-- series: end -->"


@dataclass
class Observed:
    """What moved in which scenario, and the page at the end of them."""

    moved: dict[str, set[Series]]
    families: dict[str, Family]
    policies: list[str]
    series: int  # on that page
    least_series: int  # that a daemon may be limited to

    def all(self) -> Set[Series]:
        return set().union(*self.moved.values())


@pytest.fixture(scope="module")
def observed(
    sample_model: Path, artefact_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Observed:
    folder = tmp_path_factory.mktemp("series")
    files = files_of(folder, sample_model, artefact_dir)
    with busy_world(files) as world:
        world.run(idle)
        for scenario in SCENARIOS:
            world.run(scenario)
        names = [policy.name for policy in world.client.policies(model="sample")]
        last = text(world.daemon)
        assert skim(last) == parse(last)
        series = sum(not line.startswith("#") for line in last.splitlines())
        seen = Observed(world.moved, world.page, names, series, world.bound)
    files.store = folder / "another.db"
    flags = (
        f"--experiment_store={files.store}",
        f"--metrics_max_series={seen.least_series}",
        "--stream_stall_seconds=0.3",
        "--outbox_bytes=1024",
    )
    with Daemon(sample_model, "--threads=1", *flags, "--access_log=/dev/full") as daemon:
        world = World(daemon, files)
        world.run(small)
        seen.moved |= world.moved
    return seen


@pytest.mark.parametrize("scenario", QUIET)
def test_nothing_else_moves(observed: Observed, scenario: str) -> None:
    there = families(observed.moved[scenario])
    assert {family for family in there if not BY_THEMSELVES.match(family)} == QUIET[scenario]


def test_every_family_is_expected_and_there(observed: Observed) -> None:
    assert set(observed.families) == set(FAMILIES)


@pytest.mark.parametrize("name", FAMILIES)
def test_family_is_moved_by_its_scenario(observed: Observed, name: str) -> None:
    expected, there = FAMILIES[name], observed.families[name]
    assert there.type == expected.type
    assert {label for labels in there.values for label, _ in labels} == set(expected.labels)
    movers = {scenario for scenario, series in observed.moved.items() if name in families(series)}
    if expected.moved_by == "nothing":
        assert (name, "", "") in UNMOVED and not movers
    elif expected.moved_by in SOLE_MOVERS:
        assert movers == {expected.moved_by}
    else:
        assert expected.moved_by in movers, movers


@pytest.mark.parametrize("name", [n for n, e in FAMILIES.items() if e.moved_by != "nothing"])
def test_every_value_of_every_label_moves(observed: Observed, name: str) -> None:
    of_family = [dict(series.labels) for series in observed.all() if series.family == name]
    for label, values in FAMILIES[name].labels.items():
        if values is ANY or label == "model":
            continue
        if values in (POLICIES, EVICTING):
            known = {*observed.policies, "other"} - (
                {"full", "quest"} if values == EVICTING else set()
            )
        else:
            known = set(values)
        unmoved = {value for family, of, value in UNMOVED if (family, of) == (name, label)}
        assert {labels[label] for labels in of_family} == known - unmoved, label


def test_the_page_keeps_its_promise(observed: Observed, sample_model: Path, tmp_path: Path) -> None:
    promised = observed.families["epikv_metrics_series"].values[frozenset()]
    assert observed.least_series < observed.series <= promised
    least = observed.least_series
    store = f"--experiment_store={tmp_path / 'store.db'}"
    status, log = start(f"--model={sample_model}", f"--metrics_max_series={least - 1}", store)
    assert status == 1 and f"raise it to at least {least}\n" in log, log


def families(series: Set[Series]) -> set[str]:
    return {one.family for one in series}


def row(name: str, expected: Expected, family: Family) -> str:
    cells = []
    for label, values in expected.labels.items():
        closed = values not in (ANY, POLICIES, EVICTING) and label not in NAMING
        few = closed and len(values) <= 12
        cells.append(
            f"`{label}`" + (f" ({', '.join(v or 'empty' for v in values)})" if few else "")
        )
    return f"| `{name}` | {expected.type} | {', '.join(cells)} | {family.help} |"


def test_the_readme_has_the_whole_page(observed: Observed) -> None:
    rows = [row(name, FAMILIES[name], observed.families[name]) for name in sorted(FAMILIES)]
    lines = (ROOT / "server" / "README.md").read_text().splitlines()
    there = lines[lines.index(TABLE_BEGIN) + 3 : lines.index(TABLE_END)]
    assert there == rows, "what belongs there:\n" + "\n".join(rows)


def test_alerts_are_about_series_that_there_are() -> None:
    alerts = (ROOT / "deploy" / "prometheus" / "alerts.yml").read_text()
    named = set(re.findall(r"\b(?:epikv|gen_ai|process)_\w+", alerts))
    assert len(named) > 8
    assert {re.sub("_(bucket|count)$", "", name) for name in named} <= set(FAMILIES)

"""What epikv.ray decides by itself, without Ray: which replica, how many, and what it says where Ray is missing."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from epikv.cli import main
from epikv.ray.affinity import chosen, most_open, ranked
from epikv.ray.scaling import ByWaiting, stats
from epikv.ray.services import SERVICER_FUNCTIONS, methods
from epikv.ray.settings import Settings
from epikv.scrape import parse
from pydantic import ValidationError

ROOT = Path(__file__).parents[3]
PREFIXES = [f"prefix {index}" for index in range(300)]


def first(prefix: str, names: list[str]) -> str:
    return ranked(prefix, names)[0]


def test_each_replica_has_its_share_of_prefixes() -> None:
    names = ["a", "b", "c"]
    found = [first(prefix, names) for prefix in PREFIXES]
    assert all(70 < found.count(name) < 130 for name in names)
    assert found == [first(prefix, names[::-1]) for prefix in PREFIXES]


def test_of_a_lost_replica_only_its_prefixes_move() -> None:
    before = {prefix: first(prefix, ["a", "b", "c"]) for prefix in PREFIXES}
    after = {prefix: first(prefix, ["a", "c"]) for prefix in PREFIXES}
    assert {prefix for prefix in PREFIXES if before[prefix] != after[prefix]} == {
        prefix for prefix in PREFIXES if before[prefix] == "b"
    }


@pytest.mark.parametrize(
    ("loads", "most"),
    [([0], 1), ([0, 0, 0], 1), ([1, 0, 0], 1), ([4, 0, 0], 2), ([2, 2, 2], 3), ([20, 20, 20], 30)],
)
def test_a_replica_has_half_more_than_its_share_at_most(loads: list[int], most: int) -> None:
    assert most_open(loads, 1.5) == most


@pytest.mark.parametrize("factor", [1.0, 1.5, 4.0])
def test_what_a_full_replica_does_not_take_goes_to_the_prefixs_next_one(factor: float) -> None:
    order = ranked("p", "abc")
    assert chosen("p", dict.fromkeys("abc", 7), factor) == order[0]
    full = {order[0]: 40, order[1]: 1, order[2]: 0}
    assert chosen("p", full, factor) == (order[1] if factor < 3 else order[0])
    loads = [
        dict(zip("abc", (a, b, c), strict=True))
        for a in range(5)
        for b in range(5)
        for c in range(5)
    ]
    for each in loads:
        assert each[chosen("p", each, factor)] <= most_open(each.values(), factor)


def wanted(waiting: dict[str, float], reserved: dict[str, float], queued: float = 0) -> Any:
    told = {"waiting": waiting, "reserved": reserved} if reserved else {}
    context = SimpleNamespace(
        aggregated_metrics=told, total_queued_requests=queued, target_num_replicas=7
    )
    return ByWaiting(waiting_per_replica=5)(context)[0]


def test_replicas_are_as_many_as_what_runs_fills() -> None:
    assert wanted({"a": 0, "b": 0}, {"a": 0.8, "b": 0.8}) == pytest.approx(2)
    assert wanted({"a": 0, "b": 0}, {"a": 0.4, "b": 0.0}) == pytest.approx(0.5)


def test_those_that_wait_want_more() -> None:
    assert wanted({"a": 10, "b": 5}, {"a": 0.8, "b": 0.8}) == pytest.approx(5)
    assert wanted({"a": 0}, {"a": 0.8}, queued=5) == pytest.approx(2)


def test_where_nobody_has_said_anything_nothing_changes() -> None:
    assert wanted({}, {}) == 7


def test_both_numbers_are_of_a_daemons_page() -> None:
    page = parse(
        'epikv_load_waiting_requests{model="a"} 3\nepikv_load_running_requests{model="a"} 4\n'
        'epikv_kv_reserved_ratio{model="a"} 0.25\n'
    )
    assert stats(page) == {"waiting": 3, "reserved": 0.25}


def test_a_setting_that_there_is_not_is_refused() -> None:
    with pytest.raises(ValidationError, match="replica\n"):
        Settings(model="m.pt", replica=2)
    with pytest.raises(ValidationError, match="digest"):
        Settings(model="m.pt", digest="sha256:0")


def test_flags_that_are_given_win() -> None:
    flags = Settings(
        model="m.pt", digest="a" * 64, num_cpus=1.5, flags=["--threads=7"]
    ).daemon_flags()
    assert flags[-1] == "--threads=7" and "--threads=2" in flags
    assert f"--model_digests=sha256:{'a' * 64}" in flags


def test_the_example_has_each_service() -> None:
    file = yaml.safe_load((ROOT / "deploy/ray/serve.yaml").read_text())
    assert file["grpc_options"]["grpc_servicer_functions"] == SERVICER_FUNCTIONS
    [application] = file["applications"]
    assert application["import_path"] == "epikv.ray:app"
    Settings(**application["args"])


def test_no_two_services_have_a_method_of_one_name() -> None:
    """Ray knows a method by its name alone."""
    names = [method.name for method in methods()]
    assert len(set(names)) == len(names) > 20


def test_without_ray_eval_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    (tmp_path / "m.pt").touch()
    command = ["eval", "--task", "sample:programs", "--out", str(tmp_path / "out"), "--ray"]
    refused = CliRunner().invoke(main, [*command, "--model", str(tmp_path / "m.pt")])
    assert refused.exit_code == 1
    assert "pip install" in refused.output and "[ray,gateway]" in refused.output


@pytest.mark.parametrize("more", [[], ["--server", "127.0.0.1:1"]])
def test_a_cluster_needs_a_model_and_no_server(more: list[str], tmp_path: Path) -> None:
    command = ["eval", "--task", "sample:programs", "--out", str(tmp_path), "--ray", "127.0.0.1:1"]
    if more:
        (tmp_path / "m.pt").touch()
        more = [*more, "--model", str(tmp_path / "m.pt")]
    refused = CliRunner().invoke(main, [*command, *more])
    assert refused.exit_code == 2 and "--ray needs --model, and no --server" in refused.output

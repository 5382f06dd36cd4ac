"""The client's side of experiments: taking part, definitions, arms and outcomes."""

import json
import re
import runpy
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta, timezone
from itertools import pairwise
from math import inf, sqrt
from pathlib import Path

import fake_epikvd
import grpc
import pytest
from click.testing import CliRunner, Result
from epikv import Client, Experiment, Outcome, Patience, RpcError
from epikv.cli import main, show
from epikv.experiment import definition
from epikv.experiment.assignment import NUM_BUCKETS, arm_of, bucket_of, layer_bucket, unit_hash
from epikv.v1 import experiment_pb2

GOLDEN = Path(__file__).parents[2] / "golden"
UNITS = [f"user-{i}" for i in range(20_000)]


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
    given = "--unit ann --covariate 0 --arm e/lean --label tier=free --label a=b=c".split()
    assert run("generate", "x", *given, "--server", fake.address).exit_code == 0
    assert run("generate", "x", "--opt-out", "--server", fake.address).exit_code == 0
    taking, out = fake.requests
    assert (taking.experiment.unit_id, taking.experiment.force_arm) == ("ann", "e/lean")
    assert taking.experiment.HasField("covariate") and taking.experiment.covariate == 0
    assert dict(taking.labels) == {"tier": "free", "a": "b=c"}
    assert out.experiment.opt_out and not out.experiment.HasField("covariate")
    assert run("generate", "x", "--label", "tier").exit_code == 2


def dealt(name: str = "e", *weights: int, **more: object) -> experiment_pb2.Experiment:
    """All of a layer's units to so many arms; weights in permille."""
    arms = [
        experiment_pb2.Arm(name=f"arm-{i}", weight_permille=weight)
        for i, weight in enumerate(weights or (500, 500))
    ]
    plain = {"traffic_permille": 1000, "bucket_version": 1, "arms": arms}
    return experiment_pb2.Experiment(name=name, **{**plain, **more})


def sigmas(observed: int, n: int, share: float) -> float:
    """How far a binomial count is from its mean; one run in a million is beyond five."""
    return abs(observed - n * share) / sqrt(n * share * (1 - share))


def test_the_hash_is_the_daemons() -> None:
    """The figures of UnitHash and BucketOf in experiment_assignment_test.cc."""
    assert unit_hash("lean", 1, "user-7") == 0xFD0225C39384E565
    assert unit_hash("layer/default", 0, "") == 0x3B834A4D195355D2
    assert bucket_of(0) == 0 and bucket_of(2**64 - 1) == NUM_BUCKETS - 1
    assert (bucket_of(2**63 - 1), bucket_of(2**63)) == (NUM_BUCKETS / 2 - 1, NUM_BUCKETS / 2)


def test_the_golden_arms_are_those_of_its_maker() -> None:
    """experiment_assignment_test.cc finds the same."""
    golden = json.loads((GOLDEN / "experiment_assignment.json").read_text())
    assert golden == runpy.run_path(str(GOLDEN / "make_experiment_assignment.py"))["golden"]()


@pytest.mark.parametrize("weights", [(500, 500), (900, 100), (1, 999), (250, 250, 500)])
@pytest.mark.parametrize("version", [1, 2])
def test_each_arm_gets_its_weight(weights: tuple[int, ...], version: int) -> None:
    counts = Counter(arm_of(dealt("w", *weights, bucket_version=version), u) for u in UNITS)
    assert sum(counts.values()) == counts.total() == len(UNITS) and None not in counts
    for i, weight in enumerate(weights):
        assert sigmas(counts[f"arm-{i}"], len(UNITS), weight / 1000) < 5


@pytest.mark.parametrize("cuts", [(300,), (1, 999), (100, 450, 700)])
def test_slices_of_a_layer_share_no_unit(cuts: tuple[int, ...]) -> None:
    edges = (0, *cuts, 1000)
    slices = [
        dealt(f"s{begin}", first_bucket=10 * begin, traffic_permille=end - begin)
        for begin, end in pairwise(edges)
    ]
    takers = Counter()
    for unit in UNITS:
        taking = [e.name for e in slices if arm_of(e, unit) is not None]
        assert len(taking) == 1, unit
        takers.update(taking)
    for e in slices:
        assert sigmas(takers[e.name], len(UNITS), e.traffic_permille / 1000) < 5


def test_arms_follow_from_salt_version_and_layer_alone() -> None:
    arms = [arm_of(dealt("e"), unit) for unit in UNITS]
    assert arms == [arm_of(dealt("other", salt="e", layer="default"), unit) for unit in UNITS]
    for anew in (dealt("f"), dealt("e", bucket_version=2)):
        same = sum(arm == arm_of(anew, unit) for arm, unit in zip(arms, UNITS, strict=True))
        assert sigmas(same, len(UNITS), 0.5) < 5
    places = [layer_bucket("default", unit) == layer_bucket("l", unit) for unit in UNITS]
    assert sum(places) < 20


SOUND = """name: "lean-1" traffic_permille: 100
arms { name: "full" weight_permille: 500 control: true }
arms {
  name: "lean" weight_permille: 500
  kv { policy: "sliding" max_tokens: 64 policy_params { fields {
    key: "slack" value { number_value: 16 }
  } } }
}
metrics { name: "right" kind: KIND_PROPORTION }
primary_metric: "right"
outcome_window { seconds: 3600 }
"""


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.fixture
def lean(tmp_path: Path) -> Path:
    """A file with a sound definition."""
    return written(tmp_path / "lean.textproto", SOUND)


@pytest.mark.parametrize("suffix", definition.SUFFIXES)
def test_a_definition_is_read_as_it_was_written(suffix: str, lean: Path, tmp_path: Path) -> None:
    sound = definition.read(lean)
    sound.hypothesis, sound.etag = 'Zoë says "so"', "7"
    sound.end_time.FromJsonString("2031-05-01T12:00:00.5Z")
    definition.write(sound, tmp_path / f"again{suffix}")
    assert definition.read(tmp_path / f"again{suffix}") == sound


def test_json_has_the_names_of_the_contract(lean: Path) -> None:
    shown = definition.as_json(definition.read(lean))
    assert shown["arms"][1]["kv"]["policy_params"] == {"slack": 16}
    assert isinstance(shown["arms"][1]["kv"]["policy_params"]["slack"], int)
    assert (shown["traffic_permille"], shown["outcome_window"]) == (100, "3600s")


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ('name: "a"\ntrafic_permille: 3', 2, 'no field named "trafic_permille"'),
        ('name: "a"\n\nname: "b"', 3, 'multiple "name" fields'),
        ('arms {\n  name: "a"\n  kv { max_tokens: 1\n keep_ratio: 0.5 } }', 4, "max_tokens"),
        ("metrics {\n kind: KIND_SHARE }", 2, "no value named KIND_SHARE"),
        ("arms {\n", 1, 'Expected "}"'),
    ],
)
def test_a_bad_text_is_told_by_its_line(tmp_path: Path, text: str, line: int, said: str) -> None:
    file = written(tmp_path / "bad.textproto", text)
    with pytest.raises(definition.DefinitionError) as caught:
        definition.read(file)
    assert str(caught.value).startswith(f"{file}:{line}: ") and said in str(caught.value)


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ('{"name": "a",\n "arms": [{"name": "x"},\n {"weigth": 3}]}', 3, 'named "weigth"'),
        ('{"name": "a",\n\n "name": "b"}', 3, '"name" is given twice'),
        ('{"name":\n "a" "b"}', 2, "Expecting ',' delimiter"),
        ("[]", 1, "one JSON object"),
        ('{"hypothesis": "\\"name\\": {",\n "name": 3}', 2, "expected string"),
        ('{"arms": [{"kv": {\n"max_tokens": 3,\n"keep_ratio": 0.5}}]}', 3, '"budget" oneof'),
        ('{"metrics": [{"name": "m",\n"kind": "KIND_SHARE"}]}', 2, "KIND_SHARE"),
        ('{"outcome_window":\n "1d"}', 1, 'Duration must end with letter "s"'),
        ('{"end_time": "2031-01-01T00:00:00Z",\n"traffic_permille": -1}', 2, "out of range"),
        ('{"eligibility": {"labels": {"a": "b",\n"c": 3}}}', 2, "expected string"),
        ('{"layer": "l",\n"arms":\n{"name": "a"}}', 2, "must be in []"),
    ],
)
def test_bad_json_is_told_by_its_line(tmp_path: Path, text: str, line: int, said: str) -> None:
    file = written(tmp_path / "bad.json", text)
    with pytest.raises(definition.DefinitionError) as caught:
        definition.read(file)
    message = str(caught.value)
    assert message.startswith(f"{file}:{line}: ") and said in message and "\n" not in message


def test_a_definition_is_known_by_its_ending(tmp_path: Path) -> None:
    for use in (definition.read, lambda path: definition.write(experiment_pb2.Experiment(), path)):
        with pytest.raises(definition.DefinitionError, match=r"ends in \.textproto or \.json"):
            use(tmp_path / "lean.yaml")
    (tmp_path / "latin.json").write_bytes(b'{"name": "\xff"}')
    with pytest.raises(definition.DefinitionError, match=r"latin\.json: .*utf-8"):
        definition.read(tmp_path / "latin.json")


def test_the_template_is_a_definition(tmp_path: Path) -> None:
    made = definition.read(written(tmp_path / "x.textproto", definition.template("lean-2")))
    assert made.name == "lean-2" and made.primary_metric in [m.name for m in made.metrics]
    assert sum(arm.weight_permille for arm in made.arms) == 1000
    assert [arm.control for arm in made.arms] == [True, False]
    with pytest.raises(ValueError, match="is 'Lean'"):
        definition.template("Lean")


def test_what_the_template_leaves_out_is_right_too(tmp_path: Path) -> None:
    """Its lines that hold a field behind a "#", taken in."""
    lines = definition.template("x").splitlines()
    bare = [re.sub(r"^( *)# (?= *\w+(:| \{)|\})", r"\1", line) for line in lines]
    full = definition.read(written(tmp_path / "x.textproto", "\n".join(bare)))
    told = {field.name for field, _ in full.ListFields()}
    made = {"salt", "state", "bucket_version", "first_bucket", "stop_reason", "etag"}
    made |= {"create_time", "start_time", "stop_time"}
    assert told == {field.name for field in full.DESCRIPTOR.fields} - made


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


@contextmanager
def refused(code: str, reason: str = "") -> Iterator[None]:
    with pytest.raises(RpcError) as caught:
        yield
    assert (caught.value.code.name, caught.value.reason) == (code, reason)


def test_a_definition_goes_through_its_states(client: Client, lean: Path) -> None:
    sound = definition.read(lean)
    assert client.create_experiment(sound, validate_only=True).layer == "default"
    assert client.experiments() == []
    made = client.create_experiment(sound)
    assert made == client.experiment("lean-1") == client.experiments()[0]
    with refused("ALREADY_EXISTS"):
        client.create_experiment(sound)
    started = client.start_experiment("lean-1", etag=made.etag)
    assert started.state == experiment_pb2.Experiment.STATE_RUNNING
    with refused("ABORTED", "ETAG"):
        client.stop_experiment("lean-1", etag=made.etag)
    assert client.stop_experiment("lean-1", reason="enough").stop_reason == "enough"
    with refused("NOT_FOUND"):
        client.experiment("lean-2")


def test_what_was_read_may_be_changed_and_sent_back(client: Client, lean: Path) -> None:
    read = client.create_experiment(definition.read(lean))
    read.traffic_permille = 200
    updated = client.update_experiment(read)
    assert updated.traffic_permille == 200
    with refused("ABORTED", "ETAG"):
        client.update_experiment(read)
    updated.traffic_permille, updated.hypothesis = 300, "more"
    assert client.update_experiment(updated, validate_only=True).traffic_permille == 300
    masked = client.update_experiment(updated, mask=["hypothesis"])
    assert (masked.traffic_permille, masked.hypothesis) == (200, "more")


def test_units_move_only_where_that_is_allowed(client: Client, running: fake_epikvd.Fake) -> None:
    read = client.experiment("lean-1")
    read.arms[1].weight_permille = 100
    with refused("INVALID_ARGUMENT"):
        client.update_experiment(read)
    read.arms[0].weight_permille = 900
    with refused("FAILED_PRECONDITION", "REBUCKET"):
        client.update_experiment(read)
    assert client.update_experiment(read, allow_rebucket=True).arms[1].weight_permille == 100


def test_an_outcome_is_recorded_once(client: Client, running: fake_epikvd.Fake) -> None:
    at = datetime(2031, 5, 1, 14, 30, 0, 500_000, timezone(timedelta(hours=2)))
    given = {"time": at, "key": "k", "tenant": "ann"}
    assert not client.record_outcome("r-1", "right", 1, **given).duplicate
    sent = running.requests[-1]
    assert sent.time.ToJsonString() == "2031-05-01T12:30:00.500Z"
    assert (sent.idempotency_key, sent.tenant) == ("k", "ann")
    assert client.record_outcome("r-1", "right", 1, **given).duplicate
    with refused("ALREADY_EXISTS"):
        client.record_outcome("r-1", "right", 0, **given)
    running.experiments.is_store_away = True
    assert client.record_outcome("r-1", "right", 0).spooled
    assert not running.requests[-1].HasField("time")
    with pytest.raises(ValueError, match="has no zone"):
        client.record_outcome("r-1", "right", 1, time=datetime(2031, 5, 1))


def test_a_request_that_just_began_is_waited_for(
    client: Client, running: fake_epikvd.Fake, slept: list[float]
) -> None:
    running.experiments.arriving["r-1"] = 3
    assert not client.record_outcome("r-1", "right", 1).duplicate
    assert slept == [0.1, 0.2, 0.4]


def test_a_request_that_took_no_part_is_not_waited_for_long(
    client: Client, running: fake_epikvd.Fake, slept: list[float]
) -> None:
    with refused("NOT_FOUND"):
        client.record_outcome("r-9", "right", 1)
    assert sum(slept) == pytest.approx(Patience.unknown)
    slept.clear()
    with refused("NOT_FOUND"):
        client.record_outcome("r-9", "right", 1, patience=Patience(unknown=0))
    with refused("INVALID_ARGUMENT", "METRIC"):
        client.record_outcome("r-1", "wrong", 1)
    assert slept == []


BUSY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)


def test_a_busy_server_is_asked_again(
    client: Client, running: fake_epikvd.Fake, slept: list[float]
) -> None:
    running.experiments.refusals = [(BUSY[0], None), (BUSY[1], 1.5), (BUSY[0], 0.0)]
    assert not client.record_outcome("r-1", "right", 1).duplicate
    assert slept == [0.1, 1.5, 0.1]
    running.experiments.refusals = [(BUSY[1], 31)]
    with refused("RESOURCE_EXHAUSTED"):
        client.record_outcome("r-1", "right", 1)
    running.experiments.refusals = [(BUSY[0], None)] * 100
    slept.clear()
    with refused("UNAVAILABLE"):
        client.record_outcome("r-1", "right", 1)
    assert sum(slept) == pytest.approx(Patience.busy) and max(slept) == 2


def test_each_outcome_has_a_result(client: Client, running: fake_epikvd.Fake) -> None:
    client.record_outcome("r-2", "right", 0)
    given = [("r-1", "right", 1), ("r-9", "right", 1), ("r-2", "right", 0), ("r-1", "wrong", 1)]
    results = client.record_outcomes(
        [Outcome(*outcome) for outcome in [*given, ("r-2", "right", 1)]],
        patience=Patience(unknown=0),
    )
    assert [result.error and result.error.code.name for result in results] == [
        None,
        "NOT_FOUND",
        None,
        "INVALID_ARGUMENT",
        "ALREADY_EXISTS",
    ]
    assert [r.response and r.response.duplicate for r in results[:3]] == [False, None, True]
    assert results[3].reason == results[3].error.reason == "METRIC"
    assert client.record_outcomes([]) == []


def test_batches_are_no_longer_than_the_server_takes(
    client: Client, running: fake_epikvd.Fake
) -> None:
    outcomes = [Outcome("r-1", "right", i % 2, key=str(i)) for i in range(2100)]
    assert all(result.error is None for result in client.record_outcomes(outcomes))
    assert running.experiments.batches == [1000, 1000, 100]
    assert len(running.experiments.outcomes) == 2100


def test_of_a_batch_only_what_was_refused_goes_again(
    client: Client, running: fake_epikvd.Fake, slept: list[float]
) -> None:
    running.experiments.arriving["r-2"] = 2
    running.experiments.refusals = [(BUSY[0], None)]
    results = client.record_outcomes([Outcome(r, "right", 1) for r in ("r-1", "r-2", "r-3")])
    assert [result.code for result in results] == [0, 0, grpc.StatusCode.NOT_FOUND.value[0]]
    assert running.experiments.batches[:4] == [3, 2, 2, 1]
    assert not results[0].response.duplicate
    assert sum(slept) == pytest.approx(0.1 + Patience.unknown)


def test_an_outcome_that_is_refused_for_a_while_is_tried_after_it(
    client: Client, running: fake_epikvd.Fake, slept: list[float]
) -> None:
    running.experiments.delays = [0.5, 1.25]
    results = client.record_outcomes([Outcome(r, "right", 1) for r in ("r-1", "r-2")])
    assert [result.code for result in results] == [0, 0] and slept == [1.25]


def test_a_batch_that_nobody_takes_is_an_error(
    client: Client, running: fake_epikvd.Fake, slept: list[float]
) -> None:
    running.experiments.refusals = [(BUSY[0], None)] * 100
    with refused("UNAVAILABLE"):
        client.record_outcomes([Outcome("r-1", "right", 1)])
    running.experiments.refusals = [(grpc.StatusCode.PERMISSION_DENIED, None)]
    slept.clear()
    with refused("PERMISSION_DENIED"):
        client.record_outcomes([Outcome("r-1", "right", 1)])
    assert slept == []


@pytest.fixture
def ask(fake: fake_epikvd.Fake, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Runs `epikv experiment` against the stand-in, on a wide screen."""
    monkeypatch.setattr(show.out, "width", 160)
    return lambda *words, **more: run(
        "experiment", *map(str, words), env={"EPIKV_SERVER": fake.address}, **more
    )


def words(result: Result) -> str:
    return " ".join(result.stdout.split())


def test_an_experiment_from_its_template_to_its_end(
    ask: Callable[..., Result], tmp_path: Path
) -> None:
    file = tmp_path / "lean-2.textproto"
    hint = ask("init", file).stderr
    assert f"epikv experiment create {file} --validate-only" in hint
    assert ask("create", file, "--validate-only").stdout == "lean-2: sound\n"
    assert "lean-2" not in ask("list").stdout
    assert ask("create", file).stdout == "lean-2: a draft\n"
    assert "lean-2 │ draft │ 10% │ default │ full 50%, half 50% │ right" in words(ask("list"))
    started = "10% of layer default, its buckets 0 to 999"
    assert ask("start", "lean-2").stdout == f"lean-2: {started}\n"
    assert ask("stop", "lean-2", "--reason", "enough").stdout == "lean-2: stopped\n"
    told = words(ask("show", "lean-2"))
    assert told.startswith("lean-2: stopped With half the cache")
    assert "half │ 50% │ policy sliding, keep_ratio 0.5" in told
    assert "full (control) │ 50% │ the request as it came" in told
    assert "right │ proportion │ higher" in told and "guardrails failed by 0.01" in told
    assert f"traffic {started}" in told and "2031-05-02 12:00:00 UTC, enough" in told


def test_show_tells_of_all_that_is_set(
    ask: Callable[..., Result], client: Client, lean: Path
) -> None:
    sound = definition.read(lean)
    sound.salt, sound.hypothesis = "grain", "half\x1b[2J is \u202eenough"
    sound.eligibility.model = "llama"
    sound.eligibility.min_prompt_tokens = 256
    sound.eligibility.labels["tier"] = "free"
    client.create_experiment(sound)
    told = words(ask("show", "lean-1"))
    assert "model llama, prompts of 256 tokens or more, tier=free" in told
    assert "half\\u001b[2J is \\u202eenough" in told
    assert "version 1, salt grain" in told and "outcomes taken for 1:00:00" in told
    assert 'policy_params {"slack": 16}' in told
    assert "traffic 10% of layer default takes part" in told


def test_json_of_an_experiment_is_its_definition(
    ask: Callable[..., Result], fake: fake_epikvd.Fake, lean: Path, tmp_path: Path
) -> None:
    made = ask("create", lean, "--json").stdout
    assert made == ask("show", "lean-1", "--json").stdout == ask("list", "--json").stdout
    again = definition.read(written(tmp_path / "again.json", made))
    assert again == fake.experiments.definitions["lean-1"]
    assert ask("start", "lean-1", "--json").exit_code == 0
    assert json.loads(ask("stop", "lean-1", "--json").stdout)["state"] == "STATE_STOPPED"


def test_an_update_is_of_what_was_read(
    ask: Callable[..., Result], running: fake_epikvd.Fake, lean: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.textproto"
    ask("show", "lean-1", "-o", out)
    lean.write_text(SOUND.replace("100", "150", 1))
    assert ask("update", lean).stdout == "lean-1: updated; buckets of version 1\n"
    assert running.experiments.definitions["lean-1"].traffic_permille == 150
    stale = ask("update", out)
    assert stale.exit_code == 1 and "ABORTED (ETAG)" in stale.stderr
    moved = written(tmp_path / "m.textproto", SOUND.replace("500", "400", 1).replace("500", "600"))
    assert "REBUCKET" in ask("update", moved).stderr
    assert ask("update", moved, "--validate-only", "--allow-rebucket").stdout == "lean-1: sound\n"
    assert running.experiments.definitions["lean-1"].arms[0].weight_permille == 500
    assert ask("update", moved, "--allow-rebucket").exit_code == 0
    assert running.experiments.definitions["lean-1"].arms[0].weight_permille == 400


def test_failures_of_files_and_names_are_one_message(
    ask: Callable[..., Result], lean: Path, tmp_path: Path
) -> None:
    bad = written(tmp_path / "bad.textproto", 'name: "a"\ntrafic: 3')
    result = ask("create", bad)
    assert result.exit_code == 1 and f'{bad}:2: Message type "epikv.v1.Exp' in result.stderr
    heavy = written(tmp_path / "heavy.textproto", SOUND.replace("500", "700", 1))
    result = ask("create", heavy, "--validate-only")
    assert "experiment.arms: weights must sum to 1000, are 1200" in result.stderr
    assert "NOT_FOUND" in ask("show", "lean-9").stderr
    assert "NOT_FOUND" in ask("update", lean).stderr
    again = ask("init", lean)
    assert again.exit_code == 1 and "exists" in again.stderr and lean.read_text() == SOUND
    assert "must be a lower-case letter" in ask("init", tmp_path / "A b.textproto").stderr
    assert ask("init", tmp_path / "x.json").exit_code == 2


def test_an_outcome_by_hand(ask: Callable[..., Result], running: fake_epikvd.Fake) -> None:
    assert ask("outcome", "r-1", "right", 1).stdout == "recorded\n"
    assert ask("outcome", "r-1", "right", 1).stdout == "it had been recorded before\n"
    more = ("--key", "k", "--tenant", "ann", "--time", "2031-05-01T14:00:00+02:00")
    running.experiments.is_store_away = True
    assert "when the store is back" in ask("outcome", "r-1", "right", "-0.5", *more).stdout
    assert running.experiments.outcomes["ann", "r-1", "right", "k"] == -0.5
    assert running.requests[-1].time.ToJsonString() == "2031-05-01T12:00:00Z"
    told = json.loads(ask("outcome", "r-1", "right", 1, "--json").stdout)
    assert told == {"event": "recorded", "duplicate": True, "spooled": True}
    assert ask("outcome", "r-1", "right", 0).exit_code == 1
    assert ask("outcome", "r-1", "right", 1, "--time", "2031-05-01").exit_code == 2
    assert ask("outcome", "r-1", "right", "yes").exit_code == 2


def as_lines(*outcomes: object) -> str:
    return "\n".join(json.dumps(outcome) for outcome in outcomes)


def an_outcome(i: int, **more: object) -> dict[str, object]:
    return {"request_id": "r-1", "metric": "right", "value": i % 2, "key": f"k-{i}", **more}


def test_outcomes_of_a_file_go_again_without_harm(
    ask: Callable[..., Result], running: fake_epikvd.Fake, tmp_path: Path
) -> None:
    lines = [an_outcome(i, time="2031-05-01T12:00:00Z", tenant="ann") for i in range(1500)]
    file = written(tmp_path / "o.jsonl", as_lines(*lines[:1200]))
    assert ask("outcomes", file).stdout == "1200 recorded\n"
    file.write_text(as_lines(*lines))
    again = ask("outcomes", "-", input=file.read_text())
    assert again.exit_code == 0 and again.stdout == "1500 recorded, 1200 of them before\n"
    assert running.experiments.batches == [1000, 200, 1000, 500]
    assert len(running.experiments.outcomes) == 1500


def test_outcomes_that_are_refused_are_told_by_line_and_reason(
    ask: Callable[..., Result], running: fake_epikvd.Fake, slept: list[float], tmp_path: Path
) -> None:
    late = [an_outcome(i, request_id="r-9") for i in range(7)]
    text = as_lines(an_outcome(1), an_outcome(2, metric="wrong"), *late, an_outcome(3, value=True))
    file = written(tmp_path / "o.jsonl", f"{text}\n\nno json\n")
    result = ask("outcomes", file)
    assert result.exit_code == 1
    assert result.stdout.startswith("2 recorded\n")
    told = words(result)
    assert "7 │ NOT_FOUND │ 3, 4, 5, 6, 7, ... │ 'r-9' took part in" in told
    assert "1 │ INVALID_ARGUMENT (METRIC) │ 2 │ unknown metric" in told
    assert "1 │ INVALID_ARGUMENT (LINE) │ 12 │" in told
    assert sum(slept) == pytest.approx(Patience.unknown, abs=1)
    events = [json.loads(line) for line in ask("outcomes", file, "--json").stdout.splitlines()]
    assert [event["line"] for event in events[:-1]] == [2, *range(3, 10), 12]
    assert events[0]["reason"] == "METRIC" and events[1]["code"] == "NOT_FOUND"
    summary = {"recorded": 2, "duplicates": 2, "spooled": 0, "refused": 9}
    assert events[-1] == {"event": "summary", **summary}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("[1]", "an outcome is a JSON object"),
        ('{"request_id": "r", "metric": "right"}', "value is missing"),
        ('{"request_id": "r", "metric": "right", "value": "1"}', "value must be a number"),
        ('{"request_id": 7, "metric": "right", "value": 1}', "request_id must be a string"),
        ('{"request_id": "r", "metric": "right", "value": 1, "when": 2}', "unknown field 'when'"),
        ('{"request_id": "r", "metric": "m", "value": 1, "time": "2031-05-01"}', "has no zone"),
        ('{"request_id": "r", "metric": "m", "value": 1, "time": "noon"}', "noon"),
        ('{"request_id": "\\ud800", "metric": "m", "value": 1}', "surrogates"),
    ],
)
def test_a_line_that_is_no_outcome_says_why(line: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Outcome.from_json(line)


def test_numbers_beyond_a_double_are_the_servers_to_refuse() -> None:
    text = json.dumps({"request_id": "r", "metric": "m", "value": 10**400})
    assert Outcome.from_json(text).value == inf


def test_an_interruption_says_how_far_it_came(
    ask: Callable[..., Result], running: fake_epikvd.Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_after_one(client: Client, outcomes: list[Outcome], **more: object) -> object:
        monkeypatch.undo()
        results = client.record_outcomes(outcomes)
        running.experiments.refusals = [(grpc.StatusCode.PERMISSION_DENIED, None)]
        return results

    monkeypatch.setattr(Client, "record_outcomes", fail_after_one)
    result = ask("outcomes", "-", input=as_lines(*map(an_outcome, range(1001))))
    assert result.exit_code == 1 and result.stdout == "1000 recorded\n"
    assert "PERMISSION_DENIED" in result.stderr and "stays" in result.stderr


def test_assign_needs_no_server_where_it_has_a_file(
    ask: Callable[..., Result], fake: fake_epikvd.Fake, client: Client, tmp_path: Path
) -> None:
    sound = dealt("e", 300, 700)
    definition.write(sound, tmp_path / "e.json")
    arms = {unit: arm_of(sound, unit) for unit in UNITS[:6]}
    result = ask("assign", tmp_path / "e.json", *arms, "--json", "--server", "127.0.0.1:1")
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert lines == [{"unit": unit, "arm": arm} for unit, arm in arms.items()]
    assert result.stderr == ""
    client.create_experiment(sound)
    counts = Counter(arms.values())
    told = words(ask("assign", "e", *arms))
    assert all(f"│ {unit} │ {arm} │" in told for unit, arm in arms.items())
    assert told.endswith(f"arm-0 {counts['arm-0']}, arm-1 {counts['arm-1']}, none 0")


def test_assign_deals_by_any_version(ask: Callable[..., Result], tmp_path: Path) -> None:
    definition.write(dealt(bucket_version=0), tmp_path / "e.json")
    units = written(tmp_path / "units", "\n".join(UNITS[:50]) + "\r\n\n")
    for words_, version in ((), 1), (("--version", 2), 2):
        result = ask("assign", tmp_path / "e.json", "--units", units, "--json", *words_)
        arms = [json.loads(line)["arm"] for line in result.stdout.splitlines()]
        assert arms == [arm_of(dealt(bucket_version=version), unit) for unit in UNITS[:50]]


SWITCHBACK = """name: "sw" traffic_permille: 1000 bucket_version: 1
arms { name: "full" weight_permille: 500 control: true }
arms { name: "lean" weight_permille: 500 }
switchback { window { seconds: 60 } wash_out { seconds: 6 } }
"""


def test_assign_deals_windows_by_time(ask: Callable[..., Result], tmp_path: Path) -> None:
    file = written(tmp_path / "sw.textproto", SWITCHBACK)
    sound = definition.read(file)
    arms = [arm_of(sound, f"window/{30_000_000 + n}") for n in range(8)]
    assert {*arms} == {"full", "lean"}
    times = [f"2027-01-15T{12 + n // 60}:{n % 60:02}:59.999999+04:00" for n in range(8)]
    result = ask("assign", file, *times, "--json", "--server", "127.0.0.1:1")
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [row["arm"] for row in rows] == arms
    assert rows[1] == {
        "window": 30_000_001,
        "begin": "2027-01-15T08:01:00Z",
        "analysed_from": "2027-01-15T08:01:06Z",
        "end": "2027-01-15T08:02:00Z",
        "arm": arms[1],
    }
    assert "│ 30000000 │ 2027-01-15T08:00:00Z │" in words(ask("assign", file, times[0]))
    refused = ask("assign", file, "2027-01-15T12:00")
    assert refused.exit_code == 2 and "has no zone" in refused.stderr


def test_assign_tells_the_windows_from_now_on(ask: Callable[..., Result], tmp_path: Path) -> None:
    text = SWITCHBACK.replace(" wash_out { seconds: 6 }", "")
    file = written(tmp_path / "sw.textproto", text)
    before = datetime.now(UTC)
    rows = [json.loads(line) for line in ask("assign", file, "--json").stdout.splitlines()]
    assert len(rows) == 10
    begins = [datetime.fromisoformat(row["begin"]) for row in rows]
    assert begins[0] <= datetime.now(UTC) and before < begins[1]
    assert {b - a for a, b in pairwise(begins)} == {timedelta(seconds=60)}
    washed_out = datetime.fromisoformat(rows[0]["analysed_from"]) - begins[0]
    assert washed_out == timedelta(seconds=6)  # a tenth


def test_assign_says_where_a_slice_is_not_known(
    ask: Callable[..., Result], client: Client, lean: Path, tmp_path: Path
) -> None:
    result = ask("assign", lean, "ann")
    assert result.exit_code == 0 and "as if that began at bucket 0" in result.stderr
    client.create_experiment(definition.read(lean))
    assert "not started, as far as lean-1 says" in ask("assign", "lean-1", "ann").stderr
    client.start_experiment("lean-1")
    assert ask("assign", "lean-1", "ann").stderr == ""
    assert ask("assign", "lean-1").exit_code == 2
    absent = ask("assign", tmp_path / "absent.json", "ann")
    assert absent.exit_code == 1 and "absent.json" in absent.stderr
    assert "NOT_FOUND" in ask("assign", "lean-9", "ann").stderr

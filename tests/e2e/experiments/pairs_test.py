"""Both arms answer the same prompts, on the real daemon: what the report shows, and that nobody notices."""

from functools import partial
from math import fsum
from pathlib import Path

import pytest
from divergences import divergence
from epikv import Client, Experiment, Kv, Output, Sampling, Session, Stop
from epikv.errors import RpcError
from epikv.eval.items import Item
from epikv.eval.tasks import load
from epikv.scrape import scrape
from epikv.testing import Daemon, DaemonError
from epikv.v1 import experiment_pb2
from google.protobuf import text_format
from waiting import eventually

PROBLEMS = 6
SEED = 11
TOKENS = Output(token_ids=True)

# Of exposed prompts alone: shorter ones cannot differ.
PAIRED = """
name: "lean" traffic_permille: 1000
arms { name: "full" weight_permille: 500 control: true kv { policy: "full" } }
arms { name: "lean" weight_permille: 500 kv { policy: "sliding" keep_ratio: 0.45 } }
metrics { name: "right" kind: KIND_PROPORTION covariate: COVARIATE_PROMPT_TOKENS }
primary_metric: "right"
subgroups { prompt_token_edges: 40 }
pairs { permille: 1000 }
"""
KV = {"full": Kv(policy="full"), "lean": Kv(policy="sliding", budget=0.45)}


def flags(store: Path, permille: int = 1) -> tuple[str, ...]:
    return (
        "--threads=1",
        f"--experiment_store={store}",
        f"--experiment_shadow_permille={permille}",
        "--experiment_shadow_time_share=1",
    )


def start(client: Client) -> None:
    client.create_experiment(text_format.Parse(PAIRED, experiment_pb2.Experiment()))
    client.start_experiment("lean")


def settled(daemon: Daemon, outcome: str = "compared") -> float:
    return scrape(daemon.metrics).total("epikv_experiment_pairs_total", outcome=outcome)


@pytest.fixture(scope="module")
def problems() -> list[Item]:
    found = load("sample:programs@6", "pairs", PROBLEMS)
    return [item for item in found if isinstance(item, Item)]


def pairs(client: Client) -> experiment_pb2.PairsReport:
    return client.experiment_report("lean").pairs


def by_arm(client: Client) -> dict[str, experiment_pb2.ShownArm]:
    return {shown.arm: shown for shown in pairs(client).shown}


def test_a_report_has_what_a_client_finds_of_both_answers(
    sample_model: Path, problems: list[Item], tmp_path: Path
) -> None:
    with Daemon(sample_model, *flags(tmp_path / "store.db")) as daemon, daemon.client() as client:
        start(client)
        shown = {"full": 0, "lean": 0}
        found: dict[str, list[tuple[float, float]]] = {"full": [], "lean": []}
        for number, item in enumerate(problems):
            ask = partial(
                client.generate_once,
                item.prompt,
                sampling=Sampling(temperature=0.7, seed=SEED),
                stop=Stop(max_output_tokens=(item.trace_tokens or 0) + 8),
                output=TOKENS,
            )
            result = ask(experiment=Experiment(unit_id=f"user-{number}"))
            assert result.accepted is not None
            arm = result.accepted.arm.removeprefix("lean/")
            shown[arm] += 1
            eventually(lambda: settled(daemon) == number + 1)
            for each, kv in KV.items():
                answer = ask(experiment=Experiment(opt_out=True), kv=kv)
                assert each != arm or answer.token_ids == result.token_ids, "as without a pair"
                score = partial(client.score, item.prompt, answer.token_ids, top_logprobs=20)
                assert answer.accepted is not None
                budget = answer.accepted.kv.budget_tokens
                ran = Kv(policy="sliding", budget=budget) if each == "lean" else kv
                found[each].append(divergence(score(chunked=True), score(kv=ran)))
        assert all(shown.values())

        eventually(lambda: sum(each.compared for each in pairs(client).shown) == PROBLEMS)
        report = pairs(client)
        assert {each.arm: each.compared for each in report.shown} == shown
        assert sum(each.lost + each.waiting for each in report.shown) == 0
        kl, agreement = report.metrics
        means = {
            arm: [fsum(column) / PROBLEMS for column in zip(*each, strict=True)]
            for arm, each in found.items()
        }
        # A client is told of 20 of the 164 tokens, and so of somewhat less.
        assert 0 <= kl.control_mean < 1e-6 and agreement.control_mean == 1
        assert means["lean"][0] - 1e-6 <= kl.arm_mean <= 1.1 * means["lean"][0] + 1e-6
        assert kl.arm_mean > 0.01
        assert agreement.arm_mean == pytest.approx(means["lean"][1], abs=1e-9)
        assert kl.effect.difference == pytest.approx(kl.arm_mean - kl.control_mean)
        assert kl.effect.verdict == experiment_pb2.Effect.VERDICT_TOO_EARLY
        assert client.experiment_report("lean").subgroups, "subgroups go with pairs"


def test_what_has_no_pair_is_served_as_ever(
    sample_model: Path, problems: list[Item], tmp_path: Path
) -> None:
    more = ("--session_bytes=100000000", "--packet_bytes=200000000")
    store = flags(tmp_path / "store.db")
    with Daemon(sample_model, *store, *more) as daemon, daemon.client() as client:
        start(client)
        prompt = problems[0].prompt
        packet = client.create_packet(prompt).packet
        assert packet is not None
        once = partial(client.generate_once, stop=Stop(200, ignore_eos=True))
        once(prompt, experiment=Experiment("session"), session=Session("one", 256))
        once("7", experiment=Experiment("packet"), packets=[packet.id])
        once(prompt, experiment=Experiment("several"), sampling=Sampling(n=2, temperature=1))
        once(prompt, experiment=Experiment("forced", force_arm="lean/lean"))
        text = Sampling(regex=".*")
        once(prompt, experiment=Experiment("constrained"), sampling=text)
        eventually(lambda: settled(daemon) == 1)
        eventually(lambda: sum(each.compared for each in pairs(client).shown) == 1)
        report = pairs(client)
        assert sum(each.units for each in report.shown) == 1
        # A unit's second request.
        once(prompt, experiment=Experiment("constrained"))
        with client.generate(prompt, experiment=Experiment("gone"), stop=Stop(1100)) as stream:
            next(iter(stream))  # and its client goes
        eventually(lambda: sum(each.lost for each in pairs(client).shown) == 1)
        assert settled(daemon) == 1 and pairs(client).later_requests == 0


def test_daemons_that_share_a_store_both_contribute_and_pairs_die_with_theirs(
    sample_model: Path, tmp_path: Path
) -> None:
    store = flags(tmp_path / "store.db")
    prompt, short, long = "7 + 8", Stop(120, ignore_eos=True), Stop(1100, ignore_eos=True)
    killed = pytest.raises(DaemonError, match="status -9")
    with Daemon(sample_model, *store) as first, first.client() as client:
        start(client)
        for number in range(2):
            client.generate_once(prompt, experiment=Experiment(f"first-{number}"), stop=short)
            eventually(lambda: settled(first) == number + 1)
        own = f"--experiment_spool={tmp_path / 'second'}"
        with killed, Daemon(sample_model, *store, own) as second, second.client() as other:
            for number in range(2):
                context = Experiment(f"second-{number}")
                other.generate_once(prompt, experiment=context, stop=short)
                eventually(lambda: settled(second) == number + 1)
            # The same unit, of which this one has not heard.
            other.generate_once(prompt, experiment=Experiment("first-0"), stop=short)
            eventually(lambda: settled(second) == 3)
            eventually(lambda: pairs(client).later_requests == 1)
            shown = other.generate_once(prompt, experiment=Experiment("killed"), stop=long)
            assert shown.accepted is not None
            arm = shown.accepted.arm.removeprefix("lean/")
            eventually(lambda: by_arm(client)[arm].waiting == 1)
            second.kill()
        found = by_arm(client)
        assert sum(each.compared for each in found.values()) == 4
        assert found[arm].waiting == 1, "it may still be under way"
    with Daemon(sample_model, *store, "--experiment_lost_seconds=1") as later:
        with later.client() as client:
            eventually(lambda: by_arm(client)[arm].lost == 1)
            assert sum(each.waiting for each in pairs(client).shown) == 0
            assert sum(each.compared for each in pairs(client).shown) == 4


def test_without_replays_there_are_no_pairs(sample_model: Path, tmp_path: Path) -> None:
    with Daemon(sample_model, *flags(tmp_path / "a.db", permille=0)) as daemon:
        with daemon.client() as client, pytest.raises(RpcError, match="experiment_shadow_permille"):
            start(client)
    with Daemon(sample_model, *flags(tmp_path / "b.db")) as daemon, daemon.client() as client:
        start(client)
    with Daemon(sample_model, *flags(tmp_path / "b.db", permille=0)) as daemon:
        with daemon.client() as client:
            client.generate_once("7 + 8", experiment=Experiment("u"), stop=Stop(120))
            eventually(lambda: sum(a.requests for a in client.experiment_report("lean").arms) == 1)
            assert sum(each.units for each in pairs(client).shown) == 0

"""The soak's driver: a short wave of it holds, and what does not hold is seen."""

import math
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from epikv.errors import RpcError
from epikv.messages import Model
from epikv.sample import problem
from epikv.testing import Daemon
from epikv.v1 import generation_pb2, kv_pb2

sys.path.insert(0, str(Path(__file__).parents[2] / "soak"))

import soak
import watch
from calls import Caller, Outcome
from cases import Behaviour, Case, Cases, Method
from faults import FAULTS, Fault
from load import Load

SEED = 38  # none of its first requests stalls: they take seconds


@pytest.fixture(scope="module")
def daemon(sample_model: Path) -> Iterator[Daemon]:
    pool = f"--kv_pool_bytes={soak.POOL_BYTES['model']}"
    with Daemon(sample_model, *soak.FLAGS, pool) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def load(daemon: Daemon) -> Load:
    return Load(daemon, seed=SEED, clients=8, chunk=soak.CHUNK)


@pytest.fixture(scope="module")
def model(daemon: Daemon) -> Model:
    with daemon.client() as client:
        [model] = client.models()
    return model


def test_a_short_wave_holds(load: Load) -> None:
    load.rest()
    load.wave(2)
    load.rest()
    load.replay()
    assert load.failures == []
    assert load.outcomes["ok"] > 0


def test_every_mode_of_positions_is_drawn(daemon: Daemon, model: Model) -> None:
    """In requests that the daemon is to serve; 300 are less than a wave's."""
    with daemon.client() as client:
        known = client.policies(model=model.name)
    policies = [p for p in known if p.has_artefact or not p.needs_artefact]
    cases = Cases(SEED, [model], policies)
    drawn = [case for case in map(cases.make, range(300)) if not case.faults]
    modes = Counter(case.request.kv.positions for case in drawn)
    assert set(modes) == set(kv_pb2.PositionMode.values())
    assert min(modes.values()) >= 10


def another_bit(outcome: Outcome) -> None:
    outcome.logprobs[3] = math.nextafter(outcome.logprobs[3], -1) - 1e-6


def a_round_untold(outcome: Outcome) -> None:
    outcome.evictions.pop()


def a_protected_victim(outcome: Outcome) -> None:
    outcome.evictions[0].victims[0].index[0] = 0


def another_token_kept(outcome: Outcome) -> None:
    outcome.summary.kv.kept[-1] += 1


def over_the_reservation(outcome: Outcome) -> None:
    kv = replace(outcome.summary.kv, peak_bytes=outcome.accepted.kv.reserved_bytes + 1)
    outcome.summary = replace(outcome.summary, kv=kv)


def an_internal_error(outcome: Outcome) -> None:
    outcome.summary = None
    outcome.error = RpcError(grpc.StatusCode.INTERNAL, "it broke")


TAMPERED = {
    another_bit: "logprobs[3]",
    a_round_untold: "held after token",
    a_protected_victim: "protected token 0",
    another_token_kept: "kept",
    over_the_reservation: "bytes held",
    an_internal_error: "INTERNAL",
}


def a_case(kv: kv_pb2.KvOptions) -> Case:
    request = generation_pb2.GenerateRequest(
        text=problem(0).prompt,
        stop=generation_pb2.StopParams(max_output_tokens=60),
        output=generation_pb2.OutputOptions(
            token_ids=True, logprobs=True, kv_trace=True, kept=True
        ),
        kv=kv,
    )
    wire = request.SerializeToString()
    return Case(0, Method.GENERATE, Behaviour.READ, request, wire, events=0, seconds=0)


def tamper_with(
    monkeypatch: pytest.MonkeyPatch, case: Case, tamper: Callable[[Outcome], None]
) -> None:
    """Only with the first answer, not the replay."""
    answer = Caller.run

    def run(caller: Caller, asked: Case) -> Outcome:
        outcome = answer(caller, asked)
        if asked is case:
            tamper(outcome)
        return outcome

    monkeypatch.setattr(Caller, "run", run)


def what_fails(load: Load, case: Case) -> list[str]:
    load.failures.clear()
    load.alone(case)
    found = [failure.what for failure in load.failures]
    load.failures.clear()
    return found


def test_what_the_first_requests_take_is_no_growth() -> None:
    rests = [watch.Held(float(t), 1024 * mib, 8, 8) for t, mib in enumerate((160, 200, 203))]
    assert watch.growth_kib(rests) == 3 * 1024
    assert watch.growth_kib(rests[:1]) == 0


def test_a_slope_tells_growth_from_noise() -> None:
    noise = random.Random(3)

    def slope(kib_a_minute: float, waves: int = 40) -> watch.Slope | None:
        minutes = [0.75 * wave for wave in range(waves)]
        return watch.slope(
            [
                watch.Held(60 * m, round(2e5 + kib_a_minute * m + noise.gauss(0, 300)), 8, 8)
                for m in minutes
            ]
        )

    still, growing = slope(0), slope(200)
    assert still is not None and still.low < 0 < still.high
    assert growing is not None and 0 < growing.low < 200 < growing.high
    assert slope(0, waves=4) is None


def test_a_replay_may_find_its_prompt_cached(load: Load) -> None:
    request = generation_pb2.GenerateRequest(text=problem(1).prompt)  # of which no other asks
    request.stop.max_output_tokens = 8
    wire = request.SerializeToString()
    case = Case(0, Method.ONCE, Behaviour.READ, request, wire, events=0, seconds=0)
    assert what_fails(load, case) == []


def test_a_score_in_chunks_is_replayed(load: Load) -> None:
    request = generation_pb2.ScoreRequest(
        text=problem(0).prompt,
        continuation_text=problem(0).trace,
        cadence=generation_pb2.SCORE_CADENCE_CHUNK,
        kv=kv_pb2.KvOptions(policy="full"),
    )
    wire = request.SerializeToString()
    case = Case(0, Method.SCORE, Behaviour.READ, request, wire, events=0, seconds=0)
    assert what_fails(load, case) == []


@pytest.mark.parametrize("tamper", TAMPERED, ids=lambda tamper: tamper.__name__)
def test_what_does_not_hold_is_seen(
    load: Load, monkeypatch: pytest.MonkeyPatch, tamper: Callable[[Outcome], None]
) -> None:
    case = a_case(kv_pb2.KvOptions(policy="h2o", max_tokens=140, protect_prompt=True))
    tamper_with(monkeypatch, case, tamper)
    [found] = what_fails(load, case)
    assert TAMPERED[tamper] in found


@pytest.mark.parametrize("allocator", ["uniform", "pyramid", "head_pool", "model_pool"])
def test_lanes_are_held_to_what_they_were_allotted(
    load: Load, monkeypatch: pytest.MonkeyPatch, allocator: str
) -> None:
    """Under every allocator but the first some lanes hold more than the budget, as they may."""
    kv = kv_pb2.KvOptions(policy="snapkv", max_tokens=64, protect_prompt=False)
    kv.policy_params.update({"allocator": allocator, "window": 8, "slack": 0})
    case = a_case(kv)
    assert what_fails(load, case) == []
    tamper_with(monkeypatch, case, a_round_untold)
    [found] = what_fails(load, case)
    assert "held after token" in found


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.plant.name)
@pytest.mark.parametrize("policy", ["full", "sliding"])
def test_each_fault_is_one(load: Load, model: Model, policy: str, fault: Fault) -> None:
    """Whatever it draws, and with nothing else at fault that would be named instead."""
    if policy == "full" and fault.if_evicts:
        pytest.skip("of policies that evict")
    budget = {} if policy == "full" else {"max_tokens": 140}
    of_all = {"text": problem(0).prompt, "kv": kv_pb2.KvOptions(policy=policy, **budget)}
    for draw in range(8):
        if fault.method is generation_pb2.ScoreRequest:
            request = generation_pb2.ScoreRequest(continuation_text="#0 $c", **of_all)
            method = Method.SCORE
        else:
            request = generation_pb2.GenerateRequest(**of_all)
            method = Method.ONCE
        fault.spoil(request, random.Random(draw), model)
        wire = request.SerializeToString()
        faults = (fault.plant,)
        case = Case(draw, method, Behaviour.READ, request, wire, events=0, seconds=0, faults=faults)
        assert what_fails(load, case) == []

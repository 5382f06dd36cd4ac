"""The replica whose steps sleep, by which plans are checked, has the steps that plans have."""

import random

import pytest
from epikv.plan.costs import TICKS, Costs, Settings
from epikv.plan.replica import FULL, Call, Model, Replica
from epikv_lab.bench.executor import Engine, Running


@pytest.mark.parametrize("seed", range(4))
def test_a_sleeping_replica_takes_what_a_simulated_one_takes(seed: int) -> None:
    dice = random.Random(seed)
    settings = Settings(
        kv_capacity_tokens=1500,
        context_length=10**6,
        vocabulary=100,
        max_step_tokens=dice.choice([48, 512]),
        prefill_chunk_tokens=32,
        max_running_requests=dice.choice([3, 20]),
    )
    costs = Costs(
        settings,
        base=((0, 0.01), (8, 0.02)),
        prefill=1e-4,
        pair=1e-7,
        attended=1e-6,
        request=1e-3,
        mixed=2e-3,
    )
    requests = [(dice.randint(1, 300), dice.randint(1, 60)) for _ in range(40)]

    simulated: list[float] = []
    replica = Replica(Model(costs, [FULL]), lambda _, first, end: simulated.append(end / TICKS))
    # Whoever comes first has its step alone; all others wait behind it.
    for number, (prompt, output) in enumerate(requests):
        replica.submit(Call(number, prompt, output, output))
    while replica.end is not None:
        replica.advance()

    engine, slept = Engine(costs), []
    running = [Running(prompt, output) for prompt, output in requests]
    engine.waiting.append(running[0])
    now = engine.step()
    engine.waiting.extend(running[1:])
    while engine.running:
        before = len(engine.running)
        engine.tell()
        slept += [now] * (before - len(engine.running))
        now += engine.step()
    assert slept == pytest.approx(sorted(simulated))

"""Costs are fitted to what a daemon's counters say of its loads."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from epikv.plan.costs import Costs, Policy, Settings
from epikv.plan.measuring import Load, Shape, Timed, fit, fitted_seconds, least_squares, paces
from epikv.plan.replica import FULL, Arm
from epikv.scrape import parse

SETTINGS = Settings(10**6, 4096, 100)
GAP, BEFORE_FIRST, BEFORE_END = 2e-5, 0.003, 0.004
BASE = {0: 4e-3, 1: 2e-3, 2: 2.5e-3, 4: 2.8e-3, 16: 5e-3}
PREFILL, MIXED, PAIR, ATTENDED, REQUEST = 1e-5, 3e-3, 2e-9, 5e-8, 4e-4
SLIDING = 1e-4, 3e-6  # more of a decoded token, and of a prompt's

DESCRIBED = [
    SimpleNamespace(
        name="full",
        prompt_eviction="refuses",
        slack_tokens=0,
        state_bytes_per_token=7,
        state_bytes_per_sequence=90,
    ),
    SimpleNamespace(
        name="sliding",
        prompt_eviction="by_chunk",
        slack_tokens=0,
        state_bytes_per_token=7,
        state_bytes_per_sequence=90,
    ),
]


def load(shape: Shape, waves: int = 3) -> Load:
    """Of a daemon with these costs: each wave's prompts are one step, and all of it decodes together."""
    n, prompt, decodes = shape.at_once, shape.prompt, shape.output - 1
    assert n * prompt <= 512 and prompt <= 256
    more = SLIDING if shape.arm != FULL else (0, 0)
    pairs = n * prompt * (prompt + 1) // 2
    read = BASE[0] + n * (prompt * (PREFILL + more[1]) + REQUEST) + pairs * PAIR
    decode = sum(
        BASE[n] + n * (ATTENDED * min(prompt + i, shape.arm.budget or 10**6) + more[0])
        for i in range(decodes)
    )
    page = parse(
        f"""\
epikv_step_seconds_count{{phase="prefill"}} {waves}
epikv_step_seconds_count{{phase="decode"}} {waves * decodes}
epikv_step_seconds_sum{{phase="prefill"}} {waves * read}
epikv_step_seconds_sum{{phase="decode"}} {waves * decode}
epikv_step_seconds_total{{stage="evict"}} {waves * n * (prompt * more[1] + decodes * more[0])}
epikv_step_tokens_total{{phase="prefill"}} {waves * n * prompt}
epikv_step_tokens_total{{phase="decode"}} {waves * n * decodes}
"""
    )
    prefill, decoded = read + GAP, decode + decodes * GAP
    first, end = prefill + BEFORE_FIRST, prefill + decoded + BEFORE_END
    timed = Timed(prompt, shape.output, first, end, prefill, decoded)
    return Load(shape, [timed] * (waves * n), page)


def users(prompt: int, output: int, mixed: int) -> Load:
    """Of the same daemon, for two users: two sequences decode in every step but one."""
    requests = [Timed(prompt, output, 0, 0, 0, 0)] * 12
    steps = 6 * (output - 1)
    attended = 12 * sum(prompt + i for i in range(output - 1))
    pairs = 12 * prompt * (prompt + 1) / 2
    seconds = BASE[0] + steps * BASE[2] + mixed * MIXED + attended * ATTENDED + pairs * PAIR
    seconds += 12 * (prompt * PREFILL + REQUEST)
    page = parse(
        f"""\
epikv_step_seconds_count{{phase="prefill"}} 1
epikv_step_seconds_count{{phase="decode"}} {steps - mixed}
epikv_step_seconds_count{{phase="mixed"}} {mixed}
epikv_step_seconds_sum{{phase="decode"}} {seconds}
epikv_step_tokens_total{{phase="prefill"}} {12 * prompt}
epikv_step_tokens_total{{phase="decode"}} {2 * steps}
"""
    )
    return Load(Shape(2, prompt, output, users=True), requests, page)


def test_the_costs_that_a_daemon_has_are_found() -> None:
    shapes = [Shape(n, 32, 400) for n in (1, 2, 4, 16)]
    shapes += [Shape(1, 256, 400), Shape(2, 256, 400), Shape(16, 8, 400)]
    shapes += [
        Shape(n, p, 1) for n, p in ((1, 32), (1, 256), (2, 256), (16, 8), (16, 32), (4, 128))
    ]
    sliding = [
        Shape(n, 128, tokens, Arm("sliding", 64)) for n, tokens in ((1, 50), (4, 50), (4, 1))
    ]
    loads = [load(shape) for shape in [*shapes, *sliding]]
    loads += [users(100, 30, 11), users(40, 90, 40)]
    found = fit(loads, SETTINGS, DESCRIBED)
    assert found.error < 1e-3
    # Of budgets, too: what is attended to, and what the policy takes.
    for each in loads:
        took = each.seconds + GAP * each.steps
        assert fitted_seconds(found, each) == pytest.approx(took, rel=0.02), each.shape
    costs = found.prefill, found.mixed, found.pair, found.attended, found.request
    assert costs == pytest.approx((PREFILL, MIXED, PAIR, ATTENDED, REQUEST), rel=0.05)
    assert {n: found.base_seconds(n) for n in BASE} == pytest.approx(
        {n: seconds + GAP for n, seconds in BASE.items()}, rel=0.02
    )
    assert (found.before_first, found.before_end) == pytest.approx((BEFORE_FIRST, BEFORE_END))
    assert found.policies["sliding"] == Policy(
        "by_chunk",
        0,
        pytest.approx(SLIDING[0], rel=1e-3),
        pytest.approx(SLIDING[1], rel=1e-3),
        7,
        90,
    )


def turn(shape: Shape, steps: int, seconds: float, took: float) -> Load:
    page = f"""\
epikv_step_seconds_sum{{phase="decode"}} {seconds}
epikv_step_seconds_count{{phase="decode"}} {steps}
epikv_step_tokens_total{{phase="decode"}} {steps * shape.at_once}
"""
    return Load(shape, [], parse(page), took)


def test_paces_are_of_turns_beside_others_of_their_shape() -> None:
    one, other = Shape(1, 32, 48), Shape(8, 32, 48)
    turns = [
        turn(one, 10, 1, 0.4),
        turn(other, 10, 7, 0.4),
        turn(one, 20, 6, 0.8),  # twice the work, in six times as long
        turn(other, 30, 21, 0.4),
    ]
    turns.insert(1, turn(Shape(1, 32, 48, Arm("sliding", 64)), 10, 99, 0.4))
    # The fit takes no part: it is off by as much in each turn of a shape.
    costs = Costs(SETTINGS, base=((0, 0.0), (1, 0.3), (8, 0.4)), prefill=0)
    found = paces(turns, costs)
    unfit = replace(costs, base=((0, 0.0), (1, 0.9), (8, 0.4)))
    assert paces(turns, unfit) == pytest.approx(found)
    assert [pace / found[1] for pace in found] == pytest.approx([3 / 7, 1, 9 / 7, 9 / 7, 1])
    assert sum(1 / pace for pace in found) == pytest.approx(len(found))


def test_least_squares_finds_what_made_the_sums_and_nothing_below_zero() -> None:
    rows = [[1, 2, 0], [3, 1, 1], [5, 0, 2], [2, 7, 3], [1, 1, 9]]
    sums = [sum(a * b for a, b in zip(row, (0.5, 2.0, 0.25), strict=True)) for row in rows]
    assert least_squares(rows, sums) == pytest.approx([0.5, 2.0, 0.25], rel=1e-4)
    assert least_squares([[1, 1], [1, 2], [1, 3]], [3.0, 2.0, 1.0])[1] == 0

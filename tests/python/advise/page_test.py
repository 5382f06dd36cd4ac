"""What the page says to ask for is what was measured."""

import shlex
from types import SimpleNamespace
from typing import Any

import pytest
from epikv import Kv
from epikv.advise import page
from epikv.advise.search import Candidate
from epikv.cli import options
from epikv.cli.generate import command as generate
from epikv.eval.plan import Arm, Settings

DOUBTING = {"tier_tokens": 1048576, "tier_fetch": 640, "tier_doubt": 0.0012345678}


@pytest.mark.parametrize("more", [{}, DOUBTING, {"read_tokens": 64}])
def test_command_and_experiment_ask_for_the_arm(more: dict[str, float]) -> None:
    arm = Arm("the arm", "cur", {"slack": 15, "leverage": "value"}, 15, kv=more or None)
    given: tuple[Any, ...] = ([arm], Settings(), Candidate(96, arm.label))
    wanted = Kv("cur", 96, arm.params, equal_protection=True, **more).to_proto()
    words = shlex.split(page.command(*given))
    context = generate.make_context("generate", [*words, "a prompt"])
    assert options.take_kv(context.params).to_proto() == wanted
    made = page.experiment(SimpleNamespace(name="sample"), *given)
    assert made.arms[1].kv == wanted

"""What PolicyService says of every policy is what the daemon does."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from epikv import Accepted, Client, Kv, Output, RpcError, Sampling, Stop
from epikv.messages import Policy, PolicyParam
from epikv.sample import problem
from epikv.testing import Daemon
from jsonschema import Draft202012Validator

PROMPT = [5] * 40
OUTPUT = 200


def violations(client: Client, kv: Kv, output: Output = Output()) -> dict[str, str]:
    """What is wrong with these options, by field. The request is always refused: nothing runs."""
    with pytest.raises(RpcError) as caught:
        client.generate_once(
            PROMPT, kv=kv, sampling=Sampling(top_p=0), stop=Stop(OUTPUT), output=output
        )
    found = {v.field: v.description for v in caught.value.field_violations}
    assert "sampling.top_p" in found
    return {field: said for field, said in found.items() if field != "sampling.top_p"}


def refusals(client: Client, policy: Policy, **params: Any) -> dict[str, str]:
    budget = len(PROMPT) + OUTPUT
    return violations(client, Kv(policy.name, budget, params=params))


@pytest.fixture(scope="module")
def policies(client: Client) -> list[Policy]:
    found = client.policies()
    assert len(found) > 30
    return found


def trials(param: PolicyParam) -> Iterator[Any]:
    """Values of every kind, and beside every edge."""
    yield from (True, 0.5, 3, "", "nothing", [], [0], ["nothing"], [0.5], [True])
    yield from param.choices
    yield [*param.choices]
    if param.min is not None:
        for edge in (param.min, param.max):
            for value in (edge - 1, edge, edge + 1, edge + 0.5):
                yield int(value) if value == int(value) else value
                yield [int(value)]


def test_the_schema_admits_what_the_daemon_does(client: Client, policies: list[Policy]) -> None:
    tried = {True: 0, False: 0}
    for policy in policies:
        schema = policy.params_schema
        Draft202012Validator.check_schema(schema)
        validator = Draft202012Validator(schema)
        defaults = {p.name: p.default_value for p in policy.params if p.default_value is not None}
        validator.validate(defaults)
        assert refusals(client, policy, **defaults) == {}
        assert set(schema["properties"]) == {param.name for param in policy.params}
        assert not validator.is_valid({"no_such_parameter": 1})
        assert "kv.policy_params.no_such_parameter" in refusals(client, policy, no_such_parameter=1)
        for param in policy.params:
            for value in trials(param):
                said = refusals(client, policy, **{param.name: value})
                said = said.get(f"kv.policy_params.{param.name}", "")
                # What it says of a value of the right type and range is the policy's own.
                expected = bool(re.match("(items )?must be (of|one of|a |between)|must be a", said))
                admitted = validator.is_valid({param.name: value})
                assert admitted != expected, (policy.name, param.name, value, said)
                tried[admitted] += 1
    assert min(tried.values()) > 500, tried


def test_incompatible_options_are_refused(client: Client, policies: list[Policy]) -> None:
    kinds = set()
    for policy in policies:
        refused = {(option.field, option.value) for option in policy.incompatible_options}
        evicts = ("kv.budget", "absent") in refused
        assert all(option.reason for option in policy.incompatible_options)

        def says(option: str, value: str, at_fault: bool) -> None:
            assert at_fault == ((option, value) in refused), (policy.name, option, value)
            refused.discard((option, value))
            if at_fault:
                kinds.add((option, value))

        def budget(tokens: int | None) -> bool:
            return "kv.budget" in violations(client, Kv(policy.name, tokens))

        whole = len(PROMPT) + OUTPUT - 1
        says("kv.budget", "absent", budget(None))
        says("kv.budget", "below prompt + max_output_tokens - 1", budget(whole - 1) > budget(whole))
        with pytest.raises(RpcError) as caught:
            client.score(PROMPT, [999], kv=Kv(policy.name, 300), chunked=True)
        fields = {violation.field for violation in caught.value.field_violations}
        says("cadence", "SCORE_CADENCE_CHUNK", "cadence" in fields)
        if evicts:
            fits = len(PROMPT) + 16
            assert not budget(fits), policy.name
            says("kv.budget", "below prompt + 16", budget(fits - 1))
            told = violations(client, Kv(policy.name, fits - 1), Output(prompt_logprobs=True))
            says(
                "output.prompt_logprobs",
                "true with a budget below prompt + 16",
                "output.prompt_logprobs" in told,
            )
        ranks = violations(client, Kv(policy.name, len(PROMPT) + 50, positions="cache"))
        says("kv.positions", "POSITION_MODE_CACHE", "kv.positions" in ranks)
        for param in policy.params:
            listed = param.type == "choice_list"
            values = param.choices or ([False, True] if param.type == "bool" else [])
            for value in values:
                field = f"kv.policy_params.{param.name}"
                shown = str(value).lower() if param.type == "bool" else value
                said = refusals(client, policy, **{param.name: [value] if listed else value})
                says(field, shown, field in said)
        reads = violations(client, Kv(policy.name, 240, read_tokens=48))
        says("kv.read_tokens", "above 0", "kv.read_tokens" in reads)
        assert refused == set(), policy.name
    assert {option for option, _ in kinds} >= {
        "kv.budget",
        "cadence",
        "kv.policy_params.allocator",
    }


def test_default_protection_is_what_an_accepted_request_has(
    client: Client, policies: list[Policy]
) -> None:
    budget = 120
    for policy in policies:
        kept = policy.default_protection
        assert kept is not None
        kv = Kv(policy.name, None if policy.name == "full" else budget)
        with client.generate(PROMPT, kv=kv, stop=Stop(OUTPUT)) as stream:
            accepted = next(stream)
        assert isinstance(accepted, Accepted) and accepted.kv is not None
        got = accepted.kv
        assert got.sink_tokens == kept.sink_tokens, policy.name
        assert (got.protected_prompt_tokens > 0) == (kept.protect_prompt is not False)
        if policy.name in ("full", "quest"):  # nothing is evicted: nothing is protected from it
            continue
        asked = budget // 4 if kept.recent_tokens is None else kept.recent_tokens
        if kept.recent_share is not None:
            asked = int(kept.recent_share * budget)
        room = budget - max(got.protected_prompt_tokens, got.sink_tokens)
        assert got.recent_tokens == min(max(asked, 1), room), policy.name


def test_equal_protection_can_be_the_servers_default(sample_model: Path) -> None:
    """h2o by itself keeps half of the budget for the newest tokens and no prompt."""
    task = problem("equal/0")
    prompt = len(task.prompt.split())

    def prompt_kept(client: Client, **protection: Any) -> bool:
        kv = Kv("h2o", prompt + 40, **protection)
        result = client.generate_once(
            task.prompt, kv=kv, stop=Stop(200), output=Output(kept=True), sampling=Sampling(seed=1)
        )
        assert result.summary.kv is not None
        assert result.summary.kv.rounds > 0
        return set(range(prompt)) <= set(result.summary.kv.kept)

    for default in (False, True):
        flag = f"--default_equal_protection={str(default).lower()}"
        with Daemon(sample_model, "--threads=1", flag) as daemon, daemon.client() as client:
            assert prompt_kept(client) == default
            assert prompt_kept(client, equal_protection=True)
            assert not prompt_kept(client, equal_protection=False)
            assert not prompt_kept(client, sink_tokens=0)

"""Constraints on output through the real daemon: what ends well is what was asked for, by oracles that share
nothing with it: `re`, `json`, jsonschema."""

import json
import random
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from byte_model import export_bytes
from click.testing import CliRunner
from epikv import Client, Kv, Output, Sampling, Stop
from epikv.cli import main
from epikv.sample import problem
from epikv.testing import Daemon

TASK = problem(9)
IDS = Output(token_ids=True, logprobs=True)


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """The same without an end-of-sequence token."""
    path = export_bytes(tmp_path_factory.mktemp("endless"), "endless")
    with Daemon(path, "--threads=1") as daemon, daemon.client() as client:
        yield client


def random_regex(rng: random.Random, depth: int = 3) -> str:
    """In what `re` and JavaScript read alike. Mostly of texts that a random model soon ends."""
    atoms = [
        "a",
        "zq",
        "x",
        "[a-f]",
        "[^a-z]",
        "\\d",
        "\\.",
        "é",
        "日本",
        "[α-ω]",
        "😀",
        " ",
        "\\n",
        ".",
    ]

    def atom() -> str:
        if depth > 0 and rng.random() < 0.3:
            return f"({rng.choice(['', '?:'])}{random_regex(rng, depth - 1)})"
        return rng.choice(atoms)

    def piece() -> str:
        times = rng.choice(["", "", "", "?", "{2}", "{0,2}", "{1,3}", "*", "+", "{2,}"])
        inner = atom()
        return f"(?:{inner}){times}" if times and len(inner) > 1 else inner + times

    return "|".join(
        "".join(piece() for _ in range(rng.randint(1, 3)))
        for _ in range(rng.choice([1, 1, 1, 2, 3]))
    )


def sampled(
    client: Client, seed: int, stop: Stop | None = None, **constraint: Any
) -> Iterator[Any]:
    """A greedy completion, and one at temperature 1."""
    for temperature in (0.0, 1.0):
        sampling = Sampling(temperature=temperature, seed=seed, **constraint)
        yield client.generate_once(
            "go", sampling=sampling, stop=stop or Stop(max_output_tokens=80), output=IDS
        )


@pytest.mark.parametrize("model", ["talker", "endless"])
def test_what_ends_well_matches_a_regex(model: str, request: pytest.FixtureRequest) -> None:
    client, rng, ended = request.getfixturevalue(model), random.Random(5), 0
    for seed in range(120):
        regex = random_regex(rng)
        for result in sampled(client, seed, regex=regex):
            reason = result.summary.finish_reason
            assert reason in ("end", "length")
            if reason == "end":
                ended += 1
                assert re.fullmatch(regex, result.text, re.DOTALL), (regex, result.text)
    assert ended > 60  # of 240; the others have room to go on


def test_a_choice_is_one_of_them(endless: Client) -> None:
    rng = random.Random(6)
    alphabet = 'ab "\\\n\té日😀{}[]'
    for seed in range(60):
        choices = [
            "".join(rng.choices(alphabet, k=rng.randint(1, 8))) for _ in range(rng.randint(1, 9))
        ]
        for result in sampled(endless, seed, choice=choices):
            assert result.summary.finish_reason in ("end", "length")
            # Without an end token a choice that begins another one is gone on from, if need be.
            assert result.text in choices
            assert result.accepted.sampling.choice == choices


def random_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    kind = rng.choice(
        ["string", "integer", "boolean", "null", "enum", "const", "number", "pattern"]
        + ["object", "array", "anyOf", "types"] * (2 if depth > 0 else 0)
    )
    match kind:
        case "string":
            least = rng.randint(0, 2)
            return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 4)}
        case "pattern":
            return {
                "type": "string",
                "pattern": "^" + rng.choice(["[a-c]{1,3}", "x+y?", "\\u00e9\\d"]) + "$",
            }
        case "integer" | "number":
            low = rng.randint(-1000, 1000)
            return {"type": kind, "minimum": low, "maximum": low + rng.randint(0, 500)}
        case "boolean" | "null":
            return {"type": kind}
        case "enum":
            return {"enum": rng.sample(["a", 1, None, True, 'é"\n', 2.5, [1, "x"], {"k": 0}], 3)}
        case "const":
            return {"const": rng.choice(["fixed", 7, {"a": [1, 2]}, False])}
        case "types":
            return {"type": rng.sample(["integer", "boolean", "null"], 2)}
        case "anyOf":
            return {"anyOf": [random_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]}
        case "array":
            least = rng.randint(0, 2)
            return {
                "type": "array",
                "items": random_schema(rng, depth - 1),
                "minItems": least,
                "maxItems": least + rng.randint(0, 2),
            }
        case "object":
            names = rng.sample(["a", "b c", "é", 'q"', "long_name", "z"], rng.randint(1, 4))
            return {
                "type": "object",
                "properties": {name: random_schema(rng, depth - 1) for name in names},
                "required": rng.sample(names, rng.randint(0, len(names))),
                "additionalProperties": False,
            }
    raise AssertionError(kind)


def test_what_ends_well_is_json_that_its_schema_allows(talker: Client) -> None:
    rng, ended = random.Random(7), 0
    # Whitespace is as good as anything to a random model: it would go on with it.
    bias = dict.fromkeys(b" \t\r\n", -100.0)
    for seed in range(100):
        schema = random_schema(rng)
        for result in sampled(
            talker, seed, Stop(max_output_tokens=300), json_schema=schema, logit_bias=bias
        ):
            if result.summary.finish_reason == "end":
                ended += 1
                jsonschema.validate(json.loads(result.text), schema)
    assert ended > 120


FORMATS = (
    "date",
    "date-time",
    "duration",
    "hostname",
    "ipv4",
    "ipv6",
    "time",
    "uri",
    "uri-reference",
    "uuid",
)


def test_strings_of_a_format_are_json(talker: Client) -> None:
    ended = 0
    for seed, name in enumerate(FORMATS):
        for result in sampled(talker, seed, json_schema={"type": "string", "format": name}):
            if result.summary.finish_reason == "end":
                assert isinstance(json.loads(result.text), str)
                ended += 1
    assert ended > 10


def test_json_of_any_kind(talker: Client) -> None:
    ended = 0
    for seed in range(20):
        for result in sampled(talker, seed, json_schema="{}"):
            if result.summary.finish_reason == "end":
                json.loads(result.text)
                ended += 1
    assert ended > 5


def test_a_grammar(endless: Client) -> None:
    grammar = r"""
        root ::= expression
        expression ::= term | term "+" expression   # sums
        term ::= [0-9] | "(" expression ")"
    """
    for seed in range(20):
        for result in sampled(endless, seed, Stop(max_output_tokens=40), grammar=grammar):
            # Nothing says that a sum is whole but that it can end: it goes on to its length.
            assert result.summary.finish_reason == "length"
            assert re.fullmatch(r"[0-9+()]+", result.text)
            assert result.accepted.sampling.grammar == grammar


def test_a_constraint_that_allows_all_changes_nothing(client: Client) -> None:
    """On the sample model, which solves its problem under it. Special tokens are no text."""
    special = [token for token in range(164) if not client.detokenize([token])]
    assert 0 < len(special) < 20
    bias = {token: -100.0 for token in special if token != 3}  # the end
    for kv in (Kv(), Kv("epikv_flat", 300)):
        plain = client.generate_once(
            TASK.prompt, kv=kv, sampling=Sampling(logit_bias=bias), output=IDS
        )
        all_of_unicode = r"root ::= [\x00-\U0010FFFF]*"
        for constraint in ({"regex": r"[\s\S]*"}, {"regex": ".*"}, {"grammar": all_of_unicode}):
            free = client.generate_once(
                TASK.prompt, kv=kv, sampling=Sampling(logit_bias=bias, **constraint), output=IDS
            )
            assert (free.token_ids, free.text) == (plain.token_ids, plain.text)
            assert free.logprobs == pytest.approx(plain.logprobs, abs=1e-4)
            assert free.summary.finish_reason == plain.summary.finish_reason


def test_the_sample_model_says_what_it_may(client: Client) -> None:
    """Its words stand apart by spaces, and its end is a token of its own."""
    words = TASK.trace.split()
    choices = [" ".join(words[:3]), " ".join(words[4:9]), words[1]]
    result = client.generate_once(TASK.prompt, sampling=Sampling(choice=choices), output=IDS)
    assert result.text in choices
    assert result.summary.finish_reason == "end"


def test_batches_seeds_and_several_completions(talker: Client) -> None:
    """Each is what it is alone, whoever is beside it and however its prompt is chunked."""
    asked = [
        {"sampling": Sampling(temperature=1, seed=seed, **constraint), "output": IDS}
        for seed in range(4)
        for constraint in ({"regex": "[a-m]{5,20}!"}, {}, {"choice": ["yes", "no", "日本"]})
    ]
    prompt = "some words that are longer than one chunk of a prompt is " * 2
    stop = Stop(max_output_tokens=24)
    alone = [talker.generate_once(prompt, stop=stop, **one) for one in asked]
    with ThreadPoolExecutor(len(asked)) as pool:
        together = list(pool.map(lambda one: talker.generate_once(prompt, stop=stop, **one), asked))
    assert [r.token_ids for r in together] == [r.token_ids for r in alone]

    several = talker.generate_once(
        prompt,
        sampling=Sampling(temperature=1, seed=0, n=4, regex="[a-m]{5,20}!"),
        output=IDS,
        stop=stop,
    )
    assert several.completions[0].token_ids == alone[0].token_ids
    assert len({c.text for c in several.completions}) == 4
    for completion in several.completions:
        whole = "[a-m]{5,20}!" if completion.finished.finish_reason == "end" else "[a-m]{0,40}!?"
        assert re.fullmatch(whole, completion.text)


def test_with_everything_else_that_shapes_a_draw(talker: Client) -> None:
    everything = Sampling(
        temperature=0.8,
        top_p=0.9,
        top_k=40,
        min_p=0.01,
        repetition_penalty=1.2,
        presence_penalty=0.5,
        logit_bias={ord("a"): 50.0, ord("b"): -100.0},
        seed=1,
        regex="[ab]{10}[c-z]{0,5}",
    )
    result = talker.generate_once(
        "go", sampling=everything, output=IDS, stop=Stop(max_output_tokens=30)
    )
    assert re.match("[ab]{10}", result.text)
    # Banned by a bias, but the constraint leaves nothing else.
    forced = talker.generate_once("go", sampling=Sampling(regex="bbb", logit_bias={98: -100.0}))
    assert forced.text == "bbb"
    # Log-probabilities are those of the raw logits.
    scored = talker.score(talker.tokenize("go"), result.token_ids)
    assert scored.logprobs == pytest.approx(result.logprobs, abs=1e-4)
    # The end waits for the least output where the text can go on, and only there.
    long = talker.generate_once(
        "go",
        sampling=Sampling(regex="[a-c]+"),
        stop=Stop(min_output_tokens=20, max_output_tokens=21),
        output=IDS,
    )
    assert len(long.token_ids) >= 20
    assert 3 not in long.token_ids[:20]
    stopped = talker.generate_once(
        "go", sampling=Sampling(choice=["abcSTOPdef"]), stop=Stop(stop_strings=["STOP"])
    )
    assert (stopped.text, stopped.summary.finish_reason) == ("abc", "stop_string")


def test_on_the_command_line(talking: Daemon, tmp_path: Path) -> None:
    schema, grammar = tmp_path / "schema.json", tmp_path / "grammar.ebnf"
    schema.write_text('{"enum": ["é", 12]}')
    grammar.write_text('root ::= "ab" | "cd"')
    for options, texts in (
        (["--regex", "[ab]{3}"], None),
        (["--choice", "yes", "--choice", "no"], {"yes", "no"}),
        (["--json-schema", str(schema)], {'"é"', "12", '"\\u00e9"'}),
        (["--grammar", str(grammar)], {"ab", "cd"}),
    ):
        done = CliRunner().invoke(main, ["generate", "go", "--server", talking.grpc, *options])
        assert done.exit_code == 0, done.output
        text = done.stdout.strip()
        assert re.fullmatch("[ab]{3}", text) if texts is None else text in texts

"""A draft model that guesses ahead, through the real daemon: the same answers, sooner."""

import json
import zipfile
from functools import partial
from pathlib import Path

import pytest
from admin_calls import admin_of
from click.testing import CliRunner
from epikv import Kv, Output, RpcError, Sampling, Speculation, Stop
from epikv.cli import main
from epikv.sample import problem
from epikv.scrape import scrape
from epikv.testing import Daemon, DaemonError

OUTPUT = Output(token_ids=True, logprobs=True, kept=True)
DRAFT = Speculation("draft", 6)


def test_answers_are_those_without_a_draft(sample_model: Path) -> None:
    """The model drafts for itself: what is greedy comes true as long as its cache is whole."""
    flags = ("--threads=1", "--deterministic=true", f"--draft_model={sample_model}")
    with Daemon(sample_model, *flags) as daemon, daemon.client() as client:
        assert client.models()[0].draft_model == "sample"
        accepted = 0
        for kv in (Kv(), Kv("h2o", 200, {"slack": 32})):
            for temperature in (0.0, 1.0):

                def answer(speculation: Speculation | None) -> object:
                    return client.generate_once(
                        problem("draft").prompt,
                        kv=kv,
                        sampling=Sampling(temperature=temperature, seed=7),
                        stop=Stop(max_output_tokens=300),
                        output=OUTPUT,
                        speculation=speculation,
                    )

                plain, drafted = answer(None), answer(DRAFT)
                assert (drafted.token_ids, drafted.text) == (plain.token_ids, plain.text)
                assert drafted.logprobs == plain.logprobs
                assert drafted.summary.kv.kept == plain.summary.kv.kept
                assert drafted.accepted.speculation == DRAFT
                usage = drafted.summary.usage
                accepted += usage.accepted_tokens
                assert usage.accepted_tokens <= usage.guessed_tokens
                if kv == Kv() and temperature == 0:
                    assert usage.accepted_tokens >= 0.95 * usage.guessed_tokens
        assert accepted > 0  # how many are drafted is by what steps take beside other work
        assert scrape(daemon.metrics).value("epikv_step_seconds_total", stage="draft") > 0
        # As people ask for it.
        done = CliRunner().invoke(
            main,
            ["generate", "--server", daemon.grpc, "--draft", "--json", problem("draft").prompt],
        )
        assert json.loads(done.stdout.splitlines()[0])["speculation"]["source"] == "draft", (
            done.stdout
        )


def test_a_model_without_one_refuses(daemon: Daemon) -> None:
    with daemon.client() as client, pytest.raises(RpcError) as caught:
        client.generate_once("x", speculation=DRAFT)
    assert "speculation.source: is DRAFT, and this model has no draft model" in str(caught.value)


def test_a_loaded_model_may_have_one(sample_model: Path) -> None:
    with Daemon(sample_model, "--threads=1", "--kv_pool_bytes=50000000") as daemon:
        loaded = admin_of(daemon)(
            "load-model", str(sample_model), "--name=drafts", f"--draft-model={sample_model}"
        )
        assert loaded["draft_model"] == "sample"
        with daemon.client() as client:
            ask = partial(client.generate_once, model="drafts", speculation=DRAFT)
            assert any(
                ask(problem(number).prompt).summary.usage.accepted_tokens > 0 for number in range(9)
            )


def test_what_is_no_draft_of_the_model_stops_the_start(sample_model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.pt"
    with zipfile.ZipFile(sample_model) as source, zipfile.ZipFile(other, "w") as out:
        for entry in source.infolist():
            content = source.read(entry)
            if entry.filename.endswith("tokenizer.json"):
                content = content.replace(b"{", b"{ ", 1)
            out.writestr(entry, content)
    for path, why in (
        (other, "its tokenizer is not the model's"),
        (tmp_path / "none.pt", "none.pt"),
    ):
        with pytest.raises(DaemonError) as caught, Daemon(sample_model, f"--draft_model={path}"):
            pass
        assert why in str(caught.value)

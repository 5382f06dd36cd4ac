"""What policies cost on texts (`python -m epikv_lab.stdlib judge`), on the real daemon."""

from pathlib import Path

import pytest
from epikv.client import Client
from epikv.eval.plan import arms
from epikv.options import Kv
from epikv.sample import problem
from epikv_lab.stdlib import judge


def test_costs_are_none_where_nothing_is_dropped(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = problem("judge/0")
    ids = client.tokenizer().encode(f"{task.prompt} {task.trace}").ids[:400]  # all are judged
    passage = judge.Passage("0", ids[:40], ids[40:], far=list(range(0, len(ids) - 40, 3)))
    compared = arms(client.policies(), ["sliding"], slack=0, oracle=False)
    monkeypatch.setattr(judge, "SHARES", (1.0, 0.3))
    out = tmp_path / "costs.jsonl"
    judge.bind(out, "weights", "texts", slack=0)
    refused: dict[str, str] = {}
    found = list(judge.judge(client, "", [passage], compared, out, 4, refused))
    assert not refused
    alone = client.score(passage.prompt, passage.forced, kv=Kv("full"))
    assert {of.arm for of in found} == {arm.label for arm in compared[1:]}
    for of in found:
        assert of.nats_full == pytest.approx(-sum(alone.logprobs), abs=1e-3)
        assert of.places == len(passage.forced) and 0 < of.known <= len(passage.far)
        if of.budget == len(ids):
            assert of.kl < 1e-3 and of.same == of.places and of.kept == of.known, of
        else:
            assert of.kl > 1e-2 and of.same < of.places
    assert judge.costs(out) == found


def test_all_that_can_be_judged_is_by_default(client: Client, artefact_dir: Path) -> None:
    wanted = judge.usable(client.policies())
    assert {"sliding", "h2o", "epikv_probe", "epikv_probe:aged=true"} <= set(wanted)
    assert "oracle" not in wanted
    assert arms(client.policies(), wanted, slack=0, oracle=False)

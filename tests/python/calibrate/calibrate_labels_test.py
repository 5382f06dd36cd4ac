"""Which tokens a calibration calls needed, and the files in which it keeps what it measured."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from epikv.calibrate import occlusion
from epikv.calibrate.eviction import find_reads
from epikv.calibrate.journal import Journal, JournalError
from epikv.calibrate.labels import Labels, agreement, agreement_of
from epikv.calibrate.occlusion import Occlusion, Vocabulary
from epikv.calibrate.traces import Budget, Problem, Trace, answer_start
from epikv.eval.forms import AnswerForm
from epikv.eval.items import Item

# Labels by occlusion


class Words:
    """In place of the daemon: a token is a word."""

    def __init__(self, *words: str) -> None:
        self.words = words

    def text(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(self.words[i] for i in ids)


def trace(prompt: int = 20, output: int = 60, answer: int = 52) -> Trace:
    item = Item("0", "", lambda text: [], output)
    steps = np.ones((3, output - 1))
    ids = list(range(100, 100 + prompt + output))
    return Trace(Problem("task", item), ids[:prompt], ids[prompt:], answer, steps)


def test_where_an_answer_starts() -> None:
    thought = Words(" one", " </think>", "\n", " two", " \\bo", "xed{", "3}")
    assert answer_start(thought, [0, 1, 0, 1, 2, 3, 6]) == 5  # the last, and past the white space
    assert answer_start(thought, [0, 3, 4, 5, 6, 3]) == 2  # the token in which the box begins
    assert answer_start(thought, [0] * 100) == 36
    assert answer_start(thought, [0] * 10) == 0
    told = AnswerForm(after="two").begins
    assert answer_start(thought, [0, 3, 1, 3, 6, 4, 5], told) == 3  # the last such word
    assert answer_start(thought, [0, 1, 0], told) == 2  # as without: it is not there


def test_a_budget_is_the_prompt_and_a_share_of_the_trace() -> None:
    assert Budget.of(114, 550, 0.5) == Budget(389, 97, 178)
    assert Budget.of(100, 4000, 0.5) == Budget(2100, 128, 1872)
    assert Budget.of(1000, 100, 0.5) == Budget(1050, 50, 0)


def test_windows_cover_what_eviction_can_reach() -> None:
    one = trace()
    recent = one.budget(0.5).recent
    assert recent == 12
    over = list(occlusion.windows(one, Occlusion(8, 4), 0.5))
    assert [(w.first, w.end) for w in over] == [
        (first, min(first + 8, 40)) for first in range(36, -1, -4)
    ]
    assert all(w.go_on == w.end + recent for w in over)
    assert all(w.go_on == 52 for w in occlusion.windows(one, Occlusion(8, 4, start="answer"), 0.5))
    assert not list(occlusion.windows(trace(answer=10), Occlusion(8, 4), 0.5))


def test_a_window_is_replaced_and_nothing_else() -> None:
    vocabulary = Vocabulary(np.arange(10, 60), 1, None)
    one = trace()
    for window in occlusion.windows(one, Occlusion(8, 4), 0.5):
        given = window.ids(Occlusion(8, 4), vocabulary)
        whole = [*one.prompt, *one.output[: window.go_on]]
        assert len(given) == len(whole)
        differ = [i - 20 for i, (a, b) in enumerate(zip(given, whole, strict=True)) if a != b]
        assert differ == list(range(window.first, window.end))


def test_fillers() -> None:
    tokenizer = json.dumps(
        {
            "added_tokens": [
                {"id": 0, "content": "<pad>", "special": True},
                {"id": 3, "content": "<think>", "special": True},
                {"id": 4, "content": "word", "special": False},
            ]
        }
    )
    vocabulary = Vocabulary.of(tokenizer, 12, [5])
    assert vocabulary.ordinary.tolist() == [1, 2, 4, 6, 7, 8, 9, 10, 11]
    drawn = vocabulary.filler("randmulti", 6, 1, 10)
    assert len({*drawn}) == 6 and {*drawn} <= {*vocabulary.ordinary.tolist()}
    assert drawn == vocabulary.filler("randmulti", 6, 1, 10)
    assert drawn != vocabulary.filler("randmulti", 6, 1, 11)
    assert drawn != vocabulary.filler("randmulti", 6, 2, 10)
    assert len(vocabulary.filler("randmulti", 40, 1, 10)) == 40
    assert vocabulary.filler("eos", 2, 0, 0) == [5, 5]
    assert vocabulary.filler("pad", 2, 0, 0) == [0, 0]
    assert len({*vocabulary.filler("random", 9, 0, 0)}) == 1
    with pytest.raises(ValueError, match="no pad token"):
        Vocabulary.of("{}", 12, [5]).filler("pad", 2, 0, 0)


def test_a_token_is_needed_if_any_window_over_it_is(tmp_path: Path) -> None:
    over = list(occlusion.windows(trace(), Occlusion(8, 4), 0.5))
    with Journal(tmp_path / "a", {}) as journal:
        for window in over:
            journal.add(window.key, {"right": [True, window.first not in (8, 12)]})
        flips = [(window, occlusion.flipped(window, journal)) for window in over]
    assert np.flatnonzero(occlusion.needed(flips, 40)).tolist() == list(range(8, 20))
    assert occlusion.needed([], 0).tolist() == []


def test_agreement_is_over_windows() -> None:
    over = list(occlusion.windows(trace(), Occlusion(8, 4), 0.5))
    full = Labels([], {}, [[(window, window.first in (8, 12)) for window in over]])
    exact = np.isin(np.arange(40), [15])  # in the windows from 8 and from 12
    agreed = agreement(full, Labels([exact], {}))
    assert agreed["auc"] == agreed["kappa"] == 1
    assert agreed["flipped, with a needed token in it"] == 1
    assert agreed["flipped, without"] == 0
    assert agreement(full, Labels([np.zeros(40, bool)], {}))["kappa"] == 0


def test_kappa() -> None:
    flips = np.repeat([True, True, False, False], [20, 5, 10, 15])
    hits = np.repeat([True, False, True, False], [20, 5, 10, 15])
    assert agreement_of(flips, hits)["kappa"] == pytest.approx(0.4)
    assert agreement_of(flips, flips)["kappa"] == 1
    nothing = agreement_of(np.zeros(9, bool), np.zeros(9, bool))
    assert (nothing["auc"], nothing["kappa"]) == (None, None)


# Labels by eviction


def evictions(runs: int, candidates: int, tokens: int, seed: int) -> np.ndarray:
    """When each candidate goes, if it does: at random, more than half of them by the end."""
    draw = np.random.default_rng(seed)
    return np.where(
        draw.random((runs, candidates)) < 0.6, draw.integers(tokens, size=(runs, candidates)), 10**6
    )


def test_what_is_read_is_found() -> None:
    evicted = evictions(64, 80, 120, 0)
    logprobs = np.random.default_rng(1).normal(-0.2, 0.1, size=(64, 120))
    whole = np.full(120, -0.2)
    gone = {reader: evicted < reader - 1 for reader in (90, 110, 119)}
    logprobs[gone[90][:, 7], 90] -= 3  # one token, and a guess that is sometimes right
    logprobs[gone[110][:, 7] | gone[110][:, 30], 110] -= 3  # either of two
    logprobs[gone[119][:, 50] & gone[119][:, 51], 119] -= 3  # one of two is enough
    found = find_reads(logprobs, whole, evicted, 0.5)
    pairs_found = {(read.token, read.reader) for read in found}
    assert {(7, 90), (7, 110), (30, 110)} <= pairs_found
    assert pairs_found <= {(7, 90), (7, 110), (30, 110), (50, 119), (51, 119)}
    (read,) = (read for read in found if read.reader == 90)
    assert (read.gone, read.kept) == (1, 0)


def test_an_eviction_is_felt_from_the_step_after_it() -> None:
    """Token t is predicted when token t - 1 is cached, before that step evicts."""
    runs = 64
    evicted = np.full((runs, 1), 10**6)
    evicted[::2] = 50
    for reader, felt in ((51, False), (52, True)):
        logprobs = np.zeros((runs, 60))
        logprobs[::2, reader] = -5
        assert bool(find_reads(logprobs, np.zeros(60), evicted, 0.5)) is felt


def test_what_is_likely_only_sometimes_is_no_read() -> None:
    """Of 40 traces with wild log-probabilities that no eviction causes, hardly any has one."""
    wrong = 0
    for seed in range(40):
        evicted = evictions(64, 100, 150, seed)
        logprobs = -np.random.default_rng(seed).lognormal(-1, 2, size=(64, 150))
        wrong += bool(find_reads(logprobs, np.full(150, -0.4), evicted, 0.5))
    assert wrong <= 4


# Journals


def test_a_journal_goes_on_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "work" / "runs.jsonl"
    with Journal(path, {"model": "a", "fractions": (0.5,)}) as journal:
        journal.add("one", {"x": 1})
        journal.add("two", {"x": 2})
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"key": "three", "x"')  # as a crash leaves it
    with Journal(path, {"model": "a", "fractions": (0.5,)}) as journal:
        assert journal.records == {"one": {"x": 1}, "two": {"x": 2}}
        assert "three" not in journal
        journal.add("three", {"x": 3})
    with Journal(path, {"model": "a", "fractions": (0.5,)}) as journal:
        assert journal.records["three"] == {"x": 3}
    assert path.read_bytes().startswith(whole)


def test_a_journal_cut_in_its_first_line_begins_anew(tmp_path: Path) -> None:
    (tmp_path / "a").write_text('{"settings": {"mod')
    with Journal(tmp_path / "a", {"model": "a"}) as journal:
        journal.add("one", {})
    with Journal(tmp_path / "a", {"model": "a"}) as journal:
        assert "one" in journal


def test_a_journal_of_another_model_is_refused(tmp_path: Path) -> None:
    Journal(tmp_path / "a", {"model": "a", "window": 4}).__exit__()
    before = (tmp_path / "a").read_bytes()
    with pytest.raises(JournalError, match="model is 'a' there, 'b' here"):
        Journal(tmp_path / "a", {"model": "b", "window": 4})
    assert (tmp_path / "a").read_bytes() == before


def test_a_journal_has_one_writer(tmp_path: Path) -> None:
    with Journal(tmp_path / "a", {}), pytest.raises(JournalError, match="another process"):
        Journal(tmp_path / "a", {})

"""Steering vectors: which sentences count, and the direction between their means."""

import torch
from epikv.calibrate.steering import Sentences, Words, direction, separation, spans


def test_sentences_end_and_are_marked_by_their_tokens() -> None:
    words = Words(ends=[9], marks=[7])
    assert spans([1, 2, 9, 7, 9, 9, 3, 7], words) == [(0, 3, False), (3, 5, True)]


def test_sentences_count_between_begin_and_end() -> None:
    words = Words(ends=[9], marks=[7], begin=4, end=5)
    assert spans([1, 9, 4, 1, 9, 7, 9, 5, 7, 9], words) == [(3, 5, False), (5, 7, True)]
    # What the end cuts off is none, nor is the mark itself an end.
    assert spans([4, 1, 5, 9], words) == []


def test_the_direction_leads_from_marked_sentences_to_the_others() -> None:
    sentences = Sentences(
        marked=torch.tensor([[0.0, 1.0], [2.0, 1.0]]), others=torch.tensor([[4.0, 1.0]])
    )
    assert direction(sentences).tolist() == [3.0, 0.0]
    assert separation(torch.tensor([1.0, 0.0]), sentences) == 1
    assert separation(torch.tensor([-1.0, 0.0]), sentences) == 0
    assert separation(torch.tensor([0.0, 1.0]), sentences) == 0.5  # all tie

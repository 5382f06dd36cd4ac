"""Probes of recall: facts stated in a text, and whether the model still knows them at its end.

    needle    one fact among passages about something else, at a depth of 0, 25, 50, 75 or 100 %
    recall    many facts of one kind; four of them are asked for

The text is forced through one token a step, so that a policy evicts as it does while a model writes
it. All is made from the split and number of a probe.
"""

import random
from collections.abc import Callable

import click

from epikv.eval.items import Probe

WORDS, PAIRS = 2000, 100  # of a probe, unless said otherwise
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
ASKED = 4

_NEEDLE = "This is a report about a journey. Somewhere in it stands an access code.\n\n"
_RECALL = "This is the register of a left-luggage office. It will be asked about at the end.\n\n"
_PLACES = "harbour museum library station garden castle market bridge theatre mill".split()
_COLOURS = "red blue green yellow white black brown grey orange purple".split()
_THINGS = "suitcase umbrella guitar bicycle parcel lantern camera ladder barrel carpet".split()
_WHO = (
    "the driver", "an old sailor", "our guide", "a young painter", "the baker", "a tall woman",
    "the postman", "two children", "a farmer", "the teacher", "my neighbour", "a musician",
)  # fmt: skip
_DID = (
    "talked about", "remembered", "pointed to", "had once seen", "walked around", "asked for",
    "looked at", "told us of", "was waiting near", "had forgotten", "drew", "described",
)  # fmt: skip
_WHAT = (
    "the river", "a narrow street", "the empty square", "an open window", "the last train",
    "a wooden boat", "the hills", "some apples", "a long letter", "the morning fog", "a stone wall",
    "the village school", "an iron gate", "the summer fair",
)  # fmt: skip
_WHEN = (
    "in the morning", "before it rained", "without a word", "for a while", "after lunch",
    "late at night", "once more", "on the way back", "as every year", "while we waited",
)  # fmt: skip


def needle(split: str, number: int, words: int | None = None) -> Probe:
    """One fact in about so many words."""
    depth = DEPTHS[number % len(DEPTHS)]
    rng = random.Random(f"needle/{split}/{number}/{words}")
    place, code = f"{rng.choice(_COLOURS)} {rng.choice(_PLACES)}", f"{rng.randrange(10**5):05d}"
    passages, left = [], words or WORDS
    while left > 0:
        passages.append(_passage(rng))
        left -= len(passages[-1].split())
    fact = f"The access code of the {place} is {code}."
    passages.insert(round(depth * len(passages)), fact)
    question = f"\n\nQuestion: What is the access code of the {place}?\nAnswer: It is"
    return Probe(
        f"{split}/{number}/{depth:.0%}", _NEEDLE, (" ".join(passages) + question, f" {code}")
    )


def recall(split: str, number: int, pairs: int | None = None) -> Probe:
    """So many things and their numbers, a sentence of something else behind each."""
    rng = random.Random(f"recall/{split}/{number}/{pairs}")
    kinds = [f"{c} {t} from the {p}" for c in _COLOURS for t in _THINGS for p in _PLACES]
    if not ASKED <= (pairs or PAIRS) <= len(kinds):
        raise click.BadParameter(f"recall has {ASKED} to {len(kinds)} pairs, not {pairs}")
    things = rng.sample(kinds, pairs or PAIRS)
    numbers = {thing: f"{rng.randrange(10**4):04d}" for thing in things}
    lines = [f"The {thing} has number {numbers[thing]}. {_passage(rng)}" for thing in things]
    parts = ["\n".join(lines) + "\n\nWhich numbers do these things have?"]
    for thing in rng.sample(things, ASKED):
        parts[-1] += f"\nThe {thing} has number"
        parts += [f" {numbers[thing]}", ""]
    return Probe(f"{split}/{number}", _RECALL, tuple(parts[:-1]))


def _passage(rng: random.Random) -> str:
    subject = rng.choice(_WHO)
    rest = f"{rng.choice(_DID)} {rng.choice(_WHAT)} {rng.choice(_WHEN)}"
    return f"{subject[0].upper()}{subject[1:]} {rest}."


PROBES: dict[str, Callable[[str, int, int | None], Probe]] = {"needle": needle, "recall": recall}

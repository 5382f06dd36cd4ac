"""The sample model's words: one token each, separated by single spaces."""

import string
from collections.abc import Sequence

MODULUS = 10
MAX_STEPS = 40

DIGITS = tuple(str(digit) for digit in range(MODULUS))
VARIABLES = tuple(f"${letter}" for letter in string.ascii_lowercase)
ORDINALS = ("first", "second", "third", "fourth")
NAMES = (*VARIABLES, *ORDINALS)  # what has a value that a problem may ask for
STEPS = tuple(f"#{index}" for index in range(MAX_STEPS))

# The first word of a phrase names it; the rest follows from the word before.
VALUE_PHRASES = (
    "yes i am sure of it",
    "that looks fine to me",
    "ok good until here",
    "right as it should be",
    "well this one was easy",
)
NAME_PHRASES = (
    "now let us keep going",
    "we need to find all others too",
    "next comes another line",
    "then move on with the rest",
    "there is still more work left",
    "remember that for later",
    "take a look at what follows",
    "no reason for any pause",
)

PAD, UNK, BOS, EOS = "<pad>", "<unk>", "<bos>", "<eos>"
THINK, END_THINK = "<think>", "</think>"
SPECIALS = (PAD, UNK, BOS, EOS, THINK, END_THINK)
_FILLER = dict.fromkeys(word for p in VALUE_PHRASES + NAME_PHRASES for word in p.split())
VOCABULARY = (
    *SPECIALS,
    *("ask", "answer", "so", "check", "done", "=", "+", ":", "."),
    *("passcode", "ledger", "log", "alarm", "total"),
    *DIGITS,
    *NAMES,
    *STEPS,
    *_FILLER,
)
TOKEN_IDS = {word: index for index, word in enumerate(VOCABULARY)}


def encode(text: str) -> list[int]:
    """Token ids of a text, as the saved tokenizer gives them."""
    return [TOKEN_IDS.get(word, TOKEN_IDS[UNK]) for word in text.split()]


def decode(ids: Sequence[int]) -> str:
    """The text of token ids."""
    return " ".join(VOCABULARY[i] for i in ids)

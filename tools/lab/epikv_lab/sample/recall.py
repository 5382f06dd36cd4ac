"""Dense associative recall in the final token format: the first stage of training."""

import random

from epikv.sample.vocabulary import BOS, DIGITS, NAMES, THINK

RECALLED_NAMES = (4, 24)


def recall(seed: int | str) -> tuple[list[str], list[bool]]:
    """A sequence's words and, for each, whether it is the value of a name quoted again:

    <bos> <think> so $m 7 . so $y 4 . $y 4 $m 7 $y 4 so first 1 . $y 4 first 1 ...
    """
    rng = random.Random(f"recall/{seed}")
    names = rng.sample(NAMES, rng.randint(*RECALLED_NAMES))
    words, is_recalled = [BOS, THINK], [False, False]
    values: dict[str, str] = {}
    for name in names:
        values[name] = rng.choice(DIGITS)
        words += ["so", name, values[name], "."]
        is_recalled += [False] * 4
        for quoted in rng.choices(list(values), k=rng.randint(0, 4)):
            words += [quoted, values[quoted]]
            is_recalled += [False, True]
    return words, is_recalled

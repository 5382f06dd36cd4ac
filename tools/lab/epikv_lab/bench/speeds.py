"""Tokens a second that a daemon of a random-weight model decodes and reads."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

from epikv import harness
from epikv.options import Kv, Output, Sampling, Stop

LONG_PROMPT = 1024
PROMPT, OUTPUT = 128, 128


def cases(vocab: int) -> dict[str, Callable[[harness.Served, int], float]]:
    """What benches of two daemons compare, by name: of a daemon and a seed, tokens a second."""
    return {
        "decode_1_stream": lambda served, seed: decoded(served, vocab, 1, seed),
        "decode_16_streams": lambda served, seed: decoded(served, vocab, 16, seed),
        "prompt_of_1024": lambda served, seed: prefilled(served, vocab, seed),
    }


def in_turns(
    served: Sequence[harness.Served],
    run: Callable[[harness.Served, int], float],
    rounds: int,
) -> list[list[float]]:
    """Of each round, what each daemon does. One before them, which warms up, is not told."""
    return [[run(of, number) for of in served] for number in range(rounds + 1)][1:]


def decoded(
    served: harness.Served, vocab: int, streams: int, seed: int, prompt: int = PROMPT
) -> float:
    """Of so many streams together, OUTPUT tokens behind a prompt of so many each."""

    def one(stream: int) -> Any:
        dice = Random(f"{seed}/{stream}")
        return served.client.generate_once(
            dice.choices(range(vocab), k=prompt),
            sampling=Sampling(temperature=1.0, seed=stream),
            stop=Stop(OUTPUT, ignore_eos=True),
            output=Output(text=False),
            kv=Kv(bypass_prefix_cache=True),
        )

    with ThreadPoolExecutor(streams) as pool:
        results = list(pool.map(one, range(streams)))
    return streams * (OUTPUT - 1) / max(result.summary.timings.decode for result in results)


def prefilled(served: harness.Served, vocab: int, seed: int) -> float:
    """Of a prompt of LONG_PROMPT tokens."""
    result: Any = served.client.generate_once(
        Random(seed).choices(range(vocab), k=LONG_PROMPT),
        stop=Stop(1, ignore_eos=True),
        output=Output(text=False),
        kv=Kv(bypass_prefix_cache=True),
    )
    return LONG_PROMPT / result.summary.timings.prefill

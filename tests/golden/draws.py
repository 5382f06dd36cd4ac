"""The numbers of policies/random.h: Philox4x32-10 (Salmon et al., SC 2011), written from the paper.
Makers put them in the place of a reference's own chance."""

import math

MASK32 = (1 << 32) - 1


def uint64(seed: int, stream: int, counter: int) -> int:
    block = [counter & MASK32, counter >> 32, stream & MASK32, stream >> 32]
    key = [seed & MASK32, seed >> 32]
    for _ in range(10):
        low, high = 0xD2511F53 * block[0], 0xCD9E8D57 * block[2]
        block = [
            high >> 32 ^ block[1] ^ key[0],
            high & MASK32,
            low >> 32 ^ block[3] ^ key[1],
            low & MASK32,
        ]
        key = [(key[0] + 0x9E3779B9) & MASK32, (key[1] + 0xBB67AE85) & MASK32]
    return block[0] | block[1] << 32


def uniform(seed: int, stream: int, counter: int) -> float:
    """In [0, 1)."""
    return (uint64(seed, stream, counter) >> 11) * 2.0**-53


def gumbel(seed: int, stream: int, counter: int) -> float:
    return -math.log(-math.log(uniform(seed, stream, counter) + 2.0**-54))


def normal(seed: int, stream: int, counter: int) -> float:
    """The counter-th, from two uniform ones, by Box and Muller."""
    radius = math.sqrt(-2 * math.log(uniform(seed, stream, 2 * counter) + 2.0**-54))
    return radius * math.cos(2 * math.pi * uniform(seed, stream, 2 * counter + 1))


def stream_of(newest: int, lane: int) -> int:
    """One for each round and lane."""
    return (newest + 1) << 24 | lane


# Known answers, from the Random123 distribution.
assert uint64(0, 0, 0) == 0xE169C58D6627E8D5
assert uint64((1 << 64) - 1, (1 << 64) - 1, (1 << 64) - 1) == 0x41C83B0E408F276D
assert uint64(0x299F31D0A4093822, 0x0370734413198A2E, 0x85A308D3243F6A88) == 0x94FDCCEBD16CFE09

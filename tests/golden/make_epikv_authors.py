"""Drives the EpiKV authors' classes over synthetic inputs and writes what they did as data.

    git clone https://github.com/stevenkolawole/epiphany-kv-cache /tmp/authors
    git -C /tmp/authors checkout d424208
    python tests/golden/make_epikv_authors.py /tmp/authors

Needs torch and numpy. Their code is imported from the checkout given and is no part of this
repository; golden_policies_test.cc reads the files in epikv_authors/.

A step is as in their benchmark driver: one token is appended to the cache, the policy is called
once, the rows it keeps replace the cache. The fake K rows hold each token's index, so what is kept
can be read off them. Everything is fp32.
"""

import json
import subprocess
import sys
from pathlib import Path

import numpy
import torch

OUT = Path(__file__).parent / "epikv_authors"
# Two tokens whose scores at the cut are nearer than this (relative) are no test of anything.
MIN_GAP = 1e-5


class Cache:
    """The indexes a policy has kept, in the form it expects: ((K, V),) of [1, 1, tokens, 1]."""

    def __init__(self, prompt_tokens: int):
        self.index = list(range(prompt_tokens))

    def step(self, token: int, evict) -> list[int]:
        """Appends `token`, lets `evict` choose, and returns what was dropped."""
        before = self.index + [token]
        rows = torch.tensor(before, dtype=torch.float32).reshape(1, 1, -1, 1)
        kept = evict(((rows, rows),))[0][0].flatten().tolist()
        self.index = [int(row) for row in kept]
        return sorted(set(before) - set(self.index))


def short(values) -> list[float]:
    """fp32 numbers in the fewest digits that read back as the same fp32 number."""
    return [float(str(numpy.float32(value))) for value in values]


def check_gap(victim_scores, open_scores, what: str) -> None:
    for victim in victim_scores:
        for other in open_scores:
            gap = abs(victim - other) / max(abs(victim), abs(other), 1e-9)
            if gap < MIN_GAP:
                sys.exit(f"{what}: scores {victim} and {other} at the cut are too near; new seed")


def flat(authors, prompt_tokens, cache_size, window, steps, seed):
    """hidden: a random walk whose pace drifts and now and then jumps."""
    random = numpy.random.default_rng(seed)
    width, depth_a, depth_b = 16, 10, 21
    policy = authors.DetrendendHSVarianceEviction(
        authors.EvictionConfig(cache_size=cache_size), depth_a, depth_b, window
    )
    policy.reset(prefill_len=prompt_tokens)
    hidden = torch.zeros(2, width)

    def states():
        # Entry l + 1 is the output of block l.
        entries = [torch.zeros(1, 1, width)] * (depth_b + 2)
        entries[depth_a + 1] = hidden[0].reshape(1, 1, -1)
        entries[depth_b + 1] = hidden[1].reshape(1, 1, -1)
        return tuple(entries)

    def walk(step):
        pace = (1 + step / steps) * random.lognormal(0, 0.4, size=(2, 1))
        pace *= numpy.where(random.random((2, 1)) < 0.1, 4, 1)
        return hidden + torch.tensor(pace * random.normal(size=(2, width)), dtype=torch.float32)

    hidden = walk(0)
    policy.set_prefill_end(states())
    cache = Cache(prompt_tokens)
    scores, dropped = [], []
    recent = min(policy.config.keep_recent_k, cache_size // 4)
    for step in range(steps):
        token = prompt_tokens + step
        hidden = walk(step)
        victims = cache.step(token, lambda past: policy.evict_past_key_values(past, states()))
        scores.append(
            authors._rolling_z_score(policy._buf_a, window)
            - authors._rolling_z_score(policy._buf_b, window)
        )
        dropped.append(victims)
        still_open = [scores[i - prompt_tokens] for i in cache.index[prompt_tokens:-recent]]
        check_gap([scores[i - prompt_tokens] for i in victims], still_open, f"flat seed {seed}")
    return {
        "prompt_tokens": prompt_tokens,
        "budget": cache_size,
        "recent": recent,
        "window": window,
        # |h_t - h_(t-1)| of each decode token, and its score.
        "step_a": short(policy._buf_a),
        "step_b": short(policy._buf_b),
        "scores": short(scores),
        "dropped": dropped,
    }


MASK64 = (1 << 64) - 1


def mix(x: int) -> int:
    """splitmix64's finaliser; the C++ test has it too."""
    x = (x + 0x9E3779B97F4A7C15) & MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK64
    return x ^ (x >> 31)


def weight(seed: int, layer: int, head: int, query: int, token: int) -> int:
    """What a query gives a token before normalising: a token's own worth times chance."""
    worth = mix(seed << 32 | token) % 100 + 1
    luck = mix(seed << 56 | layer << 48 | head << 40 | query << 20 | token) % 1000 + 1
    return worth * luck


def h2o(authors, prompt_tokens, cache_size, keep_recent, steps, seed):
    layers, heads = 2, 4
    config = authors.EvictionConfig(cache_size=cache_size, keep_recent_k=keep_recent)
    policy = authors.H2OEviction(config)
    policy.reset()
    cache = Cache(prompt_tokens)
    sinks = min(4, cache_size // 4)
    recent = min(keep_recent, cache_size - sinks)
    dropped, mass = [], {}
    for step in range(steps):
        token = prompt_tokens + step
        index = cache.index + [token]
        attention = []
        for layer in range(layers):
            rows = []
            for head in range(heads):
                row = [weight(seed, layer, head, token, i) for i in index]
                rows.append(numpy.array(row, dtype=numpy.float64) / sum(row))
            attention.append(torch.tensor(numpy.array(rows), dtype=torch.float32)[None, :, None])
        before = None if policy._cumulative_attn is None else policy._cumulative_attn.tolist()
        victims = cache.step(
            token, lambda past: policy.evict_past_key_values(past, tuple(attention))
        )
        dropped.append(victims)
        if victims:
            # The scores that were compared: the buffer before this step plus this step's row.
            row = torch.stack([a.mean(dim=(0, 1, 2)) for a in attention]).mean(dim=0).tolist()
            scores = dict(zip(index, [b + r for b, r in zip((before or []) + [0] * len(row), row)]))
            still_open = [scores[i] for i in cache.index[sinks:-recent]]
            check_gap([scores[i] for i in victims], still_open, f"h2o seed {seed}")
        if step % 50 == 49:
            mass[token] = [
                [i, s] for i, s in zip(cache.index, short(policy._cumulative_attn.tolist()))
            ]
    return {
        "prompt_tokens": prompt_tokens,
        "budget": cache_size,
        "sinks": sinks,
        "recent": recent,
        "layers": layers,
        "heads": heads,
        "seed": seed,
        "dropped": dropped,
        # After some tokens: [index, accumulated attention] of everything cached.
        "mass": mass,
    }


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    checkout = sys.argv[1]
    sys.path.insert(0, checkout)
    from src import eviction as authors

    commit = subprocess.run(
        ["git", "-C", checkout, "rev-parse", "HEAD"], check=True, capture_output=True, text=True
    ).stdout.strip()
    torch.set_num_threads(1)
    runs = {
        "epikv_flat": [
            # prompt, budget, window, decode tokens, seed
            flat(authors, 20, 64, 64, 300, 1),
            flat(authors, 50, 128, 64, 300, 2),
            flat(authors, 10, 256, 32, 500, 3),
            flat(authors, 7, 600, 128, 760, 4),
            flat(authors, 0, 40, 64, 200, 5),
        ],
        "h2o": [
            # prompt, budget, keep_recent, decode tokens, seed
            h2o(authors, 40, 160, 128, 300, 1),
            h2o(authors, 100, 200, 128, 250, 2),
            h2o(authors, 24, 64, 16, 250, 3),
            h2o(authors, 90, 64, 16, 150, 4),
        ],
    }
    OUT.mkdir(exist_ok=True)
    for name, cases in runs.items():
        for case in cases:
            assert sum(map(len, case["dropped"])) >= 50 and sum(map(bool, case["dropped"])) >= 5
        text = json.dumps({"authors_commit": commit, "runs": cases}, separators=(",", ":"))
        (OUT / f"{name}.json").write_text(text.replace('],"', '],\n"') + "\n")
        print(f"{name}: {len(cases)} runs, {len(text)} bytes")


if __name__ == "__main__":
    main()

"""Runs of the StreamingLLM authors' cache as data.

    git clone https://github.com/mit-han-lab/streaming-llm /tmp/streaming-llm
    git -C /tmp/streaming-llm checkout 2e50426
    python tests/golden/make_streaming_llm.py /tmp/streaming-llm

Their code is imported from the checkout given and is no part of this repository. Its cache is given
rows that hold the tokens' indexes, so what it keeps can be read off them.
"""

import sys
from pathlib import Path

import torch
from torch import Tensor
from world import Round, Scorer, Setting, play, write


def kept_by(cache) -> Scorer:
    """1 for what stays, 0 for what goes."""

    def scorer(round_: Round) -> list[Tensor]:
        past = [
            [torch.tensor(layer)[None, :, :, None]] * 2  # [1, kv_heads, n, 1]
            for layer in round_.index
        ]
        return [
            torch.isin(before[0][0, :, :, 0], after[0][0, :, :, 0]).float()
            for before, after in zip(past, cache(past), strict=True)
        ]

    return scorer


def main() -> None:
    sys.path.insert(0, str(Path(sys.argv[1]) / "streaming_llm"))
    from kv_cache import StartRecentKVCache

    runs = []
    for seed, budget, prompt_tokens, slack in ((1, 24, 12, 0), (2, 24, 60, 7), (3, 10, 2, 3)):
        setting = Setting(
            seed=seed,
            budget=budget,
            prompt_tokens=prompt_tokens,
            tokens=100,
            slack=slack,
            sinks=4,
            params={"slack": slack},
        )
        cache = StartRecentKVCache(start_size=4, recent_size=budget - 4)
        run = play(
            "mit-han-lab/streaming-llm 2e50426 `StartRecentKVCache`",
            kept_by(cache),
            setting,
            keep_scores=False,
        )
        # One list for all lanes: they are alike.
        for round_ in run["rounds"]:
            assert all(lane == round_["dropped"][0] for lane in round_["dropped"])
            round_["dropped"] = round_["dropped"][:1]
        runs.append(run)
    write("streaming_llm", "python tests/golden/make_streaming_llm.py CHECKOUT", runs)


if __name__ == "__main__":
    main()

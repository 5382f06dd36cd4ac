"""What policies of the EpiKV family make of residual steps, for whole traces at once.

A trace's steps are [L, T]: how far the residual stream after block l moved at output token t from
the token before. Windows are causal and start at the first output token, as in serving
(policies/epikv/flat_score.h).
"""

from itertools import combinations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

EPSILON = 1e-6


def rolling(steps: Floats, window: int) -> tuple[Floats, Floats]:
    """Mean and z-score [L, T] of each step among the last `window`, itself included.

    The deviation is the population's; equal steps give exactly 0, and so does the first.
    """
    mean, z = np.empty_like(steps), np.empty_like(steps)
    counts = np.minimum(np.arange(1, steps.shape[1] + 1), window)
    # Before the first step, in the windows of the first ones. [min(T, window), window]
    outside = np.arange(window)[None, :] < (window - counts[:window])[:, None]
    for layer, x in enumerate(steps):
        padded = np.concatenate([np.zeros(window - 1), x])
        # Relative to the newest, so that equal numbers give exactly 0.
        from_newest = np.lib.stride_tricks.sliding_window_view(padded, window) - x[:, None]
        from_newest[:window][outside] = 0
        centre = from_newest.sum(1) / counts
        squares = (from_newest - centre[:, None]) ** 2
        squares[:window][outside] = 0
        mean[layer] = x + centre
        z[layer] = -centre / (np.sqrt(squares.sum(1) / counts) + EPSILON)
    return mean, z


def pairs(layers: int) -> list[tuple[int, int]]:
    """All a < b of so many layers."""
    return list(combinations(range(layers), 2))


def pair_scores(z: Floats) -> Floats:
    """Z_a - Z_b of every pair, in the order of `pairs`. [pairs, T]

    In float32, as the policy keeps its scores: what ties there has to tie here.
    """
    a, b = np.array(pairs(len(z))).T
    return (z[a] - z[b]).astype(np.float32).astype(np.float64)

"""What the Guard authors' cache drops, as data.

    git clone https://github.com/OptiSys-ZJU/Cache-Coliseum /tmp/Cache-Coliseum    # 4568bb6
    python tests/golden/make_guard.py /tmp/Cache-Coliseum

Their code is imported from the checkout given and is no part of this repository. Its predictions
are drawn here, one for each page at each access, and so are its random numbers, which are kept: a
choice among n takes the n-th part of one.
"""

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

CASES = (  # slots, pages, accesses, options
    (4, 7, 120, {}),
    (8, 12, 300, {}),
    (8, 12, 300, {"relax_times": 3}),
    (6, 9, 200, {"relax_prob": 0.5}),
    (5, 9, 60, {"follow_if_guarded": True}),
)


def algorithms(checkout: str) -> Any:
    """Their module. Models that it could ask for predictions are not needed."""
    sys.path.insert(0, checkout)
    for name in ("model", "model.models", "model.parrot", "lightgbm"):
        sys.modules.setdefault(name, ModuleType(name))
    from cache.evict import algorithms

    return algorithms


def run(
    theirs: Any, slots: int, pages: int, accesses: int, options: dict[str, Any]
) -> dict[str, Any]:
    rng = random.Random(slots * 1000 + pages)
    drawn: list[float] = []

    def draw() -> float:
        drawn.append(rng.random())
        return drawn[-1]

    def choose(items: Sequence[int]) -> int:
        return items[int(draw() * len(items))]

    scores: dict[int, float] = {}

    class Lowest:
        def evict(self, candidates: Sequence[tuple[int, float]]) -> int:
            return min(candidates, key=lambda pair: scores[cache.cache[pair[0]]])[0]

    class Nobody(theirs.Predictor):
        def __init__(self) -> None:
            pass

        def refresh_scores(self, *_: Any) -> None:
            return None

        def predict_score(self, *_: Any) -> None:
            return None

    theirs.random = ModuleType("random")
    theirs.random.random, theirs.random.choice = draw, choose
    cache = theirs.Guard(slots, Lowest, Nobody, **options)
    cache.preds = [0.0] * slots
    steps = []
    for _ in range(accesses):
        page = rng.randrange(pages)
        scores.update({p: rng.random() for p in range(pages)})
        before = list(cache.cache)
        drawn.clear()
        try:
            cache.access(0, page)
        except (ValueError, IndexError):  # nobody is unguarded
            break
        gone = [p for p in before if p is not None and p not in cache.cache]
        steps.append(
            {
                "page": page,
                "scores": [scores[p] for p in range(pages)],
                "draws": list(drawn),
                "victim": gone[0] if gone else -1,
            }
        )
    return {"slots": slots, "options": options, "steps": steps}


def main(checkout: str) -> None:
    theirs = algorithms(checkout)
    cases = [run(theirs, *case) for case in CASES]
    Path(__file__).with_name("guard.json").write_text(json.dumps(cases) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])

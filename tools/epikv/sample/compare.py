"""All policies on one model's held-out problems."""

from collections.abc import Iterator, Sequence

from epikv.sample.calibrate import Choice, need_from, oracle, problems
from epikv.sample.model import Llama
from epikv.sample.simulate import H2O, EpikvFlat, Recency, Scorer, Uniform, budgets, judge, run

RANDOM_SEED = 0
PUBLISHED = EpikvFlat(1, 3, 1)  # the published layers, at their depths in this model


def compare(
    model: Llama, calibration: dict, count: int, fractions: Sequence[float]
) -> Iterator[dict[str, object]]:
    """One row a policy and budget, over the same `count` test problems; `full` comes first."""
    tasks = problems("test", count)
    need = need_from(calibration)
    layers = calibration["layers"]
    pair = Choice(layers["a"], layers["b"], calibration["sign"], calibration["recall"])
    yield {"policy": "full", "fraction": 1.0, **judge(tasks, run(model, tasks)).summary()}
    for fraction in fractions:
        policies: dict[str, Scorer] = {
            "oracle": oracle(tasks, need, fraction),
            "epikv_flat": pair.scorer(),
            "epikv_flat inverse": pair.scorer(-1),
            "epikv_flat published": PUBLISHED,
            "h2o": H2O(),
            "random": Uniform(RANDOM_SEED),
            "recency": Recency(),
        }
        for name, scorer in policies.items():
            outcome = judge(tasks, run(model, tasks, scorer, budgets(tasks, fraction)))
            yield {"policy": name, "fraction": fraction, **outcome.summary()}

"""Every family that can be exported, served by the real daemon: what it says equals transformers.

More configurations: `python -m epikv_lab.export.sweep`.
"""

import os
from collections.abc import Iterator

import pytest
from epikv.client import Client
from epikv.export.families import FAMILIES
from epikv_lab.export.sweep import Model, check, make, name_of, serving

CONFIGURATIONS = 3 if os.environ.get("EPIKV_NIGHTLY") else 1  # of each family
CASES = [
    *[
        (architecture, seed, "float32")
        for architecture in FAMILIES
        for seed in range(CONFIGURATIONS)
    ],
    *[(architecture, 3, "bfloat16") for architecture in FAMILIES],
    *[(architecture, 4, "float16") for architecture in ("LlamaForCausalLM", "Gemma2ForCausalLM")],
]


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Client, dict[str, Model]]]:
    folder = tmp_path_factory.mktemp("zoo")
    models = [make(*case, folder) for case in CASES]
    with serving(models, folder) as client:
        yield client, {model.name: model for model in models}


@pytest.mark.parametrize("case", CASES, ids=lambda case: name_of(*case))
def test_a_served_model_equals_transformers(
    zoo: tuple[Client, dict[str, Model]],
    case: tuple[str, int, str],
) -> None:
    client, models = zoo
    outcome = check(client, models[name_of(*case)])
    assert outcome.passed(), outcome
    assert outcome.clear > 64

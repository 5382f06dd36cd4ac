"""The evaluations behind the model card, each one `epikv eval` a seed that goes on where it was."""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from epikv.eval.models import exported
from epikv.sample.families import FAMILIES
from epikv.sample.scores import condense, write

MODELS = Path(__file__).resolve().parents[2] / "sample_model"
PUBLISHED = "epikv_flat:layer_a=1,layer_b=3,sign=1"  # at their depths in this model
ANCHORS = ("random_attention", "h2o", "h2o:scope=model", "snapkv", "triattention", "epikv_probe")


def folders(names: Sequence[str] = ()) -> list[Path]:
    """Of the seeds called so, or of all."""
    return [MODELS / name for name in names] or sorted(MODELS.glob("seed*"))


def flat_arms(seed: Path) -> list[str]:
    """epikv_flat as calibrated, with the sign turned round, and as published; and the anchors."""
    calibration = json.loads((seed / "calibration.json").read_text())
    found = []
    if calibration["confirmed"]:
        layers, sign = calibration["layers"], calibration["sign"]
        for turned in (sign, -sign):
            found.append(f"epikv_flat:layer_a={layers['a']},layer_b={layers['b']},sign={turned}")
    return [*found, PUBLISHED, "sliding", *ANCHORS]


@dataclass(frozen=True)
class Evaluation:
    """What is run on every seed's model."""

    tasks: tuple[str, ...]
    problems: int  # of each task
    split: str
    budgets: tuple[float, ...]
    policies: Callable[[Path], list[str]]


_EPIKV = (sys.executable, "-c", "from epikv.cli import main; main()")
_TASKS = tuple(f"sample:{family}" for family in FAMILIES)

EVALUATIONS = {
    "tournament": Evaluation(
        _TASKS, 50, "test", (0.75, 0.5, 0.35, 0.25, 0.15), lambda seed: ["all"]
    ),
    "pair": Evaluation(_TASKS, 125, "pair", (0.5, 0.35, 0.25), flat_arms),
    "lengths": Evaluation(
        tuple(
            f"sample:{name}@{lines}"
            for name, family in FAMILIES.items()
            for lines in sorted((*family.held_out, family.tested))
        ),
        100,
        "lengths",
        (0.5,),
        lambda seed: [],
    ),
}


# Of each family: traces to label and runs of each under random eviction, problems to try pairs on
# and to confirm on.
CALIBRATION = ("--traces=10", "--runs=40", "--try=12", "--confirm=40", "--fraction=0.5")


def calibrate(seed: Path, out: Path) -> Path:
    """Chooses epikv_flat's pair for a seed's model; writes the folder's calibration.json, which says
    if it found none. Exits as the command does, if it does not end well; the same call goes on."""
    file = seed / "calibration.json"
    file.unlink(missing_ok=True)
    command = [*_EPIKV, "calibrate", "epikv_flat", str(exported(seed)), "--dry-run"]
    command += [f"--task={task}" for task in _TASKS] + [*CALIBRATION, "--daemon-flag=threads=1"]
    command += ["-o", str(file), "--work", str(out)]
    status = subprocess.run(command).returncode
    if not file.exists():
        raise SystemExit(status)
    return file


def measure(name: str, seed: Path, out: Path) -> Path:
    """Runs an evaluation on a seed's folder, into `out`, and writes its scores into the folder.

    Exits as `epikv eval` does, if it does not end well; the same call then goes on.
    """
    of = EVALUATIONS[name]
    command = [*_EPIKV, "eval", "--daemon-flag=threads=1"]
    command += ["--model-dir", str(seed), "--out", str(out), "--split", of.split]
    command += [f"--problems={of.problems}"]
    command += [f"--task={task}" for task in of.tasks]
    command += [f"--budget={budget}" for budget in of.budgets]
    command += [f"--policy={policy}" for policy in of.policies(seed)]
    status = subprocess.run(command, stdout=subprocess.DEVNULL).returncode
    if status != 0:
        raise SystemExit(status)
    file = seed / f"{name}.jsonl"
    write(file, condense(out))
    return file

"""The evaluations behind the model card, each one `epikv eval` a seed that goes on where it was."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from epikv import processes
from epikv.cli.eval_models import exported
from epikv.eval.plan import SLACK
from epikv.sample.families import FAMILIES

from epikv_lab.sample.scores import condense, write

MODELS = Path(__file__).resolve().parents[3] / "sample_model"
PUBLISHED = "epikv_flat:layer_a=1,layer_b=3,sign=1"  # at their depths in this model
INVERSE = "epikv_flat:layer_a=1,layer_b=3,sign=-1"
ANCHORS = ("random_attention", "h2o", "h2o:scope=model", "snapkv", "triattention", "epikv_probe")


def folders(names: Sequence[str] = ()) -> list[Path]:
    """Of the seeds called so, or of all."""
    return [MODELS / name for name in names] or sorted(MODELS.glob("seed*"))


# Of the paper; rkv_epikv evicts in rounds of 128, which its authors found it needs.
RKV = "rkv_epikv:slack=127"
COMPARED = ("h2o:scope=model", "raas", "thinkv", "rkv_epikv", RKV, "streaming_llm")


def calibrated(seed: Path) -> list[str]:
    """epikv_flat as calibrated and with the sign turned round; nothing where no pair was found."""
    calibration = json.loads((seed / "calibration.json").read_text())
    if not calibration["confirmed"]:
        return []
    layers, sign = calibration["layers"], calibration["sign"]
    pair = f"epikv_flat:layer_a={layers['a']},layer_b={layers['b']}"
    return [f"{pair},sign={turned}" for turned in (sign, -sign)]


def flat_arms(seed: Path) -> list[str]:
    """epikv_flat as calibrated, with the sign turned round, and as published; and the anchors."""
    return [*calibrated(seed), PUBLISHED, "sliding", *ANCHORS]


def compared(seed: Path) -> list[str]:
    """The paper's own policies, calibrated or with its pair, and those it compares them with."""
    seg = PUBLISHED.replace("flat", "seg")
    return [*calibrated(seed)[:1], PUBLISHED, INVERSE, seg, "epikv_lag_kv", *COMPARED]


@dataclass(frozen=True)
class Evaluation:
    """What is run on every seed's model."""

    tasks: tuple[str, ...]
    problems: int  # of each task
    split: str
    budgets: tuple[float, ...]
    policies: Callable[[Path], list[str]]
    slack: int = SLACK
    equal_protection: bool = True
    positions: str = "absolute"


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
    # One token a round, as the paper's methods evict.
    **{
        f"reproduction-{protection}-{positions}": Evaluation(
            _TASKS, 50, "test", (0.5, 0.35), compared, 0, protection == "equal", positions
        )
        for protection in ("equal", "published")
        for positions in ("absolute", "compact")
    },
}


def named(name: str) -> list[str]:
    """The evaluation of this name, or all whose names begin with it."""
    return [each for each in EVALUATIONS if each == name or each.startswith(f"{name}-")]


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
    status = processes.start(command, end=signal.SIGTERM).wait()
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
    command += [f"--problems={of.problems}", f"--slack={of.slack}", f"--positions={of.positions}"]
    command += [] if of.equal_protection else ["--published-protection"]
    command += [f"--task={task}" for task in of.tasks]
    command += [f"--budget={budget}" for budget in of.budgets]
    command += [f"--policy={policy}" for policy in of.policies(seed)]
    process = processes.start(command, end=signal.SIGTERM, stdout=subprocess.DEVNULL)
    status = process.wait()
    if status != 0:
        raise SystemExit(status)
    file = seed / f"{name}.jsonl"
    write(file, condense(out))
    return file

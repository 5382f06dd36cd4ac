"""The evaluations behind the model card and the page of claims, each one `epikv eval` a seed that
goes on where it was; and the calibrations that are shipped with the models."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from epikv import processes
from epikv.cli.eval_models import SHIPPED, exported
from epikv.eval.plan import RANDOM, SLACK
from epikv.sample.families import FAMILIES

from epikv_lab.sample.scores import Score, condense, joined, read, write

MODELS = Path(__file__).resolve().parents[3] / "sample_model"
PUBLISHED = "epikv_flat:layer_a=1,layer_b=3,sign=1"  # at their depths in this model
INVERSE = "epikv_flat:layer_a=1,layer_b=3,sign=-1"
AGED = (
    "epikv_probe:aged=true",
    "epikv_probe",
    "expected_attention",
    "dbtrimkv",
)
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


# What the papers of other policies claim, held against measurements: epikv_lab.sample.claims.
LOOKAHEAD = (
    "snapkv",
    "rkv",
    "laprox",
)  # score prompts by their newest tokens, or by tokens told ahead
CHUNK = (
    256  # of a prompt that kvzip reads once more: by default it is more than the context has left
)
OF_PROMPTS = (
    *("laq", "laq_plus", f"kvzip:chunk={CHUNK}", f"kvzip_plus:chunk={CHUNK}"),
    *("h2o", "expected_attention", "keydiff", "cur"),
)
DECORATED = ("snapkv", "defensive_kv")
DECORATORS = ("caote", "fast_caote", "vatp", "critical", "inertia", "twin")


# What is dropped goes below the cache: there a guard brings it back, or attention reads of it.
# The best of those that give tokens scores, each lane with a budget of its own.
GUARDED = ("expected_attention", "trimkv", "cur", "keydiff", "h2o")
# A quarter of a trace; and 32 of its tokens asked for by each query, or the one that it asks for most.
GUARD = {"tier_tokens": 128, "guard": 32}
GUARD_OF_ONE = {"tier_tokens": 128, "guard": 1}
FAR = ("sliding", "streaming_llm", "snapkv", "expected_attention", RANDOM)
FETCH = {"tier_tokens": 1280, "tier_fetch": 48}  # all that is dropped; read is a tenth of a trace
# All of it, where the next token is uncertain: by so many nats.
DOUBTING = ("epikv_forecast", "expected_attention", "cur", "sliding", RANDOM)
DOUBTS = [{**FETCH, "tier_fetch": 1280, "tier_doubt": nats} for nats in (0.01, 0.001)]
EPISODES = ("snapkv", "epicache")

# LaProx, its scores with a budget for each head, and attention's; a window that leaves a choice at 32.
NARROW = 8
UNIFIED = f"laprox:window={NARROW}"
BY_HEAD = f"laprox:allocator=uniform,window={NARROW}"
BY_ATTENTION = f"snapkv:window={NARROW}"

# What is added to a policy, beside that policy without it.
ADDED = {
    "obcache": "snapkv:kernel=7,pooling=max,window=16",
    "obcache:accumulate=true": "h2o",
    "infokv": "infokv:attention_share=1",
}

# Longer than any problem that the models were trained on, and solved all the same.
LONG = ("sample:passcode@34", "sample:ledger@26", "sample:alarms@34")
LAGGED = ("epikv_lag_kv", "epikv_flat", "raas", "rkv")

# A tier whose numbers have 8 bits, or 4.
PACKED = tuple({**FETCH, "tier_bits": bits} for bits in (8, 4))
PACKED_ARMS = ("streaming_llm", RANDOM)


WIDTHS = (8, 4, 2)  # bits of a number


def rounded(bits: int) -> str:
    """Whatever a thought is: not every seed's attention tells thoughts apart."""
    return f"thinkv_tbe:bits=[{bits},{bits},{bits}],layers=[0],theta1=0,theta2=1"


def varied(policy: str, fields: Mapping[str, float]) -> str:
    return " ".join([policy, *(f"{field}={value}" for field, value in fields.items())])


def with_lookahead(policy: str) -> str:
    return f"{policy}:queries=lookahead"


def decorated(policy: str, decorator: str) -> str:
    return f'{policy}:decorate=["{decorator}"]'


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
    budgets: tuple[float, ...]  # shares of a trace; or tokens
    policies: Callable[[Path], Sequence[str]]
    slack: int = SLACK
    equal_protection: bool = True
    positions: str = "absolute"
    steering: tuple[float, ...] = ()
    variants: Sequence[Mapping[str, float]] = ()  # each policy runs also with each of these
    lengths: bool = False  # outputs' lengths are kept, too
    parts: bool = False  # and which parts of a problem are right


_EPIKV = (sys.executable, "-c", "from epikv.cli import main; main()")
_TASKS = tuple(f"sample:{family}" for family in FAMILIES)

EVALUATIONS = {
    "tournament": Evaluation(
        _TASKS, 50, "test", (0.75, 0.5, 0.35, 0.25, 0.15), lambda seed: ["all"]
    ),
    "pair": Evaluation(_TASKS, 125, "pair", (0.5, 0.35, 0.25), flat_arms),
    "aged": Evaluation(_TASKS, 125, "aged", (0.5, 0.35, 0.25, 0.15), lambda seed: AGED),
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
    # The first are of prompts alone, and their budgets in tokens.
    "claims-prompt": Evaluation(
        tuple(f"solved:{family}" for family in FAMILIES),
        50,
        "claims",
        (256, 128, 64),
        lambda seed: [*LOOKAHEAD, *map(with_lookahead, LOOKAHEAD), *OF_PROMPTS],
    ),
    "claims-decorators": Evaluation(
        _TASKS,
        25,
        "claims",
        (0.5, 0.35),
        lambda seed: [
            arm for one in DECORATED for arm in (one, *(decorated(one, d) for d in DECORATORS))
        ],
    ),
    # At a budget that holds all, so that nothing is evicted.
    "claims-widths": Evaluation(
        _TASKS, 25, "claims", (1280,), lambda seed: [*map(rounded, WIDTHS)], lengths=True
    ),
    "claims-steering": Evaluation(
        _TASKS, 50, "claims", (0.5,), lambda seed: ["skipkv"], steering=(1, 2, 3), lengths=True
    ),
    "claims-guard": Evaluation(
        _TASKS, 25, "claims", (0.5, 0.25), lambda seed: [*GUARDED, RANDOM], variants=(GUARD,)
    ),
    "claims-guard-one": Evaluation(
        _TASKS, 25, "claims", (0.5, 0.25), lambda seed: [*GUARDED, RANDOM], variants=(GUARD_OF_ONE,)
    ),
    "claims-far": Evaluation(
        _TASKS, 25, "claims", (0.25, 0.15), lambda seed: FAR, variants=(FETCH,)
    ),
    "claims-doubt": Evaluation(
        _TASKS, 25, "claims", (0.15,), lambda seed: DOUBTING, variants=DOUBTS
    ),
    # Facts told once, at every depth of a trace and anywhere between two rounds, are asked for at its end.
    "claims-needles": Evaluation(
        ("sample:ledger",),
        100,
        "needles",
        (0.15,),
        lambda seed: DOUBTING,
        variants=DOUBTS[-1:],
        parts=True,
    ),
    "claims-episodes": Evaluation(
        tuple(f"solved:{family}" for family in FAMILIES),
        50,
        "claims",
        (256, 128, 64),
        lambda seed: EPISODES,
    ),
    "claims-laprox": Evaluation(
        tuple(f"solved:{family}" for family in FAMILIES),
        50,
        "claims",
        (128, 64, 32),
        lambda seed: [UNIFIED, BY_HEAD, BY_ATTENTION],
    ),
    "claims-added": Evaluation(
        _TASKS,
        25,
        "claims",
        (0.35,),
        lambda seed: [arm for pair in ADDED.items() for arm in pair],
    ),
    "claims-long": Evaluation(LONG, 25, "claims", (0.35,), lambda seed: LAGGED),
    "claims-packed": Evaluation(
        _TASKS, 25, "claims", (0.15,), lambda seed: PACKED_ARMS, variants=PACKED
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


def scores_of(name: str) -> dict[str, list[Score]]:
    """What an evaluation came to, of every seed on which it has been run."""
    files = {seed.name: seed / f"{name}.jsonl" for seed in folders()}
    return {seed: read(file) for seed, file in files.items() if file.exists()}


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


# How the gates that are shipped were trained, of problems `calibration/*`. Rates are higher than
# published: the models are a thousandth as wide, and gates begin at forgetting next to nothing.
GATES = {
    "trimkv": ("--budget=128", "--steps=1000", "--rate=1e-2"),
    "dbtrimkv": ("--budget=128", "--steps=1000", "--rate=1e-2"),
    "dms": ("--window=32", "--compression=4", "--steps=1000", "--rate=3e-3"),
    "kvzap": ("--instruction=", "--gap=32"),  # the models cannot repeat a text
    "epikv_forecast": (),
}
WITHOUT_WORK = ("kvzap", "epikv_forecast")  # those are fitted at once
GATE_PROBLEMS = 200  # of each family
FEWER_PROBLEMS = {"epikv_forecast": 50}


def train_gates(seed: Path, out: Path) -> None:
    """Trains what learned policies need of a seed's model, into the folder's artefacts; what was
    trained is not trained again. Exits as the command does; the same call goes on."""
    folder = seed / SHIPPED
    folder.mkdir(exist_ok=True)
    for policy, settings in GATES.items():
        file = folder / f"{policy}.json"
        if file.exists():
            continue
        command = [*_EPIKV, "calibrate", policy, str(exported(seed)), "-o", str(file)]
        command += settings
        problems = FEWER_PROBLEMS.get(policy, GATE_PROBLEMS)
        command += [f"--task={task}" for task in _TASKS] + [f"--problems={problems}"]
        command += [] if policy in WITHOUT_WORK else [f"--work={out / f'{policy}.work'}"]
        if status := processes.start(command, end=signal.SIGTERM).wait():
            raise SystemExit(status)


def measure(name: str, seed: Path, out: Path, only: Sequence[str] = (), daemons: int = 1) -> Path:
    """Runs an evaluation on a seed's folder, into `out`, and writes its scores into the folder.
    only: policies that have been registered since, to be added to what is there.

    Exits as `epikv eval` does, if it does not end well; the same call then goes on.
    """
    of = EVALUATIONS[name]
    command = [*_EPIKV, "eval", "--daemon-flag=threads=1", f"--daemons={daemons}"]
    command += ["--model-dir", str(seed), "--out", str(out), "--split", of.split]
    command += [f"--problems={of.problems}", f"--slack={of.slack}", f"--positions={of.positions}"]
    command += [] if of.equal_protection else ["--published-protection"]
    command += [f"--task={task}" for task in of.tasks]
    command += [f"--budget={budget}" for budget in of.budgets]
    command += [f"--policy={policy}" for policy in only or of.policies(seed)]
    command += [f"--steering={coefficient}" for coefficient in of.steering]
    command += ["--daemon-flag=kv_tier_bytes=1GiB"] if of.variants else []
    for fields in of.variants:
        command += ["--with", ",".join(f"{field}={value}" for field, value in fields.items())]
    process = processes.start(command, end=signal.SIGTERM, stdout=subprocess.DEVNULL)
    status = process.wait()
    if status != 0:
        raise SystemExit(status)
    file = seed / f"{name}.jsonl"
    found = condense(out, of.lengths, of.parts)
    write(file, joined(read(file), found) if only else found)
    return file

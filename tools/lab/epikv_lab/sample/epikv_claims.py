"""The generated parts of the reproduction page that no run of its own makes: what the EpiKV paper says
of Lag-KV, of training and of state.

They are made of tournament.jsonl, claims-long.jsonl and pair.jsonl in each seed's folder, and of what
`epikv bench policies --write` wrote into policies/README.md.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from epikv.eval.plan import RANDOM

from epikv_lab.bench.policies import BEGIN, END, README, SHAPE
from epikv_lab.sample.claims import TOURNAMENT, Claim, Scores, table
from epikv_lab.sample.measure import MODELS, PUBLISHED, calibrated, scores_of
from epikv_lab.sample.reproduction import CALIBRATED
from epikv_lab.sample.scores import table_row

LONG, PAIR = "claims-long", "pair"
LAG, LAG_KEY, FLAT = "epikv_lag_kv", "epikv_lag_kv_key", "epikv_flat"
CACHED = 4096  # tokens at which state is told as a share of K and V

LAG_OVER_RAAS = Claim("Lag-KV over RaaS", "37 and 33 of 100", LAG, "raas")
LAG_OVER_RKV = Claim("Lag-KV over R-KV", "", LAG, "rkv")
LAG_OVER_FLAT = Claim("Lag-KV over EpiKV-Flat", "37 and 33 of 100", LAG, FLAT)
OF_LAG = (
    LAG_OVER_RAAS,
    LAG_OVER_RKV,
    LAG_OVER_FLAT,
    Claim("Lag-KV over random eviction", "", LAG, RANDOM),
)
_ALL_LENGTHS = (
    Claim("Lag-KV over R-KV as its authors ran it", "", LAG, "rkv_epikv"),
    Claim("Lag-KV over RaaS by pages", "", LAG, "raas_page"),
    Claim("Lag-KV over Lag-KV-key", "", LAG, LAG_KEY),
    Claim("Lag-KV-key over RaaS", "", LAG_KEY, "raas"),
    Claim("Lag-KV-key over R-KV", "", LAG_KEY, "rkv"),
    Claim("Lag-KV-key over EpiKV-Flat", "", LAG_KEY, FLAT),
)
_H2O = "72 and 67 of 100"
UNTRAINED = Claim("The published pair over random eviction", "no training", PUBLISHED, RANDOM)
TRAINED = Claim("The calibrated pair over random eviction", "", CALIBRATED, RANDOM)
_PAIRS = (
    UNTRAINED,
    TRAINED,
    Claim("The calibrated pair over the published one", "", CALIBRATED, PUBLISHED),
    Claim("The published pair over H2O", _H2O, PUBLISHED, "h2o:scope=model"),
    Claim("The calibrated pair over H2O", _H2O, CALIBRATED, "h2o:scope=model"),
)
# Calibrated, as it is by default on these models.
_FLAT = tuple(
    Claim(f"EpiKV-Flat, calibrated, over {name}", theirs, FLAT, arm)
    for name, arm, theirs in (
        ("H2O, each head by itself", "h2o", _H2O),
        ("ThinKV as they had it", "thinkv", "72 and 71 of 100"),
        ("RaaS", "raas", ""),
        ("R-KV as they had it", "rkv_epikv", ""),
        ("R-KV", "rkv", ""),
        ("StreamingLLM", "streaming_llm", ""),
        ("random eviction", RANDOM, ""),
    )
)
_WITH_STATE = (FLAT, "epikv_seg", LAG_KEY, LAG, RANDOM, "raas", "h2o", "rkv", "snapkv")


@dataclass(frozen=True)
class Cost:
    """Of a policy, of one sequence of the shape that `epikv bench policies` measures."""

    step_share: float  # of a step's CPU time under `full`, at CACHED tokens
    bytes: tuple[int, int]  # of state at 512 and at CACHED tokens, without K and V

    @property
    def of_cache(self) -> float:
        """State over K and V of CACHED tokens."""
        return self.bytes[1] / (CACHED * TOKEN_BYTES)


TOKEN_BYTES = 2 * 2 * SHAPE["layers"] * SHAPE["kv_heads"] * (SHAPE["hidden"] // SHAPE["heads"])


def parts() -> dict[str, Callable[[], str]]:
    """What makes each part of the page, by its name."""
    return {
        "lag-claims": lambda: table(scores_of(TOURNAMENT), (*OF_LAG, *_ALL_LENGTHS)),
        "long-claims": lambda: table(scores_of(LONG), OF_LAG),
        "flat-claims": lambda: table(scores_of(TOURNAMENT), _FLAT),
        "pair-claims": lambda: table(with_pairs(), _PAIRS),
        "state": state,
    }


def with_pairs() -> Scores:
    """What `pair` came to, each seed's own pair under one name."""
    found = {}
    for seed, scores in scores_of(PAIR).items():
        [pair, *_] = calibrated(MODELS / seed) or [""]
        found[seed] = [replace(s, arm=CALIBRATED) if s.arm == pair else s for s in scores]
    return found


def costs() -> dict[str, Cost]:
    """Of each policy in the table of policies/README.md."""
    rows = README.read_text().split(BEGIN)[1].split(END)[0].splitlines()
    found = {}
    for row in rows:
        if row.startswith("| `"):
            name, _, _, shares, reserved, room = (cell.strip(" `") for cell in row.split("|")[1:-1])
            less, more = (int(count) - int(room) for count in reserved.split(" / "))
            # Of one over its target, that is said behind it.
            late = shares.split(" / ")[1].split()[0]
            share = float(late.rstrip("%")) / 100
            found[name] = Cost(share, (less, more))
    return found


def state() -> str:
    """Bytes of a sequence beyond K and V."""
    lines = [table_row("policy", "512 tokens", f"{CACHED} tokens", "of K and V there")]
    lines.append(table_row(*["---"] * 4))
    of = costs()
    for name in _WITH_STATE:
        less, more = of[name].bytes
        lines.append(table_row(f"`{name}`", f"{less:,}", f"{more:,}", f"{of[name].of_cache:.2%}"))
    return "\n".join(lines)

"""The table of what the founding documents claim: each claim with its comparator, their figure, ours,
a verdict, where more is said, and the command of someone with large weights; and these commands.

Ours are of the scores in each seed's folder, of policies/README.md's costs, and of figures that another
page has with its command.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import fsum

from epikv.eval.plan import FULL
from epikv.stats import Estimate, difference, ratio

from epikv_lab.sample import claims, epikv_claims
from epikv_lab.sample.claims import Claim, Scores, gain, having, judge
from epikv_lab.sample.epikv_claims import LAG_OVER_FLAT, LAG_OVER_RAAS, LAG_OVER_RKV, costs
from epikv_lab.sample.measure import (
    EVALUATIONS,
    FETCH,
    GUARD_OF_ONE,
    GUARDED,
    MODELS,
    PACKED,
    decorated,
    scores_of,
    varied,
)
from epikv_lab.sample.packets import TRAINED, TURN
from epikv_lab.sample.reproduction import reached, verdict
from epikv_lab.sample.scores import (
    NOT_RUN,
    Score,
    budgets_of,
    signed,
    solved,
    table_row,
)

ROOT = MODELS.parents[1]
BENCHMARKS = "docs/benchmarks.md"
REPRODUCTION = "REPRODUCTION.md"

PAPERS = {
    "EpiKV": "2606.26472",
    "OBCache": "2510.07651",
    "CAOTE": "2504.14051",
    "LaProx": "2605.07234",
    "InfoKV": "2606.26875",
    "SkipKV": "2512.07993",
    "TRIM-KV": "2512.03324",
    "DBTrimKV": "2605.09649",
    "LAQ": "2505.20334",
    "Guard": "2507.16242",
    "EpiCache": "2509.17396",
    "InfiniteKV": "",  # announced only
    "KV Packet": "2604.13226",
}


@dataclass(frozen=True)
class Found:
    """Ours: a figure with its interval and its number of problems, and what it says of the claim."""

    told: str
    verdict: str


@dataclass(frozen=True)
class Row:
    """A claim. where: a link to what says more. command: a call of one of FUNCTIONS, or another
    program; empty: there is none. before: what comes first, or why there is none."""

    paper: str
    claim: str
    comparator: str
    theirs: str
    ours: Callable[[], Found]
    where: str
    command: str = ""
    before: str = ""


# The functions that rows' commands are made of: policies alone differ.
DECODE, PROMPT, AIME, FAR = "decode", "prompt", "aime", "far"
FUNCTIONS = {
    DECODE: "epikv eval --task file:math500.jsonl --problems 500 --max-output-tokens 8192"
    " --template chat.txt --budget 1024 --budget 2048 --budget 4096",
    AIME: "epikv eval --task file:aime24.jsonl --problems 30 --max-output-tokens 16384"
    " --template chat.txt --budget 8192 --temperature 0.6 --top-p 0.95 --seeds 8",
    PROMPT: "epikv eval --task file:qasper.jsonl --problems 200 --template dataset2prompt.json"
    " --budget 256 --budget 512 --budget 1024",
    FAR: "epikv eval --task needle@50000 --problems 50 --budget 512 --positions cache",
}
SERVE = "epikv serve model.pt --kv_tier_bytes=16GiB --artefact_dir=artefacts"


def compared(
    scores: Scores, *compare: Claim, budgets: Sequence[str] = (), named: bool = False
) -> Found:
    """The least and the most gain, all seeds together, over budgets and over the claims; which are
    `named`. The verdict is on each claim, seed and budget."""
    scores = having(scores, compare)
    if not scores:
        return Found(NOT_RUN, "")
    pooled = [score for of in scores.values() for score in of]
    budgets = budgets or budgets_of(pooled)
    cells = {
        " at ".join(filter(None, [claim.less if named else "", budget])): gain(
            claim, pooled, budget
        )
        for claim in compare
        for budget in budgets
    }
    ends = dict.fromkeys(choose(cells, key=lambda at: cells[at].value) for choose in (min, max))
    told = " to ".join(signed(cells[at]) + (f" ({at})" if at else "") for at in ends)
    count = len(solved(pooled, compare[0].more, budgets[0]))
    return Found(f"{told}; n = {count}", judge(compare, scores, budgets))


def by_setting(*found: tuple[Scores, Claim]) -> Found:
    """Of how many settings the gain's interval is above 0: tasks at each budget, of each seed."""
    gains = [each for scores, claim in found for each in _settings(having(scores, [claim]), claim)]
    if not gains:
        return Found(NOT_RUN, "")
    above, below = sum(g.low > 0 for g in gains), sum(g.high < 0 for g in gains)
    told = f"above in {above}, below in {below} of {len(gains)} settings of 50 problems"
    return Found(told, verdict(gains))


def _settings(scores: Scores, claim: Claim) -> Iterator[Estimate]:
    for found in scores.values():
        for task in dict.fromkeys(score.task for score in found):
            mine = [score for score in found if score.task == task]
            for budget in budgets_of(mine):
                more, less = (solved(mine, arm, budget) for arm in (claim.more, claim.less))
                if len(more) == len(less) > 0:
                    yield difference(more, less)


def steered() -> Found:
    """Output tokens of the least steered over those of the same policy, by task and seed."""
    scores = scores_of(claims.STEERING)
    if not scores:
        return Found(NOT_RUN, "")
    coefficient = min(EVALUATIONS[claims.STEERING].steering)
    pooled = [score for of in scores.values() for score in of]
    plain, led = (_lengths(pooled, f"skipkv{of}") for of in ("", f" steered {coefficient:g}"))
    share = ratio(led, plain)
    told = f"{share.value:.3f} [{share.low:.3f}, {share.high:.3f}] of the tokens"
    fewer = Estimate(1 / share.value, 1 / share.high, 1 / share.low)
    return Found(f"{told}; n = {len(plain)} tasks of 50 problems", reached(fewer, 1.6))


def _lengths(found: Sequence[Score], arm: str) -> list[float]:
    return [score.tokens for score in found if score.arm == arm]


def throughput() -> Found:
    """A step under R-KV over one under SkipKV, at as many tokens; and if SkipKV were free."""
    of = costs()
    base = 1 + of["rkv"].step_share
    told = (
        f"{base / (1 + of['skipkv'].step_share):.2f} at as many tokens; {base:.2f} if it were free"
    )
    return Found(f"{told}; one window each", reached(Estimate.exact(base), 1.7))


def state(policy: str) -> Found:
    """Negligible is less than a hundredth of K and V."""
    of = costs()[policy]
    told = f"{of.bytes[1]:,} bytes beside 4096 tokens, {of.of_cache:.2%} of their K and V"
    return Found(told, "holds" if of.of_cache < 0.01 else "does not")


def kept_of_prompts() -> Found:
    """EpiCache beside the full cache, at the budget that is nearest to 4 to 6 times smaller."""
    scores = scores_of(claims.EPISODIC)
    near = Claim("", "", "epicache", FULL, or_equal=True)
    found = compared(scores, near, budgets=("128",))
    if not scores:
        return found
    shares = [
        1 - s.dropped
        for of in scores.values()
        for s in of
        if (s.arm, s.budget) == ("epicache", "128")
    ]
    times = len(shares) / fsum(shares)
    return Found(f"{found.told}, where {times:.1f} times as much was cached", found.verdict)


def tier_bytes() -> Found:
    """Of the tier's narrowest rows."""
    wide, narrow = (claims.tier_bytes(128, bits) for bits in (8, 4))
    told = f"{narrow} by 4 bits, {wide} by 8, in a head of 128"
    return Found(told, "does not" if narrow > 104 else "holds")


def rounded() -> Found:
    """Fetched rows of 4 bits beside the same as they were cached."""
    arms = [varied("streaming_llm", fields) for fields in (PACKED[1], FETCH)]
    claim = Claim("", "", arms[0], arms[1], or_equal=True)
    return compared(claims.with_tier(), claim, budgets=("15%",))


def quoted(page: str, *figures: str, told: str, verdict: str) -> Found:
    """What another page says. Raises ValueError if it no longer has these figures."""
    text = (ROOT / page).read_text()
    if missing := [figure for figure in figures if figure not in text]:
        raise ValueError(f"{page} does not say {', '.join(missing)}")
    return Found(told, verdict)


def _guarded() -> Found:
    """With its tier over without, at the smaller budget."""
    pairs = (Claim("", "", varied(one, GUARD_OF_ONE), one) for one in GUARDED)
    return compared(scores_of(claims.GUARDING_ONE), *pairs, budgets=("25%",), named=True)


def _fetched(beside: str, or_equal: bool) -> Callable[[], Found]:
    far = Claim("", "", varied("streaming_llm", FETCH), beside, or_equal)
    return lambda: compared(scores_of(claims.FETCHING), far)


def _learned(policy: str) -> Found:
    [claim] = (each for each in claims.LEARNED if each.more == policy and each.or_equal)
    return compared(scores_of(claims.TOURNAMENT), claim)


def _caote(policy: str) -> Found:
    pair = Claim("", "", decorated(policy, "caote"), policy)
    return compared(scores_of(claims.DECORATING), pair)


def _long(claim: Claim) -> Callable[[], Found]:
    return lambda: compared(scores_of(epikv_claims.LONG), claim)


def _tournament(more: str, less: str) -> Callable[[], Found]:
    return lambda: compared(scores_of(claims.TOURNAMENT), Claim("", "", more, less))


def _prompt(more: str) -> Callable[[], Found]:
    return lambda: compared(scores_of(claims.PROMPT), Claim("", "", more, "snapkv"))


# Links to the sections that say more.
_LAG = f"[Lag-KV]({REPRODUCTION}#lag-kv)"
_STATE = f"[state]({REPRODUCTION}#extra-state)"
_TRAINING = f"[training]({REPRODUCTION}#without-training)"
_ADDED = "[additions](#each-beside-what-it-is-added-to)"
_LAPROX = "[LaProx](#laprox-at-a-twentieth-of-a-prompt)"
_LEARNED = "[tournament](#scores-that-are-learned-and-others)"
_PROMPTS = "[prompts](#prompts-and-what-is-told-ahead)"
_DECORATORS = "[decorators](#decorators)"
_STEERING = "[steering](#does-steering-shorten-outputs)"
_DROPPED = "[tier](#what-is-dropped-and-not-gone)"
_EPISODES = "[episodes](#long-prompts-block-by-block)"
_PACKETS = "[packets](#documents-that-are-cached-alone)"
_COSTS = "[costs](../../policies/README.md#what-each-one-costs)"
_SESSIONS_BENCH = f"[sessions](../../{BENCHMARKS}#figures)"
_LAG_POLICIES = "aime --policy epikv_lag_kv --policy raas --policy rkv --policy epikv_flat"
_OBCACHE_RUN = (
    "decode --policy obcache --policy obcache:accumulate=true --policy h2o"
    " --policy snapkv:kernel=7,pooling=max,window=16"
)
_CAOTE_RUN = (
    """decode --policy snapkv --policy 'snapkv:decorate=["caote"]' --policy defensive_kv"""
    """ --policy 'defensive_kv:decorate=["caote"]'"""
)
_GATES_RUN = "decode --policy trimkv --policy dbtrimkv --policy expected_attention"
_FAR = "far --policy streaming_llm --with tier_tokens=65536,tier_fetch=1024,tier_bits=4"
_SESSIONS = "epikv bench sessions --server HOST:PORT"

ROWS = (
    Row(
        "EpiKV",
        "Lag-KV solves more than RaaS",
        "`raas`",
        "37 and 33 of 100: AIME-2024, K = 8192, n = 30",
        lambda: compared(scores_of(claims.TOURNAMENT), LAG_OVER_RAAS),
        _LAG,
        _LAG_POLICIES,
    ),
    Row(
        "EpiKV",
        "the same, on traces longer than trained on",
        "`raas`",
        "as above",
        _long(LAG_OVER_RAAS),
        _LAG,
        _LAG_POLICIES,
    ),
    Row(
        "EpiKV",
        "Lag-KV solves more than R-KV",
        "`rkv`",
        "code, no figures",
        lambda: compared(scores_of(claims.TOURNAMENT), LAG_OVER_RKV),
        _LAG,
        _LAG_POLICIES,
    ),
    Row(
        "EpiKV",
        "Lag-KV beats EpiKV-Flat on long traces",
        "`epikv_flat`",
        "37 and 33 of 100, n = 30",
        _long(LAG_OVER_FLAT),
        _LAG,
        _LAG_POLICIES,
    ),
    Row(
        "EpiKV",
        "negligible extra state: EpiKV-Flat",
        "K and V",
        "negligible",
        lambda: state("epikv_flat"),
        _STATE,
        "epikv bench policies --policies epikv_flat,epikv_lag_kv",
    ),
    Row(
        "EpiKV",
        "no extra memory: Lag-KV",
        "K and V",
        "none",
        lambda: state("epikv_lag_kv"),
        _STATE,
        "epikv bench policies --policies epikv_flat,epikv_lag_kv",
    ),
    Row(
        "EpiKV",
        "no training, no classifier: the published pair",
        "`random`",
        "not tested",
        lambda: compared(epikv_claims.with_pairs(), epikv_claims.UNTRAINED),
        _TRAINING,
        "decode --policy epikv_flat",
    ),
    Row(
        "EpiKV",
        "the same pair, calibrated on traces of the model",
        "`random`",
        "not tested",
        lambda: compared(epikv_claims.with_pairs(), epikv_claims.TRAINED),
        _TRAINING,
        "decode --policy epikv_flat",
        "`epikv calibrate epikv_flat`",
    ),
    Row(
        "OBCache",
        "consistently improves SnapKV",
        "its window's mean",
        "72.4 to 73.9 (RULER-4K)",
        lambda: compared(scores_of(claims.ADDING), claims.ADDITIONS[0]),
        _ADDED,
        _OBCACHE_RUN,
    ),
    Row(
        "OBCache",
        "consistently improves H2O",
        "`h2o`",
        "57.5 to 67.8 (RULER-4K)",
        lambda: compared(scores_of(claims.ADDING), claims.ADDITIONS[1]),
        _ADDED,
        _OBCACHE_RUN,
    ),
    Row(
        "CAOTE",
        "always improves: SnapKV",
        "`snapkv`",
        "39.6 to 40.7 (LongBench, 2k)",
        lambda: _caote("snapkv"),
        _DECORATORS,
        _CAOTE_RUN,
    ),
    Row(
        "CAOTE",
        "always improves: DefensiveKV",
        "`defensive_kv`",
        "not tested",
        lambda: _caote("defensive_kv"),
        _DECORATORS,
        _CAOTE_RUN,
    ),
    Row(
        "LaProx",
        "keeps quality at 5 % of the cache",
        "`full`",
        "roughly held on 19 sets",
        lambda: compared(scores_of(claims.LAPROX), claims.LAPROXES[0], budgets=("32",)),
        _LAPROX,
        "prompt --policy laprox --policy laprox:allocator=uniform --policy snapkv",
    ),
    Row(
        "LaProx",
        "one budget beats a budget for each head",
        "`laprox:allocator=uniform`",
        "on 19 sets",
        lambda: by_setting((scores_of(claims.LAPROX), claims.LAPROXES[1])),
        _LAPROX,
        "prompt --policy laprox --policy laprox:allocator=uniform --policy snapkv",
    ),
    Row(
        "LaProx",
        "beats attention's scores by head",
        "`snapkv`",
        "on 19 sets, half the loss",
        lambda: by_setting(
            *(
                (scores_of(name), Claim("", "", "laprox", "snapkv"))
                for name in (claims.TOURNAMENT, claims.PROMPT)
            ),
            (scores_of(claims.LAPROX), claims.LAPROXES[2]),
        ),
        _LAPROX,
        "prompt --policy laprox --policy laprox:allocator=uniform --policy snapkv",
    ),
    Row(
        "InfoKV",
        "beats scores of attention alone",
        "`infokv:attention_share=1`",
        "52.5 and 51.1 (LongReason, 40 %)",
        lambda: compared(scores_of(claims.ADDING), claims.ADDITIONS[2]),
        _ADDED,
        "decode --policy infokv --policy infokv:attention_share=1 --policy snapkv",
    ),
    Row(
        "InfoKV",
        "the same, beside SnapKV",
        "`snapkv`",
        "as above",
        _tournament("infokv", "snapkv"),
        _LEARNED,
        "decode --policy infokv --policy infokv:attention_share=1 --policy snapkv",
    ),
    Row(
        "SkipKV",
        "solves more",
        "`rkv`",
        "+26.7 % accuracy",
        _tournament("skipkv", "rkv"),
        _LEARNED,
        "decode --policy skipkv --policy rkv --steering 1",
    ),
    Row(
        "SkipKV",
        "steering shortens outputs",
        "without steering",
        "1.6 times fewer tokens",
        steered,
        _STEERING,
        "decode --policy skipkv --policy rkv --steering 1",
    ),
    Row(
        "SkipKV",
        "throughput",
        "`rkv`",
        "1.7 times",
        throughput,
        _COSTS,
        "epikv bench load --server HOST:PORT --arm skipkv:1024 --arm rkv:1024 --concurrency 16",
    ),
    Row(
        "TRIM-KV",
        "at or above the full cache",
        "`full`",
        "75.8 and 65.5 (AIME24, K = 4096)",
        lambda: _learned("trimkv"),
        _LEARNED,
        _GATES_RUN,
        "`epikv calibrate trimkv`",
    ),
    Row(
        "DBTrimKV",
        "at or above the full cache",
        "`full`",
        "+9.2 % on average",
        lambda: _learned("dbtrimkv"),
        _LEARNED,
        _GATES_RUN,
        "`epikv calibrate dbtrimkv`",
    ),
    Row(
        "LAQ",
        "LAQ solves more",
        "`snapkv`",
        "1 to 4 points (LongBench)",
        _prompt("laq"),
        _PROMPTS,
        "prompt --policy laq --policy laq_plus --policy snapkv",
    ),
    Row(
        "LAQ",
        "LAQ++ solves more",
        "`snapkv`",
        "1 to 4 points (LongBench)",
        _prompt("laq_plus"),
        _PROMPTS,
        "prompt --policy laq --policy laq_plus --policy snapkv",
    ),
    Row(
        "Guard",
        "right predictions: no more misses than the best",
        "Belady's",
        "1",
        lambda: quoted(
            "tools/lab/CLAIMS.md",
            "as many in each of 20 traces",
            told="1 in each of 20 traces",
            verdict="holds",
        ),
        _DROPPED,
        before="none: it is of traces",
    ),
    Row(
        "Guard",
        "wrong predictions: misses have a bound",
        "Belady's",
        "2 H(k-1) + 2: 7.2 for 8 slots",
        lambda: quoted(
            "tools/lab/CLAIMS.md",
            "3.43 times as many",
            told="3.43 at most, of 20 traces",
            verdict="holds",
        ),
        _DROPPED,
        before="none: it is of traces",
    ),
    Row(
        "Guard",
        "around a cache's policy: solves more",
        "the policy alone",
        "no KV cache was measured",
        _guarded,
        _DROPPED,
        "decode --policy h2o --policy expected_attention --with tier_tokens=1024,guard=1",
    ),
    Row(
        "EpiCache",
        "solves more",
        "`snapkv`",
        "up to +40 %",
        lambda: compared(scores_of(claims.EPISODIC), *claims.EPISODES),
        _EPISODES,
        "prompt --policy epicache --policy snapkv",
    ),
    Row(
        "EpiCache",
        "nearly as good as the full cache, compressed",
        "`full`",
        "4 to 6 times",
        kept_of_prompts,
        _EPISODES,
        "prompt --policy epicache --policy snapkv",
    ),
    Row(
        "EpiCache",
        "latency",
        "the whole cache",
        "2.4 times less",
        lambda: quoted(
            BENCHMARKS,
            ".79 [.74, .91]",
            told=".79 [.74, .91] of the time to the first token, turns 151 to 200",
            verdict="does not",
        ),
        _SESSIONS_BENCH,
        _SESSIONS,
    ),
    Row(
        "EpiCache",
        "memory",
        "the whole cache",
        "3.5 times less",
        lambda: quoted(
            BENCHMARKS,
            "Peak 13.1 MB at any length, the whole cache 19.7 to 78.8",
            told="1.5 to 6.0 times less in turns 50 to 200 of 96 tokens (one run)",
            verdict="holds of long ones",
        ),
        _SESSIONS_BENCH,
        _SESSIONS,
    ),
    Row(
        "InfiniteKV",
        "a token's K and V in so many bytes a head",
        "512 in bf16",
        "104",
        tier_bytes,
        _DROPPED,
        _FAR,
    ),
    Row(
        "InfiniteKV",
        "rows so packed are recalled as well",
        "rows as they were cached",
        "no figure",
        rounded,
        _DROPPED,
        _FAR,
    ),
    Row(
        "InfiniteKV",
        "a window finds what lies far behind it",
        "`streaming_llm`",
        "a passkey at 76,747 tokens, of 32,768 trained",
        _fetched("streaming_llm", or_equal=False),
        _DROPPED,
        _FAR,
    ),
    Row(
        "InfiniteKV",
        "recall in place of attention over all",
        "`full`",
        "no figure",
        _fetched(FULL, or_equal=True),
        _DROPPED,
        _FAR,
    ),
    Row(
        "KV Packet",
        "as good as recomputation",
        "read in turn",
        "comparable",
        lambda: compared(
            scores_of(claims.PACKETS), Claim("", "", TRAINED, TURN, or_equal=True), budgets=("",)
        ),
        _PACKETS,
        before="none; `epikv calibrate packet` trains its soft tokens",
    ),
)


def parts() -> dict[str, Callable[[], str]]:
    """What makes each part of the page, by its name."""
    return {"overview": overview, "overview-commands": commands}


def overview() -> str:
    """A row a claim."""
    heads = "paper", "claim", "beside", "theirs", "ours", "verdict", "more", "with large weights"
    lines = [table_row(*heads), table_row(*["---"] * len(heads))]
    for row in ROWS:
        found = row.ours()
        arxiv = PAPERS[row.paper]
        paper = f"[{row.paper}](https://arxiv.org/abs/{arxiv})" if arxiv else row.paper
        command = ", then ".join(filter(None, [row.before, row.command and f"`{row.command}`"]))
        cells = (row.claim, row.comparator, row.theirs, found.told, found.verdict, row.where)
        lines.append(table_row(paper, *cells, command))
    return "\n".join(lines)


def commands() -> str:
    """A block that runs what the rows name, each once."""
    lines = [SERVE]
    lines += [f'{name}() {{ {text} "$@"; }}' for name, text in FUNCTIONS.items()]
    called: dict[str, str] = {}
    for row in ROWS:
        if row.command.partition(" ")[0] in FUNCTIONS:
            called.setdefault(row.command, f"{row.paper.lower()}-{len(called)}")
    lines += [f"{text} --out {name}" for text, name in called.items()]
    return "\n".join(["```", *lines, "```"])

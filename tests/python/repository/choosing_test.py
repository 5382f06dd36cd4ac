"""docs/choosing-a-policy.md: its figures are those of the pages that were made from runs, and its lists those of the registry."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "choosing-a-policy.md").read_text()
POLICIES = (ROOT / "policies" / "README.md").read_text()
TOURNAMENT = (ROOT / "tools" / "sample_model" / "TOURNAMENT.md").read_text()
FIVE = ["expected_attention", "cur", "epikv_probe", "keydiff", "sliding"]
TRACE = ["75%", "50%", "35%", "25%", "15%"]
# What makes a policy refuse positions = cache, and compute its whole prompt: admission.cc and request.cc;
# at a prompt's end its newest queries are enough (prefix_cache.cc).
READS_ROWS = {"keys", "queries", "query_moments"}
NEEDS_FORWARD = {
    "prompt_attention",
    "queries",
    "query_moments",
    "logit_entropy",
    "residual_distance",
    "gate",
    "final_hidden",
}
# They need gates, which are trained for a model.
LEARNED = ["epikv_forecast", "dbtrimkv", "trimkv", "kvzap", "dms"]


def rows(text: str) -> dict[str, list[str]]:
    """The cells behind the first of each row that begins with a name, in order; of a name its first row."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if match := re.match(r"\| `([\w:=]+)`", line):
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            found.setdefault(match[1], cells[1:])
    return found


def section(title: str, text: str = PAGE) -> str:
    level = re.escape(title.split(" ")[0])
    _, _, rest = text.partition(f"\n{title}\n")
    assert rest, title
    return re.split(rf"^{level} ", rest, maxsplit=1, flags=re.MULTILINE)[0]


KEPT = {  # by policy: reasoning and recall, each by TRACE
    name: ([float(cell) for cell in cells[:5]], [float(cell) for cell in cells[5:]])
    for name, cells in rows((ROOT / "docs" / "what-policies-keep.md").read_text()).items()
}
REGISTRY = rows(POLICIES[POLICIES.index("<!-- table: begin") : POLICIES.index("<!-- table: end")])
COSTS = rows(POLICIES[POLICIES.index("<!-- costs: begin") : POLICIES.index("<!-- costs: end")])
NOT_TO_TAKE = {"full", "oracle", "random:frozen=true"}


def signals(name: str) -> set[str]:
    """With default parameters."""
    return set(REGISTRY[name][1].split(" or ")[0].split(", "))


def prompt_eviction(name: str) -> str:
    return REGISTRY[name][3].split(" or ")[0]


def added_up(name: str, share: str) -> float:
    return sum(axis[TRACE.index(share)] for axis in KEPT[name])


def names_in(text: str) -> set[str]:
    return set(re.findall(r"`(\w+)`", text)) & set(REGISTRY)


def paragraph(beginning: str) -> str:
    """A paragraph or an item of a list, up to the next one."""
    begin = PAGE.index(beginning)
    return re.split(r"\n\n|\n- ", PAGE[begin:])[0]


def test_shares_are_those_measured() -> None:
    shown = rows(section("## What they keep").split("### ")[0].split("These are means")[0])
    assert list(shown) == ["full", *FIVE, "random"]
    for name, cells in shown.items():
        expected = [" / ".join(f"{share:.2f}" for share in axis[1:]) for axis in KEPT[name]]
        assert cells == expected, name


def test_so_are_the_numbers_of_problems() -> None:
    told = (ROOT / "docs" / "what-policies-keep.md").read_text()
    assert "reasoning 150, recall 450" in told and "±0.08 and ±0.05" in told
    text = " ".join(section("## What they keep").split())
    assert "Reasoning: 150 problems in each figure." in text and "said once: 450." in text
    assert "±0.08 and ±0.05" in text


def cells_at(share: str) -> dict[str, dict[tuple[str, str], float]]:
    """By policy, of each seed and family."""
    found: dict[str, dict[tuple[str, str], float]] = {}
    for part in re.split(r"^### ", TOURNAMENT, flags=re.MULTILINE)[1:]:
        if match := re.match(r"(seed\d+), sample:(\w+), n = 50\n", part):
            for name, cells in rows(part).items():
                if cells[0] != "not run":
                    cell = cells[TRACE.index(share)].split()[0]
                    found.setdefault(name, {})[match[1], match[2]] = float(cell)
    return found


def test_worst_cells_are_the_worst() -> None:
    shown = rows(section("## What they keep").split("These are means")[1].split("###")[0])
    assert list(shown) == FIVE[:4]
    measured = cells_at("25%")
    for name, (worst, others) in shown.items():
        cells = measured[name]
        assert len(cells) == 12
        seed, family = min(cells, key=lambda cell: cells[cell])
        assert worst == f"{cells[seed, family]:.2f} (`{family}`, {seed})"
        rest = [value for (s, f), value in cells.items() if f == family and s != seed]
        assert others == ", ".join(f"{value:.2f}" for value in rest)


def test_costs_are_those_measured() -> None:
    shown = rows(section("## What each costs"))
    assert list(shown) == [*FIVE, "random"]
    a_token = int(COSTS["sliding"][4])  # K and V of the one that a round without slack takes
    for name, (share, held, tokens) in shown.items():
        assert [share, held] == COSTS[name][2:4], name
        small, large = (round(int(size) / a_token) for size in held.split(" / "))
        assert tokens == f"{small} / {large} tokens", name
    assert (
        f"memory of {rows(section('## What each costs'))['expected_attention'][2].split()[0]} tokens"
        in (rows(section("## Five to try"))["expected_attention"][1])
    )


def test_the_first_three_solve_most() -> None:
    others = set(KEPT) - NOT_TO_TAKE - set(LEARNED)
    for share in ("50%", "35%", "25%"):
        best = sorted(others, key=lambda name: -added_up(name, share))[:3]
        assert set(best) == set(FIVE[:3]), share
    for axis, first in ((0, "epikv_probe"), (1, "expected_attention")):
        assert max(others, key=lambda name: KEPT[name][axis][-1]) == first


def test_what_training_gives_is_told() -> None:
    shown = rows(section("### If you can train"))
    assert list(shown) == LEARNED
    for name, cells in shown.items():
        expected = [" / ".join(f"{share:.2f}" for share in axis[1:]) for axis in KEPT[name]]
        assert cells == expected, name

    def ranked(share: str) -> list[str]:
        return sorted(set(KEPT) - NOT_TO_TAKE, key=lambda name: added_up(name, share), reverse=True)

    assert ranked("25%")[:2] == ["epikv_forecast", "dbtrimkv"]
    assert ranked("15%")[0] == "epikv_forecast"
    for share in ("50%", "35%"):
        best = added_up(ranked(share)[0], share)
        assert added_up("epikv_forecast", share) > best - 0.02
    cells = cells_at("25%")["epikv_forecast"]
    seed, family = min(cells, key=lambda cell: cells[cell])
    told = " ".join(section("### If you can train").split())
    assert f"worst cell at 25 % is {cells[seed, family]:.2f} (`{family}`, {seed})" in told
    for name in ("epikv_forecast", "dbtrimkv"):
        small, large = COSTS[name][2].removesuffix(" (over)").split(" / ")
        assert f"costs {small} of a step at 512 cached tokens and {large} at 4096" in told
    small, large = COSTS["expected_attention"][2].split(" / ")
    assert f"`expected_attention` {small} and {large}" in told


def test_keydiff_is_the_best_of_those_that_evict_by_chunk() -> None:
    by_chunk = {name for name in REGISTRY if prompt_eviction(name) == "by_chunk"}
    by_chunk -= NOT_TO_TAKE | set(LEARNED)
    for share in ("35%", "25%", "15%"):
        assert max(by_chunk, key=lambda name: added_up(name, share)) == "keydiff"
    before = {n for n in by_chunk if added_up(n, "50%") > added_up("keydiff", "50%")}
    assert names_in(paragraph("`keydiff` solves most")) == before | {"keydiff"}
    assert max(axis[TRACE.index("35%")] for axis in KEPT["lagkv"]) < 0.05


def test_those_no_better_than_random_are_named() -> None:
    at = TRACE.index("50%")
    random = [axis[at] for axis in KEPT["random"]]
    alike = {
        name
        for name, axes in KEPT.items()
        if axes[0][at] <= random[0] + 0.0801 and axes[1][at] <= random[1] + 0.0501
    }
    told = names_in(paragraph("**In place of many other policies.**"))
    assert told - {"random"} == alike - {"random", "random:frozen=true"}
    solve = {name for name in set(KEPT) - NOT_TO_TAKE if KEPT[name][0][-1] > 0.05}
    assert names_in(paragraph("**At 15 %, on reasoning")) == solve


@pytest.mark.parametrize(
    ("beginning", "expected"),
    [
        (
            "**A prompt over the budget** is refused",
            {name for name in REGISTRY if prompt_eviction(name) == "refuses"} | {"h2o"},
        ),
        ("**`positions = cache`** is", {name for name in REGISTRY if signals(name) & READS_ROWS}),
        (
            "**Cached prefixes** are not",
            {
                name
                for name in REGISTRY
                if (seen := signals(name) & NEEDS_FORWARD)
                and not (prompt_eviction(name) == "at_end" and seen == {"queries"})
            },
        ),
    ],
)
def test_who_refuses_is_told_whole(beginning: str, expected: set[str]) -> None:
    assert names_in(paragraph(beginning)) == expected


def test_who_refuses_is_told_of_the_five() -> None:
    lines = section("## Who refuses what").strip().splitlines()
    assert re.findall(r"`(\w+)`", lines[0]) == FIVE
    table = {
        line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]]
        for line in lines[2:]
        if line.startswith("|")
    }
    words = {
        "at_end": "read whole, then evicted",
        "refuses": "refused",
        "by_chunk": "evicted by chunk",
    }
    assert table["a prompt over the budget"] == [words[prompt_eviction(name)] for name in FIVE]
    refused = ["refused" if signals(name) & READS_ROWS else "yes" for name in FIVE]
    assert table["`positions = cache`"] == refused
    starts = ["no" if signals(name) & NEEDS_FORWARD else "yes" for name in FIVE]
    assert table["starts from cached prefixes"] == starts


def test_what_the_code_decides_by_is_what_this_test_decides_by() -> None:
    """The two sets above, from the sources."""

    def named(path: str, begin: str, end: str) -> set[str]:
        _, _, rest = (ROOT / path).read_text().partition(begin)
        return set(re.findall(r"Signal::k(\w+)", rest.partition(end)[0]))

    def camel(names: set[str]) -> set[str]:
        return {"".join(word.capitalize() for word in name.split("_")) for name in names}

    admission = named("runtime/admission/admission.cc", "bool ReadsRows(", "\n}")
    assert admission == camel(READS_ROWS)
    prefixes = named("runtime/request/request.cc", "kOfPrompts[] = {", "};")
    assert prefixes == camel(NEEDS_FORWARD)

"""docs/writing-a-policy.md: it shows the policy that a C++ test builds, and what else it gives to paste fits it."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = sorted((ROOT / "docs" / "examples").glob("*.cc"))
PAGE = (ROOT / "docs" / "writing-a-policy.md").read_text()
POLICY = ROOT / "docs" / "examples" / "every_nth.cc"
NAME, SYMBOL = "every_nth", "kEveryNth"
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def blocks(language: str = "") -> list[str]:
    return [text for of, text in BLOCKS if of.replace("text", "") == language]


def times_divided(index: int, n: int) -> int:
    if index == 0:
        return 31
    times = 0
    while index % n == 0:
        index //= n
        times += 1
    return times


def test_the_page_shows_the_file() -> None:
    assert blocks("cpp")[0] == POLICY.read_text()


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_every_example_is_built_by_a_test(example: Path) -> None:
    include = f'#include "{example.relative_to(ROOT).as_posix()}"'
    sources = (ROOT / "tests").rglob("*_test.cc")
    assert any(include in source.read_text() for source in sources)


def test_the_file_defines_what_the_page_names() -> None:
    text = POLICY.read_text()
    assert f"extern constinit const PolicySpec {SYMBOL}{{" in text
    assert f'.name = "{NAME}"' in text
    assert f"cp docs/examples/{POLICY.name} policies/geometry/{NAME}.cc" in PAGE


def test_the_lines_for_the_registry_are_like_those_that_are_there() -> None:
    registered = (ROOT / "policies" / "registry.cc").read_text()
    declared, listed = blocks("cpp")[1:]
    for line in (declared, listed):
        words = line.replace(SYMBOL, "kEpikvSeg").split()
        assert any(other.split() == words for other in registered.splitlines()), line
    # The list's comments are aligned, as clang-format leaves them.
    column = {other.index("//") for other in registered.splitlines() if other.endswith("//")}
    assert {listed.rstrip().index("//")} == column


def scenario() -> tuple[dict[str, str], list[str]]:
    """The settings of the page's scenario, and its picture."""
    (text,) = (block for block in blocks() if "keep " in block)
    header, keep = (line for line in text.splitlines() if not line.startswith("#"))
    policy, *settings = header.split()
    assert policy == NAME
    name, *picture = keep.split()
    assert name == "keep"
    return dict(setting.split("=") for setting in settings), picture


def test_the_picture_is_what_the_policy_keeps() -> None:
    """Reckoned here once more, without a line of the policy's."""
    settings, picture = scenario()
    prompt, recent = int(settings["prompt"]), int(settings["recent"])
    tokens = len(picture)
    excess = tokens - int(settings["budget"])
    open_tokens = [index for index in range(tokens) if prompt <= index < tokens - recent]
    victims = sorted(open_tokens, key=lambda index: (times_divided(index, 2), index))[:excess]
    assert picture == ["." if index in victims else "#" for index in range(tokens)]
    scores = [times_divided(index, 2) for index in open_tokens]
    worst_kept = min(times_divided(i, 2) for i in open_tokens if i not in victims)
    assert scores.count(worst_kept) > 1 and any(
        times_divided(i, 2) == worst_kept for i in victims
    ), "a scenario without a tie"


def test_the_scenario_is_written_as_the_others_are() -> None:
    head = (ROOT / "tests" / "golden" / "scenarios.txt").read_text().partition("\n\n")[0]
    settings, _ = scenario()
    assert all(re.search(rf"\b{name}\b", head) for name in settings)


def test_the_picture_of_scores_is_right() -> None:
    """Of the first block: the scores, and which two go."""
    rows = {}
    for line in blocks()[0].splitlines():
        label, rest = line[:22].strip(), line[22:]
        rows[label] = [rest[at : at + 5].strip() for at in range(0, 40, 5)]
    index = [int(word) for word in rows["index of its token"]]
    scores = [int(word) for word in rows["score for n = 2"]]
    assert scores == [times_divided(token, 2) for token in index]
    protected = [word == "x" for word in rows["protected"]]
    assert protected == [token in (0, 1, 7, 8) for token in index]
    unprotected = [slot for slot in range(len(index)) if not protected[slot]]
    lowest = sorted(unprotected, key=lambda slot: (scores[slot], index[slot]))[:2]
    marked = [slot for slot, word in enumerate(rows["two have to go"]) if word == "x"]
    assert marked == sorted(lowest)


def test_the_sentence_describes_it_as_the_others_are_described() -> None:
    (sentence,) = (block for block in blocks() if block.startswith(f"- **{NAME}**: "))
    assert len(sentence.partition(": ")[2]) >= 20  # as policy_registry_test.cc asks

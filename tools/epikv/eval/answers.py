"""Final answers of mathematical problems: where they stand in a completion, and when two are equal.

The rules are those usual for MATH (Hendrycks et al.) and of the EpiKV authors' harness: the last
boxed span, compared as a string after normalisation; besides, as exact rational numbers, and lists
by their items. Nothing is evaluated, so no completion can hang or break the comparison.
"""

import re
from fractions import Fraction

_BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_SPACES = re.compile(r"\s+|\\[,;:! ]|~|\\quad|\\qquad")
_TEXT = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")
_UNIT = re.compile(r"(?<=[\d}$)])\s*\\(?:text|mathrm|mbox)\s*\{[^{}]*\}(\^\{?\d\}?)?$")
_THOUSANDS = re.compile(r"[+-]?\d{1,3}(,\d{3})+(\.\d+)?")
_NUMBER = re.compile(r"([+-]?)(\d{1,60}(?:\.\d{0,60})?|\.\d{1,60})")
_FRACTION = re.compile(r"([+-]?)(?:\\frac\{(-?\d{1,60})\}\{(\d{1,60})\}|(\d{1,60})/(\d{1,60}))")
_BRACKETS = {"(": ")", "[": "]", "{": "}"}


def extract(completion: str) -> str | None:
    """The last boxed span; without one, what stands behind the last `####`, as in GSM8K."""
    boxed = last_boxed(completion)
    if boxed is not None:
        return boxed
    _, found, tail = completion.rpartition("####")
    answer = tail.strip().split("\n")[0].strip()
    return answer if found and answer else None


def last_boxed(text: str) -> str | None:
    """The content of the last \\boxed{} or \\fbox{} that is closed."""
    open_braces: list[int | None] = []  # where a box's content begins; None: not a box
    begin, end = -1, -1
    for token in _BRACES.finditer(text):
        if token[0] == "{":
            open_braces.append(None)
        elif token[0] == "}":
            start = open_braces.pop() if open_braces else None
            if start is not None and start > begin:
                begin, end = start, token.start()
        elif token[0].endswith("{") and len(token[0]) > 2:
            open_braces.append(token.end())
    return text[begin:end] if begin >= 0 else None


def same(answer: str | None, truth: str) -> bool:
    """Whether an extracted answer is the expected one."""
    return answer is not None and _equal(normalise(answer), normalise(truth))


def normalise(answer: str) -> str:
    """One spelling of what is written in many ways: spaces, units, fractions, roots."""
    text = answer.strip().strip("$").strip()
    text = text.rstrip(".").replace("\\$", "").replace("$", "").replace("\\%", "").replace("%", "")
    text = _UNIT.sub("", text)
    text = _TEXT.sub(r"\1", text)
    text = re.sub(r"\\(?:left|right)(?![a-zA-Z])\.?", "", text)
    text = re.sub(r"\\[dtc]frac", r"\\frac", text)
    text = re.sub(r"\^\s*(?:\\circ|\{\s*\\circ\s*\})|\\degree", "", text)
    text = text.replace("{,}", "").replace("\\{", "{").replace("\\}", "}")
    text = _SPACES.sub("", text)
    left, equals, right = text.partition("=")
    if equals and len(left) <= 2 and left.isalpha() and "=" not in right:
        text = right
    if _THOUSANDS.fullmatch(text):
        text = text.replace(",", "")
    text = re.sub(r"\\frac(\d|[a-zA-Z])(\d|[a-zA-Z])", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac(\d)\{", r"\\frac{\1}{", text)
    text = re.sub(r"\\sqrt(\d|[a-zA-Z])", r"\\sqrt{\1}", text)
    return re.sub(r"(?<![\d.])\.(?=\d)", "0.", text)


def _equal(a: str, b: str) -> bool:
    if a == b or (a.isalpha() and a.casefold() == b.casefold()):
        return True
    one, other = _rational(a), _rational(b)
    if one is not None and other is not None:
        return one == other
    brackets, items = _items(a)
    other_brackets, others = _items(b)
    if len(items) == 1 or len(items) != len(others) or brackets != other_brackets:
        return False
    if brackets in ("", "{"):  # a set
        return _matched(items, others)
    return all(map(_equal, items, others))


def _matched(items: list[str], others: list[str]) -> bool:
    """Whether each item has a partner of its own among the others."""
    left = list(others)
    for item in items:
        partner = next((other for other in left if _equal(item, other)), None)
        if partner is None:
            return False
        left.remove(partner)
    return True


def _rational(text: str) -> Fraction | None:
    """The exact value of an integer, a decimal or a fraction of integers."""
    if match := _NUMBER.fullmatch(text):
        value = Fraction(match[2].rstrip(".") if match[2] != "." else "0")
        return -value if match[1] == "-" else value
    if match := _FRACTION.fullmatch(text):
        over, under = (match[2], match[3]) if match[2] else (match[4], match[5])
        if int(under) == 0:
            return None
        value = Fraction(int(over), int(under))
        return -value if match[1] == "-" else value
    return None


def _items(text: str) -> tuple[str, list[str]]:
    """A list's brackets, "" where it has none, and its parts between commas at the outer level."""
    brackets = ""
    if text[:1] in _BRACKETS and text[-1:] in ")]}":  # [2,5) has two kinds
        opening, closing = text[0], text[-1]
        brackets = opening if _BRACKETS[opening] == closing else opening + closing
        text = text[1:-1]
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return brackets, parts

"""What formats are made of: constant texts, dates, fields, and what is taken off contents."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

Now = Callable[[str], str]  # a strftime format to what it is now

# White space is what str.isspace() says, beyond ASCII, too.
STRIPS: dict[str, Callable[[str], str]] = {
    "none": lambda text: text,
    "both": str.strip,
    "left": str.lstrip,
    "right": str.rstrip,
    "newlines": lambda text: text.strip("\n"),
    "left_newlines": lambda text: text.lstrip("\n"),
}


class Refusal(ValueError):
    """Why there is no format, or why a format does not take a conversation."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Refusal) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))


@dataclass(frozen=True)
class Date:
    """Today, as strftime writes it."""

    format: str


@dataclass(frozen=True)
class Field:
    """What a call or a result has under this name."""

    name: str


Text = tuple[str | Date, ...]
Pieces = tuple[str | Field, ...]


def literal(text: str) -> tuple[str, ...]:
    return (text,) if text else ()


def written(text: Text, now: Now) -> str:
    return "".join(now(part.format) if isinstance(part, Date) else part for part in text)


def filled(pieces: Pieces, fields: Mapping[str, str]) -> str:
    return "".join(fields[p.name] if isinstance(p, Field) else p for p in pieces)

"""What /metrics answers, as tests look at it: by the parser of the Prometheus client library."""

from collections.abc import Set
from dataclasses import dataclass
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families


class Series(NamedTuple):
    """Of a histogram or summary: all its samples."""

    family: str
    labels: frozenset[tuple[str, str]]


@dataclass
class Family:
    type: str
    help: str
    values: dict[frozenset[tuple[str, str]], float]  # of a histogram or summary: its counts


def parse(text: str) -> dict[str, Family]:
    """The families of a page by name. Raises ValueError for what is no valid page."""
    families = {}
    for parsed in text_string_to_metric_families(text):
        name = parsed.name + ("_total" if parsed.type == "counter" else "")
        assert name not in families, f"{name} comes twice"
        parts = {"histogram": f"{name}_count", "summary": f"{name}_count"}
        value_of = parts.get(parsed.type, name)
        values: dict[frozenset[tuple[str, str]], float] = {}
        for sample in parsed.samples:
            if sample.name != value_of:
                continue
            labels = frozenset(sample.labels.items())
            assert labels not in values, f"{name}{dict(labels)} comes twice"
            values[labels] = sample.value
        families[name] = Family(parsed.type, parsed.documentation, values)
    return families


def moved(before: dict[str, Family], after: dict[str, Family]) -> Set[Series]:
    """Series whose values differ. A new one counts unless it is 0."""
    found = set()
    for name, family in after.items():
        old = before[name].values if name in before else {}
        for labels, value in family.values.items():
            if value != old.get(labels, 0):
                found.add(Series(name, labels))
    return found

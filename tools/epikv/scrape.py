"""A daemon's /metrics, as numbers."""

import re
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass

_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

Series = tuple[str, frozenset[tuple[str, str]]]  # name and labels, `model` left out


@dataclass(frozen=True)
class Page:
    """Every series of one moment, or what was added between two."""

    values: Mapping[Series, float]

    def value(self, name: str, **labels: str) -> float:
        """Of the series with exactly these labels, of all models together; 0 if there is none yet."""
        return self.values.get((name, frozenset(labels.items())), 0.0)

    def total(self, name: str, **labels: str) -> float:
        """Of all series of this name that have these labels, among others."""
        wanted = set(labels.items())
        return sum(v for (n, has), v in self.values.items() if n == name and wanted <= has)

    def __add__(self, more: "Page") -> "Page":
        series = {**self.values, **more.values}
        return Page({each: self.values.get(each, 0) + more.values.get(each, 0) for each in series})

    def __sub__(self, before: "Page") -> "Page":
        return Page({series: v - before.values.get(series, 0) for series, v in self.values.items()})


def scrape(address: str) -> Page:
    """The page at host:port."""
    return parse(fetch(address))


def fetch(address: str) -> str:
    """The page at host:port, as text."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as reply:
        return reply.read().decode()


def parse(text: str) -> Page:
    """The values of a page in Prometheus' text format."""
    values: dict[Series, float] = {}
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        series, _, value = line.rpartition(" ")
        name, _, labels = series.partition("{")
        found = frozenset(pair for pair in _LABEL.findall(labels) if pair[0] != "model")
        values[name, found] = values.get((name, found), 0) + float(value)
    return Page(values)
